"""Tokens per second of a recipe, in turn with a nanoGPT checkout training the same shape.

    python -m tools.against_nanogpt configs/shakespeare_char_cpu.toml --nanogpt PATH
    python -m tools.against_nanogpt configs/gpt2_124m.toml --nanogpt PATH --random-tokens -- \\
        --batch-size 64 --micro-batch-size 16 --compile

Flags after `--` are train.py's. nanoGPT steps as its train.py does on the device at hand: float32 on a CPU, autocast
to bfloat16 and fused AdamW on CUDA; compiled if we are. Each side has a process of its own; they take turns, on the
same batches. The second command is for one GPU, takes under eight minutes, most of it compilation, and needs no data
set. Prints one line of JSON:

    {"device": its name, "torch": its version, "tokens_per_step": tokens of one optimizer step,
     "ours" and "nanogpt": {"tokens_per_s": median over the rounds, "mfu": share of the device's peak or null,
                            "peak_gib": most memory, of tensors on CUDA, of the process on a CPU},
     "ratio": {"median": ours over nanogpt within a round, "low": first quartile, "high": third quartile}}
"""

import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import tyro
from pydantic.dataclasses import dataclass

from base.cli import UserError
from configs import STRICT, Config, command_line, load_config, replace, require, user_error
from data import Dataset, open_dataset
from tools import throughput
from tools.output import say
from training.clock import flops_per_token, peak_flops
from training.parallel import Runtime
from training.setup import accumulation, choose_device, open_data, start
from training.trainer import Trainer

WARM_UP = 3  # optimizer steps before the first round
RANDOM_TOKENS = 2**22
SHAPE = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")  # of GPTConfig


@dataclass(frozen=True, config=STRICT)
class Options:
    """Tokens per second against nanoGPT's. Flags of train.py follow after `--`, as in `-- --batch-size 4`."""

    recipe: tyro.conf.Positional[str]
    """A recipe, as for train.py."""
    nanogpt: str
    """Folder of a nanoGPT checkout."""
    rounds: int = 7
    """How often the two take turns."""
    steps: int = 5
    """Optimizer steps of a turn."""
    random_tokens: bool = False
    """Train on random tokens, without a data set."""

    def __post_init__(self):
        throughput.check_rounds(self.rounds)
        require(self.steps >= 1, f"--steps is {self.steps}; a turn wants at least 1")


def load_nanogpt(folder: str) -> ModuleType:
    """The checkout's model.py. Raises UserError if there is none, or it is not nanoGPT's."""
    path = Path(folder) / "model.py"
    if not path.is_file():
        raise UserError(f"--nanogpt: {path} does not exist")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    try:
        spec.loader.exec_module(module)
        have = {f.name for f in dataclasses.fields(module.GPTConfig)} | set(dir(module.GPT))
    except (Exception, SystemExit) as e:  # it is a program like any other
        why = f"{type(e).__name__}: {e}".partition("\n")[0]
        raise UserError(f"--nanogpt: {path} is not nanoGPT's model.py ({why})") from None
    missing = [name for name in (*SHAPE, "configure_optimizers") if name not in have]
    if missing:
        raise UserError(f"--nanogpt: {path} is not nanoGPT's model.py: it has no {missing[0]}")
    return module


class Peer(Trainer):
    """nanoGPT's model on our batches, and a step as its train.py makes it."""

    def __init__(self, config: Config, runtime: Runtime, dataset: Dataset, module: ModuleType):
        self.config, self.runtime, self.block_size = config, runtime, config.model.block_size
        self.accumulation, self.micro_batch = accumulation(config, runtime.world)
        self.open(dataset)
        device, optim = runtime.device.type, config.optim
        shape = module.GPTConfig(**{name: getattr(config.model, name) for name in SHAPE})
        self.model = module.GPT(shape).to(runtime.device)
        betas = (optim.beta1, optim.beta2)
        self.optimizer = self.model.configure_optimizers(optim.weight_decay, optim.lr, betas, device)
        self.module = torch.compile(self.model) if config.run.compile else self.model
        self.cast = contextlib.nullcontext()
        if device == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            self.cast = torch.autocast("cuda", torch.bfloat16)

    def step(self, index: int, watch: bool) -> None:
        for micro_step in range(self.accumulation):
            tokens, targets = self.to_device(*self.batches.batch(index, self.rows(micro_step)))
            with self.cast:
                loss = self.module(tokens, targets)[1] / self.accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def make_ours(config: Config) -> Trainer:
    config, runtime = start(config)
    return Trainer(config, runtime, open_dataset(config.data.dataset))


def make_peer(config: Config, folder: str) -> Peer:
    runtime = Runtime(torch.device(choose_device(config.run.device)))
    return Peer(config, runtime, open_dataset(config.data.dataset), load_nanogpt(folder))


trainer: Trainer  # in the process of a side


def begin(make: Callable[..., Trainer], *arguments) -> None:
    global trainer
    trainer = make(*arguments)


def seconds(indices: range) -> float:
    """Seconds per step."""

    def steps() -> None:
        for index in indices:
            trainer.step(index, watch=False)

    return throughput.seconds(steps, trainer.runtime.device) / len(indices)


def peak_memory() -> int:
    """The most bytes so far."""
    if trainer.runtime.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    import resource  # Unix only

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def facts() -> tuple[str, int, int]:
    """(device, tokens per step, FLOPs per token) of our side."""
    cuda = trainer.runtime.device.type == "cuda"
    device = torch.cuda.get_device_name() if cuda else trainer.runtime.device.type
    tokens = trainer.config.optim.batch_size * trainer.block_size
    return device, tokens, flops_per_token(trainer.model)


def compare(options: Options, config: Config) -> dict[str, Any]:
    load_nanogpt(options.nanogpt)
    with contextlib.ExitStack() as stack:
        config = stack.enter_context(with_data(config, options.random_tokens))

        def process(make: Callable[..., Trainer], *arguments) -> ProcessPoolExecutor:
            spawn = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(max_workers=1, mp_context=spawn))
            pool.submit(begin, make, *arguments).result()
            pool.submit(seconds, range(WARM_UP)).result()
            return pool

        sides = {"ours": process(make_ours, config), "nanogpt": process(make_peer, config, options.nanogpt)}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(options.rounds):
            first = WARM_UP + turn * options.steps
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                indices = range(first, first + options.steps)
                times[name].append(sides[name].submit(seconds, indices).result())
        peaks = {name: side.submit(peak_memory).result() for name, side in sides.items()}
        return summary(times, peaks, *sides["ours"].submit(facts).result())


@contextlib.contextmanager
def with_data(config: Config, random_tokens: bool) -> Iterator[Config]:
    """The configuration with its vocabulary, and data that exist. Raises UserError or UserError."""
    if not random_tokens:
        yield open_data(config, Runtime(torch.device("cpu")))[0]
        return
    if not 0 < config.model.vocab_size <= 2**16:
        raise UserError("--random-tokens wants a vocabulary: --vocab-size N after `--`, of at most 65,536")
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(config.model.vocab_size, size=RANDOM_TOKENS)
        for split in ("train", "val"):
            tokens.astype("<u2").tofile(Path(folder, f"{split}.bin"))
        yield replace(config, "data", dataset=folder)


def summary(
    times: dict[str, list[float]], peaks: dict[str, int], device: str, tokens: int, flops: int
) -> dict[str, Any]:
    """The line that is printed, of seconds per step in each turn and bytes."""
    limit = peak_flops(device)
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "tokens_per_step": tokens}
    for name, own in times.items():
        rate = tokens / statistics.median(own)
        mfu = rate * flops / limit if limit else None
        found[name] = {"tokens_per_s": rate, "mfu": mfu, "peak_gib": peaks[name] / 2**30}
    ratios = [a / b for a, b in zip(times["nanogpt"], times["ours"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return found | {"ratio": {"median": median, "low": low, "high": high}}


def main(argv: Sequence[str]) -> None:
    try:
        end = argv.index("--") if "--" in argv else len(argv)
        options = command_line(Options, argv[:end], "python -m tools.against_nanogpt")
        say(json.dumps(compare(options, load_config([options.recipe, *argv[end + 1 :]]))))
    except UserError as e:
        user_error(str(e))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Tokens per second of a recipe, in turn with a nanoGPT checkout training the same shape.

    python -m tools.against_nanogpt configs/shakespeare_char_cpu.toml --nanogpt PATH
    python -m tools.against_nanogpt configs/gpt2_124m.toml --nanogpt PATH --random-tokens -- \\
        --batch-size 64 --micro-batch-size 16 --compile

Flags after `--` are train.py's. nanoGPT steps as its train.py does on the device at hand: float32 on a CPU, autocast
to bfloat16 and fused AdamW on CUDA; compiled if we are. Each side has a process of its own; they start and compile
at the same time and then take turns, on the same batches. The second command is for one GPU and needs no data set.
Prints one line of JSON:

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
from pydantic.dataclasses import dataclass

from base.cli import STRICT, Count, UserError, run
from base.flags import Positional, options
from base.timing import in_turn, relative
from configs import Config, load_config, replace
from data import open_dataset
from data.batches import TrainBatches
from model import GPT
from tools.profile.steps import WARM_UP, Rounds, Steps, apart, steps_of
from training.clock import flops_per_token, peak_flops
from training.parallel import Runtime
from training.setup import accumulation, check_division, choose_device, open_data

RANDOM_TOKENS = 2**22
SHAPE = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")  # of GPTConfig

Times = dict[str, list[float]]  # seconds per step of every side, a number per round


@dataclass(frozen=True, config=STRICT)
class Options:
    """Tokens per second against nanoGPT's. Flags of train.py follow after `--`, as in `-- --batch-size 4`."""

    recipe: Positional[str]
    """A recipe, as for train.py."""
    nanogpt: str
    """Folder of a nanoGPT checkout."""
    rounds: Rounds = 7
    """How often the two take turns."""
    steps: Count = 5
    """Optimizer steps of a turn."""
    random_tokens: bool = False
    """Train on random tokens, without a data set."""


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


class Peer:
    """nanoGPT's model on our batches, and a step as its train.py makes it: for `Steps`, in a trainer's place."""

    def __init__(self, config: Config, folder: str):
        self.config, optim = config, config.optim
        self.runtime = Runtime(torch.device(choose_device(config.run.device)))
        self.batches = TrainBatches(
            open_dataset(config.data.dataset).train,
            block_size=config.model.block_size,
            batch_size=optim.batch_size,
            seed=config.run.seed,
        )
        module, device = load_nanogpt(folder), self.runtime.device.type
        shape = module.GPTConfig(**{name: getattr(config.model, name) for name in SHAPE})
        self.model = module.GPT(shape).to(self.runtime.device)
        betas = (optim.beta1, optim.beta2)
        self.optimizer = self.model.configure_optimizers(optim.weight_decay, optim.lr, betas, device)
        self.module = torch.compile(self.model) if config.run.compile else self.model
        self.cast, self.move = contextlib.nullcontext(), lambda t: t.to(self.runtime.device)
        if device == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            self.cast = torch.autocast("cuda", torch.bfloat16)
            self.move = lambda t: t.pin_memory().to("cuda", non_blocking=True)

    def step(self, index: int, watch: bool) -> None:
        parts, size = accumulation(self.config, 1)
        for first in range(0, parts * size, size):
            tokens, targets = map(self.move, self.batches.batch(index, range(first, first + size)))
            with self.cast:
                loss = self.module(tokens, targets)[1] / parts
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def peer_steps(config: Config, folder: str) -> Steps:
    return Steps(Peer(config, folder))


steps: Steps  # in the process of a side


def begin(make: Callable[..., Steps], *arguments) -> str:
    """Makes the steps of this process, warmed up. The name of their device."""
    global steps
    try:
        steps = make(*arguments)
        steps.seconds(WARM_UP)
    except Exception as e:  # the compiler's own cannot be sent to another process
        raise e if isinstance(e, UserError) else RuntimeError(f"{type(e).__name__}: {e}") from None
    device = steps.trainer.runtime.device.type
    return torch.cuda.get_device_name() if device == "cuda" else device


def seconds(count: int) -> float:
    return steps.seconds(count)


def peak_memory() -> int:
    """The most bytes so far."""
    if steps.trainer.runtime.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    import resource  # Unix only

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def compete(sides: dict[str, tuple], rounds: int, count: int) -> tuple[Times, dict[str, int], str]:
    """(times, peak bytes, the device's name). Of each side, a function that makes its steps, and its arguments."""
    spawn = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for name in sides}
        ready = [pools[name].submit(begin, *side) for name, side in sides.items()]
        (device,) = {future.result() for future in ready}
        turns = {name: lambda pool=pool: pool.submit(seconds, count).result() for name, pool in pools.items()}
        times = in_turn(turns, rounds)
        return times, {name: pool.submit(peak_memory).result() for name, pool in pools.items()}, device


def compare(about: Options, config: Config) -> dict[str, Any]:
    load_nanogpt(about.nanogpt)
    check_division(config, 1)
    with with_data(config, about.random_tokens) as config:
        sides = {"ours": (steps_of, config), "nanogpt": (peer_steps, config, about.nanogpt)}
        times, peaks, device = compete(sides, about.rounds, about.steps)
    ratio = relative(times, "nanogpt")["ours"]
    quartiles = {"median": ratio["ratio"], "low": ratio["low"], "high": ratio["high"]}
    return summary(config, times, peaks, device) | {"ratio": quartiles}


@contextlib.contextmanager
def with_data(config: Config, random_tokens: bool) -> Iterator[Config]:
    """The configuration with its vocabulary, and data that exist. Raises UserError."""
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


def summary(config: Config, times: Times, peaks: dict[str, int], device: str) -> dict[str, Any]:
    """What is printed of each side, and before it."""
    tokens, limit = config.optim.batch_size * config.model.block_size, peak_flops(device)
    with torch.device("meta"):
        flops = flops_per_token(GPT(config.model))
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "tokens_per_step": tokens}
    for name, own in times.items():
        rate = tokens / statistics.median(own)
        mfu = rate * flops / limit if limit else None
        found[name] = {"tokens_per_s": rate, "mfu": mfu, "peak_gib": peaks[name] / 2**30}
    return found


def main(argv: Sequence[str]) -> None:
    own, flags = apart(argv)
    about = options(Options, own, "python -m tools.against_nanogpt")
    print(json.dumps(compare(about, load_config([about.recipe, *flags]))))


if __name__ == "__main__":
    run(main)

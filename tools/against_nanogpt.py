"""Tokens per second of a recipe, in turn with a nanoGPT checkout training the same shape.

    python -m tools.against_nanogpt configs/shakespeare_char_cpu.toml --nanogpt PATH
    python -m tools.against_nanogpt configs/gpt2_124m.toml --nanogpt PATH --random-tokens -- \\
        --batch-size 64 --micro-batch-size 16 --compile

Flags after `--` are train.py's. nanoGPT steps as its train.py does on the device at hand: float32 on a CPU, autocast
to bfloat16 and fused AdamW on CUDA; compiled if we are. Both sides see the same batches. The second command is for one
GPU, takes under eight minutes, most of it compilation, and needs no data set. Prints one line of JSON:

    {"device": its name, "torch": its version, "tokens_per_step": tokens of one optimizer step,
     "ours" and "nanogpt": {"tokens_per_s": median over the rounds, "mfu": share of the device's peak or null,
                            "peak_gib": most memory allocated while it ran, with both models there; null on a CPU},
     "ratio": {"median": ours over nanogpt within a round, "low": first quartile, "high": third quartile}}
"""

import contextlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import tyro
from pydantic.dataclasses import dataclass

from configs import STRICT, Config, ConfigError, command_line, load_config, replace, user_error
from data import DataError
from model import GPT
from tools.throughput import check_rounds, open_data
from training.clock import flops_per_token, peak_flops
from training.runtime import start
from training.trainer import Trainer

WARM_UP = 3  # optimizer steps before the first round


@dataclass(frozen=True, config=STRICT)
class Options:
    """Tokens per second against nanoGPT's."""

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
        check_rounds(self.rounds)


class RandomBatches:
    """Batches of random tokens, a function of the step as a data set's are."""

    def __init__(self, config: Config):
        self.shape = (config.model.block_size, config.model.vocab_size)

    def batch(self, step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
        block_size, vocab_size = self.shape
        generator = torch.Generator().manual_seed(step * 1_000_003 + rows.start)
        window = torch.randint(vocab_size, (len(rows), block_size + 1), generator=generator)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


class RandomTrainer(Trainer):
    def open(self, dataset: None) -> None:
        self.batches = RandomBatches(self.config)


def ours(config: Config, random_tokens: bool) -> Trainer:
    config, runtime = start(config)
    if random_tokens:
        return RandomTrainer(config, runtime, None)
    dataset = open_data(config)
    if config.model.vocab_size == 0:
        config = replace(config, "model", vocab_size=dataset.vocab_size or 256)
    return Trainer(config, runtime, dataset)


def load_nanogpt(folder: str) -> ModuleType:
    """The checkout's model.py. Raises ConfigError if there is none."""
    path = Path(folder) / "model.py"
    if not path.is_file():
        raise ConfigError(f"--nanogpt: {path} does not exist")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    return module


def nanogpt(module: ModuleType, trainer: Trainer) -> Callable[[int], None]:
    """A step as nanoGPT's train.py makes it, on the trainer's batches."""
    device, shape, optim = trainer.runtime.device.type, trainer.config.model, trainer.config.optim
    names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
    raw = module.GPT(module.GPTConfig(**{n: getattr(shape, n) for n in names})).to(device)
    optimizer = raw.configure_optimizers(optim.weight_decay, optim.lr, (optim.beta1, optim.beta2), device)
    model = torch.compile(raw) if trainer.config.run.compile else raw
    cast = contextlib.nullcontext()
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        cast = torch.autocast("cuda", torch.bfloat16)

    def step(index: int) -> None:
        for micro_step in range(trainer.accumulation):
            tokens, targets = trainer.to_device(*trainer.batches.batch(index, trainer.rows(micro_step)))
            with cast:
                loss = model(tokens, targets)[1] / trainer.accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(raw.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds(step: Callable[[int], None], indices: range, device: str) -> tuple[float, int]:
    """(seconds per step, most memory that CUDA has allocated meanwhile)."""
    cuda = device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for index in indices:
        step(index)
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / len(indices), torch.cuda.max_memory_allocated() if cuda else 0


def compare(options: Options, config: Config) -> dict[str, Any]:
    module, trainer = load_nanogpt(options.nanogpt), ours(config, options.random_tokens)
    device = trainer.runtime.device.type
    steps = {"ours": lambda index: trainer.step(index, watch=False), "nanogpt": nanogpt(module, trainer)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0)
    for step in steps.values():
        seconds(step, range(WARM_UP), device)
    for turn in range(options.rounds):
        first = WARM_UP + turn * options.steps
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            spent, peak = seconds(steps[name], range(first, first + options.steps), device)
            times[name].append(spent)
            peaks[name] = max(peaks[name], peak)
    return summary(times, peaks, trainer.model, trainer.config.optim.batch_size)


def summary(
    times: dict[str, list[float]], peaks: dict[str, int], model: GPT, sequences: int
) -> dict[str, Any]:
    cuda, tokens = next(model.parameters()).is_cuda, sequences * model.config.block_size
    device = torch.cuda.get_device_name() if cuda else "cpu"
    peak = peak_flops(device)
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "tokens_per_step": tokens}
    for name, own in times.items():
        rate = tokens / statistics.median(own)
        mfu = rate * flops_per_token(model) / peak if peak else None
        memory = peaks[name] / 2**30 if cuda else None
        found[name] = {"tokens_per_s": rate, "mfu": mfu, "peak_gib": memory}
    ratios = [a / b for a, b in zip(times["nanogpt"], times["ours"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return found | {"ratio": {"median": median, "low": low, "high": high}}


def main(argv: Sequence[str]) -> None:
    try:
        end = argv.index("--") if "--" in argv else len(argv)
        options = command_line(Options, argv[:end], "python -m tools.against_nanogpt")
        print(json.dumps(compare(options, load_config([options.recipe, *argv[end + 1 :]]))))
    except (ConfigError, DataError) as e:
        user_error(str(e))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Tokens per second and MFU of gpt2_124m on one GPU, in turn with a nanoGPT checkout.

    python -m tools.gpu_throughput --nanogpt PATH

Takes under eight minutes, most of it compilation. Random tokens and no data set; both sides compiled, in
bfloat16, with fused AdamW, gradient clipping and the same micro-batches. Prints one line of JSON:

    {"device": name of the GPU, "torch": its version, "tokens_per_step": tokens of one optimizer step,
     "ours" and "nanogpt": {"tokens_per_s": median over the rounds, "mfu": share of the device's peak or null,
                            "peak_gib": most memory allocated while it ran, with both models there},
     "ratio": {"median": ours over nanogpt within a round, "low": first quartile, "high": third quartile}}
"""

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass

from configs import STRICT, Config, ConfigError, command_line, load_config, replace, require, user_error
from model import GPT
from training.clock import flops_per_token, peak_flops
from training.runtime import start
from training.trainer import Trainer

STEPS, WARM_UP = 5, 3  # optimizer steps of a round, and before the first


@dataclass(frozen=True, config=STRICT)
class Options:
    """Tokens per second of gpt2_124m against nanoGPT's on one GPU."""

    nanogpt: str
    """Folder of a nanoGPT checkout."""
    micro_batch_size: int = 16
    """Sequences at once."""
    accumulation: int = 4
    """Micro-batches of a step."""
    rounds: int = 7
    """How often the two take turns."""
    norm: str = "layernorm"
    """Our side's norm."""

    def __post_init__(self):
        require(self.rounds >= 2, f"--rounds is {self.rounds}; quartiles want at least 2")


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


def ours(options: Options) -> tuple[Callable[[int], None], Trainer]:
    config = load_config(["configs/gpt2_124m.toml", "--norm", options.norm, "--device", "cuda", "--compile"])
    sizes = {"batch_size": options.micro_batch_size * options.accumulation}
    config, runtime = start(replace(config, "optim", micro_batch_size=options.micro_batch_size, **sizes))
    trainer = RandomTrainer(config, runtime, None)
    return lambda index: trainer.step(index, watch=False), trainer


def nanogpt(options: Options, trainer: Trainer) -> Callable[[int], None]:
    """A step as nanoGPT's train.py makes it: autocast, compiled model, clipping, fused AdamW."""
    path = Path(options.nanogpt) / "model.py"
    if not path.is_file():
        raise ConfigError(f"--nanogpt: {path} does not exist")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    theirs = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = theirs
    spec.loader.exec_module(theirs)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    shape, optim = trainer.config.model, trainer.config.optim
    names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
    raw = theirs.GPT(theirs.GPTConfig(**{n: getattr(shape, n) for n in names})).cuda()
    optimizer = raw.configure_optimizers(optim.weight_decay, optim.lr, (optim.beta1, optim.beta2), "cuda")
    model, size = torch.compile(raw), options.micro_batch_size

    def step(index: int) -> None:
        for micro in range(options.accumulation):
            rows = range(micro * size, (micro + 1) * size)
            tokens, targets = trainer.to_device(*trainer.batches.batch(index, rows))
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens, targets)[1] / options.accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(raw.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds(step: Callable[[int], None], first: int, count: int) -> tuple[float, int]:
    """(seconds per step, most memory allocated meanwhile)."""
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for index in range(first, first + count):
        step(index)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count, torch.cuda.max_memory_allocated()


def compare(options: Options) -> dict[str, Any]:
    mine, trainer = ours(options)
    steps = {"ours": mine, "nanogpt": nanogpt(options, trainer)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0)
    for step in steps.values():
        seconds(step, 0, WARM_UP)
    for turn in range(options.rounds):
        for name, step in steps.items():
            spent, peak = seconds(step, WARM_UP + turn * STEPS, STEPS)
            times[name].append(spent)
            peaks[name] = max(peaks[name], peak)
    return summary(times, peaks, trainer.model, options.micro_batch_size * options.accumulation)


def summary(
    times: dict[str, list[float]], peaks: dict[str, int], model: GPT, sequences: int
) -> dict[str, Any]:
    device, tokens = torch.cuda.get_device_name(), sequences * model.config.block_size
    peak = peak_flops(device)
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "tokens_per_step": tokens}
    for name, own in times.items():
        rate = tokens / statistics.median(own)
        mfu = rate * flops_per_token(model) / peak if peak else None
        found[name] = {"tokens_per_s": rate, "mfu": mfu, "peak_gib": peaks[name] / 2**30}
    ratios = [a / b for a, b in zip(times["nanogpt"], times["ours"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return found | {"ratio": {"median": median, "low": low, "high": high}}


def main(argv: Sequence[str]) -> None:
    try:
        options = command_line(Options, argv, "python -m tools.gpu_throughput")
        print(json.dumps(compare(options)))
    except ConfigError as e:
        user_error(str(e))


if __name__ == "__main__":
    main(sys.argv[1:])

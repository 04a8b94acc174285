"""Whole training steps of settings that take turns, and the rate that the machine reaches at most."""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field

from base.flags import flags_from
from base.timing import in_turn, relative, seconds
from configs import Config, replace
from kernels import KINDS
from model import PLACEMENTS, SCALES, ModelConfig
from training.setup import open_data, start
from training.trainer import Trainer

Rounds = Annotated[int, Field(ge=2)]  # of which there are quartiles
WARM_UP = 3  # steps before those that count
MATRIX = {
    "cpu": 1024,
    "mps": 4096,
    "cuda": 8192,
}  # rows and columns of a product that keeps the whole device busy
PRODUCTS = 2  # between two looks at the clock
REFERENCE = "layernorm pre"
ALONE = ("norm", "qk_norm", "v_norm", "gain", "embed_norm", "mlp", "pos", "bias", "tie_embeddings")


class Steps:
    """A training run, a step at a time, with the metrics left on the device."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.index = trainer, 0
        self.wait = torch.get_device_module(trainer.runtime.device).synchronize

    def __call__(self) -> None:
        self.trainer.step(self.index, watch=False)
        self.index += 1

    def seconds(self, count: int = 1) -> float:
        """The time of one step, as the mean of the next `count`."""

        def steps() -> None:
            for _ in range(count):
                self()

        return seconds(steps, self.wait) / count

    @property
    def tokens(self) -> int:
        return self.trainer.config.optim.batch_size * self.trainer.config.model.block_size


def steps_of(config: Config) -> Steps:
    """The run that train.py would begin, before its first step."""
    config, runtime = start(config)
    config, dataset = open_data(config, runtime)
    return Steps(Trainer(config, runtime, dataset))


def speeds(runs: dict[str, Steps], rounds: int, reference: str) -> dict[str, dict[str, float]]:
    """The speed of each run relative to the reference's, and the median milliseconds of its steps."""
    times = in_turn({name: run.seconds for name, run in runs.items()}, rounds, WARM_UP)
    table = relative(times, reference)
    return {name: row | {"step_ms": 1e3 * statistics.median(times[name])} for name, row in table.items()}


def settings(config: Config) -> dict[str, dict[str, Any]]:
    """What each setting changes in the reference: norm and placement together, then every other choice by itself."""
    found = {
        f"{norm} {placement}": {"norm": norm, "placement": placement}
        for norm, placement in itertools.product(KINDS, PLACEMENTS)
    }
    flags = {flag.name: flag for flag in flags_from(ModelConfig)}
    for name in ALONE:
        for value in flags[name].choices(flags[name].kind) or (True, False):
            words = f"{'' if value else 'no '}{name}" if isinstance(value, bool) else f"{name} {value}"
            if value != getattr(config.model, name) and f"{value} pre" not in found:
                found[words] = {name: value}
    for scale, (_, suited) in SCALES.items():
        placement = "pre" if "pre" in suited else next(iter(suited))
        if scale != "one":
            found[f"residual_scale {scale} in {placement}"] = {
                "residual_scale": scale,
                "placement": placement,
            }
    return found | {"logit_softcap 30": {"logit_softcap": 30.0}}


def switches(config: Config, rounds: int) -> dict[str, dict[str, float]]:
    """The speed of every choice of the model's relative to pre LayerNorm."""
    plain = {
        "norm": "layernorm",
        "placement": "pre",
        "qk_norm": "off",
        "v_norm": False,
        "residual_scale": "one",
    }
    config = replace(config, "model", **plain)
    runs = {name: steps_of(replace(config, "model", **own)) for name, own in settings(config).items()}
    return speeds(runs, rounds, REFERENCE)


def lines(table: dict[str, dict[str, float]]) -> Iterable[str]:
    """The table of `switches` as Markdown."""
    yield "| setting | tokens/s, relative | quartiles |"
    yield "|---|---|---|"
    for name, row in table.items():
        yield f"| {name} | {row['ratio']:.2f} | {row['low']:.2f} to {row['high']:.2f} |"


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of large square matrix products, the fastest of some: what the machine can do at most."""
    size, wait = MATRIX[device.type], torch.get_device_module(device).synchronize
    a = torch.randn(size, size, device=device).to(dtype)

    def products() -> None:
        for _ in range(PRODUCTS):
            a @ a

    return PRODUCTS * 2 * size**3 / min(seconds(products, wait) for _ in range(8))


def apart(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A tool's own flags, and those of train.py, which follow after `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:end]), list(argv[end + 1 :])

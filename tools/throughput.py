"""How fast whole training steps are, one setting relative to another on the same machine at the same time.

A busy or throttled machine changes its speed within seconds, so times are never compared across runs: the
settings take turns, a step each, and what is reported is the median of the ratios within a turn.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable

import torch

from base.cli import UserError
from configs import Config, replace
from training.setup import open_data, start
from training.trainer import Trainer

REFERENCE = "layernorm pre"
MATRIX = 1024  # rows and columns of the product whose rate stands for the machine's limit


class Steps:
    """One training run, a step at a time, with the metrics left on the device."""

    def __init__(self, config: Config):
        config, runtime = start(config)
        config, dataset = open_data(config, runtime)
        self.trainer, self.index = Trainer(config, runtime, dataset), 0

    def __call__(self) -> None:
        self.trainer.step(self.index, watch=False)
        self.index += 1

    def seconds(self) -> float:
        """The time of one step."""
        return seconds(self, self.trainer.runtime.device)

    @property
    def tokens(self) -> int:
        return self.trainer.config.optim.batch_size * self.trainer.block_size


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was asked to do."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The time of `work`, with everything that the device has to do for it."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


def in_turn(runs: dict[str, Steps], rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Seconds per step of every run, `rounds` of them; the runs take turns, each time in the other direction."""
    for steps in runs.values():
        for _ in range(warm_up):
            steps()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            times[name].append(runs[name].seconds())
    return times


def relative(times: dict[str, list[float]], reference: str) -> dict[str, dict[str, float]]:
    """Median and quartiles of the speed of each run over the reference's in the same turn."""
    table = {}
    for name, own in times.items():
        ratios = [base / t for base, t in zip(times[reference], own, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        table[name] = {"ratio": middle, "low": low, "high": high, "step_ms": 1e3 * statistics.median(own)}
    return table


def switches(config: Config, rounds: int) -> dict[str, dict[str, float]]:
    """The speed of 2 norms x 4 placements x qk_norm off and head, relative to pre LayerNorm."""
    runs = {}
    choices = (("layernorm", "rmsnorm"), ("pre", "post", "output", "sandwich"), ("off", "head"))
    for norm, placement, qk_norm in itertools.product(*choices):
        name = f"{norm} {placement}" + (f" qk_norm {qk_norm}" if qk_norm != "off" else "")
        changes = {"norm": norm, "placement": placement, "qk_norm": qk_norm}
        runs[name] = Steps(replace(config, "model", **changes))
    return relative(in_turn(runs, rounds), REFERENCE)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of some square matrix products: what the machine can do at most."""
    a = torch.randn(MATRIX, MATRIX, device=device).to(dtype)
    return 2 * MATRIX**3 / min(seconds(lambda: a @ a, device) for _ in range(30))


def lines(table: dict[str, dict[str, float]]) -> Iterable[str]:
    """The table of `relative` as Markdown."""
    yield "| setting | tokens/s, relative | quartiles |"
    yield "|---|---|---|"
    for name, row in table.items():
        yield f"| {name} | {row['ratio']:.2f} | {row['low']:.2f} to {row['high']:.2f} |"


def check_rounds(rounds: int) -> None:
    if rounds < 2:
        raise UserError(f"--rounds is {rounds}; quartiles want at least 2")

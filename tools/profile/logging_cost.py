"""What looking inside costs: the steps that are logged and those that follow, beside the steps between."""

import math
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from base.timing import seconds
from configs import Config
from training.dynamics import fetch
from training.probe import Probe
from training.setup import open_data, start
from training.tracker import WANDB_SECONDS, Tracker
from training.trainer import Trainer

FELT = 3  # steps that feel a row or a look: its own, and those beside which wandb's service works
LOOKS = 8  # taken at least, where there are as many rounds
SECONDS = 8 * WANDB_SECONDS  # that a measurement takes, if nobody says how long


@dataclass(frozen=True)
class LoggingCost:
    """Mean times in milliseconds, and the intervals they are spread over."""

    step_ms: float
    logged_ms: float
    """What a logged step takes longer: statistics, transfer, metrics.jsonl and its share of wandb's work."""
    logged_error_ms: float
    """Its standard error."""
    look_ms: float
    """What a closer look takes, with the copy of the parameters before it."""
    log_interval: int
    probe_interval: int

    @property
    def share(self) -> float:
        """The share of the throughput that is lost to logging, at these intervals."""
        extra = self.logged_ms / self.log_interval
        extra += self.look_ms / self.probe_interval if self.probe_interval else 0.0
        return extra / (self.step_ms + extra)

    def __str__(self) -> str:
        return (
            f"a step takes {self.step_ms:.2f} ms; logging it {self.logged_ms:.2f} ms more, a closer look "
            f"{self.look_ms:.1f} ms; every {self.log_interval} and {self.probe_interval} steps that is "
            f"{self.share:.2%} +- {self.logged_error_ms / self.log_interval / self.step_ms:.2%} of the throughput"
        )


class Watched:
    """A training run that takes its steps as train.py does, and how long they take."""

    def __init__(self, config: Config, folder: Path):
        config, runtime = start(config)
        config, dataset = open_data(config, runtime)
        self.trainer = Trainer(config, runtime, dataset)
        self.wait = torch.get_device_module(runtime.device).synchronize
        trainer = self.trainer
        self.probe = Probe(trainer.model, trainer.windows, trainer.norms, trainer.micro_batch)
        self.tracker, self.steps = Tracker(folder, config, {}, None), 0
        self.length = max(config.run.log_interval, 2 * FELT + 2)
        self.seconds: dict[str, list[float]] = defaultdict(list)  # a number per round

    def round(self, look: bool) -> None:
        """The steps from one row to the next: the first is logged, and a later one has a closer look if `look`.

        Notes what a plain step takes, and what row and look take longer than plain steps of the same round.
        """
        taken = defaultdict(list)
        for place in range(self.length):
            kind = "logged" if place < FELT else "look" if look and place < 2 * FELT else "plain"
            step = partial(self.step, watch=place == 0, look=look and place == FELT)
            taken[kind].append(seconds(step, self.wait))
        plain = statistics.mean(taken.pop("plain"))
        self.seconds["plain"].append(plain)
        for kind, times in taken.items():
            self.seconds[kind].append(sum(times) - FELT * plain)

    def step(self, watch: bool, look: bool) -> None:
        if look:
            self.probe.remember()
        values = self.trainer.step(self.steps, watch)
        row = fetch(values) if watch else {}
        row |= self.probe.measure(self.trainer.scale.scale) if look else {}
        self.steps += 1
        if row:
            self.tracker.log({"iter": self.steps} | row)


def measure(config: Config, rounds: int | None = None) -> LoggingCost:
    """The cost of logging on this machine, for a configuration as `load_config` gives it.

    rounds: how often a row is logged; LOOKS times or more, as many as SECONDS hold, if None.

    Rows and looks come at the intervals of the configuration, as what has not run for a while is slow at first; looks
    more often where there would be fewer than LOOKS, rows less often where there would be no steps between. The
    device is waited for after each step, so on a GPU it is left out that a row keeps the host from running ahead.
    Raises UserError.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Watched(config, Path(folder))
        probe_interval = config.run.probe_interval
        run.round(look=True)  # compilation and first allocations
        a_round = seconds(partial(run.round, look=False), run.wait)
        rounds = rounds or max(LOOKS, math.ceil(SECONDS / a_round))
        every = max(1, min(probe_interval // run.length, rounds // LOOKS))
        run.seconds.clear()
        for i in range(1, rounds + 1):
            run.round(look=probe_interval > 0 and i % every == 0)
        handed = seconds(run.tracker.hand_over, run.wait)
        run.tracker.close(0)
    looks = run.seconds["look"] or [0.0]
    return LoggingCost(
        step_ms=1000 * statistics.mean(run.seconds["plain"]),
        logged_ms=1000 * (statistics.mean(run.seconds["logged"]) + handed / rounds),
        logged_error_ms=1000 * statistics.stdev(run.seconds["logged"]) / math.sqrt(rounds),
        look_ms=1000 * statistics.mean(looks),
        log_interval=config.run.log_interval,
        probe_interval=probe_interval,
    )

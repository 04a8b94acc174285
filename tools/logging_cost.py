"""What looking inside costs: steps with and without it, taken in turns in one process."""

import itertools
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from configs import Config
from tools.throughput import seconds
from training.dataset import open_data
from training.probe import Probe
from training.runtime import start
from training.tracker import Tracker
from training.trainer import Trainer


@dataclass(frozen=True)
class LoggingCost:
    """Median times in milliseconds, and the intervals they are spread over."""

    step_ms: float
    logged_ms: float
    """What a logged step takes longer: statistics, transfer, metrics.jsonl and wandb."""
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
            f"{self.share:.2%} of the throughput"
        )


def measure(config: Config, rounds: int) -> LoggingCost:
    """The cost of logging on this machine, for a configuration as `load_config` gives it.

    A round is some steps without logging, as many with the last one logged, and a closer look. The device is waited
    for at the end of each, so what logging makes the host wait is counted: `some` is log_interval where the host runs
    ahead of the device, and one on a CPU, where it cannot. Raises ConfigError, DataError.
    """
    config, runtime = start(config)
    config, dataset = open_data(config, runtime)
    trainer = Trainer(config, runtime, dataset)
    probe = Probe(trainer.model, trainer.windows, trainer.norms)
    step, some = 0, 1 if runtime.device.type == "cpu" else config.run.log_interval

    def steps(watch_last: bool) -> dict[str, float]:
        nonlocal step
        for i in range(some):
            values = trainer.step(step, watch := watch_last and i == some - 1)
            step += 1
        return trainer.row(values, step - 1) if watch else {}

    def logged() -> None:
        tracker.log({"iter": step} | steps(watch_last=True))

    def look() -> None:
        probe.remember()
        tracker.log({"iter": step} | probe.measure(trainer.scale.scale))

    kinds = (lambda: steps(watch_last=False), logged, look)
    with tempfile.TemporaryDirectory() as folder:
        tracker = Tracker(Path(folder), config, {}, None)
        for kind in kinds:  # compilation and first allocations
            kind()
        times = [
            [seconds(kind, runtime.device) for kind in kinds[::way]][::way]
            for way in itertools.islice(itertools.cycle((1, -1)), rounds)  # what follows a look is slower
        ]
        tracker.close(0)
    plain, extra, closer = (
        1000 * statistics.median(column)
        for column in zip(*((plain, log - plain, closer) for plain, log, closer in times), strict=True)
    )
    return LoggingCost(plain / some, extra, closer, config.run.log_interval, config.run.probe_interval)

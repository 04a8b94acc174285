"""How OpenMP's threads wait for each other, which is read from the environment when torch is imported.

The threads of an operation wait by spinning, the fastest way on cores of their own. Beside another busy program a
spinning thread takes the time in which the awaited one could run, and training slows down several times over.
"""

import importlib
import os
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
BUSY = 0.5  # processors that others use; a quiet desktop stays far below
LOOK_SECONDS, WATCH_SECONDS = 0.05, 10.0
STAT = Path("/proc/stat")


def share_processors(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets threads sleep while they wait where other programs are busy. To be called before torch is imported.

    Does nothing where the environment makes a choice already, and on systems without /proc.
    """
    if settled(environment):
        return
    before = Look.now()
    # Libraries that are needed anyway: a program that starts at the same moment is busy then, and so is seen.
    importlib.import_module("numpy")
    importlib.import_module("pydantic.dataclasses")
    time.sleep(LOOK_SECONDS)
    if Look.now().others_since(before) > BUSY:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"


def settled(environment: MutableMapping[str, str]) -> bool:
    """Whether the environment says how threads wait, or this system does not say who is busy."""
    return any(name in environment for name in CHOICES) or not STAT.exists()


@dataclass(frozen=True)
class Look:
    """What had run when. processors: (idle, all) clock ticks of those that this process may use; own, time: seconds."""

    processors: dict[int, tuple[int, int]]
    own: float
    time: float

    @classmethod
    def now(cls) -> "Look":
        processors = processor_times(STAT.read_text(encoding="utf-8"))
        return cls(processors, time.process_time(), time.monotonic())

    def others_since(self, before: "Look") -> float:
        """How many of the processors other programs used between two looks."""
        own = (self.own - before.own) / (self.time - before.time)
        return busy_processors(before.processors, self.processors) - own


class Neighbours:
    """Notices programs that have begun to use the processors since threads were told how to wait."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ):
        self.last = None if settled(environment) else Look.now()

    def advice(self) -> str:
        """What would be faster, once, where others have been busy for the last WATCH_SECONDS; else nothing."""
        if self.last is None or time.monotonic() - self.last.time < WATCH_SECONDS:
            return ""
        before, self.last = self.last, Look.now()
        others, usable = self.last.others_since(before), len(self.last.processors)
        if others <= BUSY:
            return ""
        self.last = None
        return (
            f"other programs use {others:.1f} of the {usable} processors, and threads that spin while they wait lose "
            "most of the rest; with OMP_WAIT_POLICY=PASSIVE or OMP_NUM_THREADS=1 in the environment, this run is "
            "likely faster"
        )


def processor_times(stat: str) -> dict[int, tuple[int, int]]:
    """(idle, all) clock ticks so far of every processor that this process may use."""
    usable, times = os.sched_getaffinity(0), {}
    for line in stat.splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name != "cpu" and int(name[3:]) in usable:
            counts = list(map(int, ticks[:8]))  # the rest is counted in user and nice
            times[int(name[3:])] = counts[3] + counts[4], sum(counts)
    return times


def busy_processors(before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]]) -> float:
    """How many of these processors were in use between the two looks."""
    busy = 0.0
    for processor in before.keys() & after.keys():
        idle, ticks = (b - a for a, b in zip(before[processor], after[processor], strict=True))
        busy += 1 - idle / ticks if ticks else 0
    return busy

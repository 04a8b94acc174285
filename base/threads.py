"""How OpenMP's threads wait for each other, which is read from the environment when torch is imported.

The threads of an operation wait by spinning, the fastest way on cores of their own. Beside another busy program a
spinning thread takes the time in which the awaited one could run, and training slows down several times over.
"""

import os
import time
from collections.abc import MutableMapping
from pathlib import Path

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
BUSY = 0.5  # processors that others use; a quiet desktop stays far below
LOOK_SECONDS = 0.05
STAT = Path("/proc/stat")


def share_processors(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets threads sleep while they wait where other programs are busy. To be called before torch is imported.

    Does nothing where the environment makes a choice already, and on systems without /proc.
    """
    if any(name in environment for name in CHOICES) or not STAT.exists():
        return
    before = processor_times(STAT.read_text(encoding="utf-8"))
    time.sleep(LOOK_SECONDS)
    if busy_processors(before, processor_times(STAT.read_text(encoding="utf-8"))) > BUSY:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"


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

"""Times that can be compared on a busy machine.

Such a machine changes its speed within seconds, so times are never compared across runs: the contenders take turns,
and what counts is the median of the ratios within a turn.
"""

import statistics
import time
from collections.abc import Callable, Mapping


def seconds(work: Callable[[], object], wait: Callable[[], object]) -> float:
    """Wall-clock seconds of `work`. `wait` returns once the device has done all that it was given."""
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


def in_turn(
    contenders: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 0
) -> dict[str, list[float]]:
    """What each contender returned in each of `rounds` rounds, after some that do not count.

    Every other round goes through the contenders backwards, so that none always follows the same one.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warm_up + rounds):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            times[name].append(contenders[name]())
    return {name: own[warm_up:] for name, own in times.items()}


def relative(times: Mapping[str, list[float]], reference: str) -> dict[str, dict[str, float]]:
    """For each contender, the quartiles of its speed over the reference's in the same round.

    ratio: the median; low, high: first and third quartile. Of at least two rounds.
    """
    table = {}
    for name, own in times.items():
        ratios = [base / t for base, t in zip(times[reference], own, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        table[name] = {"ratio": middle, "low": low, "high": high}
    return table

"""What a claim is: a number, a sentence, and a function that measures what the sentence says.

Measuring gives checks. A check that is a *control* puts a wrong variant to the same question, and must fail it:
a check that nothing fails proves nothing.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]  # of an experiment: a job, and what it gave


@dataclass(frozen=True)
class Check:
    """One figure: what it should be, what it was measured to be, and whether these agree."""

    what: str
    expected: str
    measured: str
    agrees: bool
    control: bool = False

    @property
    def holds(self) -> bool:
        return self.agrees != self.control


class Skipped(Exception):
    """A claim cannot be checked on this machine, for the reason given."""


@dataclass(frozen=True)
class Claim:
    number: int
    sentence: str
    measure: Callable[[], Iterable[Check]]
    of_this_machine: bool = False
    """The figures are times, or shares of time, and differ elsewhere."""


@dataclass(frozen=True)
class Experiment:
    """A claim about training. Its runs are rows of numbers; judging and drawing these needs no training."""

    number: int
    sentence: str
    setting: str
    """What is run, for the reader."""
    jobs: list[Row]
    work: Callable[[Row], Row]
    """From a job, what was measured."""
    judge: Callable[[list[Row]], Iterable[Check]]
    draw: Callable[[list[Row]], "Figure"]


def claim(number: int, of_this_machine: bool = False) -> Callable[[Callable], Claim]:
    """Makes a claim of the decorated function, which yields checks and whose docstring is the sentence."""

    def of(measure: Callable[[], Iterable[Check]]) -> Claim:
        return Claim(number, " ".join(measure.__doc__.split()), measure, of_this_machine)

    return of


# A value that is not a number agrees with nothing: every comparison below is then false.


def near(what: str, measured: Any, expected: Any, tolerance: float) -> Check:
    """Numbers, or equally long rows of numbers, that differ by at most `tolerance`."""
    ours, truth = (torch.as_tensor(v, dtype=torch.float64) for v in (measured, expected))
    agrees = bool(((ours - truth).abs() <= tolerance).all())
    return Check(what, show(expected), show(measured), agrees)


def equal(what: str, measured: Any, expected: Any) -> Check:
    return Check(what, show(expected), show(measured), measured == expected)


def at_most(what: str, measured: float, limit: float) -> Check:
    return Check(what, f"<= {limit:g}", show(measured), measured <= limit)


def at_least(what: str, measured: float, limit: float) -> Check:
    return Check(what, f">= {limit:g}", show(measured), measured >= limit)


def figure(what: str, measured: Any) -> Check:
    """A number that is told, and that nothing is expected of."""
    return Check(what, "", show(measured), True)


def control(check: Check) -> Check:
    """The same question to a wrong variant."""
    return dataclasses.replace(check, control=True)


def show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(show, value)) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)

"""All claims by number, and what becomes of one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Importing a module registers its claims.
from tools.claims import (
    cost,
    gradients,
    growth,
    information,
    jacobians,
    logits,
    parameters,
    stream,
    values,
    warmup,
)
from tools.claims.claim import CLAIMS, Check, Skipped
from tools.claims.experiments import Experiment, Row, load

EXPERIMENTS: dict[int, Experiment] = {
    module.EXPERIMENT.number: module.EXPERIMENT for module in (growth, gradients, warmup, logits)
}
NUMBERS = sorted([*CLAIMS, *EXPERIMENTS])
SECTIONS = {
    "Information and causality": range(1, 5),
    "Values": range(5, 10),
    "Jacobians": range(10, 13),
    "The stream": range(13, 19),
    "Parameters and optimizer": range(19, 23),
    "Cost": range(23, 26),
}
DOCS = Path(__file__).parents[2] / "docs"

Verdict = Literal["pass", "FAIL", "skipped", "shown", "not shown"]


@dataclass(frozen=True)
class Outcome:
    number: int
    sentence: str
    verdict: Verdict
    checks: list[Check]
    note: str = ""
    """Why a claim was skipped, what an experiment ran, or that the figures are this machine's."""


def record_of(number: int) -> Path:
    """Where an experiment's numbers are kept."""
    return DOCS / "claims" / f"{number}.json"


def picture_of(number: int) -> Path:
    return DOCS / "img" / f"claims_{number}.png"


def check_claim(number: int) -> Outcome:
    claim = CLAIMS[number]
    try:
        checks = list(claim.measure())
    except Skipped as reason:
        return Outcome(number, claim.sentence, "skipped", [], str(reason))
    verdict = "pass" if all(check.holds for check in checks) else "FAIL"
    note = "Measured on the machine at hand; the figures differ elsewhere." if claim.of_this_machine else ""
    return Outcome(number, claim.sentence, verdict, checks, note)


def judge_experiment(number: int, rows: list[Row] | None = None) -> Outcome:
    """What the rows of an experiment show; by default those on record."""
    experiment = EXPERIMENTS[number]
    if rows is None and not record_of(number).exists():
        return Outcome(number, experiment.sentence, "skipped", [], "not on record; run it without --quick")
    checks = list(experiment.judge(rows or load(record_of(number))))
    verdict = "shown" if all(check.holds for check in checks) else "not shown"
    return Outcome(number, experiment.sentence, verdict, checks, experiment.setting)


def as_text(outcome: Outcome) -> str:
    """The outcome for a terminal."""
    lines = [f"{outcome.number:2}  {outcome.verdict:9}  {outcome.sentence}"]
    if outcome.note:
        lines.append(f"{'':15}({outcome.note})")
    for check in outcome.checks:
        expected = f", expected {check.expected}" if check.expected else ""
        lines.append(f"{mark(check):>13}  {check.what}: {check.measured}{expected}")
    return "\n".join(lines)


def mark(check: Check) -> str:
    if check.control:
        return "control fails" if check.holds else "CONTROL AGREES"
    return "" if check.holds else "NOT SO"

"""All claims by number, and what becomes of one."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

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
from tools.claims.claim import Check, Claim, Skipped
from tools.claims.experiments import Experiment, Row, load

SECTIONS = {
    "Information and causality": (information,),
    "Values": (values,),
    "Jacobians": (jacobians,),
    "The stream": (stream, growth, gradients, warmup, logits),
    "Parameters and optimizer": (parameters,),
    "Cost": (cost,),
}


def defined_in(modules: Iterable[ModuleType], kind: type) -> list:
    found = [value for module in modules for value in vars(module).values() if isinstance(value, kind)]
    return sorted(found, key=lambda value: value.number)


MODULES = [module for modules in SECTIONS.values() for module in modules]
CLAIMS: dict[int, Claim] = {claim.number: claim for claim in defined_in(MODULES, Claim)}
EXPERIMENTS: dict[int, Experiment] = {e.number: e for e in defined_in(MODULES, Experiment)}
NUMBERS = sorted([*CLAIMS, *EXPERIMENTS])
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

"""Checks every claim about normalization on this repository's own code, and that wrong variants fail.

python -m tools.claims                  all of them; the experiments (15 to 18) train small models for some minutes
python -m tools.claims --quick          the experiments judged by their recorded numbers
python -m tools.claims --only 7,13
python -m tools.claims --write          also docs/claims.md, its pictures and the experiments' numbers

The exit code is 1 if a claim fails. An experiment that does not show what its claim says is told, and is no failure.
"""

import importlib.util
from collections.abc import Sequence

from pydantic.dataclasses import dataclass

from base.cli import STRICT, Count, UserError, run
from base.flags import options
from tools.claims import experiments, page
from tools.claims.page import EXPERIMENTS, NUMBERS, Outcome, as_text, check_claim, judge_experiment, record_of


@dataclass(frozen=True, config=STRICT)
class Options:
    """Check every claim about normalization, and that wrong variants fail."""

    quick: bool = False
    """Judge the experiments by their recorded numbers instead of running them."""
    only: str = ""
    """The numbers of the claims to check, as in 7,13."""
    write: bool = False
    """Write docs/claims.md, of all claims, and record what experiments measure."""
    jobs: Count = 2
    """Processes that train at once."""


def selected(asked: Options) -> list[int]:
    """The claims that were asked for. Raises UserError for what cannot be done."""
    if asked.write and not importlib.util.find_spec("matplotlib"):
        raise UserError('--write draws with matplotlib, which is missing; pip install -e ".[report]"')
    words = [word.strip() for word in asked.only.split(",")] if asked.only else []
    for word in words:
        if not (word.isdecimal() and int(word) in NUMBERS):
            span = f"{NUMBERS[0]} to {NUMBERS[-1]}"
            raise UserError(f"--only names {word!r}, but the claims are {span}, as in 7,13")
    return sorted({int(word) for word in words}) or NUMBERS


def outcome_of(number: int, asked: Options, afresh: bool) -> Outcome:
    """An experiment that is not to be run `afresh` is judged by its record."""
    if number not in EXPERIMENTS:
        return check_claim(number)
    if not afresh:
        return judge_experiment(number)
    rows = experiments.run(EXPERIMENTS[number], asked.jobs)
    if asked.write:
        experiments.save(record_of(number), rows)
    return judge_experiment(number, rows)


def main(argv: Sequence[str]) -> None:
    asked = options(Options, argv, "python -m tools.claims")
    wanted, outcomes = selected(asked), []
    for number in NUMBERS if asked.write else wanted:
        outcomes.append(outcome_of(number, asked, afresh=number in wanted and not asked.quick))
        print(as_text(outcomes[-1]), flush=True)
    if asked.write:
        page.write(outcomes)
    verdicts = [outcome.verdict for outcome in outcomes]
    print("\n" + ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts)))
    raise SystemExit("FAIL" in verdicts)


if __name__ == "__main__":
    run(main)

"""Checks every claim about normalization on this repository's own code, and that wrong variants fail.

python -m tools.claims                  all of them; the experiments (15 to 18) train small models for some minutes
python -m tools.claims --quick          the experiments judged by their recorded numbers
python -m tools.claims --only 7,13
python -m tools.claims --write          also docs/claims.md, its pictures and the experiments' numbers

The exit code is 1 if a claim fails. An experiment that does not show what its claim says is told, and is no failure.
"""

import importlib.util
import sys
from collections.abc import Sequence

from pydantic.dataclasses import dataclass

from base.cli import UserError
from configs import STRICT, command_line, user_error
from tools.claims import experiments, page
from tools.claims.outcome import (
    EXPERIMENTS,
    NUMBERS,
    Outcome,
    as_text,
    check_claim,
    judge_experiment,
    record_of,
)
from tools.output import say


@dataclass(frozen=True, config=STRICT)
class Options:
    """Check every claim about normalization, and that wrong variants fail."""

    quick: bool = False
    """Judge the experiments by their recorded numbers instead of running them."""
    only: str = ""
    """The numbers of the claims to check, as in 7,13."""
    write: bool = False
    """Write docs/claims.md, of all claims, and record what experiments measure."""
    jobs: int = 2
    """Processes that train at once."""


def selected(options: Options) -> list[int]:
    """The claims that were asked for. Raises UserError for what cannot be done."""
    if options.jobs < 1:
        raise UserError(f"--jobs is {options.jobs}; it must be at least 1")
    if options.write and not importlib.util.find_spec("matplotlib"):
        raise UserError('--write draws with matplotlib, which is missing; pip install -e ".[report]"')
    words = [word.strip() for word in options.only.split(",")] if options.only else []
    for word in words:
        if not (word.isdecimal() and int(word) in NUMBERS):
            span = f"{NUMBERS[0]} to {NUMBERS[-1]}"
            raise UserError(f"--only names {word!r}, but the claims are {span}, as in 7,13")
    return sorted({int(word) for word in words}) or NUMBERS


def outcome_of(number: int, options: Options, afresh: bool) -> Outcome:
    """An experiment that is not to be run `afresh` is judged by its record."""
    if number not in EXPERIMENTS:
        return check_claim(number)
    if not afresh:
        return judge_experiment(number)
    rows = experiments.run(EXPERIMENTS[number], options.jobs)
    if options.write:
        experiments.save(record_of(number), rows)
    return judge_experiment(number, rows)


def main(argv: Sequence[str]) -> None:
    try:
        options = command_line(Options, argv, "python -m tools.claims")
        asked, outcomes = selected(options), []
        for number in NUMBERS if options.write else asked:
            afresh = number in asked and not options.quick
            outcomes.append(outcome_of(number, options, afresh))
            say(as_text(outcomes[-1]))
        if options.write:
            page.write(outcomes)
        verdicts = [outcome.verdict for outcome in outcomes]
        say("\n" + ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts)))
    except UserError as e:
        user_error(str(e))
    raise SystemExit("FAIL" in verdicts)


if __name__ == "__main__":
    main(sys.argv[1:])

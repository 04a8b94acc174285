"""Where the time of a training step goes, how fast every switch is, and what logging costs.

    python -m tools.profile configs/shakespeare_char_cpu.toml
    python -m tools.profile configs/quickstart.toml --picture profile.png -- --norm rmsnorm
    python -m tools.profile switches configs/shakespeare_char_cpu.toml
    python -m tools.profile logging configs/shakespeare_char_cpu.toml

Flags after `--` are train.py's. The first form is short for `python -m tools.profile step`.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tyro
from pydantic.dataclasses import dataclass

from base.cli import UserError
from configs import STRICT, command_line, load_config, require, user_error
from tools.output import check_writable, new_file, say
from tools.profile import classes, logging_cost, steps


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Measurement:
    recipe: tyro.conf.Positional[str]
    """A recipe, as for train.py."""
    json: str = ""
    """File for the numbers."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Step(Measurement):
    """Where the time of a step goes, by class of operator (also without this word)."""

    rounds: int = 10
    """Steps of each kind that are measured."""
    compiled: bool = True
    """Also compile the model, which takes a minute or two."""
    picture: str = ""
    """File for the picture of the classes (.png or .svg)."""

    def __post_init__(self):
        steps.check_rounds(self.rounds)
        kind = Path(self.picture).suffix
        wanted = not self.picture or kind in (".png", ".svg")
        require(wanted, f"--picture wants a .png or an .svg, not {kind!r}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Switches(Measurement):
    """The speed of every norm, placement and qk_norm relative to pre LayerNorm."""

    rounds: int = 10
    """Steps of each setting that are measured."""

    def __post_init__(self):
        steps.check_rounds(self.rounds)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Logging(Measurement):
    """What logging costs."""

    rounds: int | None = None
    """Logged steps that are measured; as many as two minutes hold if not given."""

    def __post_init__(self):
        steps.check_rounds(self.rounds or 2)


def measure(options: Step | Switches | Logging, config) -> tuple[dict[str, Any], str]:
    """The numbers, and the text that tells them."""
    if isinstance(options, Switches):
        found = steps.switches(config, options.rounds)
        return found, "\n".join(steps.lines(found))
    if isinstance(options, Logging):
        cost = logging_cost.measure(config, options.rounds)
        return asdict(cost) | {"share": cost.share}, str(cost)
    found = classes.measure(config, options.rounds, options.compiled)
    if options.picture:
        with new_file(Path(options.picture)) as file:
            classes.draw(found, file)
    return found, "\n".join(classes.table(found))


def main(argv: Sequence[str]) -> None:
    try:
        own, flags = steps.apart(argv)
        if own[:1] not in (["step"], ["switches"], ["logging"], ["--help"], ["-h"]):
            own = ["step", *own]
        about = (
            "Where the time of training goes. Flags of train.py follow after `--`, as in `-- --batch-size 4`."
        )
        options = command_line(Step | Switches | Logging, own, "python -m tools.profile", about)
        check_writable("--json", options.json)
        check_writable("--picture", getattr(options, "picture", ""))
        found, text = measure(options, load_config([options.recipe, *flags]))
        if options.json:
            with new_file(Path(options.json)) as file:
                file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        say(text)
    except UserError as e:
        user_error(str(e))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Where the time of a training step goes, how fast every switch is, and what logging costs.

    python -m tools.profile configs/shakespeare_char_cpu.toml
    python -m tools.profile configs/quickstart.toml --picture profile.png -- --norm rmsnorm
    python -m tools.profile switches configs/shakespeare_char_cpu.toml
    python -m tools.profile logging configs/shakespeare_char_cpu.toml

Flags after `--` are train.py's. The first form is short for `python -m tools.profile step`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from base.cli import STRICT, require, run
from base.files import check_writable, write_text
from base.flags import Positional, options
from configs import Config, load_config
from tools.palette import MARK
from tools.profile import classes, logging_cost, steps

COMMAND = "python -m tools.profile"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Measurement:
    recipe: Positional[str]
    """A recipe, as for train.py."""
    json: str = ""
    """File for the numbers."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Step(Measurement):
    """Where the time of a step goes, by class of operator (also without this word)."""

    rounds: steps.Rounds = 10
    """Steps of each kind that are measured."""
    compiled: bool = True
    """Also compile the model, which takes a minute or two."""
    picture: str = ""
    """File for the picture of the classes (.png or .svg)."""

    def __post_init__(self):
        kind = Path(self.picture).suffix
        wanted = not self.picture or kind in (".png", ".svg")
        require(wanted, f"--picture wants a .png or an .svg, not {kind!r}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Switches(Measurement):
    """The speed of every norm, placement and other choice of the model relative to pre LayerNorm."""

    rounds: steps.Rounds = 10
    """Steps of each setting that are measured."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Logging(Measurement):
    """What logging costs."""

    rounds: steps.Rounds | None = None
    """Logged steps that are measured; as many as two minutes hold if not given."""


def measure(act: Step | Switches | Logging, config: Config) -> tuple[dict[str, Any], str]:
    """The numbers, and the text that tells them."""
    if isinstance(act, Switches):
        found = steps.switches(config, act.rounds)
        return found, "\n".join(steps.lines(found))
    if isinstance(act, Logging):
        cost = logging_cost.measure(config, act.rounds)
        return asdict(cost) | {"share": cost.share}, str(cost)
    found = classes.measure(config, act.rounds, act.compiled)
    if act.picture:
        classes.draw(found, Path(act.picture))
    return found, "\n".join(classes.table(found))


def main(argv: Sequence[str]) -> None:
    own, flags = steps.apart(argv)
    if own[:1] not in (["step"], ["switches"], ["logging"], ["--help"], ["-h"]):
        own = ["step", *own]
    about = "Where the time of training goes. Flags of train.py follow after `--`, as in `-- --batch-size 4`."
    act = options(Step | Switches | Logging, own, COMMAND, about)
    check_writable("--json", act.json, COMMAND)
    check_writable("--picture", getattr(act, "picture", ""), MARK)
    found, text = measure(act, load_config([act.recipe, *flags]))
    if act.json:
        write_text(Path(act.json), json.dumps({"command": COMMAND, "results": found}, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    run(main)

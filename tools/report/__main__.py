"""What runs have recorded, side by side.

python -m tools.report out/pre out/post -o report.html      one page, for any browser, without network
python -m tools.report out/pre out/post --png pictures      pictures for a paper or a README
python -m tools.report out/pre --text                       a table on the terminal
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from pydantic.dataclasses import dataclass

from base.cli import UserError
from configs import STRICT, command_line, require, user_error
from tools.output import new_file, say
from tools.report.page import page
from tools.report.pictures import save_pictures
from tools.report.runs import Run, load_runs
from tools.report.text import depth_table

Runs = Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")]


@dataclass(frozen=True, config=STRICT)
class Options:
    """Compare what runs have recorded, also while they are going."""

    runs: tyro.conf.Positional[Runs]
    """The folders of 1 to 20 runs, such as out/quickstart."""
    output: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "report.html"
    """The page to write."""
    png: str = ""
    """Write pictures into this folder instead of a page."""
    text: bool = False
    """Print a table by depth instead of a page."""

    def __post_init__(self):
        require(not (self.png and self.text), "--png and --text exclude each other")


def main(argv: Sequence[str]) -> None:
    try:
        options = command_line(Options, argv, "python -m tools.report")
        runs = load_runs(options.runs)
        if options.text:
            say("\n\n".join(f"{run.label}\n{depth_table(run)}" for run in runs))
        elif options.png:
            for path in save_pictures(runs, Path(options.png)):
                say(str(path))
        else:
            write_page(runs, Path(options.output))
            say(f"{options.output}: open it in a browser")
    except UserError as e:
        user_error(str(e))


def write_page(runs: list[Run], path: Path) -> None:
    text = page(runs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror}") from None
    with new_file(path) as file:
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

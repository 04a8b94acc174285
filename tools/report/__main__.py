"""What runs have recorded, side by side.

python -m tools.report out -o report.html --open       one page of all runs in out/, for any browser, without network
python -m tools.report out/pre out/post --watch        the same while they are going: served on this machine, refreshed
python -m tools.report out/pre out/post --png pictures  the picture for a paper or a README
python -m tools.report out/pre --text                  a table on the terminal
python -m tools.report out/pre out/post --csv > a.csv  all numbers, for a notebook
"""

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from pydantic.dataclasses import dataclass

from base.cli import UserError
from configs import STRICT, command_line, require, user_error
from tools.output import new_file, say
from tools.report.frame import as_csv
from tools.report.page import page
from tools.report.pictures import save_overview
from tools.report.runs import Run, load_runs
from tools.report.text import summary
from tools.report.watch import serve

Runs = Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")]


@dataclass(frozen=True, config=STRICT)
class Options:
    """Compare what runs have recorded, also while they are going."""

    runs: tyro.conf.Positional[Runs]
    """Folders of runs, such as out/quickstart, or folders that hold runs, such as out."""
    output: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "report.html"
    """The page to write."""
    open: bool = False
    """Show the page in a browser."""
    watch: bool = False
    """Serve the page to this machine's browsers and refresh it as rows come, until Ctrl-C."""
    port: int = 0
    """Of --watch; 0 takes a free one."""
    png: str = ""
    """Write overview.png into this folder instead of a page."""
    text: bool = False
    """Print a summary by depth instead of a page."""
    csv: bool = False
    """Print every recorded number, a line per run and step, instead of a page."""

    def __post_init__(self):
        chosen = [f"--{name}" for name in ("watch", "png", "text", "csv") if getattr(self, name)]
        require(len(chosen) < 2, f"{' and '.join(chosen)} exclude each other")
        require(0 <= self.port < 2**16, f"--port is {self.port}; it must be from 0 to 65535")


def main(argv: Sequence[str]) -> None:
    try:
        options = command_line(Options, argv, "python -m tools.report")
        if options.watch:
            return serve(options.runs, options.port, options.open)
        runs = load_runs(options.runs, skip=note)
        if options.text:
            say("\n\n".join(summary(run) for run in runs))
        elif options.csv:
            say(as_csv(runs))
        elif options.png:
            say(str(save_overview(runs, Path(options.png))))
        else:
            path = Path(options.output)
            write_page(runs, path)
            say(f"{path.absolute()}: open it in a browser")
            if options.open:
                webbrowser.open(path.absolute().as_uri())
    except UserError as e:
        user_error(str(e))


def note(text: str) -> None:
    print(f"left out: {text}", file=sys.stderr)


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

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

from pydantic import Field
from pydantic.dataclasses import dataclass

from base.cli import STRICT, require, run
from base.files import check_writable, write_text, writing
from base.flags import Positional, Short, options
from tools.report.frame import as_csv
from tools.report.page import page
from tools.report.pictures import save_overview
from tools.report.runs import load_runs
from tools.report.text import summary
from tools.report.watch import serve


@dataclass(frozen=True, config=STRICT)
class Options:
    """Compare what runs have recorded, also while they are going."""

    runs: Positional[tuple[str, ...]] = ()
    """Folders of runs, such as out/quickstart, or folders that hold runs, such as out."""
    output: Annotated[str, Short("-o")] = "report.html"
    """The page to write."""
    open: bool = False
    """Show the page in a browser."""
    watch: bool = False
    """Serve the page to this machine's browsers and refresh it as rows come, until Ctrl-C."""
    port: Annotated[int, Field(ge=0, lt=2**16)] = 0
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


def main(argv: Sequence[str]) -> None:
    chosen = options(Options, argv, "python -m tools.report")
    if chosen.watch:
        return serve(chosen.runs, chosen.port, chosen.open)
    runs = load_runs(chosen.runs, skip=lambda why: print(f"left out: {why}", file=sys.stderr))
    if chosen.text:
        print("\n\n".join(summary(run) for run in runs))
    elif chosen.csv:
        print(as_csv(runs))
    elif chosen.png:
        print(save_overview(runs, Path(chosen.png)))
    else:
        path = Path(chosen.output).absolute()
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        check_writable("--output", str(path), "<title>nanonorm: ")
        text = page(runs)
        write_text(path, text)
        print(f"{path}: open it in a browser")
        if chosen.open:
            webbrowser.open(path.as_uri())


if __name__ == "__main__":
    run(main)

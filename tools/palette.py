"""Colours, dashes and shapes that the report page and all pictures share, safe for colour-blind readers.

The colours follow those of Okabe and Ito 2008, "Color Universal Design", without the yellow that white paper swallows,
and darker: each has a contrast of three to one with white paper. Seven colours and three dashes have no common factor,
so 21 lines differ, and neighbours differ in both. matplotlib is imported when a picture is drawn.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from base.cli import UserError
from base.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = "nanonorm"  # the title within a picture's file
COLOURS = ("#00508F", "#A33600", "#009A6E", "#C86FA6", "#BE8300", "#2F95DA", "#16191D")
DARK = ("#4DA3E0", "#F2833A", "#2DC39B", "#E39AC6", "#F0B429", "#9AD4F5", "#F4F5F7")  # the same on black
DASHES = ("solid", "dash", "dot")  # as Plotly calls them
HEAT = ("#00224E", "#123570", "#3B496C", "#575D6D", "#707173", "#8A8678", "#A59C74", "#C3B369", "#E1CC55",
        "#FEE838")  # fmt: skip
STYLE = {
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3},
    **{"font.size": 9, "axes.titlesize": 10, "legend.frameon": False, "legend.fontsize": 8},
    **{"figure.titlesize": 10, "legend.handlelength": 2.6, "svg.hashsalt": "nanonorm"},
}


def line_style(i: int) -> dict[str, str]:
    """matplotlib's arguments for the i-th line of a picture."""
    dash = {"solid": "-", "dash": "--", "dot": ":"}[DASHES[i % len(DASHES)]]
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": dash}


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Pictures begun in this block have the style of all. Raises UserError where matplotlib is missing."""
    try:
        from matplotlib import rc_context
    except ImportError:
        raise UserError(
            "the pictures need matplotlib; install it with `pip install -e '.[report]'`"
        ) from None
    with rc_context(STYLE):
        yield


def save(figure: "Figure", path: Path) -> None:
    """Writes a picture in the format of the file's suffix, the same bytes for the same picture. Raises UserError."""
    stamp = {".png": "Software", ".pdf": "CreationDate", ".svg": "Date"}[path.suffix]
    with drawing(), atomic_file(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=160, metadata={stamp: None, "Title": MARK})

"""Colours, dashes and shapes that the report page and all pictures share, safe for colour-blind readers.

The colours follow those of Okabe and Ito 2008, "Color Universal Design", without the yellow that white paper swallows,
and darker: each has a contrast of three to one with white paper. Seven colours and three dashes have no common factor,
so 21 lines differ, and neighbours differ in both. matplotlib is imported when a picture is drawn.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from base.cli import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#00508F", "#A33600", "#009A6E", "#C86FA6", "#BE8300", "#2F95DA", "#16191D")
DARK = ("#4DA3E0", "#F2833A", "#2DC39B", "#E39AC6", "#F0B429", "#9AD4F5", "#F4F5F7")  # the same on black
DASHES = ("solid", "dash", "dot")  # as Plotly calls them
HEAT = (
    "#00224E",
    "#123570",
    "#3B496C",
    "#575D6D",
    "#707173",
    "#8A8678",
    "#A59C74",
    "#C3B369",
    "#E1CC55",
    "#FEE838",
)
STYLE = {
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3},
    **{"font.size": 9, "axes.titlesize": 10, "legend.frameon": False, "legend.fontsize": 8},
    **{"figure.titlesize": 10, "legend.handlelength": 2.6},
}


def line_style(i: int) -> dict[str, str]:
    """matplotlib's arguments for the i-th line of a picture."""
    dash = {"solid": "-", "dash": "--", "dot": ":"}[DASHES[i % len(DASHES)]]
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": dash}


def picture(rows: int, columns: int, size: tuple[float, float], **share: bool) -> "tuple[Figure, list]":
    """(a matplotlib figure of `size` inches, its rows of axes). Raises UserError where matplotlib is missing."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "the pictures need matplotlib; install it with `pip install -e '.[report]'`"
        ) from None
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False, **share)


def save(figure: "Figure", path: Path) -> None:
    """As the file's suffix says: PNG, SVG or PDF, the same bytes for the same picture."""
    from matplotlib import rc_context

    stamp = {".png": "Software", ".pdf": "CreationDate", ".svg": "Date"}[path.suffix]
    with rc_context(STYLE | {"svg.hashsalt": "nanonorm"}):
        figure.savefig(path, dpi=160, metadata={stamp: None})

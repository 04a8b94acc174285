"""The terminal's table: what a run was at its start and has become, depth by depth."""

import math

from tools.report.runs import QUANTITIES, Run, height

SHOWN = 13  # depths at most, evenly spread; those that grew more than tenfold are always shown
GROWN = 10.0


def first_and_last(run: Run, name: str) -> dict[str, tuple[float | None, float | None]]:
    """(first, last) recorded value of a quantity at every place."""
    table = run.table(next(q for q in QUANTITIES if q.name == name))
    if not table.steps:
        return {}
    return dict(zip(table.places, zip(table.values[0], table.values[-1], strict=True), strict=True))


def depth_table(run: Run) -> str:
    """Stream RMS, gradient norm and largest attention logit at start and end; `x12` marks tenfold growth."""
    columns = {
        "stream RMS": first_and_last(run, "residual_rms"),
        "gradient norm": first_and_last(run, "grad_norm"),
        "largest logit": first_and_last(run, "attn_logit_max"),
    }
    marks = {}
    for title, values in columns.items():
        for place, (first, last) in values.items():
            factor = growth(first, last)
            if factor > GROWN:
                marks.setdefault(place_of(place), []).append(f"{title} x{factor:.0f}")
    depths = sorted(columns["stream RMS"], key=height)
    step = max(math.ceil((len(depths) - 1) / (SHOWN - 1)), 1)
    spread = {depths[min(i, len(depths) - 1)] for i in range(0, len(depths) + step - 1, step)}
    shown = [d for d in depths if d in spread or d in marks]
    lines = [f"{'':14}" + "".join(f"{title:>22}" for title in columns)]
    for depth in shown:
        cells = [span(columns[title].get(depth) or logit(columns[title], depth)) for title in columns]
        mark = "  ".join(marks.get(depth, []))
        lines.append((f"{depth:14}" + "".join(f"{cell:>22}" for cell in cells) + f"  {mark}").rstrip())
    return "\n".join(lines)


def place_of(place: str) -> str:
    """The depth in whose line a place stands: a layer's attention logits belong to its attention."""
    return place if "." in place or not place.startswith("layer_") else f"{place}.attn"


def logit(values: dict, depth: str):
    layer, _, branch = depth.partition(".")
    return values.get(layer) if branch == "attn" else None


def growth(first: float | None, last: float | None) -> float:
    return last / first if first and last else 0.0


def span(pair: tuple[float | None, float | None] | None) -> str:
    if pair is None:
        return ""
    return " -> ".join("not finite" if v is None else f"{v:.3g}" for v in pair)

"""The page: one HTML file with its data, styles, script and plotly.js inside, which asks no network for anything."""

import json
import math
from pathlib import Path
from typing import Any

from base.cli import UserError
from tools.report.runs import QUANTITIES, Run, differences, finals, height

HERE = Path(__file__).parent
LOSS_POINTS = 1500  # per curve
CELLS = 1_500_000  # numbers in all tables of a page, which share them; about 10 MB
STEPS = (40, 250)  # steps of a table, at least and at most


def page(runs: list[Run]) -> str:
    """The whole page. Raises UserError where plotly is not installed."""
    html = (HERE / "page.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(runs), allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    for name, content in (
        ("title", " · ".join(run.label for run in runs[:3]) + (" …" if len(runs) > 3 else "")),
        ("style", (HERE / "page.css").read_text(encoding="utf-8")),
        ("data", data),
        ("script", (HERE / "page.js").read_text(encoding="utf-8")),
        ("plotly", plotly_script()),
    ):
        html = html.replace(f"[[{name}]]", content)
    return html


def plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the page needs plotly; install it with `pip install -e '.[report]'`") from None
    return get_plotlyjs()


def page_data(runs: list[Run]) -> dict[str, Any]:
    """What page.js draws; None where a number was not finite. Curves and tables have five digits, which it writes out
    as they are; the finals have all, as it rounds them."""
    limit = steps_shown([run.n_layer for run in runs])
    return {
        "quantities": [
            {"id": q.id, "title": q.title, "about": q.about, "log": q.log, "gains": q.name == "gain"}
            for q in QUANTITIES
        ],
        "runs": [run_data(run, limit) for run in runs],
        "differences": differences(runs),
    }


def steps_shown(layers: list[int]) -> int:
    """How many steps each table keeps, for runs of so many layers."""
    depths = sum(2 * n + 1 for n in layers)
    return min(max(CELLS // (depths * len(QUANTITIES)), STEPS[0]), STEPS[1])


def run_data(run: Run, limit: int) -> dict[str, Any]:
    tables = {q.id: run.table(q, limit) for q in QUANTITIES}
    return {
        "label": run.label,
        "layers": run.n_layer,
        "tokensPerStep": run.tokens_per_step,
        "loss": {key: curve(run, f"{key}/loss") for key in ("train", "val")},
        "tables": {
            id: {
                "steps": table.steps,
                "places": table.places,
                "heights": [h if math.isfinite(h := height(p)[0]) else None for p in table.places],
                "values": [[short(v) for v in row] for row in table.values],
            }
            for id, table in tables.items()
            if table.steps
        },
        "finals": {name: finite(value) for name, value in finals(run).items()},
    }


def curve(run: Run, key: str) -> list[list]:
    steps, values = run.series(key, LOSS_POINTS)
    return [steps, [short(v) for v in values]]


def short(value: float | None) -> float | None:
    if finite(value) is None or isinstance(value, int):
        return finite(value)
    return float(f"{value:.5g}")


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

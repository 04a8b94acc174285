"""The page: one HTML file with its data, styles, script and plotly.js inside, which asks no network for anything."""

import json
import math
import re
from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from base.cli import UserError
from tools import palette
from tools.report.findings import findings
from tools.report.runs import UNKNOWN, Run, as_text, chart_of, differences, duration, recorded, repetitions
from tools.report.thin import bucket_means, thin_curve, thin_table
from training.metrics import Quantity

HERE = Path(__file__).parent
SCRIPTS = ("page.js", "charts.js", "quantities.js")  # one script
POINTS = (300, 1500)  # of a curve, at least and at most,
ALL_POINTS = 8_000  # and of one curve in all runs together
CELLS = 350_000  # numbers in all tables of a page, which share them; about 3 MB
STEPS = (30, 40, 60, 80, 120, 160, 200, 250)  # of a table, which has the same of a page's tables
GAP = Quantity("gap", "run", "linear", "high", "Validation minus training loss", "nats",
               "training: mean of the five rows before the evaluation")  # fmt: skip
MAIN = ("train_grad_norm", "train_lr", "perf_tokens_per_s", "gap")  # the curves beside the loss
COMMON = {
    **{"norm": "{}", "placement": "{}", "n_layer": "{} layers", "n_embd": "{} wide", "n_head": "{} heads"},
    **{"block_size": "{} tokens of context", "optimizer": "{}", "lr": "lr {}", "dataset": "on {}"},
}
LOSSES = ("train_loss", "val_loss")


def page(runs: Sequence[Run], more: dict[str, Any] | None = None) -> str:
    """The whole page; `more` is added to its data. Raises UserError where plotly is not installed."""
    title = " · ".join(run.label for run in runs[:3]) + (" …" if len(runs) > 3 else "")
    parts = {
        "title": escape(title),
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        # no tag, whatever a run is called
        "data": as_json(page_data(runs) | (more or {})).replace("<", "\\u003c"),
        "script": "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "plotly": plotly_script(),
    }
    html = (HERE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\[\[(\w+)\]\]", lambda found: parts[found[1]], html)


def plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the page needs plotly; install it with `pip install -e '.[report]'`") from None
    return get_plotlyjs()


def as_json(data: dict[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """What page.js draws; None where a number was not finite. Curves and tables have five digits, cells have all."""
    quantities = recorded(runs)
    curves = [GAP, *(q for q in quantities if q.per == "run")]
    tables = [q for q in quantities if q.per != "run"]
    points = min(max(ALL_POINTS // len(runs), POINTS[0]), POINTS[1])
    limit = steps_shown([run.table(q).values.shape for run in runs for q in tables])
    groups = repetitions(runs)
    fields = differences(runs)
    return {
        "palette": {
            "light": palette.COLOURS,
            "dark": palette.DARK,
            "dashes": palette.DASHES,
            "heat": palette.HEAT,
        },
        "curves": [
            describe(q) | {"main": q.id in MAIN}
            for q in sorted(curves, key=place_on_page)
            if q.id not in LOSSES
        ],
        "tables": [describe(q) for q in tables],
        "findings": findings(runs),
        "thinned": thinned(runs, points, limit),
        "common": in_common(runs, fields),
        "differing": list(fields),
        "fields": [name for name in fields if name == "seed" or name not in runs[0].config["run"]],
        "runs": [
            run_data(run, curves, tables, points, limit)
            | {"group": next(i for i, group in enumerate(groups) if run in group)}
            | {"settings": {field: values[i] for field, values in fields.items()}}
            for i, run in enumerate(runs)
        ],
    }


def in_common(runs: Sequence[Run], fields: Collection[str]) -> str:
    """What all runs are, in words: `layernorm, pre, 8 layers, ...`."""
    parts = []
    for name, words in COMMON.items():
        values = {as_text(run.settings.get(name)) for run in runs}
        if name not in fields and len(values) == 1:
            parts.append(words.format(*values))
    return ", ".join(parts)


def chart_id(quantity: Quantity) -> str:
    return "gap" if quantity is GAP else chart_of(quantity)


def place_on_page(quantity: Quantity) -> int:
    return MAIN.index(quantity.id) if quantity.id in MAIN else len(MAIN)


def describe(q: Quantity) -> dict[str, Any]:
    return {
        **{"id": chart_id(q), "title": q.title, "about": q.about, "unit": q.unit, "log": q.scale == "log"},
        **{"alarm": q.alarm, "per": q.per},
    }


def steps_shown(shapes: Sequence[tuple[int, int]]) -> int:
    """How many steps each table keeps, of the recorded (steps, places); a thinned one has three numbers a cell."""
    for limit in reversed(STEPS):
        if sum(places * (steps if steps <= limit else 3 * limit) for steps, places in shapes) <= CELLS:
            return limit
    return STEPS[0]


def thinned(runs: Sequence[Run], points: int, limit: int) -> str:
    """How much of what was recorded is drawn, where it is not all."""
    rows = max(len(run.columns.steps) for run in runs)
    if rows <= min(points, limit):
        return ""
    return (
        f"Of up to {rows:,} rows, curves show {min(points, rows):,} points and tables {min(limit, rows):,} steps; "
        f"the extremes between are kept."
    )


def run_data(
    run: Run, curves: list[Quantity], tables: list[Quantity], points: int, limit: int
) -> dict[str, Any]:
    flops = run.fact("flops_per_token", float)
    steps, hours = run.hours
    some = np.linspace(0, len(steps) - 1, min(len(steps), 200)).astype(int)
    return {
        **{"label": run.label, "state": run.state, "stateText": run.state_in_words, "report": run.report},
        **{"layers": run.n_layer, "warmup": run.warmup, "lastStep": run.last_step},
        "scales": {
            "tokens": run.tokens_per_step,
            "FLOPs": flops and flops * run.tokens_per_step,
            "hours": [[0, *steps[some].tolist()], [0, *numbers(hours[some])]] if len(steps) else None,
        },
        "marks": run.marks,
        "references": references(run),
        "curves": {
            chart_id(q): curve(run, q, points) for q in curves if q is GAP or chart_of(q) in run.places
        },
        "tables": {chart_of(q): table(run, q, limit) for q in tables if chart_of(q) in run.places},
        "cells": cells(run),
        "identity": identity(run),
    }


def references(run: Run) -> dict[str, list[tuple[str, float]]]:
    """Lines that a chart shows for comparison, by the id of its quantity."""
    model, clip = run.config["model"], run.config["optim"]["grad_clip"]
    vocabulary, unigram = model["vocab_size"], run.fact("unigram_entropy", float)
    found = {
        "loss": [("ln V", math.log(vocabulary))] if vocabulary else [],
        "train_grad_norm": [("clip", clip)] if clip else [],
        "attn_entropy": [("ln T", math.log(model["block_size"]))],
        "angle_deg": [("90", 90.0)],
        "update_ratio": [("1e-3", 1e-3)],
    }
    if unigram:
        found["loss"].append(("unigram entropy", unigram))
    if model["qk_norm"] == "head":
        width = model.get("head_dim") or model["n_embd"] // model["n_head"]
        found["attn_logit_max"] = [("√head_dim: QK-norm with gains of 1", math.sqrt(width))]
    return found


def curve(run: Run, quantity: Quantity, points: int) -> dict[str, Any]:
    steps, values = run.gap if quantity is GAP else run.series(quantity.name)
    kept = thin_curve(values, points)
    found = {"steps": steps[kept].tolist(), "values": numbers(values[kept]), "rows": len(steps)}
    if len(kept) < len(steps):
        means = bucket_means(steps, values, points // 2)
        found["mean"] = [numbers(means[0]), numbers(means[1])]
    return found


def table(run: Run, quantity: Quantity, limit: int) -> dict[str, Any]:
    whole = run.table(quantity)
    kept = thin_table(whole.steps, whole.values, limit)
    found = {
        "steps": kept.steps.tolist(),
        "places": [place.text for place in whole.places],
        "norms": [place.norm for place in whole.places],
        "heights": [h if math.isfinite(h := place.height) else None for place in whole.places],
        "values": [numbers(row) for row in kept.values],
        "rows": kept.rows,
    }
    if kept.rows > len(kept.steps):
        found |= {name: [numbers(row) for row in getattr(kept, name)] for name in ("low", "high")}
    return found


def cells(run: Run) -> dict[str, float | str | None]:
    """The columns of the table of runs: what a run has come to, so far."""
    val = run.series("val/loss")[1]
    val = val[np.isfinite(val)]
    seconds = run.fact("seconds", float)
    return {
        "val loss": float(val[-1]) if len(val) else None,
        "best val loss": float(val.min()) if len(val) else None,
        "train loss": run.last("train/loss"),
        "step": run.last_step,
        "parameters": run.fact("parameters", int) or UNKNOWN,
        "wall time": duration(seconds),
        "tokens/s": run.last("perf/tokens_per_s"),
        "steps clipped": UNKNOWN if run.clipped is None else f"{run.clipped:.0%}",
        "loss spikes": len(run.marks["spike"]) if run.facts else UNKNOWN,
    }


def identity(run: Run) -> dict[str, str]:
    """All that tells what a run was: how it was started, on what, and every setting."""
    known = {
        name: run.facts.get(name) for name in ("started", "commit", "torch", "host", "device", "processes")
    }
    command = run.facts.get("command")
    known |= {
        "command": " ".join(map(str, command)) if isinstance(command, list) else None,
        **{name: run.facts.get(name) for name in ("train_tokens", "flops_per_token", "unigram_entropy")},
    }
    found = {name: UNKNOWN if value is None else as_text(value) for name, value in known.items()}
    return {"folder": str(run.path)} | found | {name: as_text(value) for name, value in run.settings.items()}


def numbers(values: np.ndarray) -> list[float | None]:
    return [short(v) for v in values.tolist()]


def short(value: float | None) -> float | None:
    """With five digits; None where it is not finite."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None

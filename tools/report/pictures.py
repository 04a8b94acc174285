"""The picture for a paper or a README, from the same numbers as the page; the page saves its charts itself."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from base.files import check_writable, make_folder
from tools.palette import MARK, drawing, line_style, save
from tools.report.runs import Run
from tools.report.thin import thin_curve
from training.metrics import QUANTITIES, Quantity

OVERVIEW = ("residual_rms", "stream_grad_rms")
POINTS = 800  # of a curve
LEGEND_ROW = 90  # characters of labels


def save_overview(runs: Sequence[Run], folder: Path) -> Path:
    """overview.png: the loss over time, and two quantities over depth, with one legend. Raises UserError."""
    path = folder / "overview.png"
    make_folder(folder)
    check_writable("--png", str(path), MARK)
    quantities = [q for q in QUANTITIES if q.id in OVERVIEW and any(q.id in run.places for run in runs)]
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3.8 * (1 + len(quantities)), 3.4), layout="constrained")
        axes = figure.subplots(1, 1 + len(quantities), squeeze=False)[0]
        draw_loss(axes[0], runs)
        for ax, quantity in zip(axes[1:], quantities, strict=True):
            draw_profile(ax, runs, quantity)
        handles, names = axes[0].get_legend_handles_labels()
        columns = max(int(LEGEND_ROW // (max(map(len, names), default=1) + 6)), 1)
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(runs), columns))
    save(figure, path)
    return path


def draw_loss(ax, runs: Sequence[Run]) -> None:
    """From the warm-up on, where the runs differ; extremes are kept, so a spike of one row is seen."""
    rows = 0
    lows, highs = [], []
    for i, run in enumerate(runs):
        for name, look in (
            ("train/loss", {"linewidth": 0.7, "alpha": 0.45}),
            ("val/loss", {"linewidth": 1.8}),
        ):
            steps, values = run.series(name)
            rows = max(rows, len(steps))
            kept = thin_curve(values, POINTS)
            label = run.label if name == "val/loss" else None
            ax.plot(steps[kept], values[kept], **line_style(i) | look, label=label)
            later = values[(steps >= run.warmup) & np.isfinite(values)]
            if len(later) and run.state != "diverged":
                lows.append(later.min())
                highs.append(later.max())
    if lows and max(highs) > min(lows):
        room = 0.04 * (max(highs) - min(lows))
        ax.set_ylim(min(lows) - room, max(highs) + room)
    note = f"\n{POINTS:,} of {rows:,} rows, extremes kept" if rows > POINTS else ""
    ax.set(
        title=f"Loss from the warm-up on\nthick: validation, thin: training{note}",
        xlabel="steps",
        ylabel="nats per token",
    )


def draw_profile(ax, runs: Sequence[Run], quantity: Quantity) -> None:
    """Thick, the last recorded step; thin, how far each depth has gone since the warm-up towards the alarming end."""
    extreme, word = (np.fmin, "least") if quantity.alarm == "low" else (np.fmax, "largest")
    for i, run in enumerate(runs):
        table = run.table(quantity)
        if not len(table.steps):
            continue
        heights = np.array([place.height for place in table.places])
        depths = np.isfinite(heights)
        later = table.steps >= min(run.warmup, table.steps[-1])
        ends = extreme.reduce(table.values[later], axis=0)
        ax.plot(heights[depths], ends[depths], **line_style(i) | {"linewidth": 0.7, "alpha": 0.6})
        ax.plot(heights[depths], table.values[-1][depths], **line_style(i), linewidth=1.8)
    ax.set(title=f"{quantity.title}\nthick: at the end, thin: {word} since warm-up", xlabel="layer")
    if quantity.scale == "log":
        ax.set_yscale("log")

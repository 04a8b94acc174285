"""A study's results: a table with mean and spread over seeds, the curves, and a picture."""

import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base.files import read_object, write_text
from tools.palette import drawing, line_style, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cells = list[dict[str, Any]]


def write(path: Path, cells: Cells, command: str) -> None:
    """path.json (every cell), path.md (the table) and path.png (curves and final losses)."""
    text = json.dumps({"command": command, "cells": cells}).replace('{"cell"', '\n{"cell"')
    table = "\n".join(lines(cells))
    write_text(Path(f"{path}.json"), text + "\n")
    write_text(Path(f"{path}.md"), f"From {path.name}.json, by `{command}`.\n\n{table}\n")
    save(draw(cells), Path(f"{path}.png"))
    print(f"{table}\n\n{path}.json, .md and .png")


def foreign(path: Path) -> Path | None:
    """The first file in the way of `write` that is not its own: what the .md and the picture belong to is the .json."""
    kinds = [Path(f"{path}.{kind}") for kind in ("json", "md", "png")]
    own = {"command", "cells"} == read_object(kinds[0]).keys()
    return None if own else next((file for file in kinds if file.exists()), None)


def settings(cells: Cells) -> dict[tuple, Cells]:
    """The cells of each setting, that is with everything equal but the seed."""
    groups: dict[tuple, Cells] = {}
    for cell in cells:
        key = tuple((k, v) for k, v in cell["cell"].items() if k != "seed")
        groups.setdefault(key, []).append(cell)
    return groups


def mean_and_spread(cells: Cells) -> tuple[float, float]:
    """Mean and standard deviation over the seeds; (inf, nan) where one of them diverged."""
    losses = [c["val_loss"] for c in cells]
    if any(c["diverged"] for c in cells) or None in losses:
        return math.inf, math.nan
    return statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else math.nan


def beyond_spread(a: Cells, b: Cells) -> bool:
    """Whether two means differ by more than twice the standard error of their difference."""
    (mean_a, sd_a), (mean_b, sd_b) = mean_and_spread(a), mean_and_spread(b)
    if math.isinf(mean_a) or math.isinf(mean_b):
        return mean_a != mean_b
    return abs(mean_a - mean_b) > 2 * math.sqrt(sd_a**2 / len(a) + sd_b**2 / len(b))


def best_rates(cells: Cells) -> dict[tuple, Cells]:
    """For each setting without its learning rate, the cells at its best one."""
    best: dict[tuple, Cells] = {}
    for key, group in settings(cells).items():
        short = tuple((k, v) for k, v in key if k != "lr")
        if short not in best or mean_and_spread(group)[0] < mean_and_spread(best[short])[0]:
            best[short] = group
    return best


def lines(cells: Cells) -> list[str]:
    """Markdown: every setting; then each, at its best learning rate where rates were varied, against the first."""
    groups = settings(cells)
    keys = [k for k, _ in next(iter(groups))]
    rows = table(*keys, "validation loss", "spread", "seeds", "diverged", "largest gradient norm")
    for key, group in groups.items():
        mean, spread = mean_and_spread(group)
        largest = max((c["max_grad_norm"] for c in group if c["max_grad_norm"] is not None), default=math.nan)
        diverged = sum(c["diverged"] for c in group)
        values = (*(v for _, v in key), number(mean), number(spread), len(group), diverged, f"{largest:.2g}")
        rows.append(row(*values))
    best, rates = best_rates(cells), ["lr"] if "lr" in keys else []
    first = next(iter(best.values()))
    at_best = "Each at its best learning rate" if rates else "Each"
    rows += ["", f"{at_best}, against {label(next(iter(best)))}:", ""]
    rows += table("setting", *rates, "validation loss", "spread", "difference", "beyond the spread")
    for key, group in best.items():
        mean, spread = mean_and_spread(group)
        difference = mean - mean_and_spread(first)[0]
        verdict = "-" if group is first else "yes" if beyond_spread(group, first) else "no"
        lr = [group[0]["cell"][name] for name in rates]
        rows.append(row(label(key), *lr, number(mean), number(spread), f"{difference:+.4f}", verdict))
    return rows


def row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table(*heads: str) -> list[str]:
    """The head of a table, and the line below it."""
    return [row(*heads), "|---" * len(heads) + "|"]


def number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "-"


def label(key: tuple) -> str:
    return ", ".join(f"{k} {v}" for k, v in key) or "the recipe"


def draw(cells: Cells) -> "Figure":
    """Left, the mean curve of every setting at its best learning rate; right, its seeds' final losses, best first."""
    best = {k: g for k, g in best_rates(cells).items() if math.isfinite(mean_and_spread(g)[0])}
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 0.3 * len(best) + 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        order = sorted(best, key=lambda key: mean_and_spread(best[key])[0])
        later = []  # losses after the first evaluation, which is that of no training
        for y, group in enumerate(best[key] for key in order):
            steps = [step for step, _ in group[0]["curve"]]
            curve = [statistics.mean(c["curve"][i][1] for c in group) for i in range(len(steps))]
            left.plot(steps, curve, **line_style(y))
            later += curve[1:]
            mean, spread = mean_and_spread(group)
            right.plot([mean - spread, mean + spread], [y, y], **line_style(y))
            losses = [c["val_loss"] for c in group]
            right.plot(losses, [y] * len(group), "o", color=line_style(y)["color"], alpha=0.6)
        if len(set(later)) > 1:
            left.set_ylim(min(later) - 0.05, max(later) + 0.05)
        left.set(xlabel="step", ylabel="validation loss, nats, mean over seeds")
        right.set(xlabel="final validation loss: each seed, and mean ± standard deviation")
        right.set_yticks(range(len(best)), [label(key) for key in order], fontsize=8)
        right.invert_yaxis()
    return figure

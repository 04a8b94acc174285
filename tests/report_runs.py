"""Folders of runs whose numbers are known, for the tests of the report."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs import Config, replace, to_toml
from training.metrics import branch_names, depth_names, part_names

PLACEMENTS = ("pre", "post", "output", "sandwich")


def write_config(folder: Path, sections: Mapping[str, Mapping[str, Any]]) -> None:
    config = Config()
    for section, changes in sections.items():
        config = replace(config, section, **changes)
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")


def rows_of(n_layer: int, steps: int, every: int = 5) -> list[dict[str, float]]:
    """Stream RMS 1 + depth index, times 20 in the last row; logits 0.5, 8 in the last; losses that fall."""
    rows = []
    for step in range(0, steps + 1, every):
        row = {"iter": step, "tokens": 100 * step, "val/loss": 5.0 - 2.0 * step / steps}
        grown = 20.0 if step == steps else 1.0
        row |= {"train/loss": 5.5 - 2.0 * step / steps, "train/lr": 1e-3, "train/grad_norm": 0.8}
        row |= {"perf/tokens_per_s": 1000.0}
        row |= {f"residual_rms/{d}": (1.0 + i) * grown for i, d in enumerate(depth_names(n_layer))}
        row |= {f"grad_norm/{d}": 1.0 / (1 + i) for i, d in enumerate(part_names(n_layer))}
        row |= {f"stream_grad_rms/{d}": 1e-4 * (1 + i) for i, d in enumerate(depth_names(n_layer))}
        for i, b in enumerate(branch_names(n_layer)):
            row |= {f"branch_rms/{b}": 0.1 * (1 + i), f"angle_deg/{b}": 40.0 - i, f"update_ratio/{b}": 1e-3}
            row |= {f"gain/{b}.next_norm.mean": 1.0, f"gain/{b}.next_norm.max": 1.5}
        for i in range(n_layer):
            row |= {f"attn_logit_max/layer_{i:02d}": 8.0 if step == steps else 0.5}
            row |= {f"attn_entropy/layer_{i:02d}": 5.0}
        rows.append(row)
    return rows


def write_run(
    folder: Path,
    rows: list[dict[str, float | None]] | None = None,
    *,
    n_layer: int = 3,
    optim: Mapping[str, Any] = {"max_iters": 20, "warmup_iters": 0},
    run: Mapping[str, Any] = {},
    facts: Mapping[str, Any] | None = {"state": "done"},
    cut: bool = False,
    **model: Any,
) -> Path:
    """A run of 20 steps with `rows_of`, or with other rows; `cut`: killed while it wrote one more row."""
    folder.mkdir(parents=True)
    write_config(folder, {"model": {"n_layer": n_layer, **model}, "optim": optim, "run": run})
    write_rows(folder, rows_of(n_layer, 20) if rows is None else rows)
    if cut:
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"iter": 25, "tok')
    if facts is not None:
        (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def write_rows(folder: Path, rows: list[dict[str, float | None]]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")

"""Runs read back from their folders, and the quantities that are recorded at every depth."""

import difflib
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from base.cli import UserError
from configs import SECTIONS, Config
from training.tracker import read_metrics


@dataclass(frozen=True)
class Quantity:
    """One group of section names in metrics.jsonl, `name/PLACE`, or `name/PLACE.suffix` for the gains."""

    name: str
    title: str
    about: str
    log: bool = True
    suffix: str = ""

    @property
    def id(self) -> str:
        return self.name + self.suffix.replace(".", "_")


QUANTITIES = (
    Quantity("residual_rms", "Stream RMS", "size of the residual stream after each join"),
    Quantity("branch_rms", "Branch RMS", "size of what each branch adds to the stream"),
    Quantity("angle_deg", "Angle, degrees", "by which each join turns the stream", log=False),
    Quantity("grad_norm", "Gradient norm", "of the parameters of each branch"),
    Quantity(
        "stream_grad_rms", "Stream gradient RMS", "dL/dx of the stream: how the loss reaches this depth"
    ),
    Quantity("update_ratio", "Update ratio", "last update relative to the parameters, RMS over RMS"),
    Quantity("attn_logit_max", "Largest attention logit", "absolute, over the pairs that are not masked"),
    Quantity("attn_entropy", "Attention entropy, nats", "mean over rows; 0 looks at one token", log=False),
    Quantity("gain", "Mean gain", "of the norms at each depth", log=False, suffix=".mean"),
    Quantity("gain", "Largest gain", "absolute, of the norms at each depth", log=False, suffix=".max"),
)


@dataclass(frozen=True)
class Table:
    """One quantity of one run: values[j][i] at steps[j] and places[i]; None where it was not finite."""

    steps: list[int]
    places: list[str]
    values: list[list[float | None]]


@dataclass(frozen=True)
class Run:
    """A run's folder, read: `config` are the tables of config.toml, with today's defaults where it is older than a
    field, and `rows` the objects of metrics.jsonl."""

    label: str
    path: Path
    config: dict[str, dict[str, Any]]
    rows: list[dict[str, Any]]

    @property
    def n_layer(self) -> int:
        return self.config["model"]["n_layer"]

    @property
    def tokens_per_step(self) -> int:
        return self.config["optim"]["batch_size"] * self.config["model"]["block_size"]

    @cached_property
    def sections(self) -> dict[str, list[dict[str, Any]]]:
        """The rows that have names of each section, `residual_rms` for `residual_rms/embed`."""
        found: dict[str, list] = {}
        for row in self.rows:
            for section in {key.partition("/")[0] for key in row}:
                found.setdefault(section, []).append(row)
        return found

    def series(self, key: str, limit: int | None = None) -> tuple[list[int], list[float | None]]:
        """(steps, values) of one name, at most `limit` of them."""
        rows = thin([row for row in self.rows if key in row], limit)
        return [row["iter"] for row in rows], [row[key] for row in rows]

    def table(self, quantity: Quantity, limit: int | None = None) -> Table:
        """One quantity at every place, bottom to top, at no more than `limit` steps."""
        prefix = f"{quantity.name}/"

        rows = thin(self.sections.get(quantity.name, []), limit)
        keys = [k for k in (rows[-1] if rows else {}) if k.startswith(prefix) and k.endswith(quantity.suffix)]
        places = sorted((k.removeprefix(prefix).removesuffix(quantity.suffix) for k in keys), key=height)
        steps = [row["iter"] for row in rows]
        return Table(steps, places, [[row.get(prefix + p + quantity.suffix) for p in places] for row in rows])


def height(place: str) -> tuple[float, str]:
    """Where a place is, in layers from the bottom: embed 0, layer_00.attn 0.5, layer_00.mlp 1; then the rest."""
    layer, _, rest = place.partition(".")
    number = re.fullmatch(r"layer_(\d+)", layer)
    if not number:
        return (0.0, place) if place in ("embed", "embed_norm", "entry") else (math.inf, place)
    return int(number[1]) + (1.0 if rest.startswith("mlp") else 0.5), rest


def thin(rows: list, limit: int | None) -> list:
    """At most `limit` (2 or more) of the rows, evenly spread, with the first and the last."""
    if limit is None or len(rows) <= limit:
        return rows
    return [rows[round(i * (len(rows) - 1) / (limit - 1))] for i in range(limit)]


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in these folders, under labels that tell them apart. Raises UserError."""
    if not paths:
        raise UserError("name the runs to report on, as in `python -m tools.report out/quickstart`")
    folders = [Path(p) for p in paths]
    runs = [(folder, *load(folder)) for folder in folders]
    return [Run(label, *run) for label, run in zip(labels(folders), runs, strict=True)]


def load(folder: Path) -> tuple[dict, list[dict]]:
    if not folder.is_dir():
        known = [str(p.parent) for p in folder.parent.glob("*/metrics.jsonl")]
        close = difflib.get_close_matches(str(folder), known, n=1)
        raise UserError(f"{folder} does not exist" + (f" (did you mean {close[0]}?)" if close else ""))
    try:
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        rows = read_metrics(folder / "metrics.jsonl")
    except FileNotFoundError as e:
        raise UserError(f"{folder} is not a run: it has no {Path(e.filename).name}") from None
    except (OSError, ValueError, RecursionError) as e:  # ValueError: of UTF-8, JSON and TOML
        raise UserError(f"{folder} cannot be read: {e}") from None
    if not rows:
        raise UserError(f"{folder} has recorded nothing yet")
    check_rows(rows, folder / "metrics.jsonl")
    return complete(config, folder / "config.toml"), rows


def complete(config: dict[str, Any], file: Path) -> dict[str, dict[str, Any]]:
    """A run's configuration with the defaults of fields that are newer than it. Raises UserError for another file."""
    tables = {name: config.get(name, {}) for name in SECTIONS}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UserError(f"{file} is not a run's: {name} is {table!r}, but it is a table")
    for table, name in (("model", "n_layer"), ("model", "block_size"), ("optim", "batch_size")):
        value = tables[table].get(name)
        if type(value) is not int or value < 1:
            what = f"is {value!r}" if name in tables[table] else "is missing"
            raise UserError(f"{file} is not a run's: {name} under [{table}] {what}")
    return {name: asdict(getattr(Config(), name)) | table for name, table in tables.items()}


def check_rows(rows: list[Any], file: Path) -> None:
    """Raises UserError, which names the line, where a row is not what the tracker writes."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or type(row.get("iter")) is not int:
            raise UserError(
                f"{file}, line {number}: this is no object of numbers with iter, a step, among them"
            )
        for key, value in row.items():
            if not isinstance(value, int | float | None):
                raise UserError(f"{file}, line {number}: {key} is {value!r}, but it is a number or null")


def labels(folders: list[Path]) -> list[str]:
    """The last part of each path, or as many as it takes to be unique; repeated folders are numbered."""
    parts = [folder.resolve().parts for folder in folders]
    names = []
    for i, own in enumerate(parts):
        others = [p for j, p in enumerate(parts) if j != i and p != own]
        n = next((n for n in range(1, len(own)) if all(p[-n:] != own[-n:] for p in others)), len(own))
        name = "/".join(own[-n:])
        names.append(f"{name} ({names.count(name) + 1})" if name in names else name)
    return names


def differences(runs: list[Run]) -> dict[str, list[str]]:
    """Every configuration field whose value is not the same in all runs: {field: value of each run}."""
    fields = {f"{table}.{name}": None for run in runs for table, d in run.config.items() for name in d}
    found = {}
    for field in fields:
        table, _, name = field.partition(".")
        values = [run.config[table].get(name) for run in runs]
        values = ["-" if value is None else str(value) for value in values]
        if len(set(values)) > 1 and name not in ("run_name", "out_dir"):
            found[name] = values
    return found


def finals(run: Run) -> dict[str, float | None]:
    """What a run has come to, so far."""
    val = [v for v in run.series("val/loss")[1] if v is not None]
    train = [v for v in run.series("train/loss")[1] if v is not None]
    stream = run.table(QUANTITIES[0])
    top = [v for v in stream.values[-1] if v is not None] if stream.values else []
    return {
        "step": run.rows[-1]["iter"],
        "val loss": val[-1] if val else None,
        "best val loss": min(val, default=None),
        "train loss": train[-1] if train else None,
        "largest stream RMS": max(top, default=None),
        "tokens/s": (run.series("perf/tokens_per_s")[1] or [None])[-1],
    }

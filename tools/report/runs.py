"""Runs read back from their folders: their settings, their state, and their numbers by name or by depth."""

import json
import re
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from base.cli import UserError, did_you_mean
from base.files import read_object
from tools.report.columns import Columns
from training.metrics import BOOKKEEPING, QUANTITIES, Place, Quantity, parse

STATES = ("running", "done", "stopped", "diverged")
SILENT_MINUTES = 10  # without a new row, after which a run that says it is running may have been killed
UNKNOWN = "unknown"
SECTIONS = ("model", "data", "optim", "run")  # of config.toml
NEEDED = {  # fields that the report reads
    *(("model", name) for name in ("n_layer", "block_size", "vocab_size", "n_embd", "n_head", "qk_norm")),
    *(("optim", name) for name in ("max_iters", "batch_size", "warmup_iters", "grad_clip")),
    ("run", "seed"),
}
NAMES = ("run_name", "out_dir", "seed")  # settings that tell repetitions of one experiment apart


@dataclass(frozen=True)
class Table:
    """One quantity of one run: values [rows, places] at steps [rows], places bottom to top; NaN: not finite."""

    steps: np.ndarray
    places: list[Place]
    values: np.ndarray


@dataclass(frozen=True)
class Run:
    """A run's folder, read.

    config: the tables of config.toml, with today's defaults where it is older than a field.
    facts: run.json, empty where the run is older than that file.
    """

    label: str
    path: Path
    config: dict[str, dict[str, Any]]
    facts: dict[str, Any]
    columns: Columns

    @property
    def n_layer(self) -> int:
        return self.config["model"]["n_layer"]

    @property
    def warmup(self) -> int:
        return self.config["optim"]["warmup_iters"]

    @property
    def tokens_per_step(self) -> int:
        return self.config["optim"]["batch_size"] * self.config["model"]["block_size"]

    @property
    def last_step(self) -> int:
        return int(self.columns.steps[-1])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every field of the configuration by its name alone, which is unique."""
        return {name: value for table in self.config.values() for name, value in table.items()}

    def fact(self, name: str, kind: type = str) -> Any:
        """A value of run.json, None where it is not there or of another type; an int is a float too."""
        value = self.facts.get(name)
        return value if type(value) in ((int, float) if kind is float else (kind,)) else None

    @cached_property
    def marks(self) -> dict[str, list[int]]:
        """The steps of rows that are marked: {"spike": [...], "diverged": [...]}."""
        return {name: [int(step) for step in self.series(name)[0]] for name in ("spike", "diverged")}

    @cached_property
    def report(self) -> list[str]:
        """The lines of the report of a run that has diverged."""
        lines = self.facts.get("report")
        return [str(line) for line in lines] if isinstance(lines, list) and self.state == "diverged" else []

    @property
    def state(self) -> str:
        """One of STATES as run.json says, or else `unknown`."""
        return self.facts.get("state") if self.facts.get("state") in STATES else UNKNOWN

    @property
    def state_in_words(self) -> str:
        """`done`, `diverged at step 11`, `stopped at step 300 of 2000`, `running, silent for 3 h`, ..."""
        steps = f"at step {self.last_step:,} of {self.config['optim']['max_iters']:,}"
        if self.state == "diverged":
            told = re.search(r"step (\d+)", self.report[0]) if self.report else None
            step = self.marks["diverged"][-1] if self.marks["diverged"] else told and int(told[1])
            return f"diverged at step {step:,}" if step is not None else "diverged"
        if self.state == "running":
            minutes = (time.time() - self.columns.path.stat().st_mtime) / 60
            silent = f", silent for {duration(60 * minutes)}" if minutes > SILENT_MINUTES else ""
            return f"running, {steps}{silent}"
        return "done" if self.state == "done" else f"{self.state}, {steps}"

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of one name; NaN where it was not finite."""
        found = self.columns.matrix(["iter", name])
        return found[:, 0].astype(int), found[:, 1]

    def last(self, name: str) -> float | None:
        """The last finite value of a name, None if there is none."""
        values = self.series(name)[1]
        values = values[np.isfinite(values)]
        return float(values[-1]) if len(values) else None

    @cached_property
    def places(self) -> dict[str, list[tuple[Place, str]]]:
        """By the chart of each recorded quantity: (place, name in metrics.jsonl) of all its places, bottom to top."""
        found: dict[str, list[tuple[Place, str]]] = {}
        for name in self.columns.names:
            if name not in BOOKKEEPING:
                quantity, place = parse(name)
                found.setdefault(chart_of(quantity), []).append((place, name))
        return {
            id: sorted(pairs, key=lambda pair: (pair[0].height, pair[0].text)) for id, pairs in found.items()
        }

    def table(self, quantity: Quantity) -> Table:
        """One quantity at every place and recorded step."""
        pairs = self.places.get(chart_of(quantity), [])
        found = self.columns.matrix(["iter", *(name for _, name in pairs)])
        return Table(found[:, 0].astype(int), [place for place, _ in pairs], found[:, 1:])

    @cached_property
    def hours(self) -> tuple[np.ndarray, np.ndarray]:
        """(steps, hours of training up to them), without evaluation and checkpoints, from the recorded throughput."""
        found = self.columns.matrix(["iter", "tokens", "perf/tokens_per_s"])
        found = found[np.isfinite(found).all(axis=1) & (found[:, 2] > 0)]
        seconds = np.diff(found[:, 1], prepend=0.0) / found[:, 2]
        return found[:, 0].astype(int), np.cumsum(seconds) / 3600

    @cached_property
    def gap(self) -> tuple[np.ndarray, np.ndarray]:
        """(steps, validation minus training loss): training as the mean of the last five rows before."""
        steps, val = self.series("val/loss")
        at, train = self.series("train/loss")
        ends = np.searchsorted(at, steps, side="right")
        found = [
            (s, v - np.mean(train[max(n - 5, 0) : n])) for s, v, n in zip(steps, val, ends, strict=True) if n
        ]
        return np.array([s for s, _ in found], dtype=int), np.array([d for _, d in found])

    @cached_property
    def clipped(self) -> float | None:
        """The share of logged steps whose gradient was clipped; None where nothing is known of it."""
        limit, norms = self.config["optim"]["grad_clip"], self.series("train/grad_norm")[1]
        norms = norms[np.isfinite(norms)]
        return float(np.mean(norms > limit)) if len(norms) and limit else None


def chart_of(quantity: Quantity) -> str:
    """A quantity's name among the charts; one that is the user's own cannot take that of another."""
    return quantity.id if quantity in QUANTITIES else f"own:{quantity.name}"


def duration(seconds: float | None) -> str:
    """`38 s`, `12 min`, `3.4 h`, `2.1 d`."""
    if seconds is None:
        return UNKNOWN
    for size, unit in ((86400, "d"), (3600, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def recorded(runs: Iterable[Run]) -> list[Quantity]:
    """The quantities of QUANTITIES that any run has recorded, in that order, then those that are the user's own."""
    found = {parse(name)[0] for run in runs for name in run.columns.names if name not in BOOKKEEPING}
    known = [quantity for quantity in QUANTITIES if quantity in found]
    return known + sorted(found - set(known), key=lambda quantity: quantity.name)


def find_folders(paths: Sequence[str | Path]) -> list[Path]:
    """The folders, and in place of one that is no run and holds runs, all of those."""
    found = []
    for path in map(Path, paths):
        inside = sorted(file.parent for file in path.glob("*/metrics.jsonl"))
        found += inside if inside and not (path / "metrics.jsonl").is_file() else [path]
    return found


def load_runs(
    paths: Sequence[str | Path],
    skip: Callable[[str], None] | None = None,
    known: dict[Path, Columns] | None = None,
) -> list[Run]:
    """The runs in these folders, under labels that tell them apart.

    Raises UserError for a folder that is no run; with `skip`, one among others is left out, and `skip` told why.
    known: what was read before, by folder; it is read on instead of anew, and what is new is added.
    """
    if not paths:
        raise UserError("name the runs to report on, as in `python -m tools.report out/quickstart`")
    loaded, mistakes = {}, []
    for number, folder in enumerate(find_folders(paths)):
        if not folder.exists():
            known = [str(p.parent) for p in folder.parent.glob("*/metrics.jsonl")]
            raise UserError(f"{folder} does not exist{did_you_mean(str(folder), known)}")
        try:
            loaded[number] = (folder, *load(folder, {} if known is None else known))
        except UserError as e:
            mistakes.append(e)
    if mistakes and (not loaded or not skip):
        raise mistakes[0]
    for mistake in mistakes:
        skip(str(mistake))
    names = labels([folder for folder, *_ in loaded.values()])
    return completed([Run(label, *run) for label, run in zip(names, loaded.values(), strict=True)])


def load(folder: Path, known: dict[Path, Columns]) -> tuple[dict, dict, Columns]:
    try:
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8-sig"))
        columns = known.setdefault(folder, Columns(folder / "metrics.jsonl"))
        columns.read_on()
        if not columns.count:
            raise UserError(f"{folder} has recorded nothing yet")
    except FileNotFoundError as e:
        raise UserError(f"{folder} is not a run: it has no {Path(e.filename).name}") from None
    except NotADirectoryError:
        raise UserError(f"{folder} is not a run: it is a file") from None
    except UserError:
        raise
    except (OSError, ValueError, RecursionError, OverflowError) as e:  # ValueError: of UTF-8, JSON and TOML
        raise UserError(f"{folder} cannot be read: {e}") from None
    return check_config(config, folder / "config.toml"), read_object(folder / "run.json"), columns


def check_config(config: dict[str, Any], file: Path) -> dict[str, dict[str, Any]]:
    """The tables of a run's configuration. Raises UserError for those of another file."""
    tables = {name: config.get(name, {}) for name in SECTIONS}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UserError(f"{file} is not a run's: {name} is {table!r}, but it is a table")
    for table, name in (("model", "n_layer"), ("model", "block_size"), ("optim", "batch_size")):
        value = tables[table].get(name)
        if type(value) is not int or value < 1:
            what = f"is {value!r}" if name in tables[table] else "is missing"
            raise UserError(f"{file} is not a run's: {name} under [{table}] {what}")
    return tables


def completed(runs: list[Run]) -> list[Run]:
    """The runs with today's defaults for fields that are newer than a run, where they do not all have the same."""
    fields = [{(table, name) for table, values in run.config.items() for name in values} for run in runs]
    if all(own >= NEEDED and own == fields[0] for own in fields):
        return runs
    from configs import Config  # which imports torch: seconds that runs of the same age need not wait for

    defaults = {name: asdict(getattr(Config(), name)) for name in SECTIONS}
    return [
        replace(run, config={name: values | run.config[name] for name, values in defaults.items()})
        for run in runs
    ]


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


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Every setting whose value is not the same in all runs: {field: value of each run}."""
    found = {}
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values = [as_text(run.settings.get(name)) for run in runs]
        if len(set(values)) > 1 and name not in ("run_name", "out_dir"):
            found[name] = values
    return found


def as_text(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def repetitions(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs in groups that differ in their seed alone, in the order of their first members.

    Two runs of the same settings and the same seed differ in something that no setting tells: they are not grouped.
    """
    groups: dict[str, list[Run]] = {}
    seen = Counter()
    for run in runs:
        same = json.dumps(
            {k: v for k, v in run.settings.items() if k not in NAMES}, sort_keys=True, default=str
        )
        seen[same, run.settings.get("seed")] += 1
        groups.setdefault(f"{same} {seen[same, run.settings.get('seed')]}", []).append(run)
    return list(groups.values())

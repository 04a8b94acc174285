"""The cells of a recipe's [grid], each a run of train.py, and the folder that the runs are in."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from base.cli import UserError
from base.files import Lock, atomic_file, lock, make_folder, read_object, write_text, writing
from configs import GRID, OWNER, flags_of, load_config
from tools.report.page import page
from tools.report.runs import load_runs
from tools.study import results
from training.divergence import EXIT_CODE as DIVERGED
from training.tracker import read_metrics

MOST_RUNS = 20  # that one page can show
TRAIN = Path(__file__).parents[2] / "train.py"
RESULT = {"cell", "diverged", "seconds", "val_loss", "curve", "max_grad_norm", "recipe"}
LONGEST_NAME = 200  # of a folder; file systems allow 255 bytes
MARK = "study.toml"  # in the folder of the runs: the recipe, as it was last run there

Cell = dict[str, Any]


class Study:
    """The cells of a recipe's grid and the folder that their runs are in."""

    def __init__(self, recipe: Path, out: str = ""):
        self.recipe, self.name = recipe, recipe.stem
        self.out = Path(out or f"out/{self.name}")
        self.config = load_config([str(recipe)])
        self.tables = tomllib.loads(recipe.read_text(encoding="utf-8-sig"))
        self.grid = check_grid(self.tables.pop(GRID, None), recipe)
        combinations = itertools.product(*self.grid.values())
        cells = [dict(zip(self.grid, values, strict=True)) for values in combinations]
        self.cells = {name_of(cell): cell for cell in cells}
        if len(self.cells) < len(cells) or max(map(len, self.cells)) > LONGEST_NAME:
            raise UserError(
                f"{recipe}: the values under [{GRID}] make no names of folders that are short and differ"
            )
        for name in self.cells:
            load_config(self.arguments(name))  # a mistake is told before anything runs

    def fields(self, name: str) -> dict[str, Any]:
        """What a cell changes in the recipe: the fields that it names, and those of its named settings."""
        changes: dict[str, Any] = {}
        for key, value in self.cells[name].items():
            named = self.grid[key]
            changes |= named[value] if isinstance(named, dict) else {key: value}
        return changes

    def depends_on(self, name: str) -> str:
        """What the result of a cell depends on, besides the data and the code."""
        return json.dumps([self.tables, self.fields(name)], sort_keys=True)

    def finished(self, name: str) -> dict[str, Any] | None:
        """The result of a cell that was run with the recipe as it is now."""
        result = read_object(self.out / name / "result.json")
        if set(result) != RESULT or result["cell"] != self.cells[name]:
            return None
        return result if result.pop("recipe") == self.depends_on(name) else None

    def arguments(self, name: str) -> list[str]:
        """What train.py is given for a cell."""
        place = ["--out-dir", str(self.out), "--run-name", name]
        return [str(self.recipe), *flags_of(self.fields(name)), *place, "--overwrite", "--wandb", "disabled"]

    def take(self) -> Lock:
        """Makes and locks the folder of the runs, which are overwritten. Raises UserError for another's."""
        make_folder(self.out)
        with writing(self.out):
            if any(self.out.iterdir()) and not (self.out / MARK).is_file():
                raise UserError(f"{self.out} holds files that no study has written; pass another --out")
        held = lock(self.out, held=f"{self.out} is being filled by another study; pass another --out")
        with atomic_file(self.out / MARK) as file:
            shutil.copyfile(self.recipe, file)
        return held

    def run(self, name: str) -> dict[str, Any]:
        """Trains one cell and keeps its result. Raises UserError if train.py fails, other than by divergence."""
        folder = self.out / name
        command = [sys.executable, str(TRAIN), *self.arguments(name)]
        threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL")}
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
        if done.returncode not in (0, DIVERGED):
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise UserError(f"the cell {name} ended with exit code {done.returncode}: {last}")
        try:
            rows = read_metrics(folder / "metrics.jsonl")
        except (OSError, ValueError) as e:
            raise UserError(f"the metrics of the cell {name} cannot be read: {e}") from None
        result = {
            "cell": self.cells[name],
            "diverged": done.returncode == DIVERGED,
            "seconds": round(time.monotonic() - begin, 1),
        } | summary(rows)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # hundreds of them would fill a disk
        write_text(folder / "result.json", json.dumps(result | {"recipe": self.depends_on(name)}))
        return result

    def run_all(self, jobs: int) -> dict[str, dict[str, Any]]:
        """The results of all cells, in the grid's order; those that are missing are run now."""
        found = {name: self.finished(name) for name in self.cells}
        missing = [name for name, result in found.items() if result is None]
        pool = ThreadPoolExecutor(jobs or os.cpu_count() or 1)
        futures = {pool.submit(self.run, name): name for name in missing}
        try:
            done = {"initial": len(self.cells) - len(missing), "total": len(self.cells)}
            for future in tqdm(as_completed(futures), desc=self.name, unit="run", **done):
                found[futures[future]] = future.result()
        finally:
            pool.shutdown(cancel_futures=True)
        return found

    def report(self, cells: Sequence[dict[str, Any]]) -> Path:
        """The page of the first seed of each setting at its best learning rate, as many as a page takes."""
        best = results.best_rates(list(cells)).values()
        names = {json.dumps(cell): name for name, cell in self.cells.items()}
        folders = [str(self.out / names[json.dumps(group[0]["cell"])]) for group in best]
        path, text = self.out / "report.html", page(load_runs(folders[:MOST_RUNS]))
        write_text(path, text)
        return path


def name_of(cell: Cell) -> str:
    """The folder of a cell's run, such as norm=rmsnorm+lr=0.001; what no folder's name holds becomes `_`."""
    return re.sub(r"[^\w.+=-]", "_", "+".join(f"{k}={v}" for k, v in cell.items()))


def check_grid(grid: Any, path: Path) -> dict[str, list | dict]:
    """The grid, or UserError in a sentence.

    A key is a field with a list of its values, or any other word with a table of named settings, each a table of
    fields: method = { pre = {}, keel = { placement = "keel", residual_scale = "keel" } }.
    """
    if not isinstance(grid, dict) or not grid:
        raise UserError(
            f"{path} has no table [{GRID}], which lists values, as in norm = ['layernorm', 'rmsnorm']"
        )
    for key, values in grid.items():
        if isinstance(values, dict) and key not in OWNER:
            if not values or not all(isinstance(fields, dict) for fields in values.values()):
                raise UserError(f"{path}: {key} under [{GRID}] must be a table of tables, as pre = {{}}")
            varied = [(field, [value]) for fields in values.values() for field, value in fields.items()]
        else:
            varied = [(key, values)]
        for field, own in varied:
            if OWNER.get(field, "start") == "start" or field in ("out_dir", "run_name", "wandb"):
                raise UserError(f"{path}: [{GRID}] names {field}, which is nothing that a study can vary")
            if not isinstance(own, list) or not own or len(set(map(str, own))) < len(own):
                raise UserError(
                    f"{path}: {field} under [{GRID}] must be a list of different values, not {own!r}"
                )
    return grid


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The last validation loss, its curve, and the largest logged gradient norm; None where the run had diverged."""
    curve = [[row["iter"], row["val/loss"]] for row in rows if row.get("val/loss") is not None]
    norms = [row["train/grad_norm"] for row in rows if row.get("train/grad_norm") is not None]
    return {
        "val_loss": curve[-1][1] if curve else None,
        "curve": curve,
        "max_grad_norm": max(norms, default=None),
    }

"""A grid of training runs in one command: every combination of the lists under [grid] in a recipe.

    python -m tools.study configs/study_norms.toml
    python -m tools.study configs/study_norms.toml --cell norm=rmsnorm+placement=pre+qk_norm=off+lr=0.001+seed=1

Each cell is one run of train.py on one thread, as many at once as there are cores. A cell that has finished is
not run again, so the same command goes on after an interruption; `--cell` repeats one and says whether its
loss is the same to the last bit. The runs, a report page of each setting at its best learning rate, the table, the
curves and a picture go to out/NAME/; `--docs` takes the last three elsewhere.
"""

import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import tyro
from pydantic.dataclasses import dataclass
from tqdm import tqdm

from base.cli import UserError
from configs import (
    GRID,
    OWNER,
    STRICT,
    command_line,
    flags_of,
    load_config,
    require,
    user_error,
)
from data import ensure_prepared
from tools import study_results
from tools.output import new_file, say
from tools.report.page import page
from tools.report.runs import load_runs
from training.divergence import EXIT_CODE as DIVERGED
from training.tracker import read_metrics

MOST_RUNS = 20  # that one page can show
TRAIN = Path(__file__).parents[1] / "train.py"
RESULT = {"cell", "diverged", "seconds", "val_loss", "curve", "max_grad_norm", "recipe"}
LONGEST_NAME = 200  # of a folder; file systems allow 255 bytes


@dataclass(frozen=True, config=STRICT)
class Options:
    """Train every combination of a recipe's [grid] and compare them."""

    recipe: tyro.conf.Positional[str]
    """A recipe with a table [grid]."""
    jobs: int = 0
    """Runs at once; 0 takes the number of cores."""
    out: str = ""
    """Folder of the runs; out/NAME if not given."""
    docs: str = ""
    """Folder of the results, NAME.json, NAME.md and NAME.png; out/NAME if not given."""
    cell: str = ""
    """Repeat this one cell and compare."""

    def __post_init__(self):
        require(self.jobs >= 0, f"--jobs is {self.jobs}; it must not be below 0")


class Study:
    """The cells of a recipe's grid and the folder that their runs are in."""

    def __init__(self, recipe: Path, out: str = ""):
        self.recipe, self.name = recipe, recipe.stem
        self.out = Path(out or f"out/{self.name}")
        self.config = load_config([str(recipe)])
        tables = tomllib.loads(recipe.read_text(encoding="utf-8"))
        self.grid = check_grid(tables.pop(GRID, None), recipe)
        self.settings = json.dumps(tables, sort_keys=True)  # what a result depends on besides its cell
        combinations = itertools.product(*self.grid.values())
        cells = [dict(zip(self.grid, values, strict=True)) for values in combinations]
        self.cells = {name_of(cell): cell for cell in cells}
        if len(self.cells) < len(cells) or max(map(len, self.cells)) > LONGEST_NAME:
            raise UserError(
                f"{recipe}: the values under [{GRID}] make no names of folders that are short and differ"
            )
        for name in self.cells:
            load_config(self.arguments(name))  # a mistake is told before anything runs

    def finished(self, name: str) -> dict[str, Any] | None:
        """The result of a cell that was run with the recipe as it is now."""
        try:
            result = json.loads((self.out / name / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(result, dict) or set(result) != RESULT or result["cell"] != self.cells[name]:
            return None
        return result if result.pop("recipe") == self.settings else None

    def arguments(self, name: str) -> list[str]:
        """What train.py is given for a cell."""
        place = ["--out-dir", str(self.out), "--run-name", name]
        return [str(self.recipe), *flags_of(self.cells[name]), *place, "--overwrite", "--wandb", "disabled"]

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
        with new_file(folder / "result.json") as file:
            file.write_text(json.dumps(result | {"recipe": self.settings}), encoding="utf-8")
        return result

    def run_all(self, jobs: int) -> dict[str, dict[str, Any]]:
        """The results of all cells, in the grid's order; those that are missing are run now."""
        results = {name: self.finished(name) for name in self.cells}
        missing = [name for name, result in results.items() if result is None]
        pool = ThreadPoolExecutor(jobs or os.cpu_count() or 1)
        futures = {pool.submit(self.run, name): name for name in missing}
        try:
            bar = tqdm(as_completed(futures), desc=self.name, unit="run", total=len(self.cells))
            bar.update(len(self.cells) - len(missing))
            for future in bar:
                results[futures[future]] = future.result()
        finally:
            pool.shutdown(cancel_futures=True)
        return results

    def report(self, results: Sequence[dict[str, Any]]) -> Path:
        """The page of the first seed of each setting at its best learning rate, as many as a page takes."""
        best = study_results.best_rates(list(results)).values()
        names = {json.dumps(cell): name for name, cell in self.cells.items()}
        folders = [str(self.out / names[json.dumps(group[0]["cell"])]) for group in best]
        path, text = self.out / "report.html", page(load_runs(folders[:MOST_RUNS]))
        with new_file(path) as file:
            file.write_text(text, encoding="utf-8")
        return path


def name_of(cell: dict[str, Any]) -> str:
    """The folder of a cell's run, such as norm=rmsnorm+lr=0.001; what no folder's name holds becomes `_`."""
    return re.sub(r"[^\w.+=-]", "_", "+".join(f"{k}={v}" for k, v in cell.items()))


def check_grid(grid: Any, path: Path) -> dict[str, list]:
    """The grid, or UserError in a sentence."""
    if not isinstance(grid, dict) or not grid:
        raise UserError(
            f"{path} has no table [{GRID}], which lists values, as in norm = ['layernorm', 'rmsnorm']"
        )
    for key, values in grid.items():
        if OWNER.get(key, "start") == "start" or key in ("out_dir", "run_name", "wandb"):
            raise UserError(f"{path}: [{GRID}] names {key}, which is nothing that a study can vary")
        if not isinstance(values, list) or not values or len(set(map(str, values))) < len(values):
            raise UserError(
                f"{path}: {key} under [{GRID}] must be a list of different values, not {values!r}"
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


def repeat(study: Study, name: str) -> None:
    if name not in study.cells:
        raise UserError(
            f"--cell {name} is none of the {len(study.cells)} cells, such as {next(iter(study.cells))}"
        )
    before, after = study.finished(name), study.run(name)
    say(f"{name}: validation loss {after['val_loss']!r}")
    if before is not None:
        same = before["curve"] == after["curve"]
        say("the same as before, to the last bit" if same else f"before, it was {before['val_loss']!r}")


def folder_for_results(name: str) -> Path:
    """The folder, made. Raises UserError, before anything runs, where it or what draws into it is missing."""
    missing = [module for module in ("matplotlib", "plotly") if not importlib.util.find_spec(module)]
    if missing:
        raise UserError(
            f"the results need {' and '.join(missing)}; install with `pip install -e '.[report]'`"
        )
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"the folder {name} for the results cannot be made: {e.strerror}") from None
    return Path(name)


def main(argv: Sequence[str]) -> None:
    try:
        options = command_line(Options, argv, "python -m tools.study")
        study = Study(Path(options.recipe), options.out)
        ensure_prepared(study.config.data.dataset)
        if options.cell:
            return repeat(study, options.cell)
        docs = folder_for_results(options.docs or str(study.out))
        results = list(study.run_all(options.jobs).values())
        command = ["python", "-m", "tools.study", options.recipe]
        command += ["--docs", options.docs] if options.docs else []
        study_results.write(docs / study.name, results, shlex.join(command))
        say(f"{study.report(results)}: open it in a browser")
    except UserError as e:
        user_error(str(e))


if __name__ == "__main__":
    main(sys.argv[1:])

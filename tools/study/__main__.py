"""A grid of training runs in one command: every combination of the lists under [grid] in a recipe.

    python -m tools.study configs/study_norms.toml
    python -m tools.study configs/study_norms.toml --cell norm=rmsnorm+placement=pre+qk_norm=off+lr=0.001+seed=1

A list varies a field; a table of tables varies several at once, under names:

    [grid]
    seed = [1, 2, 3]
    [grid.method]
    pre = {}
    deepnorm = { placement = "post", residual_scale = "deepnorm" }

Each cell is one run of train.py on one thread, as many at once as there are cores. A cell that has finished is
not run again, so the same command goes on after an interruption; `--cell` repeats one and says whether its
loss is the same to the last bit. The runs, a report page of each setting at its best learning rate, the table, the
curves and a picture go to out/NAME/; `--docs` takes the last three elsewhere.
"""

import importlib.util
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from base.cli import STRICT, UserError, run
from base.flags import Positional, options
from data import ensure_prepared
from tools.study import results
from tools.study.grid import Study


@dataclass(frozen=True, config=STRICT)
class Options:
    """Train every combination of a recipe's [grid] and compare them."""

    recipe: Positional[str]
    """A recipe with a table [grid]."""
    jobs: Annotated[int, Field(ge=0)] = 0
    """Runs at once; 0 takes the number of cores."""
    out: str = ""
    """Folder of the runs; out/NAME if not given."""
    docs: str = ""
    """Folder of the results, NAME.json, NAME.md and NAME.png; out/NAME if not given."""
    cell: str = ""
    """Repeat this one cell and compare."""


def repeat(study: Study, name: str) -> None:
    if name not in study.cells:
        raise UserError(
            f"--cell {name} is none of the {len(study.cells)} cells, such as {next(iter(study.cells))}"
        )
    with study.take():
        before, after = study.finished(name), study.run(name)
    print(f"{name}: validation loss {after['val_loss']!r}")
    if before is not None:
        same = before["curve"] == after["curve"]
        print("the same as before, to the last bit" if same else f"before, it was {before['val_loss']!r}")


def place_of_results(folder: str, name: str) -> Path:
    """FOLDER/NAME, the folder made. Raises UserError, before anything runs, where the results cannot go."""
    missing = [module for module in ("matplotlib", "plotly") if not importlib.util.find_spec(module)]
    if missing:
        raise UserError(
            f"the results need {' and '.join(missing)}; install with `pip install -e '.[report]'`"
        )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"the folder {folder} for the results cannot be made: {e.strerror}") from None
    path = Path(folder, name)
    foreign = results.foreign(path)
    if foreign:
        raise UserError(f"{foreign} is no result of a study; name another folder by --docs")
    return path


def main(argv: Sequence[str]) -> None:
    asked = options(Options, argv, "python -m tools.study")
    study = Study(Path(asked.recipe), asked.out)
    ensure_prepared(study.config.data.dataset)
    if asked.cell:
        return repeat(study, asked.cell)
    place = place_of_results(asked.docs or str(study.out), study.name)
    with study.take():
        found = list(study.run_all(asked.jobs).values())
    command = ["python", "-m", "tools.study", asked.recipe]
    command += ["--docs", asked.docs] if asked.docs else []
    results.write(place, found, shlex.join(command))
    print(f"{study.report(found)}: open it in a browser")


if __name__ == "__main__":
    run(main)

"""All recorded numbers of several runs in one table, for a notebook or another program."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base.cli import UserError
from tools.report.runs import Run, load_runs

if TYPE_CHECKING:
    import pandas


def rows(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """One dictionary per run and row of metrics.jsonl: `run`, `iter`, and every name that any run has recorded.

    None where a run has not recorded a name in that row, or where the number was not finite.
    """
    names = list(dict.fromkeys(["iter", *(name for run in runs for name in run.columns.names)]))
    for run in runs:
        for values in run.columns.matrix(names):
            found = dict(zip(names, [None if math.isnan(v) else v for v in values.tolist()], strict=True))
            yield {"run": run.label, **found, "iter": int(values[0])}


def frame(*paths: str | Path) -> "pandas.DataFrame":
    """The runs in these folders as a pandas DataFrame, a line per run and row: `run`, `iter`, `train/loss`, ...

    NaN where a number was not recorded or not finite. Raises UserError where pandas or a run is missing.
    """
    try:
        import pandas
    except ImportError:
        raise UserError("a data frame needs pandas; install it with `pip install pandas`") from None
    return pandas.DataFrame.from_records(list(rows(load_runs(paths))))


def as_csv(runs: Sequence[Run]) -> str:
    """The same as text, with empty cells where there is nothing."""
    out, writer = io.StringIO(), None
    for row in rows(runs):
        if writer is None:
            writer = csv.DictWriter(out, row.keys(), lineterminator="\n")
            writer.writeheader()
        writer.writerow(row)
    return out.getvalue().rstrip("\n")

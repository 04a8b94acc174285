"""The terminal's summary of a run: what it is, what stands out, and what has become of every depth."""

from tools.report.findings import findings
from tools.report.runs import Run
from training import metrics

FINDINGS = 3  # at most, so that the table has room


def summary(run: Run) -> str:
    """At most metrics.TABLE_LINES lines."""
    found = [line.removeprefix(f"{run.label}: ") for line in findings([run])]
    more = len(found) - FINDINGS
    lines = [f"{run.label}: {run.state_in_words}", *(f"  {line}" for line in found[:FINDINGS])]
    if more > 0:
        lines[-1] += f" (and {more} more on the page)"
    lines.append(metrics.depth_table(*first_and_last(run), metrics.TABLE_LINES - len(lines)))
    return "\n".join(lines)


def first_and_last(run: Run) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """The first and the last that every name has seen; None: not finite."""
    first: dict[str, float | None] = {}
    last: dict[str, float | None] = {}
    for name in set(run.columns.names) - {"iter"}:
        values = [None if v != v else v for v in run.series(name)[1].tolist()]
        first[name], last[name] = values[0], values[-1]
    return first, last

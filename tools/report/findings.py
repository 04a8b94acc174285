"""What the runs show, in sentences: each is computed from the recorded numbers and stands only where it is true."""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tools.report.runs import Run, Table, as_text, differences, recorded, repetitions
from training.metrics import ODD_LOGIT, QUANTITIES, Quantity

BUCKET = 20  # rows whose median a spike is compared with
SPIKE = 10.0  # times what is usual there
LOSS_SPIKE = 1.0  # nats above what is usual there
APART = 3.0  # the factor between the runs' extremes from which the difference is told
LIKEWISE = 2  # runs of which a sentence is written out
OVERFITTED = 0.02  # nats that the validation loss has risen from its best
# Student's t, two-sided 95 %, by degrees of freedom; beyond the last the normal distribution's 1.96 is near enough.
T95 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)

BY_ID = {quantity.id: quantity for quantity in QUANTITIES}


def findings(runs: Sequence[Run]) -> list[str]:
    """The sentences, the most important first."""
    sentences = [*endings(runs), *ranking(runs)]
    for about in (spikes, excursions, not_finite, rate_rises):
        sentences += by_run(runs, about)
    told = []
    for limit in LIMITS:
        found = list(by_run(runs, functools.partial(beyond, limit=limit)))
        sentences += found
        told += [limit.quantity] * bool(found)
    sentences += contrasts(runs, told)
    return sentences + [text for about in (overfitting, clipping) for text in by_run(runs, about)]


def by_run(runs: Sequence[Run], about: Callable[[Run], Iterator[str]]) -> Iterator[str]:
    """What is true of each run; beyond LIKEWISE runs, the others are named alone."""
    found = [(run.label, text) for run in runs for text in about(run)]
    yield from (f"{label}: {text}" for label, text in found[:LIKEWISE])
    others = [label for label, _ in found[LIKEWISE:]]
    if others:
        yield f"Likewise: {listing(others)}."


def number(value: float) -> str:
    return f"{value:,.0f}" if 10_000 <= abs(value) < 1e9 else f"{value:.4g}"


def listing(parts: Sequence[str], most: int = 6) -> str:
    """`a, b, c`; what is beyond `most` is counted."""
    more = len(parts) - most
    return ", ".join(parts[:most]) + (f" and {more} more" if more > 0 else "")


def endings(runs: Sequence[Run]) -> Iterator[str]:
    """Which runs have not come to their end, and why."""
    for run in runs:
        if run.state == "diverged":
            why = run.report[0].rpartition(": ")[2] if run.report else ""
            yield f"{run.label}: {run.state_in_words}{why and f', {why}'}."
    for state in ("stopped", "running"):
        found = [f"{run.label} ({run.state_in_words})" for run in runs if run.state == state]
        if found:
            yield f"Not at their end: {listing(found)}."


def ranking(runs: Sequence[Run]) -> Iterator[str]:
    """Who is best, by how much, and whether that is more than what seeds alone do."""
    losses = {
        run.label: dict(zip(*map(np.ndarray.tolist, run.series("val/loss")), strict=True)) for run in runs
    }
    runs = [run for run in runs if run.state != "diverged" and losses[run.label]]
    if not runs:
        return
    if len(runs) == 1:
        yield from single(runs[0], losses[runs[0].label])
        return
    if {"dataset", "vocab_size"} & differences(runs).keys():
        yield "The runs are on different data or vocabularies: their losses are not compared."
        return
    common = set.intersection(*(set(losses[run.label]) for run in runs))
    if not common:
        yield "The runs have no step in common at which all were evaluated: their losses are not compared."
        return
    step = max(common)
    groups = {}
    for group in repetitions(runs):
        values = [losses[run.label][step] for run in group]
        if all(map(math.isfinite, values)):
            groups[name_of(group, runs)] = values
    yield from compare(groups, step)


def name_of(group: Sequence[Run], runs: Sequence[Run]) -> str:
    """A run's label; repetitions are named by the settings in which they differ from other runs."""
    if len(group) == 1:
        return group[0].label
    fields = [field for field in differences(runs) if field != "seed"]
    settings = ", ".join(f"{field} {as_text(group[0].settings.get(field))}" for field in fields)
    return f"{settings or group[0].label} ({len(group)} seeds)"


def single(run: Run, losses: dict[int, float]) -> Iterator[str]:
    finite = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    if finite:
        last, best = max(finite), min(finite, key=finite.get)
        text = f"{run.label}: validation loss {finite[last]:.4f} at step {last:,}"
        yield text + (f", best {finite[best]:.4f} at step {best:,}." if best != last else ", its best.")


def compare(groups: dict[str, list[float]], step: int) -> Iterator[str]:
    order = sorted(groups, key=lambda name: statistics.mean(groups[name]))
    if not order:
        return
    best = statistics.mean(groups[order[0]])
    spread = pooled(list(groups.values()))
    if len(order) == 1:
        yield f"{order[0]}: mean validation loss {best:.4f} at step {step:,}, standard deviation {spread[0]:.4f}."
        return
    others = [f"{name} +{statistics.mean(groups[name]) - best:.3f}" for name in order[1:]]
    yield f"{order[0]} is best, validation loss {best:.4f} at step {step:,}; {listing(others)}."
    if spread is None:
        yield "One seed each: how far seeds alone move these losses is not known from these runs."
        return
    deviation, freedom = spread
    difference = statistics.mean(groups[order[1]]) - best
    error = deviation * math.sqrt(sum(1 / len(groups[name]) for name in order[:2]))
    reach = (T95[freedom] if freedom < len(T95) else 1.96) * error
    verdict = "is beyond" if difference > reach else "is not beyond"
    yield (
        f"The lead of {order[0]} over {order[1]}, {difference:.4f}, {verdict} what seeds alone do "
        f"({reach:.4f}: 95 % of Student's t with {freedom} degrees of freedom, deviation {deviation:.4f})."
    )


def pooled(groups: Sequence[Sequence[float]]) -> tuple[float, int] | None:
    """(standard deviation within the groups, degrees of freedom); None where every group has one member."""
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return None
    squares = sum((v - statistics.mean(group)) ** 2 for group in groups for v in group)
    return math.sqrt(squares / freedom), freedom


def overfitting(run: Run) -> Iterator[str]:
    """The validation loss has risen from its best while the training loss has fallen."""
    steps, val = run.series("val/loss")
    at, train = run.series("train/loss")
    if not np.isfinite(val).any() or not np.isfinite(val[-1]):
        return
    best = int(np.nanargmin(val))
    before, after = (train[at <= step][-10:] for step in (steps[best], steps[-1]))
    noise = np.nanmedian(np.abs(np.diff(val))) if len(val) > 1 else 0.0
    risen = val[-1] - val[best] > max(OVERFITTED, 3 * noise)
    if risen and len(before) and np.nanmean(after) < np.nanmean(before):
        yield (
            f"overfits: validation loss has risen from {val[best]:.4f} at step {steps[best]:,} to {val[-1]:.4f}, "
            f"while training loss fell."
        )


def spikes(run: Run) -> Iterator[str]:
    """Those that training has reported."""
    marked = run.marks["spike"]
    if marked:
        count = f"{len(marked)} loss spikes" if len(marked) > 1 else "a loss spike"
        yield f"training reported {count} and went on; step {listing([f'{step:,}' for step in marked])}."


def excursions(run: Run) -> Iterator[str]:
    """Rows that stand far above their neighbours: in the loss, and per quantity at the place of the highest."""
    found = []
    for quantity in recorded([run]):
        is_loss = quantity.name == "train/loss"
        if is_loss or (quantity.scale == "log" and quantity.alarm != "low"):
            found += excursion(run, quantity, is_loss)
    if found:
        texts = [text for _, text in sorted(found, reverse=True)]
        yield f"stands out from its neighbours: {listing(texts, 4)}."


def excursion(run: Run, quantity: Quantity, is_loss: bool) -> Iterator[tuple[float, str]]:
    """(how often the limit is exceeded, the words) where a quantity's highest excursion exceeds it."""
    table = run.table(quantity)
    steps, values = table.steps, table.values
    if not np.isfinite(values).any():
        return
    usual = usual_values(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = (values - usual) / LOSS_SPIKE if is_loss else values / usual / SPIKE
    excess[~np.isfinite(excess)] = 0
    row, column = np.unravel_index(np.argmax(excess), excess.shape)
    if excess[row, column] > 1:
        place = table.places[column].text
        yield (
            float(excess[row, column]),
            f"{quantity.title.lower()} {number(values[row, column])}{place and f' at {place}'}, "
            f"step {steps[row]:,} (usual there: {number(usual[row, column])})",
        )


def usual_values(values: np.ndarray) -> np.ndarray:
    """For each row of [rows, places] the largest of the medians of its bucket of BUCKET rows and of the two beside it.

    So a steady fall, as of the loss at the beginning, is no excursion. The first bucket has nothing before it: inf.
    """
    pieces = np.array_split(values, max(len(values) // BUCKET, 1))
    medians = np.array([median(piece) for piece in pieces])
    before = np.concatenate([np.full_like(medians[:1], np.inf), medians[:-1]])
    after = np.concatenate([medians[1:], medians[-1:]])
    usual = np.fmax(np.fmax(before, medians), after)
    return np.repeat(usual, [len(piece) for piece in pieces], axis=0)


def median(values: np.ndarray) -> np.ndarray:
    """Over rows, of the finite ones; much faster than nanmedian where all are."""
    if np.isfinite(values).all():
        return np.median(values, axis=0)
    return np.ma.median(np.ma.masked_invalid(values), axis=0).filled(np.nan)


def not_finite(run: Run) -> Iterator[str]:
    found = run.columns.not_finite()
    if found:
        first = min(found, key=lambda name: found[name][1])
        rows, step = found[first]
        what = f"{len(found)} of its numbers were" if len(found) > 1 else "a number was"
        yield f"{what} not finite; first {first}, in {rows} row{'s' * (rows > 1)} from step {step:,} on."


def rate_rises(run: Run) -> Iterator[str]:
    """The learning rate rises after the warm-up, as it does when a run is resumed with a longer schedule."""
    steps, rate = run.series("train/lr")
    later = (steps > run.warmup) & np.isfinite(rate)
    steps, rate = steps[later], rate[later]
    rises = np.flatnonzero(rate[1:] > 1.05 * rate[:-1])
    if len(rises):
        before, after = number(rate[rises[0]]), number(rate[rises[0] + 1])
        yield f"the learning rate rises after its warm-up, from {before} to {after} at step {steps[rises[0] + 1]:,}."


def clipping(run: Run) -> Iterator[str]:
    """Most logged steps had their gradient clipped."""
    if run.clipped is not None and run.clipped > 0.5:
        limit = run.config["optim"]["grad_clip"]
        yield f"the gradient was clipped in {run.clipped:.0%} of the logged steps (grad_clip {limit:g})."


@dataclass(frozen=True)
class Limit:
    """An end of a quantity's scale that means trouble in every placement."""

    quantity: str
    high: bool
    words: str

    def value(self, run: Run, table: Table) -> np.ndarray | float:
        """The limit, of every row [rows, 1] or of all."""
        T = run.config["model"]["block_size"]
        if self.quantity == "attn_logit_max":
            return ODD_LOGIT
        if self.quantity == "attn_entropy":  # of attention that looks at all tokens alike, row t has ln t
            return 0.4 * float(np.mean(np.log(np.arange(1, T + 1))))
        if self.quantity == "update_ratio":
            return 0.1
        return 1e-3 * np.nanmedian(table.values, axis=1, keepdims=True)


LIMITS = (
    Limit(
        "attn_logit_max",
        True,
        "largest attention logit {value} at {place}, step {step}; above {limit} {when}.",
    ),
    Limit(
        "attn_entropy",
        False,
        "attention entropy {value} at {place}, step {step}; below {limit}, two fifths of what attention to all tokens "
        "alike has, {when}.",
    ),
    Limit(
        "update_ratio",
        True,
        "update {value} times the parameters at {place}, step {step}; above {limit} {when}.",
    ),
    Limit(
        "branch_rms",
        False,
        "{place} adds next to nothing, RMS {value} at step {step}; below a thousandth of the median branch {when}.",
    ),
)


def beyond(run: Run, limit: Limit) -> Iterator[str]:
    """Where a quantity is beyond its limit after the warm-up, how far, and since when."""
    whole = run.table(BY_ID[limit.quantity])
    later = whole.steps >= run.warmup
    layers = [i for i, place in enumerate(whole.places) if place.layer is not None]
    table = Table(whole.steps[later], [whole.places[i] for i in layers], whole.values[later][:, layers])
    if not np.isfinite(table.values).any():
        return
    bound = limit.value(run, table)
    outside = table.values > bound if limit.high else table.values < bound
    rows = outside.any(axis=1)
    if not rows.any():
        return
    extreme = np.where(outside, table.values if limit.high else -table.values, -np.inf)
    row, column = np.unravel_index(np.argmax(extreme), extreme.shape)
    yield limit.words.format(
        value=number(table.values[row, column]),
        place=table.places[column].text,
        step=f"{table.steps[row]:,}",
        limit=number(float(np.max(bound))),
        when=when(table.steps, rows),
    )


def when(steps: np.ndarray, rows: np.ndarray) -> str:
    """`since step 300` where it lasts to the end, else `at 2 of 9 looks, the last at step 700`."""
    if rows[-1]:
        inside = np.flatnonzero(~rows)
        return f"since step {steps[inside[-1] + 1 if len(inside) else 0]:,}"
    return f"at {rows.sum()} of {len(rows)} looks, the last at step {steps[np.flatnonzero(rows)[-1]]:,}"


def contrasts(runs: Sequence[Run], told: Sequence[str]) -> Iterator[str]:
    """Quantities whose extremes at the end are far apart between the runs that have not diverged."""
    runs = [run for run in runs if run.state != "diverged"]
    for quantity in recorded(runs):
        if quantity.scale != "log" or quantity.per not in ("depth", "layer") or quantity.name in told:
            continue
        found = {run.label: extreme_at_end(run, quantity) for run in runs}
        found = {label: pair for label, pair in found.items() if pair}
        if len(found) < 2:
            continue
        low = quantity.alarm == "low"
        order = sorted(found, key=lambda label: found[label][0], reverse=not low)
        ends = found[order[0]][0], found[order[-1]][0]
        if min(ends) > 0 and max(ends) / min(ends) > APART:
            parts = [f"{label} {number(found[label][0])} ({found[label][1]})" for label in order]
            end = "least" if low else "largest"
            yield f"{quantity.title} at the end, {end} of all depths: {listing(parts, 5)}."


def extreme_at_end(run: Run, quantity: Quantity) -> tuple[float, str] | None:
    """(value, place) of a quantity's alarming end in its last row; None where it has no finite value."""
    table = run.table(quantity)
    if not len(table.steps) or not np.isfinite(table.values[-1]).any():
        return None
    values = table.values[-1]
    i = int(np.nanargmin(values) if quantity.alarm == "low" else np.nanargmax(values))
    return float(values[i]), table.places[i].text

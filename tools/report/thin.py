"""Fewer points for the eye, extremes kept: a spike of one row in a hundred thousand stays where it was."""

from dataclasses import dataclass

import numpy as np


def buckets(count: int, limit: int) -> np.ndarray:
    """Where each of at most `limit` buckets begins, evenly spread; the first and the last row have one each."""
    inner = np.linspace(1, max(count - 1, 1), max(limit - 1, 2)).astype(int)
    return np.unique(np.concatenate([[0], inner])[: count or 1])


def thin_curve(values: np.ndarray, limit: int) -> np.ndarray:
    """Indices of no more than `limit` (8 or more) values: of each bucket the least, the largest and the first NaN."""
    if len(values) <= limit:
        return np.arange(len(values))
    missing = np.isnan(values)
    starts = buckets(len(values), limit // (3 if missing.any() else 2))
    kept = set()
    for start, end in zip(starts, [*starts[1:], len(values)], strict=True):
        part = values[start:end]
        if missing[start:end].any():
            kept.add(start + int(np.argmax(missing[start:end])))
        if not missing[start:end].all():
            kept |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    return np.array(sorted(kept))


def bucket_means(steps: np.ndarray, values: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """(mean step, mean value) of each bucket: what a smoothed curve starts from, which extremes would distort."""
    starts = buckets(len(values), limit)
    finite = np.isfinite(values)
    count = np.maximum(np.add.reduceat(finite, starts, dtype=float), 1)
    total = np.add.reduceat(np.where(finite, values, 0.0), starts)
    size = np.diff([*starts, len(values)])
    return np.add.reduceat(steps, starts) / size, np.where(
        np.add.reduceat(finite, starts, dtype=int), total / count, np.nan
    )


@dataclass(frozen=True)
class Thinned:
    """A table of fewer rows: of each bucket one row as it was recorded, and what each place went down and up to.

    steps [rows]; values, low, high [rows, places]. Where no row was left out, low and high are values.
    """

    steps: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    rows: int  # that were recorded


def thin_table(steps: np.ndarray, values: np.ndarray, limit: int) -> Thinned:
    """At most `limit` rows; of each bucket the one that strays farthest from the bucket's mean at any place."""
    if len(steps) <= limit:
        return Thinned(steps, values, values, values, len(steps))
    starts = buckets(len(steps), limit)
    ends = [*starts[1:], len(steps)]
    finite = np.isfinite(values)
    filled = np.where(finite, values, 0.0)
    count = np.maximum(np.add.reduceat(finite, starts, axis=0, dtype=float), 1)
    mean = np.repeat(np.add.reduceat(filled, starts, axis=0) / count, np.diff([*starts, len(steps)]), axis=0)
    strays = np.where(finite, np.abs(values - mean) / np.maximum(np.abs(mean), 1e-30), 0.0).max(axis=1)
    chosen = [start + int(np.argmax(strays[start:end])) for start, end in zip(starts, ends, strict=True)]
    return Thinned(
        steps[chosen],
        values[chosen],
        np.fmin.reduceat(values, starts, axis=0),
        np.fmax.reduceat(values, starts, axis=0),
        len(steps),
    )

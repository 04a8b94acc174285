"""metrics.jsonl by columns: a hundred thousand rows as arrays, read on from where the last look ended."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from base.cli import UserError

CHUNK = 1000  # rows kept as Python's objects before they become an array
NUMBERS = {int, float, bool, type(None)}


class Rows:
    """Rows that have the same names: their numbers in the file and their values [rows, names]."""

    def __init__(self):
        self.numbers: list[int] = []
        self.waiting: list[list[float | None]] = []
        self.done: list[np.ndarray] = []

    def append(self, number: int, values: list[float | None]) -> None:
        self.numbers.append(number)
        self.waiting.append(values)
        if len(self.waiting) >= CHUNK:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            self.done.append(np.array(self.waiting, dtype=float))  # None becomes nan
            self.waiting = []

    @property
    def values(self) -> np.ndarray:
        self.flush()
        self.done = [np.concatenate(self.done)]
        return self.done[0]


class Columns:
    """What a metrics.jsonl holds; NaN stands where a number was not finite or is not there."""

    def __init__(self, path: Path):
        self.path = path
        self.start_anew()

    def start_anew(self) -> None:
        self.offset, self.last, self.count = 0, b"", 0
        self.groups: dict[tuple[str, ...], Rows] = {}

    def read_on(self) -> None:
        """Takes in what the file has grown by; all of it again where it was cut.

        A last line that a kill cut short is left for later. Raises UserError, which names the line, where a row is
        not what the tracker writes, and OSError, ValueError, RecursionError or OverflowError where the file cannot be
        read.
        """
        with self.path.open("rb") as file:
            file.seek(max(self.offset - len(self.last), 0))
            if file.read(len(self.last)) != self.last:  # a resumed run has cut its file and gone on
                self.start_anew()
                file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.take(line)
        for rows in self.groups.values():
            rows.flush()

    def take(self, line: bytes) -> None:
        row = json.loads(line)
        self.check(row)
        self.groups.setdefault(tuple(row), Rows()).append(self.count, list(row.values()))
        self.count, self.offset, self.last = self.count + 1, self.offset + len(line), line

    def check(self, row: Any) -> None:
        place = f"{self.path}, line {self.count + 1}"
        if not isinstance(row, dict) or type(row.get("iter")) is not int:
            raise UserError(f"{place}: this is no object of numbers with iter, a step, among them")
        if set(map(type, row.values())) <= NUMBERS:
            return
        key, value = next((k, v) for k, v in row.items() if type(v) not in NUMBERS)
        raise UserError(f"{place}: {key} is {value!r}, but it is a number or null")

    @property
    def names(self) -> list[str]:
        """All names, in the order of their first row."""
        return list(dict.fromkeys(name for names in self.groups for name in names))

    def matrix(self, names: Iterable[str]) -> np.ndarray:
        """Every row that has one of the names, in the file's order: [rows, names], float64."""
        names = list(names)
        parts, numbers = [], []
        for group, rows in self.groups.items():
            place = {name: i for i, name in enumerate(group)}
            if not any(name in place for name in names if name != "iter"):
                continue
            values = rows.values
            part = np.full((len(values), len(names)), np.nan)
            for i, name in enumerate(names):
                if name in place:
                    part[:, i] = values[:, place[name]]
            parts.append(part)
            numbers += rows.numbers
        if not parts:
            return np.empty((0, len(names)))
        whole = np.concatenate(parts)[np.argsort(numbers, kind="stable")]
        whole[~np.isfinite(whole)] = np.nan
        return whole

    def not_finite(self) -> dict[str, tuple[int, int]]:
        """By name: (in how many rows it was not finite, the first of their steps)."""
        found: dict[str, tuple[int, int]] = {}
        for group, rows in self.groups.items():
            values = rows.values
            bad = ~np.isfinite(values)
            for i in np.flatnonzero(bad.any(axis=0)):
                steps = values[bad[:, i], group.index("iter")]
                count, first = found.get(group[i], (0, int(steps.min())))
                found[group[i]] = (count + len(steps), min(first, int(steps.min())))
        return found

    @property
    def steps(self) -> np.ndarray:
        """The step of every row."""
        numbers = np.concatenate([rows.numbers for rows in self.groups.values()])
        steps = np.concatenate([rows.values[:, group.index("iter")] for group, rows in self.groups.items()])
        return steps[np.argsort(numbers)].astype(int)

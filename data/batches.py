"""Which tokens a training step and an evaluation see: pure functions of their arguments, without any state.

An epoch cuts the training data into non-overlapping windows, starting at a seeded offset, and visits them in
a seeded order. Offset and order are computed, not stored, so resuming at a step means asking for that step's
batch, and a process that works on some rows of a batch asks for these rows only.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from base.cli import UserError
from data.files import Tokens

FEISTEL_ROUNDS = 6
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: splitmix64's increment
MASK = 2**64 - 1
BLOCK = 4096  # window starts are computed so many at once: numpy's cost is per call


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer (Steele, Lea and Flood 2014): a bijection of uint64 that looks random."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Image of each index under the permutation of range(size) that its key selects, in O(1) memory.

    A Feistel network over the cells of a rows x columns grid that is just large enough; an image beyond
    `size` is permuted again until it falls inside (cycle-walking), which keeps the map one-to-one (Black and
    Rogaway 2002).

    index: uint64 [n], below `size`; key: uint64 [n]; returns uint64 [n].
    """
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    row, column = np.divmod(index, columns)
    for r in range(FEISTEL_ROUNDS):
        round_key = key + (r * GOLDEN & MASK)
        if r % 2 == 0:
            row = (row + _mix(column + round_key) % rows) % rows
        else:
            column = (column + _mix(row + round_key) % columns) % columns
    image = row * columns + column
    outside = image >= size
    if outside.any():
        image[outside] = permute(image[outside], size, key[outside])
    return image


class TrainBatches:
    """The batches of a training run.

    The data is a ring: the window that reaches the end goes on at the beginning. So every epoch has the same
    number of windows whatever its offset, every token is an input once and a target once, and only the
    remainder (fewer tokens than one window, elsewhere in every epoch) is left out.

    Raises UserError when the data is not longer than one window.
    """

    def __init__(self, tokens: Tokens, *, block_size: int, batch_size: int, seed: int):
        if len(tokens) <= block_size:
            raise UserError(
                f"a context of {block_size:,} tokens is longer than the training data, which holds "
                f"{len(tokens):,} and needs one more than the context; pass --block-size "
                f"{max(1, len(tokens) - 1)} or less, or prepare more text"
            )
        self.tokens = tokens
        self.block_size = block_size
        self.batch_size = batch_size
        self.windows_per_epoch = len(tokens) // block_size
        self._block_starts = lru_cache(maxsize=4)(self._compute_starts)
        self._seed_key = _mix(np.array([seed & MASK], np.uint64))

    def starts(self, step: int, rows: range) -> np.ndarray:
        """Where the windows of these consecutive rows of step `step` start in the data: int64 [len(rows)]."""
        assert rows.step == 1
        assert 0 <= rows.start < rows.stop <= self.batch_size
        first, end = step * self.batch_size + rows.start, step * self.batch_size + rows.stop
        blocks = range(first // BLOCK, (end - 1) // BLOCK + 1)
        starts = np.concatenate([self._block_starts(block) for block in blocks])
        return starts[first - blocks.start * BLOCK : end - blocks.start * BLOCK]

    def _compute_starts(self, block: int) -> np.ndarray:
        """The starts of the run's windows BLOCK * block, BLOCK * block + 1, ...: int64 [BLOCK]."""
        position = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint64)
        epoch, index = np.divmod(position, self.windows_per_epoch)
        key = _mix(self._seed_key + (epoch + 1) * GOLDEN)
        offset = _mix(key ^ MASK) % len(self.tokens)
        window = permute(index, self.windows_per_epoch, key)
        return ((offset + window * self.block_size) % len(self.tokens)).astype(np.int64)

    def batch(self, step: int, rows: range) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some rows of the batch of optimizer step `step` (from 0).

        `rows` are row numbers within the `batch_size` rows of the whole step, over all processes and
        micro-batches. Returns two int64 tensors [len(rows), block_size] on the CPU; targets are the inputs
        one token later.
        """
        length = self.block_size + 1
        window = torch.from_numpy(self.tokens.read(self.starts(step, rows), length))
        self.tokens.expect(self.starts(step + 1, rows), length)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


class EvalWindows:
    """Fixed, non-overlapping windows, evenly spread over the data, with at most `max_tokens` targets.

    At least one window is used. When `max_tokens` allows for all of the data, every token but the first is a
    target exactly once; the last window is then filled up with inputs 0 and targets -1, which the loss leaves
    out.

    Raises UserError when there is no target at all.
    """

    def __init__(self, tokens: Tokens, *, block_size: int, max_tokens: int):
        targets = len(tokens) - 1
        if targets < 1:
            raise UserError(
                f"the validation data holds {len(tokens)} tokens; it takes at least 2: prepare more text"
            )
        windows = -(-targets // block_size)
        if max_tokens >= targets:
            used = windows
        else:
            used = min(max(1, max_tokens // block_size), windows)
        self.tokens = tokens
        self.block_size = block_size
        self.starts = np.arange(used) * windows // used * block_size  # [len(self)]

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, rows: range) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these windows: two int64 tensors [len(rows), block_size] on the CPU."""
        x = np.zeros((len(rows), self.block_size), np.int64)
        y = np.full((len(rows), self.block_size), -1)
        for i, start in enumerate(self.starts[rows.start : rows.stop : rows.step]):
            length = min(self.block_size, len(self.tokens) - 1 - start)
            window = self.tokens.read(np.array([start]), length + 1)[0]
            x[i, :length], y[i, :length] = window[:-1], window[1:]
        return torch.from_numpy(x), torch.from_numpy(y)

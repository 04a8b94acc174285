"""Token files: three layouts of a folder of .bin files, read without loading them.

- ours: `train.bin`, `val.bin` (little-endian ids, no header) and `meta.json`, written by `data.prepare`;
- nanoGPT's: headerless uint16 `train.bin` and `val.bin`. Its `meta.pkl` is never read: unpickling runs code;
- llm.c's and modded-nanogpt's: shards with a header of 256 int32 each, of which the name holds the word
  `train` or `val`, as in fineweb_train_000001.bin, train_000001.bin and tiny_shakespeare_val.bin.

Reads go through `pread`, not a memory map: pages that a map has touched count as the process's own memory
until the kernel takes them back, and a read error in a map kills the process with SIGBUS where `pread`
raises.
"""

import bisect
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from base.cli import UserError

LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER_BYTES = 20240520, 1, 256 * 4
OPEN_FILES = 64  # per Tokens; a thousand shards would exceed the usual limit of open files


@dataclass(frozen=True)
class Shard:
    """`count` ids of type `dtype` in file `path`, from byte `offset` on."""

    path: Path
    dtype: np.dtype
    count: int
    offset: int = 0


class _OpenFile:
    """A file descriptor that is closed when the last reference to it goes."""

    def __init__(self, path: Path):
        self.fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.fd)


class Tokens:
    """The tokens of one or several files as one sequence, of which only what is asked for is read."""

    def __init__(self, shards: list[Shard]):
        self.shards = shards
        self.dtype = shards[0].dtype
        assert all(shard.dtype == self.dtype for shard in shards)
        self._ends = list(accumulate(shard.count for shard in shards))
        self._open = lru_cache(maxsize=OPEN_FILES)(_OpenFile)

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` tokens from each of `starts` [n] on, int64 [n, length].

        What runs over the end of the last file goes on at the beginning of the first. Raises UserError when a
        file cannot be read (any more).
        """
        parts = (part for start in starts.tolist() for part in self._parts(start, length))
        data = b"".join(self._read_bytes(*part) for part in parts)
        return np.frombuffer(data, self.dtype).reshape(len(starts), length).astype(np.int64)

    def expect(self, starts: np.ndarray, length: int) -> None:
        """Tell the kernel that `read(starts, length)` will come: a slow disk starts on all of it at once."""
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        width = self.dtype.itemsize
        for start in starts.tolist():
            for shard, first, count in self._parts(start, length):
                with suppress(OSError):  # a hint only: the read that follows will say what is wrong
                    fd = self._open(shard.path).fd
                    os.posix_fadvise(fd, shard.offset + first * width, count * width, os.POSIX_FADV_WILLNEED)

    def _parts(self, start: int, length: int) -> Iterator[tuple[Shard, int, int]]:
        """Where these tokens lie: stretches of shards, each as (shard, first token in it, count)."""
        i = bisect.bisect_right(self._ends, start)
        first = start - (self._ends[i] - self.shards[i].count)  # within shard i
        while length > 0:
            count = min(length, self.shards[i].count - first)
            yield self.shards[i], first, count
            length -= count
            i, first = (i + 1) % len(self.shards), 0

    def chunks(self, size: int) -> Iterator[tuple[Shard, np.ndarray]]:
        """All tokens in order, at most `size` at once, with the shard that each chunk comes from."""
        for shard in self.shards:
            for first in range(0, shard.count, size):
                yield shard, self.read_shard(shard, first, min(size, shard.count - first))

    def read_shard(self, shard: Shard, first: int, count: int) -> np.ndarray:
        """The `count` tokens of one shard from its token `first` on, in the files' dtype."""
        return np.frombuffer(self._read_bytes(shard, first, count), self.dtype)

    def _read_bytes(self, shard: Shard, first: int, count: int) -> bytes:
        size, position = count * self.dtype.itemsize, shard.offset + first * self.dtype.itemsize
        data = b""
        try:
            while len(data) < size:  # a signal or a network disk may cut a read short
                more = os.pread(self._open(shard.path).fd, size - len(data), position + len(data))
                if not more:
                    raise UserError(
                        f"{shard.path} has become shorter since it was opened; prepare or copy it again"
                    )
                data += more
        except OSError as error:
            raise UserError(f"{shard.path} cannot be read: {error.strerror}") from error
        return data


def headerless(path: Path, dtype: np.dtype) -> Shard:
    """A file of nothing but ids. Raises UserError when it is missing or not a whole number of ids long."""
    size, _ = read_file(path, 0)
    if size % dtype.itemsize:
        raise UserError(
            f"{path} is {size:,} bytes long, no whole number of {dtype.name} tokens: it was cut short, or is "
            "no token file; prepare or copy it again"
        )
    return Shard(path, dtype, size // dtype.itemsize)


def is_llmc(path: Path) -> bool:
    _, start = read_file(path, 4)
    return start == LLMC_MAGIC.to_bytes(4, "little")


def llmc(path: Path) -> Shard:
    """A shard of llm.c or modded-nanogpt. Raises UserError when header and length do not say the same."""
    size, start = read_file(path, LLMC_HEADER_BYTES)
    if len(start) < LLMC_HEADER_BYTES:
        raise UserError(
            f"{path} is shorter than the {LLMC_HEADER_BYTES:,} bytes of header that every shard has; copy it "
            "again"
        )
    magic, version, count = (int(field) for field in np.frombuffer(start, "<i4")[:3])
    if magic != LLMC_MAGIC:
        raise UserError(
            f"{path} starts with {magic}, not with {LLMC_MAGIC}, llm.c's mark of GPT-2 tokens in uint16; "
            "other kinds of shards are not read"
        )
    if version != LLMC_VERSION:
        raise UserError(f"{path} has header version {version}; only version {LLMC_VERSION} is read")
    if size != LLMC_HEADER_BYTES + 2 * count:
        raise UserError(
            f"{path} should hold {count:,} tokens by its header, but has room for "
            f"{(size - LLMC_HEADER_BYTES) / 2:,.1f}: it was cut short or overwritten; copy it again"
        )
    return Shard(path, np.dtype("<u2"), count, LLMC_HEADER_BYTES)


def read_file(path: Path, count: int = -1) -> tuple[int, bytes]:
    """The size of a file and its first `count` bytes, or all. Raises UserError for what cannot be read, and for
    a folder or a pipe, on which it would wait for ever."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is a folder, a pipe or a device; only regular files are read")
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size, file.read(count)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; prepare or copy it again") from error

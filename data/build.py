"""From a source to a data set: tokenize, deal out to training and validation, write.

A data set appears under its name whole or not at all, whatever is killed and whoever else prepares it.
"""

import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from base.cli import UserError
from base.files import atomic_folder
from data.dataset import DATA_ROOT, open_dataset, read_meta
from data.sources import Piece, Source, StandardLibrary, reading
from data.tokenizer import (
    TOKENIZER_JSON,
    CharTokenizer,
    Tokenizer,
    load_tokenizer,
    put_beside,
    tokenizer_meta,
)

# What a data set is, and --overwrite replaces.
WRITTEN = ("train.bin", "val.bin", "meta.json", TOKENIZER_JSON)
TASK_CHARS = 2**18  # what a thread tokenizes at a time; bounds memory, together with the number of threads


@dataclass(frozen=True)
class Amounts:
    """How much text is used, and how much of it for validation.

    One running text gives its last `val_fraction` of characters to validation. Separate documents are dealt
    out whole: to validation whenever it has less than `val_fraction` of the tokens so far, and less than
    `val_tokens`.
    """

    val_fraction: float = 0.1
    val_tokens: int | None = None
    max_tokens: int | None = None


def ensure_prepared(name: str, root: Path = DATA_ROOT) -> None:
    """Prepare the default data set when it is asked for and missing, which takes seconds and no network."""
    if name == "stdlib" and not (root / name).exists():
        print("The data set stdlib is missing; preparing it from Python's standard library ...", flush=True)
        prepare(StandardLibrary(), name=name, root=root)


def prepare(
    source: Source,
    *,
    name: str,
    tokenizer: str = "byte",
    amounts: Amounts = Amounts(),
    root: Path = DATA_ROOT,
    workers: int = 0,
    overwrite: bool = False,
) -> Path:
    """Make the data set `name` in `root` and return its folder; when the same is there, do nothing.

    tokenizer: a name, or the path of a tokenizer.json. `workers` threads tokenize (0: one per CPU); the result does
    not depend on their number.
    Raises UserError for anything in the way, and leaves nothing behind then.
    """
    encoding = tokenizer_meta(tokenizer)
    workers = workers or os.cpu_count() or 1
    target = root / _checked_name(name)
    with atomic_folder(target, replace=True, wait=True) as folder:
        with reading():
            described = source.describe()
        request = _as_recorded(described | {"tokenizer": encoding.get("sha256", tokenizer)} | vars(amounts))
        if target.exists() and _is_done(target, request, overwrite):
            print(f"{target} is already prepared from this source with this tokenizer: nothing to do")
            return target  # the folder is empty, and so nothing is replaced
        encoder = _make_tokenizer(encoding, source, amounts)
        splits = _write_tokens(folder, source, encoder, amounts, workers)
        meta = {
            "tokenizer": put_beside(encoder.meta, folder),
            "vocab_size": encoder.vocab_size,
            "dtype": splits["train"].dtype.name,
            **{split: {"tokens": file.tokens, "max_id": file.max_id} for split, file in splits.items()},
            "request": request,
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
    print(
        f"{target}: {splits['train'].tokens:,} tokens to train on, {splits['val'].tokens:,} for "
        f"validation, vocabulary of {encoder.vocab_size:,} ({encoder.name})"
    )
    return target


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) or name == "__pycache__":
        raise UserError(f"{name!r} cannot name a data set: use letters, digits, '-', '_' and '.'")
    return name


def _is_done(target: Path, request: dict, overwrite: bool) -> bool:
    """Whether an existing `target` was made by this request, and is not to be made again.

    Raises UserError when it is not ours, was made by another request, or is damaged.
    """
    if not (target / "meta.json").exists():
        raise UserError(f"{target} exists and was not made by data.prepare; remove it or choose another name")
    if overwrite:
        others = sorted(file.name for file in target.iterdir() if file.name not in WRITTEN)
        if others:
            raise UserError(
                f"{target} holds other files than a data set's, such as {others[0]}; choose another --name"
            )
        return False
    made_by = read_meta(target).request
    differing = sorted(key for key in request.keys() | made_by.keys() if request.get(key) != made_by.get(key))
    if differing:
        raise UserError(
            f"{target} was already made from something else (different: {', '.join(differing)}); pass "
            "another --name, or --overwrite to replace it"
        )
    open_dataset(str(target))
    return True


def _as_recorded(request: dict) -> dict:
    """The request as meta.json gives it back. Bytes of a file name that are not UTF-8, which Python holds as
    lone surrogates and JSON must not, are spelled out."""
    text = json.dumps(request, ensure_ascii=False)
    return json.loads(re.sub("[\ud800-\udfff]", lambda lone: rf"\\u{ord(lone[0]):04x}", text))


def _make_tokenizer(meta: dict, source: Source, amounts: Amounts) -> Tokenizer:
    """The tokenizer of this meta; for `char`, with the characters of a first pass over the text."""
    if meta["name"] != "char":
        return load_tokenizer(meta)
    characters = set() if source.one_text else {"\n"}
    seen = 0
    for piece in _pieces(source):
        characters.update(piece.text)
        seen += len(piece.text)
        if amounts.max_tokens is not None and seen >= amounts.max_tokens:
            break
    if not seen:
        raise _no_text()
    return CharTokenizer("".join(characters))


def _pieces(source: Source) -> Iterator[Piece]:
    """The source's pieces. Raises UserError where it cannot be read, which is not to be told as a failed write."""
    with reading():
        yield from source.pieces()


def _no_text() -> UserError:
    return UserError(
        "the source holds no text to speak of: both training and validation take at least two tokens"
    )


def _write_tokens(
    folder: Path, source: Source, tokenizer: Tokenizer, amounts: Amounts, workers: int
) -> dict[str, "TokenFile"]:
    """Write `train.bin` and `val.bin` into `folder`; returns their closed TokenFiles by name."""
    pieces = _pieces(source)
    if source.one_text and not source.own_validation:
        characters = sum(len(piece.text) for piece in _pieces(source))
        pieces = _cut(pieces, int(characters * (1 - amounts.val_fraction)))
    end = _document_end(source, tokenizer)
    with (
        TokenFile(folder / "train.bin", tokenizer.vocab_size) as train,
        TokenFile(folder / "val.bin", tokenizer.vocab_size) as val,
        tqdm(total=amounts.max_tokens, unit=" tokens", unit_scale=True, disable=None) as bar,
    ):
        limit = amounts.max_tokens or float("inf")
        val_limit = amounts.val_tokens or float("inf")
        split, begins = train, True
        for piece, ids in _encode_all(pieces, tokenizer, workers):
            if piece.split:
                split = {"train": train, "val": val}[piece.split]
            elif begins:
                total = train.tokens + val.tokens
                split = val if val.tokens < min(amounts.val_fraction * total, val_limit) else train
            if piece.last:
                ids = np.append(ids, end)
            left = limit - train.tokens - val.tokens
            split.append(ids[: min(len(ids), left)])
            bar.update(min(len(ids), left))
            if len(ids) >= left:
                break
            begins = piece.last
    if min(train.tokens, val.tokens) < 2:
        raise _no_text()
    return {"train": train, "val": val}


def _document_end(source: Source, tokenizer: Tokenizer) -> np.ndarray:
    """What is put behind every document: the separator. `char` has none, so there several documents are set
    apart by a newline, and one running text stays as it is."""
    if tokenizer.separator is not None:
        return np.array([tokenizer.separator], np.uint32)
    return tokenizer.encode_array("" if source.one_text else "\n")


def _cut(pieces: Iterable[Piece], position: int) -> Iterator[Piece]:
    """The pieces of one text: those before character `position` for training, the rest for validation."""
    for piece in pieces:
        head, tail = piece.text[:position], piece.text[position:]
        if head:
            yield Piece(head, last=piece.last and not tail, split="train")
        if tail:
            yield replace(piece, text=tail, split="val")
        position -= len(head)


def _encode_all(
    pieces: Iterable[Piece], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Piece, np.ndarray]]:
    """Every piece with its ids, in order. Few tasks are under way at a time, so that memory stays bounded.

    Threads are enough: tiktoken and tokenizers let go of Python's lock while they work.
    """
    pool = ThreadPoolExecutor(workers)
    under_way: deque = deque()
    try:
        for task in _tasks(pieces):
            under_way.append((task, pool.submit(_encode, tokenizer, task)))
            if len(under_way) > 2 * workers:
                task, future = under_way.popleft()
                yield from zip(task, future.result(), strict=True)
        for task, future in under_way:
            yield from zip(task, future.result(), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _encode(tokenizer: Tokenizer, task: list[Piece]) -> list[np.ndarray]:
    return [tokenizer.encode_array(piece.text) for piece in task]


def _tasks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    task, characters = [], 0
    for piece in pieces:
        task.append(piece)
        characters += len(piece.text)
        if characters >= TASK_CHARS:
            yield task
            task, characters = [], 0
    if task:
        yield task


class TokenFile:
    """A file of token ids being written: uint16 for a vocabulary of up to 65,536 ids, else uint32."""

    def __init__(self, path: Path, vocab_size: int):
        self.vocab_size = vocab_size
        self.dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self.tokens = 0
        self.max_id = 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)

    def append(self, ids: np.ndarray) -> None:
        """Raises UserError for an id outside the vocabulary, which a cast would wrap into it."""
        if not len(ids):
            return
        largest = int(ids.max())
        if largest >= self.vocab_size:
            raise UserError(f"the tokenizer gave id {largest}, but its vocabulary has {self.vocab_size:,}")
        self._file.write(ids.astype(self.dtype).tobytes())
        self.tokens += len(ids)
        self.max_id = max(self.max_id, largest)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._file.close()

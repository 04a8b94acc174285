"""A data set: a training and a validation sequence of tokens, and what is known of their vocabulary."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic

from base.cli import UserError, did_you_mean
from data.files import Shard, Tokens, headerless, is_llmc, llmc, read_file
from data.tokenizer import Tokenizer, load_tokenizer, read_beside

DATA_ROOT = Path(__file__).parent
SPLITS = ("train", "val")
UINT16 = np.dtype("<u2")
SCAN_TOKENS = 2**22  # at once, when a foreign file's largest id is looked for
FINGERPRINT_TOKENS = 2048  # from the start, the middle and the end of every file


@pydantic.dataclasses.dataclass(frozen=True)
class SplitMeta:
    tokens: int
    max_id: int


@pydantic.dataclasses.dataclass(frozen=True)
class Meta:
    """What `meta.json` records beside `train.bin` and `val.bin`."""

    tokenizer: dict[str, Any]
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    train: SplitMeta
    val: SplitMeta
    request: dict[str, Any]
    """The source and the options the data set was made from: preparing the same again does nothing."""


@dataclass(frozen=True)
class Dataset:
    """An opened data set. `meta["tokenizer"]`, where known, is what `load_tokenizer` takes."""

    path: Path
    train: Tokens
    val: Tokens
    meta: dict[str, Any]

    @property
    def vocab_size(self) -> int | None:
        """Number of ids of the tokenizer, or None for nanoGPT's folders, which say it in a pickle only."""
        return self.meta.get("vocab_size")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises UserError when the data set does not name its tokenizer, or it cannot be fetched."""
        if "tokenizer" not in self.meta:
            raise UserError(
                f"{self.path} does not say which tokenizer made it, so its ids cannot be turned into text"
            )
        return load_tokenizer(self.meta["tokenizer"])

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the tokens, wherever they lie: lengths and samples of every file, and the tokenizer."""
        digest = hashlib.sha256(json.dumps(self.meta.get("tokenizer"), sort_keys=True).encode("utf-8"))
        for split in (self.train, self.val):
            digest.update(f"{len(split)}".encode())
            for shard, first, end in _samples(split):
                digest.update(f"{shard.count} {first}".encode())
                digest.update(split.read_shard(shard, first, end - first).astype("<i8").tobytes())
        return digest.hexdigest()[:16]


def _samples(tokens: Tokens):
    for shard in tokens.shards:
        for first in sorted({0, shard.count // 2, max(0, shard.count - FINGERPRINT_TOKENS)}):
            yield shard, first, min(shard.count, first + FINGERPRINT_TOKENS)


def open_dataset(name_or_path: str, root: Path = DATA_ROOT) -> Dataset:
    """The data set of this name under `root`, or in this folder; UserError when missing or broken."""
    path = _find(name_or_path, root)
    try:
        names = sorted(file.name for file in path.iterdir())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if "meta.json" in names:
        return _open_prepared(path)
    if "train.bin" in names or "val.bin" in names:
        shards = {split: [_foreign(path / f"{split}.bin")] for split in SPLITS}
    else:
        shards = {
            split: [llmc(path / name) for name in names if _split_of(name) == split] for split in SPLITS
        }
        for split, found in shards.items():
            if not found:
                raise UserError(
                    f"{path} holds no {split} tokens: expected train.bin and val.bin, or llm.c's shards with "
                    f"{split} as a word of their names, such as fineweb_{split}_000001.bin or "
                    f"tiny_shakespeare_{split}.bin"
                )
    # a shard with a header is llm.c's, whose version 1 stands for GPT-2's vocabulary
    gpt2 = all(shard.offset for shard in shards["train"] + shards["val"])
    meta = {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257} if gpt2 else {}
    return Dataset(path, Tokens(shards["train"]), Tokens(shards["val"]), meta)


def _split_of(name: str) -> str | None:
    """The split that the name of a shard tells, by the last of its words that is one."""
    words = Path(name).stem.split("_") if name.endswith(".bin") else []
    return next((word for word in reversed(words) if word in SPLITS), None)


def _foreign(path: Path) -> Shard:
    shard = headerless(path, UINT16)
    return llmc(path) if is_llmc(path) else shard


def _find(name_or_path: str, root: Path) -> Path:
    for path in (root / name_or_path, Path(name_or_path)):
        try:
            if name_or_path and path.is_dir():
                return path
        except OSError as error:  # a name too long, a folder above it that is closed to us
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
    known = [path.name for path in sorted(root.glob("[!.]*/")) if any(path.glob("*.bin"))]
    raise UserError(
        f"there is no data set {name_or_path!r} in {root}, nor a folder of that name"
        f"{did_you_mean(name_or_path, known)}; there are: {', '.join(known) or 'none'}; "
        "python -m data.prepare --help says how to make one"
    )


def _open_prepared(path: Path) -> Dataset:
    meta = read_meta(path)
    tokens = {}
    for split in SPLITS:
        shard = headerless(path / f"{split}.bin", np.dtype(meta.dtype).newbyteorder("<"))
        recorded = getattr(meta, split).tokens
        if shard.count != recorded:
            raise UserError(
                f"{shard.path} holds {shard.count:,} tokens, but meta.json beside it records {recorded:,}: "
                "it was cut short or replaced; prepare it again with --overwrite"
            )
        tokens[split] = Tokens([shard])
    found = pydantic.TypeAdapter(Meta).dump_python(meta)
    return Dataset(
        path, tokens["train"], tokens["val"], found | {"tokenizer": read_beside(meta.tokenizer, path)}
    )


def read_meta(path: Path) -> Meta:
    """The checked `meta.json` of folder `path`. Raises UserError when it is damaged."""
    _, text = read_file(path / "meta.json")
    try:
        return pydantic.TypeAdapter(Meta).validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"{path / 'meta.json'} is damaged ({where}: {first['msg']}); prepare the data again with "
            "--overwrite"
        ) from None


def check_token_range(dataset: Dataset, vocab_size: int) -> None:
    """Raises UserError when the data holds an id that a model of `vocab_size` has no embedding for.

    Our own data sets record their largest id; foreign files are read through once, a chunk at a time.
    """
    for split, tokens in (("train", dataset.train), ("val", dataset.val)):
        if split in dataset.meta:
            found = [(tokens.shards[0].path, dataset.meta[split]["max_id"])] if len(tokens) else []
        else:
            found = ((shard.path, int(chunk.max())) for shard, chunk in tokens.chunks(SCAN_TOKENS))
        for path, max_id in found:
            if max_id >= vocab_size:
                raise UserError(
                    f"{path} holds token id {max_id:,}, but the model's vocabulary ends at "
                    f"{vocab_size - 1:,}; pass --vocab-size with at least "
                    f"{max(max_id + 1, dataset.vocab_size or 0)}"
                )

"""Text to token ids and back: `byte`, `char`, and tiktoken's encodings by name.

A tokenizer's `meta` is all that is needed to make it again (`load_tokenizer(tokenizer.meta)`), so a
checkpoint that carries it can be sampled from on a machine without the data.
"""

import os
import sys
import threading
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken

from base.cli import UserError, did_you_mean

SEPARATOR_TEXT = "<|endoftext|>"  # how a separator is printed; the same text inside a corpus is ordinary text
DOWNLOAD_SECONDS = 20


class CharTokenizer:
    """One id for each character of a corpus, in code point order as nanoGPT's; no separator."""

    name = "char"
    separator = None

    def __init__(self, characters: str):
        self.characters = "".join(sorted(set(characters)))
        self.vocab_size = len(self.characters)
        self.meta = {"name": "char", "characters": self.characters}

    @cached_property
    def _id_of(self) -> np.ndarray:
        """The id of every code point, `vocab_size` for those outside the alphabet: uint32 [0x110000]."""
        table = np.full(sys.maxunicode + 1, self.vocab_size, np.uint32)
        table[_code_points(self.characters)] = np.arange(self.vocab_size)
        return table

    def encode_array(self, text: str) -> np.ndarray:
        """Ids as an unsigned integer array [n]. Raises UserError for a character that the alphabet lacks."""
        ids = self._id_of[_code_points(text)]
        unknown = ids == self.vocab_size
        if unknown.any():
            raise UserError(
                f"the character {text[unknown.argmax()]!r} is not among the {self.vocab_size} of this char "
                f"tokenizer; use only characters of its corpus: {self.characters!r}"
            )
        return ids

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, ids: list[int]) -> str:
        return "".join(self.characters[i] for i in ids)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


class TiktokenTokenizer:
    """One of tiktoken's encodings, by name."""

    def __init__(self, name: str, encoding: tiktoken.Encoding):
        self._encoding = encoding
        self.name = name
        self.meta = {"name": name}
        self.vocab_size = encoding.n_vocab
        self.separator = encoding.eot_token

    @property
    def mergeable_ranks(self) -> dict[bytes, int]:
        """Every token's bytes but the special ones', to its id."""
        return self._encoding._mergeable_ranks

    def encode_array(self, text: str) -> np.ndarray:
        """Ids as an unsigned integer array [n]; special tokens' names inside the text are ordinary text."""
        return np.array(self._encoding.encode_ordinary(text), np.uint32)

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        """Text; bytes that are no valid UTF-8, as a sample may hold, become U+FFFD."""
        return self._encoding.decode(ids)


class ByteTokenizer(TiktokenTokenizer):
    """The 256 bytes of UTF-8, and id 256 as the separator between documents: an encoding without a download."""

    def __init__(self):
        ranks, special = {bytes([i]): i for i in range(256)}, {SEPARATOR_TEXT: 256}
        encoding = tiktoken.Encoding("byte", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=special)
        super().__init__("byte", encoding)

    def encode_array(self, text: str) -> np.ndarray:
        """The same ids as the encoding's, many times faster: unsigned integers [n]."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)


Tokenizer = CharTokenizer | TiktokenTokenizer


def tokenizer_names() -> list[str]:
    """Every name that `--tokenizer` takes."""
    return ["byte", "char", *tiktoken.list_encoding_names()]


def check_tokenizer_name(name: str) -> None:
    """Raises UserError for a name that is none of `tokenizer_names()`; reads and fetches nothing."""
    names = tokenizer_names()
    if name not in names:
        raise UserError(
            f"there is no tokenizer {name!r}{did_you_mean(name, names)}; known: {', '.join(names)}"
        )


def load_tokenizer(meta: dict | None) -> Tokenizer:
    """The tokenizer that `meta` describes. Raises UserError for none, an unknown one, or one that cannot be
    fetched."""
    if meta is None:
        raise UserError(
            "this model was saved without a tokenizer, so there is no way from text to ids and back"
        )
    name = meta.get("name") if isinstance(meta, dict) else None
    if name == "byte":
        return ByteTokenizer()
    if name == "char":
        if not (isinstance(meta.get("characters"), str) and meta["characters"]):
            raise UserError("a char tokenizer was stored without its characters; prepare the data again")
        return CharTokenizer(meta["characters"])
    check_tokenizer_name(str(name))
    return TiktokenTokenizer(name, _load_encoding(name))


def _load_encoding(name: str) -> tiktoken.Encoding:
    """`tiktoken.get_encoding`, bounded in time: without a network its download may wait for minutes. The
    vocabulary file is fetched once and kept in tiktoken's cache."""
    if "DATA_GYM_CACHE_DIR" not in os.environ:  # the older of the two names that tiktoken obeys
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(Path(__file__).parent / ".cache" / "tiktoken"))
    result = {}

    def load() -> None:
        try:
            result["encoding"] = tiktoken.get_encoding(name)
        except Exception as error:  # requests, ssl and the file system all have their own kinds
            result["error"] = f"{type(error).__name__}"

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    if "encoding" not in result:
        reason = result.get("error", f"no answer in {DOWNLOAD_SECONDS} seconds")
        raise UserError(
            f"the vocabulary of tokenizer {name!r} could not be fetched ({reason}); set TIKTOKEN_CACHE_DIR "
            "to a folder that holds it, filled by tiktoken on a machine with network, or use the byte "
            "tokenizer, which needs no download"
        )
    return result["encoding"]

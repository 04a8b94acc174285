"""Text to token ids and back: `byte`, `char`, tiktoken's encodings by name, and Hugging Face's tokenizer.json.

A tokenizer's `meta` is all that is needed to make it again (`load_tokenizer(tokenizer.meta)`), so a
checkpoint that carries it can be sampled from on a machine without the data.
"""

import hashlib
import json
import os
import sys
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from base.cli import UserError, did_you_mean
from data.files import read_file

SEPARATOR_TEXT = "<|endoftext|>"  # how a separator is printed; the same text inside a corpus is ordinary text
DOWNLOAD_SECONDS = 20
TOKENIZER_JSON = "tokenizer.json"
# separators, where no configuration names one
END_OF_TEXT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


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
        return self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())

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


class JsonTokenizer:
    """A tokenizer.json of Hugging Face's tokenizers library, which `meta` carries as a whole.

    A library of its own, which is imported here alone. Where it puts a mark before a text, as Llama 2's does, a
    text that is longer than `PIECE_CHARS` has one more at each cut.
    """

    name = TOKENIZER_JSON

    def __init__(self, meta: dict):
        """Raises UserError where the library is missing, or cannot read what `meta` holds."""
        try:
            import tokenizers
        except ImportError:
            raise UserError(
                "a tokenizer.json is read by the package tokenizers: pip install tokenizers"
            ) from None
        text = meta.get("json")
        if not isinstance(text, str) or hashlib.sha256(text.encode()).hexdigest() != meta.get("sha256"):
            raise UserError("this tokenizer.json is not the one that was used; prepare the data again")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"the tokenizer.json cannot be read: {error}") from None
        self._tokenizer.encode_special_tokens = True  # their names inside a text are ordinary text
        self.meta = meta
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.separator = meta.get("separator")

    def encode_array(self, text: str) -> np.ndarray:
        """Ids as an unsigned integer array [n]."""
        return np.array(self.encode(text), np.uint32)

    def encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", errors="replace").decode("utf-8")  # half a surrogate pair
        # `encode`, which takes one text, keeps Python's lock.
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return encoding.ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


Tokenizer = CharTokenizer | TiktokenTokenizer | JsonTokenizer


def tokenizer_meta(name: str) -> dict[str, Any]:
    """The meta of the tokenizer that `--tokenizer` names: a name, a tokenizer.json, or a folder that holds one.

    For `char` without its characters, which are still to be found. Raises UserError; fetches nothing.
    """
    path = Path(name)
    if name not in tokenizer_names() and (path.suffix == ".json" or path.is_dir()):
        return _read_json(path / TOKENIZER_JSON if path.is_dir() else path)
    check_tokenizer_name(name)
    return {"name": name}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
        added = {token["content"]: token["id"] for token in body["added_tokens"]}
        beside = path.with_name("tokenizer_config.json")
        end = json.loads(beside.read_bytes()).get("eos_token") if beside.exists() else None
        end = end["content"] if isinstance(end, dict) else end
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is no tokenizer.json of the tokenizers library") from None
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    separator = next((added[name] for name in (end, *END_OF_TEXT) if name in added), None)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"name": TOKENIZER_JSON, "separator": separator, "sha256": digest, "json": text}


def put_beside(meta: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Writes a tokenizer.json, which may be megabytes, into a file of `folder`; the rest of the meta."""
    if meta["name"] != TOKENIZER_JSON:
        return meta
    (folder / TOKENIZER_JSON).write_text(meta["json"], encoding="utf-8")
    return {key: value for key, value in meta.items() if key != "json"}


def read_beside(meta: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `put_beside` was given."""
    if meta.get("name") != TOKENIZER_JSON:
        return meta
    return meta | {"json": read_file(folder / TOKENIZER_JSON)[1].decode("utf-8", errors="replace")}


def tokenizer_names() -> list[str]:
    """Every name that `--tokenizer` takes."""
    return ["byte", "char", *tiktoken.list_encoding_names()]


def check_tokenizer_name(name: str) -> None:
    """Raises UserError for a name that is none of `tokenizer_names()`; reads and fetches nothing."""
    names = tokenizer_names()
    if name not in names:
        raise UserError(
            f"there is no tokenizer {name!r}{did_you_mean(name, names)}; known: {', '.join(names)}, and the path of a "
            "tokenizer.json"
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
    if name == TOKENIZER_JSON:
        return JsonTokenizer(meta)
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

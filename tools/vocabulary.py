"""A tokenizer of ours as the files that transformers reads, and theirs recognized as one of ours.

Written for `byte`, `char` and GPT-2's vocabulary, which a tokenizer.json can express without loss. The format is
that of the tokenizers library: byte-level BPE spells each byte as a printable character and merges neighbours.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from base.cli import UserError
from data.tokenizer import (
    SEPARATOR_TEXT,
    TOKENIZER_JSON,
    CharTokenizer,
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_meta,
)

BESIDE = (TOKENIZER_JSON, "tokenizer_config.json")
FILES = (*BESIDE, "vocab.json", "merges.txt")  # what a model's folder may hold
GPT2 = ("gpt2", "r50k_base")  # tiktoken's two names of one vocabulary
SIZES = {"byte": 257, "gpt2": 50257}  # of the vocabularies that are known again


def byte_characters() -> list[str]:
    """The character that spells each byte: itself if it is printable, else one from U+0100 on (GPT-2's code)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(rest)) for b in range(256)]


def spelled(token: bytes) -> str:
    return "".join(CHARACTERS[b] for b in token)


CHARACTERS = byte_characters()


def merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """The merge rules, in order, of a BPE vocabulary given as token to rank: each token's last two parts."""
    rules = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            pairs = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(pairwise(parts))]
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            rules.append((spelled(parts[0]), spelled(parts[1])))
    return rules


def vocabulary(tokenizer: Any) -> dict[str, int]:
    """Token to id, spelled as in tokenizer.json, the separator included. Raises UserError for other tokenizers."""
    if tokenizer.name == "char":
        return {c: i for i, c in enumerate(tokenizer.characters)}
    if tokenizer.name == "byte" or tokenizer.name in GPT2:
        tokens = {spelled(token): i for token, i in ranks(tokenizer).items()}
        return tokens | {SEPARATOR_TEXT: tokenizer.separator}
    raise UserError(
        f"tokenizer files are written for byte, char and {' and '.join(GPT2)}, not for {tokenizer.name}"
    )


def ranks(tokenizer: Any) -> dict[bytes, int]:
    """The byte strings of a byte-level tokenizer without its separator."""
    if tokenizer.name == "byte":
        return {bytes([b]): b for b in range(256)}
    return tokenizer.mergeable_ranks


def tokenizer_files(tokenizer: Tokenizer, block_size: int) -> dict[str, str]:
    """The text of tokenizer.json and tokenizer_config.json by file name.

    The same ids as ours, but for one thing that the format cannot say: <|endoftext|> inside a text is the
    separator there, and ordinary text here.
    """
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": block_size,
    }
    if isinstance(tokenizer, JsonTokenizer):
        text = tokenizer.meta["json"]
        added = {token["id"]: token["content"] for token in json.loads(text)["added_tokens"]}
        about |= {"eos_token": added[tokenizer.separator]} if tokenizer.separator in added else {}
    else:
        text = json.dumps(described(tokenizer), ensure_ascii=False)
        about |= (
            {} if tokenizer.separator is None else {"bos_token": SEPARATOR_TEXT, "eos_token": SEPARATOR_TEXT}
        )
    return dict(zip(BESIDE, (text, json.dumps(about, indent=2)), strict=True))


def described(tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer of ours as the content of a tokenizer.json."""
    tokens = vocabulary(tokenizer)
    bytewise = tokenizer.name != "char"
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    separator = {"id": tokenizer.separator, "content": SEPARATOR_TEXT} | flags
    rules = merges(ranks(tokenizer)) if bytewise else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [separator] if bytewise else [],
        "normalizer": None,
        "pre_tokenizer": level if bytewise else None,
        "post_processor": None,
        "decoder": level if bytewise else {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": tokens, "merges": [f"{a} {b}" for a, b in rules]},
    }


def their_vocabulary(folder: Path) -> dict[str, int] | None:
    """Token to id from the tokenizer files of a model's folder; None where it has none that lists a vocabulary."""
    try:
        if (folder / "tokenizer.json").exists():
            body = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            added = {token["content"]: token["id"] for token in body.get("added_tokens", [])}
            return dict(body["model"]["vocab"]) | added
        if (folder / "vocab.json").exists():
            return dict(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return None


def recognize(folder: Path) -> tuple[dict | None, str]:
    """(the meta of the tokenizer in a model's folder, or None, and why).

    One of ours where it is the same, and else its tokenizer.json as it stands.
    """
    theirs = their_vocabulary(folder)
    if theirs is None:
        return None, "it has no tokenizer file that lists a vocabulary"
    name = next((name for name, size in SIZES.items() if size == len(theirs)), None)
    problem = f"its vocabulary of {len(theirs)} tokens is none that this repository knows"
    try:
        if name and vocabulary(load_tokenizer({"name": name})) == theirs:
            return {"name": name}, ""
        problem = f"its vocabulary is as large as {name}'s, but another one" if name else problem
    except UserError as e:
        problem = f"whether its vocabulary is {name}'s could not be checked: {e}"
    try:
        return (tokenizer_meta(str(folder)), "") if (folder / TOKENIZER_JSON).exists() else (None, problem)
    except UserError as e:
        return None, str(e)


def token_bytes(tokenizer: Tokenizer) -> np.ndarray | None:
    """How many bytes of UTF-8 each id writes, int64 [vocab_size]; 0 for one that is no text, as the separator.

    None for a tokenizer.json that does not write text byte by byte.
    """
    sizes = np.zeros(tokenizer.vocab_size, np.int64)
    if isinstance(tokenizer, JsonTokenizer):
        return json_bytes(json.loads(tokenizer.meta["json"]), sizes)
    if isinstance(tokenizer, CharTokenizer):
        sizes[:] = [len(c.encode("utf-8", "surrogatepass")) for c in tokenizer.characters]
        return sizes
    for token, i in ranks(tokenizer).items():
        sizes[i] = len(token)
    return sizes


def json_bytes(body: dict[str, Any], sizes: np.ndarray) -> np.ndarray | None:
    """The sizes of a tokenizer.json: byte-level BPE, or SentencePiece's spelling with bytes to fall back on."""
    decoder = json.dumps(body.get("decoder"))
    if '"ByteLevel"' in decoder:
        size = len
    elif '"ByteFallback"' in decoder:
        size = spelled_bytes
    else:
        return None
    for token, i in dict(body["model"]["vocab"]).items():
        sizes[i] = size(token)
    for token in body["added_tokens"]:
        sizes[token["id"]] = 0 if token["special"] else len(token["content"].encode("utf-8"))
    return sizes


def spelled_bytes(token: str) -> int:
    """<0x0A> is a byte, and U+2581 a space."""
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", token) else len(token.replace("\u2581", " ").encode("utf-8"))

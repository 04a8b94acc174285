"""A tokenizer of ours as the files that transformers reads, and theirs recognized as one of ours.

Written for `byte`, `char` and GPT-2's vocabulary, which a tokenizer.json can express without loss. The format is
that of the tokenizers library: byte-level BPE spells each byte as a printable character and merges neighbours.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from base.cli import UserError
from data import load_tokenizer
from data.tokenizer import SEPARATOR_TEXT

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
)  # what a model's folder may hold
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


def tokenizer_files(tokenizer: Any, block_size: int) -> dict[str, str]:
    """The text of tokenizer.json and tokenizer_config.json by file name.

    The same ids as ours, but for one thing that the format cannot say: <|endoftext|> inside a text is the
    separator there, and ordinary text here.
    """
    tokens = vocabulary(tokenizer)
    bytewise = tokenizer.name != "char"
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    separator = {"id": tokenizer.separator, "content": SEPARATOR_TEXT} | flags
    rules = merges(ranks(tokenizer)) if bytewise else []
    body = {
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
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": block_size,
    }
    if bytewise:
        about |= {"bos_token": SEPARATOR_TEXT, "eos_token": SEPARATOR_TEXT}
    return {
        "tokenizer.json": json.dumps(body, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(about, indent=2),
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
    """(our tokenizer's meta, or None, and why) of the tokenizer files in a model's folder."""
    theirs = their_vocabulary(folder)
    if theirs is None:
        return None, "it has no tokenizer file that lists a vocabulary"
    name = next((name for name, size in SIZES.items() if size == len(theirs)), None)
    if name is None:
        return None, f"its vocabulary of {len(theirs)} tokens is none that this repository knows"
    try:
        same = vocabulary(load_tokenizer({"name": name})) == theirs
    except UserError as e:
        return None, f"whether its vocabulary is {name}'s could not be checked: {e}"
    return (
        ({"name": name}, "") if same else (None, f"its vocabulary is as large as {name}'s, but another one")
    )

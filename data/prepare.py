"""Text to token files: the command line of data preparation.

    python -m data.prepare stdlib
    python -m data.prepare text --name shakespeare --tokenizer char --files input.txt
    python -m data.prepare hf --name fineweb --path HuggingFaceFW/fineweb-edu --config sample-10BT \\
        --tokenizer gpt2 --max-tokens 1000000000
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from base.cli import STRICT, UserError, run
from base.flags import options
from data.build import Amounts, prepare
from data.dataset import DATA_ROOT
from data.sources import HuggingFace, StandardLibrary, TextFiles, find_files

Tokens = Annotated[int, Field(ge=2)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Common:
    tokenizer: str = "byte"
    """byte (no download), char (one id per character of the text), gpt2, another of tiktoken's encodings, or the
    path of a Hugging Face tokenizer.json."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share kept for validation. A single text file gives its end; several documents are dealt out whole."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads that tokenize; they do not change the result. 0: one per CPU."""
    data_dir: Path = DATA_ROOT
    """Where the folder of the data set goes."""
    overwrite: bool = False
    """Replace a data set of the same name."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Stdlib(Common):
    """The Python standard library's own source text on this machine, about 12 MB: needs no network."""

    name: str = "stdlib"
    """Name of the data set, for train.py --dataset."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Text(Common):
    """Local .txt, .md, .jsonl and .parquet files."""

    name: str
    """Name of the data set, for train.py --dataset."""
    files: tuple[str, ...]
    """Files, folders and globs. Files of other kinds are read as plain text when named one by one."""
    val_files: tuple[str, ...] = ()
    """Files, folders and globs of the validation data; all of --files then is training data."""
    column: str | None = None
    """Which column of .jsonl and .parquet files holds the text; "text" if not given."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Hf(Common):
    """A data set from the Hugging Face hub, or a local folder in its format; streamed, not stored."""

    name: str
    """Name of the data set, for train.py --dataset."""
    path: str
    """The hub's id, such as HuggingFaceFW/fineweb-edu, or a local folder."""
    config: str | None = None
    """Configuration of the data set, where it has several, such as sample-10BT."""
    split: str = "train"
    """Which of the data set's splits is read; training and validation are both made from it."""
    column: str = "text"
    """Which column holds the text."""
    max_tokens: Tokens | None = None
    """Stop after this many tokens, training and validation together."""
    val_tokens: Tokens | None = None
    """Stop giving documents to validation when it has this many tokens."""


def text_files(command: Text) -> TextFiles:
    """What --files names, without what --val-files names, which may lie in the same folder."""
    val_files = find_files(command.val_files)
    files = tuple(path for path in find_files(command.files) if path not in val_files)
    if not files:
        raise UserError("--files and --val-files name the same files")
    return TextFiles(files, command.column, val_files)


def main(argv: Sequence[str]) -> None:
    command = options(
        Stdlib | Text | Hf,
        argv,
        "python -m data.prepare",
        "Turn text into the token files that train.py reads.",
    )
    amounts = Amounts(command.val_fraction)
    match command:
        case Stdlib():
            source = StandardLibrary()
        case Text():
            source = text_files(command)
        case Hf():
            source = HuggingFace(command.path, command.config, command.split, command.column)
            amounts = Amounts(command.val_fraction, command.val_tokens, command.max_tokens)
    try:
        prepare(
            source,
            name=command.name,
            tokenizer=command.tokenizer,
            amounts=amounts,
            root=command.data_dir,
            workers=command.workers,
            overwrite=command.overwrite,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("nothing was kept") from None


if __name__ == "__main__":
    try:
        run(main, result_is_printed=False)
    except SystemExit as e:
        # All files are closed by now, and pyarrow's reader threads may abort a regular exit after streaming:
        # https://github.com/apache/arrow/issues/45214
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(e.code or 0)

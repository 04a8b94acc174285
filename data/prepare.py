"""Text to token files: the command line of data preparation.

    python -m data.prepare stdlib
    python -m data.prepare text --name shakespeare --tokenizer char --files input.txt
    python -m data.prepare hf --name fineweb --path HuggingFaceFW/fineweb-edu --config sample-10BT \\
        --tokenizer gpt2 --max-tokens 1000000000
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from base.cli import UserError
from data.build import Amounts, prepare
from data.command_line import read_flags
from data.dataset import DATA_ROOT
from data.sources import HuggingFace, StandardLibrary, TextFiles, find_files
from data.terminal import forgive_output


@dataclass(frozen=True)
class Options:
    """Common to all sources."""

    # a line each: tyro keeps the line breaks of an indented docstring

    tokenizer: str = "byte"
    """byte (no download), char (one id per character of the text), gpt2, or another of tiktoken's encodings."""
    val_fraction: float = 0.1
    """Share kept for validation. A single text file gives its end; several documents are dealt out whole."""
    workers: int = 0
    """Processes that tokenize; they do not change the result. 0: one per CPU, but one for byte and char."""
    data_dir: Path = DATA_ROOT
    """Where the folder of the data set goes."""
    overwrite: bool = False
    """Replace a data set of the same name."""


@dataclass(frozen=True, kw_only=True)
class Stdlib:
    """The Python standard library's own source text on this machine, about 12 MB: needs no network."""

    name: str = "stdlib"
    """Name of the data set, for train.py --dataset."""
    common: tyro.conf.OmitArgPrefixes[Options] = Options()


@dataclass(frozen=True, kw_only=True)
class Text:
    """Local .txt, .md, .jsonl and .parquet files."""

    name: str
    """Name of the data set, for train.py --dataset."""
    files: tuple[str, ...]
    """Files, folders and globs. Files of other kinds are read as plain text when named one by one."""
    column: str = "text"
    """Which column of .jsonl and .parquet files holds the text."""
    common: tyro.conf.OmitArgPrefixes[Options] = Options()


@dataclass(frozen=True, kw_only=True)
class Hf:
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
    max_tokens: int | None = None
    """Stop after this many tokens, training and validation together."""
    val_tokens: int | None = None
    """Stop giving documents to validation when it has this many tokens."""
    common: tyro.conf.OmitArgPrefixes[Options] = Options()


Command = (
    Annotated[Stdlib, tyro.conf.subcommand("stdlib")]
    | Annotated[Text, tyro.conf.subcommand("text")]
    | Annotated[Hf, tyro.conf.subcommand("hf")]
)


def run(command: Stdlib | Text | Hf) -> None:
    """Prepare what the command line asks for. Raises UserError."""
    options = command.common
    amounts = Amounts(options.val_fraction)
    match command:
        case Stdlib():
            source = StandardLibrary()
        case Text():
            source = TextFiles(find_files(command.files), command.column)
        case Hf():
            source = HuggingFace(command.path, command.config, command.split, command.column)
            amounts = Amounts(options.val_fraction, command.val_tokens, command.max_tokens)
    prepare(
        source,
        name=command.name,
        tokenizer=options.tokenizer,
        amounts=amounts,
        root=options.data_dir,
        workers=options.workers,
        overwrite=options.overwrite,
    )


def main() -> None:
    description = "Turn text into the token files that train.py reads."
    command, code = None, 0
    try:
        command = read_flags(Command, sys.argv[1:], "python -m data.prepare", description, UserError)
        run(command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted; nothing was kept", file=sys.stderr)
        code = 130
    if isinstance(command, Hf):
        # All files are closed by now, and pyarrow's reader threads may abort a regular exit after streaming:
        # https://github.com/apache/arrow/issues/45214
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    forgive_output()
    main()

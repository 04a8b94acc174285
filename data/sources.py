"""Where text comes from: the standard library's own source, local files, Hugging Face data sets.

A source yields its documents in a fixed order as pieces of bounded length, so that a document of any size
passes through memory a piece at a time.
"""

import codecs
import contextlib
import glob
import json
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from base.cli import UserError, did_you_mean

PIECE_CHARS = 2**20
READ_BYTES = 2**20
PLAIN_SUFFIXES, RECORD_SUFFIXES = (".txt", ".md"), (".jsonl", ".parquet")
COMPRESSED = {  # how such a file begins
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7-Zip",
}
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Piece:
    """A stretch of one document; `last` says that the document ends with it."""

    text: str
    last: bool
    split: str | None = None  # "train" or "val" where the source decides; else whole documents are dealt out


class Source(Protocol):
    one_text: bool
    """Whether all is one running text, to be cut by position, rather than separate documents."""
    own_validation: bool
    """Whether every piece says its split, so that nothing is cut or dealt out."""

    def describe(self) -> dict:
        """What identifies the source's content, JSON-serializable; recorded, and compared on a second run."""

    def pieces(self) -> Iterator[Piece]:
        """Every document in order. Raises UserError for what cannot be read."""


@dataclass(frozen=True)
class StandardLibrary:
    """The source text of this machine's Python standard library, without its tests."""

    one_text = False
    own_validation = False

    def _files(self) -> list[Path]:
        root = Path(sysconfig.get_path("stdlib"))
        files = (path.relative_to(root) for path in root.rglob("*.py"))
        chosen = sorted(
            path.as_posix()
            for path in files
            # _sysconfigdata is generated: how this machine's Python was compiled, with its paths
            if not NOT_LIBRARY & set(path.parts[:-1]) and not path.name.startswith("_sysconfigdata")
        )
        if not chosen:
            raise UserError(
                f"this Python has no source text of its standard library in {root}; prepare text instead"
            )
        return [root / path for path in chosen]

    def describe(self) -> dict:
        files = self._files()
        total = sum(path.stat().st_size for path in files)
        return {"source": "stdlib", "python": platform.python_version(), "files": len(files), "bytes": total}

    def pieces(self) -> Iterator[Piece]:
        for path in self._files():
            yield from _in_pieces(read_text(path))


@dataclass(frozen=True)
class TextFiles:
    """Local files: a plain file is one document; each line of .jsonl and each row of .parquet is one.

    `val_files`, if any, are the validation data, and `files` the training data. Raises UserError for a `column`
    of files that have none.
    """

    files: tuple[Path, ...]
    column: str | None = None
    val_files: tuple[Path, ...] = ()

    def __post_init__(self):
        plain = [path for path in self.files + self.val_files if path.suffix.lower() not in RECORD_SUFFIXES]
        if self.column is not None and plain:
            raise UserError(
                f"{plain[0]} is read as plain text, which has no column {self.column!r}; --column is for files that "
                f"end in {' or '.join(RECORD_SUFFIXES)}"
            )

    @property
    def own_validation(self) -> bool:
        return bool(self.val_files)

    @property
    def one_text(self) -> bool:
        records = [path for path in self.files + self.val_files if path.suffix.lower() in RECORD_SUFFIXES]
        return not records and len(self.files) == 1 and len(self.val_files) <= 1

    def describe(self) -> dict:
        described = {"source": "text", "column": self.column or "text"}
        for name, files in (("files", self.files), ("val_files", self.val_files)):
            if files:
                described[name] = [_file_identity(path) for path in files]
        return described

    def pieces(self) -> Iterator[Piece]:
        for path in self.files:
            for piece in self._pieces_of(path):
                yield replace(piece, split="train") if self.val_files else piece
        for path in self.val_files:
            for piece in self._pieces_of(path):
                yield replace(piece, split="val")

    def _pieces_of(self, path: Path) -> Iterator[Piece]:
        column = self.column or "text"
        match path.suffix.lower():
            case ".jsonl":
                return _records(read_jsonl(path, column))
            case ".parquet":
                return _records(read_parquet(path, column))
        return _in_pieces(read_text(path))


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """An OSError inside becomes a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or 'the source'} cannot be read: {error.strerror or error}"
        ) from error


def find_files(patterns: Sequence[str]) -> tuple[Path, ...]:
    """Files, folders (searched for text files) and globs, as absolute paths; each file once, folders sorted.

    Raises UserError for a pattern that names nothing, for what is neither file nor folder, and for a compressed file.
    """
    found: list[Path] = []
    for pattern in patterns:
        with reading():
            found += _matches(pattern)
    for path in found:
        _check_not_compressed(path)
    return tuple(dict.fromkeys(path.resolve() for path in found))


def _matches(pattern: str) -> Iterator[Path]:
    matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
    if not matches:
        raise UserError(f"there is no file, folder or match for {pattern!r}")
    for match in map(Path, matches):
        if match.is_dir():
            yield from _text_files(match)
        elif match.is_file():
            yield match
        else:
            raise UserError(
                f"{match} is neither a file nor a folder; store what a pipe gives in a file first"
            )


def _text_files(folder: Path) -> list[Path]:
    """The files of the kinds that are known as text. How many others there are is told."""

    def fail(error: OSError):  # a subfolder that is closed to us: no part of the text is left out unsaid
        raise error

    suffixes = PLAIN_SUFFIXES + RECORD_SUFFIXES
    paths = [Path(parent, name) for parent, _, names in os.walk(folder, onerror=fail) for name in names]
    files = sorted(path for path in paths if path.is_file())
    inside = [path for path in files if path.suffix.lower() in suffixes]
    others = [path for path in files if path.suffix.lower() not in suffixes]
    if not inside:
        raise UserError(f"the folder {folder} holds no {', '.join(suffixes)} file")
    if others:
        print(
            f"{folder}: {len(inside):,} files are read, and {len(others):,} of other kinds than "
            f"{', '.join(suffixes)} are left out, such as {others[0].relative_to(folder)}"
        )
    return inside


def _check_not_compressed(path: Path) -> None:
    with reading(), open(path, "rb") as file:
        start = file.read(max(map(len, COMPRESSED)))
    kind = next((kind for mark, kind in COMPRESSED.items() if start.startswith(mark)), None)
    if kind:
        raise UserError(f"{path} is compressed ({kind}); unpack it first")


def _file_identity(path: Path) -> list:
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def read_text(path: Path) -> Iterator[str]:
    """The file's text a block at a time, line ends as they are, without a byte order mark at its start.

    Raises UserError at the first byte not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, at_start = 0, True
    with open(path, "rb") as file:
        while True:
            block = file.read(READ_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                offset = position - pending + error.start
                raise UserError(
                    f"{path} is not UTF-8 text: see byte {offset:,}; convert the file to UTF-8"
                ) from None
            yield text.removeprefix("\ufeff") if at_start else text
            at_start = at_start and not text
            if not block:
                return
            position += len(block)


def read_jsonl(path: Path, column: str) -> Iterator[str]:
    """The text column of every line that is not blank."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except RecursionError:
                raise UserError(f"{path}, line {number}: the JSON is nested too deeply to be read") from None
            except ValueError as error:  # of JSON or of UTF-8
                raise UserError(f"{path}, line {number}: not JSON in UTF-8 ({error})") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}, line {number}: expected an object with a column {column!r}")
            yield text_of(record, column, f"{path}, line {number}")


def read_parquet(path: Path, column: str) -> Iterator[str]:
    """The text column of every row."""
    import pyarrow  # slow to import, and seldom needed
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise missing_column(column, file.schema_arrow.names, str(path))
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                for value in batch.column(0).to_pylist():
                    yield text_of({column: value}, column, str(path))
    except UnicodeDecodeError:
        raise UserError(f"{path}, column {column!r}: not all of its text is UTF-8") from None
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is no readable Parquet file ({str(error).splitlines()[0]})") from None


def text_of(record: dict, column: str, where: str) -> str:
    """The record's text, empty for a null. Raises UserError when the column is missing or holds something
    else."""
    if column not in record:
        raise missing_column(column, list(record), where)
    value = record[column]
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"{where}: column {column!r} holds {type(value).__name__}, not text; choose another --column"
        )
    return value or ""


def missing_column(column: str, existing: list[str], where: str) -> UserError:
    return UserError(
        f"{where} has no column {column!r}{did_you_mean(column, existing)}; pass --column with one of: "
        f"{', '.join(existing)}"
    )


@dataclass(frozen=True)
class HuggingFace:
    """A data set of the Hugging Face hub, or a local folder in its format, streamed."""

    path: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    one_text = False
    own_validation = False

    def describe(self) -> dict:
        described = {"source": "hf", "path": self.path, "config": self.config, "split": self.split}
        if os.path.isdir(self.path):
            files = sorted(path for path in Path(self.path).resolve().rglob("*") if path.is_file())
            described["files"] = [_file_identity(path) for path in files]
        return described | {"column": self.column}

    def pieces(self) -> Iterator[Piece]:
        where = f"data set {self.path!r}"
        yield from _records(text_of(row, self.column, where) for row in self._rows())

    def _rows(self) -> Iterator[dict]:
        _keep_caches_here()
        import datasets  # reads where its caches are

        try:
            yield from datasets.load_dataset(self.path, name=self.config, split=self.split, streaming=True)
        except Exception as error:  # of datasets, the hub's client, the network: too many kinds to name
            reason = " ".join(str(error).split())
            if "scripts are no longer supported" in reason:
                reason = "it is a script, which datasets no longer runs; look for a Parquet version of it"
            raise UserError(
                f"the data set {self.path!r} cannot be read: {reason or type(error).__name__} "
                "(a folder must exist; a hub id takes the network)"
            ) from None


def _keep_caches_here() -> None:
    """Point the caches of `datasets` below data/, unless the user has chosen a place. HF_HOME itself stays,
    as the user's token is read from there."""
    if "HF_HOME" not in os.environ:
        cache = Path(__file__).parent / ".cache" / "huggingface"
        for kind in ("hub", "datasets", "modules", "assets", "xet"):
            os.environ.setdefault(f"HF_{kind.upper()}_CACHE", str(cache / kind))


def _records(texts: Iterator[str]) -> Iterator[Piece]:
    for text in texts:
        # JSON can name half of a surrogate pair, which no UTF-8 can hold
        yield from _in_pieces(iter([text.encode("utf-8", errors="replace").decode("utf-8")]))


def _in_pieces(blocks: Iterator[str]) -> Iterator[Piece]:
    """One document, cut where no tokenizer would notice; nothing for an empty one."""
    text = ""
    for block in blocks:
        text += block
        while len(text) > PIECE_CHARS:
            end = seam(text, PIECE_CHARS)
            yield Piece(text[:end], last=False)
            text = text[end:]
    if text:
        yield Piece(text, last=True)


def seam(text: str, limit: int) -> int:
    """The last position up to `limit` at which the text can be cut without changing its tokens.

    That is before a space that follows a character other than white space. tiktoken's encodings split a text
    into words first and never merge across them; in none of their patterns does a word run over such a place.
    (Only text without any such place in `limit` characters is cut at `limit` itself, which matters to neither
    byte nor char.)
    """
    end = text.rfind(" ", 1, limit)
    while end > 0 and text[end - 1].isspace():
        end = text.rfind(" ", 1, end)
    return end if end > 0 else limit

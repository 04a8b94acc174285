"""What a tool leaves behind: files that are whole or as they were, and its words on standard output."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from base.cli import UserError


def check_writable(flag: str, path: str) -> None:
    """Raises UserError, before any work, where no file can be made at `path`; an empty one is no file."""
    folder = Path(path).parent
    if path and is_special(Path(path)):
        return
    if path and Path(path).is_dir():
        raise UserError(f"{flag} {path} is a folder; name a file")
    if path and not folder.is_dir():
        raise UserError(f"{flag} {path} cannot be written: there is no folder {folder}")
    if path and not os.access(folder, os.W_OK):
        raise UserError(f"{flag} {path} cannot be written: the folder {folder} is read-only")


def is_special(path: Path) -> bool:
    """Whether this is a device or a pipe, such as /dev/stdout, which is written itself."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file to write into, which takes the place of `path` when all is written. Raises UserError."""
    try:
        if is_special(path):
            yield path
            return
        target = path.resolve()  # a link stays one
        temporary = target.with_name(f".writing_{target.name}")
        try:
            yield temporary
            temporary.replace(target)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror or e}") from None


def say(text: str) -> None:
    """Prints at once. What the terminal cannot show becomes `?`; a reader that has left, as head does, is not missed.

    Raises UserError where standard output is a file on a full disk.
    """
    if sys.stdout is None:  # the shell has closed it
        return
    sys.stdout.reconfigure(errors="replace")
    try:
        print(text, flush=True)
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        if not isinstance(e, BrokenPipeError):
            raise UserError(f"standard output cannot be written: {e.strerror}") from None

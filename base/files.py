"""Files and folders that are whole or as they were, whatever is killed and whoever else writes; and locks."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from base.cli import UserError

MARK_WITHIN = 2000


def check_writable(flag: str, path: str, mark: str) -> None:
    """Raises UserError, before any work, where no file can be made at `path`; an empty path is no file.

    mark: what a file that stands there must hold in its first MARK_WITHIN bytes, as only a command's own is replaced.
    """
    folder = Path(path).parent
    if not path or is_special(Path(path)):
        return
    if Path(path).is_dir():
        raise UserError(f"{flag} {path} is a folder; name a file")
    if not folder.is_dir():
        raise UserError(f"{flag} {path} cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{flag} {path} cannot be written: the folder {folder} is read-only")
    with writing(Path(path)), contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        start = file.read(MARK_WITHIN)
        if start and mark.encode() not in start:
            raise UserError(f"{flag} {path} exists and was not written by this command; name another file")


def make_folder(path: Path) -> None:
    """A folder that may be there already. Raises UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"the folder {path} cannot be made: {e.strerror}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no such file, or a damaged one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_special(path: Path) -> bool:
    """Whether this is a device or a pipe, such as /dev/stdout, which is written itself."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def sync(path: Path) -> None:
    """Returns when the file or the folder's list of names is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A path to write, whose file takes the place of `path` when the block ends well, and else is deleted.

    A link stays a link, and what it points to is replaced. Raises UserError for an OSError, also of the block.
    """
    path = Path(path)
    with writing(path):
        if is_special(path):
            yield path
            return
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".writing_{target.name}")
        try:
            yield temporary
            sync(temporary)
            temporary.replace(target)
            sync(target.parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`atomic_file` with this text in UTF-8."""
    with atomic_file(path) as file:
        file.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def atomic_folder(path: Path, *, replace: bool = False, wait: bool = False) -> Iterator[Path]:
    """An empty folder to fill, which takes the name `path` when the block ends well, and else is deleted.

    A folder that the block leaves empty is deleted, too, and then nothing is replaced.
    replace: whether a folder of this name may stand there, which is then deleted. wait: for another process that
    fills the same. What a killed process left is put right first. A link stays a link. Raises UserError for an
    OSError, also of the block, and where another process fills the same folder.
    """
    path = Path(path)
    with writing(path):
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".writing_{target.name}")
        with lock_folder(temporary, path, wait) as held:
            replaced = target.with_name(f".replaced_{target.name}")
            restore(target, replaced)
            for left_over in temporary.iterdir():
                remove(left_over)
            try:
                yield temporary
                if not any(temporary.iterdir()):
                    return
                for file in [*temporary.iterdir(), temporary]:
                    sync(file)
                if replace and target.exists():
                    target.rename(replaced)
                if target.exists():
                    raise FileExistsError(errno.EEXIST, "it exists already")
                temporary.rename(target)
                sync(target.parent)
                shutil.rmtree(replaced, ignore_errors=True)
            finally:
                if held.is_of(temporary):
                    shutil.rmtree(temporary, ignore_errors=True)


def restore(target: Path, replaced: Path) -> None:
    """Undoes or finishes the replacement in which a killed process left `target`."""
    if replaced.exists():
        if target.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(target)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def lock_folder(temporary: Path, path: Path, wait: bool) -> "Lock":
    """Makes the folder and locks it; the one of this name, not one that its last holder has renamed or deleted."""
    while True:
        temporary.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            held = lock(temporary, held=f"{path} is being written by another process", wait=wait)
            if held.is_of(temporary):
                return held
            held.release()


class Lock:
    """A lock that is held, until `release`, the end of a `with` block, or the end of the process in whatever way."""

    def __init__(self, descriptor: int):
        self.descriptor: int | None = descriptor

    def is_of(self, path: Path) -> bool:
        """Whether what was locked still has this name."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(path), os.fstat(self.descriptor))
        return False

    def release(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *exception) -> None:
        self.release()


def lock(path: Path, *, held: str | None = None, wait: bool = False) -> Lock:
    """Locks an existing file or folder. Raises UserError, which says `held`, while another process holds the lock.

    wait: prints `held` and waits instead. Where the file system knows no locks, nothing is locked.
    """
    held = held or f"{path} is in use by another process"
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            os.close(descriptor)
            raise UserError(held) from None
        print(f"{held}; waiting for it ...", flush=True)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError:
        pass  # a network file system without locks
    return Lock(descriptor)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError inside becomes a UserError that names `path`."""
    try:
        yield
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror or e}") from e

"""A data set appears under its name whole or not at all, whatever is killed and whoever else prepares it."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from base.cli import UserError
from data.dataset import open_dataset, read_meta


@contextlib.contextmanager
def new_folder(name: str, root: Path) -> Iterator[Path]:
    """An empty folder to write the data set `name` into, ours alone until the end of the block.

    What an interrupted preparation left is cleared first; another process that prepares the same is waited
    for. When the block ends without `publish`, nothing is left. Where the name is a link, all of this happens
    at the place it points to.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) or name == "__pycache__":
        raise UserError(f"{name!r} cannot name a data set: use letters, digits, '-', '_' and '.'")
    target = _followed(root / name)
    folder = target.with_name(f".{target.name}.partial")
    try:
        lock = _lock(folder, target)
    except OSError as error:
        raise UserError(f"{root} cannot be written to: {error}") from error
    try:
        for left_over in folder.iterdir():
            left_over.unlink()
        _restore(target)
        yield folder
    except OSError as error:  # of the source or of the target; the error says which file
        raise UserError(f"preparing {target} failed: {error}") from error
    finally:
        if _is_same(folder, lock):  # not published
            shutil.rmtree(folder)
        os.close(lock)


def _followed(target: Path) -> Path:
    """Where a data set of this path really lies; a link must not be renamed or removed in its place."""
    return Path(os.path.realpath(target))


def _lock(folder: Path, target: Path) -> int:
    """A descriptor that holds the lock of `folder`, which is made if need be.

    The kernel frees the lock when its process ends, however it ends.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another process, which is preparing {target} ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            return lock  # a network file system without locks: nobody can be waited for
        if _is_same(folder, lock):
            return lock
        os.close(lock)  # the other process has published or removed the folder that was waited for


def _is_same(folder: Path, descriptor: int) -> bool:
    return folder.exists() and os.path.samestat(os.stat(folder), os.fstat(descriptor))


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _restore(target: Path) -> None:
    """Undo or finish the replacement in which a killed process left `target`."""
    replaced = _replaced(target)
    if replaced.exists():
        if target.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(target)


def is_done(target: Path, request: dict) -> bool:
    """Whether `target` was made by this request; UserError when by another one, or it is damaged."""
    if not target.exists():
        return False
    _check_ours(target)
    made_by = read_meta(target).request
    differing = sorted(key for key in request.keys() | made_by.keys() if request.get(key) != made_by.get(key))
    if differing:
        raise UserError(
            f"{target} was already made from something else (different: {', '.join(differing)}); pass "
            "another --name, or --overwrite to replace it"
        )
    open_dataset(str(target))
    return True


def _check_ours(target: Path) -> None:
    if not (target / "meta.json").exists():
        raise UserError(f"{target} exists and was not made by data.prepare; remove it or choose another name")


def publish(folder: Path, target: Path) -> None:
    """Give the finished folder its name, in place of an older data set of ours."""
    target = _followed(target)
    for file in folder.iterdir():
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    if target.exists():
        _check_ours(target)
        target.rename(_replaced(target))
    folder.rename(target)
    shutil.rmtree(_replaced(target), ignore_errors=True)

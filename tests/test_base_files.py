"""Files and folders are whole or as they were."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from base.cli import UserError
from base.files import atomic_file, atomic_folder, check_writable, lock


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(folder: Path, text: str) -> None:
    (folder / "file").write_text(text, encoding="utf-8")


def fail_halfway(file_or_folder) -> None:
    """Begins to write what the context manager makes, and fails."""
    with file_or_folder as temporary:
        if temporary.is_dir():
            assert entries(temporary) == []
            fill(temporary, "half")
        else:
            temporary.write_text("half", encoding="utf-8")
        raise ZeroDivisionError


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "file"
    file.write_text("old", encoding="utf-8")
    with pytest.raises(ZeroDivisionError):
        fail_halfway(atomic_file(file))
    assert (file.read_text(encoding="utf-8"), entries(tmp_path)) == ("old", ["file"])
    with atomic_file(file) as temporary:
        temporary.write_text("new", encoding="utf-8")
        assert file.read_text(encoding="utf-8") == "old"
    assert (file.read_text(encoding="utf-8"), entries(tmp_path)) == ("new", ["file"])


def test_a_link_to_a_file_or_a_folder_stays_one(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    with atomic_file(tmp_path / "link") as temporary:
        temporary.write_text("new", encoding="utf-8")
    assert (tmp_path / "there" / "file").read_text(encoding="utf-8") == "new"
    (tmp_path / "folder").symlink_to(tmp_path / "there" / "folder")
    with atomic_folder(tmp_path / "folder") as temporary:
        fill(temporary, "new")
    assert entries(tmp_path / "there" / "folder") == ["file"]
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder").is_symlink()


def test_a_pipe_is_written_itself(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    with atomic_file(tmp_path / "pipe") as file:
        file.write_text("text", encoding="utf-8")
    assert os.read(reader, 100) == b"text"
    os.close(reader)


def test_what_cannot_be_written_is_said_in_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    for make in (atomic_file, atomic_folder):
        with pytest.raises(UserError, match=r"file/x cannot be written"), make(tmp_path / "file" / "x"):
            pass
        with pytest.raises(UserError, match=r"x cannot be written: No space left"), make(tmp_path / "x"):
            raise OSError(28, os.strerror(28))
    assert entries(tmp_path) == ["file"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fail_halfway(atomic_folder(tmp_path / "folder"))
    assert entries(tmp_path) == []
    with atomic_folder(tmp_path / "folder") as temporary:
        fill(temporary, "new")
        assert not (tmp_path / "folder").exists()
    assert (entries(tmp_path), entries(tmp_path / "folder")) == (["folder"], ["file"])


def test_a_folder_that_is_there_is_replaced_only_when_told(tmp_path):
    for text, replace in (("first", False), ("second", True)):
        with atomic_folder(tmp_path / "folder", replace=replace) as temporary:
            fill(temporary, text)
    with pytest.raises(UserError, match="already"), atomic_folder(tmp_path / "folder") as temporary:
        fill(temporary, "third")
    assert (tmp_path / "folder" / "file").read_text(encoding="utf-8") == "second"
    assert entries(tmp_path) == ["folder"]


def python(source: str, **how) -> subprocess.Popen:
    source = f"import os, signal, time\nfrom pathlib import Path\nfrom base.files import *\n{source}"
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, **how)


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("moment", ["in the block", "between the two renames", "after them"])
def test_a_killed_replacement_is_put_right_by_the_next(tmp_path, moment):
    with atomic_folder(tmp_path / "folder") as temporary:
        fill(temporary, "old")
    source = {
        "in the block": f"with atomic_folder(Path('folder'), replace=True) as new: (new / 'half').touch(); {KILL}",
        "between the two renames": "Path('folder').rename('.replaced_folder')",
        "after them": "import shutil; shutil.copytree('folder', '.replaced_folder')",
    }[moment]
    process = python(source, cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert process.wait(timeout=60) == (-signal.SIGKILL if moment == "in the block" else 0)
    assert len(entries(tmp_path)) == (1 if moment == "between the two renames" else 2)
    with pytest.raises(ZeroDivisionError):
        fail_halfway(atomic_folder(tmp_path / "folder", replace=True))
    assert entries(tmp_path) == ["folder"]
    assert (tmp_path / "folder" / "file").read_text(encoding="utf-8") == "old"


def test_two_processes_fill_one_folder_one_after_the_other(tmp_path):
    source = """
with atomic_folder(Path('folder'), replace=True, wait=True) as new:
    print('begun', flush=True)
    input()
    (new / 'file').write_text('first')
"""
    first = python(source, cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.getcwd()}, stdin=subprocess.PIPE)
    assert first.stdout.readline() == "begun\n"
    with pytest.raises(UserError, match="by another process"), atomic_folder(tmp_path / "folder"):
        pass
    second = python(
        "with atomic_folder(Path('folder'), replace=True, wait=True) as new: (new / 'file').write_text('second')",
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert second.stdout.readline() == "folder is being written by another process; waiting for it ...\n"
    first.communicate("\n", timeout=60)
    assert second.wait(timeout=60) == 0
    assert (tmp_path / "folder" / "file").read_text(encoding="utf-8") == "second"
    assert entries(tmp_path) == ["folder"]


def test_a_lock_is_held_until_it_is_released(tmp_path):
    held = lock(tmp_path)
    with pytest.raises(UserError, match="is in use by another process"):
        lock(tmp_path)
    with pytest.raises(UserError, match="mine"):
        lock(tmp_path, held="mine")
    held.release()
    with lock(tmp_path):
        pass
    lock(tmp_path).release()


def test_where_no_file_can_be_made_is_known_before_any_work(tmp_path):
    check_writable("--json", "", "mark")
    check_writable("--json", "/dev/stdout", "mark")
    check_writable("--json", str(tmp_path / "file"), "mark")
    with pytest.raises(UserError, match=r"--json .* is a folder; name a file"):
        check_writable("--json", str(tmp_path), "mark")
    with pytest.raises(UserError, match=r"--json .* cannot be written: there is no folder"):
        check_writable("--json", str(tmp_path / "none" / "file"), "mark")


def test_only_a_file_with_the_mark_of_its_command_is_replaced(tmp_path):
    file = tmp_path / "file"
    for content in (b"", b"a mark"):
        file.write_bytes(content)
        check_writable("--json", str(file), "mark")
    for content in (b"a note", b"\xff\xfe", b" " * 5000 + b"mark"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"--json .* exists and was not written by this command"):
            check_writable("--json", str(file), "mark")

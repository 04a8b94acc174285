"""Disks that are full, small, read-only or gone, and memory that is not there: what a run loses and what it says."""

import contextlib
import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from tiny_runs import STEPS, assert_same_end, before_step, finish, rows, saved, start, train

from base.cli import UserError
from training.run import EXIT_STOPPED, EXIT_UNSAVED, RunFolder
from training.tracker import read_metrics


def test_a_disk_that_cannot_take_a_checkpoint_is_told_before_training(argv, tmp_path, capsys, full_disk):
    full_disk(10_000)
    assert train(*argv) == 2
    full_disk()
    said = capsys.readouterr()
    assert f"error: {tmp_path / 'tiny'} cannot take a checkpoint" in said.err
    assert "step 0: val loss" not in said.out
    assert train(*argv) == 0  # what that left behind is in nobody's way


def test_a_disk_that_fills_up_costs_one_checkpoint(argv, tmp_path, monkeypatch, capsys, full_disk):
    """From step 3 on files are limited; the checkpoint of step 4 fails, that of step 8 has room again."""
    assert train(*argv, "--run-name", "whole") == 0
    before_step(monkeypatch, 3, lambda: full_disk(2_000))
    before_step(monkeypatch, 6, full_disk)
    assert train(*argv) == 0
    said = capsys.readouterr()
    assert "the checkpoint of step 4 could not be written" in said.out
    assert "metrics.jsonl cannot be written" in said.err
    assert_same_end(tmp_path / "tiny", tmp_path / "whole")  # the rows of those steps were written later


def test_a_last_checkpoint_that_fails_is_the_exit_code(argv, tmp_path, monkeypatch, capsys, full_disk):
    before_step(monkeypatch, STEPS - 1, lambda: full_disk(5_000))
    assert train(*argv) == EXIT_UNSAVED == 74
    full_disk()
    assert "without its checkpoint; --resume goes on from an earlier one" in capsys.readouterr().out
    monkeypatch.undo()
    assert train(*argv, "--run-name", "whole") == 0
    assert train(*argv, "--resume") == 0
    assert_same_end(tmp_path / "tiny", tmp_path / "whole")


@contextlib.contextmanager
def small_disk(place: Path, size: str):
    """A tmpfs at `place`."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        # What wandb has left running may still hold a file there for a moment.
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_small_tmpfs_that_fills_up_costs_nothing_saved_before(argv, tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        assert train(*argv, "--run-name", "tiny", "--out-dir", disk) == 0
        whole = {p: p.read_bytes() for p in (disk / "tiny" / "checkpoints").rglob("*") if p.is_file()}
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "filler").write_bytes(bytes(free - 20_000))
        assert train(*argv, "--out-dir", disk, "--resume", "--max-iters", "16") == EXIT_UNSAVED
        assert {p: p.read_bytes() for p in whole} == whole
        read_metrics(disk / "tiny" / "metrics.jsonl")
        (disk / "filler").unlink()
        assert train(*argv, "--out-dir", disk, "--resume", "--max-iters", "16") == 0
        assert saved(disk / "tiny")[1].progress.step == 16


FILLING = """
import contextlib, sys
import train
from training.trainer import Trainer
full_at, filler, *argv = sys.argv[1:]
step = Trainer.step
def patched(self, index, watch):
    if index + 1 == int(full_at):
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as f:
            while f.write(bytes(4096)):
                pass
    return step(self, index, watch)
Trainer.step = patched
train.main(argv)
"""


@pytest.mark.parametrize("when", [pytest.param("from the start", marks=pytest.mark.slow), "during training"])
def test_a_disk_without_room_for_wandb_costs_wandb_only(argv, tmp_path, monkeypatch, when):
    """In a process of its own, as wandb has something to say at its end too."""
    assert train(*argv, "--run-name", "whole") == 0
    with monkeypatch.context() as patch:
        before_step(patch, 3, lambda: signal.raise_signal(signal.SIGTERM))
        assert train(*argv) == EXIT_STOPPED  # so that there is a folder to mount the disk in
    argv = (*argv, "--resume", "--wandb", "offline")
    with small_disk(tmp_path / "tiny" / "wandb", "4m") as disk:
        if when == "from the start":
            (disk / "filler").write_bytes(bytes(4 * 2**20))
            process = start(*argv)
        else:
            process = start(FILLING, 8, disk / "filler", *argv, program="-c")
        code, _, error = finish(process, timeout=120)
        assert os.statvfs(disk).f_bavail == 0
        assert any(disk.glob("offline-run-*")) == (when == "during training")
    assert code == 0, error
    metrics = tmp_path / "tiny" / "metrics.jsonl"
    assert (
        error == f"wandb failed (no space left in {disk}); training goes on, and {metrics} has everything\n"
    )
    assert rows(tmp_path / "tiny") == rows(tmp_path / "whole")


def test_a_read_only_folder_is_told_before_training(argv, tmp_path, monkeypatch, capsys):
    mkdir = Path.mkdir

    def read_only(self, *args, **kwargs):  # root may write anywhere, so permissions cannot show it
        if self.name == "tiny":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", read_only)
    assert train(*argv) == 2
    assert f"error: {tmp_path / 'tiny'} cannot be written: Read-only file system" in capsys.readouterr().err


def test_a_parent_that_is_a_file_is_told_before_training(argv, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train(*argv, "--out-dir", tmp_path / "file" / "out") == 2
    assert "Not a directory" in capsys.readouterr().err


def test_a_parent_that_is_a_file_is_one_sentence_also_from_a_fresh_process(argv, tmp_path):
    """torch's compiler, which AdamW imports, makes its cache's folder under OUT and must not be let down there."""
    (tmp_path / "file").write_text("")
    caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    code, _, error = finish(start(*argv, "--out-dir", tmp_path / "file", unset=caches))
    assert (code, error) == (2, f"error: {tmp_path / 'file' / 'tiny'} cannot be written: Not a directory\n")


def test_a_folder_deleted_during_training_is_survived(argv, tmp_path, monkeypatch, capsys):
    assert train(*argv, "--run-name", "whole") == 0

    def lose():
        (tmp_path / "tiny").rename(tmp_path / "elsewhere")

    with monkeypatch.context() as patch:
        before_step(patch, 6, lose)
        before_step(patch, 10, lambda: signal.raise_signal(signal.SIGTERM))
        assert train(*argv) == EXIT_STOPPED
    said = capsys.readouterr()
    assert "metrics.jsonl cannot be written (No such file or directory)" in said.err
    assert "at step 10, which is saved; go on with --resume" in said.out
    assert train(*argv) == 2  # the new folder holds a run, which none but a flag gives up
    assert (tmp_path / "tiny" / "config.toml").read_bytes() == (
        tmp_path / "elsewhere" / "config.toml"
    ).read_bytes()
    assert train(*argv, "--resume") == 0
    (weights, _), (theirs, _) = saved(tmp_path / "tiny"), saved(tmp_path / "whole")
    assert all(torch.equal(weights[name], theirs[name]) for name in theirs)
    assert [row["iter"] for row in rows(tmp_path / "tiny")] == [6, 8, 9, 10, 12]


def test_a_folder_that_is_gone_and_cannot_be_a_run_again_is_told_and_training_goes_on(
    argv, tmp_path, monkeypatch, capsys
):
    def refuse(self, config):
        raise UserError("the disk is full")

    before_step(monkeypatch, 6, lambda: monkeypatch.setattr(RunFolder, "renew", refuse))
    assert train(*argv) == EXIT_UNSAVED
    said = capsys.readouterr().out
    assert "the checkpoint of step 8 could not be written" in said
    assert f"ending at step {STEPS} without its checkpoint" in said


def test_a_path_too_long_is_one_sentence(argv, tmp_path, capsys):
    assert train(*argv, "--run-name", "a" * 300) == 2
    assert capsys.readouterr().err.endswith("cannot be written: File name too long\n")


def test_more_memory_than_there_is_is_one_sentence(argv, capsys):
    size = "--n-embd 1000000000 --n-head 1 --vocab-size 2000000000"  # beyond any address space
    assert train(*argv, *size.split()) == 2
    assert capsys.readouterr().err.startswith("error: there is not enough memory for this model and batch; ")

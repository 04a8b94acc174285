"""Kills, signals and disks that fail: what a run loses, which is nothing that was saved, and what it says."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import STEPS, assert_same_end, before_step, finish, launch, recipe, rows, saved, start, train

import train as script
from base import files
from training import checkpoint
from training.run import EXIT_STOPPED
from training.tracker import Tracker, cut_after, read_metrics

# Kills


def killed_runs(folder: Path, kills: int, seed: int) -> None:
    """Kills a run at random moments until it has been killed so often, and lets it end."""
    argv = (recipe(folder, steps=8 * kills), "--checkpoint-interval", 1, "--eval-interval", 7)
    assert launch(*argv, "--run-name", "whole")[0] == 0
    rng, run_dir, killed = random.Random(seed), folder / "killed", 0
    for _ in range(kills):
        code, _, error = kill_once((*argv, "--run-name", "killed", *resume(run_dir)), run_dir, rng)
        assert code in (-signal.SIGKILL, 0), error
        killed += code != 0
    assert killed >= kills // 2  # in the middle, not after the end
    code, _, error = launch(*argv, "--run-name", "killed", *resume(run_dir))
    assert code == 0, error
    assert_same_end(run_dir, folder / "whole")
    assert not list((run_dir / "checkpoints").glob(".*ing_*"))


def resume(run_dir: Path) -> tuple[str, ...]:
    """What a job script does that knows nothing else."""
    return ("--resume",) if (run_dir / "config.toml").exists() else ()


def kill_once(argv: tuple, run_dir: Path, rng: random.Random) -> tuple[int, str, str]:
    """Kills a run a little after its first new checkpoint, when it mostly saves; one in five while it starts."""
    before, process = newest_name(run_dir), start(*argv)
    deadline = time.monotonic() + (rng.uniform(1, 6) if rng.random() < 0.2 else 120)
    while process.poll() is None and newest_name(run_dir) == before and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(rng.random() * 0.2)
    process.kill()
    return finish(process)


def newest_name(run_dir: Path) -> str:
    return max((p.name for p in (run_dir / "checkpoints").glob("step_*")), default="")


def test_a_run_survives_kills_at_random_moments(tmp_path):
    killed_runs(tmp_path, kills=2, seed=0)


@pytest.mark.slow
def test_a_run_survives_thirty_kills(tmp_path):
    killed_runs(tmp_path, kills=30, seed=1)


@pytest.mark.parametrize(
    ("module", "place"),
    [
        (checkpoint, "save_model"),
        (checkpoint, "digest"),
        (files, "sync"),
        (checkpoint, "remove"),
        (checkpoint, "tidy"),
    ],
)
def test_a_kill_at_any_point_of_a_save_costs_one_interval(argv, tmp_path, monkeypatch, module, place):
    """The same at chosen places, without a process to kill: what is not run has not happened."""
    assert train(*argv, "--run-name", "whole") == 0
    real, calls = getattr(module, place), []

    def killed(*args, **kwargs):
        calls.append(place)
        if len(calls) == (40 if place == "sync" else 8):
            raise Killed
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, place, killed)
        patch.setattr(checkpoint.shutil, "rmtree", lambda *a, **k: None)  # no tidying up by the dead
        with pytest.raises(Killed):
            train(*argv, "--checkpoint-interval", "1")
    assert train(*argv, "--resume") == 0
    assert_same_end(tmp_path / "tiny", tmp_path / "whole")


class Killed(BaseException):
    """Stands for the end of the process."""


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_at_the_end_of_the_step(argv, tmp_path, monkeypatch, capsys, number):
    before_step(monkeypatch, 6, lambda: signal.raise_signal(number))
    assert train(*argv, "--checkpoint-interval", "100", "--eval-interval", "100") == EXIT_STOPPED == 75
    assert saved(tmp_path / "tiny")[1].progress.step == 6
    assert (
        f"stopped by {number.name} at step 6, which is saved; go on with --resume" in capsys.readouterr().out
    )
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # as it was before


def test_a_second_SIGINT_ends_the_process_at_once():
    program = """
import os, signal
from training.run import StopRequest
with StopRequest() as request:
    os.kill(os.getpid(), signal.SIGINT)
    print(request.signal.name, "is remembered", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still there")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "SIGINT is remembered\n"
    assert "once more to exit without" in done.stderr


def test_a_signal_that_was_ignored_stays_ignored(argv, tmp_path, monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        before_step(monkeypatch, 6, lambda: signal.raise_signal(signal.SIGINT))
        assert train(*argv) == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_minutes_count_as_well_as_steps(argv, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("training.run.time.monotonic", lambda: now[0])
    before_step(monkeypatch, 5, lambda: now.__setitem__(0, 601.0))
    flags = ("--checkpoint-interval", "100", "--eval-interval", "100", "--keep-checkpoints", "9")
    assert train(*argv, *flags, "--checkpoint-minutes", "10") == 0
    steps = [c.step for c in checkpoint.listed(tmp_path / "tiny")]
    assert steps == [0, 5, STEPS]
    assert train(*argv, *flags, "--checkpoint-minutes", "11", "--overwrite") == 0
    assert [c.step for c in checkpoint.listed(tmp_path / "tiny")] == [0, STEPS]


# Metrics


def test_rows_that_do_not_fit_are_written_when_there_is_room(argv, tmp_path, capsys, full_disk):
    config = script.load_config([str(argv[0])])
    tracker = Tracker(tmp_path, config, {}, None)
    tracker.log({"iter": 1, "x": 1.0})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    full_disk(size + 5)
    tracker.log({"iter": 2, "x": 2.0})
    tracker.log({"iter": 3, "x": 3.0})
    assert (tmp_path / "metrics.jsonl").stat().st_size == size  # no half of a line
    full_disk()
    assert capsys.readouterr().err.count("cannot be written") == 1
    tracker.close(0)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"iter": i, "x": float(i)} for i in (1, 2, 3)]


def test_a_line_that_a_power_cut_left_half_written_is_cut_off(tmp_path):
    file = tmp_path / "metrics.jsonl"
    whole = b'{"iter": 1}\n{"iter": 2}\n'
    for tail in (b'{"iter": 3', b"\0" * 40 + b"\n", b"3\n", b'{"iter": 4}\n'):
        file.write_bytes(whole + tail)
        cut_after(file, 3)
        assert file.read_bytes() == whole


def test_a_damaged_line_costs_no_rows_after_it(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    before = b'{"iter": 1}\ngarbage\n{"iter": 1e999}\n{"iter": 3}\n{"iter": 4}\n'
    file.write_bytes(before)
    cut_after(file, 3)
    assert file.read_bytes() == b'{"iter": 1}\n{"iter": 3}\n'
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == before
    assert "had damaged lines" in capsys.readouterr().err


def test_metrics_after_a_resume_hold_each_step_once(argv, tmp_path, monkeypatch):
    """Also when rows of loss and of evaluation were written after the checkpoint that is gone on from."""
    with monkeypatch.context() as patch:
        before_step(patch, 11, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(*argv, "--checkpoint-interval", "100")
    reached = [row["iter"] for row in rows(tmp_path / "tiny")]
    assert saved(tmp_path / "tiny")[1].progress.step < max(reached)
    assert train(*argv, "--resume") == 0
    assert [row["iter"] for row in rows(tmp_path / "tiny")] == [0, 1, 2, 3, 4, 6, 8, 9, 10, 12]


# Two at once


def test_a_folder_that_is_being_trained_is_refused(argv, tmp_path, capsys):
    assert train(*argv) == 0
    config = script.load_config([str(argv[0])])
    other = script.RunFolder(config)
    other.take()
    for flag in ("--resume", "--overwrite"):
        assert train(*argv, flag) == 2
        assert f"{tmp_path / 'tiny'} is being trained by another process" in capsys.readouterr().err
    other.release()
    assert train(*argv, "--resume") == 0

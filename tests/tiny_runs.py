"""Runs of seconds for the tests of resuming, crashes and several processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

import train as script
from base.cli import UserError
from training import checkpoint
from training.tracker import read_metrics
from training.trainer import Trainer

STEPS = 12
RECIPE = """
[model]
n_layer = 2
n_head = 2
n_embd = 16
block_size = 16
vocab_size = 64
dropout = 0.1
[data]
dataset = "{folder}/tokens"
[optim]
max_iters = {steps}
batch_size = 8
micro_batch_size = 2
lr = 1e-2
warmup_iters = 2
[run]
out_dir = "{folder}"
device = "{device}"
log_interval = 2
eval_interval = 3
eval_tokens = 400
checkpoint_interval = 4
wandb = "disabled"
"""


def recipe(folder: Path, steps: int = STEPS, device: str = "cpu") -> Path:
    """A recipe of a run `tiny` in `folder`, and its data set: nanoGPT's token files."""
    torch.set_num_threads(1)
    (folder / "tokens").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, count in (("train", 3000), ("val", 500)):
        walk = np.cumsum(rng.integers(0, 3, count)) % 64  # a little to learn
        walk.astype("<u2").tofile(folder / "tokens" / f"{split}.bin")
    file = folder / "tiny.toml"
    file.write_text(RECIPE.format(folder=folder, steps=steps, device=device), encoding="utf-8")
    return file


def train(*argv) -> int:
    """The exit code of train.py, run in this process, and what it says of a mistake on standard error."""
    try:
        script.main([str(a) for a in argv])
    except SystemExit as e:
        return e.code or 0
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def start(
    *argv,
    processes: int = 1,
    torchrun: tuple[str, ...] = (),
    program: str = "train.py",
    unset: Iterable[str] = (),
    **environment: str,
) -> subprocess.Popen:
    """train.py in a process of its own, or in several under torchrun; without the variables `unset`."""
    several = (
        "-m",
        "torch.distributed.run",
        *(torchrun or ("--standalone",)),
        f"--nproc-per-node={processes}",
    )
    command = [sys.executable, *(several if processes > 1 or torchrun else ()), program, *map(str, argv)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment
    env = {name: value for name, value in env.items() if name not in unset}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env)


def finish(process: subprocess.Popen, timeout: float = 600) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


def launch(*argv, processes: int = 1) -> tuple[int, str, str]:
    return finish(start(*argv, processes=processes))


def wait_for(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def before_step(monkeypatch, number: int, action) -> None:
    """Calls `action` in the middle of the run's step `number`, counted from 1."""
    step = Trainer.step

    def patched(self, index, watch):
        if index == number - 1:
            action()
        return step(self, index, watch)

    monkeypatch.setattr(Trainer, "step", patched)


def rows(run_dir: Path) -> list[dict]:
    """What metrics.jsonl holds, without the clock's numbers."""
    found = read_metrics(run_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in found]


def saved(run_dir: Path) -> tuple[dict[str, torch.Tensor], checkpoint.TrainerState]:
    """(weights, the rest) of a run's newest checkpoint."""
    found = checkpoint.newest(run_dir)
    return checkpoint.read_model(found.path)[0], checkpoint.load_trainer(found)


def assert_same_end(run_dir: Path, other: Path) -> None:
    """Both runs ended in bitwise the same state, by way of the same metrics."""
    (weights, state), (their_weights, their_state) = saved(run_dir), saved(other)
    assert weights.keys() == their_weights.keys()
    assert all(torch.equal(weights[name], their_weights[name]) for name in weights)
    assert state.progress == their_state.progress
    assert state.scaler == their_state.scaler
    for name, moments in state.optimizer.items():
        assert moments.keys() == their_state.optimizer[name].keys()
        assert all(torch.equal(v, their_state.optimizer[name][k]) for k, v in moments.items())
    assert rows(run_dir) == rows(other)


def assert_same_course(run_dir: Path, whole: Path) -> None:
    """The same steps with the same numbers, but for the order of summation."""
    ours, theirs = rows(run_dir), rows(whole)
    assert [row["iter"] for row in ours] == [row["iter"] for row in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    (weights, state), (their_weights, their_state) = saved(run_dir), saved(whole)
    assert state.progress.step == their_state.progress.step
    for name, weight in their_weights.items():
        assert weights[name].norm().item() == pytest.approx(weight.norm().item(), rel=1e-3)
        ours, theirs = state.optimizer[name], their_state.optimizer[name]
        assert ours.keys() == theirs.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert ours["exp_avg"].norm().item() == pytest.approx(theirs["exp_avg"].norm().item(), rel=1e-2)

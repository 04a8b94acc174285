"""The same training on one process or several: numbers, checkpoints, signals, failures and restarts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_worker import CASES, measure
from tiny_runs import assert_same_course, before_step, finish, launch, recipe, saved, start, train, wait_for

from configs import load_config
from data import open_dataset
from training.dynamics import fetch
from training.parallel import Runtime
from training.run import EXIT_STOPPED
from training.setup import accumulation
from training.trainer import Trainer

TWO_GPUS = (
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
)


# Numbers


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def compared(request, tmp_path_factory) -> tuple[Path, Runtime, dict]:
    """(recipe, one process's place, what two processes measured in every case); with NCCL not run yet."""
    folder = tmp_path_factory.mktemp("compared")
    file, result = recipe(folder, device=request.param), folder / "result.json"
    code, _, error = finish(
        start("compare", file, result, processes=2, program="tests/distributed_worker.py")
    )
    assert code == 0, error
    return file, Runtime(torch.device(request.param)), json.loads(result.read_text())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_as_one(compared, parallel, case):
    file, one, found = compared
    together, alone = found[f"{parallel} {case}"], measure(one, str(file), CASES[case])
    exact = case not in ("bfloat16", "float16")  # where another order of summation is another rounding
    loss_tolerance, tolerance = (1e-5, 1e-4) if exact else (2e-3, 3e-2)
    for ours, theirs in zip(together["rows"], alone["rows"], strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=loss_tolerance)
        assert ours == pytest.approx(theirs, rel=tolerance, abs=1e-7)
    assert together["look"] == pytest.approx(alone["look"], rel=10 * tolerance, abs=1e-6)
    assert together["val_loss"] == pytest.approx(alone["val_loss"], rel=loss_tolerance)
    assert together["sharded"] == (parallel == "fsdp")
    assert together["tied"] == alone["tied"] == ("--no-tie-embeddings" not in CASES[case])
    assert min(together["moved"], alone["moved"]) > 0.1  # so that not the start is compared
    if exact:
        assert together["weights"] == pytest.approx(alone["weights"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_dtype_policy_is_that_of_one_process(compared, parallel, dtype):
    """Parameters and moments in float32; the first forward, which no order of summation enters, to the last bit."""
    file, one, found = compared
    together = found[f"{parallel} {dtype}"]
    assert together["dtypes"] == ["torch.float32"]
    alone = measure(one, str(file), CASES[dtype])
    single = measure(one, str(file), CASES["plain"])
    forward = {k: v for k, v in alone["rows"][0].items() if k.startswith("residual_rms/")}
    assert {k: together["rows"][0][k] for k in forward} == pytest.approx(forward, rel=3e-7)
    assert {k: single["rows"][0][k] for k in forward} != pytest.approx(forward, rel=3e-6)


def test_the_windows_of_a_step_are_dealt_out_once(tmp_path):
    config = load_config([str(recipe(tmp_path))])

    def rows_of(world: int) -> list[int]:
        parts = []
        for rank in range(world):
            trainer = object.__new__(Trainer)
            trainer.runtime = Runtime(torch.device("cpu"), rank, world)
            count, trainer.micro_batch = accumulation(config, world)
            parts += [row for micro_step in range(count) for row in trainer.rows(micro_step)]
        return sorted(parts)

    assert rows_of(1) == rows_of(2) == rows_of(4) == list(range(config.optim.batch_size))


# Whole runs


def workers(torchrun: int) -> dict[int, int]:
    """Process ids by rank; the order of torchrun's children is not that of the ranks."""
    found = {}
    for pid in map(int, Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"RANK="):
                found[int(variable.removeprefix(b"RANK="))] = pid
    return found


def test_a_signal_to_one_process_stops_all_at_one_step_and_one_goes_on(tmp_path):
    """Saved by two under FSDP, resumed by one."""
    argv = (recipe(tmp_path, steps=40), "--eval-interval", 20)
    assert train(*argv, "--run-name", "whole") == 0
    process = start(*argv, "--parallel", "fsdp", processes=2)
    wait_for(lambda: (tmp_path / "tiny" / "checkpoints" / "step_00000004").exists())
    os.kill(workers(process.pid)[1], signal.SIGTERM)
    code, out, error = finish(process)
    assert code == 1  # torchrun's own
    assert "exitcode  : 75" in error
    assert "stopped by a signal to another process at step" in out
    assert "Traceback" not in error.partition("torch/distributed/run.py")[0].partition("Traceback")[0]
    assert 4 <= saved(tmp_path / "tiny")[1].progress.step < 40
    assert train(*argv, "--resume") == 0
    assert_same_course(tmp_path / "tiny", tmp_path / "whole")


@pytest.mark.slow
def test_no_process_leaves_while_the_first_saves(tmp_path):
    """torchrun ends all processes with the first that leaves, and kills what is not done half a minute later."""
    argv = ("slow-disk", recipe(tmp_path), "--checkpoint-interval", 12, "--eval-interval", 12)
    code, out, error = finish(start(*argv, processes=2, program="tests/distributed_worker.py"))
    assert code == 1  # torchrun's own
    assert "exitcode  : 75" in error
    assert "stopped by a signal to another process at step 6, which is saved" in out
    assert saved(tmp_path / "tiny")[1].progress.step == 6


@pytest.mark.slow
def test_all_processes_say_that_the_last_checkpoint_was_not_written(tmp_path):
    argv = ("full-disk", recipe(tmp_path), "--checkpoint-interval", 12, "--eval-interval", 12)
    code, out, error = finish(start(*argv, processes=2, program="tests/distributed_worker.py"))
    assert code == 1  # torchrun's own
    assert "exitcode  : 74" in error
    assert "exitcode  : 75" not in error
    assert "ending at step 6 without its checkpoint" in out
    assert saved(tmp_path / "tiny")[1].progress.step == 0


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "parallel"), [(2, "fsdp"), (2, "ddp"), (4, "fsdp"), (4, "ddp")])
def test_saved_by_one_resumed_by_several(tmp_path, monkeypatch, processes, parallel):
    argv = (recipe(tmp_path),)
    assert train(*argv, "--run-name", "whole") == 0
    with monkeypatch.context() as patch:
        before_step(patch, 6, lambda: signal.raise_signal(signal.SIGUSR1))
        assert train(*argv) == EXIT_STOPPED
    code, out, error = launch(*argv, "--resume", "--parallel", parallel, processes=processes)
    assert code == 0, error
    assert "resuming" in out
    assert out.count("done: 12 steps") == 1
    assert_same_course(tmp_path / "tiny", tmp_path / "whole")
    assert train(*argv, "--resume", "--max-iters", 14) == 0  # and back to one


@pytest.mark.slow
def test_a_killed_process_is_restarted_and_the_run_goes_on(tmp_path):
    """`torchrun --max-restarts`, with --overwrite on the command line, which must not delete what it goes on with."""
    argv = (recipe(tmp_path, steps=40), "--eval-interval", 20)
    assert train(*argv, "--run-name", "whole") == 0
    assert train(*argv, "--max-iters", 3) == 0  # an older run of that name
    process = start(*argv, "--overwrite", processes=2, torchrun=("--standalone", "--max-restarts=2"))
    wait_for(lambda: (tmp_path / "tiny" / "checkpoints" / "step_00000008").exists())
    os.kill(workers(process.pid)[1], signal.SIGKILL)
    code, out, error = finish(process)
    assert code == 0, error
    assert out.count("resuming") == 1
    assert_same_course(tmp_path / "tiny", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [((2, "ddp"), (4, "fsdp")), ((4, "fsdp"), (2, "ddp"))])
def test_a_run_moves_between_ddp_and_fsdp(tmp_path, first, then):
    argv = (recipe(tmp_path),)
    assert train(*argv, "--run-name", "whole") == 0
    (before, by), (after, instead) = first, then
    stopped = ("slow-disk", *argv, "--parallel", by)
    _, out, error = finish(start(*stopped, processes=before, program="tests/distributed_worker.py"))
    assert "at step 6, which is saved" in out, error
    code, out, error = launch(*argv, "--resume", "--parallel", instead, processes=after)
    assert code == 0, error
    assert "resuming" in out
    assert_same_course(tmp_path / "tiny", tmp_path / "whole")


@pytest.mark.parametrize("processes", [None, "1"])
def test_one_of_several_processes_skips_the_interpreters_way_out(processes):
    """A process group that a device mesh still holds can abort it there, after all is done."""
    script = (
        "import atexit, runpy, sys; atexit.register(print, 'way out'); sys.argv = ['train.py', '--help']; "
    )
    script += "runpy.run_path('train.py', run_name='__main__')"
    env = os.environ | ({"WORLD_SIZE": processes} if processes else {})
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "--n-layer" in done.stdout
    assert ("way out" in done.stdout) == (processes is None)


@pytest.mark.slow
def test_a_killed_process_on_another_machine_is_restarted(tmp_path):
    """Two torchruns, as on two machines; the one with rank 0 does not count the restart as one."""
    argv = (recipe(tmp_path, steps=40), "--eval-interval", 20, "--overwrite")
    assert train(*argv, "--run-name", "whole") == 0
    there = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29713", "--max-restarts=2")
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as docs/robustness.md says
    machines = [start(*argv, torchrun=there, **own_store) for _ in range(2)]
    wait_for(lambda: (tmp_path / "tiny" / "checkpoints" / "step_00000008").exists())
    [other] = workers(machines[1].pid).values()
    os.kill(other, signal.SIGKILL)
    ends = [finish(machine) for machine in machines]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert sum(out.count("resuming") for _, out, _ in ends) == 1
    assert_same_course(tmp_path / "tiny", tmp_path / "whole")


@pytest.mark.slow
def test_a_failing_process_brings_the_others_down_with_its_reason(tmp_path):
    argv = ("fail", recipe(tmp_path))
    code, _, error = finish(start(*argv, processes=2, program="tests/distributed_worker.py"), timeout=300)
    assert code != 0  # and not after the half hour for which a collective waits
    assert "KeyError: 'the reason of process 1'" in error
    assert "a process leaves, because another one" in error or "SIGTERM" in error


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--batch-size", "9"), "batch_size 9 does not divide among 2 processes of micro_batch_size 2; "),
        pytest.param(("--resume",), "holds no run", marks=pytest.mark.slow),
        pytest.param(("--block-size", "5000"), "a context of 5,000 tokens is longer", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_is_told_once_and_the_code_is_2(tmp_path, flags, says):
    code, out, error = launch(recipe(tmp_path), *flags, processes=2)
    assert code == 1  # torchrun's own
    assert "exitcode  : 2 " in error
    assert (out + error).count("error: ") == 1
    assert says in error
    assert not (tmp_path / "tiny").exists()


@pytest.mark.slow
def test_compiled_processes_train_as_one_without_a_graph_break(tmp_path):
    file, result = recipe(tmp_path), tmp_path / "result.json"
    code, _, error = finish(
        start("compiled", file, result, processes=2, program="tests/distributed_worker.py")
    )
    assert code == 0, error
    config = load_config([str(file), "--dropout", "0"])
    alone = Trainer(config, Runtime(torch.device("cpu")), open_dataset(config.data.dataset))
    losses = [fetch(alone.step(index, False))["train/loss"] for index in range(4)]
    for parallel, found in json.loads(result.read_text()).items():
        assert found["losses"] == pytest.approx(losses, rel=1e-4), parallel
        assert found["breaks"] == {}, parallel
        assert 2 <= found["graphs"] <= 8, f"{parallel}: one for each kind of part, whatever their number"

"""Going on with a run is the run that never stopped; and what may not be gone on with."""

import errno
import shutil
import signal
from pathlib import Path

import pytest
import torch
from tiny_runs import STEPS, assert_same_end, before_step, recipe, rows, saved, train

from configs import load_config
from training import checkpoint, run, trainer
from training.run import EXIT_STOPPED

FLOAT16 = ("--dtype", "float16", "--residual-dtype", "compute")
VARIANTS = {
    "float32": (),
    "float16": FLOAT16,
    "post_untied": ("--placement", "post", "--no-tie-embeddings"),
    "muon": ("--optimizer", "muon"),
}


@pytest.fixture(params=VARIANTS)
def undisturbed(request, tmp_path, monkeypatch):
    """(folder, command line) of a finished run `whole`; float16's loss scale changes within its few steps."""
    monkeypatch.setattr(trainer, "SCALE_INTERVAL", 3)
    monkeypatch.setattr(trainer, "SCALE_START", 2.0**22)  # overflows at first
    argv = (recipe(tmp_path), *VARIANTS[request.param])
    assert train(*argv, "--run-name", "whole") == 0
    return tmp_path, argv


def test_a_run_that_stops_after_every_step_is_the_run_that_never_stopped(undisturbed, monkeypatch):
    place, argv = undisturbed
    argv = (*argv, "--run-name", "stopped")
    for step in range(1, STEPS):
        with monkeypatch.context() as patch:
            before_step(patch, step, lambda: signal.raise_signal(signal.SIGUSR1))
            assert train(*argv, *(("--resume",) if step > 1 else ())) == EXIT_STOPPED
        assert saved(place / "stopped")[1].progress.step == step
    assert train(*argv, "--resume") == 0
    assert_same_end(place / "stopped", place / "whole")


@pytest.mark.parametrize("undisturbed", ["float16"], indirect=True)
@pytest.mark.parametrize("step", [1, 5, 8, 12])
def test_a_crash_costs_the_steps_since_the_checkpoint_and_nothing_else(undisturbed, monkeypatch, step):
    place, argv = undisturbed
    argv = (*argv, "--run-name", "crashed")
    with monkeypatch.context() as patch:
        before_step(patch, step, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(*argv)
    assert saved(place / "crashed")[1].progress.step < step
    assert train(*argv, "--resume") == 0
    assert_same_end(place / "crashed", place / "whole")
    iterations = [row["iter"] for row in rows(place / "crashed")]
    assert iterations == sorted(set(iterations))
    assert iterations[0] == 0


def test_the_float16_case_has_steps_that_the_scaler_skips(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SCALE_START", 2.0**22)
    assert train(recipe(tmp_path), *FLOAT16) == 0
    scale, good_steps = saved(tmp_path / "tiny")[1].scaler
    assert scale < 2.0**22
    assert 0 < good_steps < STEPS


def test_the_muon_case_has_muons_state_for_hidden_matrices_only(tmp_path):
    assert train(recipe(tmp_path), *VARIANTS["muon"]) == 0
    weights, state = saved(tmp_path / "tiny")
    for name, moments in state.optimizer.items():
        hidden = name.startswith("branches") and weights[name].ndim == 2
        assert moments.keys() == ({"momentum_buffer"} if hidden else {"step", "exp_avg", "exp_avg_sq"}), name


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """The command line of a run that was stopped at step 6."""
    argv = (recipe(tmp_path),)
    with monkeypatch.context() as patch:
        before_step(patch, 6, lambda: signal.raise_signal(signal.SIGTERM))
        assert train(*argv) == EXIT_STOPPED
    return argv


def test_harmless_changes_are_accepted_and_told(stopped, capsys):
    changes = {"max-iters": 14, "eval-interval": 4, "log-interval": 1, "checkpoint-interval": 5}
    flags = [word for name, value in changes.items() for word in (f"--{name}", value)]
    assert train(*stopped, "--resume", *flags) == 0
    out = capsys.readouterr().out
    for line in ("max_iters was 12 and is 14", "eval_interval was 3 and is 4", "log_interval was 2 and is 1"):
        assert line in out
    place = stopped[0].parent
    assert saved(place / "tiny")[1].progress.step == 14
    assert "max_iters = 14" in (place / "tiny" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--norm", "rmsnorm"), "norm was layernorm and is now rmsnorm"),
        (("--placement", "post"), "placement was pre and is now post"),
        (("--n-embd", "32"), "n_embd was 16 and is now 32"),
        (("--seed", "3"), "seed was 1337 and is now 3"),
        (("--lr", "0.5"), "lr was 0.01 and is now 0.5"),
        (("--batch-size", "16"), "batch_size was 8 and is now 16"),
        (("--dropout", "0"), "dropout was 0.1 and is now 0.0"),
        (("--n-embd", "32", "--seed", "3"), "n_embd was 16 and is now 32, seed was 1337 and is now 3"),
    ],
)
def test_a_change_that_makes_another_run_is_refused_by_name(stopped, capsys, flags, says):
    metrics = stopped[0].parent / "tiny" / "metrics.jsonl"
    before = metrics.read_bytes()
    assert train(*stopped, "--resume", *flags) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1
    assert metrics.read_bytes() == before


def test_other_data_are_refused_and_moved_data_are_not(stopped, capsys):
    tokens = stopped[0].parent / "tokens"
    moved = shutil.copytree(tokens, tokens.with_name("moved"))
    other = shutil.copytree(tokens, tokens.with_name("other"))
    data = bytearray((other / "train.bin").read_bytes())
    data[0] ^= 1
    (other / "train.bin").write_bytes(data)
    assert train(*stopped, "--resume", "--dataset", other) == 2
    assert "is not the data that this run has trained on" in capsys.readouterr().err
    assert train(*stopped, "--resume", "--dataset", moved) == 0


def test_resume_needs_a_run(tmp_path, capsys):
    assert train(recipe(tmp_path), "--resume") == 2
    assert f"{tmp_path / 'tiny'} holds no run" in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()


def test_init_from_starts_at_step_0_from_weights_only(stopped, capsys):
    place = stopped[0].parent
    assert (
        train(*stopped, "--init-from", place / "tiny", "--run-name", "tuned", "--lr", "0", "--min-lr", "0")
        == 0
    )
    assert "weights from" in capsys.readouterr().out
    (theirs, _), (ours, state) = saved(place / "tiny"), saved(place / "tuned")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)  # a rate of 0 has left them alone
    assert state.progress.step == STEPS
    assert rows(place / "tuned")[0]["iter"] == 0


def test_init_from_survives_a_kill_before_the_first_interval(stopped, monkeypatch):
    place = stopped[0].parent
    argv = (*stopped, "--run-name", "tuned", "--lr", "0", "--min-lr", "0")
    before_step(monkeypatch, 1, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(*argv, "--init-from", place / "tiny")
    monkeypatch.undo()
    assert train(*argv, "--resume") == 0
    theirs, ours = saved(place / "tiny")[0], saved(place / "tuned")[0]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--n-embd", "32"), "has shape (16,), and this model wants (32,)"),
        (("--n-layer", "3"), "lacks the weight"),
        (("--norm", "rmsnorm"), "has a weight"),
    ],
)
def test_init_from_another_model_is_refused(stopped, capsys, flags, says):
    place = stopped[0].parent
    assert train(*stopped, "--init-from", place / "tiny", "--run-name", "tuned", *flags) == 2
    assert says in capsys.readouterr().err
    assert not (place / "tuned").exists()


def test_init_from_tells_what_the_weights_were_trained_with(stopped, capsys):
    place = stopped[0].parent
    assert train(*stopped, "--init-from", place / "tiny", "--run-name", "tuned", "--dropout", "0") == 0
    assert "dropout was 0.1 in" in capsys.readouterr().out


def test_a_restart_by_torchrun_goes_on_with_its_own_run_only(stopped, monkeypatch, capsys):
    """The same command line again: without a flag, and with one that would delete what it goes on with."""
    launched = stopped[0].parent / "tiny" / ".launch"
    assert launched.read_text() == ""
    assert train(*stopped) == 2  # started again by hand
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    assert train(*stopped) == 2  # by torchrun for the first time
    mine = run.launch()
    launched.write_text(mine + "0")  # of another torchrun: an older run of the same name
    assert train(*stopped) == 2
    assert "already holds a run" in capsys.readouterr().err
    launched.write_text(mine)
    assert train(*stopped, "--overwrite") == 0
    assert "resuming" in capsys.readouterr().out
    assert [row["iter"] for row in rows(stopped[0].parent / "tiny")] == [0, 1, 2, 3, 4, 6, 8, 9, 10, 12]


def test_a_restart_before_the_first_checkpoint_starts_over(tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny" / "checkpoints" / ".writing_step_00000000").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    (tmp_path / "tiny" / ".launch").write_text(run.launch())
    assert train(recipe(tmp_path)) == 0
    assert "resuming" not in capsys.readouterr().out
    assert checkpoint.newest(tmp_path / "tiny").step == STEPS


def test_a_numbered_name_cannot_be_restarted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert train(recipe(tmp_path), "--run-name", "auto") == 2
    assert "give it a name" in capsys.readouterr().err


def test_a_name_is_claimed_at_once_and_given_back_by_a_run_that_is_refused(tmp_path):
    argv = [str(recipe(tmp_path)), "--run-name", "auto"]
    names = [load_config(argv).run.run_name for _ in range(3)]  # of three that start together
    assert names == ["tiny", "tiny-2", "tiny-3"]
    assert train(*argv, "--block-size", "5000") == 2
    assert not (tmp_path / "tiny-4").exists()
    assert train(*argv) == 0
    assert checkpoint.newest(tmp_path / "tiny-4").step == STEPS


def test_a_finished_run_that_is_resumed_changes_nothing(tmp_path):
    argv = (recipe(tmp_path),)
    assert train(*argv) == 0
    before = rows(tmp_path / "tiny"), saved(tmp_path / "tiny")[1].progress
    assert train(*argv, "--resume") == 0
    assert (rows(tmp_path / "tiny"), saved(tmp_path / "tiny")[1].progress) == before


def test_only_a_step_that_was_evaluated_competes_for_the_best(tmp_path):
    """A checkpoint between two evaluations carries no loss, which would be an older step's."""
    assert train(recipe(tmp_path), "--keep-checkpoints", "9") == 0
    found = checkpoint.listed(tmp_path / "tiny")
    losses = {row["iter"]: row["val/loss"] for row in rows(tmp_path / "tiny") if "val/loss" in row}
    assert {0, 4, 8, 12} <= {c.step for c in found}
    assert all(c.val_loss == (losses.get(c.step) if c.step else None) for c in found)


def test_a_copy_of_a_run_is_gone_on_with_where_it_is(tmp_path, capsys):
    """Its config.toml names the folder of the original."""
    assert train(recipe(tmp_path)) == 0
    shutil.copytree(tmp_path / "tiny", tmp_path / "copies" / "second", symlinks=True)
    assert train(tmp_path / "copies" / "second" / "config.toml", "--resume", "--max-iters", "14") == 0
    assert checkpoint.newest(tmp_path / "copies" / "second").step == 14
    assert checkpoint.newest(tmp_path / "tiny").step == STEPS
    assert f"resuming {tmp_path / 'copies' / 'second'} at step {STEPS}" in capsys.readouterr().out


def test_checkpoints_without_a_configuration_are_a_run(tmp_path, capsys):
    argv = (recipe(tmp_path),)
    assert train(*argv) == 0
    (tmp_path / "tiny" / "config.toml").unlink()
    assert train(*argv) == 2
    assert "already holds a run; pass --resume, --overwrite" in capsys.readouterr().err
    assert train(*argv, "--resume", "--max-iters", "14") == 0
    assert checkpoint.newest(tmp_path / "tiny").step == 14


def test_a_strangers_folder_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "tiny").mkdir(parents=True)
    (tmp_path / "tiny" / "config.toml").write_text("title = 'a site'", encoding="utf-8")
    (tmp_path / "tiny" / "page.md").write_text("text", encoding="utf-8")
    assert train(recipe(tmp_path), "--overwrite") == 2
    assert "holds files that are not a run's" in capsys.readouterr().err
    assert (tmp_path / "tiny" / "page.md").read_text(encoding="utf-8") == "text"


def test_an_overwrite_deletes_what_a_run_has_written_and_nothing_else(tmp_path):
    argv, folder = (recipe(tmp_path),), tmp_path / "tiny"
    assert train(*argv) == 0
    written = {p.relative_to(folder) for p in folder.rglob("*")}
    mine = ["notes.txt", "report.html", "mine/x", "checkpoints/step_00000012_copy/model.safetensors"]
    for name in mine:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine", encoding="utf-8")
    (folder / "checkpoints" / "damaged_step_00000003").mkdir()
    (folder / "diverged").mkdir()
    assert train(*argv, "--overwrite") == 0
    assert [(folder / name).read_text(encoding="utf-8") for name in mine] == ["mine"] * len(mine)
    beside = {parent for name in mine for parent in (Path(name), *Path(name).parents)}
    assert {p.relative_to(folder) for p in folder.rglob("*")} - beside == written - beside


def test_an_overwrite_that_fails_leaves_the_run_as_it_was(tmp_path, capsys, monkeypatch):
    argv = (recipe(tmp_path),)
    assert train(*argv) == 0
    before = {p: p.read_bytes() for p in (tmp_path / "tiny").rglob("*") if p.is_file()}
    rename = Path.rename

    def refuse(self, target):
        if self.name.startswith("step_"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        assert train(*argv, "--overwrite") == 2
    assert "cannot be written: Permission denied" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in (tmp_path / "tiny").rglob("*") if p.is_file()} == before
    assert train(*argv, "--overwrite", "--max-iters", "14") == 0
    assert [p.name for p in (tmp_path / "tiny").iterdir() if p.name.startswith(".o")] == []

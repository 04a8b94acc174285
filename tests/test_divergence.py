"""A run that diverges: noticed at once, named, kept for replay, and nothing good overwritten."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable

import pytest
import torch
from dynamics_cases import DIVERGING, tiny_trainer, train_here

import train
from base.cli import UserError
from configs import load_config
from training.checkpoint import check, load_trainer, model_weights, newest, read_model
from training.divergence import (
    EXIT_CODE,
    HISTORY,
    FailedState,
    Guard,
    History,
    advice_by_norms,
    advise,
    diagnose,
    largest_growth,
)
from training.dynamics import fetch
from training.metrics import branch_names
from training.tracker import read_metrics
from training.trainer import Trainer


def poison(trainer: Trainer, name: str, value: float = math.nan) -> None:
    with torch.no_grad():
        dict(trainer.model.named_parameters())[name].view(-1)[0] = value


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in model_weights(trainer.model).items()}


@pytest.mark.parametrize("placement", ["pre", "post", "output", "sandwich"])
@pytest.mark.parametrize("k", range(4))
def test_a_poisoned_weight_is_named_with_its_layer(placement, k, tmp_path):
    trainer = tiny_trainer(tmp_path, "--placement", placement)
    name = f"branches.{k}.{('out', 'down')[k % 2]}.weight"
    poison(trainer, name)
    trainer.step(0, False)
    assert trainer.held
    found = diagnose(trainer, 0, [])
    assert (found.cause, found.place) == ("the loss is not finite", branch_names(2)[k])
    assert found.where == f"the weight {name} is not finite"


@pytest.mark.parametrize(
    ("name", "value", "place", "where"),
    [
        (
            "branches.2.out.weight",
            3e38,
            "layer_01.attn",
            "the stream's RMS is finite up to layer_00.mlp and not after",
        ),
        ("embed.weight", 3e38, "embed", "the stream's RMS is not finite after embed"),
        (
            "joins.1.next_norm.weight",
            3e38,
            "layer_01.attn",
            "the stream's RMS is finite up to layer_00.mlp and not",
        ),
        ("joins.3.next_norm.weight", 3e38, "head", "the stream is finite; the gradient is not"),
    ],
)
def test_a_stream_that_overflows_is_named_where_it_does(name, value, place, where, tmp_path):
    trainer = tiny_trainer(tmp_path, "--placement", "pre", "--no-tie-embeddings")
    with torch.no_grad():
        parameter = dict(trainer.model.named_parameters())[name]
        parameter.copy_(value * torch.sign(parameter))
    trainer.step(0, False)
    found = diagnose(trainer, 0, [])
    assert found.place == place
    assert found.where.startswith(where)


@pytest.mark.parametrize("k", range(4))
def test_a_gradient_that_is_not_finite_is_named_where_backward_meets_it_first(k, tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.model.branches[k].register_full_backward_hook(
        lambda m, into, out: tuple(g * math.inf for g in into)
    )
    trainer.step(0, False)
    assert trainer.held
    found = diagnose(trainer, 0, [])
    assert found.cause == "the gradient is not finite"
    assert found.place == ("embed", *branch_names(2))[k], "the branch reads the depth below it"


@pytest.mark.parametrize("norm", ["layernorm", "batchnorm"])  # which has statistics besides its weights
def test_a_failed_step_changes_nothing_and_neither_does_any_after_it(norm, tmp_path):
    trainer = tiny_trainer(tmp_path, "--norm", norm, "--max-rise-steps", "1")
    for index in range(3):
        trainer.step(index, False)
    before, moments = weights(trainer), trainer.state()[1]
    assert (norm == "batchnorm") == any("running_mean" in name for name in before)
    trainer.loss_limit.fill_(0.1)
    for index in range(3, 6):
        trainer.step(index, False)
    assert int(trainer.held_step) == 3
    after = trainer.state()[1]
    for name, moment in moments.items():
        assert all(torch.equal(moment[k], after[name][k]) for k in moment), name
    found = diagnose(trainer, 3, [])
    assert "nats above the lowest one logged" in found.cause
    assert [name for name, t in weights(trainer).items() if not torch.equal(t, before[name])] == []


def test_float16_keeps_the_loss_scale_of_the_failed_step(tmp_path):
    trainer = tiny_trainer(tmp_path, "--dtype", "float16")
    trainer.step(0, False)
    scale, good = trainer.scale.scale.clone(), trainer.scale.good_steps.clone()
    poison(trainer, "branches.0.out.weight")
    trainer.step(1, False)
    assert trainer.held
    assert (trainer.scale.scale, trainer.scale.good_steps) == (scale, good)


def test_a_stream_too_long_for_its_squares_has_failed_though_the_loss_is_finite(tmp_path):
    """RMSNorm turns it to zeros, and the loss is that of guessing. Only a step that looks at the stream can know."""
    trainer = tiny_trainer(tmp_path, "--norm", "rmsnorm", "--no-tie-embeddings")
    with torch.no_grad():
        trainer.model.embed.weight.mul_(1e23)
    loss = fetch(trainer.step(0, False))["train/loss"]
    assert (loss, bool(trainer.held)) == (pytest.approx(math.log(11)), False)
    assert fetch(trainer.step(1, True))["diverged"] == 1
    found = diagnose(trainer, 1, [])
    assert (found.cause, found.place) == ("the RMS of the stream is not finite", "embed")


@pytest.mark.parametrize(("rise", "limits"), [("0.5", [math.inf, 1.5, 1.5, 1.5]), ("0", [math.inf] * 4)])
def test_the_limit_follows_the_lowest_logged_loss_after_the_warm_up(rise, limits, tmp_path):
    trainer = tiny_trainer(tmp_path, "--max-loss-rise", rise, "--warmup-iters", "2")
    guard = Guard(trainer, None)
    seen = []
    for step, row in [
        (1, {"train/loss": 2.0}),
        (2, {"train/loss": 1.0}),
        (4, {"train/loss": 1.4}),
        (5, {"spike": 1}),
    ]:
        guard.passed(row, step)
        seen.append(trainer.loss_limit.item())
    assert seen == limits
    assert [row["iter"] for row in guard.history.rows] == [1, 2, 4]


def test_the_history_is_short_and_spread_over_the_whole_run():
    history = History()
    for step in range(1000):
        history.add({"iter": step})
    steps = [row["iter"] for row in history.rows]
    assert len(steps) <= HISTORY + 1
    assert (steps[0], steps[-1]) == (0, 999)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 1000 / HISTORY * 2


def test_a_jump_is_compared_with_the_run_so_far():
    """A run that has been going wrong for a while: its last row is no standard."""
    rows = [
        {"iter": i, "residual_rms/embed": 1.0, "grad_norm/layer_00.mlp": v}
        for i, v in enumerate((2.0, 3.0, 9e5))
    ]
    found = largest_growth({"residual_rms/embed": 4.0, "grad_norm/layer_00.mlp": 1e6}, rows)
    assert found[0] == "layer_00.mlp"
    assert "3.33e+05 times its median so far" in found[1]
    assert largest_growth({"grad_norm/head": math.nan, "grad_norm/norms": 1.0}, [])[0] == "embed"


def test_a_jump_names_where_most_has_grown(tmp_path):
    trainer = tiny_trainer(tmp_path)
    healthy = fetch(trainer.step(0, True))
    trainer.loss_limit.fill_(0.0)
    with torch.no_grad():
        trainer.model.branches[3].down.weight.mul_(1e4)
    trainer.step(1, False)
    found = diagnose(trainer, 1, [healthy])
    assert (found.place, "stream's RMS" in found.where) == ("layer_01.mlp", True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--placement", "post"], "warmup"),
        (["--placement", "post"], "deepnorm"),
        (["--placement", "output"], "what branches read"),
        (["--placement", "sandwich"], "on both sides already"),
        (["--dtype", "float16"], "bfloat16"),
        (["--grad-clip", "0"], "--grad-clip 1"),
        (["--qk-norm", "off"], "--qk-norm head"),
    ],
)
def test_advice_fits_the_configuration(flags, words):
    assert words in " ".join(advise(load_config(flags)))
    other = ["--placement", "pre", "--dtype", "float32", "--grad-clip", "1", "--qk-norm", "head"]
    assert words not in " ".join(advise(load_config(other))) or words == "warmup"


def test_there_is_advice_for_every_set_of_norms():
    sets = itertools.chain.from_iterable(itertools.combinations(("in", "out", "post"), n) for n in range(4))
    advice = {frozenset(norms): advice_by_norms(frozenset(norms)) for norms in sets}
    assert len(advice) == 8
    assert all("--lr" in text for text in advice.values())
    assert advice[frozenset({"in", "post"})] == "a longer --warmup-iters first, then a lower --lr"


def digests(folder):
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    """A run of which a weight was poisoned at step 9: (its folder, exit code, report, checkpoints' digests)."""
    folder = tmp_path_factory.mktemp("diverged")
    seen = {}

    def step(self, index, watch, healthy=Trainer.step):
        if index == 8:
            poison(self, "branches.3.up.weight")
            seen.update(digests(folder / "run" / "checkpoints"))
        return healthy(self, index, watch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        with pytest.raises(SystemExit) as end:
            train_here(folder, *DIVERGING)
    return folder / "run", end.value.code, (folder / "run" / "diverged" / "report.txt").read_text(), seen


def test_the_run_ends_with_its_own_exit_code_and_leaves_the_checkpoint_alone(diverged):
    folder, code, _, before = diverged
    assert code == EXIT_CODE == 3
    assert before
    assert digests(folder / "checkpoints") == before


def test_the_report_says_where_what_was_healthy_and_what_helps(diverged):
    _, _, report, _ = diverged
    assert report.startswith("step 9 diverged: the loss is not finite\n")
    assert "where    layer_01.mlp: the weight branches.3.up.weight is not finite" in report
    assert "path     step 1 -> 8 -> 9: loss 2." in report
    assert ", stream RMS at layer_01.mlp " in report
    assert "try      a longer --warmup-iters first" in report


def test_the_replay_fails_at_the_same_place(diverged, capsys, monkeypatch):
    folder, _, report, _ = diverged
    monkeypatch.chdir(
        folder.parent
    )  # nothing but the diverged folder is needed: not the data, not the recipe
    with pytest.raises(SystemExit) as end:
        train.main(["--replay", "run/diverged"])
    assert end.value.code == EXIT_CODE
    assert capsys.readouterr().err.strip() == report.strip()


def test_the_failed_step_is_a_row_and_the_run_says_that_it_has_diverged(diverged):
    folder, _, report, _ = diverged
    row = read_metrics(folder / "metrics.jsonl")[-1]
    assert (row["iter"], row["tokens"], row["diverged"], row["train/loss"]) == (9, 9 * 24, 1, None)
    assert row["residual_rms/layer_01.attn"] > 0
    about = json.loads((folder / "run.json").read_text())
    assert (about["state"], about["step"]) == ("diverged", 9)
    assert "\n".join(about["report"]).startswith(report.strip())


def test_the_replay_of_a_healthy_step_says_so(diverged, capsys):
    """Control: with the poison taken out the same step does not fail."""
    folder, _, _, _ = diverged
    state = load_trainer(check(folder / "diverged"), FailedState)
    config = load_config([str(folder / "config.toml")])
    trainer = tiny_trainer(folder.parent, *DIVERGING)
    for index in range(8):
        trainer.step(index, False)
    assert trainer.config.model == config.model
    tokens, targets = trainer.batches.batch(8, range(4))
    assert torch.equal(state.tokens, tokens)
    assert torch.equal(state.targets, targets)
    assert diagnose(trainer, 8, state.history) is None


def test_replay_of_what_is_no_diverged_folder_is_one_sentence(diverged):
    folder, *_ = diverged
    for path, words in [
        (folder, "is no folder that a run leaves"),
        (folder / "nothing", "does not exist"),
    ]:
        with pytest.raises(UserError, match=words):
            train.main(["--replay", str(path)])


def test_losing_the_disk_does_not_hide_the_report(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("training.checkpoint.write", full)
    monkeypatch.setattr("training.run.Run.save", lambda *_: None)
    flags = {"max-loss-rise": "1e-9", "max-rise-steps": 1, "lr": 0.9, "warmup-iters": 0, "grad-clip": 0}
    with pytest.raises(SystemExit) as end:
        train_here(tmp_path, *(str(word) for name, value in flags.items() for word in (f"--{name}", value)))
    assert end.value.code == EXIT_CODE
    message = capsys.readouterr().err
    assert "nats above the lowest" in message
    assert "saved    nothing" in message
    assert "No space left on device" in message


# Spikes


def spiking(steps: Iterable[int], rise: float = 5.0):
    """Trainer.gradient with a loss that is so much higher at some steps, whose gradient stays what it is."""
    real = Trainer.gradient

    def gradient(self, index, watch):
        losses, *rest = real(self, index, watch)
        return {"train/loss": losses["train/loss"] + rise * (index + 1 in steps)}, *rest

    return gradient


def run_with_spikes(folder, monkeypatch, steps: Iterable[int], *flags: str):
    """Trains twelve steps, some of which are spikes; the run's folder."""
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "gradient", spiking(steps))
        return train_here(folder, "--max-loss-rise", "2", "--norm", "batchnorm", *flags)


def final_weights(folder) -> dict[str, torch.Tensor]:
    return read_model(newest(folder).path)[0]


def test_a_finite_spike_is_told_once_and_kept_and_training_goes_on(tmp_path, monkeypatch, capsys):
    """Steps 5 to 7 spike, and 11 again; the weights are those of a run without."""
    run = run_with_spikes(tmp_path, monkeypatch, (5, 6, 7, 11))
    said = capsys.readouterr().out
    assert said.count("spiked: the loss is") == 2
    assert f"python train.py --replay {run}/spikes/step_00000005 repeats the step" in said
    assert "then     training goes on" in said
    rows = {row["iter"]: row for row in read_metrics(run / "metrics.jsonl")}
    assert list(rows) == [0, 1, 2, 4, 5, 6, 8, 10, 11, 12]
    assert [step for step, row in rows.items() if "spike" in row] == [5, 11]
    assert rows[5]["train/loss"] > 6
    quiet = run_with_spikes(tmp_path / "quiet", monkeypatch, ())
    assert all(torch.equal(w, final_weights(quiet)[name]) for name, w in final_weights(run).items())
    assert not (quiet / "spikes").exists()


def test_a_spike_that_the_host_learns_of_late_is_the_same_run(tmp_path, monkeypatch):
    """On a GPU the host looks at some steps only; those after the spike are made again."""
    folders = []
    for name, waits in (("each", "cpu"), ("some", "none")):
        monkeypatch.setattr(train, "WITHOUT_WAIT", waits)
        folders.append(run_with_spikes(tmp_path / name, monkeypatch, (5, 6, 7, 11), "--log-interval", "4"))
    each, some = (read_metrics(folder / "metrics.jsonl") for folder in folders)
    assert [row["iter"] for row in some] == [row["iter"] for row in each] == [0, 1, 4, 5, 6, 8, 11, 12]
    for ours, theirs in zip(some, each, strict=True):
        assert all(ours[name] == value for name, value in theirs.items() if "perf" not in name)
    first, second = map(final_weights, folders)
    assert all(torch.equal(w, second[name]) for name, w in first.items())


def test_the_newest_spikes_are_kept_and_can_be_replayed(tmp_path, monkeypatch, capsys):
    run = run_with_spikes(tmp_path, monkeypatch, (3, 5, 7, 9))
    assert sorted(p.name for p in (run / "spikes").iterdir()) == [f"step_{step:08d}" for step in (5, 7, 9)]
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "gradient", spiking((7,)))
        with pytest.raises(SystemExit) as end:
            train.main(["--replay", str(run / "spikes" / "step_00000007")])
    assert end.value.code == EXIT_CODE
    assert capsys.readouterr().err.strip() == (run / "spikes/step_00000007/report.txt").read_text().strip()


def test_a_loss_that_stays_high_ends_the_run(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        run_with_spikes(tmp_path, monkeypatch, range(5, 99), "--max-rise-steps", "4")
    assert end.value.code == EXIT_CODE
    said = capsys.readouterr()
    assert said.out.count("step 5 spiked") == 1
    assert "step 8 diverged: the loss is" in said.err
    assert "nats above the lowest one logged, as in 3 steps before" in said.err
    run = tmp_path / "run"
    assert [row["iter"] for row in read_metrics(run / "metrics.jsonl") if "diverged" in row] == [8]


def test_a_rise_in_the_warm_up_is_none(tmp_path, monkeypatch, capsys):
    run = run_with_spikes(tmp_path, monkeypatch, (3, 5), "--warmup-iters", "6")
    assert "spiked" not in capsys.readouterr().out
    assert not (run / "spikes").exists()

"""A run that diverges: noticed at once, named, kept for replay, and nothing good overwritten."""

import hashlib
import math

import pytest
import torch
from dynamics_cases import DIVERGING, tiny_trainer, train_here

import train
from configs import load_config
from training.checkpoint import check, load_trainer
from training.divergence import EXIT_CODE, FailedState, Guard, advise, diagnose
from training.metrics import branch_names
from training.model_file import model_weights
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
    assert trainer.diverged
    found = diagnose(trainer, 0, {})
    assert (found.cause, found.place) == ("the loss is not finite", branch_names(2)[k])
    assert found.where == f"the weight {name} is not finite"


@pytest.mark.parametrize(
    ("name", "value", "place", "where"),
    [
        (
            "branches.2.out.weight",
            3e38,
            "layer_01.attn",
            "the stream is finite up to layer_00.mlp and not after",
        ),
        ("embed.weight", 3e38, "embed", "the stream is not finite after embed"),
        (
            "joins.1.next_norm.weight",
            3e38,
            "layer_01.attn",
            "the stream is finite up to layer_00.mlp and not",
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
    found = diagnose(trainer, 0, {})
    assert found.place == place
    assert found.where.startswith(where)


@pytest.mark.parametrize("k", range(4))
def test_a_gradient_that_is_not_finite_is_named_where_backward_meets_it_first(k, tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.model.branches[k].register_full_backward_hook(
        lambda m, into, out: tuple(g * math.inf for g in into)
    )
    trainer.step(0, False)
    assert trainer.diverged
    found = diagnose(trainer, 0, {})
    assert found.cause == "the gradient is not finite"
    assert found.place == ("embed", *branch_names(2))[k], "the branch reads the depth below it"


@pytest.mark.parametrize("norm", ["layernorm", "batchnorm"])  # which has statistics besides its weights
def test_a_failed_step_changes_nothing_and_neither_does_any_after_it(norm, tmp_path):
    trainer = tiny_trainer(tmp_path, "--norm", norm)
    for index in range(3):
        trainer.step(index, False)
    before, moments = weights(trainer), trainer.state()[1]
    assert (norm == "batchnorm") == any("running_mean" in name for name in before)
    trainer.loss_limit.fill_(0.1)
    for index in range(3, 6):
        trainer.step(index, False)
    assert int(trainer.failed_step) == 3
    after = trainer.state()[1]
    for name, moment in moments.items():
        assert all(torch.equal(moment[k], after[name][k]) for k in moment), name
    found = diagnose(trainer, 3, {})
    assert "nats above the lowest one logged" in found.cause
    assert [name for name, t in weights(trainer).items() if not torch.equal(t, before[name])] == []


def test_float16_keeps_the_loss_scale_of_the_failed_step(tmp_path):
    trainer = tiny_trainer(tmp_path, "--dtype", "float16")
    trainer.step(0, False)
    scale, good = trainer.scale.scale.clone(), trainer.scale.good_steps.clone()
    poison(trainer, "branches.0.out.weight")
    trainer.step(1, False)
    assert trainer.diverged
    assert (trainer.scale.scale, trainer.scale.good_steps) == (scale, good)


@pytest.mark.parametrize(("rise", "limits"), [("0.5", [math.inf, 1.5, 1.5]), ("0", [math.inf] * 3)])
def test_the_limit_follows_the_lowest_logged_loss_after_the_warm_up(rise, limits, tmp_path):
    trainer = tiny_trainer(tmp_path, "--max-loss-rise", rise, "--warmup-iters", "2")
    guard = Guard(trainer, None, tmp_path)
    seen = []
    for step, loss in [(1, 2.0), (2, 1.0), (4, 1.4)]:
        guard.passed(step, {"train/loss": loss})
        seen.append(trainer.loss_limit.item())
    assert seen == limits


def test_a_jump_names_where_most_has_grown(tmp_path):
    trainer = tiny_trainer(tmp_path)
    healthy = trainer.row(trainer.step(0, True), 0)
    trainer.loss_limit.fill_(0.0)
    with torch.no_grad():
        trainer.model.branches[3].down.weight.mul_(1e4)
    trainer.step(1, False)
    found = diagnose(trainer, 1, healthy)
    assert (found.place, "stream's RMS" in found.where) == ("layer_01.mlp", True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--placement", "post"], "warmup"),
        (["--placement", "post"], "deepnorm"),
        (["--dtype", "float16"], "bfloat16"),
        (["--grad-clip", "0"], "--grad-clip 1"),
        (["--qk-norm", "off"], "--qk-norm head"),
    ],
)
def test_advice_fits_the_configuration(flags, words):
    assert words in " ".join(advise(load_config(flags)))
    other = ["--placement", "pre", "--dtype", "float32", "--grad-clip", "1", "--qk-norm", "head"]
    assert words not in " ".join(advise(load_config(other))) or words == "warmup"


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
    assert "healthy  step 8: loss" in report
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
    assert diagnose(trainer, 8, state.healthy) is None


def test_replay_of_what_is_no_diverged_folder_is_one_sentence(diverged, capsys):
    folder, *_ = diverged
    for path, words in [(folder, "is not the `diverged` folder"), (folder / "nothing", "does not exist")]:
        with pytest.raises(SystemExit) as end:
            train.main(["--replay", str(path)])
        assert end.value.code == 2
        assert words in capsys.readouterr().err


def test_losing_the_disk_does_not_hide_the_report(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("training.checkpoint.write", full)
    monkeypatch.setattr("training.keeper.Keeper.save", lambda self: None)
    with pytest.raises(SystemExit) as end:
        train_here(
            tmp_path, "--max-loss-rise", "1e-9", "--lr", "0.9", "--warmup-iters", "0", "--grad-clip", "0"
        )
    assert end.value.code == EXIT_CODE
    message = capsys.readouterr().err
    assert "nats above the lowest" in message
    assert "saved    nothing" in message
    assert "No space left on device" in message

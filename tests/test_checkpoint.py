"""Checkpoints on the disk: whole or absent, the newest and the best kept, damage found and told."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from base import files
from base.cli import UserError
from model import GPT, ModelConfig
from training import checkpoint
from training.checkpoint import Progress, TrainerState

CONFIG = ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=11, dtype="float32")


def save(run_dir: Path, step: int, val_loss: float | None = None, keep: int = 2) -> Path:
    torch.manual_seed(step)
    weights = checkpoint.model_weights(GPT(CONFIG))
    moments = {name: {"exp_avg": torch.ones_like(p)} for name, p in weights.items()}
    state = TrainerState(Progress(step=step), (1.0, 0), moments, {"run": {"seed": 1}}, "data")
    about = checkpoint.about(GPT(CONFIG), {"name": "byte"})
    return checkpoint.save(run_dir, weights, about, state, val_loss, keep)


def steps(run_dir: Path) -> list[int]:
    return [c.step for c in checkpoint.listed(run_dir)]


def names(run_dir: Path) -> set[str]:
    return {p.name for p in (run_dir / "checkpoints").iterdir()}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_what_was_saved_is_loaded(tmp_path):
    path = save(tmp_path, 7, val_loss=1.5)
    found = checkpoint.newest(tmp_path)
    assert (found.path, found.step, found.val_loss) == (path, 7, 1.5)
    torch.manual_seed(7)
    expected = GPT(CONFIG)
    model = checkpoint.load_model(tmp_path)
    assert not model.training
    assert model.config == CONFIG
    pairs = zip(model.named_parameters(), expected.named_parameters(), strict=True)
    assert all(a == b and torch.equal(p, q) for (a, p), (b, q) in pairs)
    assert model.head.weight is model.embed.weight
    state = checkpoint.load_trainer(found)
    assert state.progress == Progress(step=7)
    assert torch.equal(state.optimizer["embed.weight"]["exp_avg"], torch.ones(11, 8))
    assert checkpoint.read_about(path)["tokenizer"] == {"name": "byte"}


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, loss in enumerate((None, 2.0, 1.0, 3.0, None, 1.0, 1.5, None)):
        save(tmp_path, 10 * step, loss)
    assert steps(tmp_path) == [50, 60, 70]  # of the two best, the newer
    assert checkpoint.best(tmp_path).step == 50
    assert checkpoint.newest(tmp_path).step == 70
    links = {name: os.readlink(tmp_path / "checkpoints" / name) for name in ("best", "latest")}
    assert links == {"best": "step_00000050", "latest": "step_00000070"}
    save(tmp_path, 80, 9.0, keep=4)
    assert steps(tmp_path) == [50, 60, 70, 80]
    save(tmp_path, 90, None, keep=1)
    assert steps(tmp_path) == [50, 90]


def test_a_loss_that_is_no_number_hides_no_best(tmp_path):
    """Nothing is less than nan, so that sorting leaves it where it stands."""
    for step, loss in ((10, 2.0), (20, float("nan")), (30, 1.9)):
        save(tmp_path, step, loss, keep=3)
    assert checkpoint.best(tmp_path).step == 30
    for step in (40, 50, 60):
        save(tmp_path, step, 3.0)
    assert steps(tmp_path) == [30, 50, 60]


def test_a_step_that_was_not_evaluated_is_never_the_best(tmp_path):
    save(tmp_path, 1, None)
    with pytest.raises(UserError, match="no whole checkpoint"):
        checkpoint.best(tmp_path)


def test_everything_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []
    rename, sync = Path.rename, files.sync
    monkeypatch.setattr(files, "sync", lambda p: (events.append(("sync", p.name)), sync(p)))
    monkeypatch.setattr(Path, "rename", lambda a, b: (events.append(("rename", b.name)), rename(a, b)))
    save(tmp_path, 1)
    first = events[: events.index(("sync", "checkpoints")) + 1]
    assert sorted(first[:3]) == [("sync", n) for n in ("manifest.json", "model.safetensors", "trainer.pt")]
    assert first[3:] == [
        ("sync", ".writing_step_00000001"),
        ("rename", "step_00000001"),
        ("sync", "checkpoints"),
    ]


@pytest.mark.parametrize("file", [*checkpoint.FILES, "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "missing"])
def test_a_damaged_newest_is_passed_over_and_told(tmp_path, file, harm):
    save(tmp_path, 1)
    damaged = save(tmp_path, 2) / file
    if harm == "flip":
        flip(damaged)
    elif harm == "cut":
        os.truncate(damaged, damaged.stat().st_size // 2)
    else:
        damaged.unlink()
    told = []
    assert checkpoint.newest(tmp_path, told.append).step == 1
    assert len(told) == 1
    assert "passing over a damaged checkpoint" in told[0]
    assert str(damaged) in told[0] or f"{damaged.parent} has no manifest.json" in told[0]


def test_when_all_are_damaged_one_sentence_says_what(tmp_path):
    for step in (1, 2):
        flip(save(tmp_path, step) / "trainer.pt")
    with pytest.raises(
        UserError, match=r"no whole checkpoint; .*00002/trainer.pt does.*00001/trainer.pt does"
    ):
        checkpoint.newest(tmp_path)


def test_damaged_ones_that_are_newer_push_no_whole_one_out(tmp_path):
    """A run that goes on at step 1, because 8 and 9 are damaged, must not count them among its newest."""
    for step in (1, 8, 9):
        save(tmp_path, step, keep=3)
    for step in (8, 9):
        flip(tmp_path / f"checkpoints/step_{step:08d}/model.safetensors")
    checkpoint.set_aside(tmp_path, checkpoint.newest(tmp_path, lambda _: None).step)
    save(tmp_path, 2, keep=1)
    assert checkpoint.newest(tmp_path).step == 2
    assert {"damaged_step_00000008", "damaged_step_00000009", "step_00000002"} <= names(tmp_path)


def test_a_copy_among_the_checkpoints_is_nobodys(tmp_path):
    """Its name sorts after the newest, and its manifest says an old step."""
    for step in (1, 2, 3):
        save(tmp_path, step, 1.0)
    for name in ("step_keep", "step_00000001.bak", "step_9"):
        shutil.copytree(tmp_path / "checkpoints" / "step_00000002", tmp_path / "checkpoints" / name)
    assert checkpoint.newest(tmp_path).step == 3
    checkpoint.set_aside(tmp_path, 2)
    assert "damaged_step_00000003" in names(tmp_path)
    assert {"step_keep", "step_00000001.bak", "step_9", "step_00000002"} <= names(tmp_path)


def test_steps_of_nine_digits_come_after_those_of_eight(tmp_path):
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    assert checkpoint.newest(tmp_path).step == 100_000_000
    assert steps(tmp_path) == [99_999_999, 100_000_000]


def test_equal_states_are_equal_files(tmp_path):
    """So that hashes of two runs can be compared. One metadata entry more is written in either order by chance."""
    found = {(save(tmp_path / str(i), 1) / "model.safetensors").read_bytes() for i in range(20)}
    assert len(found) == 1


def test_what_a_kill_left_is_cleared_away(tmp_path):
    path = save(tmp_path, 1)
    before = names(tmp_path)
    for name in (".writing_step_00000002", ".deleting_step_00000000"):
        shutil.copytree(path, path.with_name(name))
    assert checkpoint.newest(tmp_path).step == 1
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == before


def test_a_kill_while_one_is_deleted_leaves_no_half_of_it(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step, keep=9)

    def killed(path, **_):
        if Path(path).name.startswith(".deleting"):
            (Path(path) / "manifest.json").unlink(missing_ok=True)
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.remove(tmp_path / "checkpoints" / "step_00000001")
    assert [p.name for p in (tmp_path / "checkpoints").glob("step_*")] == ["step_00000002"]


@pytest.mark.parametrize("size", [0, 1000, 5000, 7000, 9300])
def test_a_save_that_fails_is_one_sentence_and_costs_nothing(tmp_path, full_disk, size):
    for step in (1, 2):
        save(tmp_path, step, 1.0)
    before = {p: p.read_bytes() for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()}
    sizes = {p.name: p.stat().st_size for p in before}
    assert size < max(sizes.values())
    full_disk(size)
    with pytest.raises(UserError, match="cannot be written"):
        save(tmp_path, 3, 0.5)
    full_disk()
    assert {p: p.read_bytes() for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()} == before
    assert not [n for n in names(tmp_path) if "writing" in n]
    save(tmp_path, 3, 0.5)
    assert checkpoint.newest(tmp_path).step == 3


def test_another_format_is_refused_by_number(tmp_path):
    file = save(tmp_path, 1) / "manifest.json"
    body = json.loads(file.read_text())["body"] | {"format": 99}
    file.write_text(json.dumps({"body": body, "sha256": checkpoint.digest_of(body)}))
    with pytest.raises(UserError, match="has format 99, and this version reads format 1"):
        checkpoint.newest(tmp_path)


def test_weights_and_moments_under_a_former_name_are_read(tmp_path):
    """N_post was called next_norm."""
    config = dataclasses.replace(CONFIG, placement="post")
    model, former = GPT(config), {}
    for name, weight in checkpoint.model_weights(model).items():
        former[name.replace("post_norm", "next_norm")] = weight
    assert former.keys() != checkpoint.model_weights(model).keys()
    state = TrainerState(
        Progress(), (1.0, 0), {name: {} for name in former}, {"model": {"placement": "post"}}, "data"
    )
    checkpoint.save(tmp_path, former, checkpoint.about(model, None), state, None, 1)
    loaded = checkpoint.load_model(tmp_path)
    for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    moments = checkpoint.load_trainer(checkpoint.newest(tmp_path)).optimizer
    assert moments.keys() == checkpoint.model_weights(model).keys()

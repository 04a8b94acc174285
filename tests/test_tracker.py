"""metrics.jsonl and wandb: everything of a step in one place, and no failure of theirs that stops training."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from dynamics_cases import FLAGS, train_here

from configs import load_config
from training import checkpoint
from training.tracker import WANDB_SECONDS, Tracker, read_metrics


def records(folder: Path) -> list[dict]:
    """What `wandb leet inspect` reads from the newest offline run under `folder`."""
    log = max((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns)
    leet = str(Path(sys.executable).with_name("wandb"))
    done = subprocess.run(
        [leet, "leet", "inspect", "--json", log], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """An offline run of 12 steps that stopped at 6 and was resumed: (its folder, records before and after)."""
    folder = tmp_path_factory.mktemp("wandb")
    first = train_here(folder, "--wandb", "offline", "--max-iters", "6")
    before = records(first)
    train_here(folder, "--wandb", "offline", "--resume")
    return first, before, records(first)


def of(kind: str, found: list[dict]) -> list[dict]:
    return [record for record in found if record["type"] == kind]


def test_wandb_holds_every_number_of_every_logged_step(offline):
    folder, before, after = offline
    rows = {row["iter"]: row for row in read_metrics(folder / "metrics.jsonl")}
    seen = {}
    for record in of("history", before) + of("history", after):
        values = dict(record["history"]["item"])
        seen[values.pop("_step")] = {k: v for k, v in values.items() if not k.startswith("_")}
    assert seen.keys() == rows.keys() == {0, 1, 2, 4, 6, 8, 10, 12}
    for step, row in rows.items():
        assert seen[step] == {k: v for k, v in row.items() if k != "iter"}, step


def test_a_resumed_run_is_the_same_run(offline):
    _, before, after = offline
    ids = {of("run", found)[0]["run"]["run_id"] for found in (before, after)}
    assert len(ids) == 1


def test_wandb_knows_configuration_commit_and_size(offline):
    _, before, _ = offline
    config = of("run", before)[0]["run"]["config"]["update"]
    assert config["model"]["n_layer"] == 2
    assert config["model"]["dtype"] == "float32"
    assert config["parameters"] == 1896
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert config["commit"] == (head or None)
    assert "start" not in config


def test_wandb_summarizes_losses_by_their_minimum(offline):
    _, _, after = offline
    defined = {r["metric"]["name"]: r["metric"]["summary"] for r in of("metric", after)}
    assert defined == {"val/loss": {"min": True}, "train/loss": {"min": True}}


def tracker(folder: Path, mode: str = "offline") -> Tracker:
    return Tracker(folder, load_config([*FLAGS, "--wandb", mode]), {}, None)


def test_without_the_package_training_goes_on_and_it_is_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = train_here(tmp_path, "--wandb", "offline")
    message = capsys.readouterr().err
    assert message.count("wandb failed") == 1
    assert "training goes on" in message
    assert [row["iter"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 4, 6, 8, 10, 12]


class Service:
    """Takes rows as a run of wandb's does."""

    id = "abc"

    def __init__(self):
        self.steps, self.times = [], []

    def log(self, row, step, commit):
        assert commit, "what is not committed waits for the next row, and is lost with a kill"
        self.steps.append(step)
        self.times.append(row["_timestamp"])

    def finish(self, exit_code):
        pass


def test_wandb_gets_the_rows_of_some_seconds_together_and_the_file_each_at_once(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time", lambda: now)
    t = tracker(tmp_path, "disabled")
    t.run = Service()
    for step, handed in enumerate(([0], [0], [0, 1, 2], [0, 1, 2])):
        t.log({"iter": step})
        assert t.run.steps == handed
        assert len(read_metrics(t.path)) == step + 1
        now += WANDB_SECONDS / 2
    t.close(0)
    assert t.run.steps == [0, 1, 2, 3]
    assert t.run.times == [100.0 + step * WANDB_SECONDS / 2 for step in range(4)], "when they were logged"


def test_wandb_has_the_rows_up_to_a_checkpoint_when_it_is_written(tmp_path, monkeypatch):
    service, had, save = Service(), {}, checkpoint.save

    def seen(run_dir, weights, about, state, *rest):
        had[state.progress.step] = service.steps[-1:]
        save(run_dir, weights, about, state, *rest)

    monkeypatch.setattr(checkpoint, "save", seen)
    monkeypatch.setattr(Tracker, "start_wandb", lambda self, *_: setattr(self, "run", service))
    train_here(tmp_path, "--wandb", "offline")
    assert had == {0: [], 6: [6], 12: [12]}
    assert service.steps == [0, 1, 2, 4, 6, 8, 10, 12]


def test_core_keys_leave_out_what_is_recorded_at_every_depth(tmp_path):
    row = {"iter": 3, "tokens": 9, "train/loss": 1.0, "my/x": 2.0, "residual_rms/embed": 3.0}
    row |= {"grad_norm/norms": 4.0}
    row |= {"attn_entropy/layer_00": 5.0, "gain/entry.max": 6.0, "logsumexp": 7.0}
    given = {}
    for keys in ("core", "full"):
        config = load_config([*FLAGS, "--wandb", "disabled", "--wandb-keys", keys])
        t = Tracker(tmp_path / keys, config, {}, None)
        t.path.parent.mkdir()
        t.run = Service()
        t.run.log = lambda numbers, keys=keys, **_: given.update({keys: numbers.keys() - {"_timestamp"}})
        t.log(row)
        assert read_metrics(t.path) == [row]
    assert given["core"] == {"tokens", "train/loss", "my/x", "logsumexp"}
    assert given["full"] == row.keys() - {"iter"}


class BrokenService:
    id = "abc"

    def log(self, *_, **__):
        raise BrokenPipeError("the service is gone")

    def finish(self, **_):
        raise AssertionError("a run that failed is not asked again")


def test_a_service_that_breaks_is_told_once_and_left_alone(tmp_path, capsys):
    t = tracker(tmp_path, "disabled")
    t.run = BrokenService()
    for step in range(3):
        t.log({"iter": step})
    t.close(0)
    assert capsys.readouterr().err.count("wandb failed (the service is gone)") == 1
    assert t.waiting == [], "rows that nobody will take are not kept"
    assert [row["iter"] for row in read_metrics(t.path)] == [0, 1, 2]


def test_online_without_a_key_says_what_to_do_and_does_not_ask(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    t = tracker(tmp_path, "online")
    assert t.run is None
    assert "run `wandb login` or take --wandb offline" in capsys.readouterr().err


def test_what_is_not_finite_is_null_and_a_tensor_a_number(tmp_path):
    t = tracker(tmp_path, "disabled")
    numbers = {"a": math.nan, "b": math.inf, "c": 1.5}
    t.log({"iter": 1} | numbers | {"my/x": torch.tensor(0.5), "my/y": torch.tensor(math.nan)})
    assert read_metrics(t.path) == [{"iter": 1, "a": None, "b": None, "c": 1.5, "my/x": 0.5, "my/y": None}]


def test_the_first_and_the_last_value_of_each_metric_are_known_after_a_resume(tmp_path):
    t = tracker(tmp_path, "disabled")
    for row in ({"iter": 0, "a": 1.0}, {"iter": 1, "b": 2.0}, {"iter": 2, "a": 3.0}):
        t.log(row)
    t.path.write_text(t.path.read_text(), encoding="utf-8-sig")  # as an editor may save it
    again = tracker(tmp_path, "disabled")
    again.log({"iter": 3, "b": 4.0})
    assert (again.first, again.last) == ({"iter": 0, "a": 1.0, "b": 2.0}, {"iter": 3, "a": 3.0, "b": 4.0})

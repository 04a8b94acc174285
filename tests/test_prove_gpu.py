"""The stages go on whatever becomes of one, and their lines are the arithmetic of what they measured."""

import itertools
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from base.cli import UserError
from tools import prove_gpu
from tools.prove_gpu import STAGES, Options, main


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def ended(out: Path) -> dict[str, str]:
    return {name: json.loads((out / f"{name}.json").read_text())["ended"] for name in STAGES}


def test_without_cuda_it_runs_to_its_end_and_says_what_it_left_out(
    without_cuda, tmp_path, capsys, monkeypatch
):
    with pytest.raises(SystemExit) as stopped:
        main(["--out", str(tmp_path / "found")])
    assert stopped.value.code == 0
    skipped = dict.fromkeys(STAGES, "skipped: no CUDA device")
    assert ended(tmp_path / "found") == skipped | {"machine": "done"}
    table = (tmp_path / "found" / "table.md").read_text()
    assert capsys.readouterr().out.endswith(table)
    assert torch.__version__ in table
    assert all(f"**{name}**" in table for name in STAGES)
    monkeypatch.setattr(prove_gpu, "started", lambda *_: "done")
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "found")])  # again


@pytest.mark.parametrize("name", ["table.md", "bench.json", "bench.log"])
def test_a_file_of_anybody_else_is_never_replaced(name, tmp_path, monkeypatch):
    monkeypatch.setattr(prove_gpu, "started", lambda *_: pytest.fail("it has begun"))
    (tmp_path / name).write_text('{"mine": 1}', encoding="utf-8")
    with pytest.raises(UserError, match=f"{name} exists and was not written by this command"):
        main(["--out", str(tmp_path)])
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(name, '{"mine": 1}')]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("#!/bin/sh\nexit 3", "ended with exit code 3; see machine.log"),
        ("#!/bin/sh\nsleep 60 & sleep 60", "took more than 0.2 seconds"),
    ],
)
def test_a_stage_that_fails_does_not_stop_the_next(without_cuda, tmp_path, monkeypatch, program, says):
    python = tmp_path / "python"
    python.write_text(program, encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(prove_gpu.sys, "executable", str(python))
    monkeypatch.setitem(STAGES, "machine", STAGES["machine"]._replace(limit=0.2 if "took" in says else 60))
    with pytest.raises(SystemExit) as stopped:
        main(["--out", str(tmp_path)])
    assert stopped.value.code == 1
    assert ended(tmp_path)["machine"] == says
    assert ended(tmp_path)["memory"] == "skipped: no CUDA device"


def test_what_a_stage_found_before_it_failed_is_kept(tmp_path, monkeypatch):
    def find(asked):
        yield prove_gpu.at_most("first", 1, 2)
        yield prove_gpu.at_most("second", 3, 2)
        raise RuntimeError("out of luck")

    monkeypatch.setitem(STAGES, "bench", prove_gpu.Stage(find, 1))
    with pytest.raises(RuntimeError):
        main(["--out", str(tmp_path), "--stage", "bench"])
    checks = prove_gpu.findings(tmp_path, "bench")
    assert [(c.what, c.expected, c.measured, c.holds) for c in checks] == [
        ("first", "<= 2", "1", True),
        ("second", "<= 2", "3", False),
    ]
    assert "| | second | &lt;= 2 | 3 | **not so** |" in prove_gpu.table({"bench": ("done", checks)})


def test_the_speeds_are_ratios_within_a_round(monkeypatch):
    times = {"ours": [1.0, 2.0, 4.0], "ours on torch": [1.1, 2.2, 4.4], "nanogpt": [1.0, 2.0, 4.4]}
    peaks = {"ours": 3 * 2**30, "ours on torch": 2**30, "nanogpt": 2 * 2**30}
    sides = []
    monkeypatch.setattr(
        prove_gpu, "compete", lambda given, **_: sides.append(given) or (times, peaks, "NVIDIA H200")
    )
    monkeypatch.setattr(prove_gpu, "with_data", lambda config, **_: prove_gpu.contextlib.nullcontext(config))
    *figures, torchs, nanogpts, memory = prove_gpu.speed(Options("out", nanogpt="checkout"))
    (sides,) = sides
    assert sides["ours"][1].model.kernel == "auto"
    assert sides["ours on torch"][1].model.kernel == "torch"
    assert [figure.what.partition(":")[0] for figure in figures] == list(times)
    assert f"{65536 / 2:,.0f}, " in figures[0].measured
    assert (torchs.measured, torchs.holds) == ("1.1", True)
    assert (nanogpts.measured, nanogpts.holds) == ("1", False)  # 1.15 is wanted
    assert (memory.measured, memory.holds) == ("1.5", False)


@pytest.mark.parametrize(("difference", "holds"), [(0.001, [True, True]), (0.1, [False, False])])
def test_the_losses_are_compared_step_by_step(tmp_path, monkeypatch, difference, holds):
    """Of two runs, of which the second is off in the last quarter of its steps."""
    launched = []

    def popen(command, **_):
        words = dict(itertools.pairwise(command))
        folder = Path(words["--out-dir"], words["--run-name"])
        folder.mkdir(parents=True)
        off = difference if words["--kernel"] == "triton" else 0.0
        rows = [{"iter": i, "train/loss": 5 - 0.1 * i + off * (i > 15)} for i in range(1, 21)]
        text = "".join(json.dumps(row) + "\n" for row in [{"iter": 0, "val/loss": 6.0}, *rows])
        (folder / "metrics.jsonl").write_text(text)
        launched.append(words["--kernel"])
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(subprocess, "Popen", popen)
    found = prove_gpu.losses_apart(Options(str(tmp_path)), "bfloat16", 20, [], mean=5e-3, most=5e-2)
    codes, losses, mean, most = found
    assert launched == ["torch", "triton"]
    assert (codes.holds, losses.measured) == (True, "[4.9, 3]")
    assert [mean.holds, most.holds] == holds
    assert most.measured == mean.measured == f"{difference:g}"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", "--out must be given"),
        ("--out out --stage speeed", "--stage is 'speeed'; the stages are machine, kernels"),
        ("--out out --nanogpt nowhere", "--nanogpt: nowhere/model.py does not exist"),
        ("--out /dev/null", "the folder /dev/null cannot be made"),
    ],
)
def test_a_mistake_is_one_sentence(flags, says):
    with pytest.raises(UserError, match=says):
        main(flags.split())

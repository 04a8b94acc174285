"""What tools.report says of what it cannot read or write, and on machines that lack something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from report_runs import write_run

from base.cli import UserError
from tools.report.__main__ import main


def metrics(folder: Path, line: str) -> Path:
    """The run `pre` with this line after its first."""
    file = folder / "pre" / "metrics.jsonl"
    first = file.read_text(encoding="utf-8").splitlines()[0]
    file.write_text(f"{first}\n{line}\n", encoding="utf-8")
    return file.parent


def recipe(folder: Path, text: str) -> Path:
    """The run `pre` with another config.toml."""
    (folder / "pre" / "config.toml").write_text(text, encoding="utf-8")
    return folder / "pre"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: [], "name the runs"),
        (lambda f: [f / "pree"], "did you mean"),
        (lambda f: [(f / "empty").mkdir() or f / "empty"], "is not a run: it has no config.toml"),
        (
            lambda f: [((f / "pre" / "metrics.jsonl").write_text("") and None) or f / "pre"],
            "recorded nothing yet",
        ),
        (lambda f: [metrics(f, "{oh")], "cannot be read"),
        (lambda f: [metrics(f, "[" * 100_000)], "cannot be read"),
        (lambda f: [metrics(f, '{"iter": 7, "train/loss": 1' + "0" * 400 + "}")], "cannot be read"),
        (lambda f: [metrics(f, "5")], "metrics.jsonl, line 2: this is no object of numbers with iter"),
        (lambda f: [metrics(f, "{}")], "metrics.jsonl, line 2: this is no object of numbers with iter"),
        (lambda f: [metrics(f, '{"iter": "7"}')], "line 2: this is no object of numbers with iter"),
        (
            lambda f: [metrics(f, '{"iter": 7, "train/loss": "x"}')],
            "metrics.jsonl, line 2: train/loss is 'x', but it is a number or null",
        ),
        (lambda f: [recipe(f, "")], "config.toml is not a run's: n_layer under [model] is missing"),
        (lambda f: [recipe(f, "model = 5")], "config.toml is not a run's: model is 5, but it is a table"),
        (lambda f: [recipe(f, "[tool.ruff]\nx = 1")], "n_layer under [model] is missing"),
        (lambda f: [recipe(f, "[model]\nn_layer = 'x'")], "n_layer under [model] is 'x'"),
        (
            lambda f: [recipe(f, "[model]\nn_layer = 1\nblock_size = 2")],
            "batch_size under [optim] is missing",
        ),
        (lambda f: [f / "pre", "-o", str(f)], "is a folder; name a file"),
        (lambda f: [f / "pre", "--png", str(f), "--text"], "--png and --text exclude each other"),
        (lambda f: [f / "pre", "--watch", "--port", "70000"], "--port is 70000; it must be below 65536"),
        (lambda f: [f / "pre", "-o", str(f / "pre" / "config.toml" / "r.html")], "cannot be written: "),
        (lambda f: [f / "pre", "--png", str(f / "pre" / "config.toml" / "png")], "cannot be written: "),
    ],
)
def test_mistakes_are_one_sentence(make, words, tmp_path):
    write_run(tmp_path / "pre")
    with pytest.raises(UserError) as mistake:
        main([str(path) for path in make(tmp_path)])
    assert words in str(mistake.value)
    assert "\n" not in str(mistake.value)


@pytest.mark.parametrize("flags", [["-o", "{a}/metrics.jsonl"], ["-o", "index.html"], ["--png", "."]])
def test_a_file_that_is_no_report_is_never_replaced(flags, tmp_path, monkeypatch):
    run = write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    for name in ("index.html", "overview.png"):
        (tmp_path / name).write_text("<title>mine</title>", encoding="utf-8")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="exists and was not written by this command; name another file"):
        main([str(run), *(flag.format(a=run) for flag in flags)])
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("flags", [["-o", "report.html"], ["--png", "."]])
def test_a_full_disk_is_told_by_name_and_keeps_the_old_report(flags, tmp_path, full_disk, monkeypatch):
    run = str(write_run(tmp_path / "a"))
    monkeypatch.chdir(tmp_path)
    name = "report.html" if flags[0] == "-o" else "overview.png"
    older = "an older <title>nanonorm: page</title>"
    (tmp_path / name).write_text(older, encoding="utf-8")
    full_disk(2000)
    with pytest.raises(UserError, match=f"{name} cannot be written: File too large"):
        main([run, *flags])
    full_disk()
    assert (tmp_path / name).read_text(encoding="utf-8") == older
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["a", name])


def test_the_summary_on_a_terminal_that_knows_ascii_only(tmp_path):
    """And without torch, whose import takes longer than all of the rest."""
    run = str(write_run(tmp_path / "ä"))
    code = "import sys; sys.modules['torch'] = None; from tools.report.__main__ import main, run; run(main)"
    command = [sys.executable, "-c", code, run, "--text"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 -> 80" in done.stdout


@pytest.mark.parametrize(("module", "flags"), [("plotly", []), ("matplotlib", ["--png"])])
def test_without_the_extra_it_says_how_to_get_it(module, flags, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    run, where = str(write_run(tmp_path / "a")), str(tmp_path / "pictures")
    with pytest.raises(UserError, match=f"needs? {module}; install it with `pip install -e '..report.'`"):
        main([run, *flags, where] if flags else [run, "-o", str(tmp_path / "r.html")])
    assert main([run, "--text"]) is None, "the summary needs neither"

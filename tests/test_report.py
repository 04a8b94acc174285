"""The page, the pictures and the table, from runs whose numbers are known."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from dynamics_cases import train_here

from configs import Config, replace, to_toml
from tools.report import pictures
from tools.report.__main__ import main
from tools.report.page import page_data, short, steps_shown
from tools.report.pictures import COLOURS, DASHES
from tools.report.runs import QUANTITIES, differences, finals, height, labels, load_runs, thin
from tools.report.text import depth_table
from training.metrics import branch_names, depth_names, part_names

PLACEMENTS = ("pre", "post", "output", "sandwich")
CHARTS = [q.id for q in QUANTITIES]


def write_run(folder: Path, n_layer: int = 3, steps: int = 20, cut: bool = False, **model) -> Path:
    """A run whose stream RMS is 1 + depth index, times 20 at the end; logits 0.5 to 8."""
    folder.mkdir(parents=True)
    config = replace(Config(), "model", n_layer=n_layer, **model)
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    rows = []
    for step in range(0, steps + 1, 5):
        row = {"iter": step, "tokens": 100 * step, "val/loss": 5.0 - step / 10}
        grown = 20.0 if step == steps else 1.0
        row |= {"train/loss": 5.5 - step / 10, "perf/tokens_per_s": 1000.0}
        row |= {f"residual_rms/{d}": (1.0 + i) * grown for i, d in enumerate(depth_names(n_layer))}
        row |= {f"grad_norm/{d}": 1.0 / (1 + i) for i, d in enumerate(part_names(n_layer))}
        row |= {f"stream_grad_rms/{d}": 1e-4 * (1 + i) for i, d in enumerate(depth_names(n_layer))}
        for i, b in enumerate(branch_names(n_layer)):
            row |= {f"branch_rms/{b}": 0.1 * (1 + i), f"angle_deg/{b}": 40.0 - i, f"update_ratio/{b}": 1e-3}
            row |= {f"gain/{b}.next_norm.mean": 1.0, f"gain/{b}.next_norm.max": 1.5}
        for i in range(n_layer):
            row |= {
                f"attn_logit_max/layer_{i:02d}": 8.0 if step == steps else 0.5,
                f"attn_entropy/layer_{i:02d}": 1.0,
            }
        rows.append(row)
    lines = [json.dumps(row) + "\n" for row in rows]
    lines += ['{"iter": 25, "tok'] if cut else []
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def test_tables_hold_the_recorded_numbers_bottom_to_top(tmp_path):
    (run,) = load_runs([write_run(tmp_path / "a", n_layer=11, cut=True)])
    table = run.table(QUANTITIES[0])
    assert table.steps == [0, 5, 10, 15, 20]
    assert table.places == depth_names(11), "layer_10 comes after layer_02"
    assert table.values[0] == [float(i) for i in range(1, 24)]
    gains = run.table(QUANTITIES[-1])
    assert gains.places[0] == "layer_00.attn.next_norm"
    assert set(gains.values[0]) == {1.5}
    parts = run.table(next(q for q in QUANTITIES if q.name == "grad_norm"))
    assert parts.places[-2:] == ["head", "norms"]


def test_every_quantity_of_a_real_run_is_found(tmp_path):
    """The names that are read are those that training writes."""
    (run,) = load_runs([train_here(tmp_path, "--qk-norm", "head", "--placement", "sandwich")])
    for quantity in QUANTITIES:
        table = run.table(quantity)
        assert table.steps, quantity.id
        assert all(v is not None for row in table.values for v in row), quantity.id
    read = {q.name for q in QUANTITIES} | {"train", "val", "perf", "iter", "tokens"}
    assert {key.partition("/")[0] for row in run.rows for key in row} == read


@pytest.mark.parametrize(
    ("place", "layers"),
    [("embed", 0), ("entry", 0), ("layer_00.attn", 0.5), ("layer_07", 7.5), ("layer_11.mlp.out_norm", 12)],
)
def test_heights(place, layers):
    assert height(place)[0] == layers
    assert height("head")[0] == height("norms")[0] == math.inf


def test_thinning_keeps_both_ends():
    rows = thin(list(range(1000)), 7)
    assert (rows[0], rows[-1], len(rows)) == (0, 999, 7)
    assert thin([1, 2], 7) == [1, 2]


def test_labels_tell_runs_apart():
    assert labels([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert labels([Path("/x/p/a"), Path("/x/q/a")]) == ["p/a", "q/a"]
    assert len(set(labels([Path("/x/a"), Path("/x/a")]))) == 2


def test_differences_and_finals(tmp_path):
    runs = load_runs([write_run(tmp_path / p, placement=p, n_head=4) for p in PLACEMENTS])
    assert differences(runs) == {"placement": list(PLACEMENTS)}
    runs[0].rows[2]["val/loss"] = 2.5
    assert finals(runs[0]) == {
        **{"step": 20, "val loss": 3.0, "best val loss": 2.5, "train loss": 3.5},
        **{"largest stream RMS": 140.0, "tokens/s": 1000.0},
    }


def test_a_field_that_is_newer_than_a_run_had_todays_default_in_it(tmp_path):
    """So it differs where another run sets it, and only there; a number that is not given is a dash in all."""
    runs = [write_run(tmp_path / name, n_head=4) for name in ("old", "new")]
    text = (runs[0] / "config.toml").read_text(encoding="utf-8")
    assert "activation_checkpointing = false\n" in text
    text = text.replace("activation_checkpointing = false\n", "").replace('norm = "layernorm"\n', "")
    (runs[0] / "config.toml").write_text(text, encoding="utf-8")
    assert differences(load_runs(runs)) == {}
    text = (runs[1] / "config.toml").read_text(encoding="utf-8")
    text = text.replace('norm = "layernorm"\n', 'norm = "rmsnorm"\nn_kv_head = 2\n')
    (runs[1] / "config.toml").write_text(text, encoding="utf-8")
    assert differences(load_runs(runs)) == {"norm": ["layernorm", "rmsnorm"], "n_kv_head": ["-", "2"]}


def test_the_runs_of_the_readme_do_not_differ_in_what_was_added_since(tmp_path):
    (old,) = load_runs(["docs/runs/pre"])
    new = replace(Config(), "model", **old.config["model"])
    (tmp_path / "config.toml").write_text(to_toml(new), encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"iter": 0}\n', encoding="utf-8")
    assert "activation_checkpointing" not in differences([old, *load_runs([tmp_path])])


def test_twenty_runs_have_twenty_lines():
    assert len({(COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]) for i in range(20)}) == 20


def test_numbers_on_the_page():
    assert [short(v) for v in (None, math.nan, 1.23456789, 3, 1.23456789e-7)] == [
        None,
        None,
        1.2346,
        3,
        1.2346e-7,
    ]


def test_a_loss_on_the_page_is_rounded_once(tmp_path):
    """2.51054 with five digits is 2.5105, and that with four would be 2.510 or 2.511."""
    (run,) = load_runs([write_run(tmp_path / "a")])
    run.rows[-1]["val/loss"] = 2.51054
    (found,) = page_data([run])["runs"]
    assert (found["finals"]["val loss"], found["loss"]["val"][1][-1]) == (2.51054, 2.5105)
    run.rows[-1]["val/loss"] = math.inf
    assert page_data([run])["runs"][0]["finals"]["best val loss"] == 3.5


def test_deep_and_many_runs_stay_small(tmp_path):
    assert [steps_shown(layers) for layers in ([4], [96], [12] * 20, [96] * 20)] == [250, 250, 250, 40]
    (run,) = load_runs([write_run(tmp_path / "long", n_layer=1, steps=5 * 300)])
    steps = page_data([run])["runs"][0]["tables"]["residual_rms"]["steps"]
    assert (steps[0], steps[-1], len(steps)) == (0, 1500, 250)


def test_the_table_marks_what_grew_more_than_tenfold(tmp_path):
    (run,) = load_runs([write_run(tmp_path / "a")])
    lines = depth_table(run).splitlines()
    assert lines[0].split("  ")[-1].strip() == "largest logit"
    assert [line.split()[0] for line in lines[1:]] == depth_names(3)
    assert re.search(
        r"layer_01\.attn +4 -> 80 +0\.25 -> 0\.25 +0\.5 -> 8  stream RMS x20  largest logit x16$", lines[4]
    )
    assert lines[1].endswith("1 -> 1                        stream RMS x20")


def test_the_table_of_a_deep_model_is_short_and_keeps_the_ends_and_the_marks(tmp_path):
    folder = write_run(tmp_path / "deep", n_layer=48)
    text = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(text[-1])
    last |= {k: v / 20 for k, v in last.items() if k.startswith("residual_rms/")}
    last |= {f"attn_logit_max/layer_{i:02d}": 0.5 for i in range(48)} | {"residual_rms/layer_33.attn": 1e5}
    (folder / "metrics.jsonl").write_text("\n".join([*text[:-1], json.dumps(last)]) + "\n")
    (run,) = load_runs([folder])
    shown = [line.split()[0] for line in depth_table(run).splitlines()[1:]]
    assert shown[0] == "embed"
    assert shown[-1] == "layer_47.mlp"
    assert "layer_33.attn" in shown
    assert len(shown) <= 14


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
        (lambda f: [f / "pre", "-o", str(f)], "cannot be written: Is a directory"),
        (lambda f: [f / "pre", "-o", str(f / "pre" / "config.toml" / "r.html")], "cannot be written: "),
        (lambda f: [f / "pre", "--png", str(f / "pre" / "config.toml" / "png")], "cannot be made: "),
    ],
)
def test_mistakes_are_one_sentence(make, words, tmp_path, capsys):
    write_run(tmp_path / "pre")
    with pytest.raises(SystemExit) as end:
        main([str(path) for path in make(tmp_path)])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_places_of_other_names_stand_apart(tmp_path):
    assert height("layer_x.attn")[0] == math.inf


@pytest.mark.parametrize("flags", [["-o", "report.html"], ["--png", "."]])
def test_a_full_disk_is_told_by_name_and_keeps_the_old_report(
    flags, tmp_path, capsys, full_disk, monkeypatch
):
    run = str(write_run(tmp_path / "a"))
    monkeypatch.chdir(tmp_path)
    name = "report.html" if flags[0] == "-o" else "overview.png"
    (tmp_path / name).write_text("an older one", encoding="utf-8")
    full_disk(2000)
    with pytest.raises(SystemExit) as end:
        main([run, *flags])
    full_disk()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: {name} cannot be written: File too large\n"
    assert (tmp_path / name).read_text(encoding="utf-8") == "an older one"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["a", name])


def test_a_link_to_a_report_stays_one(tmp_path):
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    main([str(write_run(tmp_path / "a")), "-o", str(tmp_path / "link.html")])
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").stat().st_size > 100_000


@pytest.mark.parametrize(
    ("into", "code", "says"),
    [
        ("| true", 0, ""),
        ("> /dev/full", 2, "error: standard output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
        ("| cat", 0, ""),
    ],
)
def test_the_table_through_a_pipe_or_onto_a_full_disk(into, code, says, tmp_path):
    """With a terminal that knows ASCII only."""
    runs = " ".join(str(write_run(tmp_path / f"ä{i}", n_layer=96)) for i in range(20))
    command = f"set -o pipefail; {sys.executable} -m tools.report {runs} --text {into}"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, says)
    if into == "| cat":
        assert done.stdout.startswith("?0\n")
        assert done.stdout.count("4 -> 80") == 20


def test_help_says_what_to_name(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert "[-h] RUN [RUN ...] [-o STR]" in said
    assert "(default: )" not in said


@pytest.mark.parametrize(("module", "flags"), [("plotly", []), ("matplotlib", ["--png"])])
def test_without_the_extra_it_says_how_to_get_it(module, flags, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    run, where = str(write_run(tmp_path / "a")), str(tmp_path / "pictures")
    with pytest.raises(SystemExit) as end:
        main([run, *flags, where] if flags else [run, "-o", str(tmp_path / "r.html")])
    assert end.value.code == 2
    assert (
        f"need{'s' if module == 'plotly' else ''} {module}; install it with `pip install -e '.[report]'`"
        in (capsys.readouterr().err)
    )
    assert main([run, "--text"]) is None, "the table needs neither"


def test_pictures(tmp_path, monkeypatch):
    kept = [q for q in QUANTITIES if q.id in ("residual_rms", "gain_mean")]
    monkeypatch.setattr("tools.report.pictures.QUANTITIES", kept)
    runs = [str(write_run(tmp_path / p, placement=p, n_head=4)) for p in PLACEMENTS[:2]]
    main([*runs, "--png", str(tmp_path / "png")])
    written = sorted(path.name for path in (tmp_path / "png").iterdir())
    expected = [
        "loss.png",
        "overview.png",
        *(f"{c}_{kind}.png" for c in ("gain_mean", "residual_rms") for kind in ("heat", "profile")),
    ]
    assert written == sorted(expected)
    assert all(path.stat().st_size > 5000 for path in (tmp_path / "png").iterdir())


def test_pictures_show_the_recorded_numbers(tmp_path, monkeypatch):
    """Every line of the loss and of the profile, and every cell of the heat map, at the values of `write_run`."""
    drawn = {}
    monkeypatch.setattr(pictures, "finish", lambda figure, path: drawn.setdefault(path.stem, figure) and path)
    monkeypatch.setattr(pictures, "QUANTITIES", [q for q in QUANTITIES if q.id == "residual_rms"])
    runs = load_runs([write_run(tmp_path / p, placement=p) for p in PLACEMENTS[:2]])
    pictures.save_pictures(runs, tmp_path / "png")
    train, val = drawn["loss"].axes[0].lines[:2]
    assert list(val.get_ydata()) == [5.0, 4.5, 4.0, 3.5, 3.0]
    assert list(train.get_ydata()) == [5.5, 5.0, 4.5, 4.0, 3.5]
    assert len(drawn["loss"].axes[0].lines) == 2 * len(runs)
    lines = drawn["residual_rms_profile"].axes[0].lines
    assert [line.get_label() for line in lines] == list(PLACEMENTS[:2])
    assert all(list(line.get_xdata()) == [0, 0.5, 1, 1.5, 2, 2.5, 3] for line in lines)
    assert all(list(line.get_ydata()) == [20.0 * (1 + i) for i in range(7)] for line in lines)
    first, second = drawn["residual_rms_heat"].axes[:2]
    for ax in (first, second):
        [mesh] = ax.collections
        grid = mesh.get_array().reshape(7, 5)
        assert grid[:, 0].tolist() == [1.0 + i for i in range(7)]
        assert grid[:, -1].tolist() == [20.0 * (1 + i) for i in range(7)]


def test_pictures_of_a_run_whose_last_row_has_no_values(tmp_path, monkeypatch):
    """A float16 step that was skipped has no finite gradient; the row before it has no profile `at the end`."""
    folder = write_run(tmp_path / "a")
    *rows, last = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = json.loads(last)
    last = json.dumps(values | {key: None for key in values if key.startswith("grad_norm/")})
    (folder / "metrics.jsonl").write_text("\n".join([*rows, last]) + "\n", encoding="utf-8")
    drawn = {}
    monkeypatch.setattr(pictures, "finish", lambda figure, path: drawn.setdefault(path.stem, figure) and path)
    monkeypatch.setattr(pictures, "QUANTITIES", [q for q in QUANTITIES if q.id == "grad_norm"])
    pictures.save_pictures(load_runs([folder]), tmp_path / "png")
    assert len(drawn["grad_norm_profile"].axes[0].lines) == 0


def test_the_runs_of_the_readme_are_there_and_differ_in_placement_only():
    runs = load_runs([Path("docs/runs", placement) for placement in PLACEMENTS])
    assert differences(runs) == {"placement": list(PLACEMENTS)}
    for run in runs:
        assert all(run.table(quantity).steps[-1] == 400 for quantity in QUANTITIES)

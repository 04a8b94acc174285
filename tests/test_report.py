"""The runs that tools.report reads, and what is made of them: the page's data, the picture, the summary."""

import csv
import dataclasses
import io
import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
from dynamics_cases import train_here
from report_runs import PLACEMENTS, rows_of, write_rows, write_run

from base.cli import UserError
from tools.palette import COLOURS, DASHES
from tools.report import frame, pictures
from tools.report.__main__ import main
from tools.report.columns import Columns
from tools.report.page import page, page_data, short, steps_shown
from tools.report.runs import differences, labels, load_runs, recorded, repetitions
from tools.report.text import summary
from tools.report.thin import bucket_means, thin_curve, thin_table
from training.metrics import QUANTITIES, depth_names

BY_ID = {quantity.id: quantity for quantity in QUANTITIES}
STREAM = BY_ID["residual_rms"]
LONG = 100_000  # rows


def test_tables_hold_the_recorded_numbers_bottom_to_top(tmp_path):
    (run,) = load_runs([write_run(tmp_path / "a", rows_of(11, 20), n_layer=11, cut=True)])
    table = run.table(STREAM)
    assert table.steps.tolist() == [0, 5, 10, 15, 20]
    assert [place.text for place in table.places] == depth_names(11), "layer_10 comes after layer_02"
    assert table.values[0].tolist() == [float(i) for i in range(1, 24)]
    gains = run.table(BY_ID["gain_max"])
    assert (gains.places[0].text, gains.places[0].norm) == ("layer_00.attn.next_norm", "next_norm")
    assert set(gains.values[0]) == {1.5}
    assert [place.text for place in run.table(BY_ID["grad_norm"]).places][-2:] == ["head", "norms"]


def test_every_quantity_of_a_real_run_is_found(tmp_path):
    """The names that are read are those that training writes; none of them is taken for a user's own."""
    (run,) = load_runs([train_here(tmp_path, "--qk-norm", "head", "--placement", "sandwich")])
    found = recorded([run])
    assert set(found) <= set(QUANTITIES)
    wanted = (
        "residual_rms branch_rms angle_deg grad_norm stream_grad_rms update_ratio gain_max attn_logit_max"
    )
    wanted += " attn_entropy train_loss val_loss train_lr"
    assert set(wanted.split()) <= {q.id for q in found}
    for quantity in found:
        assert np.isfinite(run.table(quantity).values).all(), quantity.id


def test_columns_are_read_on_and_anew_where_the_file_was_cut(tmp_path):
    folder = write_run(tmp_path / "a")
    columns = Columns(folder / "metrics.jsonl")
    columns.read_on()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iter": 25, "my/x": 1}\n{"iter": 30, "my')
    columns.read_on()
    assert columns.steps.tolist() == [0, 5, 10, 15, 20, 25]
    assert columns.matrix(["iter", "my/x"]).tolist() == [[25, 1]]
    write_rows(
        folder, [{"iter": 0, "my/x": None}, {"iter": 7, "my/x": 2}, *({"iter": i} for i in range(8, 400))]
    )
    columns.read_on()
    assert columns.steps.tolist() == [0, 7, *range(8, 400)], "a resumed run that has outgrown what it was"
    assert columns.not_finite() == {"my/x": (1, 0)}


def test_labels_tell_runs_apart():
    assert labels([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert labels([Path("/x/p/a"), Path("/x/q/a")]) == ["p/a", "q/a"]
    assert len(set(labels([Path("/x/a"), Path("/x/a")]))) == 2


def test_differences_and_repetitions(tmp_path):
    runs = load_runs([write_run(tmp_path / p, placement=p, n_head=4) for p in PLACEMENTS])
    assert differences(runs) == {"placement": list(PLACEMENTS)}
    seeds = load_runs([write_run(tmp_path / f"s{i}", run={"seed": i}) for i in (1, 2)])
    assert [[run.label for run in group] for group in repetitions([*seeds, *runs])][:2] == [
        ["s1", "s2"],
        ["pre"],
    ]


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


def test_a_folder_of_runs_means_all_of_them_and_what_is_none_is_told(tmp_path, capsys):
    for name in ("b", "a"):
        write_run(tmp_path / "out" / name)
    (tmp_path / "out" / "converted").mkdir()
    (tmp_path / "out" / "broken").mkdir()
    (tmp_path / "out" / "broken" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "out" / "report.html").write_text("x")
    assert [run.label for run in load_runs([tmp_path / "out"], skip=lambda why: None)] == ["a", "b"]
    main([str(tmp_path / "out" / name) for name in ("a", "report.html", "converted", "broken")] + ["--text"])
    said = capsys.readouterr()
    assert said.out.startswith("a: done")
    assert [line.split(": ")[0] for line in said.err.splitlines()] == ["left out"] * 3
    assert "converted is not a run: it has no config.toml" in said.err
    with pytest.raises(UserError, match="does not exist"):
        load_runs([tmp_path / "out" / "a", tmp_path / "out" / "c"], skip=lambda why: None)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"state": "done", "step": 20}, "done"),
        ({"state": "stopped"}, "stopped, at step 20 of 100"),
        ({"state": "running"}, "running, at step 20 of 100"),
        ({"state": "diverged", "report": ["step 19 diverged: no"]}, "diverged at step 19"),
        ({"state": 7}, "unknown, at step 20 of 100"),
        (None, "unknown, at step 20 of 100"),
    ],
)
def test_states(facts, says, tmp_path):
    optim = {"max_iters": 100, "warmup_iters": 0}
    (run,) = load_runs([write_run(tmp_path / "a", facts=facts, optim=optim)])
    assert run.state_in_words == says
    assert run.report == (facts or {}).get("report", [])


def test_a_run_that_says_it_is_running_and_is_silent(tmp_path):
    (run,) = load_runs([write_run(tmp_path / "a", facts={"state": "running"})])
    os.utime(tmp_path / "a" / "metrics.jsonl", (0, 0))
    assert ", silent for " in run.state_in_words


def test_what_is_not_known_of_a_run_is_called_unknown(tmp_path):
    facts = {"state": "done", "parameters": 12, "seconds": 90, "commit": "abc"}
    facts |= {"command": ["python", "train.py"]}
    old, new = load_runs([write_run(tmp_path / "old", facts=None), write_run(tmp_path / "new", facts=facts)])
    data = page_data([old, new])["runs"]
    assert [run["cells"]["parameters"] for run in data] == ["unknown", 12]
    assert [run["cells"]["wall time"] for run in data] == ["unknown", "2 min"]
    assert [run["cells"]["loss spikes"] for run in data] == ["unknown", 0]
    assert [run["identity"]["commit"] for run in data] == ["unknown", "abc"]
    assert [run["identity"]["command"] for run in data] == ["unknown", "python train.py"]
    assert [run["scales"]["FLOPs"] for run in data] == [None, None]


# ---- thinning

SPIKES = {"train/loss": 9.0, "grad_norm/layer_00.mlp": 30.0, "residual_rms/layer_01.attn": 40.0}
AT = {"train/loss": 51_234, "grad_norm/layer_00.mlp": 33_333, "residual_rms/layer_01.attn": 77_777}


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Path:
    """A hundred thousand rows with three spikes of one row, and one attention entropy that collapses for one."""
    folder = tmp_path_factory.mktemp("long") / "long"
    rng = np.random.default_rng(0)
    noise = np.exp(0.05 * rng.standard_normal((LONG, 2))).round(4).tolist()
    rows = [{"iter": i, "train/loss": 2 * a, "val/loss": 2.0} for i, (a, _) in enumerate(noise)]
    for row, (a, b) in zip(rows, noise, strict=True):
        row |= {"grad_norm/layer_00.mlp": b, "grad_norm/layer_01.mlp": 2 * a}
        row |= {"residual_rms/embed": a, "residual_rms/layer_01.attn": b, "attn_entropy/layer_01": 3.0}
    for key, value in SPIKES.items():
        rows[AT[key]][key] = value
    rows[60_000]["attn_entropy/layer_01"] = 0.25
    return write_run(folder, rows, n_layer=2, optim={"max_iters": LONG - 1, "warmup_iters": 0})


def test_a_spike_of_one_row_in_a_hundred_thousand_is_on_the_page(long_run):
    data = page_data(load_runs([long_run]))
    (run,) = data["runs"]
    loss = run["curves"]["train_loss"]
    assert len(loss["steps"]) < 2000
    assert loss["rows"] == LONG
    assert dict(zip(loss["steps"], loss["values"], strict=True))[AT["train/loss"]] == 9.0
    for id, place in (("grad_norm", "layer_00.mlp"), ("residual_rms", "layer_01.attn")):
        table, key = run["tables"][id], f"{id}/{place}"
        column = table["places"].index(place)
        assert max(row[column] for row in table["high"]) == SPIKES[key], "in the heat map and the band"
        assert table["values"][table["steps"].index(AT[key])][column] == SPIKES[key], "in its step's profile"
    assert min(row[0] for row in run["tables"]["attn_entropy"]["low"]) == 0.25
    assert "100,000 rows" in data["thinned"]
    assert "extremes" in data["thinned"]
    told = " ".join(data["findings"])
    assert "training loss 9, step 51,234" in told
    assert "stream rms 40 at layer_01.attn, step 77,777" in told
    assert "gradient norm by part 30 at layer_00.mlp, step 33,333" in told


def test_a_spike_of_one_row_in_a_hundred_thousand_is_in_the_picture_and_in_the_text(
    long_run, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: drawn.append(figure))
    runs = load_runs([long_run])
    pictures.save_overview(runs, tmp_path)
    loss, stream = drawn[0].axes
    assert max(loss.lines[0].get_ydata()) == 9.0
    assert loss.get_ylim()[1] > 9.0
    assert "100,000 rows, extremes kept" in loss.get_title()
    assert max(stream.lines[0].get_ydata()) == 40.0
    text = summary(runs[0])
    assert "training loss 9, step 51,234" in text
    assert len(text.splitlines()) <= 13


def test_thinning_keeps_the_ends_the_extremes_and_what_is_missing():
    values = np.sin(np.arange(1000.0))
    values[[123, 500, 777]] = [9.0, np.nan, -9.0]
    kept = thin_curve(values, 60)
    assert len(kept) <= 60
    assert {0, 123, 500, 777, 999} <= set(kept.tolist())
    assert thin_curve(values, 1000).tolist() == list(range(1000))
    steps, means = bucket_means(np.arange(1000), np.where(np.isnan(values), np.nan, 2.0), 20)
    assert len(steps) == 20
    assert set(means) == {2.0}, "a missing value counts for nothing"


def test_a_thinned_table_has_the_extremes_of_every_place_and_rows_as_they_were_recorded():
    values = np.ones((1000, 3)) * [1, 2, 3]
    values[400, 1], values[401, 2], values[402, 0] = 50.0, 0.01, np.nan
    found = thin_table(np.arange(1000), values, 20)
    assert (found.rows, len(found.steps)) == (1000, 20)
    assert found.high.max(axis=0).tolist() == [1, 50, 3]
    assert found.low.min(axis=0).tolist() == [1, 2, 0.01]
    assert (found.steps[0], found.steps[-1]) == (0, 999)
    assert np.array_equal(found.values, values[found.steps], equal_nan=True)
    assert 400 in found.steps


def test_deep_and_many_runs_stay_small():
    shapes = [(5000, 25), (200, 25)]
    assert [steps_shown(shapes * n) for n in (1, 4, 20, 200)] == [250, 250, 80, 30]


def test_twenty_runs_of_five_thousand_rows_are_less_than_ten_megabytes(tmp_path):
    random = np.random.default_rng(0)
    rows = []
    for i, usual in zip(range(5000), itertools.cycle(rows_of(12, 20)), strict=False):
        kinds = (
            ("train", "perf", "grad_norm", "residual_rms") if i % 25 else {key.split("/")[0] for key in usual}
        )
        row = {
            key: value * random.uniform(1, 2) for key, value in usual.items() if key.split("/")[0] in kinds
        }
        rows.append(row | {"iter": i, "tokens": 100 * i})
    (run,) = load_runs([write_run(tmp_path / "a", rows, n_layer=12)])
    assert len(page([dataclasses.replace(run, label=f"run {i}") for i in range(20)]).encode()) < 10e6


# ---- what is drawn and printed


def test_twenty_runs_have_twenty_lines_that_can_be_seen_on_white():
    assert len({(COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]) for i in range(20)}) == 20
    for colour in COLOURS:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        luminance = np.dot(linear, [0.2126, 0.7152, 0.0722])  # of WCAG 2
        assert 1.05 / (luminance + 0.05) > 3, colour


def test_numbers_on_the_page():
    numbers = (None, math.nan, 1.23456789, 3.0, 1.23456789e-7)
    assert [short(v) for v in numbers] == [None, None, 1.2346, 3, 1.2346e-7]


def test_a_loss_on_the_page_is_rounded_once(tmp_path):
    """2.51054 with five digits is 2.5105, and that with four would be 2.510 or 2.511."""
    rows = rows_of(3, 20)
    rows[-1]["val/loss"] = 2.51054
    (found,) = page_data(load_runs([write_run(tmp_path / "a", rows)]))["runs"]
    assert (found["cells"]["val loss"], found["curves"]["val_loss"]["values"][-1]) == (2.51054, 2.5105)
    rows[-1]["val/loss"] = math.inf
    (found,) = page_data(load_runs([write_run(tmp_path / "b", rows)]))["runs"]
    assert (found["cells"]["best val loss"], found["curves"]["val_loss"]["values"][-1]) == (3.5, None)


def test_a_users_own_number_has_a_curve(tmp_path):
    rows = [row | {"my/x": 7.0, "residual_rms": 1.0} for row in rows_of(3, 20)]
    data = page_data(load_runs([write_run(tmp_path / "a", rows)]))
    own = [q for q in data["curves"] if q["id"].startswith("own:")]
    assert [(q["title"], q["main"]) for q in own] == [("my/x", False), ("residual_rms", False)]
    assert data["runs"][0]["curves"]["own:my/x"]["values"] == [7.0] * 5
    assert data["runs"][0]["tables"]["residual_rms"]["places"] == depth_names(3)


def test_curves_beside_the_loss(tmp_path):
    rows = rows_of(3, 20)
    for row, norm in zip(rows, (0.5, 1.5, 2.0, 0.5, 3.0), strict=True):
        row["train/grad_norm"] = norm
    facts = {"state": "done", "flops_per_token": 6.0}
    data = page_data(load_runs([write_run(tmp_path / "a", rows, facts=facts)]))
    (run,) = data["runs"]
    main_curves = [q["id"] for q in data["curves"] if q["main"]]
    assert main_curves == ["train_grad_norm", "train_lr", "perf_tokens_per_s", "gap"]
    assert run["curves"]["gap"]["steps"] == [0, 5, 10, 15, 20]
    assert run["curves"]["gap"]["values"] == [-0.5, -0.75, -1.0, -1.25, -1.5], "training: a mean of five rows"
    assert run["cells"]["steps clipped"] == "60%"
    assert run["references"]["train_grad_norm"] == [("clip", 1.0)]
    assert run["references"]["attn_entropy"] == [("ln T", math.log(1024))]
    assert run["scales"]["hours"][1][-1] == short(2000 / 1000 / 3600)
    assert run["scales"]["FLOPs"] == 6.0 * 12 * 1024


@pytest.mark.parametrize("n_layer", [2, 48])
def test_the_summary_has_thirteen_lines_at_most_and_marks_what_is_unusual_alone(n_layer, tmp_path):
    rows = rows_of(n_layer, 20)
    rows[-1] |= {key: value / 20 for key, value in rows[-1].items() if key.startswith("residual_rms/")}
    rows[-1] |= {f"residual_rms/{d}": 1.0 for d in depth_names(n_layer)}
    rows[-1] |= {f"grad_norm/{d}": 1.0 for d in depth_names(n_layer)}
    (run,) = load_runs([write_run(tmp_path / "calm", rows, n_layer=n_layer)])
    text = summary(run)
    assert "nothing unusual" in text
    assert "median" not in text
    rows[-1]["attn_logit_max/layer_01"] = 267.0
    (run,) = load_runs([write_run(tmp_path / "loud", rows, n_layer=n_layer)])
    text = summary(run)
    assert len(text.splitlines()) <= 13
    assert "largest attention logit 267 at layer_01, step 20; above 50 since step 20." in text
    assert "0.5 -> 267  largest logit above 50" in text


def test_numbers_for_a_notebook(tmp_path, capsys):
    rows = [row | ({"my/x": None} if row["iter"] == 5 else {}) for row in rows_of(1, 20)]
    folders = [str(write_run(tmp_path / "a", rows, n_layer=1)), str(write_run(tmp_path / "b", n_layer=2))]
    main([*folders, "--csv"])
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(line["run"], line["iter"]) for line in lines[4:6]] == [("a", "20"), ("b", "0")]
    assert lines[4]["train/loss"] == "3.5"
    assert lines[4]["residual_rms/layer_01.mlp"] == lines[1]["my/x"] == ""
    pandas = pytest.importorskip("pandas")
    table = frame.frame(*folders)
    assert isinstance(table, pandas.DataFrame)
    assert table[table.run == "b"]["residual_rms/layer_01.mlp"].tolist() == [5, 5, 5, 5, 100]
    assert table[table.run == "a"]["residual_rms/layer_01.mlp"].isna().all()


def test_the_picture_shows_the_recorded_numbers(tmp_path, monkeypatch):
    """Every line of the loss and of the profiles at the values of `rows_of`."""
    drawn = []
    runs = [write_run(tmp_path / p, placement=p, n_head=4) for p in PLACEMENTS[:2]]
    main([*map(str, runs), "--png", str(tmp_path / "png")])
    assert (tmp_path / "png" / "overview.png").stat().st_size > 5000
    monkeypatch.setattr(pictures, "save", lambda figure, path: drawn.append(figure))
    pictures.save_overview(load_runs(runs), tmp_path / "png")  # in the place of its own picture
    loss, stream, gradient = drawn[0].axes
    assert loss.lines[0].get_ydata().tolist() == [5.5, 5.0, 4.5, 4.0, 3.5]
    assert loss.lines[1].get_ydata().tolist() == [5.0, 4.5, 4.0, 3.5, 3.0]
    assert [line.get_label() for line in loss.lines[1::2]] == list(PLACEMENTS[:2])
    for line in stream.lines:
        assert line.get_xdata().tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3]
        assert line.get_ydata().tolist() == [20.0 * (1 + i) for i in range(7)], "the last is the largest"
    assert gradient.lines[1].get_ydata() == pytest.approx([1e-4 * (1 + i) for i in range(7)])


def test_the_picture_of_a_run_whose_last_row_has_no_values(tmp_path, monkeypatch):
    """A float16 step that was skipped has no finite gradient; the row before it is no profile `at the end`."""
    rows = rows_of(3, 20)
    rows[-1] |= {key: None for key in rows[-1] if key.startswith("stream_grad_rms/")}
    drawn = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: drawn.append(figure))
    pictures.save_overview(load_runs([write_run(tmp_path / "a", rows)]), tmp_path)
    extreme, end = drawn[0].axes[2].lines
    assert np.isnan(end.get_ydata()).all()
    assert np.isfinite(extreme.get_ydata()).all()


def test_the_runs_of_the_readme_are_there_and_differ_in_placement_only():
    runs = load_runs([Path("docs/runs", placement) for placement in PLACEMENTS])
    assert differences(runs) == {"placement": list(PLACEMENTS)}
    assert all(run.table(quantity).steps[-1] == 400 for run in runs for quantity in recorded([run]))

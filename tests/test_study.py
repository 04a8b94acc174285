"""A study of two cells: resumable, repeatable, and its table's numbers by hand."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import recipe as tiny_recipe

from base.cli import UserError
from configs import flags_of, load_config
from tools.study import __main__ as command
from tools.study import results as table
from tools.study.grid import MARK, Study

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    threads = torch.get_num_threads()
    file = tiny_recipe(tmp_path_factory.mktemp("study"))
    torch.set_num_threads(threads)
    text = file.read_text(encoding="utf-8") + '\n[grid]\nnorm = ["layernorm", "rmsnorm"]\nseed = [1]\n'
    file.write_text(text, encoding="utf-8")
    return file


def started(folder: Path, *argv: str, **how) -> subprocess.Popen:
    """The command in a folder of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    whole = [sys.executable, "-m", "tools.study", *argv]
    return subprocess.Popen(whole, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes, **how)


@pytest.fixture(scope="module")
def results(place) -> list[dict]:
    """Run from a folder that is not the repository's, where the runs go to out/tiny."""
    process = started(place.parent, "tiny.toml", "--docs", "docs")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads((place.parent / "docs" / "tiny.json").read_text())["cells"]


@pytest.fixture
def at_its_place(place, results, monkeypatch) -> Path:
    """In that folder; the recipe."""
    monkeypatch.chdir(place.parent)
    return place


def test_both_cells_are_trained_and_differ(place, results):
    assert [c["cell"] for c in results] == [{"norm": n, "seed": 1} for n in ("layernorm", "rmsnorm")]
    assert results[0]["val_loss"] != results[1]["val_loss"]
    assert [step for step, _ in results[0]["curve"]] == [0, 3, 6, 9, 12]
    assert results[0]["curve"][-1][1] < results[0]["curve"][0][1] - 0.05
    table = (place.parent / "docs" / "tiny.md").read_text(encoding="utf-8")
    assert f"{results[1]['val_loss']:.4f}" in table
    page = (place.parent / "out" / "tiny" / "report.html").read_text(encoding="utf-8")
    assert "norm=layernorm+seed=1" in page
    assert "norm=rmsnorm+seed=1" in page
    assert (place.parent / "docs" / "tiny.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_cell_is_not_run_again_but_a_changed_recipe_is(
    at_its_place, results, monkeypatch, tmp_path, capsys
):
    ran, kept = [], tmp_path / "kept.json"
    monkeypatch.setattr(Study, "run", lambda self, name: ran.append(name) or results[0])
    found = at_its_place.with_name("out") / "tiny" / "norm=rmsnorm+seed=1" / "result.json"
    found.rename(kept)
    command.main(["tiny.toml", "--docs", str(tmp_path)])  # of results that are not of these cells
    assert ran == ["norm=rmsnorm+seed=1"]
    shown = capsys.readouterr().err.split("\r")
    assert "| 1/2 [" in shown[1]
    assert "| 2/2 [" in shown[-1]
    kept.rename(found)
    assert Study(at_its_place).finished("norm=rmsnorm+seed=1")
    changed = at_its_place.with_name("changed.toml")
    changed.write_text(at_its_place.read_text(encoding="utf-8").replace("1e-2", "2e-2"), encoding="utf-8")
    assert Study(changed, "out/tiny").finished("norm=rmsnorm+seed=1") is None


def test_a_cell_run_again_gives_the_same_loss_bitwise(at_its_place, results, capsys):
    command.main(["tiny.toml", "--cell", "norm=layernorm+seed=1"])
    said = capsys.readouterr().out
    assert repr(results[0]["val_loss"]) in said
    assert "the same as before, to the last bit" in said


@pytest.mark.parametrize("text", ["[]", "{}", "5", "", "[" * 100_000, '{"recipe": "RECIPE", "cell": CELL}'])
def test_a_result_of_another_shape_is_no_result(place, results, text, tmp_path):
    """So that the cell is run again."""
    found = Study(place, str(tmp_path))
    name, cell = next(iter(found.cells.items()))
    recipe = found.depends_on(name)
    whole = results[0] | {"recipe": recipe}
    lacking = text.replace('"RECIPE"', json.dumps(recipe)).replace("CELL", json.dumps(cell))
    for content in (json.dumps(whole), lacking):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "result.json").write_text(content, encoding="utf-8")
        assert found.finished(name) == (results[0] if content == json.dumps(whole) else None)


def test_results_say_the_command_as_it_was_given(at_its_place, results):
    """With --docs if it was given; without it they are beside the runs."""
    said = "From tiny.json, by `python -m tools.study tiny.toml{}`.\n"
    assert Path("docs", "tiny.md").read_text(encoding="utf-8").startswith(said.format(" --docs docs"))
    command.main(["tiny.toml"])
    made = Path("out", "tiny")
    assert (made / "tiny.md").read_text(encoding="utf-8").startswith(said.format(""))
    names = {p.name for p in made.iterdir() if p.is_file()}
    assert names == {"tiny.json", "tiny.md", "tiny.png", "report.html", MARK}
    assert (made / MARK).read_bytes() == at_its_place.read_bytes()


@pytest.mark.parametrize(
    ("there", "flags", "says"),
    [
        ("docs", "--docs docs", "the folder docs cannot be made: File exists"),
        ("out", "", "the folder out/tiny cannot be made: Not a directory"),
        (
            "docs/tiny.md",
            "--docs docs",
            "docs/tiny.md is no result of a study; name another folder by --docs",
        ),
        ("docs/tiny.json", "--docs docs", "docs/tiny.json is no result of a study"),
        ("mine/model.py", "--out mine", "mine holds files that no study has written; pass another --out"),
        ("mine/a", "--out mine --cell norm=layernorm+seed=1", "mine holds files that no study has written"),
    ],
)
def test_what_is_not_a_studys_stays_and_is_told_before_anything_runs(
    place, tmp_path, monkeypatch, there, flags, says
):
    monkeypatch.setattr(Study, "run", lambda *_: pytest.fail("it has begun"))
    monkeypatch.chdir(tmp_path)
    Path(there).parent.mkdir(exist_ok=True)
    Path(there).write_text('{"mine": 1}', encoding="utf-8")
    with pytest.raises(UserError, match=says):
        command.main([str(place), *flags.split()])
    assert Path(there).read_text(encoding="utf-8") == '{"mine": 1}'


def test_two_studies_do_not_fill_one_folder_at_once(place, tmp_path):
    study = Study(place, str(tmp_path / "out"))
    with study.take(), pytest.raises(UserError, match="is being filled by another study"):
        study.take()
    study.take().release()


@pytest.mark.slow
def test_an_interruption_is_no_traceback_and_the_same_command_goes_on(place, tmp_path):
    """Ctrl-C reaches the study and its runs."""
    long = tmp_path / "long.toml"
    text = place.read_text(encoding="utf-8").replace("max_iters = 12", "max_iters = 1000000")
    long.write_text(text, encoding="utf-8")
    process = started(tmp_path, "long.toml", start_new_session=True)
    metrics = tmp_path / "out" / "long" / "norm=layernorm+seed=1" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert errors.rstrip().endswith("interrupted")
    assert "Traceback" not in errors
    assert not metrics.with_name("result.json").exists()


def test_a_value_with_slashes_makes_a_plain_folder(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[grid]\ndataset = ["/data/a b", "/data/c"]\nlr = [1e-3]', encoding="utf-8")
    cells = Study(file).cells
    assert list(cells) == ["dataset=_data_a_b+lr=0.001", "dataset=_data_c+lr=0.001"]
    assert [cell["dataset"] for cell in cells.values()] == ["/data/a b", "/data/c"]


def test_a_single_run_leaves_the_grid_alone(place):
    assert load_config([str(place)]).model.norm == "layernorm"


def test_booleans_can_be_varied(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[grid]\nembed_norm = [true, false]\nbias = [false]", encoding="utf-8")
    cells = Study(file).cells.values()
    found = [load_config([str(file), *flags_of(cell)]).model for cell in cells]
    assert [(model.embed_norm, model.bias) for model in found] == [(True, False), (False, False)]


def test_named_settings_change_several_fields_at_once(tmp_path):
    """And a cell depends on what its name stands for."""
    file = tmp_path / "mine.toml"
    methods = 'pre = {}\ndeepnorm = {placement = "post", residual_scale = "deepnorm"}'
    file.write_text(f"[grid]\nseed = [1, 2]\n[grid.method]\n{methods}", encoding="utf-8")
    found = Study(file)
    assert list(found.cells) == [f"seed={s}+method={m}" for s in (1, 2) for m in ("pre", "deepnorm")]
    config = load_config(found.arguments("seed=2+method=deepnorm"))
    assert (config.run.seed, config.model.placement) == (2, "post")
    assert config.model.residual_scale == "deepnorm"
    assert load_config(found.arguments("seed=1+method=pre")).model.placement == "pre"
    before = {name: found.depends_on(name) for name in found.cells}
    file.write_text(file.read_text().replace("pre = {}", "pre = {bias = false}"), encoding="utf-8")
    changed = [name for name in found.cells if Study(file).depends_on(name) != before[name]]
    assert changed == ["seed=1+method=pre", "seed=2+method=pre"]


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ("", "has no table [grid]"),
        ("[grid]\nnorms = ['layernorm']", "names norms, which is nothing that a study can vary"),
        ("[grid]\nnorm = 'layernorm'", "must be a list of different values"),
        ("[grid]\nseed = [1, 1]", "must be a list of different values"),
        ("[grid]\nnorm = ['layrnorm']", "layrnorm"),
        ("[grid]\nmethod = ['pre']", "names method, which is nothing that a study can vary"),
        ("[grid.method]\npre = 1", "method under [grid] must be a table of tables, as pre = {}"),
        ("[grid.method]\npre = {nrom = 1}", "names nrom, which is nothing that a study can vary"),
        ("[grid.norm]\na = {bias = true}", "norm under [grid] must be a list of different values"),
        ("[grid]\nreplay = ['a', 'b']", "names replay, which is nothing that a study can vary"),
        ("[grid]\nresume = [true]", "names resume, which is nothing that a study can vary"),
        ("[grid]\noverwrite = [true]", "names overwrite, which is nothing that a study can vary"),
        ("[grid]\ninit_from = ['out/a']", "names init_from, which is nothing that a study can vary"),
        ("[start]\nresume = true\n[grid]\nseed = [1]", "--resume and --overwrite exclude each other"),
        ("[grid]\ndataset = ['a/b', 'a_b']", "make no names of folders that are short and differ"),
        (f"[grid]\ndataset = ['{'a' * 300}']", "make no names of folders that are short and differ"),
    ],
)
def test_a_mistake_in_the_grid_is_one_sentence(tmp_path, grid, says):
    file = tmp_path / "mine.toml"
    file.write_text(grid, encoding="utf-8")
    with pytest.raises(UserError) as told:
        command.main([str(file)])
    assert says in str(told.value)
    assert "\n" not in str(told.value)


def test_a_recipe_must_be_named():
    with pytest.raises(UserError, match="recipe must be given"):
        command.main([])


def cell(norm: str, lr: float, seed: int, loss: float, diverged: bool = False) -> dict:
    about = {"norm": norm, "lr": lr, "seed": seed}
    return {"cell": about, "val_loss": loss, "diverged": diverged, "max_grad_norm": 1.0, "curve": [[0, loss]]}


def test_the_table_compares_each_settings_best_rate_with_the_spread():
    cells = [cell("layernorm", 0.1, s, loss) for s, loss in enumerate([2.0, 2.2, 2.4])]
    cells += [cell("layernorm", 0.2, s, loss) for s, loss in enumerate([3.0, 3.0, 3.0])]
    cells += [cell("rmsnorm", 0.1, s, loss, diverged=s == 2) for s, loss in enumerate([1.0, 1.0, 1.0])]
    cells += [cell("rmsnorm", 0.2, s, loss) for s, loss in enumerate([2.3, 2.3, 2.3])]
    mean, spread = table.mean_and_spread(cells[:3])
    assert (mean, spread) == (pytest.approx(2.2), pytest.approx(0.2))
    text = "\n".join(table.lines(cells))
    assert "| rmsnorm | 0.1 | - | - | 3 | 1 | 1 |" in text
    assert "| norm rmsnorm | 0.2 | 2.3000 | 0.0000 | +0.1000 | no |" in text  # 0.1 against 2 * 0.2 / sqrt(3)
    cells[0]["val_loss"], cells[2]["val_loss"] = 2.15, 2.25
    assert table.beyond_spread(cells[:3], cells[-3:])


def test_a_grid_without_rates_says_nothing_about_rates():
    cells = [cell(norm, 0.1, seed, 2.0) for norm in ("layernorm", "rmsnorm") for seed in (1, 2)]
    for one in cells:
        del one["cell"]["lr"]
    rows = table.lines(cells)
    assert rows[0] == "| norm | validation loss | spread | seeds | diverged | largest gradient norm |"
    assert rows[5] == "Each, against norm layernorm:"
    assert rows[7] == "| setting | validation loss | spread | difference | beyond the spread |"
    assert rows[10] == "| norm rmsnorm | 2.0000 | 0.0000 | +0.0000 | no |"
    for one in cells:
        del one["cell"]["norm"]
    rows = table.lines(cells)
    assert rows[0] == "| validation loss | spread | seeds | diverged | largest gradient norm |"
    assert rows[2] == "| 2.0000 | 0.0000 | 4 | 0 | 1 |"
    assert rows[4] == "Each, against the recipe:"


@pytest.mark.parametrize("name", ["study_norms", "study_depth"])
def test_the_tables_in_docs_are_what_their_cells_give(name, tmp_path, monkeypatch):
    recorded = json.loads(Path("docs/study", f"{name}.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(table, "draw", lambda cells: None)
    monkeypatch.setattr(table, "save", lambda figure, path: path.touch())
    table.write(tmp_path / name, recorded["cells"], recorded["command"])
    assert recorded["command"] == f"python -m tools.study configs/{name}.toml --docs docs/study"
    for kind in ("md", "json"):
        made = (tmp_path / f"{name}.{kind}").read_text(encoding="utf-8")
        assert made == Path("docs/study", f"{name}.{kind}").read_text(encoding="utf-8")

"""A study of two cells: resumable, repeatable, and its table's numbers by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import recipe as tiny_recipe

from configs import flags_of, load_config
from tools import study, study_results
from tools.study import Study


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    threads = torch.get_num_threads()
    file = tiny_recipe(tmp_path_factory.mktemp("study"))
    torch.set_num_threads(threads)
    text = file.read_text(encoding="utf-8") + '\n[grid]\nnorm = ["layernorm", "rmsnorm"]\nseed = [1]\n'
    file.write_text(text, encoding="utf-8")
    return file


def arguments(place: Path, docs: str = "docs") -> list[str]:
    return [str(place), "--out", str(place.parent / "runs"), "--docs", str(place.parent / docs)]


@pytest.fixture(scope="module")
def results(place) -> list[dict]:
    study.main(arguments(place))
    return json.loads((place.parent / "docs" / "tiny.json").read_text())["cells"]


def test_both_cells_are_trained_and_differ(place, results):
    assert [c["cell"] for c in results] == [{"norm": n, "seed": 1} for n in ("layernorm", "rmsnorm")]
    assert results[0]["val_loss"] != results[1]["val_loss"]
    assert [step for step, _ in results[0]["curve"]] == [0, 3, 6, 9, 12]
    assert results[0]["curve"][-1][1] < results[0]["curve"][0][1] - 0.05
    table = (place.parent / "docs" / "tiny.md").read_text(encoding="utf-8")
    assert f"{results[1]['val_loss']:.4f}" in table
    page = (place.parent / "runs" / "report.html").read_text(encoding="utf-8")
    assert "norm=layernorm+seed=1" in page
    assert "norm=rmsnorm+seed=1" in page
    assert (place.parent / "docs" / "tiny.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_cell_is_not_run_again_but_a_changed_recipe_is(place, results, monkeypatch):
    ran = []
    monkeypatch.setattr(Study, "run", lambda self, name: ran.append(name) or results[0])
    (place.parent / "runs" / "norm=rmsnorm+seed=1" / "result.json").rename(place.parent / "kept.json")
    study.main(arguments(place, "again"))  # of results that are not of these cells
    assert ran == ["norm=rmsnorm+seed=1"]
    (place.parent / "kept.json").rename(place.parent / "runs" / "norm=rmsnorm+seed=1" / "result.json")
    assert Study(place, str(place.parent / "runs")).finished("norm=rmsnorm+seed=1")
    changed = place.with_name("changed.toml")
    changed.write_text(place.read_text(encoding="utf-8").replace("1e-2", "2e-2"), encoding="utf-8")
    assert Study(changed, str(place.parent / "runs")).finished("norm=rmsnorm+seed=1") is None


def test_a_cell_run_again_gives_the_same_loss_bitwise(place, results, capsys):
    study.main([*arguments(place), "--cell", "norm=layernorm+seed=1"])
    said = capsys.readouterr().out
    assert repr(results[0]["val_loss"]) in said
    assert "the same as before, to the last bit" in said


@pytest.mark.parametrize("text", ["[]", "{}", "5", "", "[" * 100_000, '{"recipe": "RECIPE", "cell": CELL}'])
def test_a_result_of_another_shape_is_no_result(place, results, text, tmp_path):
    """So that the cell is run again."""
    found = Study(place, str(tmp_path))
    name, cell = next(iter(found.cells.items()))
    whole = results[0] | {"recipe": found.settings}
    lacking = text.replace('"RECIPE"', json.dumps(found.settings)).replace("CELL", json.dumps(cell))
    for content in (json.dumps(whole), lacking):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "result.json").write_text(content, encoding="utf-8")
        assert found.finished(name) == (results[0] if content == json.dumps(whole) else None)


def test_a_study_runs_from_any_folder_and_writes_into_its_own(place, tmp_path):
    """The command it notes has --docs if it was given."""
    recipe = place.with_name("elsewhere.toml")
    text = place.read_text(encoding="utf-8").replace('norm = ["layernorm", "rmsnorm"]\n', "")
    recipe.write_text(text.replace("max_iters = 12", "max_iters = 3"), encoding="utf-8")
    root = str(Path(study.__file__).parents[1])
    command = [sys.executable, "-m", "tools.study", str(recipe)]
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    made = tmp_path / "out" / "elsewhere"
    table = (made / "elsewhere.md").read_text(encoding="utf-8")
    assert table.startswith(f"From elsewhere.json, by `python -m tools.study {recipe}`.\n")
    assert {p.name for p in made.glob("elsewhere.*")} == {"elsewhere.json", "elsewhere.md", "elsewhere.png"}
    assert (made / "report.html").is_file()


def test_the_command_has_docs_as_it_was_given(place, results):
    (written,) = [
        line for line in (place.parent / "docs" / "tiny.md").read_text().splitlines() if "From" in line
    ]
    assert written == f"From tiny.json, by `python -m tools.study {place} --docs {place.parent / 'docs'}`."


def test_what_cannot_be_written_is_told_before_anything_runs(place, monkeypatch, capsys):
    monkeypatch.setattr(Study, "run_all", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(SystemExit) as stopped:
        study.main([str(place), "--docs", str(place / "docs")])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said == f"error: the folder {place / 'docs'} for the results cannot be made: Not a directory\n"


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


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ("", "has no table [grid]"),
        ("[grid]\nnorms = ['layernorm']", "names norms, which is nothing that a study can vary"),
        ("[grid]\nnorm = 'layernorm'", "must be a list of different values"),
        ("[grid]\nseed = [1, 1]", "must be a list of different values"),
        (
            "[grid]\nnorm = ['layrnorm']",
            "it must be 'layernorm', 'rmsnorm' or 'batchnorm' (did you mean layernorm?)",
        ),
        ("[grid]\nreplay = ['a', 'b']", "names replay, which is nothing that a study can vary"),
        ("[grid]\nresume = [true]", "names resume, which is nothing that a study can vary"),
        ("[grid]\noverwrite = [true]", "names overwrite, which is nothing that a study can vary"),
        ("[grid]\ninit_from = ['out/a']", "names init_from, which is nothing that a study can vary"),
        ("[start]\nresume = true\n[grid]\nseed = [1]", "--resume and --overwrite exclude each other"),
        ("[grid]\ndataset = ['a/b', 'a_b']", "make no names of folders that are short and differ"),
        (f"[grid]\ndataset = ['{'a' * 300}']", "make no names of folders that are short and differ"),
    ],
)
def test_a_mistake_in_the_grid_is_one_sentence(tmp_path, grid, says, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(grid, encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        study.main([str(file)])
    assert stopped.value.code == 2
    message = capsys.readouterr().err.strip()
    assert says in message
    assert "\n" not in message


def cell(norm: str, lr: float, seed: int, loss: float, diverged: bool = False) -> dict:
    about = {"norm": norm, "lr": lr, "seed": seed}
    return {"cell": about, "val_loss": loss, "diverged": diverged, "max_grad_norm": 1.0, "curve": [[0, loss]]}


def test_the_table_compares_each_settings_best_rate_with_the_spread():
    cells = [cell("layernorm", 0.1, s, loss) for s, loss in enumerate([2.0, 2.2, 2.4])]
    cells += [cell("layernorm", 0.2, s, loss) for s, loss in enumerate([3.0, 3.0, 3.0])]
    cells += [cell("rmsnorm", 0.1, s, loss, diverged=s == 2) for s, loss in enumerate([1.0, 1.0, 1.0])]
    cells += [cell("rmsnorm", 0.2, s, loss) for s, loss in enumerate([2.3, 2.3, 2.3])]
    mean, spread = study_results.mean_and_spread(cells[:3])
    assert (mean, spread) == (pytest.approx(2.2), pytest.approx(0.2))
    text = "\n".join(study_results.lines(cells))
    assert "| rmsnorm | 0.1 | - | - | 3 | 1 | 1 |" in text
    assert "| norm rmsnorm | 0.2 | 2.3000 | 0.0000 | +0.1000 | no |" in text  # 0.1 against 2 * 0.2 / sqrt(3)
    cells[0]["val_loss"], cells[2]["val_loss"] = 2.15, 2.25
    assert study_results.beyond_spread(cells[:3], cells[-3:])


def test_a_grid_without_rates_says_nothing_about_rates():
    cells = [cell(norm, 0.1, seed, 2.0) for norm in ("layernorm", "rmsnorm") for seed in (1, 2)]
    for one in cells:
        del one["cell"]["lr"]
    rows = study_results.lines(cells)
    assert rows[0] == "| norm | validation loss | spread | seeds | diverged | largest gradient norm |"
    assert rows[5] == "Each, against norm layernorm:"
    assert rows[7] == "| setting | validation loss | spread | difference | beyond the spread |"
    assert rows[10] == "| norm rmsnorm | 2.0000 | 0.0000 | +0.0000 | no |"
    for one in cells:
        del one["cell"]["norm"]
    rows = study_results.lines(cells)
    assert rows[0] == "| validation loss | spread | seeds | diverged | largest gradient norm |"
    assert rows[2] == "| 2.0000 | 0.0000 | 4 | 0 | 1 |"
    assert rows[4] == "Each, against the recipe:"


@pytest.mark.parametrize("name", ["study_norms", "study_depth"])
def test_the_tables_in_docs_are_what_their_cells_give(name, tmp_path, monkeypatch):
    recorded = json.loads(Path("docs/study", f"{name}.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(study_results, "draw", lambda cells, path: path.touch())
    study_results.write(tmp_path / name, recorded["cells"], recorded["command"])
    assert recorded["command"] == f"python -m tools.study configs/{name}.toml --docs docs/study"
    for kind in ("md", "json"):
        made = (tmp_path / f"{name}.{kind}").read_text(encoding="utf-8")
        assert made == Path("docs/study", f"{name}.{kind}").read_text(encoding="utf-8")

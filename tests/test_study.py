"""A study of two cells: resumable, repeatable, and its table's numbers by hand."""

import json
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


def arguments(place: Path) -> list[str]:
    return [str(place), "--out", str(place.parent / "runs"), "--docs", str(place.parent / "docs")]


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
    study.main(arguments(place))
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
        ("[grid]\nnorm = ['layrnorm']", "invalid choice"),
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

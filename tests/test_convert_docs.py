"""The Python on docs/interchange.md, as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from convert_cases import build

from model import GPT, PLACEMENTS
from training.checkpoint import about, model_weights, save_model

NOTEBOOK, EXPORT, ELSEWHERE = re.findall(
    r"```python\n(.*?)```", Path("docs/interchange.md").read_text(encoding="utf-8"), re.DOTALL
)
EVERY_PLACEMENT = {"n_layer": len(PLACEMENTS) // 2, "placement": " ".join(PLACEMENTS)}
LLAMA = {"norm": "rmsnorm", "pos": "rope", "qk_norm": "head", "gain": "zero_centred", "mlp": "geglu"}
OTHERS = [
    LLAMA | {"n_layer": 1, "placement": "sandwich", "residual_scale": 0.7, "embed_norm": True},
    {"n_layer": 1, "norm": "batchnorm", "placement": "keel", "logit_softcap": 3.0},
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to work in, where the page's run is a model of any switches."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "quickstart").mkdir(parents=True)

    def make(**switches) -> GPT:
        model = build(**switches)
        save_model(tmp_path / "out" / "quickstart", model_weights(model), about(model, None))
        return model

    return make


def tokens(batch: int, time: int) -> torch.Tensor:
    return torch.randint(23, (batch, time), generator=torch.Generator().manual_seed(time))


def test_a_model_in_a_notebook(place):
    model, names = place(), {"tokens": tokens(3, 12), "targets": tokens(3, 12).roll(1, 1)}
    assert len(NOTEBOOK.split("\n\n")[1].splitlines()) + 1 == 3
    exec(NOTEBOOK, names)
    logits, loss = model(names["tokens"], names["targets"])
    assert torch.equal(names["logits"], logits)
    assert torch.equal(names["loss"], loss)


def export(model: GPT) -> None:
    """Runs the page's example: what it writes computes the same at any size, by torch's operators alone."""
    names = {}
    exec(EXPORT, names)
    called = {str(node.target) for node in names["program"].graph.nodes if node.op == "call_function"}
    assert {name.partition(".")[0] for name in called} <= {"aten", "<built-in function getitem>"}, called
    program = torch.export.load("model.pt2").module()
    for size in ((1, 1), (3, 7), (2, 12)):
        with torch.no_grad():
            expected = model(tokens(*size))[0]
            assert expected.std() > 0.05
            assert (program(tokens(*size))[0] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("switches", OTHERS, ids=lambda switches: switches["norm"])
def test_other_kinds_of_norm_are_exported_as_pytorchs_own_operators(switches, place):
    export(place(**switches))


def test_every_placement_is_exported_and_runs_where_the_repository_is_not(place, tmp_path):
    model = place(**EVERY_PLACEMENT)
    export(model)
    script = ELSEWHERE + "print(logits.tolist())"
    words = [sys.executable, "-P", "-c", script]  # -P: the folder that one stands in is not searched
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env={"PATH": ""})
    assert done.returncode == 0, done.stderr
    found = torch.tensor(eval(done.stdout))
    assert (found - model(torch.tensor([[1, 2, 3]]))[0]).abs().max() <= 1e-5

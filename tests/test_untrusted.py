"""A stranger's checkpoint can at worst be refused, in one sentence, and none of its code runs."""

import contextlib
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import recipe, train

from base.cli import UserError
from tools import sample
from training import checkpoint

FILES = (*checkpoint.FILES, "manifest.json")
CASES = 280


class Payload:
    """Unpickling it makes a folder."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The recipe of a finished run with one checkpoint."""
    folder = tmp_path_factory.mktemp("untrusted")
    file = recipe(folder, steps=3)
    assert train(file, "--keep-checkpoints", "1", "--eval-tokens", "32") == 0
    return file


def harm(file: Path, rng: random.Random, mark: Path) -> str:
    """Damages one file in a random way, and says how."""
    size = file.stat().st_size
    kind = rng.choice(["cut", "flip", "flips", "pickle", "torch", "missing", "noise", "folder"])
    if kind == "cut":
        os.truncate(file, rng.choice([0, 1, 7, 8, 9, rng.randrange(size), size - 1]))
    elif kind in ("flip", "flips"):
        data = bytearray(file.read_bytes())
        near = rng.choice([64, size])  # in half of the cases within the header
        for _ in range(1 if kind == "flip" else 20):
            data[rng.randrange(min(near, size))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    elif kind == "pickle":
        file.write_bytes(pickle.dumps(Payload(mark), protocol=rng.randrange(5)))
    elif kind == "torch":
        torch.save({"progress": Payload(mark)}, file)
    elif kind == "noise":
        file.write_bytes(rng.randbytes(rng.randrange(3 * size)))
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()
    return kind


def sign(path: Path) -> None:
    """Makes the manifest agree with files that a stranger has prepared, so that only their content can be refused."""
    manifest = json.loads((path / "manifest.json").read_text())
    body = manifest["body"] | {"sha256": {name: checkpoint.digest(path / name) for name in checkpoint.FILES}}
    (path / "manifest.json").write_text(json.dumps({"body": body, "sha256": checkpoint.digest_of(body)}))


def refused(capsys, attempt) -> str:
    """What was said, in one sentence, by an attempt that ended with exit code 2."""
    with pytest.raises((SystemExit, UserError)) as ended:
        attempt()
    if isinstance(ended.value, UserError):  # for which `base.cli.run` prints it and ends with 2
        return str(ended.value)
    error = capsys.readouterr().err
    assert ended.value.code == 2, error
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) == 1
    return error


@pytest.mark.parametrize("seed", range(4))
def test_generated_damage_is_refused(run, tmp_path, capsys, seed):
    """Of --resume, load_model and tools.sample in turn: signed, and not."""
    rng, mark, refusals = random.Random(seed), tmp_path / "the payload ran", 0
    for case in range(CASES // 4):
        shutil.rmtree(tmp_path / "tiny", ignore_errors=True)
        shutil.copytree(run.parent / "tiny", tmp_path / "tiny", symlinks=True)
        path = checkpoint.newest(tmp_path / "tiny").path
        name = rng.choice(FILES)
        kind = harm(path / name, rng, mark)
        signed = name != "manifest.json" and (path / name).is_file() and rng.random() < 0.5
        if signed:
            sign(path)
        told = f"case {case} of seed {seed}: {kind} of {name}"
        way = case % 3
        if signed and (name == "trainer.pt") and (way or kind in ("flip", "flips")):
            continue  # sampling does not read it, and a stranger's numbers are numbers
        if signed and kind in ("flip", "flips"):
            allowed_to_be_read(path)
            continue
        if way == 0:
            argv = [str(run), "--out-dir", str(tmp_path), "--resume"]
            said = refused(capsys, lambda argv=argv: script_main(argv))
        elif way == 1:
            with pytest.raises(UserError) as error:
                checkpoint.load_model(tmp_path / "tiny")
            said = str(error.value)
        else:
            said = refused(capsys, lambda: sample.main([str(tmp_path / "tiny"), "--tokens", "1"]))
        assert str(path) in said, told
        assert not mark.exists(), told
        refusals += 1
    assert refusals >= 50


def script_main(argv: list[str]) -> None:
    code = train(*argv)
    if code:
        raise SystemExit(code)


def allowed_to_be_read(path: Path) -> None:
    """A signed file with other bits: other weights, or a refusal, but nothing else."""
    with contextlib.suppress(UserError):
        checkpoint.load_model(path)


def test_the_payload_would_have_run(tmp_path):
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()


CRAFTED = {
    "no model": {"tokenizer": None},
    "no tokenizer": {"model": {}},
    "a list": [1, 2],
    "a model that is a list": {"model": [1], "tokenizer": None},
    "an unknown field": {"model": {"surprise": 1}, "tokenizer": None},
    "a wrong type": {"model": {"n_layer": "two"}, "tokenizer": None},
    "a billion layers": {"model": {"n_layer": 10**9}, "tokenizer": None},
    "an impossible width": {"model": {"n_layer": 1, "n_embd": 12 * 10**12}, "tokenizer": None},
    "no vocabulary": {"model": {"n_layer": 1, "vocab_size": 0}, "tokenizer": None},
}


@pytest.mark.parametrize("what", CRAFTED)
def test_a_header_that_lies_is_refused(tmp_path, what):
    about = json.dumps(CRAFTED[what])
    save_file(
        {"embed.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors", metadata={"nanonorm": about}
    )
    with pytest.raises(UserError):
        checkpoint.load_model(tmp_path)


def test_a_header_without_end_is_refused(tmp_path):
    deep = "[" * 200_000
    save_file({"embed.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors", metadata={"nanonorm": deep})
    with pytest.raises(UserError, match="damaged"):
        checkpoint.load_model(tmp_path)


def test_a_foreign_safetensors_file_is_sent_to_the_converter(tmp_path):
    save_file({"wte.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"tools\.convert"):
        checkpoint.load_model(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("progress", {"step": "three"}),
        ("scaler", (1.0,)),
        ("optimizer", {"embed.weight": 3}),
        ("optimizer", {}),
        ("optimizer", {"embed.weight": {"exp_avg": torch.zeros(3)}}),
        ("config", [1]),
        ("data", 5),
    ],
)
def test_a_trainer_state_of_another_form_is_refused(run, tmp_path, capsys, field, value):
    shutil.copytree(run.parent / "tiny", tmp_path / "tiny", symlinks=True)
    path = checkpoint.newest(tmp_path / "tiny").path
    state = torch.load(path / "trainer.pt", weights_only=True)
    torch.save(state | {field: value}, path / "trainer.pt")
    sign(path)
    argv = [str(run), "--out-dir", str(tmp_path), "--resume"]
    assert str(path) in refused(capsys, lambda: script_main(argv))


NORM = "joins.0.next_norm.weight"
FOREIGN = {
    "an extra moment": (
        lambda moments: moments[NORM].update(max_exp_avg_sq=torch.zeros(16)),
        f"does not fit the optimizer: ['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'step'] of {NORM}",
    ),
    "no moment of one parameter": (
        lambda moments: moments[NORM].clear(),
        f"does not fit the optimizer: [] of {NORM}",
    ),
    "a moment of another shape": (
        lambda moments: moments[NORM].update(exp_avg_sq=torch.zeros(8)),
        f"does not fit the model: exp_avg_sq of {NORM}",
    ),
    "a missing parameter": (
        lambda moments: moments.pop(NORM),
        f"does not fit the model: {NORM} is in one of them only",
    ),
    "an unknown parameter": (
        lambda moments: moments.update(surprise=moments[NORM]),
        "does not fit the model: surprise is in one of them only",
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_another_optimizers_state_is_refused(run, tmp_path, capsys, what):
    change, says = FOREIGN[what]
    shutil.copytree(run.parent / "tiny", tmp_path / "tiny", symlinks=True)
    path = checkpoint.newest(tmp_path / "tiny").path
    state = torch.load(path / "trainer.pt", weights_only=True)
    change(state["optimizer"])
    torch.save(state, path / "trainer.pt")
    sign(path)
    argv = [str(run), "--out-dir", str(tmp_path), "--resume"]
    assert f"{path}/trainer.pt {says}" in refused(capsys, lambda: script_main(argv))


@pytest.mark.parametrize("text", ["[1]", "{}", '{"body": 1, "sha256": "x"}', "[" * 200_000, '"', "\xff"])
def test_a_manifest_of_another_form_is_refused(tmp_path, text):
    path = tmp_path / "checkpoints" / "step_00000001"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="holds no whole checkpoint"):
        checkpoint.load_model(tmp_path)

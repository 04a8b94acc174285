"""tools.convert as a user runs it: nanoGPT's files, vocabularies, and nothing half-written."""

import json
import math
import os
import shlex
import stat
from dataclasses import replace

import pytest
import tiktoken
import torch
import torch.nn.functional as F
from convert_cases import LLAMA, build, error_of, nanogpt_checkpoint

import train
from base import files
from base.cli import UserError
from configs import load_config
from data import load_tokenizer, tokenizer
from tools import convert, sample
from tools.interchange import resolved
from tools.vocabulary import merges, recognize, tokenizer_files
from training.checkpoint import about, load_model, model_weights, read_about, save_model


@pytest.fixture
def folder(tmp_path):
    """A converted model of ours without a tokenizer."""
    model = build()
    (tmp_path / "ours").mkdir()
    save_model(tmp_path / "ours", model_weights(model), about(model, None))
    return tmp_path / "ours"


# ---- nanoGPT


def nanogpt_logits(weights, tokens, n_layer, n_head):
    """nanoGPT's forward pass as its model.py has it, on a dictionary of weights."""

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights.get(f"{name}.bias"), 1e-5)

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    (batch, time), width = tokens.shape, weights["transformer.wte.weight"].shape[1]
    x = weights["transformer.wte.weight"][tokens] + weights["transformer.wpe.weight"][:time]
    for i in range(n_layer):
        block = f"transformer.h.{i}"
        q, k, v = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").split(width, dim=2)
        q, k, v = (t.view(batch, time, n_head, width // n_head).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // n_head)
        scores = scores.masked_fill(torch.ones(time, time).tril() == 0, -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, width)
        x = x + linear(y, f"{block}.attn.c_proj")
        hidden = F.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"))
        x = x + linear(hidden, f"{block}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ weights["lm_head.weight"].T


@pytest.mark.parametrize("wrapper", ["", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize(("bias", "tied"), [(True, True), (False, False)])
def test_nanogpts_checkpoint_comes_in_with_its_logits(bias, tied, wrapper, tmp_path, capsys):
    """Whatever has wrapped it, and with the head that it has."""
    checkpoint = nanogpt_checkpoint(bias)
    weights = {name.removeprefix("_orig_mod."): t for name, t in checkpoint["model"].items()}
    if not tied:
        weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    checkpoint["model"] = {f"{wrapper}{name}": t for name, t in weights.items()}
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    convert.main(["from-nanogpt", str(tmp_path / "ckpt.pt"), "-o", str(tmp_path / "ours")])
    model = load_model(tmp_path / "ours")
    assert (model.config.bias, model.config.mlp, model.config.tie_embeddings) == (bias, "gelu", tied)
    assert ("holds another one: tie_embeddings is False" in capsys.readouterr().out) != tied
    tokens = torch.randint(23, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = nanogpt_logits(weights, tokens, 2, 2), model(tokens)[0]
    assert expected.std() > 0.5
    assert (found - expected).abs().max() <= 1e-5


def test_a_vocabulary_must_fit_the_model(tmp_path, capsys):
    torch.save(nanogpt_checkpoint(bias=False), tmp_path / "ckpt.pt")
    (tmp_path / "input.txt").write_text("the quick brown fox j\n", encoding="utf-8")
    char = ["--tokenizer", "char", "--corpus", tmp_path / "input.txt", "-o", tmp_path / "ours"]
    wrong = error_of("from-nanogpt", tmp_path / "ckpt.pt", *char)
    assert "18 different tokens, but the model's vocabulary has 23" in wrong
    byte = ["--tokenizer", "byte", "-o", tmp_path / "ours"]
    wrong = error_of("from-nanogpt", tmp_path / "ckpt.pt", *byte)
    assert "byte has 257 different tokens, but the model's vocabulary has 23" in wrong
    (tmp_path / "input.txt").write_text("the quick brown fox jumps av\n", encoding="utf-8-sig")
    convert.main([str(a) for a in ("from-nanogpt", tmp_path / "ckpt.pt", *char)])
    capsys.readouterr()
    sample.main([str(tmp_path / "ours"), "--prompt", "fox", "--tokens", "5", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("fox")


class Malicious:
    def __reduce__(self):
        return print, ("this was executed",)


def test_nothing_in_a_ckpt_is_unpickled(tmp_path):
    torch.save(nanogpt_checkpoint(bias=False) | {"config": Malicious()}, tmp_path / "ckpt.pt")
    assert "is not nanoGPT's ckpt.pt" in error_of(
        "from-nanogpt", tmp_path / "ckpt.pt", "-o", tmp_path / "ours"
    )
    assert not (tmp_path / "ours").exists()


# ---- vocabularies


def test_merge_rules_are_recovered_from_ranks():
    pieces = [bytes([b]) for b in range(256)] + [b"th", b" th", b"the", b" the", b"he", b" t", b" the t"]
    rules = merges({piece: i for i, piece in enumerate(pieces)})
    assert [" ".join(rule) for rule in rules] == ["t h", "Ġ th", "th e", "Ġth e", "h e", "Ġ t", "Ġthe Ġt"]


def test_gpt2s_vocabulary_is_written_and_recognized(tmp_path, monkeypatch):
    """With a stand-in for the download: as many tokens, and the merges of a few of them."""
    singles = [bytes([b]) for b in range(256)]
    pairs = [a + b for a in singles for b in singles][: 50256 - 256]
    ranks = {token: i for i, token in enumerate(singles + pairs)}
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    monkeypatch.setattr(tokenizer, "_load_encoding", lambda name: encoding)
    for name, text in tokenizer_files(load_tokenizer({"name": "gpt2"}), 64).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert recognize(tmp_path) == ({"name": "gpt2"}, "")
    body = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert body["model"]["vocab"]["Ā"] == 0
    assert len(body["model"]["merges"]) == 50000

    (tmp_path / "vocab.json").write_text(json.dumps(body["model"]["vocab"]), encoding="utf-8")
    (tmp_path / "tokenizer.json").unlink()
    assert recognize(tmp_path) == ({"name": "gpt2"}, ""), "older GPT-2 folders hold vocab.json"
    vocab = body["model"]["vocab"]
    vocab["ĀĀ"], vocab["Āā"] = vocab["Āā"], vocab["ĀĀ"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    meta, why = recognize(tmp_path)
    assert meta is None
    assert "another one" in why

    def unreachable(name):
        raise UserError("no network")

    monkeypatch.setattr(tokenizer, "_load_encoding", unreachable)
    assert recognize(tmp_path) == (None, "whether its vocabulary is gpt2's could not be checked: no network")
    (tmp_path / "tokenizer.json").write_text(json.dumps(body), encoding="utf-8")
    assert recognize(tmp_path)[0] == tokenizer.tokenizer_meta(str(tmp_path)), "it speaks for itself"


def test_without_a_tokenizer_sampling_says_so(folder):
    with pytest.raises(UserError, match="saved without a tokenizer"):
        sample.main([str(folder), "--device", "cpu"])
    assert read_about(folder)["tokenizer"] is None


def command_printed(capsys) -> list[str]:
    """The words of the command that a conversion recommends, after `python train.py`."""
    program, script, *rest = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("recipe: ")[2])
    assert (program, script) == ("python", "train.py")
    return rest


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"mlp": "gelu", "head_dim": 8, "tie_embeddings": False, "mlp_hidden": 24},
        LLAMA,
        LLAMA | {"n_kv_head": 1, "bias": True, "rope_theta": 5e5, "norm_eps": 1e-6},
        LLAMA | {"qk_norm": "head", "head_dim": 6},
        LLAMA | {"qk_norm": "full", "placement": "output"},
        LLAMA | {"mlp": "geglu", "gain": "zero_centred", "embed_scale": "sqrt_dim"},
    ],
)
def test_the_printed_flags_win_over_everything_that_a_recipe_says(switches, tmp_path, capsys):
    """There and back; the recipes have biases, heads, MLPs and positions of their own."""
    model = build(**switches)
    (tmp_path / "ours").mkdir()
    save_model(tmp_path / "ours", model_weights(model), about(model, None))
    convert.main(["to-hf", str(tmp_path / "ours"), "-o", str(tmp_path / "hf")])
    convert.main(["from-hf", str(tmp_path / "hf"), "-o", str(tmp_path / "back")])
    words = command_printed(capsys)
    assert words[0] == "configs/quickstart.toml"
    assert words[words.index("--dataset") + 1] == "YOURS", (
        "the recipe's are bytes, and this model's ids are not"
    )
    of_a_run = {"dtype": "float32", "dropout": 0.0, "residual_dtype": "float32", "kernel": "auto"}
    for recipe in ("quickstart", "shakespeare_char", "layout_qwen3", "layout_original"):
        found = load_config([f"configs/{recipe}.toml", *words[1:]])
        assert found.start.init_from == str(tmp_path / "back")
        assert replace(found.model, **of_a_run) == load_model(tmp_path / "back").config
        assert resolved(replace(found.model, **of_a_run)) == resolved(replace(model.config, **of_a_run))


def test_train_starts_from_a_converted_model(tmp_path, capsys):
    """By the command that the conversion prints, for other data."""
    torch.save(nanogpt_checkpoint(bias=True), tmp_path / "ckpt.pt")
    convert.main(["from-nanogpt", str(tmp_path / "ckpt.pt"), "-o", str(tmp_path / "my model")])
    words = command_printed(capsys)
    assert words[words.index("--init-from") + 1] == str(tmp_path / "my model")
    (tmp_path / "bard").mkdir()
    for part in ("train", "val"):
        torch.arange(400).remainder(23).to(torch.uint16).numpy().tofile(tmp_path / "bard" / f"{part}.bin")
    rest = "--max-iters 1 --lr 0 --min-lr 0 --warmup-iters 0 --batch-size 2 --eval-tokens 50 --wandb disabled"
    rest += f" --device cpu --out-dir {tmp_path} --dataset {tmp_path}/bard"
    train.main([*words, *rest.split()])
    told = capsys.readouterr().out
    assert "my model does not say what its token ids mean; the model knows 23" in told
    assert "head_dim was" not in told, "the numbers agree, so nothing is to be told"
    before, after = load_model(tmp_path / "my model"), load_model(tmp_path / "quickstart")
    for name, tensor in model_weights(before).items():
        assert torch.equal(tensor, model_weights(after)[name]), name


# ---- the folder that is written


def test_what_is_there_is_kept_unless_overwrite_says_otherwise(folder, tmp_path):
    out = tmp_path / "out"
    convert.main(["to-hf", str(folder), "-o", str(out)])
    assert sorted(f.name for f in out.iterdir()) == ["config.json", "model.safetensors"]
    assert "pass --overwrite" in error_of("fold", folder, "-o", out)
    convert.main(["fold", str(folder), "-o", str(out), "--overwrite"])
    assert sorted(f.name for f in out.iterdir()) == ["model.safetensors"]
    assert not load_model(out).config.tie_embeddings

    assert "holds what is being converted" in error_of("fold", folder, "-o", folder, "--overwrite")
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["thesis.tex"], "holds other files than a model's, such as thesis.tex"),
        (["model.safetensors", "config.json", "README.md"], "such as README.md"),
        (["model.safetensors", "config.json", "vocab.json"], "such as vocab.json"),
        (["model.safetensors", "config.json", ".git/HEAD"], "such as .git"),
        (["model.safetensors", "config.json/notes"], "such as config.json"),
        (["config.json"], "holds other files than a model's, such as config.json"),
        (
            ["model.safetensors", "manifest.json", "trainer.pt"],
            "is a checkpoint, which no conversion replaces",
        ),
        (["config.toml", "checkpoints/latest/model.safetensors"], "is a run, which no conversion replaces"),
        (["checkpoints/step_00000001/trainer.pt"], "is a run, which no conversion replaces"),
    ],
)
@pytest.mark.parametrize("command", ["from-nanogpt", "to-hf", "fold"])
def test_no_command_takes_a_folder_that_holds_more_than_it_writes(
    command, files, says, flags, folder, tmp_path
):
    for name in files:
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text("years of work")
    assert says in error_of(command, folder, "-o", tmp_path / "mine", *flags)
    held = [f for f in (tmp_path / "mine").rglob("*") if f.is_file()]
    assert sorted(str(f.relative_to(tmp_path / "mine")) for f in held) == sorted(files)
    assert {f.read_text() for f in held} == {"years of work"}


def test_a_file_that_comes_while_a_model_is_converted_is_kept(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    convert.main(["fold", str(folder), "-o", str(out)])
    save = convert.save

    def slow(*args):
        save(*args)
        (out / "README.md").write_text("a model card")

    monkeypatch.setattr(convert, "save", slow)
    assert "such as README.md" in error_of("ln-to-rms", folder, "-o", out, "--overwrite")
    assert sorted(f.name for f in out.iterdir()) == ["README.md", "model.safetensors"]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["ours", "out"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_what_is_written_is_as_readable_as_any_other_file(umask, mode, folder, tmp_path):
    before = os.umask(umask)
    try:
        convert.main(["to-hf", str(folder), "-o", str(tmp_path / "hf")])
        convert.main(["fold", str(folder), "-o", str(tmp_path / "folded")])
    finally:
        os.umask(before)
    for file in (*(tmp_path / "hf").iterdir(), *(tmp_path / "folded").iterdir()):
        assert stat.S_IMODE(file.stat().st_mode) == mode, file


def test_a_link_to_the_folder_stays_one(folder, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    for flags in ([], ["--overwrite"], ["--overwrite"]):
        convert.main(["fold", str(folder), "-o", str(tmp_path / "out"), *flags])
        assert os.readlink(tmp_path / "out") == "disk"
        assert sorted(f.name for f in tmp_path.iterdir()) == ["disk", "ours", "out"]
    load_model(tmp_path / "disk")


def test_the_folder_one_stands_in_can_be_written(folder, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert.main(["fold", str(folder), "-o", "."])
    load_model(tmp_path / "here")


def test_a_write_that_fails_leaves_nothing_behind_and_what_was_there(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    convert.main(["fold", str(folder), "-o", str(out)])
    before = (out / "model.safetensors").read_bytes()

    def full(path, *_):
        (path / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "save_model", full)
    message = error_of("ln-to-rms", folder, "-o", out, "--overwrite")
    assert "cannot be written: No space left on device" in message
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(f.name for f in tmp_path.iterdir()) == ["ours", "out"]


@pytest.mark.parametrize("command", ["to-hf", "fold", "ln-to-rms"])
@pytest.mark.parametrize("size", [0, 5000])
def test_a_full_disk_is_one_sentence_and_costs_nothing(command, size, folder, tmp_path, full_disk):
    out = tmp_path / "out"
    convert.main(["fold", str(folder), "-o", str(out)])
    before = (out / "model.safetensors").read_bytes()
    assert len(before) > 5000
    full_disk(size)
    said = error_of(command, folder, "-o", out, "--overwrite")
    full_disk()
    assert f"{out} cannot be written: " in said
    assert "None" not in said
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(f.name for f in tmp_path.iterdir()) == ["ours", "out"]


def test_a_disk_that_fails_at_the_last_moment_costs_nothing(folder, tmp_path, monkeypatch):
    """When the old folder has already made room for the new one."""
    out = tmp_path / "out"
    convert.main(["fold", str(folder), "-o", str(out)])
    before = (out / "model.safetensors").read_bytes()

    def fails(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "sync", fails)
    said = error_of("ln-to-rms", folder, "-o", out, "--overwrite")
    assert f"{out} cannot be written: Input/output error" in said
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(f.name for f in tmp_path.iterdir()) == ["ours", "out"]


def test_fold_and_ln_to_rms_from_the_command_line_keep_logits_and_say_what_they_did(folder, tmp_path, capsys):
    tokens = torch.randint(23, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = load_model(folder)(tokens)[0]
    for command, words in (
        ("fold", "folded entry into branches.0.qkv"),
        ("ln-to-rms", "onto the vectors of mean zero"),
    ):
        convert.main([command, str(folder), "-o", str(tmp_path / command)])
        assert words in capsys.readouterr().out
        assert (load_model(tmp_path / command)(tokens)[0] - expected).abs().max() <= 1e-5
    assert load_model(tmp_path / "ln-to-rms").config.norm == "rmsnorm"
    assert "placement is post" in error_of_post(tmp_path)


def error_of_post(tmp_path) -> str:
    model = build(placement="post")
    (tmp_path / "post").mkdir()
    save_model(tmp_path / "post", model_weights(model), about(model, None))
    return error_of("fold", tmp_path / "post", "-o", tmp_path / "folded")

"""tools.convert refuses what holds no model, or one of other types and sizes, in one sentence."""

import json

import pytest
import torch
from convert_cases import LLAMA, SMALL, error_of, nanogpt_checkpoint
from safetensors.torch import save_file

from model import ModelConfig
from tools.families import FAMILIES
from tools.interchange import their_config
from tools.vocabulary import recognize


def test_folders_that_hold_no_model_are_refused_in_one_sentence(tmp_path):
    (tmp_path / "hf").mkdir()
    command = ("from-hf", tmp_path / "hf", "-o", tmp_path / "ours")
    assert "config.json does not exist" in error_of(*command)
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "mamba"}')
    assert "model_type is 'mamba'; the families that convert are gpt2, llama" in error_of(*command)
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"nonsense")
    assert "model.safetensors cannot be read" in error_of(*command)
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "hf" / "model.safetensors")
    assert "config.json of a llama model lacks num_hidden_layers" in error_of(*command)
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps(their_config(FAMILIES["llama"], ModelConfig(**SMALL | LLAMA)))
    )
    assert "lacks the weight embed_tokens.weight" in error_of(*command)
    assert not (tmp_path / "ours").exists()


CONFIG = their_config(FAMILIES["llama"], ModelConfig(**SMALL | LLAMA))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([], "config.json holds no JSON object, but []"),
        (5, "config.json holds no JSON object, but 5"),
        ({"model_type": ["x"]}, "model_type is ['x']; the families that convert are gpt2, llama"),
        ({"model_type": {}}, "model_type is {}; the families"),
        (CONFIG | {"hidden_act": ["silu"]}, "hidden_act is ['silu']; what llama converts with is silu"),
        (CONFIG | {"rope_parameters": 5}, "rope_parameters is 5, but it is an object"),
        (CONFIG | {"mlp_bias": "no"}, "mlp_bias is 'no', but it is true or false"),
        (CONFIG | {"vocab_size": 0}, "vocab_size is 0; it must be positive"),
        (CONFIG | {"num_hidden_layers": 99_999}, "n_layer is 99999, but there are only 3 weights"),
        (CONFIG | {"hidden_size": 2**62}, f"n_embd is {2**62}; it must be below {2**31}"),
        (
            CONFIG | {"num_hidden_layers": 1},
            "weights that are no rows: layers.0.self_attn.q_proj.weight (16,",
        ),
    ],
)
def test_a_config_json_of_other_types_and_sizes_is_one_sentence(config, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {"embed_tokens.weight": torch.ones(23, 16), "layers.0.input_layernorm.weight": torch.ones(16)}
    if config == CONFIG | {"num_hidden_layers": 1}:
        weights |= {f"layers.0.self_attn.{n}_proj.weight": torch.ones(16, *[16] * (n == "q")) for n in "qkv"}
    else:
        weights["norm.weight"] = torch.ones(16)
    save_file(weights, tmp_path / "model.safetensors")
    assert says in error_of("from-hf", tmp_path, "-o", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ([], "model.safetensors.index.json holds no JSON object, but []"),
        ({}, "has no weight_map that gives the file of each weight"),
        ({"weight_map": {"a": 5}}, "has no weight_map that gives the file of each weight"),
        ({"weight_map": [1]}, "has no weight_map that gives the file of each weight"),
        ({"weight_map": {"a": "\0"}}, "does not exist; weights are read from safetensors only"),
    ],
)
def test_an_index_that_names_no_files_is_one_sentence(index, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert says in error_of("from-hf", tmp_path, "-o", tmp_path / "ours")


def test_a_tokenizer_json_of_another_shape_is_none_that_is_known(tmp_path):
    for text in ("[]", "5", '{"added_tokens": 5}', "[" * 100_000):
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        assert recognize(tmp_path) == (None, "it has no tokenizer file that lists a vocabulary")


def test_a_ckpt_whose_weights_are_no_tensors_is_refused(tmp_path):
    torch.save(nanogpt_checkpoint(bias=False) | {"model": {"a": "b"}}, tmp_path / "ckpt.pt")
    said = error_of("from-nanogpt", tmp_path / "ckpt.pt", "-o", tmp_path / "ours")
    assert "is not nanoGPT's ckpt.pt (TypeError)" in said


def test_a_name_that_is_no_folder_is_looked_up_on_the_hub_and_says_so_without_one(tmp_path, monkeypatch):
    asked = []

    def unreachable(name, **how):
        asked.append(name)
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    message = error_of("from-hf", "openai-community/gpt2", "-o", tmp_path / "ours")
    assert asked == ["openai-community/gpt2"]
    assert (
        "is no folder here, and the Hugging Face hub gave no model of that name (ConnectionError)" in message
    )
    assert "neither a folder nor the name of" in error_of("from-hf", "/no/where", "-o", tmp_path / "ours")

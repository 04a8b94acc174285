"""The same weights in transformers and here: logits, gradients, text, and nothing left over on either side."""

import json
import logging
import math
import shlex

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from convert_cases import LLAMA as OUR_LLAMA
from safetensors.torch import load_file, save_file

import train
from base.cli import UserError
from data import prepare
from data.tokenizer import load_tokenizer, tokenizer_meta
from model import GPT, ModelConfig
from tools import convert, evaluate, sample
from tools.families import FAMILIES
from tools.interchange import their_weights
from tools.vocabulary import json_bytes, recognize, token_bytes, tokenizer_files
from training.checkpoint import about, load_model, model_weights, read_about, read_model, save_model

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers reads a tokenizer.json, and is an extra")
transformers = pytest.importorskip("transformers", reason="transformers is an extra of development only")

TEXT = "to be, or not to be, that is the question: été\n"
LENGTHS = (1, 7, 32)
LLAMA = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
WIDE = LLAMA | {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 0}
GPT2 |= {"eos_token_id": 0}
NO_PAD = {"pad_token_id": None}  # transformers gives the embedding of a padding token no gradient

THEIRS = {
    "gpt2 small": ("gpt2", GPT2),
    "gpt2 wide, untied, exact gelu": (
        "gpt2",
        GPT2
        | {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 100, "activation_function": "gelu"}
        | {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    ),
    "llama small": ("llama", LLAMA),
    "llama wide, grouped, tied, all biases, long wavelengths": (
        "llama",
        WIDE
        | {"num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    "llama head_dim, attention's biases": ("llama", LLAMA | {"head_dim": 12, "attention_bias": True}),
    "qwen3 small, grouped": ("qwen3", LLAMA | {"num_key_value_heads": 1, "head_dim": 8}),
    "qwen3 wide, tied, biases": (
        "qwen3",
        WIDE
        | {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 3},
    ),
    "gemma small, grouped": ("gemma", LLAMA | NO_PAD | {"num_key_value_heads": 1, "head_dim": 12}),
    "gemma wide, untied, biases": (
        "gemma",
        WIDE
        | NO_PAD
        | {"head_dim": 10, "num_key_value_heads": 2, "tie_word_embeddings": False, "attention_bias": True},
    ),
    "olmo2 small": ("olmo2", LLAMA | NO_PAD),
    "olmo2 wide, grouped, tied, biases": (
        "olmo2",
        WIDE | NO_PAD | {"num_key_value_heads": 3, "tie_word_embeddings": True, "attention_bias": True},
    ),
}
OUR_GEMMA = OUR_LLAMA | {"mlp": "geglu", "gain": "zero_centred", "embed_scale": "sqrt_dim"}
OURS = {
    "gpt2": {"bias": True},
    "gpt2 without biases, untied": {"bias": False, "tie_embeddings": False, "mlp": "gelu"},
    "llama": OUR_LLAMA,
    "llama grouped, biases, untied": OUR_LLAMA
    | {"bias": True, "n_kv_head": 2, "rope_theta": 1e5, "tie_embeddings": False}
    | {"head_dim": 12, "norm_eps": 1e-4},
    "qwen3": OUR_LLAMA | {"qk_norm": "head"},
    "qwen3 uneven heads, grouped, untied": OUR_LLAMA
    | {"qk_norm": "head", "n_embd": 30, "head_dim": 8, "n_kv_head": 1}
    | {"tie_embeddings": False, "mlp_hidden": 40},
    "gemma": OUR_GEMMA | {"placement": "pre*4"},
    "gemma grouped, untied": OUR_GEMMA | {"n_kv_head": 2, "head_dim": 6, "tie_embeddings": False},
    "olmo2": OUR_LLAMA | {"qk_norm": "full", "placement": "attn:output mlp:output"},
    "olmo2 grouped, untied": OUR_LLAMA
    | {"qk_norm": "full", "placement": "output", "n_kv_head": 2, "tie_embeddings": False},
}
SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 32, "vocab_size": 61}


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter moved off its initialization, gains and biases too; evaluation mode."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p += (0.05 if p.dim() == 2 else 0.3) * torch.randn(p.shape, generator=generator)
    return model.eval()


def theirs_of(name: str):
    family, values = THEIRS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **values)
    return randomize(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.fixture(scope="module", params=THEIRS)
def pair(request, tmp_path_factory):
    """(model of transformers, ours after from-hf, the folder of theirs, the folder of ours)."""
    theirs, folder = theirs_of(request.param), tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder / "hf")
    convert.main(["from-hf", str(folder / "hf"), "-o", str(folder / "ours")])
    return theirs, load_model(folder / "ours"), folder / "hf", folder / "ours"


def tokens(time: int, vocab_size: int = 61) -> torch.Tensor:
    return torch.randint(vocab_size, (3, time), generator=torch.Generator().manual_seed(time))


def assert_same_logits(theirs, ours, tolerance: float = 1e-5):
    for time in LENGTHS:
        with torch.no_grad():
            expected, found = theirs(tokens(time)).logits, ours(tokens(time))[0]
        assert expected.std() > 0.05, "logits that hardly differ prove nothing"
        assert (found - expected).abs().max() <= tolerance


def test_from_hf_gives_the_same_logits(pair):
    theirs, ours, _, _ = pair
    assert_same_logits(theirs, ours)


def test_gradients_of_the_loss_agree(pair):
    theirs, ours, _, _ = pair
    family, targets = FAMILIES[theirs.config.model_type], tokens(32).roll(1, 0)
    F.cross_entropy(theirs(tokens(32)).logits.flatten(0, 1), targets.flatten()).backward()
    ours(tokens(32), targets)[1].backward()
    grads = {name: p.grad for name, p in ours.named_parameters()}
    if "{mlp}" not in family.biased:  # biases of ours that stand for none of theirs
        grads = {n: g for n, g in grads.items() if not n.endswith(("up.bias", "gate.bias", "down.bias"))}
    found = their_weights(family, ours.config, grads)
    largest = max(p.grad.abs().max() for p in theirs.parameters())
    for name, p in theirs.named_parameters():
        scale = max(p.grad.abs().max(), largest / 100)  # float32 rounds what cancels by what it was made of
        assert (found[name] - p.grad).abs().max() <= 1e-4 * scale, name
    theirs.zero_grad(), ours.zero_grad()


def test_back_again_every_weight_is_bit_for_bit_the_same(pair, tmp_path):
    theirs, _, _, ours = pair
    convert.main(["to-hf", str(ours), "-o", str(tmp_path / "back")])
    back, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    weights = back.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert_same_logits(theirs, load_model(ours))


@pytest.fixture(params=OURS)
def exported(request, tmp_path):
    """(our model, the folder that to-hf has made of it)."""
    torch.manual_seed(0)
    model = randomize(GPT(ModelConfig(**SMALL | OURS[request.param])))
    (tmp_path / "ours").mkdir()
    save_model(tmp_path / "ours", model_weights(model), about(model, None))
    convert.main(["to-hf", str(tmp_path / "ours"), "-o", str(tmp_path / "hf")])
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == request.param.split()[0]
    return model, tmp_path / "hf"


def test_transformers_loads_what_to_hf_writes_without_a_word_and_agrees(exported, caplog):
    ours, folder = exported
    transformers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    transformers.utils.logging.disable_propagation()
    assert not any(
        info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    )
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert theirs.dtype == torch.float32
    assert_same_logits(theirs, ours)


def test_shards_and_bfloat16_come_in_as_float32(tmp_path):
    theirs = theirs_of("qwen3 small, grouped").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    convert.main(["from-hf", str(tmp_path / "hf"), "-o", str(tmp_path / "ours")])
    ours = load_model(tmp_path / "ours")
    assert {t.dtype for t in read_model(tmp_path / "ours")[0].values()} == {torch.float32}
    widened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert_same_logits(widened, ours)


def test_the_bare_names_and_mask_buffers_of_old_gpt2_files_are_understood(tmp_path):
    """openai-community/gpt2 has no prefix, and holds each layer's causal mask; a wrapper may have left its name."""
    theirs, file = theirs_of("gpt2 small"), tmp_path / "hf" / "model.safetensors"
    theirs.save_pretrained(tmp_path / "hf")
    weights = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    assert "wte.weight" in weights
    weights |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    wrapped = {
        f"module.{n.replace('h.1.', 'h.1._orig_mod.')}": t
        for n, t in theirs_of("gpt2 small").state_dict().items()
    }
    del wrapped["module.lm_head.weight"]
    for held in (weights, wrapped):
        save_file(held, file)
        convert.main(["from-hf", str(tmp_path / "hf"), "-o", str(tmp_path / "ours"), "--overwrite"])
        assert_same_logits(theirs, load_model(tmp_path / "ours"))


@pytest.mark.parametrize("name", ["llama wide, grouped, tied, all biases, long wavelengths", "gpt2 small"])
@pytest.mark.parametrize("held", ["another head", "the head alone", "both"])
def test_what_is_tied_is_what_the_weights_say(name, held, tmp_path):
    """A head of its own under a tied flag, or one matrix under either of its names."""
    theirs, folder = theirs_of(name), tmp_path / "hf"
    theirs.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    embed = next(n for n in weights if n.endswith(("wte.weight", "embed_tokens.weight")))
    weights["module.lm_head.weight"] = weights[embed].clone()
    if held == "another head":
        weights["module.lm_head.weight"] += 1
        theirs.lm_head.weight = torch.nn.Parameter(weights["module.lm_head.weight"])
    elif held == "the head alone":
        del weights[embed]
    save_file(weights, folder / "model.safetensors")
    convert.main(["from-hf", str(folder), "-o", str(tmp_path / "ours")])
    ours = load_model(tmp_path / "ours")
    assert ours.config.tie_embeddings == (held != "another head")
    assert_same_logits(theirs, ours, 1e-4)


def test_rope_theta_is_read_where_transformers_4_wrote_it(tmp_path):
    theirs = theirs_of("llama wide, grouped, tied, all biases, long wavelengths")
    theirs.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    convert.main(["from-hf", str(tmp_path / "hf"), "-o", str(tmp_path / "ours")])
    assert load_model(tmp_path / "ours").config.rope_theta == 500000.0
    assert_same_logits(theirs, load_model(tmp_path / "ours"))


# ---- text: a model trained here speaks the same through transformers

RECIPE = """
[model]
n_layer = 2
n_head = 2
n_embd = 32
block_size = 64
{model}
[optim]
max_iters = 60
batch_size = 8
lr = 1e-2
min_lr = 1e-3
warmup_iters = 5
[run]
eval_interval = 60
log_interval = 60
eval_tokens = 512
wandb = "disabled"
device = "cpu"
out_dir = '{folder}'
[data]
dataset = '{folder}/bard'
"""
QWEN3 = 'norm = "rmsnorm"\npos = "rope"\nmlp = "swiglu"\nbias = false\nqk_norm = "head"'


@pytest.mark.parametrize(("tokenizer", "model"), [("byte", ""), ("char", QWEN3)], ids=["gpt2", "qwen3"])
def test_a_model_trained_here_continues_a_prompt_alike_on_both_sides(tokenizer, model, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT * 300, encoding="utf-8")
    prepared = ["text", "--name", "bard", "--files", str(tmp_path / "text.txt"), "--tokenizer", tokenizer]
    prepare.main([*prepared, "--data-dir", str(tmp_path)])
    (tmp_path / "run.toml").write_text(RECIPE.format(model=model, folder=tmp_path), encoding="utf-8")
    train.main([str(tmp_path / "run.toml")])
    capsys.readouterr()
    sample.main([str(tmp_path / "run"), "--prompt", "that is", "--tokens", "40", "--temperature", "0"])
    expected = capsys.readouterr().out.removesuffix("\n")
    assert len(set(expected)) > 5, "the model says nothing, which proves nothing"

    convert.main(["to-hf", str(tmp_path / "run"), "-o", str(tmp_path / "hf")])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = words("that is", return_tensors="pt")
    found = model.generate(**ids, max_new_tokens=40, min_new_tokens=40, do_sample=False)
    assert words.decode(found[0]) == expected


@pytest.mark.parametrize("text", ["été, naïve 北京 \t\n  two  spaces", "don't  I'll \x00\x7f"])
def test_the_byte_tokenizer_means_the_same_in_transformers(text, tmp_path):
    ours = load_tokenizer({"name": "byte"})
    for name, body in tokenizer_files(ours, 64).items():
        (tmp_path / name).write_text(body, encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.separator
    assert recognize(tmp_path) == ({"name": "byte"}, "")


@pytest.fixture(scope="module")
def llama_with_words(tmp_path_factory):
    """A Llama model of transformers with a byte-level vocabulary of its own, its separator a token of that."""
    folder, words = tmp_path_factory.mktemp("words"), tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"]
    )
    words.train_from_iterator([TEXT] * 20, trainer)
    (folder / "hf").mkdir()
    words.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "hf" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"})
    )
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **LLAMA | {"vocab_size": 304, "bos_token_id": 0})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "hf")
    return folder


def test_a_llama_is_finetuned_on_text_by_its_own_tokenizer(llama_with_words, capsys):
    """By the two commands that the conversion prints; and back, with the tokenizer."""
    folder = llama_with_words
    convert.main(["from-hf", str(folder / "hf"), "-o", str(folder / "ours")])
    *_, prepare_line, train_line = capsys.readouterr().out.splitlines()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / "ours" / name).read_bytes() == (folder / "hf" / name).read_bytes()
    (folder / "text.txt").write_text(TEXT * 300, encoding="utf-8")
    made = shlex.split(prepare_line.partition("ids: ")[2].replace("TEXT", str(folder / "text.txt")))
    prepare.main([*made[3:], "--data-dir", str(folder)])
    words = shlex.split(train_line.partition("recipe: ")[2].replace("YOURS", str(folder / "YOURS")))
    rest = f"--max-iters 30 --lr 1e-2 --warmup-iters 0 --batch-size 8 --eval-tokens 500 --out-dir {folder}"
    train.main([*words[2:], *rest.split(), "--wandb", "disabled", "--device", "cpu"])
    assert "does not say what its token ids mean" not in capsys.readouterr().out
    run = str(folder / "quickstart")

    sample.main([run, "--prompt", "that is", "--tokens", "20", "--temperature", "0", "--device", "cpu"])
    said = capsys.readouterr().out.removesuffix("\n")
    evaluate.main([run, "--dataset", str(folder / "YOURS"), "--device", "cpu", "--json"])
    [numbers] = json.loads(capsys.readouterr().out)["runs"]
    size = len(TEXT.encode()) / len(load_tokenizer(read_about(folder / "ours")["tokenizer"]).encode(TEXT))
    assert numbers["bits_per_byte"] == pytest.approx(numbers["loss"] / math.log(2) / size, rel=0.1)
    assert numbers["loss"] < 3

    convert.main(["to-hf", run, "-o", str(folder / "back")])
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "back")
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|end|>", 0)
    ids = theirs("that is", return_tensors="pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "back")
    found = model.generate(**ids, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    assert theirs.decode(found[0]) == said


def test_data_of_another_tokenizer_do_not_finetune_it(llama_with_words, tmp_path, capsys):
    convert.main(["from-hf", str(llama_with_words / "hf"), "-o", str(tmp_path / "ours")])
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("recipe: ")[2])
    words = [word for word in words if word not in ("--dataset", "YOURS")]
    with pytest.raises(UserError, match="was trained on ids of another tokenizer"):
        train.main([*words[2:], "--device", "cpu", "--out-dir", str(tmp_path), "--max-iters", "200"])


def test_the_bytes_that_the_ids_of_a_tokenizer_json_write(llama_with_words):
    """Byte-level, and SentencePiece's spelling with a fall-back to bytes."""
    meta = tokenizer_meta(str(llama_with_words / "hf"))
    level, text = load_tokenizer(meta), "été, naïve 北京 the question"
    assert token_bytes(level)[level.encode(text)].sum() == len(text.encode())
    assert token_bytes(level)[0] == 0
    body = json.loads(meta["json"])
    body["model"]["vocab"] = {"<0x0A>": 0, "\u2581the": 1, "é": 2, "</s>": 3}
    body["added_tokens"] = [{"content": "</s>", "id": 3, "special": True}]
    body["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    assert json_bytes(body, np.zeros(4, np.int64)).tolist() == [1, 4, 2, 0]
    assert json_bytes(body | {"decoder": {"type": "WordPiece"}}, np.zeros(4, np.int64)) is None

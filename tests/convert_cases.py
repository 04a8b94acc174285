"""A small model of ours, nanoGPT's checkpoint of one, and what a mistaken conversion prints."""

import pytest
import torch

from base.cli import UserError
from model import GPT, ModelConfig
from tools import convert

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "vocab_size": 23}
LLAMA = {"norm": "rmsnorm", "pos": "rope", "mlp": "swiglu", "bias": False}


def build(**switches) -> GPT:
    """Random weights, gains and biases."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(**SMALL | switches)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
    return model


def error_of(*argv) -> str:
    """The sentence by which a command refuses."""
    with pytest.raises(UserError) as refused:
        convert.main([str(a) for a in argv])
    assert "\n" not in str(refused.value)
    return str(refused.value)


def nanogpt_checkpoint(bias: bool) -> dict:
    """What nanoGPT saves, compiled, with an optimizer beside the weights."""
    width, weights = 16, {}

    def add(name, *shape, biased=True):
        weights[f"{name}.weight"] = 0.3 * torch.randn(shape) + (len(shape) == 1)
        if bias and biased:
            weights[f"{name}.bias"] = 0.3 * torch.randn(shape[0])

    torch.manual_seed(0)
    add("transformer.wte", 23, width, biased=False)
    add("transformer.wpe", 12, width, biased=False)
    for i in range(2):
        for name in ("ln_1", "ln_2"):
            add(f"transformer.h.{i}.{name}", width)
        add(f"transformer.h.{i}.attn.c_attn", 3 * width, width)
        add(f"transformer.h.{i}.attn.c_proj", width, width)
        add(f"transformer.h.{i}.mlp.c_fc", 4 * width, width)
        add(f"transformer.h.{i}.mlp.c_proj", width, 4 * width)
    add("transformer.ln_f", width)
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    args = {"n_layer": 2, "n_head": 2, "n_embd": width, "block_size": 12, "bias": bias, "vocab_size": 23}
    optimizer = {
        "state": {0: {"step": torch.tensor(3.0)}},
        "param_groups": [{"lr": 6e-4, "betas": (0.9, 0.95)}],
    }
    return {
        "model": {f"_orig_mod.{name}": t for name, t in weights.items()},
        "optimizer": optimizer,
        "model_args": args | {"dropout": 0.1},
        "iter_num": 3,
        "best_val_loss": torch.tensor(3.2),
        "config": {"dataset": "shakespeare_char", "compile": True},
    }

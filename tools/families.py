"""How other projects spell our models: one table per family of transformers' models, and nanoGPT's.

A family is a point among our switches (`layout`), a table from our fields to those of its config.json, and a table
from our modules to its own. tools/interchange.py reads the tables in both directions.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from model import ModelConfig


@dataclass(frozen=True)
class Family:
    """How one of transformers' model types spells what we can express.

    In `modules` a name holds {attn}, {mlp}: a layer's branches; {attn_in}, {mlp_in}: the norms that these read
    through; {attn_out}, {mlp_out}: the norms on what they add; {final}: the norm before the head. Several names
    on the right are rows of one matrix on the left.
    """

    name: str
    architecture: str
    layout: dict[str, Any]
    """Our switches, all of which must have these values."""
    fields: dict[str, str]
    """Our field to theirs."""
    defaults: dict[str, Any]
    """What a config.json that leaves one of `fields` out means by it; the others must be given."""
    activation: tuple[str, dict[str, str]]
    """Their field, and its values to those of our `mlp`."""
    only: dict[str, tuple]
    """Their fields of which we can express these values alone; the first is assumed where one is missing."""
    modules: dict[str, str]
    prefix: str
    """What their names begin with, except the head's."""
    biased: dict[str, str | bool]
    """The modules that may have biases, to the field that says whether they do (True: always)."""
    constants: dict[str, Any] = field(default_factory=dict)
    """What else goes into config.json."""
    transposed: bool = False
    """The matrices of branches are stored [in, out]."""
    even_heads: bool = False
    """n_embd must be a multiple of n_head although head_dim is given."""


COMMON_ONLY = {"quantization_config": (None,)}
ROPE_ONLY = {
    "rope_scaling": (None, {}, {"type": "default"}, {"rope_type": "default"}),
    "rope_parameters.type": (None, "default"),
    "rope_parameters.rope_type": (None, "default"),
    "rope_parameters.partial_rotary_factor": (None, 1.0),
    "partial_rotary_factor": (None, 1.0),
}
THETA = 10000.0  # of the families below where config.json does not say

GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    layout={"norm": "layernorm", "placement": "pre", "qk_norm": "off", "pos": "learned"},
    fields={
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "block_size": "n_positions",
        "vocab_size": "vocab_size",
        "norm_eps": "layer_norm_epsilon",
        "mlp_hidden": "n_inner",
        "tie_embeddings": "tie_word_embeddings",
    },
    defaults={"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    activation=(
        "activation_function",
        {"gelu_new": "gelu_tanh", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"},
    ),
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    modules={
        "embed": "wte",
        "pos_embed": "wpe",
        "{attn_in}": "h.{layer}.ln_1",
        "{attn}.qkv": "h.{layer}.attn.c_attn",
        "{attn}.out": "h.{layer}.attn.c_proj",
        "{mlp_in}": "h.{layer}.ln_2",
        "{mlp}.up": "h.{layer}.mlp.c_fc",
        "{mlp}.down": "h.{layer}.mlp.c_proj",
        "{final}": "ln_f",
        "head": "lm_head",
    },
    prefix="transformer.",
    biased=dict.fromkeys(("{attn_in}", "{attn}", "{mlp_in}", "{mlp}", "{final}"), True),
    constants={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    transposed=True,
)

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    layout={"norm": "rmsnorm", "placement": "pre", "qk_norm": "off", "pos": "rope"},
    fields={
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_kv_head": "num_key_value_heads",
        "n_embd": "hidden_size",
        "head_dim": "head_dim",
        "block_size": "max_position_embeddings",
        "vocab_size": "vocab_size",
        "norm_eps": "rms_norm_eps",
        "rope_theta": "rope_parameters.rope_theta",
        "mlp_hidden": "intermediate_size",
        "tie_embeddings": "tie_word_embeddings",
    },
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "rope_parameters.rope_theta": THETA,
        "tie_word_embeddings": False,
    },
    activation=("hidden_act", {"silu": "swiglu", "swish": "swiglu"}),
    only=ROPE_ONLY,
    modules={
        "embed": "embed_tokens",
        "{attn_in}": "layers.{layer}.input_layernorm",
        "{attn}.qkv": "layers.{layer}.self_attn.q_proj "
        "layers.{layer}.self_attn.k_proj "
        "layers.{layer}.self_attn.v_proj",
        "{attn}.out": "layers.{layer}.self_attn.o_proj",
        "{mlp_in}": "layers.{layer}.post_attention_layernorm",
        "{mlp}.gate": "layers.{layer}.mlp.gate_proj",
        "{mlp}.up": "layers.{layer}.mlp.up_proj",
        "{mlp}.down": "layers.{layer}.mlp.down_proj",
        "{final}": "norm",
        "head": "lm_head",
    },
    prefix="model.",
    biased={"{attn}": "attention_bias", "{mlp}": "mlp_bias"},
    even_heads=True,
)
QK_NORMS = {
    "{attn}.q_norm": "layers.{layer}.self_attn.q_norm",
    "{attn}.k_norm": "layers.{layer}.self_attn.k_norm",
}

QWEN3 = dataclasses.replace(
    LLAMA,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    layout=LLAMA.layout | {"qk_norm": "head"},
    defaults=LLAMA.defaults | {"head_dim": 128},
    only=ROPE_ONLY | {"use_sliding_window": (False,), "layer_types": (None, "full_attention")},
    modules=LLAMA.modules | QK_NORMS,
    biased={"{attn}": "attention_bias"},
    even_heads=False,
)

OLMO2 = dataclasses.replace(
    QWEN3,
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    layout=LLAMA.layout | {"placement": "output", "qk_norm": "full"},
    defaults=LLAMA.defaults | {"rms_norm_eps": 1e-5},
    only=ROPE_ONLY,
    modules={ours: theirs for ours, theirs in QWEN3.modules.items() if ours not in ("{attn_in}", "{mlp_in}")}
    | {
        "{attn_out}": "layers.{layer}.post_attention_layernorm",
        "{mlp_out}": "layers.{layer}.post_feedforward_layernorm",
    },
)

GEMMA = dataclasses.replace(
    LLAMA,
    name="gemma",
    architecture="GemmaForCausalLM",
    layout=LLAMA.layout | {"gain": "zero_centred", "embed_scale": "sqrt_dim"},
    defaults=LLAMA.defaults | {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    activation=("hidden_act", {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}),  # both mean the tanh form
    only=ROPE_ONLY
    | {"hidden_activation": (None, "gelu_pytorch_tanh"), "use_bidirectional_attention": (None, False)},
    biased={"{attn}": "attention_bias"},
    even_heads=False,
)

FAMILIES = {family.name: family for family in (GPT2, LLAMA, QWEN3, OLMO2, GEMMA)}

# nanoGPT's own files: GPT-2 with ordinary linears, and biases or none. The family is read, never written.
NANOGPT = dataclasses.replace(
    GPT2, name="nanogpt", biased=dict.fromkeys(GPT2.biased, "bias"), transposed=False
)


def modules(family: Family, config: ModelConfig) -> Iterator[tuple[str, str, list[str]]]:
    """(name in the table, our module, their modules without prefix) of every module with weights."""
    last = 2 * config.n_layer - 1
    for ours, theirs in family.modules.items():
        if ours == "head" and config.tie_embeddings:
            continue
        for layer in range(config.n_layer if "{layer}" in theirs else 1):
            attn, mlp = 2 * layer, 2 * layer + 1
            place = ours.format(
                attn=f"branches.{attn}",
                mlp=f"branches.{mlp}",
                attn_in=f"joins.{attn - 1}.next_norm" if layer else "entry",
                mlp_in=f"joins.{attn}.next_norm",
                attn_out=f"joins.{attn}.out_norm",
                mlp_out=f"joins.{mlp}.out_norm",
                final=f"joins.{last}.next_norm",
            )
            yield ours, place, theirs.format(layer=layer).split()

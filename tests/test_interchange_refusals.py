"""What neither side can express is refused by the field or the weight that stands in the way."""

import pytest
import torch

from base.cli import UserError
from model import GPT, PLACEMENTS, ModelConfig
from tools.families import FAMILIES
from tools.interchange import family_for, our_config, our_weights, their_config, their_weights
from training.checkpoint import model_weights

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "vocab_size": 23}
LLAMA = {"norm": "rmsnorm", "pos": "rope", "mlp": "swiglu", "bias": False}

# ---- what comes in


def config_json(family: str) -> dict:
    switches = {"gpt2": {}, "llama": LLAMA, "qwen3": LLAMA | {"qk_norm": "head"}}
    switches["gemma"] = LLAMA | {"mlp": "geglu", "gain": "zero_centred", "embed_scale": "sqrt_dim"}
    switches["olmo2"] = LLAMA | {"qk_norm": "full", "placement": "output"}
    return their_config(FAMILIES[family], ModelConfig(**SMALL | switches[family]))


REFUSED_IN = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling is"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        "rope_parameters.rope_type is 'yarn'",
    ),
    ("llama", {"rope_theta": 5e5}, "rope_theta is 500000.0, and 10000.0 in rope_parameters"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
    ("olmo2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters.rope_type is"),
    ("olmo2", {"num_attention_heads": 3, "head_dim": 5}, "n_head 3 is not a multiple of n_kv_head 2"),
    ("llama", {"hidden_size": None}, "n_embd is None"),
    ("gemma", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
]


@pytest.mark.parametrize(("family", "change", "reason"), REFUSED_IN)
def test_what_we_cannot_express_is_refused_by_its_field(family, change, reason):
    theirs = config_json(family)
    our_config(FAMILIES[family], theirs)
    with pytest.raises(UserError) as refused:
        our_config(FAMILIES[family], theirs | change)
    assert reason in str(refused.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_weight_too_few_or_too_many_is_named(family):
    theirs = config_json(family)
    config = our_config(FAMILIES[family], theirs)
    weights = their_weights(FAMILIES[family], config, model_weights(GPT(config)))
    our_weights(FAMILIES[family], config, theirs, weights)
    name = next(n for n in weights if "1.mlp" in n)
    with pytest.raises(UserError, match=f"lacks the weight {name.split('.', 1)[1]}"):
        our_weights(FAMILIES[family], config, theirs, {n: t for n, t in weights.items() if n != name})
    with pytest.raises(UserError, match=r"has a weight score\.weight"):
        our_weights(FAMILIES[family], config, theirs, weights | {"score.weight": torch.ones(2, 16)})
    with pytest.raises(
        UserError, match=rf"has the weight {name.split('.', 1)[1]} twice, once as module\.{name}"
    ):
        our_weights(FAMILIES[family], config, theirs, weights | {f"module.{name}": weights[name]})
    with pytest.raises(UserError, match=rf"{name} holds torch\.int8, and weights are floating-point"):
        our_weights(FAMILIES[family], config, theirs, weights | {name: weights[name].to(torch.int8)})


# ---- what goes out

SWITCHES = [  # our value, and the one that a family without a word for the switch needs
    ("residual_scale", "lns", "one"),
    ("residual_scale", 0.5, "one"),
    ("v_norm", True, False),
    ("gain", "none", "one"),
    ("logit_softcap", 30.0, 0.0),
    ("norm", "dyt", "layernorm"),
]


@pytest.mark.parametrize(
    ("switches", "reason"),
    [
        ({"placement": "post"}, "gpt2 would if placement were pre, not post"),
        (
            {"placement": "post", "residual_scale": "deepnorm"},
            "residual_scale were one, not deepnorm",
        ),
        ({"embed_norm": True}, "embed_norm were False, not True"),
        ({"head_bias": True}, "gpt2 would if head_bias were False, not True"),
        ({"norm": "batchnorm"}, "norm were layernorm, not batchnorm"),
        ({"qk_norm": "head"}, "qk_norm were off, not head"),
        ({"n_kv_head": 1}, "n_kv_head were 2, not 1"),
        ({"head_dim": 4}, "head_dim were 8, not 4"),
        (LLAMA | {"norm": "layernorm"}, "norm were rmsnorm, not layernorm"),
        (
            LLAMA | {"qk_norm": "full"},
            "llama would if qk_norm were off, not full; qwen3 would if qk_norm were head, not full; "
            "olmo2 would if placement were output, not pre",
        ),
        (LLAMA | {"gain": "zero_centred"}, "llama would if gain were one, not zero_centred"),
        (
            LLAMA | {"mlp": "geglu", "gain": "zero_centred"},
            "gemma would if embed_scale were sqrt_dim, not 1.0",
        ),
        *(
            ({name: value}, f"gpt2 would if {name} were {were}, not {value}")
            for name, value, were in SWITCHES
        ),
        *(
            (
                LLAMA | {"placement": name, "qk_norm": "full"},
                f"olmo2 would if placement were output, not {name}",
            )
            for name in (*PLACEMENTS, "post*1 pre*3", "attn:keel mlp:none")
            if name != "output"
        ),
        (LLAMA | {"n_embd": 18, "n_head": 4, "head_dim": 4}, "n_embd were 20, not 18"),
    ],
)
def test_a_layout_that_no_family_has_is_refused_by_the_field_in_the_way(switches, reason):
    with pytest.raises(UserError) as refused:
        family_for(ModelConfig(**SMALL | switches))
    assert reason in str(refused.value)
    assert "exports any model with torch.export" in str(refused.value)


def test_a_switch_that_changes_nothing_is_no_obstacle():
    assert family_for(ModelConfig(**SMALL, rope_theta=5e5, dropout=0.1, dtype="bfloat16")).name == "gpt2"


def test_a_bias_that_the_family_lacks_is_refused_unless_it_is_zero():
    model = GPT(ModelConfig(**SMALL | LLAMA | {"qk_norm": "head", "bias": True}))
    with torch.no_grad():
        for p in model.parameters():
            p += 1
    says = r"bias: branches\.1\.\w+\.bias is not zero, and a qwen3 model has none there; train with --no-bias"
    with pytest.raises(UserError, match=says):
        their_weights(FAMILIES["qwen3"], model.config, model_weights(model))
    with torch.no_grad():
        for mlp in model.branches[1::2]:
            for linear in (mlp.up, mlp.gate, mlp.down):
                linear.bias.zero_()
    assert "model.layers.1.self_attn.q_proj.bias" in their_weights(
        FAMILIES["qwen3"], model.config, model_weights(model)
    )

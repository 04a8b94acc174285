"""The methods of the field against the textbook, their factors by hand, and that each of them acts."""

import math

import pytest
import torch
from test_model import assert_textbook, build, randomized, tokens_and_targets

from model import NORMS, SCALES, ModelConfig, Norm

L3 = range(6)  # the branches of three layers
BY_HAND = {  # a, b, c of each, from the papers' equations
    "one": [(1, 1, 1)] * 6,
    "deepnorm": [(1.5650845800732873, 1, 1)] * 6,  # 6^(1/4)
    "keel": [(6, 1, 1)] * 6,
    "lns": [
        (1, 1, c)
        for c in (1, 1, 0.7071067811865476, 0.7071067811865476, 0.5773502691896258, 0.5773502691896258)
    ],
    "depth": [  # the embedding is the first term, so that the first branch is the second
        (math.sqrt(1 / 2), math.sqrt(1 / 2), 1),
        (math.sqrt(2 / 3), math.sqrt(1 / 3), 1),
        (math.sqrt(3 / 4), math.sqrt(1 / 4), 1),
        (math.sqrt(4 / 5), math.sqrt(1 / 5), 1),
        (math.sqrt(5 / 6), math.sqrt(1 / 6), 1),
        (math.sqrt(6 / 7), math.sqrt(1 / 7), 1),
    ],
    0.22: [(1, 0.22, 1)] * 6,
}
PLACEMENT = {"deepnorm": "post", "keel": "keel"}  # others: pre


def test_factors_of_three_layers():
    assert BY_HAND.keys() - {0.22} == SCALES.keys()
    for scale, factors in BY_HAND.items():
        config = ModelConfig(n_layer=3, residual_scale=scale, placement=PLACEMENT.get(scale, "pre"))
        found = [config.factors(k) for k in L3]
        for ours, theirs in zip(found, factors, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-15), scale


METHODS = {
    "lns": {"residual_scale": "lns"},
    "lns, all norms": {"residual_scale": "lns", "placement": "all", "norm": "rmsnorm"},
    "lns without gains": {"residual_scale": "lns", "gain": "none"},
    "keel": {"residual_scale": "keel", "placement": "keel", "gain": "zero_centred"},
    "depth": {"residual_scale": "depth", "placement": "sandwich", "norm": "rmsnorm"},
    "a number": {"residual_scale": 0.22, "placement": "output"},
    "zero-centred": {"gain": "zero_centred", "placement": "all", "qk_norm": "head", "norm": "rmsnorm"},
    "no gain": {"gain": "none", "placement": "all", "qk_norm": "full"},
    "value norm": {"v_norm": True, "n_kv_head": 2, "norm": "rmsnorm", "pos": "rope"},
    "value and QK-norm": {"v_norm": True, "qk_norm": "head", "bias": False},
    "dyt": {"norm": "dyt", "qk_norm": "head"},
    "derf everywhere": {"norm": "derf", "placement": "all", "force_placement": True},
    "dyt without gain": {"norm": "dyt", "gain": "none"},
    "no norm": {"norm": "none", "placement": "all", "gain": "zero_centred", "v_norm": True},
    "Gemma": {
        **{"norm": "rmsnorm", "gain": "zero_centred", "embed_scale": "sqrt_dim", "mlp": "geglu"},
        **{"bias": False, "pos": "rope"},
    },
    "embedding times 3": {"embed_scale": 3.0, "embed_norm": True},
    "soft-cap": {"logit_softcap": 5.0, "tie_embeddings": False},
}


@pytest.mark.parametrize("switches", METHODS.values(), ids=METHODS)
def test_equals_the_textbook(switches):
    scale = switches.get("residual_scale", "one")
    factors = [SCALES[scale][0](k, 2) if scale in SCALES else (1, scale, 1) for k in range(4)]
    assert_textbook(randomized(**switches), factors)


def test_lns_halves_what_the_fourth_layer_reads_and_survives_materialization():
    """Public implementations lost the factor: to a name that was compared in the wrong case, or with a buffer."""
    tokens, _ = tokens_and_targets()
    plain, scaled = (randomized(n_layer=4, residual_scale=scale, placement="pre") for scale in ("one", "lns"))
    with torch.device("meta"):
        empty = type(scaled)(scaled.config).double()
    empty.to_empty(device="cpu").load_state_dict(scaled.state_dict())
    for model in (scaled, empty):
        model.load_state_dict(plain.state_dict())
        stream = torch.randn(2, 3, 32, dtype=torch.float64)
        inner = [m.joins[5].next_norm(stream) for m in (plain, model)]
        torch.testing.assert_close(inner[1], inner[0] / 2, rtol=1e-14, atol=0)
        assert not torch.allclose(plain(tokens)[0], model(tokens)[0], atol=1e-3)
    torch.testing.assert_close(empty(tokens)[0], scaled(tokens)[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("switches", "std"),
    [
        ({"residual_scale": "lns"}, 0.02),  # its factor replaces the smaller start
        ({"residual_scale": "depth"}, 0.02),
        ({"residual_scale": 0.22}, 0.02),
        ({"residual_scale": 1.0}, 0.01),
        ({"placement": "keel", "residual_scale": "keel"}, 0.02),
        ({"placement": "none"}, 0.01),
        ({"norm": "dyt"}, 0.01),
    ],
)
def test_initialization_of_the_last_linears(switches, std):
    model = build(n_embd=256, **switches)
    for branch, last in zip(model.branches, ("out", "down") * 2, strict=True):
        assert getattr(branch, last).weight.std().item() == pytest.approx(std, rel=0.03)


def test_what_a_gain_starts_from():
    def gains(norm: str, **switches) -> set[float]:
        model = build(placement="sandwich", **switches)
        return {getattr(join, norm).gain(torch.zeros(32))[0].unique().item() for join in model.joins}

    assert gains("out_norm", out_gain_init="depth") == {0.5}
    assert gains("out_norm", out_gain_init=0.25, gain="zero_centred") == {0.25}
    assert gains("next_norm", out_gain_init=0.25, gain="zero_centred") == {1.0}
    model = build(placement="sandwich", gain="zero_centred", out_gain_init="depth")
    assert model.joins[0].out_norm.weight.unique().item() == -0.5
    bare = build(placement="all", gain="none", qk_norm="head", v_norm=True, embed_norm=True)
    assert not any(list(m.parameters()) for m in bare.modules() if isinstance(m, Norm))
    assert build(norm="derf", alpha_init=0.3).entry.alpha.item() == pytest.approx(0.3)


def test_a_zero_centred_gain_subtracts_no_mean():
    model = build(norm="rmsnorm", gain="zero_centred")
    x = torch.full((1, 4, 32), 3.0)
    torch.testing.assert_close(model.entry(x), torch.ones_like(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        (
            {"residual_scale": "lns", "placement": "output"},
            "lns belongs to placement pre, sandwich, keel, all",
        ),
        ({"residual_scale": "keel"}, "keel belongs to placement keel, not pre"),
        (
            {"residual_scale": "depth", "placement": "post"},
            "depth belongs to placement none, pre, output, sandwich",
        ),
        ({"residual_scale": "lns", "placement": "pre*3 post"}, "not pre*3 post"),
        ({"norm": "dyt", "placement": "post"}, "norm dyt is for placement pre; force_placement allows post"),
        ({"norm": "batchnorm", "v_norm": True}, "are for norms of a token, which batchnorm is not"),
        ({"norm": "dyt", "kernel": "triton"}, "norm dyt is never fused"),
        ({"out_gain_init": "depth"}, "out_gain_init is for an N_out with a gain"),
        ({"out_gain_init": 0.5, "placement": "sandwich", "gain": "none"}, "out_gain_init is for an N_out"),
        ({"out_gain_init": 0.5, "placement": "sandwich", "norm": "none"}, "out_gain_init is for an N_out"),
        ({"residual_scale": "LNS"}, "lns"),
        ({"placement": "pre*3"}, "placement 'pre*3' names 3 branches; n_layer 2 makes 4"),
        ({"placement": "pre*3 prost"}, "'prost' is not a placement (did you mean post?)"),
        ({"placement": "attn:pre"}, "'attn:pre' is not a placement (none, pre"),
        ({"placement": "pre*x"}, "'pre*x' is not a placement"),
        ({"placement": ""}, "names 0 branches"),
    ],
)
def test_what_makes_no_sense_is_refused(switches, says):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        build(**switches)
    assert says in str(refused.value)


def test_every_kind_of_norm_is_in_the_textbook_or_has_its_own_tests():
    assert NORMS.keys() == {"layernorm", "rmsnorm", "batchnorm", "dyt", "derf", "none"}

"""Folding and LayerNorm to RMSNorm: other weights, the same logits, and refusals where that would not be so."""

import pytest
import torch

from base.cli import UserError
from model import GPT, NORMS, PLACEMENTS, BatchNorm, ModelConfig, Norm
from tools.fold import Converted, fold, ln_to_rms

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 41}
KINDS = {"layernorm": {}, "layernorm without biases": {"bias": False}, "rmsnorm": {"norm": "rmsnorm"}}
KINDS |= {"rmsnorm with swiglu": {"norm": "rmsnorm", "mlp": "swiglu", "bias": False, "pos": "rope"}}
FINAL_ONLY = ("post", "out_post")  # whose norms all write the stream, but for the last
PATTERNS = ("post*1 keel*2 sandwich*1", "attn:all mlp:none", "pre*2 output*1 out_post*1")
FOLDABLE = [name for name in (*PLACEMENTS, *PATTERNS) if name not in FINAL_ONLY]


def far(scale: float = 0.5, **switches) -> GPT:
    """A model in evaluation mode whose gains, shifts and statistics are far from 1 and 0."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(**SMALL | switches)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += (0.1 if p.dim() == 2 else scale) * torch.randn(p.shape, generator=generator)
        for module in model.modules():
            if isinstance(module, BatchNorm):
                module.running_mean += torch.randn(32, generator=generator)
                module.running_var *= 0.2 + 3 * torch.rand(32, generator=generator)
    return model


def build(converted: Converted) -> GPT:
    model = GPT(converted.config).eval()
    missing, unexpected = model.load_state_dict(converted.weights, strict=False)
    assert (missing, unexpected) == ([], [])
    return model


def tokens() -> torch.Tensor:
    return torch.randint(41, (4, 16), generator=torch.Generator().manual_seed(2))


def difference(a: GPT, b: GPT) -> float:
    """The largest difference of two models' logits."""
    with torch.no_grad():
        expected, found = a(tokens())[0], b(tokens())[0]
    assert expected.std() > 0.1, "logits that hardly differ prove nothing"
    return (expected - found).abs().max().item()


def norms(model: GPT) -> dict[str, Norm]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Norm)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", FOLDABLE)
def test_a_folded_model_has_the_same_logits(kind, placement):
    """For every placement and pattern, with gains of one on every norm that linears alone read."""
    tied = placement in ("pre", "keel")
    model = far(placement=placement, tie_embeddings=tied, **KINDS[kind])
    folded = build(fold(model))
    assert difference(model, folded) <= 1e-5
    before, last = norms(model), 2 * model.config.n_layer - 1
    for name, norm in norms(folded).items():
        if name.endswith("next_norm") or name in ("entry", f"joins.{last}.post_norm"):
            assert (before[name].weight - 1).abs().max() > 0.1
            assert torch.equal(norm.weight, torch.ones(32)), name
            assert norm.bias is None or not norm.bias.any(), name
        else:
            assert torch.equal(norm.weight, before[name].weight), name


@pytest.mark.parametrize(
    "switches",
    [
        {"gain": "zero_centred"},
        {"gain": "zero_centred", "norm": "rmsnorm", "placement": "keel", "residual_scale": "keel"},
        {"residual_scale": "lns", "placement": "sandwich"},
        {"residual_scale": "depth", "embed_scale": "sqrt_dim", "logit_softcap": 3.0},
        {"residual_scale": 0.3, "mlp": "geglu", "v_norm": True},
        {"residual_scale": "lns", "norm": "batchnorm", "placement": "sandwich"},
    ],
)
def test_factors_and_forms_of_the_gain_fold_too(switches):
    model = far(**switches)
    folded = build(fold(model))
    assert difference(model, folded) <= 1e-5
    neutral = 0.0 if model.config.gain == "zero_centred" else 1.0
    assert torch.equal(folded.joins[0].next_norm.weight, torch.full((32,), neutral))


def test_without_gains_there_is_nothing_to_fold():
    converted = fold(far(norm="rmsnorm", gain="none", bias=False, tie_embeddings=False))
    assert converted.notes == []
    assert (
        difference(far(norm="rmsnorm", gain="none", bias=False, tie_embeddings=False), build(converted)) == 0
    )


def test_a_norm_that_writes_the_stream_stays_and_is_said_to():
    model = far(placement="post*1 keel*1 sandwich*1 output*1", qk_norm="head", embed_norm=True)
    converted = fold(model)
    assert difference(model, build(converted)) <= 1e-5
    assert [note.split(":")[0] for note in converted.notes if note.startswith("left")] == [
        "left joins.*.out_norm",
        "left joins.*.post_norm",
        "left q_norm and k_norm",
        "left embed_norm",
    ]


def test_what_was_folded_is_named():
    notes = fold(far(n_layer=1, mlp="swiglu", norm="rmsnorm")).notes
    assert notes == [
        "folded entry into branches.0.qkv",
        "folded joins.0.next_norm into branches.1.gate, branches.1.up",
        "folded joins.1.next_norm into head",
        "tie_embeddings is now False",
    ]


def test_a_final_bias_becomes_the_heads_and_none_makes_none():
    assert fold(far()).config.head_bias
    assert not fold(far(bias=False)).config.head_bias
    assert not fold(far(norm="rmsnorm")).config.head_bias


@pytest.mark.parametrize("placement", FOLDABLE)
def test_a_batchnorm_in_evaluation_mode_vanishes_into_linears(placement):
    model = far(norm="batchnorm", placement=placement, bias="*" in placement)
    folded = build(fold(model))
    assert difference(model, folded) <= 1e-5
    x, last = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3)), 2 * model.config.n_layer - 1
    for name, norm in norms(folded).items():
        if not name.endswith("post_norm") or name.startswith(f"joins.{last}"):
            assert (norm(x) - x).abs().max() <= 1e-6, name
            assert (norms(model)[name](x) - x).abs().max() > 0.5
    assert folded.config.head_bias, "running means need biases"


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "batchnorm"])
@pytest.mark.parametrize("placement", FINAL_ONLY)
def test_post_is_refused_by_name(norm, placement):
    with pytest.raises(UserError, match=f"placement is {placement}: what its norms write is the stream"):
        fold(far(placement=placement, norm=norm))


class Clipped(Norm):
    """A kind of norm that somebody has registered, whose gain is not the last thing that it does."""

    def forward(self, x, out_dtype=None):
        return super().forward(x, out_dtype).clamp(-1, 1)

    def normalize(self, x):
        return x


@pytest.mark.parametrize("norm", ["none", "dyt", "derf", "clipped"])
def test_kinds_that_are_not_known_to_end_in_a_gain_are_refused(norm, monkeypatch):
    monkeypatch.setitem(NORMS, "clipped", Clipped)
    for convert in (fold, ln_to_rms):
        with pytest.raises(UserError, match=f"norm is {norm}; "):
            convert(far(norm=norm))


def test_folding_a_norm_of_the_stream_would_change_the_logits():
    """The control of the refusals: the same rewriting, where more than linears read the norm."""
    model = far(placement="post", norm="rmsnorm")
    wrong = far(placement="post", norm="rmsnorm")
    with torch.no_grad():
        gain = wrong.joins[0].post_norm.weight
        wrong.branches[1].up.weight *= gain
        gain.fill_(1.0)
    assert difference(model, wrong) > 1e-2


# ---- LayerNorm to RMSNorm: claim 22, whose control is there


@pytest.mark.parametrize(
    ("bias", "pos", "mlp", "tied"),
    [(True, "learned", "gelu_tanh", True), (False, "rope", "swiglu", False), (True, "rope", "geglu", True)],
)
def test_layernorms_centring_moves_into_the_weights(bias, pos, mlp, tied):
    model = far(bias=bias, pos=pos, mlp=mlp, tie_embeddings=tied)
    converted = build(ln_to_rms(model))
    assert converted.config.norm == "rmsnorm"
    assert difference(model, converted) <= 1e-5
    stream = []
    converted(tokens(), watch=stream.append)
    assert max(x.mean(-1).abs().max() / x.abs().max() for x in stream) < 1e-6


@pytest.mark.parametrize("placement", ["keel", "pre*3 keel*1", "pre*2 keel*2", "pre", *PATTERNS])
def test_ln_to_rms_is_exact_or_refuses(placement):
    """Exact where every branch reads through a norm, and no norm but the last writes the stream."""
    exact = placement in ("pre", "pre*3 keel*1")
    model = far(placement=placement, residual_scale="lns" if exact else "one", gain="zero_centred")
    if exact:
        assert difference(model, build(ln_to_rms(model))) <= 1e-5
    else:
        with pytest.raises(
            UserError, match=r"^placement is .*; ln-to-rms is exact where every branch reads through"
        ):
            ln_to_rms(model)


@pytest.mark.parametrize(
    ("field", "switches"),
    [("norm", {"norm": "rmsnorm"})]
    + [("placement", {"placement": name}) for name in PLACEMENTS if name != "pre"]
    + [
        (name, {name: value}) for name, value in (("qk_norm", "head"), ("v_norm", True), ("embed_norm", True))
    ],
)
def test_other_layouts_are_refused_by_the_field_in_the_way(field, switches):
    with pytest.raises(UserError, match=f"^{field} is"):
        ln_to_rms(far(**switches))

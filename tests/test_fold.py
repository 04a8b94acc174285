"""Folding and LayerNorm to RMSNorm: other weights, the same logits, and refusals where that would not be so."""

import dataclasses
import itertools

import pytest
import torch

from base.cli import UserError
from model import GPT, BatchNorm, ModelConfig, Norm
from tools.fold import Converted, fold, ln_to_rms

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 41}
KINDS = {"layernorm": {}, "layernorm without biases": {"bias": False}, "rmsnorm": {"norm": "rmsnorm"}}
KINDS |= {"rmsnorm with swiglu": {"norm": "rmsnorm", "mlp": "swiglu", "bias": False, "pos": "rope"}}
FOLDABLE = ("pre", "output", "sandwich")


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
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_folded_model_has_the_same_logits(kind, placement, tied):
    model = far(placement=placement, tie_embeddings=tied, **KINDS[kind])
    folded = build(fold(model))
    assert difference(model, folded) <= 1e-5
    for name, norm in norms(folded).items():
        if not name.endswith("out_norm"):
            assert torch.equal(norm.weight, torch.ones(32)), name
            assert norm.bias is None or not norm.bias.any(), name
    before = norms(model)
    assert all(
        (before[n].weight - m.weight).abs().max() > 0.1 for n, m in norms(folded).items() if "next" in n
    )


@pytest.mark.parametrize("placement", ["output", "sandwich"])
def test_a_norm_that_writes_the_stream_stays_and_is_said_to(placement):
    model = far(placement=placement, qk_norm="head")
    converted = fold(model)
    folded = build(converted)
    assert difference(model, folded) <= 1e-5
    for name, norm in norms(model).items():
        if name.endswith(("out_norm", "q_norm", "k_norm")):
            assert torch.equal(norm.weight, norms(folded)[name].weight)
    assert [note.split(":")[0] for note in converted.notes if note.startswith("left")] == [
        "left joins.*.out_norm",
        "left q_norm and k_norm",
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
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "none"])
def test_a_batchnorm_in_evaluation_mode_vanishes_into_linears(placement, bias):
    model = far(norm="batchnorm", placement=placement, bias=bias)
    folded = build(fold(model))
    assert difference(model, folded) <= 1e-5
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3))
    for name, norm in norms(folded).items():
        assert (norm(x) - x).abs().max() <= 1e-6, name
        assert (norms(model)[name](x) - x).abs().max() > 0.5
    assert folded.config.bias, "running means need biases"


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "batchnorm"])
def test_post_is_refused_by_name(norm):
    with pytest.raises(UserError, match="placement is post"):
        fold(far(placement="post", norm=norm))


def test_folding_a_norm_of_the_stream_would_change_the_logits():
    """The control of the refusals: the same rewriting, where more than linears read the norm."""
    model = far(placement="post", norm="rmsnorm")
    wrong = far(placement="post", norm="rmsnorm")
    with torch.no_grad():
        gain = wrong.joins[0].post_norm.weight
        wrong.branches[1].up.weight *= gain
        gain.fill_(1.0)
    assert difference(model, wrong) > 1e-2


# ---- row 22 of the claims


@pytest.mark.parametrize(
    ("bias", "pos", "mlp", "tied"),
    list(itertools.product([True, False], ["learned", "rope"], ["gelu_tanh", "swiglu"], [True, False])),
)
def test_layernorms_centring_moves_into_the_weights(bias, pos, mlp, tied):
    model = far(bias=bias, pos=pos, mlp=mlp, tie_embeddings=tied)
    converted = build(ln_to_rms(model))
    assert converted.config.norm == "rmsnorm"
    assert difference(model, converted) <= 1e-5
    stream = []
    converted(tokens(), watch=stream.append)
    assert max(x.mean(-1).abs().max() / x.abs().max() for x in stream) < 1e-6


def test_without_the_projection_it_does_not():
    model = far(bias=False)
    weights = {"head.weight": model.embed.weight} | dict(model.named_parameters())
    config = dataclasses.replace(model.config, norm="rmsnorm", tie_embeddings=False)
    assert difference(model, build(Converted(config, weights, []))) > 1e-2


def test_a_trained_model_converts_too():
    torch.manual_seed(0)
    model = GPT(ModelConfig(**SMALL)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(41, (8, 17), generator=torch.Generator().manual_seed(4))
    losses = []
    for _ in range(60):
        loss = model(ids[:, :-1], ids[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert model.joins[-1].next_norm.bias.abs().max() > 0.01, "training has moved the final bias"
    model.eval()
    assert difference(model, build(ln_to_rms(model))) <= 1e-5
    assert difference(model, build(fold(model))) <= 1e-5
    assert difference(model, build(fold(build(ln_to_rms(model))))) <= 1e-5


@pytest.mark.parametrize(
    ("field", "switches"),
    [
        ("norm", {"norm": "rmsnorm"}),
        ("placement", {"placement": "sandwich"}),
        ("placement", {"placement": "post"}),
        ("qk_norm", {"qk_norm": "head"}),
        ("embed_norm", {"embed_norm": True}),
    ],
)
def test_other_layouts_are_refused_by_the_field_in_the_way(field, switches):
    with pytest.raises(UserError, match=f"^{field} is"):
        ln_to_rms(far(**switches))

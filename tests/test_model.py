"""The model against a textbook written here on its own, and every switch doing what it says."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from textbook import NORMS_OF, PATTERNS, placements_of, textbook

from model import GPT, SCALES, ModelConfig

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 19}
KINDS = ("layernorm", "rmsnorm")
GRID = [
    dict(zip(("norm", "placement", "qk_norm", "pos", "mlp"), values, strict=True))
    for values in itertools.product(
        KINDS, (*NORMS_OF, *PATTERNS), ("off", "head", "full"), ("learned", "rope"), ("gelu", "swiglu")
    )
]


def build(seed: int = 0, **switches) -> GPT:
    torch.manual_seed(seed)
    return GPT(ModelConfig(**SMALL | switches))


def randomized(**switches) -> GPT:
    """In float64, with gains, biases and weights far from their initialization."""
    model = build(**switches).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model


def tokens_and_targets(batch: int = 3, time: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(SMALL["vocab_size"], (batch, time + 1), generator=torch.Generator().manual_seed(2))
    return ids[:, :-1], ids[:, 1:]


def assert_textbook(model: GPT, factors: list[tuple[float, float, float]] | None = None) -> None:
    """Logits and every gradient to 1e-10 in float64; factors a, b, c of every branch are 1 if not given."""
    tokens, targets = tokens_and_targets()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected = textbook(weights, model.config, tokens, factors or [(1, 1, 1)] * len(model.branches))
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    logits, loss = model(tokens, targets)
    loss.backward()
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            p.grad, weights[name].grad, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )
        shifts_scores = (
            name.endswith("k_norm.bias") and model.config.pos == "learned"
        )  # softmax does not see it
        assert shifts_scores or p.grad.abs().max() > 1e-9, f"{name} gets no gradient"


def assert_causal(model: GPT) -> None:
    """Later tokens change later logits and no earlier ones."""
    tokens, _ = tokens_and_targets(batch=2)
    other = tokens.clone()
    other[:, 9:] = (other[:, 9:] + 1) % SMALL["vocab_size"]
    with torch.no_grad():
        before, after = model(tokens)[0], model(other)[0]
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-3)


@pytest.mark.parametrize("placement", [*NORMS_OF, *PATTERNS])
@pytest.mark.parametrize("norm", KINDS)
def test_equals_the_textbook_and_looks_at_no_later_token(norm, placement):
    """With every qk_norm, position and MLP, random gains, and random factors a, b and c."""
    generator = torch.Generator().manual_seed(3)
    for switches in GRID:
        if switches["norm"] == norm and switches["placement"] == placement:
            factors = (0.5 + torch.rand(4, 3, generator=generator, dtype=torch.float64)).tolist()
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(SCALES, "one", (lambda k, n_layer, f=factors: f[k], NORMS_OF))
                model = randomized(**switches)
            assert_textbook(model, factors)
            assert_causal(model)


@pytest.mark.parametrize(
    "switches",
    [
        {"norm": "rmsnorm", "qk_norm": "head", "pos": "rope", "mlp": "swiglu", "bias": False, "n_kv_head": 2},
        {"placement": "sandwich", "qk_norm": "full", "pos": "rope", "n_kv_head": 1, "tie_embeddings": False},
        {"placement": "output", "qk_norm": "full", "norm": "rmsnorm", "head_dim": 6, "rope_theta": 500.0},
        {"placement": "pre", "embed_norm": True, "qk_norm": "head", "mlp_hidden": 20, "norm_eps": 0.1},
        {"dtype": "bfloat16", "residual_dtype": "compute", "pos": "rope"},
    ],
)
def test_equals_the_textbook_with_other_switches(switches):
    assert_textbook(randomized(**switches))


def test_deepnorm_is_the_equation_with_its_own_a():
    model = randomized(placement="post", residual_scale="deepnorm", embed_norm=True, mlp="gelu")
    assert_textbook(model, [(4**0.25, 1, 1)] * 4)


BASE = {"norm": "layernorm", "placement": "pre", "dropout": 0.0}
SWITCHES = [
    {"norm": "rmsnorm"},
    *({"placement": placement} for placement in (*NORMS_OF, *PATTERNS) if placement != "pre"),
    {"placement": "post", "residual_scale": "deepnorm"},
    {"qk_norm": "head"},
    {"qk_norm": "full"},
    {"norm_eps": 0.5},
    {"bias": False},
    {"embed_norm": True},
    {"pos": "rope"},
    {"pos": "rope", "rope_theta": 10.0},
    {"mlp": "gelu"},
    {"mlp": "swiglu"},
    {"mlp_hidden": 64},
    {"n_kv_head": 2},
    {"head_dim": 16},
    {"tie_embeddings": False},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "residual_dtype": "compute"},
    {"n_layer": 3},
]


def test_every_switch_changes_the_output():
    """All pairs of switches differ, so no switch is accepted and ignored, and no two are one."""
    tokens, _ = tokens_and_targets()
    outputs = {}
    for switches in [{}, *SWITCHES]:
        model = randomized_float32(**BASE | switches)
        with torch.no_grad():
            outputs[str(switches)] = model(tokens)[0]
    for (a, x), (b, y) in itertools.combinations(outputs.items(), 2):
        assert not torch.allclose(x, y, atol=1e-5), f"{a} gives the same logits as {b}"


def randomized_float32(**switches) -> GPT:
    """One generator per parameter name, so that models with other parameters share the common ones."""
    model = build(**switches)
    with torch.no_grad():
        for name, p in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            p += 0.2 * torch.randn(p.shape, generator=generator)
    return model


def n_params(c: ModelConfig) -> int:
    """Counted by hand from the layer's shapes."""
    width, head = c.n_embd, c.head_dim or c.n_embd // c.n_head
    q, kv = c.n_head * head, (c.n_kv_head or c.n_head) * head
    b = int(c.bias)
    norm = width * (1 + (b if c.norm == "layernorm" else 0))
    hidden = c.mlp_hidden or (math.ceil(8 * width / 3 / 8) * 8 if c.mlp == "swiglu" else 4 * width)
    attention = width * (q + 2 * kv) + b * (q + 2 * kv) + q * width + b * width
    per = 1 + (b if c.norm == "layernorm" else 0)
    attention += {"off": 0, "head": 2 * head * per, "full": (q + kv) * per}[c.qk_norm]
    matrices = 3 if c.mlp == "swiglu" else 2
    mlp = matrices * width * hidden + b * ((matrices - 1) * hidden + width)
    norms = sum(map(len, placements_of(c))) + ("post" not in placements_of(c)[-1])
    total = c.n_layer * (attention + mlp) + norms * norm + c.vocab_size * width
    total += c.block_size * width if c.pos == "learned" else 0
    total += norm if c.embed_norm else 0
    return total + (0 if c.tie_embeddings else c.vocab_size * width)


@pytest.mark.parametrize("switches", [*GRID, *SWITCHES], ids=str)
def test_parameter_count_equals_the_formula(switches):
    model = build(**switches)
    assert model.n_params() == n_params(model.config)


def test_the_defaults_are_gpt2():
    assert n_params(ModelConfig()) == 124_439_808
    with torch.device("meta"):
        assert GPT(ModelConfig()).n_params() == 124_439_808


@pytest.mark.parametrize(
    ("switches", "out_std", "up_std"),
    [
        ({"placement": "pre"}, 0.02 / 2, 0.02),
        ({"placement": "post"}, 0.02, 0.02),
        ({"placement": "output"}, 0.02, 0.02),
        ({"placement": "sandwich"}, 0.02, 0.02),
        ({"placement": "post", "residual_scale": "deepnorm"}, 0.02 * 16**-0.25, 0.02 * 16**-0.25),
    ],
)
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_initialization_follows_placement(switches, out_std, up_std, mlp):
    model = build(**{"n_embd": 256, "mlp": mlp} | switches)
    for attention, feed in zip(model.branches[::2], model.branches[1::2], strict=True):
        stds = {
            "out": (attention.out.weight, out_std),
            "down": (feed.down.weight, out_std),
            "up": (feed.up.weight, up_std),
            "q, k": (attention.qkv.weight[:512], 0.02),
            "v": (attention.qkv.weight[512:], up_std),
        }
        for name, (weight, std) in stds.items():
            assert weight.std().item() == pytest.approx(std, rel=0.03), name
    assert model.embed.weight.std().item() == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize("placement", [*NORMS_OF, *PATTERNS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("residual_dtype", ["float32", "compute"])
def test_dtypes_inside(placement, dtype, residual_dtype):
    """Branches read and write the compute dtype, the stream keeps its own, logits and gradients are float32."""
    model = build(placement=placement, dtype=dtype, residual_dtype=residual_dtype, qk_norm="head")
    compute, reads, stream = getattr(torch, dtype), [], []
    for branch in model.branches:
        branch.register_forward_hook(lambda _, args, out: reads.extend((args[0].dtype, out.dtype)))
    logits, loss = model(*tokens_and_targets(), watch=lambda x: stream.append(x.dtype))
    loss.backward()
    assert set(reads) == {compute}
    assert set(stream) == {compute if residual_dtype == "compute" else torch.float32}
    assert logits.dtype == loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_the_float32_model_rounded(dtype):
    switches = {"placement": "sandwich", "norm": "rmsnorm", "pos": "rope", "qk_norm": "full"}
    exact, half = build(**switches), build(**switches, dtype=dtype)
    tokens, _ = tokens_and_targets()
    with torch.no_grad():
        error = (half(tokens)[0] - exact(tokens)[0]).abs().max()
    assert 0 < error < {"bfloat16": 0.02, "float16": 0.003}[dtype]


def test_dropout_only_in_training():
    model = build(dropout=0.5)
    tokens, _ = tokens_and_targets()
    with torch.no_grad():
        assert not torch.equal(model(tokens)[0], model(tokens)[0])
        model.eval()
        assert torch.equal(model(tokens)[0], model(tokens)[0])
        torch.testing.assert_close(model(tokens)[0], build()(tokens)[0])


def test_targets_of_minus_one_do_not_count():
    model = build()
    tokens, targets = tokens_and_targets()
    masked = targets.clone()
    masked[:, 5:] = -1
    logits, loss = model(tokens, masked)
    expected = -logits[:, :5].log_softmax(-1).gather(-1, targets[:, :5, None]).mean()
    torch.testing.assert_close(loss, expected)


def test_tied_head_is_the_embedding():
    assert build().head.weight is build().embed.weight or "head.weight" not in dict(
        build().named_parameters()
    )
    untied = build(tie_embeddings=False)
    assert not torch.equal(untied.head.weight, untied.embed.weight)


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        ({"n_head": 5}, "n_embd 32 does not divide into n_head 5 heads; 30 would"),
        ({"n_kv_head": 3}, "n_head 4 is not a multiple of n_kv_head 3"),
        ({"pos": "rope", "head_dim": 7}, "head_dim is 7; pos rope rotates pairs"),
        ({"residual_scale": "deepnorm"}, "belongs to placement post, not pre"),
        ({"dropout": 1.0}, "dropout\n  Input should be less than 1"),
        ({"norm_eps": 1e-60}, "norm_eps\n  Input should be greater"),
        ({"norm_eps": math.nan}, "norm_eps\n  Input should be"),
        ({"n_layer": 0}, "n_layer\n  Input should be greater than or equal to 1"),
        ({"rope_theta": 0.0}, "rope_theta\n  Input should be greater than 0"),
        ({"norm": "batch"}, "layernorm"),
        ({"n_layer": "2"}, "valid integer"),
        ({"nrom": "rmsnorm"}, "Unexpected keyword"),
    ],
)
def test_impossible_values_are_refused(switches, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        ModelConfig(**SMALL | switches)

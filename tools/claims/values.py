"""Claims 1 to 9, 13 and 14: what a norm looks at, what comes out of it in every dtype, and what adding does."""

import itertools

import torch
from torch import Tensor

import kernels
from kernels import reference
from model import GPT, PLACEMENTS, Join, ModelConfig, Norm
from tools.claims.claim import at_least, at_most, claim, control, equal, near
from tools.claims.small import (
    NAMES,
    NEGLIGIBLE,
    SIZE,
    VOCAB,
    largest,
    random,
    random_tokens,
    row,
    small_model,
    small_norm,
)
from training.dynamics import mean_square
from training.probe import mean_angle

# ---- 1 to 4: information and causality

CUT = 5  # the first position of the suffix
SWITCHES = {
    "norm": list(NAMES),
    "placement": list(PLACEMENTS),
    "qk_norm": ("off", "head", "full"),
    "pos": ("learned", "rope"),
    "mlp": ("gelu", "gelu_tanh", "swiglu"),
}
COMBINATIONS = [dict(zip(SWITCHES, values, strict=True)) for values in itertools.product(*SWITCHES.values())]


class NormOverTime(Norm):
    """The control: one RMS for all tokens and features of a sequence."""

    def forward(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        rms = x.square().mean((-2, -1), keepdim=True).sqrt()  # [B, 1, 1]
        return (x / rms * self.weight).to(out_dtype)


@torch.no_grad()
def after_new_suffix(model: GPT) -> tuple[float, float]:
    """The largest change of a logit (before the suffix, within it) when the suffix of a sequence changes."""
    before = random_tokens()
    after = before.clone()
    after[:, CUT:] = (before[:, CUT:] + 1) % VOCAB
    change = model(after)[0] - model(before)[0]  # [B, T, V]
    return largest(change[:, :CUT]), largest(change[:, CUT:])


@claim(1)
def causality():
    """Changing the suffix of a sequence leaves the logits of the prefix unchanged, under every switch."""
    changes = [after_new_suffix(small_model(**switches)) for switches in COMBINATIONS]
    prefix, suffix = zip(*changes, strict=True)
    of = f"over {len(COMBINATIONS)} combinations of {', '.join(SWITCHES)}"
    yield at_most(f"largest change of a prefix logit, {of}", max(prefix), 1e-12)
    yield at_least("smallest change of the suffix logits, likewise", min(suffix), 1e-3)
    leaky = small_model(norm="rmsnorm")
    leaky.entry = NormOverTime(SIZE, leaky.config).double()
    leaked = after_new_suffix(leaky)[0]
    yield control(at_most("change of a prefix logit, RMS over time and features", leaked, 1e-12))


BATCH, STEPS = 2, 5


def statistics_of(norm: Norm) -> int:
    """How many different scales y / x the output of a norm without an offset has."""
    x = random(BATCH, STEPS, SIZE)
    scales = (norm.double()(x, out_dtype=x.dtype) / x).detach()
    return len(scales.mul(1e9).round().unique())


@claim(2)
def statistics():
    """Of an input [2, 5, 8] RMSNorm takes 10 statistics, one per token, and has 8 parameters; LayerNorm has 16."""
    layer, rms = (small_norm(kind, SIZE) for kind in NAMES)
    yield equal("scales that RMSNorm applies", statistics_of(rms), BATCH * STEPS)
    yield equal("RMSNorm's parameters", {n: p.numel() for n, p in rms.named_parameters()}, {"weight": SIZE})
    both = {"weight": SIZE, "bias": SIZE}
    yield equal("LayerNorm's parameters", {n: p.numel() for n, p in layer.named_parameters()}, both)
    over_time = NormOverTime(SIZE, small_model().config)
    yield control(equal("scales of an RMS over time and features", statistics_of(over_time), BATCH * STEPS))


@claim(3)
def common_offset():
    """LayerNorm removes a common offset: [1, 3] and [101, 103] both give [-1, 1]. RMSNorm does not."""
    layer, rms = (small_norm(kind, 2).double() for kind in NAMES)
    for values in ((1, 3), (101, 103)):
        yield near(f"LayerNorm of {list(values)}", layer(row(*values)).flatten(), [-1, 1], 1e-9)
    one, other = (rms(row(*values)).flatten() for values in ((1, 3), (101, 103)))
    yield control(near("RMSNorm of [101, 103] is that of [1, 3]", other, one, 1e-9))


@claim(4)
def without_bias():
    """LayerNorm without bias is still LayerNorm: adding 5 to every feature changes nothing. RMSNorm changes."""
    x = random(BATCH, STEPS, SIZE)
    layer, rms = (small_norm(kind, SIZE, eps=1e-5, bias=False).double() for kind in NAMES)
    yield equal("LayerNorm's parameters", [name for name, _ in layer.named_parameters()], ["weight"])
    yield at_most("change of LayerNorm's output", largest(layer(x + 5) - layer(x)), 1e-12)
    yield control(at_most("change of RMSNorm's output", largest(rms(x + 5) - rms(x)), 1e-12))


# ---- 5 to 9: values

SHOWN = {
    "layernorm": [-1.34164, -0.44721, 0.44721, 1.34164],
    "rmsnorm": [0.36515, 0.73030, 1.09545, 1.46059],
}


@claim(5)
def values():
    """[1, 2, 3, 4] becomes the values below (gain 1, negligible eps)."""
    x = row(1, 2, 3, 4, dtype=torch.float32)
    for kind in NAMES:
        yield near(NAMES[kind], small_norm(kind, 4)(x).flatten(), SHOWN[kind], 1e-5)
    unbiased = ((x - x.mean()) / x.std()).flatten()  # torch's std divides by D - 1
    yield control(near("LayerNorm by the unbiased variance", unbiased, SHOWN["layernorm"], 1e-5))


@claim(6)
def moments_and_factors():
    """mean(x^2) = variance + mean^2. A positive factor is invisible to both norms up to eps, a negative one flips."""
    x = random(3, 8) + 0.5
    _, rstd = reference.standardize(x, "rmsnorm", NEGLIGIBLE)
    _, centred = reference.standardize(x, "layernorm", NEGLIGIBLE)
    apart = largest(rstd**-2 - (centred**-2 + x.mean(-1, keepdim=True) ** 2))
    yield at_most("|mean(x^2) - variance - mean^2|, from the norms' own statistics", apart, 1e-12)
    for kind in NAMES:
        norm = small_norm(kind, 8).double()
        yield at_most(f"{NAMES[kind]}: |N(3x) - N(x)|", largest(norm(3 * x) - norm(x)), 1e-12)
        yield at_most(f"{NAMES[kind]}: |N(-3x) + N(x)|", largest(norm(-3 * x) + norm(x)), 1e-12)
        coarse = small_norm(kind, 8, eps=1.0).double()
        yield control(at_most(f"{NAMES[kind]} with eps 1", largest(coarse(3 * x) - coarse(x)), 1e-12))


def rms_without_promotion(x: Tensor) -> Tensor:
    """The control: the square of 1000 is beyond float16's 65504, and 1 / sqrt(inf) is 0."""
    return x * x.square().mean(-1, keepdim=True).rsqrt()


@claim(7)
def promotion():
    """float16 [1000, 2000, 3000, 4000] gives float32's result, rounded: statistics are promoted."""
    x = row(1000, 2000, 3000, 4000, dtype=torch.float16)
    for kind in NAMES:
        norm = small_norm(kind, 4, eps=1e-5)
        truth = norm(x.float()).half()
        yield near(NAMES[kind], norm(x).flatten(), truth.flatten(), 0)
        assert torch.isfinite(truth).all()
    wrong = rms_without_promotion(x)
    yield control(near("RMSNorm without promotion", wrong.flatten(), truth.flatten(), 0))
    finite = bool(wrong.isfinite().all())
    yield equal("and what it gives is finite, so that isfinite does not catch it", finite, True)


def layernorm_of_moments(x: Tensor) -> Tensor:
    """The control: E[x^2] - E[x]^2 subtracts two numbers near 10,000 that agree in float32's last digits."""
    mean, square = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
    return (x - mean) * (square - mean.square()).rsqrt()


@claim(8)
def centred_variance():
    """Around a mean of 100 with a spread of 0.01, float32 keeps the variance, because it is centred first."""
    x = (100 + 0.01 * random(64, 512)).float()
    norm = small_norm("layernorm", 512)
    truth = small_norm("layernorm", 512).double()(x.double())
    yield at_most("error of LayerNorm in float32", largest(norm(x) - truth), 5e-3)
    rstd = reference.standardize(x, "layernorm", NEGLIGIBLE)[1].double()
    exact = reference.standardize(x.double(), "layernorm", NEGLIGIBLE)[1]
    yield at_most("relative error of the specification's 1/std", largest(rstd / exact - 1), 5e-3)
    yield control(at_most("error with E[x^2] - E[x]^2", largest(layernorm_of_moments(x) - truth), 5e-3))


UNDERFLOWS = 1e-46  # is 0 in float32


def takes(kind: str, eps: float) -> bool:
    """Whether a float32 norm accepts this eps."""
    ones = torch.ones(4)
    try:
        kernels.norm(ones, (ones, None), kind=kind, eps=eps)
    except ValueError:
        return False
    return True


@claim(9)
def eps():
    """An eps that underflows in the statistics' dtype is refused; a row of zeros gives zeros, not NaN."""
    zeros = row(0, 0, 0, 0, dtype=torch.float16)
    for kind in NAMES:
        yield equal(f"{NAMES[kind]} takes eps {UNDERFLOWS:g}", takes(kind, UNDERFLOWS), False)
        yield equal(f"{NAMES[kind]} takes eps {NEGLIGIBLE:g}", takes(kind, NEGLIGIBLE), True)
        y = small_norm(kind, 4, eps=1e-8)(zeros)
        yield near(f"{NAMES[kind]} of zeros in float16, eps 1e-8", y.flatten(), zeros.flatten(), 0)
    in_half = zeros * (zeros.square().mean(-1, keepdim=True) + torch.tensor(1e-8).half()).rsqrt()
    yield control(near("zeros with eps in float16, where 1e-8 is 0", in_half.flatten(), zeros.flatten(), 0))


# ---- 13 and 14: what adding does to a stream that nothing rescales


def pre_join(kind: str, width: int) -> Join:
    """r = x + s, of which the stream keeps r and the next branch reads N(r)."""
    return Join(ModelConfig(n_embd=width, n_head=1, norm=kind, norm_eps=NEGLIGIBLE)).double()


UPDATES = 3
RMS_AFTER = {0: 2.739, 1: 3.674, 3: 5.612}


def after_updates(kind: str) -> tuple[list[float], list[torch.Tensor]]:
    """(RMS of the stream after 0, 1, ... updates by ones, what the next branch reads then)."""
    x, ones, join = row(1, 2, 3, 4), row(1, 1, 1, 1), pre_join(kind, 4)
    rms, reads = [mean_square(x).sqrt().item()], [join.next_norm(x)]
    for _ in range(UPDATES):
        x, h = join(x, ones)
        rms.append(mean_square(x).sqrt().item())
        reads.append(h)
    return rms, reads


def spread(rows: list[torch.Tensor]) -> float:
    return max((r - rows[0]).abs().max().item() for r in rows)


@claim(13)
def constant_updates():
    """Adding [1, 1, 1, 1] to [1, 2, 3, 4] makes the stream's RMS grow, and LayerNorm never sees it."""
    rms, reads = after_updates("layernorm")
    for count, value in RMS_AFTER.items():
        yield near(f"RMS of the stream after {count} updates", round(rms[count], 3), value, 1e-9)
    yield near("change of what LayerNorm reads", spread(reads), 0, 1e-12)
    yield control(near("change of what RMSNorm reads", spread(after_updates("rmsnorm")[1]), 0, 1e-12))


@claim(14)
def angles():
    """The same update turns a longer stream less: (c, 0) + (0, 1) turns by 45 degrees at c = 1, by 5.711 at 10."""
    join, update = pre_join("rmsnorm", 2), row(0, 1)
    reads = {c: join.next_norm(row(c, 0)) for c in (1, 10)}
    for c, degrees in ((1, 45), (10, 5.711)):
        x = row(c, 0)
        r, _ = join(x, update)
        yield near(f"degrees at c = {c}", round(mean_angle(x, r).item(), 3), degrees, 1e-9)
    yield near("|N((10, 0)) - N((1, 0))|: the branch reads the same", spread([reads[1], reads[10]]), 0, 1e-12)
    scaled = mean_angle(row(10, 0), row(10, 0) + 10 * update).item()
    yield control(near("degrees at c = 10 if the update grew with the stream", round(scaled, 3), 5.711, 1e-9))

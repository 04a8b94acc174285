"""Claims 1 to 4: what a norm lets through, and what it looks at."""

import itertools

import torch
from torch import Tensor

from model import GPT, Norm
from tools.claims.claim import at_least, at_most, claim, control, equal, near
from tools.claims.small import (
    KINDS,
    PLACEMENTS,
    VOCAB,
    largest,
    random,
    random_tokens,
    row,
    small_model,
    small_norm,
)

CUT = 5  # the first position of the suffix
SWITCHES = {
    "norm": KINDS,
    "placement": PLACEMENTS,
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


@claim(1, "Changing the suffix of a sequence leaves the logits of the prefix unchanged, under every switch.")
def causality():
    prefix, suffix = zip(
        *(after_new_suffix(small_model(**switches)) for switches in COMBINATIONS), strict=True
    )
    of = f"over {len(COMBINATIONS)} combinations of {', '.join(SWITCHES)}"
    yield at_most(f"largest change of a prefix logit, {of}", max(prefix), 1e-12)
    yield at_least("smallest change of the suffix logits, likewise", min(suffix), 1e-3)
    leaky = small_model(norm="rmsnorm")
    leaky.entry = NormOverTime(SIZE, leaky.config).double()
    yield control(
        at_most("change of a prefix logit, RMS over time and features", after_new_suffix(leaky)[0], 1e-12)
    )


BATCH, STEPS, SIZE = 2, 5, 8


def statistics_of(norm: Norm) -> int:
    """How many different scales y / x the output of a norm without an offset has."""
    x = random(BATCH, STEPS, SIZE)
    scales = (norm.double()(x, out_dtype=x.dtype) / x).detach()
    return len(scales.mul(1e9).round().unique())


@claim(
    2,
    "Of an input [2, 5, 8] RMSNorm takes 10 statistics, one per token, and has 8 parameters; LayerNorm has 16.",
)
def statistics():
    layer, rms = (small_norm(kind, SIZE) for kind in KINDS)
    yield equal("scales that RMSNorm applies", statistics_of(rms), BATCH * STEPS)
    yield equal("RMSNorm's parameters", {n: p.numel() for n, p in rms.named_parameters()}, {"weight": SIZE})
    both = {"weight": SIZE, "bias": SIZE}
    yield equal("LayerNorm's parameters", {n: p.numel() for n, p in layer.named_parameters()}, both)
    over_time = NormOverTime(SIZE, small_model().config)
    yield control(equal("scales of an RMS over time and features", statistics_of(over_time), BATCH * STEPS))


@claim(3, "LayerNorm removes a common offset: [1, 3] and [101, 103] both give [-1, 1]. RMSNorm does not.")
def common_offset():
    layer, rms = (small_norm(kind, 2).double() for kind in KINDS)
    for values in ((1, 3), (101, 103)):
        yield near(f"LayerNorm of {list(values)}", layer(row(*values)).flatten(), [-1, 1], 1e-9)
    one, other = (rms(row(*values)).flatten() for values in ((1, 3), (101, 103)))
    yield control(near("RMSNorm of [101, 103] is that of [1, 3]", other, one, 1e-9))


@claim(
    4,
    "LayerNorm without bias is still LayerNorm: adding 5 to every feature changes nothing. RMSNorm changes.",
)
def without_bias():
    x = random(BATCH, STEPS, SIZE)
    layer, rms = (small_norm(kind, SIZE, eps=1e-5, bias=False).double() for kind in KINDS)
    yield equal("LayerNorm's parameters", [name for name, _ in layer.named_parameters()], ["weight"])
    yield at_most("change of LayerNorm's output", largest(layer(x + 5) - layer(x)), 1e-12)
    yield control(at_most("change of RMSNorm's output", largest(rms(x + 5) - rms(x)), 1e-12))

"""A decoder-only transformer, told as a residual stream, branches that read it, and joins that add to it.

The *stream* x carries one vector per token. A *branch* S (attention or MLP) reads the stream and produces
an update s. A *join* adds the update and normalizes. Every placement is one equation with some of its norms
left out, and with constants a, b and c that are usually 1:

    y = N_post( a x + b N_out( S( c N_in(x) ) ) )

The norm that follows an add lives in the same join as that add, so that both are one kernel, and the
forward pass is the same three lines for every placement. Read the file top to bottom, leaf to root.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

import kernels
from base.cli import STRICT, Count, OneOf, did_you_mean, require
from kernels.loss import cross_entropy, linear_cross_entropy, softcapped

NORMS: dict[str, type["Norm"]] = {}  # what --norm offers; the classes stand below

PLACEMENTS = {  # which norms of the equation a branch has
    "none": frozenset(),
    "pre": frozenset({"in"}),
    "post": frozenset({"post"}),
    "output": frozenset({"out"}),
    "sandwich": frozenset({"in", "out"}),
    "keel": frozenset({"in", "post"}),
    "out_post": frozenset({"out", "post"}),
    "all": frozenset({"in", "out", "post"}),
}


def having(norm: str, present: bool = True) -> list[str]:
    return [name for name, norms in PLACEMENTS.items() if (norm in norms) == present]


SCALES = {  # of --residual-scale: (branch k from 0, L) -> a, b, c; and the placements that the method is for
    "one": (lambda k, L: (1.0, 1.0, 1.0), PLACEMENTS),
    # Wang et al. 2022, "DeepNet: Scaling Transformers to 1,000 Layers"
    "deepnorm": (lambda k, L: ((2 * L) ** 0.25, 1.0, 1.0), ["post"]),
    # Sun et al. 2025, "The Curse of Depth in Large Language Models"
    "lns": (lambda k, L: (1.0, 1.0, (k // 2 + 1) ** -0.5), having("in")),
    # Chen and Wei 2026, "Post-LayerNorm Is Back: Stable, ExpressivE, and Deep"
    "keel": (lambda k, L: (2.0 * L, 1.0, 1.0), ["keel"]),
    # Beam in transformers: equal parts of the k + 2 terms of the stream, of which the embedding is the first
    "depth": (lambda k, L: (((k + 1) / (k + 2)) ** 0.5, (k + 2) ** -0.5, 1.0), having("post", False)),
}


TANH_GELU = partial(F.gelu, approximate="tanh")
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": TANH_GELU, "swiglu": F.silu, "geglu": TANH_GELU}
GATED = ("swiglu", "geglu")
DTYPES = {"auto": torch.float32} | {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The shape of the network and its normalization. The defaults are GPT-2's (124M)."""

    n_layer: Annotated[int, Field(ge=1, le=100_000)] = 12
    """Layers; each is an attention branch and an MLP branch."""
    n_head: Count = 12
    """Query heads."""
    n_kv_head: Count | None = None
    """Key and value heads (grouped-query attention); as many as query heads if not given."""
    n_embd: Count = 768
    """Width of the residual stream."""
    head_dim: Count | None = None
    """Width of one head; n_embd / n_head if not given."""
    block_size: Count = 1024
    """Context length in tokens."""
    vocab_size: Annotated[int, Field(ge=0, lt=2**31)] = 50257
    """Token ids the embedding knows; 0 takes the data set's number."""
    norm: Annotated[str, AfterValidator(OneOf(NORMS))] = "layernorm"
    """(x - mean) / std or x / rms of a token. For contrast: batchnorm (of a feature over batch and time, which leaks),
    dyt: tanh(alpha x), derf: erf(alpha x + shift), none."""
    placement: str = "pre"
    """Where it sits: none, pre, post, output, sandwich, keel (in and post), out_post or all, for all branches; or a
    pattern, as "post*6 pre*18" (branches from the bottom) or "attn:post mlp:none"."""
    qk_norm: Literal["off", "head", "full"] = "off"
    """Norm of queries and keys before RoPE: none, per head with one shared gain, or over all heads at once."""
    v_norm: bool = False
    """Norm of each head's values, without a gain."""
    gain: Literal["one", "zero_centred", "none"] = "one"
    """What multiplies a normalized row: w from 1; 1 + w with w from 0 (which subtracts no mean); nothing."""
    out_gain_init: Positive | Literal["depth"] = 1.0
    """Where the gain of N_out starts; depth: 1/sqrt(2L), for a depth-scaled sandwich."""
    alpha_init: Positive = 0.5
    """Where alpha of dyt and derf starts."""
    force_placement: bool = False
    """Allow dyt and derf elsewhere than in pre, for which they are made."""
    norm_eps: Annotated[float, Field(ge=torch.finfo(torch.float32).tiny, allow_inf_nan=False)] = 1e-5
    """Added to the variance (layernorm) or the mean square (rmsnorm)."""
    bias: bool = True
    """Biases in linears and LayerNorms."""
    embed_norm: bool = False
    """A norm directly after the embedding."""
    embed_scale: Positive | Literal["sqrt_dim"] = 1.0
    """Factor of the token embedding; sqrt_dim: sqrt(n_embd), as Gemma."""
    residual_scale: Positive | Annotated[str, AfterValidator(OneOf(SCALES))] = "one"
    """Factors a, b, c by depth. A number is b. deepnorm: a = (2L)^(1/4), branches start (8L)^(-1/4) times smaller.
    lns: c = 1/sqrt(layer). keel: a = 2L. depth: a = sqrt((k-1)/k), b = 1/sqrt(k) at the k-th term of the stream."""
    pos: Literal["learned", "rope"] = "learned"
    """Positions: an embedding added at the bottom, or rotary in every attention."""
    rope_theta: Positive = 10000.0
    """Base of the rotary wavelengths."""
    mlp: Literal["gelu", "gelu_tanh", "swiglu", "geglu"] = "gelu_tanh"
    """Exact GELU (nanoGPT), its tanh form (GPT-2), SwiGLU (Llama), or a gated tanh GELU (Gemma)."""
    mlp_hidden: Count | None = None
    """Hidden width of the MLP; 4 n_embd, for swiglu and geglu 8/3 n_embd rounded up to a multiple of 8."""
    tie_embeddings: bool = True
    """The output head is the token embedding."""
    head_bias: bool = False
    """A bias in the output head, as a folded final LayerNorm needs one."""
    logit_softcap: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """c of c tanh(logits / c); 0 leaves the logits as they are."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability, on the embedding, the attention weights and every branch's output."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the branches compute in; parameters stay float32. auto: what the device does best (train.py)."""
    residual_dtype: Literal["float32", "compute"] = "float32"
    """What the stream is kept in: float32, or the compute dtype."""
    kernel: Literal["auto", "torch", "triton"] = "auto"
    """Norms and joins: PyTorch, fused Triton kernels, or auto (triton on CUDA)."""

    def __post_init__(self):
        norm, names, scale = NORMS[self.norm], set(self.placements), self.residual_scale
        fits = self.n_embd // self.n_head * self.n_head or self.n_head
        divides = self.head_dim or fits == self.n_embd
        heads = f"n_embd {self.n_embd} does not divide into n_head {self.n_head} heads"
        require(divides, f"{heads}; {fits} would, or give head_dim")
        groups = self.n_head % self.kv_heads == 0
        require(groups, f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")
        even = self.pos != "rope" or self.head_width % 2 == 0
        require(even, f"head_dim is {self.head_width}; pos rope rotates pairs and needs an even head_dim")
        of_heads = norm.per_token or (self.qk_norm == "off" and not self.v_norm)
        require(of_heads, f"qk_norm and v_norm are for norms of a token, which {self.norm} is not")
        fused = norm.kind is not None or self.kernel != "triton"
        require(fused, f"kernel is triton, but norm {self.norm} is never fused; it runs with torch or auto")
        in_place = names == {"pre"} or not norm.pre_only or self.force_placement
        require(in_place, f"norm {self.norm} is for placement pre; force_placement allows {self.placement}")
        suited = SCALES[scale][1] if scale in SCALES else PLACEMENTS
        scaled = f"residual_scale {scale} belongs to placement {', '.join(suited)}"
        require(names <= set(suited), f"{scaled}, not {self.placement}")
        gains = norm.has_gain and self.gain != "none"
        starts = self.out_gain_init == 1 or (gains and not names.isdisjoint(having("out")))
        require(starts, "out_gain_init is for an N_out with a gain, as placement sandwich has")

    @property
    def placements(self) -> tuple[str, ...]:
        """The placement of every branch, from the bottom. Raises ValueError for a pattern that does not fit."""
        return spread(self.placement, self.n_layer)

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_width(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def hidden(self) -> int:
        if self.mlp_hidden:
            return self.mlp_hidden
        return -(-8 * self.n_embd // 24) * 8 if self.mlp in GATED else 4 * self.n_embd

    def factors(self, branch: int) -> tuple[float, float, float]:
        """a, b and c of the equation for a branch, counted from 0 at the bottom."""
        scale = self.residual_scale
        return SCALES[scale][0](branch, self.n_layer) if scale in SCALES else (1.0, scale, 1.0)

    def branch_init(self, branch: int) -> tuple[float, float]:
        """What the initialization of a branch's inner (v, up, gate) and last (out, down) linears is multiplied by.

        A stream that sums 2L bare branches ends each 1/sqrt(2L) smaller (GPT-2), unless factors by depth do that (Sun
        et al. 2025, table 4). DeepNorm's beta: Wang et al. 2022, decoder-only row of figure 2.
        """
        if self.residual_scale == "deepnorm":
            return (8 * self.n_layer) ** -0.25, (8 * self.n_layer) ** -0.25
        bare = not PLACEMENTS[self.placements[branch]] & {"out", "post"} and self.residual_scale in ("one", 1)
        return 1.0, (2 * self.n_layer) ** -0.5 if bare else 1.0


def spread(pattern: str, n_layer: int) -> tuple[str, ...]:
    """The placements of 2 n_layer branches, from the bottom, that a pattern names. Raises ValueError.

    One name is for all branches, "post*6 pre*18" counts them, "attn:post mlp:none" tells attention and MLPs apart.
    """
    words, branches = pattern.split(), 2 * n_layer
    kinds = re.fullmatch(r"attn:(\S+) mlp:(\S+)", " ".join(words))
    if kinds:
        words = kinds.groups() * n_layer
    elif len(words) == 1 and "*" not in pattern:
        words = [f"{words[0]}*{branches}"]
    counts = [re.fullmatch(r"(.+?)(?:\*(\d{1,9}))?", word).groups("1") for word in words]
    for name, _ in counts:
        hint = did_you_mean(name, PLACEMENTS) or f" ({', '.join(PLACEMENTS)}; post*6 pre*18)"
        require(name in PLACEMENTS, f"placement {pattern!r}: {name!r} is not a placement{hint}")
    named = f"placement {pattern!r} names {sum(int(count) for _, count in counts)} branches"
    names = tuple(name for name, count in counts for _ in range(min(int(count), branches + 1)))
    require(len(names) == branches, f"{named}; n_layer {n_layer} makes {branches}")
    return names


def unless_float64(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, unless the model was converted to float64, which then computes in float64 throughout."""
    return torch.float64 if x.dtype == torch.float64 else dtype


class Linear(nn.Linear):
    """y = x W^T + b in the dtype of x, whatever the dtype of the parameters."""

    def __init__(self, n_in: int, n_out: int, bias: bool, init_scale: float = 1.0):
        self.init_scale = init_scale
        super().__init__(n_in, n_out, bias)

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.02 * self.init_scale)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Dropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return kernels.dropout(x, self.p) if self.training else x


class Norm(nn.Module):
    """N(x): what `normalize` gives, times a gain, plus a bias; c of the equation is a factor of both.

    A kind of norm is a subclass with a `normalize` of its own and an entry in NORMS.
    """

    kind: str | None = None  # the name under which `kernels` computes it; None: it is not fused
    has_gain = has_bias = True
    per_token = True  # whether its statistics are those of one token, so that it can normalize a head
    pre_only = False  # whether other placements than pre want to be forced

    def __init__(self, dim: int, config: ModelConfig, factor=1.0, start=1.0, gain=""):
        super().__init__()
        gain = gain or config.gain
        has_gain = self.has_gain and gain != "none"
        self.zero_centred = has_gain and gain == "zero_centred"
        self.weight = nn.Parameter(torch.full((dim,), start - self.zero_centred)) if has_gain else None
        self.bias = nn.Parameter(torch.zeros(dim)) if has_gain and self.has_bias and config.bias else None
        self.eps, self.impl, self.factor = config.norm_eps, config.kernel, factor

    def normalize(self, x: Tensor) -> Tensor:
        """What the gain multiplies, for x [..., D] in float32 or float64."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it normalizes")

    def gain(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(weight, bias) [D] of the equation for x [..., D]; None where there is none."""
        weight, bias = self.weight, self.bias
        if self.zero_centred:
            weight = 1 + weight
        if self.factor != 1:
            ones = x.new_ones(x.shape[-1:], dtype=unless_float64(x, torch.float32))
            weight = self.factor * (ones if weight is None else weight)
            bias = None if bias is None else self.factor * bias
        return weight, bias

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        weight, bias = self.gain(x)
        y = self.normalize(x.to(unless_float64(x, torch.float32)))
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
        return y.to(out_dtype or x.dtype)

    @classmethod
    def join(cls, x, s, out, then, a, b, eps, impl, out_dtype=None, want_sum=True):
        """`kernels.join` with norms in place of gains: (r = a x + b N_out(s), N_then(r))."""
        r = times(a, x) + times(b, s if out is None else out(s, x.dtype))
        h = r.to(out_dtype or s.dtype) if then is None else then(r, out_dtype or s.dtype)
        return (r if want_sum else None), h


class FusedNorm(Norm):
    """A norm that `kernels` computes, alone and together with the add before it."""

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        how = {"kind": self.kind, "eps": self.eps, "impl": self.impl}
        return kernels.norm(x, self.gain(x), out_dtype=out_dtype, **how)

    @classmethod
    def join(cls, x, s, out, then, a, b, eps, impl, out_dtype=None, want_sum=True):
        out, then = (None if norm is None else norm.gain(x) for norm in (out, then))
        how = {"kind": cls.kind, "eps": eps, "impl": impl, "out_dtype": out_dtype, "want_sum": want_sum}
        return kernels.join(x, s, out=out, then=then, a=a, b=b, **how)


class LayerNorm(FusedNorm):
    """(x - mean) / sqrt(variance + eps), of a token's features (Ba, Kiros and Hinton 2016)."""

    kind = "layernorm"


class RMSNorm(FusedNorm):
    """x / sqrt(mean square + eps), of a token's features (Zhang and Sennrich 2019)."""

    kind = "rmsnorm"
    has_bias = False


class BatchNorm(Norm):
    """Ioffe & Szegedy 2015: each feature normalized over batch *and time*, and so, in training, over the future.

    Training normalizes by the biased variance of the batch and tracks the mean and the unbiased variance with
    momentum 0.1; evaluation uses what was tracked.
    """

    per_token = False
    momentum = 0.1

    def __init__(self, dim: int, config: ModelConfig, *how):
        super().__init__(dim, config, *how)
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    @staticmethod
    def over_processes(total: Tensor) -> Tensor:
        """A tensor summed over the processes; `training.parallel` knows of others."""
        return total

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:  # [B, T, D]
        return super().forward(x.flatten(0, -2), out_dtype).view(x.shape)

    def normalize(self, rows: Tensor) -> Tensor:
        mean, var = self.statistics(rows) if self.training else (self.running_mean, self.running_var)
        return (rows - mean) * (var + self.eps).rsqrt()

    def statistics(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance [D] of rows [B * T, D], tracked on the way."""
        n = self.over_processes(rows.new_full((), len(rows)))
        mean = self.over_processes(rows.sum(0)) / n
        var = self.over_processes((rows - mean).square().sum(0)) / n
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (n / (n - 1).clamp(min=1)), self.momentum)
        return mean, var


class DyT(Norm):
    """tanh(alpha x), without a statistic, for contrast (Zhu et al. 2025, "Transformers without Normalization")."""

    pre_only = True

    def __init__(self, dim: int, config: ModelConfig, *how):
        super().__init__(dim, config, *how)
        self.alpha = nn.Parameter(torch.full((1,), config.alpha_init))

    def normalize(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x)


class Derf(DyT):
    """erf(alpha x + shift) (Chen et al. 2025, "Stronger Normalization-Free Transformers")."""

    def __init__(self, dim: int, config: ModelConfig, *how):
        super().__init__(dim, config, *how)
        self.shift = nn.Parameter(torch.zeros(1))

    def normalize(self, x: Tensor) -> Tensor:
        return torch.erf(self.alpha * x + self.shift)


class NoNorm(Norm):
    """x itself: what happens without."""

    has_gain = False

    def normalize(self, x: Tensor) -> Tensor:
        return x


NORMS.update(layernorm=LayerNorm, rmsnorm=RMSNorm, batchnorm=BatchNorm, dyt=DyT, derf=Derf, none=NoNorm)


def make_norm(dim: int, config: ModelConfig, *how) -> Norm:
    """A norm of the configured kind; `how` is what Norm.__init__ takes: factor, start and form of the gain."""
    return NORMS[config.norm](dim, config, *how)


def times(factor: float, x: Tensor) -> Tensor:
    """factor * x, and x itself where that is the same."""
    return x if factor == 1 else factor * x


class Rope(nn.Module):
    """Rotary positions (Su et al. 2021), rotating the two halves of a head as transformers does."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.theta, shape = config.rope_theta, (config.block_size, config.head_width // 2)
        self.register_buffer("cos", torch.empty(shape), persistent=False)
        self.register_buffer("sin", torch.empty(shape), persistent=False)
        self.fill()

    def fill(self):
        time, pairs = self.cos.shape
        rate = self.theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
        angle = torch.outer(torch.arange(time, dtype=torch.float64), rate)  # [T, head_dim / 2]
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.fill()  # a model converted to float64 has float64's angles, not float32's
        return self

    def forward(self, x: Tensor) -> Tensor:  # [B, H, T, head_dim]
        cos, sin = self.cos[: x.size(-2)], self.sin[: x.size(-2)]
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; n_kv_head < n_head shares each key and value among several queries."""

    def __init__(self, config: ModelConfig, init: tuple[float, float] = (1.0, 1.0)):
        super().__init__()
        self.head_dim, (inner_init, last_init) = config.head_width, init
        n_q, n_kv = config.n_head * self.head_dim, config.kv_heads * self.head_dim
        self.sizes = (n_q, n_kv, n_kv)
        self.qkv = Linear(config.n_embd, n_q + 2 * n_kv, config.bias)
        self.out = Linear(n_q, config.n_embd, config.bias, last_init)
        # A query's or key's statistics are those of one head, or of all heads at once.
        self.norm_widths = (n_q, n_kv) if config.qk_norm == "full" else (self.head_dim, self.head_dim)
        self.q_norm, self.k_norm = (
            nn.Identity() if config.qk_norm == "off" else make_norm(width, config)
            for width in self.norm_widths
        )
        self.v_norm = make_norm(self.head_dim, config, 1.0, 1.0, "none") if config.v_norm else nn.Identity()
        self.rotate = Rope(config) if config.pos == "rope" else nn.Identity()
        self.impl = config.kernel
        self.dropout = Dropout(config.dropout)
        with torch.no_grad():
            self.qkv.weight[-n_kv:] *= inner_init

    def forward(self, h: Tensor) -> Tensor:  # [B, T, D]
        q, k, v = self.qkv(h).split(self.sizes, dim=-1)
        q = self.rotate(self.heads(self.q_norm(q.unflatten(-1, (-1, self.norm_widths[0])))))
        k = self.rotate(self.heads(self.k_norm(k.unflatten(-1, (-1, self.norm_widths[1])))))
        dropout = self.dropout.p if self.training else 0.0
        v = self.heads(self.v_norm(v.unflatten(-1, (-1, self.head_dim))))
        y = kernels.attend(q, k, v, dropout=dropout, impl=self.impl)
        return self.dropout(self.out(y.transpose(1, 2).flatten(-2)))

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, n, width] -> [B, H, T, head_dim], with n * width = H * head_dim."""
        return x.flatten(-2).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """down(act(up h)), or down(act(gate h) * up h) with a gate (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, config: ModelConfig, init: tuple[float, float] = (1.0, 1.0)):
        super().__init__()
        inner_init, last_init = init
        sizes = config.n_embd, config.hidden, config.bias
        self.gate = Linear(*sizes, inner_init) if config.mlp in GATED else None
        self.up = Linear(*sizes, inner_init)
        self.down = Linear(config.hidden, config.n_embd, config.bias, last_init)
        self.activation, self.dropout = ACTIVATIONS[config.mlp], Dropout(config.dropout)

    def forward(self, h: Tensor) -> Tensor:
        up = self.up(h)
        hidden = self.activation(up) if self.gate is None else self.activation(self.gate(h)) * up
        return self.dropout(self.down(hidden))


def next_norm(config: ModelConfig, branch: int) -> Norm | None:
    """N_in of a branch, counted from 0; above the last one the final norm, unless that branch ends in N_post."""
    if branch == 2 * config.n_layer:
        last = PLACEMENTS[config.placements[-1]]
        return None if "post" in last else make_norm(config.n_embd, config)
    has_norm = "in" in PLACEMENTS[config.placements[branch]]
    return make_norm(config.n_embd, config, config.factors(branch)[2]) if has_norm else None


class Join(nn.Module):
    """r = a x + b N_out(s); the stream keeps y = N_post(r), and the next branch reads h = c N_in(y), its own norm.

    A norm that the placement leaves out is None. The sum itself is not written where N_post follows.
    """

    def __init__(self, config: ModelConfig, branch: int = 0):
        super().__init__()
        norms = PLACEMENTS[config.placements[branch]]
        self.a, self.b, _ = config.factors(branch)
        start = (2 * config.n_layer) ** -0.5 if config.out_gain_init == "depth" else config.out_gain_init
        self.out_norm = make_norm(config.n_embd, config, 1.0, start) if "out" in norms else None
        self.post_norm = make_norm(config.n_embd, config) if "post" in norms else None
        self.next_norm = next_norm(config, branch + 1)
        self.add, self.eps, self.impl = NORMS[config.norm].join, config.norm_eps, config.kernel

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        factors = (self.a, self.b, self.eps, self.impl)
        if self.post_norm is None:
            return self.add(x, s, self.out_norm, self.next_norm, *factors)
        _, y = self.add(x, s, self.out_norm, self.post_norm, *factors, out_dtype=x.dtype, want_sum=False)
        return y, y.to(s.dtype) if self.next_norm is None else self.next_norm(y, s.dtype)


class Cast(nn.Module):
    """N_in left out: the branch reads the stream itself, in the compute dtype."""

    def forward(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        return x.to(out_dtype)


class LearnedPositions(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.block_size, config.n_embd))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        return x + self.weight[: x.size(1)]


def unwatched(x: Tensor) -> None:
    """Nobody looks at the stream [B, T, D]."""


class GPT(nn.Module):
    """tokens [B, T] -> logits [B, T, V] by way of one stream, 2L branches and 2L joins."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.vocab_size > 0, "0 stands for the data set's, and is resolved before the model"
        self.config, self.softcap = config, config.logit_softcap
        self.embed_scale = config.n_embd**0.5 if config.embed_scale == "sqrt_dim" else config.embed_scale
        self.compute_dtype = DTYPES[config.dtype]
        self.stream_dtype = self.compute_dtype if config.residual_dtype == "compute" else torch.float32
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.pos_embed = LearnedPositions(config) if config.pos == "learned" else nn.Identity()
        self.embed_norm = make_norm(config.n_embd, config) if config.embed_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.entry = next_norm(config, 0) or Cast()
        branches = range(2 * config.n_layer)
        self.branches = nn.ModuleList(
            (Attention, MLP)[k % 2](config, config.branch_init(k)) for k in branches
        )
        self.joins = nn.ModuleList(Join(config, k) for k in branches)
        self.head = Linear(config.n_embd, config.vocab_size, config.head_bias)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None, watch: Callable = unwatched):
        """Logits [B, T, V] in float32, and the mean cross-entropy in nats over the targets that are not -1.

        tokens, targets: int64 [B, T], T at most block_size. `watch` sees the stream at the bottom and after every join.
        """
        logits = self.logits(self.read(tokens, watch))
        return logits, None if targets is None else cross_entropy(logits.flatten(0, 1), targets.flatten())[0]

    def loss(self, tokens: Tensor, targets: Tensor, watch: Callable = unwatched, z_loss: float = 0.0):
        """(the loss of `forward` + z_loss * mean logsumexp^2, the second alone or None), without all logits at once."""
        h, head = self.read(tokens, watch).flatten(0, 1), self.head
        how = {"softcap": self.softcap, "z_loss": z_loss}
        return linear_cross_entropy(h, head.weight, head.bias, targets.flatten(), **how)

    def read(self, tokens: Tensor, watch: Callable) -> Tensor:
        """What the head reads [B, T, D], after the last join."""
        assert tokens.size(1) <= self.config.block_size, "more tokens than block_size"
        x = self.dropout(self.embed_norm(self.pos_embed(times(self.embed_scale, self.embed(tokens)))))
        x = x.to(unless_float64(x, self.stream_dtype))
        watch(x)
        h = self.entry(x, out_dtype=unless_float64(x, self.compute_dtype))
        for branch, join in zip(self.branches, self.joins, strict=True):
            x, h = join(x, branch(h))
            watch(x)
        return h

    def logits(self, h: Tensor) -> Tensor:
        logits = self.head(h)
        return softcapped(logits.to(unless_float64(logits, torch.float32)), self.softcap)  # [B, T, V]

    def n_params(self) -> int:
        """Trainable numbers; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())

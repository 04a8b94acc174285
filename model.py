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
from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kernels
from base.cli import OneOf, did_you_mean

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
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Count = Annotated[int, Field(ge=1, lt=2**31)]
LOSS_LOGITS = 2**26  # float32 logits that `GPT.loss` holds at once: 256 MiB


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True))
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
    """(x - mean) / std or x / rms of a token; batchnorm for contrast: of a feature over batch and time, which leaks."""
    placement: str = "pre"
    """Where it sits: none, pre, post, output, sandwich, keel (in and post), out_post or all, for all branches; or a
    pattern, as "post*6 pre*18" (branches from the bottom) or "attn:post mlp:none"."""
    qk_norm: Literal["off", "head", "full"] = "off"
    """Norm of queries and keys before RoPE: none, per head with one shared gain, or over all heads at once."""
    norm_eps: Annotated[float, Field(ge=torch.finfo(torch.float32).tiny, allow_inf_nan=False)] = 1e-5
    """Added to the variance (layernorm) or the mean square (rmsnorm)."""
    bias: bool = True
    """Biases in linears and LayerNorms."""
    embed_norm: bool = False
    """A norm directly after the embedding."""
    residual_scale: Literal["one", "deepnorm"] = "one"
    """post only: deepnorm keeps (2L)^(1/4) of x and initializes the branches (8L)^(-1/4) times smaller."""
    pos: Literal["learned", "rope"] = "learned"
    """Positions: an embedding added at the bottom, or rotary in every attention."""
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10000.0
    """Base of the rotary wavelengths."""
    mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu_tanh"
    """Exact GELU (nanoGPT), its tanh form (GPT-2), or SwiGLU (Llama)."""
    mlp_hidden: Count | None = None
    """Hidden width of the MLP; 4 n_embd, for swiglu 8/3 n_embd rounded up to a multiple of 8."""
    tie_embeddings: bool = True
    """The output head is the token embedding."""
    head_bias: bool = False
    """A bias in the output head, as a folded final LayerNorm needs one."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability, on the embedding, the attention weights and every branch's output."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the branches compute in; parameters stay float32. auto: what the device does best (train.py)."""
    residual_dtype: Literal["float32", "compute"] = "float32"
    """What the stream is kept in: float32, or the compute dtype."""
    kernel: Literal["auto", "torch", "triton"] = "auto"
    """Norms and joins: PyTorch, fused Triton kernels, or auto (triton on CUDA)."""

    def __post_init__(self):
        placements = set(self.placements)
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd {self.n_embd} does not divide into n_head {self.n_head} heads; "
                f"{self.n_embd // self.n_head * self.n_head or self.n_head} would, or give head_dim"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")
        if self.pos == "rope" and self.head_width % 2:
            raise ValueError(
                f"head_dim is {self.head_width}; pos rope rotates pairs and needs an even head_dim"
            )
        if self.qk_norm != "off" and not NORMS[self.norm].per_token:
            raise ValueError(f"qk_norm {self.qk_norm} is for norms of a token, which {self.norm} is not")
        if self.kernel == "triton" and NORMS[self.norm].kind is None:
            raise ValueError(
                f"kernel is triton, but norm {self.norm} is never fused; it runs with torch or auto"
            )
        if self.residual_scale == "deepnorm" and placements != {"post"}:
            raise ValueError(f"residual_scale deepnorm belongs to placement post, not {self.placement}")

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
        return -(-8 * self.n_embd // 24) * 8 if self.mlp == "swiglu" else 4 * self.n_embd

    @property
    def compute_dtype(self) -> torch.dtype:
        return DTYPES.get(self.dtype, torch.float32)

    @property
    def stream_dtype(self) -> torch.dtype:
        return self.compute_dtype if self.residual_dtype == "compute" else torch.float32

    def factors(self, branch: int) -> tuple[float, float, float]:
        """a, b and c of the equation for a branch, counted from 0 at the bottom."""
        return RESIDUAL_SCALES[self.residual_scale](branch, self.n_layer)

    def branch_init(self, branch: int) -> tuple[float, float]:
        """What the initialization of a branch's inner (v, up, gate) and last (out, down) linears is multiplied by.

        A stream that sums 2L bare branches ends each 1/sqrt(2L) smaller (GPT-2). N_out fixes the branch's scale,
        and N_post that of the sum. DeepNorm's beta: Wang et al. 2022, "DeepNet: Scaling Transformers to 1,000
        Layers", decoder-only row of its figure 2.
        """
        if self.residual_scale == "deepnorm":
            return (8 * self.n_layer) ** -0.25, (8 * self.n_layer) ** -0.25
        bare = not PLACEMENTS[self.placements[branch]] & {"out", "post"}
        return 1.0, (2 * self.n_layer) ** -0.5 if bare else 1.0


RESIDUAL_SCALES = {  # (branch from 0, L) -> a, b, c
    "one": lambda branch, n_layer: (1.0, 1.0, 1.0),
    "deepnorm": lambda branch, n_layer: ((2 * n_layer) ** 0.25, 1.0, 1.0),
}


def spread(pattern: str, n_layer: int) -> tuple[str, ...]:
    """The placements of 2 n_layer branches, from the bottom, that a pattern names. Raises ValueError.

    One name is for all branches, "post*6 pre*18" counts them, "attn:post mlp:none" tells attention and MLPs apart.
    """
    words, branches = pattern.split(), 2 * n_layer
    kinds = re.fullmatch(r"attn:(\S*) mlp:(\S*)", " ".join(words))
    if kinds:
        runs = [(name, 1) for name in kinds.groups()] * n_layer
    elif len(words) == 1 and "*" not in pattern:
        runs = [(words[0], branches)]
    else:
        parts = [re.fullmatch(r"(.+?)(?:\*(\d{1,9}))?", word).groups("1") for word in words]
        runs = [(name, int(count)) for name, count in parts]
    unknown = next((name for name, _ in runs if name not in PLACEMENTS), None)
    if unknown:
        hint = did_you_mean(unknown, PLACEMENTS) or f" ({', '.join(PLACEMENTS)})"
        raise ValueError(f"placement {pattern!r}: {unknown!r} is not a placement{hint}")
    named = sum(count for _, count in runs)
    if named != branches:
        raise ValueError(
            f"placement {pattern!r} names {named} branches, and n_layer {n_layer} makes {branches}"
        )
    return tuple(name for name, count in runs for _ in range(count))


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
    has_bias = True
    per_token = True  # whether its statistics are those of one token, so that it can normalize a head

    def __init__(self, dim: int, config: ModelConfig, factor: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if config.bias and self.has_bias else None
        self.eps, self.impl, self.factor = config.norm_eps, config.kernel, factor

    def normalize(self, x: Tensor) -> Tensor:
        """What the gain multiplies, for x [..., D] in float32 or float64."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it normalizes")

    def gain(self) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) [D] as the equation has them."""
        bias = None if self.bias is None else times(self.factor, self.bias)
        return times(self.factor, self.weight), bias

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        weight, bias = self.gain()
        y = self.normalize(x.to(torch.promote_types(x.dtype, torch.float32))) * weight
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
        return kernels.norm(x, self.gain(), out_dtype=out_dtype, **how)

    @classmethod
    def join(cls, x, s, out, then, a, b, eps, impl, out_dtype=None, want_sum=True):
        out, then = (None if norm is None else norm.gain() for norm in (out, then))
        how = {"kind": cls.kind, "eps": eps, "impl": impl, "out_dtype": out_dtype, "want_sum": want_sum}
        return kernels.join(x, s, out=out, then=then, a=a, b=b, **how)


class LayerNorm(FusedNorm):
    """(x - mean) / sqrt(variance + eps), of a token's features (Ba, Kiros and Hinton 2016)."""

    kind = "layernorm"


class RMSNorm(FusedNorm):
    """x / sqrt(mean square + eps), of a token's features (Zhang and Sennrich 2019)."""

    kind = "rmsnorm"
    has_bias = False


def alone(total: Tensor) -> Tensor:
    """What `BatchNorm.over_processes` is on one process."""
    return total


class BatchNorm(Norm):
    """Ioffe & Szegedy 2015: each feature normalized over batch *and time*, and so, in training, over the future.

    Training normalizes by the biased variance of the batch and tracks the mean and the unbiased variance with
    momentum 0.1; evaluation uses what was tracked. `over_processes` sums a tensor over the processes.
    """

    per_token = False
    momentum = 0.1

    def __init__(self, dim: int, config: ModelConfig, factor: float = 1.0):
        super().__init__(dim, config, factor)
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))
        self.over_processes = alone

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


NORMS |= {"layernorm": LayerNorm, "rmsnorm": RMSNorm, "batchnorm": BatchNorm}


def make_norm(dim: int, config: ModelConfig, factor: float = 1.0) -> Norm:
    return NORMS[config.norm](dim, config, factor)


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
        self.rotate = Rope(config) if config.pos == "rope" else nn.Identity()
        self.impl = config.kernel
        self.dropout = Dropout(config.dropout)
        with torch.no_grad():
            self.qkv.weight[-n_kv:] *= inner_init

    def forward(self, h: Tensor) -> Tensor:  # [B, T, D]
        q, k, v = self.qkv(h).split(self.sizes, dim=-1)
        q_width, k_width = self.norm_widths
        q = self.rotate(self.heads(self.q_norm(q.unflatten(-1, (-1, q_width)))))
        k = self.rotate(self.heads(self.k_norm(k.unflatten(-1, (-1, k_width)))))
        dropout = self.dropout.p if self.training else 0.0
        y = kernels.attend(q, k, self.heads(v.unsqueeze(-2)), dropout=dropout, impl=self.impl)
        return self.dropout(self.out(y.transpose(1, 2).flatten(-2)))

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, n, width] -> [B, H, T, head_dim], with n * width = H * head_dim."""
        return x.flatten(-2).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, init: tuple[float, float] = (1.0, 1.0)):
        super().__init__()
        inner_init, last_init = init
        self.up = Linear(config.n_embd, config.hidden, config.bias, inner_init)
        self.down = Linear(config.hidden, config.n_embd, config.bias, last_init)
        self.gelu = partial(F.gelu, approximate="tanh" if config.mlp == "gelu_tanh" else "none")
        self.dropout = Dropout(config.dropout)

    def forward(self, h: Tensor) -> Tensor:
        return self.dropout(self.down(self.gelu(self.up(h))))


class SwiGLU(nn.Module):
    """Shazeer 2020, "GLU Variants Improve Transformer"."""

    def __init__(self, config: ModelConfig, init: tuple[float, float] = (1.0, 1.0)):
        super().__init__()
        inner_init, last_init = init
        self.gate = Linear(config.n_embd, config.hidden, config.bias, inner_init)
        self.up = Linear(config.n_embd, config.hidden, config.bias, inner_init)
        self.down = Linear(config.hidden, config.n_embd, config.bias, last_init)
        self.dropout = Dropout(config.dropout)

    def forward(self, h: Tensor) -> Tensor:
        return self.dropout(self.down(F.silu(self.gate(h)) * self.up(h)))


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
        self.out_norm = make_norm(config.n_embd, config) if "out" in norms else None
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
    """The default of `GPT.forward(watch=...)`: nobody looks."""


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction=reduction)


class GPT(nn.Module):
    """tokens [B, T] -> logits [B, T, V] by way of one stream, 2L branches and 2L joins."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.vocab_size > 0, (
            "vocab_size 0 stands for the data set's and is resolved before the model"
        )
        self.config = config
        self.stream_dtype, self.compute_dtype = config.stream_dtype, config.compute_dtype
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.pos_embed = LearnedPositions(config) if config.pos == "learned" else nn.Identity()
        self.embed_norm = make_norm(config.n_embd, config) if config.embed_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.entry = next_norm(config, 0) or Cast()
        kinds = (Attention, SwiGLU if config.mlp == "swiglu" else MLP)
        branches = range(2 * config.n_layer)
        self.branches = nn.ModuleList(kinds[k % 2](config, config.branch_init(k)) for k in branches)
        self.joins = nn.ModuleList(Join(config, k) for k in branches)
        self.head = Linear(config.n_embd, config.vocab_size, config.head_bias)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, watch: Callable[[Tensor], None] = unwatched
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, T, V] in float32, and the mean cross-entropy in nats over the targets that are not -1.

        tokens, targets: int64 [B, T]. T may not exceed block_size. `watch` is called with the stream [B, T, D]
        after the embedding and after every join.
        """
        logits = self.logits(self.read(tokens, watch))
        return logits, None if targets is None else cross_entropy(logits, targets, "mean")

    def loss(self, tokens: Tensor, targets: Tensor, watch: Callable[[Tensor], None] = unwatched) -> Tensor:
        """The loss of `forward`, with the logits of no more than LOSS_LOGITS / V tokens in memory at once.

        Backward computes them again. Where they all fit, it is `forward`.
        """
        rows = max(LOSS_LOGITS // self.config.vocab_size, 1)
        if targets.numel() <= rows:
            return self.forward(tokens, targets, watch)[1]  # not through __call__: FSDP has hooked both
        h = self.read(tokens, watch).flatten(0, 1)
        pieces = zip(h.split(rows), targets.flatten().split(rows), strict=True)
        sums = [checkpoint(self.summed_loss, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(sums).sum() / (targets != -1).sum()

    def summed_loss(self, h: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.logits(h), targets, "sum")

    def read(self, tokens: Tensor, watch: Callable[[Tensor], None]) -> Tensor:
        """What the head reads [B, T, D], after the last join."""
        assert tokens.size(1) <= self.config.block_size, "more tokens than block_size"
        x = self.dropout(self.embed_norm(self.pos_embed(self.embed(tokens))))
        x = x.to(unless_float64(x, self.stream_dtype))
        watch(x)
        h = self.entry(x, out_dtype=unless_float64(x, self.compute_dtype))
        for branch, join in zip(self.branches, self.joins, strict=True):
            x, h = join(x, branch(h))
            watch(x)
        return h

    def logits(self, h: Tensor) -> Tensor:
        logits = self.head(h)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))  # [B, T, V]

    def n_params(self) -> int:
        """Trainable numbers; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())

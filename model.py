"""A decoder-only transformer, told as a residual stream that branches leave and joins re-enter.

The *stream* x carries one vector per token. A *branch* (attention or MLP) reads the stream and produces
an update s. A *join* adds the update and normalizes; the four placements are one equation with some of
its norms left out:

    y = N_post( x + N_out( S( N_in(x) ) ) )

The norm that follows an add lives in the same join as that add, so that both are one kernel, and the
forward pass is the same three lines for every placement. Read the file top to bottom, leaf to root.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kernels

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOSS_LOGITS = 2**26  # float32 logits that `GPT.loss` holds at once: 256 MiB


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True))
class ModelConfig:
    """The shape of the network and its normalization. The defaults are GPT-2's (124M)."""

    n_layer: int = 12
    """Layers; each is an attention branch and an MLP branch."""
    n_head: int = 12
    """Query heads."""
    n_kv_head: int | None = None
    """Key and value heads (grouped-query attention); as many as query heads if not given."""
    n_embd: int = 768
    """Width of the residual stream."""
    head_dim: int | None = None
    """Width of one head; n_embd / n_head if not given."""
    block_size: int = 1024
    """Context length in tokens."""
    vocab_size: int = 50257
    """Token ids the embedding knows; 0 takes the data set's number."""
    norm: Literal["layernorm", "rmsnorm", "batchnorm"] = "layernorm"
    """(x - mean) / std or x / rms of a token; batchnorm for contrast: of a feature over batch and time, which leaks."""
    placement: Literal["pre", "post", "output", "sandwich"] = "pre"
    """Where it sits: x + S(N(x)), N(x + S(x)), x + N(S(x)) or x + N(S(N(x)))."""
    qk_norm: Literal["off", "head", "full"] = "off"
    """Norm of queries and keys before RoPE: none, per head with one shared gain, or over all heads at once."""
    norm_eps: float = 1e-5
    """Added to the variance (layernorm) or the mean square (rmsnorm)."""
    bias: bool = True
    """Biases in linears and LayerNorms."""
    embed_norm: bool = False
    """A norm directly after the embedding."""
    residual_scale: Literal["one", "deepnorm"] = "one"
    """post only: deepnorm keeps (2L)^(1/4) of x and initializes the branches (8L)^(-1/4) times smaller."""
    pos: Literal["learned", "rope"] = "learned"
    """Positions: an embedding added at the bottom, or rotary in every attention."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""
    mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu_tanh"
    """Exact GELU (nanoGPT), its tanh form (GPT-2), or SwiGLU (Llama)."""
    mlp_hidden: int | None = None
    """Hidden width of the MLP; 4 n_embd, for swiglu 8/3 n_embd rounded up to a multiple of 8."""
    tie_embeddings: bool = True
    """The output head is the token embedding."""
    head_bias: bool = False
    """A bias in the output head, as a folded final LayerNorm needs one."""
    dropout: float = 0.0
    """Probability, on the embedding, the attention weights and every branch's output."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the branches compute in; parameters stay float32. auto: what the device does best (train.py)."""
    residual_dtype: Literal["float32", "compute"] = "float32"
    """What the stream is kept in: float32, or the compute dtype."""
    kernel: Literal["auto", "torch", "triton"] = "auto"
    """Norms and joins: PyTorch, fused Triton kernels, or auto (triton on CUDA)."""

    def __post_init__(self):
        for name in ("n_layer", "n_head", "n_embd", "block_size", "n_kv_head", "head_dim", "mlp_hidden"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise ValueError(f"{name} is {value}; it must be at least 1 and below 2^31")
        if not 0 <= self.vocab_size < 2**31:
            raise ValueError(
                f"vocab_size is {self.vocab_size}; it must be positive and below 2^31, or 0 for the data set's"
            )
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
        if self.norm == "batchnorm" and self.qk_norm != "off":
            raise ValueError(
                f"qk_norm {self.qk_norm} is offered for layernorm and rmsnorm, not for batchnorm"
            )
        if self.norm == "batchnorm" and self.kernel == "triton":
            raise ValueError(
                "kernel is triton, but norm batchnorm is never fused; it runs with torch or auto"
            )
        if self.residual_scale == "deepnorm" and self.placement != "post":
            raise ValueError(f"residual_scale deepnorm belongs to placement post, not {self.placement}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")
        if not torch.finfo(torch.float32).tiny <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps is {self.norm_eps}; it must be positive and representable in float32")
        if not 0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta is {self.rope_theta}; it must be positive")

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

    @property
    def branch_init(self) -> tuple[float, float]:
        """What the initialization of a branch's inner (v, up, gate) and last (out, down) linears is multiplied by.

        pre sums 2L branches into the stream, so each ends 1/sqrt(2L) smaller (GPT-2). N_out fixes the branch's
        scale in output and sandwich, and N_post that of the sum in post. DeepNorm's beta: Wang et al. 2022,
        "DeepNet: Scaling Transformers to 1,000 Layers", decoder-only row of its figure 2.
        """
        if self.residual_scale == "deepnorm":
            return (8 * self.n_layer) ** -0.25, (8 * self.n_layer) ** -0.25
        return 1.0, (2 * self.n_layer) ** -0.5 if self.placement == "pre" else 1.0


def narrowed(x: Tensor, dtype: torch.dtype) -> torch.dtype:
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
    """N(x) over the last axis, and the joins' functions, each of which is one of `kernels`."""

    def __init__(self, dim: int, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        has_bias = config.bias and config.norm != "rmsnorm"
        self.bias = nn.Parameter(torch.zeros(dim)) if has_bias else None
        self.how = {"kind": config.norm, "eps": config.norm_eps, "impl": config.kernel}

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return kernels.norm(x, (self.weight, self.bias), out_dtype=out_dtype, **self.how)

    def add_norm(self, x: Tensor, s: Tensor, **how) -> tuple[Tensor | None, Tensor]:
        return kernels.add_norm(x, s, self.weight, self.bias, **how, **self.how)

    def norm_add(self, x: Tensor, s: Tensor) -> Tensor:
        return kernels.norm_add(x, s, self.weight, self.bias, **self.how)

    def norm_add_norm(self, x: Tensor, s: Tensor, then: "Norm") -> tuple[Tensor, Tensor]:
        return kernels.norm_add_norm(x, s, self.weight, self.bias, then.weight, then.bias, **self.how)


class FullNorm(Norm):
    """QK-norm over all heads at once: one statistic per token, a gain per feature."""

    def forward(self, x: Tensor) -> Tensor:  # [B, T, H, head_dim]
        return super().forward(x.flatten(-2)).view(x.shape)


def alone(total: Tensor) -> Tensor:
    """What `BatchNorm.over_processes` is on one process."""
    return total


class BatchNorm(Norm):
    """Ioffe & Szegedy 2015: each feature normalized over batch *and time*, and so, in training, over the future.

    Training normalizes by the biased variance of the batch and tracks the mean and the unbiased variance with
    momentum 0.1; evaluation uses what was tracked. `over_processes` sums a tensor over the processes. Never fused.
    """

    momentum = 0.1

    def __init__(self, dim: int, config: ModelConfig):
        super().__init__(dim, config)
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))
        self.eps, self.over_processes = config.norm_eps, alone

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:  # [B, T, D]
        rows = x.flatten(0, -2).to(torch.promote_types(x.dtype, torch.float32))
        mean, var = self.statistics(rows) if self.training else (self.running_mean, self.running_var)
        y = (rows - mean) * (var + self.eps).rsqrt() * self.weight
        y = y if self.bias is None else y + self.bias
        return y.view(x.shape).to(out_dtype or x.dtype)

    def statistics(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance [D] of rows [B * T, D], tracked on the way."""
        n = self.over_processes(rows.new_full((), len(rows)))
        mean = self.over_processes(rows.sum(0)) / n
        var = self.over_processes((rows - mean).square().sum(0)) / n
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (n / (n - 1).clamp(min=1)), self.momentum)
        return mean, var

    def add_norm(self, x: Tensor, s: Tensor, out_dtype=None, want_sum=True) -> tuple[Tensor, Tensor]:
        r = x + s
        return r, self(r, out_dtype or s.dtype)

    def norm_add(self, x: Tensor, s: Tensor) -> Tensor:
        return x + self(s, x.dtype)

    def norm_add_norm(self, x: Tensor, s: Tensor, then: Norm) -> tuple[Tensor, Tensor]:
        r = self.norm_add(x, s)
        return r, then(r, s.dtype)


def make_norm(dim: int, config: ModelConfig) -> Norm:
    return (BatchNorm if config.norm == "batchnorm" else Norm)(dim, config)


def qk_norm(n_head: int, config: ModelConfig) -> nn.Module:
    if config.qk_norm == "head":
        return Norm(config.head_width, config)
    return FullNorm(n_head * config.head_width, config) if config.qk_norm == "full" else nn.Identity()


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

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim, inner_init, last_init = config.head_width, *config.branch_init
        n_q, n_kv = config.n_head * self.head_dim, config.kv_heads * self.head_dim
        self.sizes = (n_q, n_kv, n_kv)
        self.qkv = Linear(config.n_embd, n_q + 2 * n_kv, config.bias)
        self.out = Linear(n_q, config.n_embd, config.bias, last_init)
        self.q_norm = qk_norm(config.n_head, config)
        self.k_norm = qk_norm(config.kv_heads, config)
        self.rotate = Rope(config) if config.pos == "rope" else nn.Identity()
        self.how = {"impl": config.kernel}
        self.dropout = Dropout(config.dropout)
        with torch.no_grad():
            self.qkv.weight[-n_kv:] *= inner_init

    def forward(self, h: Tensor) -> Tensor:  # [B, T, D]
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv(h).split(self.sizes, dim=-1))
        q = self.rotate(self.q_norm(q).transpose(1, 2))  # [B, H, T, head_dim]
        k = self.rotate(self.k_norm(k).transpose(1, 2))
        dropout = self.dropout.p if self.training else 0.0
        y = kernels.attend(q, k, v.transpose(1, 2), dropout=dropout, **self.how)
        return self.dropout(self.out(y.transpose(1, 2).flatten(-2)))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        inner_init, last_init = config.branch_init
        self.up = Linear(config.n_embd, config.hidden, config.bias, inner_init)
        self.down = Linear(config.hidden, config.n_embd, config.bias, last_init)
        self.gelu = partial(F.gelu, approximate="tanh" if config.mlp == "gelu_tanh" else "none")
        self.dropout = Dropout(config.dropout)

    def forward(self, h: Tensor) -> Tensor:
        return self.dropout(self.down(self.gelu(self.up(h))))


class SwiGLU(nn.Module):
    """Shazeer 2020, "GLU Variants Improve Transformer"."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        inner_init, last_init = config.branch_init
        self.gate = Linear(config.n_embd, config.hidden, config.bias, inner_init)
        self.up = Linear(config.n_embd, config.hidden, config.bias, inner_init)
        self.down = Linear(config.hidden, config.n_embd, config.bias, last_init)
        self.dropout = Dropout(config.dropout)

    def forward(self, h: Tensor) -> Tensor:
        return self.dropout(self.down(F.silu(self.gate(h)) * self.up(h)))


class PreJoin(nn.Module):
    """r = x + s; the stream keeps r, the next branch reads N(r)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.next_norm = make_norm(config.n_embd, config)

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return self.next_norm.add_norm(x, s)


class PostJoin(nn.Module):
    """y = N(alpha x + s) is all that goes on; alpha is 1 but for DeepNorm. The sum itself is never written."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.next_norm = make_norm(config.n_embd, config)

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        _, y = self.next_norm.add_norm(x, s, out_dtype=x.dtype, want_sum=False)
        return y, y.to(s.dtype)


class DeepNormJoin(PostJoin):
    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.alpha = (2 * config.n_layer) ** 0.25

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.alpha * x, s)


class OutputJoin(nn.Module):
    """r = x + N_out(s); the stream keeps r and the next branch reads it as it is."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.out_norm = make_norm(config.n_embd, config)

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        r = self.out_norm.norm_add(x, s)
        return r, r.to(s.dtype)


class SandwichJoin(nn.Module):
    """r = x + N_out(s); the stream keeps r, the next branch reads N(r)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.out_norm = make_norm(config.n_embd, config)
        self.next_norm = make_norm(config.n_embd, config)

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return self.out_norm.norm_add_norm(x, s, self.next_norm)


def joins(config: ModelConfig) -> nn.ModuleList:
    """One join per branch. The last one reads through the final norm, which makes output's a sandwich."""
    post = DeepNormJoin if config.residual_scale == "deepnorm" else PostJoin
    inner = {"pre": PreJoin, "post": post, "output": OutputJoin, "sandwich": SandwichJoin}[config.placement]
    last = SandwichJoin if config.placement == "output" else inner
    return nn.ModuleList([inner(config) for _ in range(2 * config.n_layer - 1)] + [last(config)])


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
        reads_norm = config.placement in ("pre", "sandwich")
        self.entry = make_norm(config.n_embd, config) if reads_norm else Cast()
        mlp = SwiGLU if config.mlp == "swiglu" else MLP
        self.branches = nn.ModuleList(
            kind(config) for _ in range(config.n_layer) for kind in (Attention, mlp)
        )
        self.joins = joins(config)
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
        x = x.to(narrowed(x, self.stream_dtype))
        watch(x)
        h = self.entry(x, out_dtype=narrowed(x, self.compute_dtype))
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

"""Causal attention and dropout where PyTorch's own are slow: eager mode on the CPU.

PyTorch's CPU attention multiplies float32 at half the rate or less of bfloat16 where the processor has
instructions for it, its backward is several times slower in bfloat16 than in float32 at short contexts,
and with dropout it falls back to separate operators. Its random numbers are drawn one at a time, and on a
small model cost more than the matrix products. Everywhere else these functions are PyTorch's.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .eager import eager_cpu
from .reference import promote, statistics_dtype

SCORES = 2**18  # scores in float32 that are computed at once, so that a core's cache holds them
SHORTEST = 65  # T below which PyTorch's attention in float32 is as fast
LONGEST = 512  # T from which the [T, T] scores cost more memory than they save time


def attend(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, impl: str = "auto") -> Tensor:
    """softmax(causal(q k^T / sqrt(head_dim))) v, [B, H, T, head_dim] like q; k and v may have fewer heads.

    impl "torch" is PyTorch's scaled_dot_product_attention anywhere; otherwise CpuAttention replaces it where it
    is faster. Both give the same numbers within rounding, but draw different dropout.
    """
    slow = q.dtype in (torch.bfloat16, torch.float16) or (dropout > 0 and not torch.compiler.is_compiling())
    if impl == "torch" or not slow or q.size(-2) > LONGEST or q.device.type != "cpu":
        return pytorch(q, k, v, dropout)
    if dropout == 0 and q.size(-2) < SHORTEST:
        return pytorch(promote(q), promote(k), promote(v), dropout).to(q.dtype)
    if k.size(1) != q.size(1):
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    rows = (t.reshape(-1, *t.shape[-2:]) for t in (q, k, v))
    return CpuAttention.apply(*rows, dropout).view(q.shape)


def pytorch(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    grouped = k.size(1) != q.size(1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=grouped)


class CpuAttention(torch.autograd.Function):
    """Causal attention of q, k, v [N, T, head_dim] by matrix products in their dtype.

    Scores and softmax are float32 (float64 for float64). The probabilities are kept for backward in q's dtype.
    """

    @staticmethod
    def forward(ctx, q, k, v, dropout):
        ctx.scale, ctx.rescale = q.size(-1) ** -0.5, 1 / (1 - dropout)
        n, time, _ = q.shape
        future = q.new_full((time, time), -math.inf, dtype=statistics_dtype(q)).triu_(1)
        p = q.new_empty(n, time, time)
        pieces = (t.split(max(SCORES // time**2, 1)) for t in (p, q, k))
        for part, queries, keys in zip(*pieces, strict=True):
            scores = torch.baddbmm(future, promote(queries), promote(keys).mT, alpha=ctx.scale)
            part.copy_(scores.softmax(-1))
        kept = keep(p.shape, dropout, p.dtype) if dropout else None
        ctx.save_for_backward(q, k, v, p, kept)
        return (p if kept is None else p * kept) @ (v if kept is None else v * ctx.rescale)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v, p, kept = ctx.saved_tensors
        dy = dy if kept is None else dy * ctx.rescale
        dv = (p if kept is None else p * kept).mT @ dy
        dp = dy @ v.mT
        dp = dp if kept is None else dp.mul_(kept)
        ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
        return (ds @ k).mul_(ctx.scale), (ds.mT @ q).mul_(ctx.scale), dv, None


def dropout(x: Tensor, p: float) -> Tensor:
    """x with elements zeroed with probability p, and the others scaled by 1 / (1 - p)."""
    if p == 0:
        return x
    if not eager_cpu(x):
        return F.dropout(x, p)
    return x * keep(x.shape, p, x.dtype).mul_(1 / (1 - p))


def keep(shape: torch.Size, p: float, dtype: torch.dtype) -> Tensor:
    """Zeros with probability p, to within 2^-17, and ones: four elements from each 64 random bits."""
    n = math.prod(shape)
    bits = torch.empty(-(-n // 4), dtype=torch.int64).random_(-(2**63), None)
    draws = bits.view(torch.int16)[:n].view(shape)
    return (draws >= round(p * 2**16) - 2**15).to(dtype)

"""The four functions from PyTorch's own operators: what runs on the CPU, and wherever Triton cannot.

LayerNorm is `F.layer_norm`. RMSNorm is `F.rms_norm` on a GPU and under torch.compile, where it is one
kernel; in eager mode on the CPU PyTorch composes it, and its backward, from a dozen passes over memory.
There `CpuRMSNorm` and `CpuAddRMSNorm` need half as many.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .reference import promote


def rms_norm(x, weight, eps):
    """(N(x), 1 / rms [..., 1]) of x [..., D] and weight [D], both float32 or both float64."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    rstd = torch.addcmul(length.new_tensor(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * rstd).mul_(weight), rstd


def rms_norm_backward(dy, x, weight, rstd):
    """(dx, dweight), by way of LayerNorm's backward, which is one pass over memory.

    With a mean of zero it gives RMSNorm's dweight, and a dx that lacks rstd * (dy . weight) / D, which LayerNorm
    subtracts because its mean depends on x.
    """
    dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
        dy, x, weight.shape, torch.zeros_like(rstd), rstd, weight, None, (True, True, False)
    )
    return dx.add_((dy @ weight).unsqueeze(-1).mul_(rstd).mul_(1 / x.shape[-1])), dweight


class CpuRMSNorm(torch.autograd.Function):
    """N(x) of x [..., D] and weight [D], both float32 or both float64."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        y, rstd = rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *rms_norm_backward(dy, *ctx.saved_tensors), None


class CpuAddRMSNorm(torch.autograd.Function):
    """(r, N(r)) with r = x + s: as `add_norm`, with x and weight both float32 or both float64."""

    @staticmethod
    def forward(ctx, x, s, weight, eps, out_dtype):
        r = x + s
        y, rstd = rms_norm(r, weight, eps)
        ctx.save_for_backward(r, weight, rstd)
        ctx.dtype = s.dtype
        ctx.set_materialize_grads(False)  # None for a result that nothing reads
        return r, y.to(out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dr, dy):
        r, weight, rstd = ctx.saved_tensors
        dx, dweight = dr, None
        if dy is not None:
            dx, dweight = rms_norm_backward(dy.to(r.dtype), r, weight, rstd)
            dx = dx if dr is None else dx.add_(dr)
        return dx, None if dx is None else dx.to(ctx.dtype), dweight, None, None


def eager_cpu(x):
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def normalize(x, weight, bias, kind, eps):
    """N(x) [..., D], in the dtype of the statistics."""
    x = promote(x)
    weight = weight.to(x.dtype)
    if kind == "layernorm":
        return F.layer_norm(x, weight.shape, weight, None if bias is None else bias.to(x.dtype), eps)
    if eager_cpu(x):
        return CpuRMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def norm(x, weight, bias, *, kind, eps, out_dtype):
    return normalize(x, weight, bias, kind, eps).to(out_dtype)


def add_norm(x, s, weight, bias, *, kind, eps, out_dtype, want_sum):
    if kind == "rmsnorm" and x.dtype == promote(x).dtype and eager_cpu(x):
        r, y = CpuAddRMSNorm.apply(x, s, weight.to(x.dtype), eps, out_dtype)
    else:
        r = (x + s).to(x.dtype)
        y = norm(r, weight, bias, kind=kind, eps=eps, out_dtype=out_dtype)
    return (r if want_sum else None), y


def norm_add(x, s, weight, bias, *, kind, eps):
    return (x + normalize(s, weight, bias, kind, eps)).to(x.dtype)


def norm_add_norm(x, s, out_weight, out_bias, weight, bias, *, kind, eps, out_dtype):
    r = norm_add(x, s, out_weight, out_bias, kind=kind, eps=eps)
    return r, norm(r, weight, bias, kind=kind, eps=eps, out_dtype=out_dtype)

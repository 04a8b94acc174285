"""The four functions from PyTorch's own operators: what runs on the CPU, and wherever Triton cannot.

LayerNorm is `F.layer_norm`. RMSNorm is `F.rms_norm` on a GPU and under torch.compile, where it is one
kernel; in eager mode on the CPU PyTorch composes it, and its backward, from a dozen passes over memory.
There `CpuRMSNorm` needs half as many.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .reference import promote


class CpuRMSNorm(torch.autograd.Function):
    """RMSNorm of x [..., D] in float32 or float64, with weight [D] in x's dtype.

    With t = dy * x, dweight = sum rstd * t and dx = rstd * (dy * weight - x * rstd^2 * (t . weight) / D): so t
    is read by two products with a vector, and then its memory holds dx.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., 1]
        rstd = torch.addcmul(length.new_tensor(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        t = dy * x
        dweight = rstd.flatten() @ t.reshape(-1, t.shape[-1])
        along = (t @ weight).unsqueeze(-1).mul_(rstd).mul_(rstd)  # [..., 1]
        dx = torch.mul(dy, weight, out=t).addcmul_(x, along, value=-1 / x.shape[-1])
        return dx.mul_(rstd), dweight, None


def normalize(x, weight, bias, kind, eps):
    """N(x) [..., D], in the dtype of the statistics."""
    x = promote(x)
    weight = weight.to(x.dtype)
    if kind == "layernorm":
        return F.layer_norm(x, weight.shape, weight, None if bias is None else bias.to(x.dtype), eps)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return CpuRMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def norm(x, weight, bias, *, kind, eps, out_dtype):
    return normalize(x, weight, bias, kind, eps).to(out_dtype)


def add_norm(x, s, weight, bias, *, kind, eps, out_dtype, want_sum):
    r = (x + s).to(x.dtype)
    y = norm(r, weight, bias, kind=kind, eps=eps, out_dtype=out_dtype)
    return (r if want_sum else None), y


def norm_add(x, s, weight, bias, *, kind, eps):
    return (x + normalize(s, weight, bias, kind, eps)).to(x.dtype)


def norm_add_norm(x, s, out_weight, out_bias, weight, bias, *, kind, eps, out_dtype):
    r = norm_add(x, s, out_weight, out_bias, kind=kind, eps=eps)
    return r, norm(r, weight, bias, kind=kind, eps=eps, out_dtype=out_dtype)

"""The four functions from PyTorch's own operators: what runs on the CPU, and wherever Triton cannot.

LayerNorm is `F.layer_norm`. RMSNorm is `F.rms_norm` on a GPU and under torch.compile, where it is one
kernel; in eager mode on the CPU PyTorch composes it, and its backward, from a dozen passes over memory.
There `CpuRMSNorm` reaches LayerNorm's fused backward by an identity.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .reference import promote


class CpuRMSNorm(torch.autograd.Function):
    """RMSNorm of x [..., D] in float32 or float64, with weight [D] in x's dtype.

    With the mean taken as zero, LayerNorm's dx = rstd * (g - m(g) - xh * m(g * xh)) is RMSNorm's but for
    m(g), and its dweight = sum dy * xh is RMSNorm's. So backward is LayerNorm's kernel, called with that
    mean, plus rstd * m(g), where m(g) = dy . weight / D.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        D = x.shape[-1]
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., 1]
        rstd = torch.addcmul(length.new_tensor(eps), length, length, value=1 / D).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        D = x.shape[-1]
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            dy, x, [D], torch.zeros_like(rstd), rstd, weight, None, [True, True, False]
        )
        mean_g = (dy @ (weight / D)).unsqueeze(-1)  # [..., 1]
        return dx.add_(mean_g.mul_(rstd)), dweight, None


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

"""The four functions from PyTorch's own operators: what runs on the CPU, and wherever Triton cannot.

LayerNorm is `F.layer_norm`. RMSNorm is `F.rms_norm` on a GPU and under torch.compile, where it is one
kernel; in eager mode on the CPU PyTorch composes it, and its backward, from a dozen passes over memory.
There `CpuRMSNorm` needs half as many, but inside a torch.func transform `F.rms_norm` is what can be transformed.
"""

import functools

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from .reference import promote, standardize_backward

layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


class CpuRMSNorm(torch.autograd.Function):
    """RMSNorm of x [..., D] in float32 or float64, with weight [D] in x's dtype.

    Backward goes by way of LayerNorm's, which is one pass over memory. With a mean of zero that gives RMSNorm's
    dweight, and a dx that lacks rstd * (dy . weight) / D, which LayerNorm subtracts because its mean depends on x.
    A backward that is differentiated itself (create_graph) takes the reference's operators.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [..., 1]
        rstd = torch.addcmul(constant(eps, x.dtype), length, length, value=1 / x.shape[-1]).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps = eps
        return (x * rstd).mul_(weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *standardize_backward(dy, x, weight, "rmsnorm", ctx.eps)[:2], None
        dx, dweight, _ = layer_norm_backward(
            dy, x, weight.shape, torch.zeros_like(rstd), rstd, weight, None, (True, True, False)
        )
        along = (dy @ weight).unsqueeze(-1).mul_(rstd)  # [..., 1]
        return dx.add_(along, alpha=1 / x.shape[-1]), dweight, None


@functools.cache
def constant(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")


def transformed() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is at work: they know only PyTorch's operators."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def eager_cpu(x):
    """Whether the functions for eager mode on the CPU compute, here and in attention.py."""
    return x.device.type == "cpu" and not (torch.compiler.is_compiling() or transformed())


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
    r = (x + s).to(x.dtype)
    y = norm(r, weight, bias, kind=kind, eps=eps, out_dtype=out_dtype)
    return (r if want_sum else None), y


def norm_add(x, s, weight, bias, *, kind, eps):
    return (x + normalize(s, weight, bias, kind, eps)).to(x.dtype)


def norm_add_norm(x, s, out_weight, out_bias, weight, bias, *, kind, eps, out_dtype):
    r = norm_add(x, s, out_weight, out_bias, kind=kind, eps=eps)
    return r, norm(r, weight, bias, kind=kind, eps=eps, out_dtype=out_dtype)

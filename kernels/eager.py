"""The two functions from PyTorch's own operators: what runs on the CPU, and wherever Triton cannot.

LayerNorm is `F.layer_norm`. RMSNorm is `F.rms_norm` on a GPU and under torch.compile, where it is one
kernel; in eager mode on the CPU PyTorch composes it, and its backward, from a dozen passes over memory.
There `CpuRMSNorm` needs half as many.
"""

import functools

import torch
import torch.nn.functional as F

from .reference import normalize_backward, promote

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
            dx, (dweight, _) = normalize_backward(dy, x, (weight, None), "rmsnorm", ctx.eps)
            return dx, dweight, None
        dx, dweight, _ = layer_norm_backward(
            dy, x, weight.shape, torch.zeros_like(rstd), rstd, weight, None, (True, True, False)
        )
        along = (dy @ weight).unsqueeze(-1).mul_(rstd)  # [..., 1]
        return dx.add_(along, alpha=1 / x.shape[-1]), dweight, None


@functools.cache
def constant(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")


def eager_cpu(x):
    """Whether the functions for eager mode on the CPU compute, here and in attention.py."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def normalize(x, gain, kind, eps):
    """N(x) [..., D], in the dtype of the statistics."""
    x = promote(x)
    weight, bias = (None if t is None else t.to(x.dtype) for t in gain)
    shape = x.shape[-1:]
    if kind == "layernorm":
        return F.layer_norm(x, shape, weight, bias, eps)
    if eager_cpu(x):
        return CpuRMSNorm.apply(x, x.new_ones(shape) if weight is None else weight, eps)
    return F.rms_norm(x, shape, weight, eps)


def norm(x, gain, *, kind, eps, out_dtype):
    return normalize(x, gain, kind, eps).to(out_dtype)


def join(x, s, *, out, then, a, b, kind, eps, out_dtype, want_sum):
    branch = s if out is None else normalize(s, out, kind, eps)
    r = torch.add(x if a == 1 else a * x, branch, alpha=b).to(x.dtype)
    h = (r if then is None else normalize(r, then, kind, eps)).to(out_dtype)
    return (r if want_sum else None), h

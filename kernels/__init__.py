"""Residual add and normalization, fused: four functions, one pass over memory each, forward and backward.

x and s have shape [..., D], gains and biases [D]. x is the residual stream, s a branch's output, r their
sum in x's dtype, N(.) a LayerNorm or an RMSNorm (`kind`). The formulas are in `kernels/reference.py`.

    norm            N(x)
    add_norm        r = x + s              and N(r)     the join of pre-norm, and of post-norm
    norm_add        r = x + N(s)                        the join of output-norm
    norm_add_norm   r = x + N_out(s)       and N(r)     the join of sandwich-norm

`impl` chooses who computes it: "torch" is PyTorch's own operators anywhere, "triton" our kernels on a GPU
(or interpreted, under TRITON_INTERPRET=1), "auto" Triton for CUDA tensors, but not inside a torch.func
transform or forward-mode differentiation, and torch otherwise. Both give the same numbers within rounding.
float16 and bfloat16 are promoted to float32 between load and store; float64 stays float64 and mixes with
nothing but narrower gains.

Every function raises ValueError, in one sentence, for an unknown kind or impl, an eps that is not a
positive number of the statistics' dtype, shapes, dtypes or devices that do not fit together, and for
impl="triton" where Triton cannot run.

`attend` and `dropout` are causal attention and dropout, PyTorch's but for the CPU (see attention.py).
"""

import importlib.util
import math
import os
from collections import Counter

import torch

from . import eager
from .attention import attend as attend
from .attention import dropout as dropout
from .reference import statistics_dtype

KINDS = ("layernorm", "rmsnorm")
IMPLS = ("auto", "torch", "triton")
MAX_D = 16384  # the longest row that the Triton kernels take: one program holds a row in registers
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # triton, too, reads it once

launches: Counter = Counter()  # how often each Triton kernel ran, by name: proof of which path computes


def norm(x, weight, bias=None, *, kind, eps, out_dtype=None, impl="auto"):
    """N(x) in out_dtype, by default x's."""
    out_dtype = out_dtype or x.dtype
    check(x, x, kind, eps, out_dtype, weight=weight, bias=bias)
    return backend(impl, x).norm(x, weight, bias, kind=kind, eps=eps, out_dtype=out_dtype)


def add_norm(x, s, weight, bias=None, *, kind, eps, out_dtype=None, want_sum=True, impl="auto"):
    """(r, N(r)) with r = x + s; N(r) in out_dtype, by default s's. Without want_sum, r is None."""
    out_dtype = out_dtype or s.dtype
    check(x, s, kind, eps, out_dtype, weight=weight, bias=bias)
    return backend(impl, x).add_norm(
        x, s, weight, bias, kind=kind, eps=eps, out_dtype=out_dtype, want_sum=want_sum
    )


def norm_add(x, s, weight, bias=None, *, kind, eps, impl="auto"):
    """x + N(s) in x's dtype."""
    check(x, s, kind, eps, x.dtype, weight=weight, bias=bias)
    return backend(impl, x).norm_add(x, s, weight, bias, kind=kind, eps=eps)


def norm_add_norm(x, s, out_weight, out_bias, weight, bias, *, kind, eps, out_dtype=None, impl="auto"):
    """(r, N(r)) with r = x + N_out(s); N(r) in out_dtype, by default s's."""
    out_dtype = out_dtype or s.dtype
    check(x, s, kind, eps, out_dtype, out_weight=out_weight, out_bias=out_bias, weight=weight, bias=bias)
    return backend(impl, x).norm_add_norm(
        x, s, out_weight, out_bias, weight, bias, kind=kind, eps=eps, out_dtype=out_dtype
    )


def check(x, s, kind, eps, out_dtype, **gains):
    """Raises ValueError for arguments that do not fit together; a missing bias is None."""
    if kind not in KINDS:
        raise ValueError(f"kind must be 'layernorm' or 'rmsnorm', not {kind!r}")
    if x.shape != s.shape or x.dim() == 0 or x.shape[-1] == 0:
        shapes = f"{list(x.shape)} and {list(s.shape)}"
        raise ValueError(f"x and s must have the same shape [..., D] with D > 0, not {shapes}")
    dtypes = {x.dtype, s.dtype, out_dtype}
    if not dtypes.issubset(DTYPES) or (torch.float64 in dtypes and len(dtypes) > 1):
        raise ValueError(
            f"x, s and out_dtype must be float16, bfloat16 or float32, or all float64, "
            f"not {x.dtype}, {s.dtype} and {out_dtype}"
        )
    statistics = statistics_dtype(x)
    limits = torch.finfo(statistics)
    if not (isinstance(eps, float | int) and math.isfinite(eps) and limits.tiny <= eps <= limits.max):
        raise ValueError(f"eps must be a positive number that {statistics} can hold, not {eps!r}")
    for name, gain in gains.items():
        if gain is None and name.endswith("bias"):
            continue
        if kind == "rmsnorm" and name.endswith("bias"):
            raise ValueError(f"RMSNorm has no bias, so {name} must be None")
        if gain.shape != x.shape[-1:]:
            raise ValueError(f"{name} must have shape [{x.shape[-1]}] like x's rows, not {list(gain.shape)}")
        if gain.dtype not in DTYPES or (gain.dtype == torch.float64 and statistics != torch.float64):
            raise ValueError(f"{name} may not be {gain.dtype} where x is {x.dtype}")
        if gain.device != x.device:
            raise ValueError(f"x is on {x.device}, but {name} is on {gain.device}")
    if s.device != x.device:
        raise ValueError(f"x is on {x.device}, but s is on {s.device}")


def backend(impl, x):
    """The module that computes: `fused` (Triton) where it was asked for, or can run on CUDA; else `eager`."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be 'auto', 'torch' or 'triton', not {impl!r}")
    if impl == "torch" or (impl == "auto" and x.device.type != "cuda"):
        return eager
    problem = triton_problem(x.device.type, x.shape[-1])
    if problem is None:
        from . import fused  # imports triton, which does not exist everywhere

        return fused
    if impl == "triton":
        raise ValueError(problem)
    return eager


def triton_problem(device: str, width: int = 1) -> str | None:
    """Why Triton cannot norm rows of `width` elements on this type of device, in one sentence; None if it can."""
    if not HAS_TRITON:
        return "The Triton kernels need the package triton (Linux only), which is not installed."
    if width > MAX_D:
        return f"The Triton kernels take rows of at most {MAX_D} elements, not {width}."
    if eager.transformed():
        return "The Triton kernels take no torch.func transform and no forward-mode differentiation."
    if INTERPRETED:
        return None
    if device != "cuda":
        return f"The Triton kernels need a CUDA device, not {device} (TRITON_INTERPRET=1 interprets them)."
    if not torch.cuda.is_available():
        return "The Triton kernels need a CUDA device, and torch finds none on this machine."
    if torch.version.hip:  # where the device is called cuda, too
        return "The Triton kernels are written for NVIDIA's GPUs, and this torch is built for AMD's."
    return None

"""Residual add and normalization, fused: two functions, one pass over memory each, forward and backward.

    norm(x, gain)                              N(x)
    join(x, s, out=, then=, a=1.0, b=1.0)      r = a x + b N_out(s)   and   h = N_then(r)

x and s have shape [..., D]. x is the residual stream, s a branch's output, r their sum in x's dtype, N(.) a
LayerNorm or an RMSNorm (`kind`), a and b numbers. A norm is given by its gain, a pair (weight, bias): each is
[D] or None, and (None, None) is a norm without a gain. The formulas are in `kernels/reference.py`.

`impl` chooses who computes it: "torch" is PyTorch's own operators anywhere, "triton" our kernels on a GPU
(or interpreted, under TRITON_INTERPRET=1), "auto" Triton for CUDA tensors where it can run, and torch otherwise.
Both give the same numbers within rounding. PyTorch refuses forward-mode differentiation and torch.func's
transforms where these functions have a backward of their own.

float16 and bfloat16 are promoted to float32 between load and store; float64 stays float64 and mixes with nothing
but narrower gains. Both functions raise ValueError, in one sentence, for an unknown kind or impl, an eps that is
not a positive number of the statistics' dtype, shapes, dtypes or devices that do not fit together, and for
impl="triton" where Triton cannot run.

`attend` and `dropout` are causal attention and dropout, PyTorch's but for the CPU (see attention.py).
"""

import importlib.util
import math
import os
import shutil
import sys
import sysconfig
from collections import Counter
from pathlib import Path

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
why_no_triton = "is not installed"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # triton, too, reads it once

launches: Counter = Counter()  # how often each Triton kernel ran, by name: proof of which path computes


def norm(x, gain, *, kind, eps, out_dtype=None, impl="auto"):
    """N(x) in out_dtype, by default x's."""
    out_dtype = out_dtype or x.dtype
    check(x, x, kind, eps, out_dtype, gain=gain)
    return backend(impl, x).norm(x, gain, kind=kind, eps=eps, out_dtype=out_dtype)


def join(x, s, *, out=None, then=None, a=1.0, b=1.0, kind, eps, out_dtype=None, want_sum=True, impl="auto"):
    """(r, h) with r = a x + b N_out(s) and h = N_then(r); h in out_dtype, by default s's.

    out=None is no norm of s. then=None is no norm of the sum: h is r in out_dtype. Without want_sum, which needs
    `then`, r is None and not written.
    """
    out_dtype = out_dtype or s.dtype
    check(x, s, kind, eps, out_dtype, a, b, out=out, then=then)
    if then is None and not want_sum:
        raise ValueError("want_sum=False needs a norm of the sum: without `then`, the sum is the result")
    settings = {"kind": kind, "eps": eps, "out_dtype": out_dtype, "want_sum": want_sum}
    return backend(impl, x).join(x, s, out=out, then=then, a=a, b=b, **settings)


def check(x, s, kind, eps, out_dtype, a=1.0, b=1.0, **norms):
    """Raises ValueError for arguments that do not fit together; `norms` are gains by name, or None for no norm."""
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
    if s.device != x.device:
        raise ValueError(f"x is on {x.device}, but s is on {s.device}")
    limits = torch.finfo(statistics_dtype(x))
    if not (isinstance(eps, float | int) and math.isfinite(eps) and limits.tiny <= eps <= limits.max):
        raise ValueError(f"eps must be a positive number that {statistics_dtype(x)} can hold, not {eps!r}")
    if not (math.isfinite(a) and math.isfinite(b)):
        raise ValueError(f"the factors a and b must be finite numbers, not {a!r} and {b!r}")
    for name, gain in norms.items():
        if gain is not None:
            check_gain(x, kind, name, gain)


def check_gain(x, kind, name, gain):
    if not (isinstance(gain, tuple | list) and len(gain) == 2):
        raise ValueError(f"{name} must be a pair (weight or None, bias or None), not {type(gain).__name__}")
    if kind == "rmsnorm" and gain[1] is not None:
        raise ValueError(f"RMSNorm has no bias, so the bias of {name} must be None")
    for part, t in zip(("weight", "bias"), gain, strict=True):
        if t is None:
            continue
        if t.shape != x.shape[-1:]:
            shape = list(t.shape)
            raise ValueError(
                f"the {part} of {name} must have shape [{x.shape[-1]}] like x's rows, not {shape}"
            )
        if t.dtype not in DTYPES or (t.dtype == torch.float64 and x.dtype != torch.float64):
            raise ValueError(f"the {part} of {name} may not be {t.dtype} where x is {x.dtype}")
        if t.device != x.device:
            raise ValueError(f"x is on {x.device}, but the {part} of {name} is on {t.device}")


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


def import_triton() -> None:
    """Imports triton where it is installed. A broken one is as good as missing from then on, for torch as well."""
    global HAS_TRITON, why_no_triton
    try:
        if HAS_TRITON:
            import triton.language  # noqa: F401
    except Exception as e:
        place = getattr(importlib.util.find_spec("triton"), "origin", None) or "sys.path"
        HAS_TRITON, why_no_triton = False, f"{place} breaks ({type(e).__name__}: {e})"
        sys.modules["triton"] = None


def triton_problem(device: str, width: int = 1) -> str | None:
    """Why Triton cannot norm rows of `width` elements on this type of device, in one sentence; None if it can."""
    if not HAS_TRITON:
        return f"The Triton kernels need the package triton (Linux only), which {why_no_triton}."
    if width > MAX_D:
        return f"The Triton kernels take rows of at most {MAX_D} elements, not {width}."
    if INTERPRETED:
        return None
    if device != "cuda":
        return f"The Triton kernels need a CUDA device, not {device} (TRITON_INTERPRET=1 interprets them)."
    if not torch.cuda.is_available():
        return "The Triton kernels need a CUDA device, and torch finds none on this machine."
    if torch.version.hip:  # where the device is called cuda, too
        return "The Triton kernels are written for NVIDIA's GPUs, and this torch is built for AMD's."
    return LAUNCHER_PROBLEM


def launcher_problem() -> str | None:
    """Why Triton cannot compile the C code that launches its kernels, in one sentence; None if it can."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"Triton needs a C compiler, and finds no {' and no '.join(compilers)}; install gcc, or name one in CC."
    header = Path(sysconfig.get_paths("posix_prefix")["include"], "Python.h")
    if not header.exists():
        return f"Triton needs Python's C headers, and there is no {header}; install python3-dev or the like."
    return None


LAUNCHER_PROBLEM = launcher_problem()  # once, as torch.compile cannot trace it

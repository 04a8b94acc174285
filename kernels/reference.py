"""The specification of the two fused functions: forward and hand-derived backward in plain PyTorch.

Everything else in this folder must agree with this file. It is written to be read, computes what it
says in the order in which it says it, and runs in float64 when it is given float64.

With m() the mean over the last axis, a norm with weight w and bias b is

    LayerNorm   c = x - m(x)      rstd = 1 / sqrt(m(c^2) + eps)      xh = c * rstd      N(x) = xh * w + b
    RMSNorm     c = x             rstd = 1 / sqrt(m(c^2) + eps)      xh = c * rstd      N(x) = xh * w

(Ba, Kiros and Hinton, 2016, arXiv:1607.06450; Zhang and Sennrich, 2019, arXiv:1910.07467). The only
difference is the centring, so for an incoming gradient dy, and with g = dy * w,

    dx = rstd * (g - xh * m(g * xh) [- m(g), LayerNorm only])      dw = sum dy * xh      db = sum dy

where the sums run over all rows. m(g) is what centring projects out, xh * m(g * xh) what the division
by the row's own length projects out.

A join is r = a x + b N_out(s) and h = N_then(r). Both uses of r send it a gradient, and its terms pass it on:

    d = dr + N_then'(dh)      dx = a d      ds = N_out'(b d)

Rounding: float16 and bfloat16 are promoted to float32 for everything between load and store, and each
result is rounded once, to its own dtype. The sum r is rounded to the stream's dtype *before* its
statistics are taken, because backward reads the stored r and must see the same numbers.

Shapes: x, s, r, h and their gradients are [..., D]. A gain is a pair (weight, bias), each [D] or None, and so is
its gradient. A backward accepts None for the gradient of an output that nobody used, and returns gradients in
the dtypes of the inputs.
"""

import torch
from torch import Tensor

Gain = tuple[Tensor | None, Tensor | None]


def statistics_dtype(x: Tensor) -> torch.dtype:
    """float64 stays, everything narrower becomes float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def promote(x: Tensor) -> Tensor:
    return x.to(statistics_dtype(x))


def standardize(x: Tensor, kind: str, eps: float) -> tuple[Tensor, Tensor]:
    """The normalized row before the gain, and one over its scale: xh [..., D], rstd [..., 1]."""
    x = promote(x)
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd, rstd


def over_rows(t: Tensor) -> Tensor:
    """[..., D] -> [D], the sum over all rows."""
    return t.reshape(-1, t.shape[-1]).sum(0)


def normalize(x: Tensor, gain: Gain, kind: str, eps: float) -> Tensor:
    """N(x), unrounded."""
    y, _ = standardize(x, kind, eps)
    weight, bias = gain
    y = y if weight is None else y * promote(weight)
    return y if bias is None else y + promote(bias)


def normalize_backward(dy: Tensor, x: Tensor, gain: Gain, kind: str, eps: float) -> tuple[Tensor, Gain]:
    """Gradients of N at x: dx [..., D], unrounded, and the gain's."""
    weight, bias = gain
    xh, rstd = standardize(x, kind, eps)
    dy = promote(dy)
    g = dy if weight is None else dy * promote(weight)
    dx = g - xh * (g * xh).mean(-1, keepdim=True)
    if kind == "layernorm":
        dx = dx - g.mean(-1, keepdim=True)
    dweight = None if weight is None else over_rows(dy * xh).to(weight.dtype)
    dbias = None if bias is None else over_rows(dy).to(bias.dtype)
    return rstd * dx, (dweight, dbias)


# N(x): the entry norm, the final norm, N_in after N_post, and QK-norm on short rows.


def norm(x: Tensor, gain: Gain, *, kind, eps, out_dtype=None) -> Tensor:
    """N(x), in out_dtype (default: x's)."""
    return normalize(x, gain, kind, eps).to(out_dtype or x.dtype)


def norm_backward(dy: Tensor, x: Tensor, gain: Gain, *, kind, eps) -> tuple[Tensor, Gain]:
    """(dx, dgain)."""
    dx, dgain = normalize_backward(dy, x, gain, kind, eps)
    return dx.to(x.dtype), dgain


# r = a x + b N_out(s), h = N_then(r): a branch re-enters the stream, and what the next branch reads.


def join(x, s, *, out=None, then=None, a=1.0, b=1.0, kind, eps, out_dtype=None, want_sum=True):
    """(r, h), r in x's dtype and h in out_dtype (default: s's); r is None unless want_sum."""
    branch = promote(s) if out is None else normalize(s, out, kind, eps)
    r = (a * promote(x) + b * branch).to(x.dtype)
    h = r if then is None else normalize(r, then, kind, eps)
    return (r if want_sum else None), h.to(out_dtype or s.dtype)


def join_backward(dr, dh, x, s, *, out=None, then=None, a=1.0, b=1.0, kind, eps):
    """(dx, ds, dout, dthen); dout and dthen are None where their norm is."""
    r, _ = join(x, s, out=out, a=a, b=b, kind=kind, eps=eps)
    d, dthen = backward_of_sum(dr, dh, r, then, kind, eps)
    ds, dout = (b * d, None) if out is None else normalize_backward(b * d, s, out, kind, eps)
    return (a * d).to(x.dtype), ds.to(s.dtype), dout, dthen


def backward_of_sum(dr, dh, r, then, kind, eps):
    """d = dr + N_then'(dh), unrounded, the gradient of r; and N_then's gain's, None where h was not used."""
    if then is None or dh is None:
        return sum(promote(t) for t in (dr, dh) if t is not None), None
    d, dthen = normalize_backward(dh, r, then, kind, eps)
    return (d if dr is None else d + promote(dr)), dthen

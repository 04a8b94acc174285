"""The specification of the four fused functions: forward and hand-derived backward in plain PyTorch.

Everything else in this folder must agree with this file. It is written to be read, computes what it
says in the order in which it says it, and runs in float64 when it is given float64.

With m() the mean over the last axis, a norm with gain w and bias b is

    LayerNorm   c = x - m(x)      rstd = 1 / sqrt(m(c^2) + eps)      xh = c * rstd      N(x) = xh * w + b
    RMSNorm     c = x             rstd = 1 / sqrt(m(c^2) + eps)      xh = c * rstd      N(x) = xh * w

(Ba, Kiros and Hinton, 2016, arXiv:1607.06450; Zhang and Sennrich, 2019, arXiv:1910.07467). The only
difference is the centring, so for an incoming gradient dy, and with g = dy * w,

    dx = rstd * (g - xh * m(g * xh) [- m(g), LayerNorm only])      dw = sum dy * xh      db = sum dy

where the sums run over all rows. m(g) is what centring projects out, xh * m(g * xh) what the division
by the row's own length projects out.

Rounding: float16 and bfloat16 are promoted to float32 for everything between load and store, and each
result is rounded once, to its own dtype. The sum r is rounded to the stream's dtype *before* its
statistics are taken, because backward reads the stored r and must see the same numbers.

Shapes: x, s, r, y and their gradients are [..., D]; gains and biases are [D]. A backward accepts None for
the gradient of an output that nobody used, and returns gradients in the dtypes of the inputs.
"""

import torch
from torch import Tensor


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


def affine(xh: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = xh * promote(weight)
    return y if bias is None else y + promote(bias)


def over_rows(t: Tensor) -> Tensor:
    """[..., D] -> [D], the sum over all rows."""
    return t.reshape(-1, t.shape[-1]).sum(0)


def standardize_backward(dy: Tensor, x: Tensor, weight: Tensor, kind: str, eps: float):
    """Unrounded gradients of N at x: dx [..., D], dweight [D], dbias [D]."""
    xh, rstd = standardize(x, kind, eps)
    dy = promote(dy)
    g = dy * promote(weight)
    dx = g - xh * (g * xh).mean(-1, keepdim=True)
    if kind == "layernorm":
        dx = dx - g.mean(-1, keepdim=True)
    return rstd * dx, over_rows(dy * xh), over_rows(dy)


# N(x): the entry norm, the final norm, and QK-norm on short rows.


def norm(x, weight, bias=None, *, kind, eps, out_dtype=None):
    """y = N(x), in out_dtype (default: x's)."""
    xh, _ = standardize(x, kind, eps)
    return affine(xh, weight, bias).to(out_dtype or x.dtype)


def norm_backward(dy, x, weight, *, kind, eps):
    """(dx, dweight, dbias)."""
    dx, dweight, dbias = standardize_backward(dy, x, weight, kind, eps)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


# r = x + s, y = N(r): the join of pre-norm, and of post-norm where r itself is not wanted.


def add_norm(x, s, weight, bias=None, *, kind, eps, out_dtype=None, want_sum=True):
    """(r, y), r in x's dtype and y in out_dtype (default: s's); r is None unless want_sum."""
    r = (promote(x) + promote(s)).to(x.dtype)
    y = norm(r, weight, bias, kind=kind, eps=eps, out_dtype=out_dtype or s.dtype)
    return (r if want_sum else None), y


def add_norm_backward(dr, dy, x, s, weight, *, kind, eps):
    """(dx, ds, dweight, dbias). The sum's own gradient dr joins after the norm's Jacobian, not before it."""
    r = (promote(x) + promote(s)).to(x.dtype)
    d, dweight, dbias = backward_of_sum(dr, dy, r, weight, kind, eps)
    return d.to(x.dtype), d.to(s.dtype), dweight, dbias


# r = x + N(s): the join of output-norm.


def norm_add(x, s, weight, bias=None, *, kind, eps):
    """r, in x's dtype; N(s) is added before it is rounded."""
    xh, _ = standardize(s, kind, eps)
    return (promote(x) + affine(xh, weight, bias)).to(x.dtype)


def norm_add_backward(dr, s, weight, *, kind, eps):
    """(dx, ds, dweight, dbias)."""
    return dr, *norm_backward(dr, s, weight, kind=kind, eps=eps)


# r = x + N_out(s), y = N(r): the join of sandwich-norm, and the last join of output-norm.


def norm_add_norm(x, s, out_weight, out_bias, weight, bias, *, kind, eps, out_dtype=None):
    """(r, y), r in x's dtype and y in out_dtype (default: s's)."""
    r = norm_add(x, s, out_weight, out_bias, kind=kind, eps=eps)
    return r, norm(r, weight, bias, kind=kind, eps=eps, out_dtype=out_dtype or s.dtype)


def norm_add_norm_backward(dr, dy, r, s, out_weight, weight, *, kind, eps):
    """(dx, ds, dout_weight, dout_bias, dweight, dbias)."""
    d, dweight, dbias = backward_of_sum(dr, dy, r, weight, kind, eps)
    ds, dout_weight, dout_bias = standardize_backward(d, s, out_weight, kind, eps)
    to_out = out_weight.dtype
    return d.to(r.dtype), ds.to(s.dtype), dout_weight.to(to_out), dout_bias.to(to_out), dweight, dbias


def backward_of_sum(dr, dy, r, weight, kind, eps):
    """d = dr + N'(dy), unrounded: the gradient that both terms of the sum r receive; and dweight, dbias."""
    if dy is None:
        none = torch.zeros_like(weight)
        return promote(dr), none, none
    d, dweight, dbias = standardize_backward(dy, r, weight, kind, eps)
    if dr is not None:
        d = d + promote(dr)
    return d, dweight.to(weight.dtype), dbias.to(weight.dtype)

"""The four functions from the Triton kernels, as two custom operators with autograd.

`nanonorm::forward` and `nanonorm::backward` mirror the two kernels: an argument that is None leaves its
part out, an output that is not asked for is an empty tensor. Both accept any strides (what is not
contiguous is copied inside), run on their tensors' device, and never write to their arguments.

Saved for backward, besides gains: the row's statistics, [mean,] rstd for each norm, and tensors that exist
anyway: x (norm), r (add_norm; x and s where the sum is not wanted), s (norm_add), r and s (norm_add_norm).
"""

import contextlib

import torch
import triton
from torch import Tensor

from . import launches, triton_kernels
from .reference import statistics_dtype
from .triton_kernels import Tiles

EMPTY = (0,)


def on_device(x):
    """The kernels must run on the tensor's GPU, which need not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def contiguous(*tensors):
    return [None if t is None else t.contiguous() for t in tensors]


@torch.library.custom_op("nanonorm::forward", mutates_args=())
def forward(
    x: Tensor, s: Tensor | None, out_weight: Tensor | None, out_bias: Tensor | None,
    weight: Tensor | None, bias: Tensor | None,
    kind: str, eps: float, out_dtype: torch.dtype, want_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(r, y, stats): x + N_out(s) if want_sum, N of it if weight is given, statistics [rows, 1, 2 or 4]."""
    r, y, stats = forward_fake(x, s, out_weight, out_bias, weight, bias, kind, eps, out_dtype, want_sum)
    D = x.shape[-1]
    M = x.numel() // D
    if M > 0:
        x, s, out_weight, out_bias, weight, bias = contiguous(x, s, out_weight, out_bias, weight, bias)
        tiles = Tiles.of(D)
        with on_device(x):
            triton_kernels.forward[(tiles.count(M),)](
                x, s, out_weight, out_bias, weight, bias,
                r if want_sum else None, y if weight is not None else None, stats, M,
                D=D, EPS=eps, CENTRE=kind == "layernorm", STATS=stats.shape[1],
                ROWS=tiles.rows, BLOCK=tiles.block, **tiles.options,
            )  # fmt: skip
        launches["forward"] += 1
    return r, y, stats


@forward.register_fake
def forward_fake(x, s, out_weight, out_bias, weight, bias, kind, eps, out_dtype, want_sum):
    norms = (out_weight is not None) + (weight is not None)
    return (
        x.new_empty(x.shape if want_sum else EMPTY),
        x.new_empty(x.shape if weight is not None else EMPTY, dtype=out_dtype),
        x.new_empty(x.numel() // x.shape[-1], norms * (1 + (kind == "layernorm")), dtype=statistics_dtype(x)),
    )


@torch.library.custom_op("nanonorm::backward", mutates_args=())
def backward(
    dr: Tensor | None, dy: Tensor | None, r: Tensor | None, s: Tensor | None,
    out_weight: Tensor | None, weight: Tensor | None, stats: Tensor,
    kind: str, ds_dtype: torch.dtype | None, has_bias: bool, has_out_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, ds, gains): d = dr + N'(dy) if weight is given, N_out'(d) or d if ds_dtype is, gains [G, D].

    The rows of `gains`, in the dtype of the statistics, are the gradients of (weight, bias, out_weight,
    out_bias), without those that are missing.
    """
    dx, ds, gains = backward_fake(
        dr, dy, r, s, out_weight, weight, stats, kind, ds_dtype, has_bias, has_out_bias
    )
    (G, D), M = gains.shape, stats.shape[0]
    if M == 0:
        return dx, ds, gains.zero_()
    dr, dy, r, s, out_weight, weight = contiguous(dr, dy, r, s, out_weight, weight)
    tiles = Tiles.of(D)
    partials = gains.new_empty(G, tiles.programs(M), D)
    P = partials.shape[1]
    with on_device(stats):
        triton_kernels.backward[(P,)](
            dr, dy, r, s, out_weight, weight, stats,
            dx if weight is not None else None, ds if ds_dtype is not None else None, partials, M,
            D=D, CENTRE=kind == "layernorm", STATS=stats.shape[1], BIAS=has_bias, OUT_BIAS=has_out_bias,
            ROWS=tiles.rows, BLOCK=tiles.block, **tiles.options,
        )  # fmt: skip
        triton_kernels.sum_partials[(triton.cdiv(D, 32), G)](partials, gains, P, D=D, ROWS=64, BLOCK=32)
    launches["backward"] += 1
    return dx, ds, gains


@backward.register_fake
def backward_fake(dr, dy, r, s, out_weight, weight, stats, kind, ds_dtype, has_bias, has_out_bias):
    given = dr if dr is not None else dy
    G = (weight is not None) + has_bias + (out_weight is not None) + has_out_bias
    return (
        given.new_empty(EMPTY) if weight is None else r.new_empty(given.shape),
        given.new_empty(EMPTY if ds_dtype is None else given.shape, dtype=ds_dtype),
        stats.new_empty(G, given.shape[-1]),
    )


def setup_context(ctx, inputs, output):
    x, s, out_weight, out_bias, weight, bias, kind, _, _, want_sum = inputs
    r, y, stats = output
    ctx.set_materialize_grads(False)  # the gradient of an unused output is None, not a tensor of zeros
    ctx.mark_non_differentiable(stats, *(t for t in (r, y) if t.shape == EMPTY))
    row = None if weight is None else r if want_sum else x
    branch = s if out_weight is not None or not want_sum else None
    ctx.save_for_backward(row, branch, out_weight, weight, stats)
    ctx.kind = kind
    ctx.s_dtype = None if s is None else s.dtype
    ctx.bias_dtypes = [None if b is None else b.dtype for b in (bias, out_bias)]


def backward_formula(ctx, dr, dy, _):
    """Gradients for the ten arguments of nanonorm::forward."""
    r, s, out_weight, weight, stats = ctx.saved_tensors
    if dy is None:
        if out_weight is None:  # of add_norm, only the sum was used
            return dr, None if dr is None else dr.to(ctx.s_dtype), *(None,) * 8
        if dr is None:
            return (None,) * 10
        r = weight = None
    bias_dtype, out_bias_dtype = ctx.bias_dtypes
    shared = out_weight is None and r is not None and ctx.s_dtype == r.dtype
    dx, ds, gains = torch.ops.nanonorm.backward(
        dr, dy, r, s, out_weight, weight, stats, ctx.kind, None if shared else ctx.s_dtype,
        weight is not None and bias_dtype is not None, out_bias_dtype is not None,
    )  # fmt: skip
    rows = iter(gains.unbind())

    def gain(dtype):
        return None if dtype is None else next(rows).to(dtype)

    dweight = dbias = None
    if weight is None:
        dx = dr
    else:
        dweight, dbias = gain(weight.dtype), gain(bias_dtype)
    dout_weight = gain(out_weight.dtype) if out_weight is not None else None
    dout_bias = gain(out_bias_dtype)
    if ctx.s_dtype is None:
        ds = None
    elif shared:
        ds = dx
    return dx, ds, dout_weight, dout_bias, dweight, dbias, None, None, None, None


torch.library.register_autograd("nanonorm::forward", backward_formula, setup_context=setup_context)


def norm(x, weight, bias, *, kind, eps, out_dtype):
    return forward(x, None, None, None, weight, bias, kind, eps, out_dtype, False)[1]


def add_norm(x, s, weight, bias, *, kind, eps, out_dtype, want_sum):
    r, y, _ = forward(x, s, None, None, weight, bias, kind, eps, out_dtype, want_sum)
    return (r if want_sum else None), y


def norm_add(x, s, weight, bias, *, kind, eps):
    return forward(x, s, weight, bias, None, None, kind, eps, x.dtype, True)[0]


def norm_add_norm(x, s, out_weight, out_bias, weight, bias, *, kind, eps, out_dtype):
    r, y, _ = forward(x, s, out_weight, out_bias, weight, bias, kind, eps, out_dtype, True)
    return r, y

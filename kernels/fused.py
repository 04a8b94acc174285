"""The two functions from the Triton kernels, with autograd.

`forward` and `backward` mirror the two kernels: an argument that is None leaves its part out, and so is a result
that is not asked for. Both accept any strides (what is not contiguous is copied inside), run on their tensors'
device, and never write to their arguments. In eager mode an autograd function calls them. The compiler sees them
as custom operators, `nanonorm::forward` and `nanonorm::backward`, whose missing results are empty tensors.

Saved for backward, besides gains: the row's statistics, [mean,] rstd for each norm, and tensors that exist
anyway: r, or x and s where the sum is not wanted, and s where N_out reads it.
"""

import contextlib
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import launches, triton_kernels
from .reference import statistics_dtype
from .triton_kernels import Tiles

EMPTY = (0,)


def on_device(x):
    """The kernels must run on the tensor's GPU, which need not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def contiguous(*tensors):
    return [None if t is None else t.contiguous() for t in tensors]


def factors(a, b, acc):
    """As the kernels take them: None for 1. A number reaches a kernel as float32, a constant as it is."""
    exact = triton.language.constexpr if acc == torch.float64 else float
    return [None if factor == 1 else exact(factor) for factor in (a, b)]


def results_of_forward(x, out, then, kind, out_dtype, want_sum):
    """(r, h, stats) to be filled: a sum if it is wanted, h if there is N_then, statistics [rows, 0, 1, 2 or 4]."""
    return (
        x.new_empty(x.shape) if want_sum else None,
        x.new_empty(x.shape, dtype=out_dtype) if then else None,
        x.new_empty(
            x.numel() // x.shape[-1],
            (out + then) * (1 + (kind == "layernorm")),
            dtype=statistics_dtype(x),
        ),
    )


def forward(x, s, out_weight, out_bias, weight, bias, out, then, a, b, kind, eps, out_dtype, want_sum):
    """(r, h, stats): a x + b N_out(s), N_then of it, and the norms' statistics."""
    r, h, stats = results_of_forward(x, out, then, kind, out_dtype, want_sum)
    D, M = x.shape[-1], len(stats)
    if M > 0:
        tiles = Tiles.of(D)
        with on_device(x):
            triton_kernels.forward[(tiles.count(M),)](
                *contiguous(x, s, out_weight, out_bias, weight, bias), *factors(a, b, stats.dtype), r, h, stats, M,
                OUT=out, THEN=then, D=D, EPS=eps, CENTRE=kind == "layernorm", STATS=stats.shape[1],
                ROWS=tiles.rows, BLOCK=tiles.block, **tiles.options,
            )  # fmt: skip
        launches["forward"] += 1
    return r, h, stats


def results_of_backward(dr, dh, r, gains, stats, want_dx, ds_dtype):
    """(dx, ds, dgains) to be filled: dx if it is wanted, ds if it has a dtype, and a row for each gain that exists."""
    given = dr if dr is not None else dh
    return (
        given.new_empty(given.shape, dtype=(dr if r is None else r).dtype) if want_dx else None,
        given.new_empty(given.shape, dtype=ds_dtype) if ds_dtype is not None else None,
        stats.new_empty(sum(gain is not None for gain in gains), given.shape[-1]),
    )


def backward(
    dr, dh, r, s, out_weight, out_bias, weight, bias, stats,
    out, then, a, b, kind, has_sum, want_dx, ds_dtype,
):  # fmt: skip
    """(dx, ds, dgains): the gradients of x, of s, and of weight, bias, out_weight and out_bias.

    r is the sum, or x if not has_sum. dgains [G, D] has the dtype of the statistics.
    """
    dx, ds, dgains = results_of_backward(
        dr, dh, r, (weight, bias, out_weight, out_bias), stats, want_dx, ds_dtype
    )
    (G, D), M = dgains.shape, len(stats)
    if M == 0:
        return dx, ds, dgains.zero_()
    tiles = Tiles.of(D)
    P = tiles.programs(M)
    stages = tiles.stages(dr, dh, r, s, None if has_sum else out_bias)
    partials = dgains.new_empty(G, P, D)
    with on_device(stats):
        triton_kernels.backward[(P,)](
            *contiguous(dr, dh, r, s, out_weight, out_bias, weight, bias), *factors(a, b, stats.dtype), stats,
            dx, ds, partials, M,
            OUT=out, THEN=then, SUM=has_sum, D=D, CENTRE=kind == "layernorm", STATS=stats.shape[1],
            ROWS=tiles.rows, BLOCK=tiles.block, STAGES=stages, **tiles.options,
        )  # fmt: skip
        if G > 0:
            triton_kernels.sum_partials[(triton.cdiv(D, 32), G)](
                partials, dgains, P, D=D, ROWS=256, BLOCK=32, num_warps=16
            )
    launches["backward"] += 1
    return dx, ds, dgains


class Settings(NamedTuple):
    """What backward must know besides tensors."""

    out: bool
    then: bool
    a: float
    b: float
    kind: str
    has_sum: bool
    s_dtype: torch.dtype | None


def save(ctx, inputs, results):
    x, s, *gains, out, then, a, b, kind, _, _, want_sum = inputs
    r, _, stats = results
    ctx.set_materialize_grads(False)  # the gradient of an unused output is None, not a tensor of zeros
    row = (r if want_sum else x) if then else None
    branch = s if out or not want_sum else None
    ctx.save_for_backward(row, branch, *gains, stats)
    ctx.settings = Settings(out, then, a, b, kind, want_sum, None if s is None else s.dtype)


def gradients(ctx, dr, dh, backward):
    """Gradients for the six tensors of `forward`; `backward` is the function of that name or its operator."""
    r, s, out_weight, out_bias, weight, bias, stats = ctx.saved_tensors
    out, then, a, b, kind, has_sum, s_dtype = ctx.settings
    if dh is None:
        then, r, weight, bias = False, None, None, None
    if not out and not then:  # nothing but the sum was used
        dx, ds = (None if dr is None else dr if factor == 1 else factor * dr for factor in (a, b))
        return dx, None if ds is None or s_dtype is None else ds.to(s_dtype), None, None, None, None
    if dr is None and not then:
        return (None,) * 6
    want_dx = then or a != 1
    shared = not out and a == b and s_dtype == r.dtype
    dx, ds, dgains = backward(
        dr, dh, r, s, out_weight, out_bias, weight, bias, stats,
        out, then, a, b, kind, has_sum, want_dx, None if shared else s_dtype,
    )  # fmt: skip
    if s_dtype is None:
        ds = None
    rows = iter(dgains.unbind())
    dweight, dbias, dout_weight, dout_bias = (
        None if t is None else next(rows).to(t.dtype) for t in (weight, bias, out_weight, out_bias)
    )
    return dx if want_dx else dr, dx if shared else ds, dout_weight, dout_bias, dweight, dbias


class Fused(torch.autograd.Function):
    """Eager mode. An operator's registration costs the host several times what PyTorch's own path costs."""

    @staticmethod
    def forward(ctx, *inputs):
        results = forward(*inputs)
        save(ctx, inputs, results)
        ctx.mark_non_differentiable(results[2])
        return results

    @staticmethod
    @once_differentiable  # a silent zero for a second derivative would be worse than an error
    def backward(ctx, dr, dh, _):
        return *gradients(ctx, dr, dh, backward), *(None,) * 8


def present(results, like):
    """An operator returns tensors: an empty one for each that is missing."""
    return tuple(like.new_empty(EMPTY) if t is None else t for t in results)


@torch.library.custom_op("nanonorm::forward", mutates_args=())
def forward_op(
    x: Tensor, s: Tensor | None, out_weight: Tensor | None, out_bias: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, out: bool, then: bool, a: float, b: float,
    kind: str, eps: float, out_dtype: torch.dtype, want_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = x, s, out_weight, out_bias, weight, bias, out, then, a, b, kind, eps, out_dtype, want_sum
    return present(forward(*inputs), x)


@torch.library.custom_op("nanonorm::backward", mutates_args=())
def backward_op(
    dr: Tensor | None, dh: Tensor | None, r: Tensor | None, s: Tensor | None,
    out_weight: Tensor | None, out_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    stats: Tensor, out: bool, then: bool, a: float, b: float, kind: str,
    has_sum: bool, want_dx: bool, ds_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = dr, dh, r, s, out_weight, out_bias, weight, bias, stats
    return present(backward(*inputs, out, then, a, b, kind, has_sum, want_dx, ds_dtype), stats)


@forward_op.register_fake
def forward_fake(x, s, out_weight, out_bias, weight, bias, out, then, a, b, kind, eps, out_dtype, want_sum):
    return present(results_of_forward(x, out, then, kind, out_dtype, want_sum), x)


@backward_op.register_fake
def backward_fake(dr, dh, r, s, out_weight, out_bias, weight, bias, stats, *settings):
    *_, want_dx, ds_dtype = settings
    gains = weight, bias, out_weight, out_bias
    return present(results_of_backward(dr, dh, r, gains, stats, want_dx, ds_dtype), stats)


def save_for_operator(ctx, inputs, output):
    ctx.mark_non_differentiable(output[2], *(t for t in output[:2] if t.shape == EMPTY))
    save(ctx, inputs, output)


def gradients_by_operator(ctx, dr, dh, _):
    return *gradients(ctx, dr, dh, torch.ops.nanonorm.backward), *(None,) * 8


forward_op.register_autograd(gradients_by_operator, setup_context=save_for_operator)


def call(x, s, out, then, a, b, kind, eps, out_dtype, want_sum):
    apply = torch.ops.nanonorm.forward if torch.compiler.is_compiling() else Fused.apply
    gains = *(out or (None, None)), *(then or (None, None))
    has = out is not None, then is not None
    return apply(x, s, *gains, *has, a, b, kind, eps, out_dtype, want_sum)


def norm(x, gain, *, kind, eps, out_dtype):
    return call(x, None, None, gain, 1.0, 1.0, kind, eps, out_dtype, False)[1]


def join(x, s, *, out, then, a, b, kind, eps, out_dtype, want_sum):
    r, h, _ = call(x, s, out, then, a, b, kind, eps, out_dtype, want_sum)
    return (r if want_sum else None), (r.to(out_dtype) if then is None else h)

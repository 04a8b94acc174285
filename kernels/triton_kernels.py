"""The Triton kernels: one forward, one backward, and one that adds up the gain gradients.

`norm` and `join` of `reference.py` are one computation with parts left out. With N_out, N_then, their gains and
the factors optional,

    forward    r = a x + b N_out(s)                  h = N_then(r)
    backward   d = dr + N_then'(dh),   dx = a d,     ds = N_out'(b d)

so an argument that is None leaves its part out when the kernel is compiled, and no call moves a byte that it
does not need. One program handles a tile of ROWS whole rows: one row where rows are long, many
where they are short (QK-norm). D is a compile-time constant, the number of rows is not.

Backward is a loop over tiles in a fixed number of programs. Each keeps its sums for the gain gradients in
registers and writes them once, to its own row of `partials`; `sum_partials` adds those rows in a fixed
order. Nothing is atomic, and the number of programs follows from the shape alone, so equal inputs give
equal bits on every run and on every card.

Loads become float32 (float64 stays) before anything else happens to them, and results are rounded once.
Padded lanes read as zero.
"""

import functools
import os
from typing import NamedTuple

import triton
import triton.language as tl

# Triton's interpreter truncates when it stores bfloat16, where a GPU rounds to nearest even.
TRUNCATES = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def rounded(v, dtype: tl.constexpr):
    if TRUNCATES and dtype == tl.bfloat16:
        bits = v.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        v = (bits & -0x10000).to(tl.float32, bitcast=True)
    return v.to(dtype)


@triton.jit
def tile_at(index, M, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Where tile `index` starts, the offsets within it, and which of its lanes and rows exist."""
    first = tl.cast(index, tl.int64) * ROWS  # a row times D passes 2^31 long before the rows do
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    exists = first + row < M
    return first, row[:, None] * D + column, exists[:, None] & (column < D), exists


@triton.jit
def load(pointer, offsets, mask, dtype: tl.constexpr):
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(dtype)


@triton.jit
def store(pointer, offsets, v, mask):
    tl.store(pointer + offsets, rounded(v, pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_gain(pointer, D: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    return load(pointer, column, column < D, dtype)  # [1, BLOCK]


@triton.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def sum2(a, b):
    """The sums of two tiles' rows, across a program's warps at once. The interpreter reduces no tuples."""
    if TRUNCATES:
        return tl.sum(a, 1), tl.sum(b, 1)
    return tl.reduce((a, b), 1, add2)


@triton.jit
def sum3(a, b, c):
    if TRUNCATES:
        return tl.sum(a, 1), tl.sum(b, 1), tl.sum(c, 1)
    return tl.reduce((a, b, c), 1, add3)


@triton.jit
def affine(v, weight, bias, D: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr):
    if weight is not None:
        v *= load_gain(weight, D, BLOCK, dtype)
    if bias is not None:
        v += load_gain(bias, D, BLOCK, dtype)
    return v


@triton.jit
def joined(v, branch, a, b, dtype: tl.constexpr):
    """a v + b branch, as `dtype` stores it: backward reads the stored sum, and needs the statistics of that."""
    if a is not None:
        v *= a
    if b is not None:
        branch *= b
    return rounded(v + branch, dtype).to(v.dtype)


@triton.jit
def centred(v, mean, mask):
    """Padded lanes stay zero: one would add (0 - mean)^2 to the variance."""
    return tl.where(mask, v - mean[:, None], 0.0)


@triton.jit
def standardize(v, mask, stats, exists, D: tl.constexpr, EPS: tl.constexpr, CENTRE: tl.constexpr):
    """The normalized rows; their statistics, ([mean,] rstd), go to `stats`.

    The corrected two-pass algorithm (Chan, Golub and LeVeque, 1983, "Algorithms for computing the sample
    variance"): `off`, by which rounding has the mean wrong, is the mean of the centred row.
    """
    if CENTRE:
        mean = tl.sum(v, 1) / D
        v = centred(v, mean, mask)
        off, square = sum2(v, v * v)
        off, square = off / D, square / D
        v -= off[:, None]
        tl.store(stats, mean + off, mask=exists)
        stats += 1
        # The floor is for constant rows: a GPU's division, inexact in the last bits, may leave less than zero.
        variance = tl.maximum(square - off * off, square * 2.0**-24)
    else:
        variance = tl.sum(v * v, 1) / D
    rstd = tl.rsqrt(variance + EPS)
    tl.store(stats, rstd, mask=exists)
    return v * rstd[:, None]


@triton.jit
def restandardize(v, mask, stats, exists, CENTRE: tl.constexpr):
    """The normalized rows, but for the rounding of the mean that forward left in `stats`, and rstd."""
    if CENTRE:
        v = centred(v, tl.load(stats, mask=exists, other=0.0), mask)
        stats += 1
    rstd = tl.load(stats, mask=exists, other=0.0)[:, None]
    return v * rstd, rstd


@triton.jit
def projections(g, xh, D: tl.constexpr, CENTRE: tl.constexpr):
    """(xh, m(g), m(g * xh)), of which N'(dy) is rstd * (g - m(g) - xh * m(g * xh)); xh is centred once more.

    g = dy * weight must be zero in padded lanes, so that the sums are over D lanes. None of them waits for another:
    what the new centre takes from m(g * xh) is m(g) times the old one's error.
    """
    if CENTRE:
        along, level, off = sum3(g * xh, g, xh)
        level, off = level / D, off / D
        along = along / D - level * off
        xh -= off[:, None]
    else:
        along = tl.sum(g * xh, 1) / D
        level = tl.zeros_like(along)
    return xh, level[:, None], along[:, None]


@triton.jit(do_not_specialize=["M"])
def forward(
    x, s, out_weight, out_bias, weight, bias, a, b, r, h, stats, M,
    OUT: tl.constexpr, THEN: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr, CENTRE: tl.constexpr,
    STATS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    acc: tl.constexpr = stats.dtype.element_ty
    first, inner, mask, exists = tile_at(tl.program_id(0), M, D, ROWS, BLOCK)
    tile = first * D
    stats += (first + tl.arange(0, ROWS)) * STATS

    v = load(x + tile, inner, mask, acc)
    if s is not None:
        branch = load(s + tile, inner, mask, acc)
        if OUT:
            branch = standardize(branch, mask, stats, exists, D, EPS, CENTRE)
            stats += 1 + CENTRE
            branch = affine(branch, out_weight, out_bias, D, BLOCK, acc)
        v = joined(v, branch, a, b, x.dtype.element_ty)
    if r is not None:
        store(r + tile, inner, v, mask)
    if THEN:
        v = standardize(v, mask, stats, exists, D, EPS, CENTRE)
        store(h + tile, inner, affine(v, weight, bias, D, BLOCK, acc), mask)


@triton.jit(do_not_specialize=["M"])
def backward(
    dr, dh, r, s, out_weight, out_bias, weight, bias, a, b, stats, dx, ds, partials, M,
    OUT: tl.constexpr, THEN: tl.constexpr, SUM: tl.constexpr, D: tl.constexpr, CENTRE: tl.constexpr,
    STATS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """r is the stored sum, or x where SUM is False. N_then's bias is not read: that it exists is enough."""
    acc: tl.constexpr = stats.dtype.element_ty
    dweight = tl.zeros([ROWS, BLOCK], acc)
    dbias = tl.zeros([ROWS, BLOCK], acc)
    dout_weight = tl.zeros([ROWS, BLOCK], acc)
    dout_bias = tl.zeros([ROWS, BLOCK], acc)
    if weight is not None:
        gain = load_gain(weight, D, BLOCK, acc)
    if out_weight is not None:
        out_gain = load_gain(out_weight, D, BLOCK, acc)

    for index in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        first, inner, mask, exists = tile_at(index, M, D, ROWS, BLOCK)
        tile = first * D
        stat = stats + (first + tl.arange(0, ROWS)) * STATS

        # All loads stand before the first reduction, whose barrier none of them could cross.
        if dr is not None:
            d = load(dr + tile, inner, mask, acc)
        if s is not None:
            branch = load(s + tile, inner, mask, acc)
        if THEN:
            dnormed = load(dh + tile, inner, mask, acc)
            v = load(r + tile, inner, mask, acc)

        if OUT:
            branch, out_rstd = restandardize(branch, mask, stat, exists, CENTRE)
        if THEN:
            if not SUM and s is not None:
                term = branch
                if out_weight is not None:
                    term *= out_gain
                if out_bias is not None:
                    term += load_gain(out_bias, D, BLOCK, acc)  # registers are short: it has none of its own
                v = joined(v, term, a, b, r.dtype.element_ty)
            # N_out's statistics, where there are any, stand before N_then's.
            xh, rstd = restandardize(v, mask, stat + (STATS - 1 - CENTRE), exists, CENTRE)
            g = dnormed * gain if weight is not None else dnormed
            xh, level, along = projections(g, xh, D, CENTRE)
            if weight is not None:
                dweight += dnormed * xh
            if bias is not None:
                dbias += dnormed
            g = rstd * (g - level - xh * along)
            if dr is not None:
                d += g
            else:
                d = g
        if dx is not None:
            store(dx + tile, inner, d if a is None else d * a, mask)

        if b is not None:
            d *= b
        if OUT:
            g = d * out_gain if out_weight is not None else tl.where(mask, d, 0.0)
            branch, level, along = projections(g, branch, D, CENTRE)
            if out_weight is not None:
                dout_weight += d * branch
            if out_bias is not None:
                dout_bias += d
            d = out_rstd * (g - level - branch * along)
        if ds is not None:
            store(ds + tile, inner, d, mask)

    column = tl.arange(0, BLOCK)
    row = partials + tl.program_id(0) * D + column
    step = tl.num_programs(0) * D
    if weight is not None:
        tl.store(row, tl.sum(dweight, 0), mask=column < D)
        row += step
    if bias is not None:
        tl.store(row, tl.sum(dbias, 0), mask=column < D)
        row += step
    if out_weight is not None:
        tl.store(row, tl.sum(dout_weight, 0), mask=column < D)
        row += step
    if out_bias is not None:
        tl.store(row, tl.sum(dout_bias, 0), mask=column < D)


@triton.jit
def sum_partials(partials, gains, P, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """partials [G, P, D] -> gains [G, D], always in the same order."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    partials += tl.program_id(1) * P * D
    total = tl.zeros([ROWS, BLOCK], partials.dtype.element_ty)
    for first in range(0, P, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < P)[:, None] & (column < D)[None, :]
        total += tl.load(partials + row[:, None] * D + column[None, :], mask=mask, other=0.0)
    tl.store(gains + tl.program_id(1) * D + column, tl.sum(total, 0), mask=column < D)


ELEMENTS_PER_THREAD = 8  # one 16-byte access of bfloat16, two of float32
PROGRAMS = 512  # of the backward loop: three for each multiprocessor of the largest cards
PREFETCH = (
    80 * 1024
)  # bytes of shared memory for rows that are on their way; with scratch below any card's 99 KiB


class Tiles(NamedTuple):
    """How rows of D elements are dealt out to programs. Nothing here may depend on the card."""

    rows: int  # whole rows per program
    block: int  # D rounded up to a power of two
    warps: int

    @classmethod
    @functools.cache
    def of(cls, D):
        block = triton.next_power_of_2(D)
        rows = min(64, max(1, 1024 // block))
        most = 16 if block <= 8192 else 32
        return cls(rows, block, min(most, max(1, rows * block // (32 * ELEMENTS_PER_THREAD))))

    @property
    def options(self):
        """Compile options. Not told a limit, ptxas spills with registers still free."""
        return {"num_warps": self.warps, "maxnreg": min(128, 2048 // self.warps)}

    def count(self, M):
        return triton.cdiv(M, self.rows)

    def programs(self, M):
        """Programs of the backward loop, and so rows of partial sums: a power of two, with two tiles each or more."""
        return min(PROGRAMS, max(1, triton.next_power_of_2(self.count(M) // 2 + 1) // 2))

    def stages(self, *loaded):
        """How many tiles ahead, and one, the backward loop loads; a tile has a row of each of these tensors."""
        tile = self.rows * self.block * sum(t.element_size() for t in loaded if t is not None)
        return 1 + min(2, PREFETCH // tile)

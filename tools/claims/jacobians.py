"""Claims 10 to 12: derivatives, in float64, against autograd and against central differences."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from kernels import reference
from model import GPT, PLACEMENTS, Join, ModelConfig, having
from tools.claims.claim import Check, at_most, claim, control, equal
from tools.claims.small import NAMES, SHAPE, SIZE, largest, random, randomize, small_model, small_norm

ONES = torch.ones(SIZE, dtype=torch.float64)
KEPT, RENORMED = having("post", False), having("post")


def jacobian_at(function, x: Tensor) -> Tensor:
    """dy / dx [D, D] of a function of one token's features [D]."""
    return jacobian(lambda v: function(v.view(1, 1, -1)).flatten(), x)


def with_zero_branches(placement: str, kind: str) -> GPT:
    """A model whose branches all add nothing, and whose norms of a branch's output leave it so."""
    model = small_model(placement=placement, norm=kind)
    with torch.no_grad():
        for branch, join in zip(model.branches, model.joins, strict=True):
            for p in (branch.out if hasattr(branch, "out") else branch.down).parameters():
                p.zero_()
            if join.out_norm is not None and join.out_norm.bias is not None:
                join.out_norm.bias.zero_()
    return model


def first_block(model: GPT, x: Tensor) -> Tensor:
    """The stream [1, 1, D] after the first branch and its join."""
    return model.joins[0](x, model.branches[0](model.entry(x, out_dtype=x.dtype)))[0]


@claim(10)
def zero_branches():
    """With a zero branch the stream passes unchanged where no N_post is; where one is, it becomes N(x), blind to a
    common shift under LayerNorm."""
    x, eye = random(SIZE), torch.eye(SIZE, dtype=torch.float64)
    token = x.view(1, 1, -1)
    for kind, name in NAMES.items():
        kept = [with_zero_branches(placement, kind) for placement in KEPT]
        changes = [largest(jacobian_at(lambda v, m=m: first_block(m, v), x) - eye) for m in kept]
        yield at_most(f"{name}: |J - I| in {', '.join(KEPT)}", max(changes), 1e-12)
        renormed = [with_zero_branches(placement, kind) for placement in RENORMED]
        apart = [largest(first_block(m, token) - m.joins[0].post_norm(token)) for m in renormed]
        yield at_most(f"{name}: |y - N(x)| in {', '.join(RENORMED)}", max(apart), 1e-12)
        shifts = [largest(jacobian_at(lambda v, m=m: first_block(m, v), x) @ ONES) for m in renormed]
        check = at_most(f"{name}: |J 1| in the same", max(shifts), 1e-12)
        yield check if kind == "layernorm" else control(check)


EPS = 0.01  # large enough to be seen


def across(*directions: Tensor) -> Tensor:
    """A vector orthogonal to all `directions`, which are orthogonal to each other."""
    u = random(SIZE, seed=4)
    for d in directions:
        u = u - (u @ d) / (d @ d) * d
    return u


@claim(11)
def eigenvectors():
    """RMSNorm's Jacobian scales x by eps/s^3 and what is orthogonal to it by 1/s, s = sqrt(mean(x^2) + eps)."""
    x = random(SIZE) + 0.5
    rms = small_norm("rmsnorm", SIZE, eps=EPS).double()
    s = (x.square().mean() + EPS).sqrt()
    J, u = jacobian_at(rms, x), across(x)
    yield at_most("RMSNorm: |J u - u / s| for u orthogonal to x", largest(J @ u - u / s), 1e-12)
    yield at_most("RMSNorm: |J x - x eps / s^3|", largest(J @ x - x * EPS / s**3), 1e-12)
    eps_outside = jacobian_at(lambda v: v / (v.square().mean(-1, keepdim=True).sqrt() + EPS), x)
    wrong = largest(eps_outside @ x - x * EPS / s**3)
    yield control(at_most("|J x - x eps / s^3| of x / (rms + eps)", wrong, 1e-12))
    at_zero = jacobian_at(rms, torch.zeros_like(x)) * EPS**0.5
    yield at_most("RMSNorm at 0: |J sqrt(eps) - I|", largest(at_zero - torch.eye(SIZE)), 1e-12)
    layer = small_norm("layernorm", SIZE, eps=EPS).double()
    c = x - x.mean()
    s = (c.square().mean() + EPS).sqrt()
    J, u = jacobian_at(layer, x), across(c, ONES)
    yield at_most("LayerNorm: |J 1|", largest(J @ ONES), 1e-12)
    yield at_most("LayerNorm: |J c - c eps / s^3| for c = x - mean", largest(J @ c - c * EPS / s**3), 1e-12)
    yield at_most("LayerNorm: |J u - u / s| for u orthogonal to both", largest(J @ u - u / s), 1e-12)
    for kind, lost in (("rmsnorm", 1), ("layernorm", 2)):
        J = jacobian_at(small_norm(kind, SIZE).double(), x)
        rank = int(torch.linalg.matrix_rank(J, rtol=1e-10))
        yield equal(f"{NAMES[kind]}: rank of J at eps 0 and width {SIZE}", rank, SIZE - lost)


def handed_back(join: Join, kind: str, x: Tensor, s: Tensor, dy: Tensor, dh: Tensor) -> dict[str, Tensor]:
    """The hand-written backward of a join: gradients by name. dy comes from the stream, dh from the next branch."""
    names = ("out_norm", "post_norm", "next_norm")
    gains = {n: None if (norm := getattr(join, n)) is None else norm.gain(x) for n in names}
    how = {"kind": kind, "eps": join.eps}
    sides = {"out": gains["out_norm"], "a": join.a, "b": join.b, **how}
    then, found = "next_norm", {}
    if gains["post_norm"]:  # stream and next branch read the same y, and nobody the sum
        then = "post_norm"
        if gains["next_norm"]:
            _, y = reference.join(x, s, then=gains["post_norm"], **sides)
            dh, found["next_norm"] = reference.norm_backward(dh, y, gains["next_norm"], **how)
        dy, dh = None, dy + dh
    dx, ds, found["out_norm"], found[then] = reference.join_backward(dy, dh, x, s, then=gains[then], **sides)
    parts = {
        f"{n}.{part}": t for n, pair in found.items() if pair for part, t in zip(PARTS, pair, strict=True)
    }
    return {"x": dx, "s": ds} | {name: t for name, t in parts.items() if t is not None}


PARTS = ("weight", "bias")


def central_differences(function, leaf: Tensor, step: float = 1e-6) -> Tensor:
    """d function() / d leaf, one element at a time; `function` reads `leaf`."""
    slopes = torch.zeros_like(leaf).flatten()
    with torch.no_grad():
        flat = leaf.view(-1)
        for i, value in enumerate(flat.tolist()):
            flat[i] = value + step
            above = function()
            flat[i] = value - step
            slopes[i] = (above - function()) / (2 * step)
            flat[i] = value
    return slopes.view_as(leaf)


def join_backward(placement: str, kind: str) -> Iterator[Check]:
    join = Join(ModelConfig(**SHAPE, placement=placement, norm=kind)).double()  # between two branches
    randomize(join, spread=0.3)
    x, s, dy, dh = (random(2, 1, SIZE, seed=seed) for seed in range(4))
    leaves = {"x": x.requires_grad_(), "s": s.requires_grad_(), **dict(join.named_parameters())}

    def loss() -> Tensor:
        keeps, reads = join(x, s)
        return (dy * keeps).sum() + (dh * reads).sum()

    ours = handed_back(join, kind, x, s, dy, dh)
    autograd = dict(zip(leaves, torch.autograd.grad(loss(), list(leaves.values())), strict=True))
    differences = {name: central_differences(loss, leaf) for name, leaf in leaves.items()}
    of = f"{placement}, {NAMES[kind]}"
    yield equal(f"{of}: what has a gradient", ", ".join(sorted(ours)), ", ".join(sorted(leaves)))
    for truth, others, limit in (("autograd", autograd, 1e-12), ("central differences", differences, 1e-7)):
        apart = max(largest(ours[n] - others[n]) for n in leaves)
        yield at_most(f"{of}: by hand - {truth}", apart, limit)


@claim(12)
def backward():
    """The hand-written backward equals autograd and central differences, for both kinds and every join."""
    for placement in PLACEMENTS:
        for kind in NAMES:
            yield from join_backward(placement, kind)
    r, dr, dh, weight = (random(2, SIZE, seed=seed) for seed in range(4))
    gain, how = (weight[0], None), {"kind": "rmsnorm", "eps": EPS}
    after = reference.backward_of_sum(dr, dh, r, gain, **how)[0]
    before = reference.normalize_backward(dr + dh, r, gain, **how)[0]
    leaf = r.clone().requires_grad_()
    h = reference.norm(leaf, gain, **how)
    (truth,) = torch.autograd.grad((dr * leaf).sum() + (dh * h).sum(), leaf)
    yield at_most("the sum's own gradient joins after the norm's Jacobian", largest(after - truth), 1e-12)
    yield control(at_most("the sum's own gradient joins before it", largest(before - truth), 1e-12))

"""Claims 10 to 12: derivatives, in float64, against autograd and against central differences."""

import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from kernels import reference
from model import GPT, Join, ModelConfig, Norm
from tools.claims.claim import Check, at_most, claim, control, equal
from tools.claims.small import (
    KINDS,
    NAMES,
    PLACEMENTS,
    SHAPE,
    largest,
    random,
    randomize,
    small_model,
    small_norm,
)

SIZE = SHAPE["n_embd"]
ONES = torch.ones(SIZE, dtype=torch.float64)


def jacobian_at(function, x: Tensor) -> Tensor:
    """dy / dx [D, D] of a function of one token's features [D]."""
    return jacobian(lambda v: function(v.view(1, 1, -1)).flatten(), x)


def with_zero_branches(placement: str, kind: str) -> GPT:
    """A model whose branches all add nothing."""
    model = small_model(placement=placement, norm=kind)
    with torch.no_grad():
        for branch in model.branches:
            last = branch.out if hasattr(branch, "out") else branch.down
            for p in last.parameters():
                p.zero_()
    return model


def first_block(model: GPT, x: Tensor) -> Tensor:
    """The stream [1, 1, D] after the first branch and its join."""
    return model.joins[0](x, model.branches[0](model.entry(x, out_dtype=x.dtype)))[0]


@claim(
    10,
    "With a zero branch pre-norm is the identity, and post-norm is N(x), blind to a common shift under LayerNorm.",
)
def zero_branches():
    x, eye = random(SIZE), torch.eye(SIZE, dtype=torch.float64)
    for kind in KINDS:
        pre, post = (with_zero_branches(placement, kind) for placement in ("pre", "post"))
        name = NAMES[kind]
        yield at_most(
            f"pre, {name}: |J - I|", largest(jacobian_at(lambda v, m=pre: first_block(m, v), x) - eye), 1e-12
        )
        token = x.view(1, 1, -1)
        is_norm = largest(first_block(post, token) - post.joins[0].post_norm(token))
        yield at_most(f"post, {name}: |y - N(x)|", is_norm, 1e-12)
        shift = largest(jacobian_at(lambda v, m=post: first_block(m, v), x) @ ONES)
        check = at_most(f"post, {name}: |J 1|", shift, 1e-12)
        yield check if kind == "layernorm" else control(check)


EPS = 0.01  # large enough to be seen


def across(*directions: Tensor) -> Tensor:
    """A vector orthogonal to all `directions`, which are orthogonal to each other."""
    u = random(SIZE, seed=4)
    for d in directions:
        u = u - (u @ d) / (d @ d) * d
    return u


@claim(
    11,
    "RMSNorm's Jacobian scales x by eps/s^3 and what is orthogonal to it by 1/s, s = sqrt(mean(x^2) + eps).",
)
def eigenvectors():
    x = random(SIZE) + 0.5
    rms = small_norm("rmsnorm", SIZE, eps=EPS).double()
    s = (x.square().mean() + EPS).sqrt()
    J, u = jacobian_at(rms, x), across(x)
    yield at_most("RMSNorm: |J u - u / s| for u orthogonal to x", largest(J @ u - u / s), 1e-12)
    yield at_most("RMSNorm: |J x - x eps / s^3|", largest(J @ x - x * EPS / s**3), 1e-12)
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
    eps_outside = jacobian_at(lambda v: v / (v.square().mean(-1, keepdim=True).sqrt() + EPS), x)
    s = (x.square().mean() + EPS).sqrt()
    yield control(
        at_most("|J x - x eps / s^3| of x / (rms + eps)", largest(eps_outside @ x - x * EPS / s**3), 1e-12)
    )


def inner_join(placement: str, kind: str) -> nn.Module:
    """A join between two branches, with random gains."""
    join = Join(ModelConfig(**SHAPE, placement=placement, norm=kind), 0).double()
    randomize(join, spread=0.3)
    return join


def handed_back(
    placement: str, join: nn.Module, x: Tensor, s: Tensor, dr: Tensor, dy: Tensor
) -> dict[str, Tensor]:
    """The hand-written backward of a join: gradients by name. dr comes from the stream, dy from the next branch."""
    norms = {"out": join.out_norm, "then": join.post_norm or join.next_norm}
    gains = {name: (norm.weight, norm.bias) for name, norm in norms.items() if norm is not None}
    norm: Norm = norms["then"] or norms["out"]
    if placement == "post":  # stream and branch read the same h, and nobody the sum
        dr, dy = None, dr + dy
    found = reference.join_backward(dr, dy, x, s, **gains, kind=norm.kind, eps=norm.eps)
    then = "post_norm" if join.post_norm else "next_norm"
    names = ["x", "s", "out_norm.weight", "out_norm.bias", f"{then}.weight", f"{then}.bias"]
    dx, ds, dout, dthen = found
    gradients = dict(zip(names, (dx, ds, *(dout or (None, None)), *(dthen or (None, None))), strict=True))
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


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


def join_backward(placement: str, kind: str) -> list[Check]:
    join = inner_join(placement, kind)
    x, s, dr, dy = (random(2, 1, SIZE, seed=seed) for seed in range(4))
    leaves = {"x": x.requires_grad_(), "s": s.requires_grad_(), **dict(join.named_parameters())}

    def loss() -> Tensor:
        keeps, reads = join(x, s)
        return (dr * keeps).sum() + (dy * reads).sum()

    ours = {name: g for name, g in handed_back(placement, join, x, s, dr, dy).items() if name in leaves}
    autograd = dict(zip(leaves, torch.autograd.grad(loss(), list(leaves.values())), strict=True))
    differences = {name: central_differences(loss, leaf) for name, leaf in leaves.items()}
    of = f"{placement}, {NAMES[kind]}"
    return [
        equal(f"{of}: what has a gradient", ", ".join(sorted(ours)), ", ".join(sorted(leaves))),
        at_most(f"{of}: by hand - autograd", max(largest(ours[n] - autograd[n]) for n in leaves), 1e-12),
        at_most(
            f"{of}: by hand - central differences",
            max(largest(ours[n] - differences[n]) for n in leaves),
            1e-7,
        ),
    ]


@claim(
    12,
    "The hand-written backward equals autograd and central differences, for both kinds and all four joins.",
)
def backward():
    for placement in PLACEMENTS:
        for kind in KINDS:
            yield from join_backward(placement, kind)
    r, dr, dy, weight = (random(2, SIZE, seed=seed) for seed in range(4))
    how = {"kind": "rmsnorm", "eps": EPS}
    gain = weight[0], None
    after = reference.backward_of_sum(dr, dy, r, gain, **how)[0]
    before = reference.normalize_backward(dr + dy, r, gain, **how)[0]
    leaf = r.clone().requires_grad_()
    y = reference.norm(leaf, gain, **how)
    (truth,) = torch.autograd.grad((dr * leaf).sum() + (dy * y).sum(), leaf)
    yield at_most("the sum's own gradient joins after the norm's Jacobian", largest(after - truth), 1e-12)
    yield control(at_most("the sum's own gradient joins before it", largest(before - truth), 1e-12))

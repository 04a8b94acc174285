"""torch.func and forward-mode differentiation: Jacobians, per-sample gradients, and what is refused."""

import pytest
import torch
from kernel_cases import DEVICE
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

import kernels
from kernels import attend, eager
from kernels.attention import SHORTEST
from model import GPT, ModelConfig

D = 5
EPS = 1e-3


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


row, weight = random(D), random(1, D)[0]
OPTIONS = {"kind": "rmsnorm", "eps": EPS}


def jacobian_of_rmsnorm(x):
    """d N(x)_i / d x_j = weight_i * rstd * (delta_ij - xh_i * xh_j / D)."""
    rstd = (x.square().mean() + EPS).rsqrt()
    xh = x * rstd
    return weight[:, None] * rstd * (torch.eye(D, dtype=x.dtype) - torch.outer(xh, xh) / D)


def dual_columns(function):
    """Like jacfwd, by dual tensors: one column of the Jacobian for each unit vector."""

    def jacobian(x):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, unit) for unit in torch.eye(D, dtype=x.dtype)]
            return torch.stack([forward_ad.unpack_dual(function(dual)).tangent for dual in duals], dim=1)

    return jacobian


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("jacobian", [jacrev, jacfwd, dual_columns])
def test_jacobian_of_rmsnorm_and_of_a_join(jacobian, impl):
    exact = {"rtol": 1e-12, "atol": 1e-12}
    ours = jacobian(lambda x: kernels.norm(x, (weight, None), impl=impl, **OPTIONS))(row)
    torch.testing.assert_close(ours, jacobian_of_rmsnorm(row), **exact)

    def join(s, output):
        return kernels.norm_add_norm(row, s, weight, None, weight, None, impl=impl, **OPTIONS)[output]

    s = 2 * row.flip(0)
    inner = jacobian_of_rmsnorm(s)
    torch.testing.assert_close(jacobian(lambda s: join(s, 0))(s), inner, **exact)
    outer = jacobian_of_rmsnorm(join(s, 0))
    torch.testing.assert_close(jacobian(lambda s: join(s, 1))(s), outer @ inner, **exact)


@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": "head", "placement": "sandwich", "n_kv_head": 1}], ids=str
)
def test_per_sample_gradients_are_those_of_one_sample_after_another(changes):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 11, "block_size": 6}
    model = GPT(ModelConfig(norm="rmsnorm", **sizes, **changes))
    tokens, targets = torch.randint(11, (2, 3, 6))
    parameters = dict(model.named_parameters())

    def loss(parameters, tokens, targets):
        return functional_call(model, parameters, (tokens[None], targets[None]))[1]

    detached = {name: p.detach() for name, p in parameters.items()}
    together = vmap(grad(loss), in_dims=(None, 0, 0))(detached, tokens, targets)
    for i, sample in enumerate(zip(tokens, targets, strict=True)):
        alone = torch.autograd.grad(loss(parameters, *sample), list(parameters.values()))
        for name, gradient in zip(parameters, alone, strict=True):
            torch.testing.assert_close(together[name][i], gradient, rtol=1e-4, atol=1e-6, msg=name)


def heads(dtype, time):
    torch.manual_seed(0)
    return [torch.randn(2, 2, time, 4, dtype=torch.float64).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("time", [SHORTEST - 1, SHORTEST])
def test_bfloat16_attention_can_be_transformed(time):
    q, k, v = heads(torch.bfloat16, time)
    ours = grad(lambda q: attend(q, k, v).float().square().sum())(q)
    q.requires_grad_()
    (plain,) = torch.autograd.grad(attend(q, k, v).float().square().sum(), q)
    torch.testing.assert_close(ours, plain, rtol=0.05, atol=0.02)


def test_forward_mode_of_attention_is_the_slope():
    q, k, v = heads(torch.float64, 7)
    value, slope = jvp(lambda q: attend(q, k, v), (q,), (v,))
    torch.testing.assert_close(value, attend(q, k, v))
    steps = attend(q + 1e-6 * v, k, v) - attend(q - 1e-6 * v, k, v)
    torch.testing.assert_close(slope, steps / 2e-6, rtol=1e-6, atol=1e-8)
    assert slope.abs().max() > 0.01


def test_dropout_draws_for_each_sample():
    x = torch.ones(2, 50)
    drop = vmap(lambda x: kernels.dropout(x, 0.2), randomness="different")
    assert set(drop(x).unique().tolist()) == {0.0, 1.25}
    assert not torch.equal(*drop(x))
    q = torch.ones(2, 1, 1, 9, 4)
    attended = vmap(lambda q: attend(q, q, q, dropout=0.5), randomness="different")(q)
    assert not torch.equal(*attended)


class OnCuda:
    """As much of a CUDA tensor as the choice of a path looks at."""

    device = torch.device("cuda")
    shape = (2, 8)


def test_the_kernels_are_refused_and_auto_falls_back():
    """As a custom operator they would give a tangent of zero, without a word."""
    chosen = []

    def triton(x):
        chosen.append(kernels.backend("auto", OnCuda))
        return kernels.norm(x.to(DEVICE), (weight.to(DEVICE), None), impl="triton", **OPTIONS)

    sentence = "^The Triton kernels take no torch.func transform and no forward-mode differentiation.$"
    for transform in (jacrev, jacfwd, dual_columns, vmap):
        with pytest.raises(ValueError, match=sentence):
            transform(triton)(row[None] if transform is vmap else row)
    assert chosen == [eager] * 4
    triton(row)
    assert chosen[-1].__name__ == "kernels.fused"

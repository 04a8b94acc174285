"""The CPU's attention and dropout against PyTorch's and against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from kernels import attend, attention, dropout
from kernels.attention import LONGEST, SHORTEST, CpuAttention, keep
from training import setup


def heads(n_kv=4, T=9, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(2, 4, T, 6), (2, n_kv, T, 6), (2, n_kv, T, 6)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(fn, tensors):
    y = fn(*tensors)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return y, *torch.autograd.grad((y * weights).sum(), tensors)


def direct(q, k, v):
    return CpuAttention.apply(*(t.flatten(0, 1) for t in (q, k, v)), 0.0).view(q.shape)


@pytest.mark.parametrize("scores", [attention.SCORES, 200])
def test_forward_and_backward_are_pytorchs_in_float64(scores, monkeypatch):
    """All scores at once, and those of two heads of the eight at a time."""
    monkeypatch.setattr(attention, "SCORES", scores)
    tensors = heads()
    want = with_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), tensors)
    torch.testing.assert_close(with_gradients(direct, tensors), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("time", [SHORTEST - 1, SHORTEST])
@pytest.mark.parametrize("n_kv", [4, 2])
def test_bfloat16_errs_no_more_than_twice_pytorch(n_kv, time):
    exact = with_gradients(
        lambda *t: F.scaled_dot_product_attention(*t, is_causal=True, enable_gqa=True), heads(n_kv, time)
    )
    low = heads(n_kv, time, torch.bfloat16)
    ours = with_gradients(attend, low)
    theirs = with_gradients(lambda *t: attend(*t, impl="torch"), low)
    assert any(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), "one path is not used"
    for own, other, right in zip(ours, theirs, exact, strict=True):
        assert own.dtype == torch.bfloat16
        assert (own - right).abs().max() <= 2 * (other - right).abs().max() + 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorchs_own_runs_where_it_is_as_fast(dtype, monkeypatch):
    calls = []
    monkeypatch.setattr(CpuAttention, "apply", lambda *a: calls.append(a) or a[0])
    attend(*heads(dtype=torch.float32))
    attend(*heads(T=SHORTEST - 1, dtype=dtype))
    attend(*heads(T=LONGEST + 1, dtype=dtype))
    attend(*heads(dtype=dtype), dropout=0.5, impl="torch")
    assert not calls
    attend(*heads(dtype=dtype), dropout=0.5)
    attend(*heads(T=SHORTEST, dtype=torch.bfloat16))
    assert len(calls) == 2


def test_dropout_of_the_probabilities_is_what_backward_sees():
    """With the mask fixed by the seed, autograd of the definition gives the same gradients."""
    q, k, v = heads()
    p_drop = 0.25

    def ours(q, k, v):
        torch.manual_seed(5)
        return attend(q, k, v, dropout=p_drop)

    def defined(q, k, v):
        torch.manual_seed(5)
        T = q.size(-2)
        scores = (q @ k.mT) * q.size(-1) ** -0.5
        p = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        return (p * keep(p.flatten(0, 1).shape, p_drop, p.dtype).view(p.shape) / (1 - p_drop)) @ v

    want = with_gradients(defined, (q, k, v))
    assert not torch.allclose(want[0], attend(q, k, v))
    torch.testing.assert_close(with_gradients(ours, (q, k, v)), want, rtol=1e-12, atol=1e-12)


def test_dropout_keeps_the_mean_and_repeats_with_the_seed():
    x = torch.ones(400, 1001, requires_grad=True)
    torch.manual_seed(1)
    y = dropout(x, 0.2)
    torch.manual_seed(1)
    torch.testing.assert_close(dropout(x, 0.2), y, rtol=0, atol=0)
    assert set(y.unique().tolist()) == {0.0, 1.25}
    assert abs((y == 0).double().mean() - 0.2) < 5 * (0.16 / y.numel()) ** 0.5
    neighbours = ((y[:, 1:] == 0) & (y[:, :-1] == 0)).double().mean()  # they share one 64-bit number
    assert abs(neighbours - 0.04) < 5 * (0.04 / y.numel()) ** 0.5
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], y.detach())
    assert dropout(x, 0.0) is x


@pytest.mark.parametrize(
    ("has", "width", "dtype"),
    [
        ({"amx_bf16": True}, setup.WIDE, "bfloat16"),
        ({"avx512_bf16": True}, setup.WIDE, "bfloat16"),
        ({"amx_bf16": True}, setup.WIDE - 1, "float32"),
        ({"avx2": True}, 4096, "float32"),
    ],
)
def test_a_cpu_computes_in_bfloat16_where_that_is_faster(has, width, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert setup.choose_dtype("auto", torch.device("cpu"), width) == dtype
    assert setup.choose_dtype("float16", torch.device("cpu"), width) == "float16"

"""The specification's hand-derived gradients against autograd of its own forward, in float64.

Claim 12 compares them with central differences.
"""

from functools import partial

import pytest
import torch
from kernel_cases import EPS, Case, call, run, textbook

import kernels
from kernels import reference
from kernels.calls import CALLS

F64 = {"stream": torch.float64, "branch": torch.float64, "gains": torch.float64}
forward = partial(call, functions=reference)
both_kinds = pytest.mark.parametrize("kind", kernels.KINDS)
all_calls = pytest.mark.parametrize("name", CALLS)


def backward(case, t, gradients):
    """The gradients of the reference, by name."""
    made, how = CALLS[case.call], {"kind": case.kind, "eps": EPS}
    gains = {norm: (t.get(f"{norm}_weight"), t.get(f"{norm}_bias")) for norm in made.norms}
    dr, dh = gradients.get("r"), gradients.get("h")
    if made.is_join:
        dx, ds, dout, dthen = reference.join_backward(
            dr, dh, t["x"], t["s"], **gains, a=made.a, b=made.b, **how
        )
    else:
        (dx, dthen), ds, dout = reference.norm_backward(dh, t["x"], gains["then"], **how), None, None
    found = {"dx": dx, "ds": ds}
    for norm, gain in (("out", dout), ("then", dthen)):
        found[f"d{norm}_weight"], found[f"d{norm}_bias"] = gain or (None, None)
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@both_kinds
@all_calls
def test_gradients_are_those_of_autograd(name, kind):
    for parts in ({}, {"weight": False}, {"weight": False, "bias": False}):
        case = Case(name, kind, (2, 3, 5), **F64, **parts, mean=1.0)
        tensors = case.inputs()
        for used in {case.results, case.results[0], case.results[-1]}:
            gradients = case.gradients(used=used)
            ours, exact = backward(case, tensors, gradients), run(forward, case, tensors, gradients)
            expected = {name: value for name, value in exact.items() if name.startswith("d")}
            torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)


@both_kinds
def test_without_a_next_norm_the_branch_reads_the_sum(kind):
    """Its gradient is then a second gradient of the sum."""
    case = Case("scaled_output", kind, (2, 3, 7), **F64)
    t = case.inputs()
    out, factors = (t["out_weight"], t.get("out_bias")), {"a": 1.5, "b": 0.75}
    leaves = [t[name].requires_grad_() for name in ("x", "s", "out_weight")]
    r, h = reference.join(*leaves[:2], out=out, **factors, kind=kind, eps=EPS)
    assert torch.equal(r, h)
    dr, dh = torch.randn(2, *r.shape, dtype=r.dtype, generator=torch.Generator().manual_seed(0))
    exact = torch.autograd.grad((r, h), leaves, (dr, dh))
    dx, ds, dout, _ = reference.join_backward(dr, dh, *leaves[:2], out=out, **factors, kind=kind, eps=EPS)
    torch.testing.assert_close((dx, ds, dout[0]), exact, rtol=1e-11, atol=1e-11)


@both_kinds
@all_calls
def test_results_are_those_of_pytorch(name, kind):
    case = Case(name, kind, (2, 3, 7), **F64, mean=1.0)
    results, exact = forward(case, case.inputs()), textbook(case, case.inputs())
    torch.testing.assert_close(results, exact, rtol=1e-12, atol=1e-12)


@all_calls
def test_each_result_has_the_dtype_of_its_tensor(name):
    case = Case(name, "layernorm", (3, 7), torch.float32, torch.bfloat16, torch.float16)
    tensors, gradients = case.inputs(), case.gradients()
    for result, value in forward(case, tensors).items():
        assert value.dtype == gradients[result].dtype, result
    for gradient, value in backward(case, tensors, gradients).items():
        assert value.dtype == tensors[gradient.removeprefix("d")].dtype, gradient

"""The specification's hand-derived gradients against autograd of its own forward, in float64."""

import pytest
import torch
from kernel_cases import EPS, FUNCTIONS, Case, run, textbook

import kernels
from kernels import reference

F64 = {"stream": torch.float64, "branch": torch.float64, "gains": torch.float64}


def gains_of(case, t):
    """The norms of the case's join, as `join` takes them."""
    first = (t["weight"], t.get("bias"))
    if case.function == "norm_add":
        return {"out": first}
    if case.function == "norm_add_norm":
        return {"out": (t["out_weight"], t.get("out_bias")), "then": first}
    return {"then": first}


def forward(case, t):
    """The outputs of the reference, by name."""
    settings = {"kind": case.kind, "eps": EPS}
    if case.function == "norm":
        return {"y": reference.norm(t["x"], (t["weight"], t.get("bias")), **settings)}
    want_sum = case.function != "add_norm_no_sum"
    r, y = reference.join(t["x"], t["s"], **gains_of(case, t), want_sum=want_sum, **settings)
    return {name: value for name, value in (("r", r), ("y", y)) if name in case.outputs}


def backward(case, t, gradients):
    """The gradients of the reference, by name."""
    settings = {"kind": case.kind, "eps": EPS}
    dr, dy = gradients.get("r"), gradients.get("y")
    if case.function == "norm":
        dx, (dweight, dbias) = reference.norm_backward(dy, t["x"], (t["weight"], t.get("bias")), **settings)
        return {"dx": dx, "dweight": dweight, "dbias": dbias}
    gains = gains_of(case, t)
    dx, ds, *dgains = reference.join_backward(dr, dy, t["x"], t["s"], **gains, **settings)
    found = {"dx": dx, "ds": ds}
    for prefix, gradient in zip(
        ("out_", "") if len(gains) == 2 else ("",), filter(None, dgains), strict=False
    ):
        found |= {f"d{prefix}weight": gradient[0], f"d{prefix}bias": gradient[1]}
    return {name: g for name, g in found.items() if g is not None}


def used_outputs():
    for function in FUNCTIONS:
        both = Case(function, "layernorm", ()).outputs
        yield from ((function, used) for used in {both, both[0], both[-1]})


@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize(("function", "used"), sorted(used_outputs()))
def test_gradients_are_those_of_autograd(function, used, kind):
    case = Case(function, kind, (2, 3, 7), **F64, mean=1.0)
    tensors, gradients = case.inputs(), case.gradients(outputs=used)
    exact = run(forward, case, tensors, gradients)
    ours = backward(case, tensors, gradients)
    for name, gradient in exact.items():
        if name.startswith("d"):
            torch.testing.assert_close(ours[name], gradient, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_outputs_are_those_of_pytorch(function, kind):
    case = Case(function, kind, (2, 3, 7), **F64, mean=1.0)
    outputs, exact = forward(case, case.inputs()), textbook(case, case.inputs())
    for name, truth in exact.items():
        torch.testing.assert_close(outputs[name], truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_result_has_the_dtype_of_its_tensor(function):
    case = Case(function, "layernorm", (3, 7), torch.float32, torch.bfloat16, torch.float16)
    tensors = case.inputs()
    outputs = forward(case, tensors)
    assert outputs.get("r", tensors["x"]).dtype == torch.float32
    if "y" in outputs:
        assert outputs["y"].dtype == (torch.float32 if function == "norm" else torch.bfloat16)
    for name, gradient in backward(case, tensors, case.gradients()).items():
        assert gradient.dtype == tensors[name.removeprefix("d")].dtype, name

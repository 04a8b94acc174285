"""The custom operators: registration, compilation, what they save, and which path ran."""

from unittest import mock

import pytest
import torch
from kernel_cases import DEVICE, EPS, FUNCTIONS, Case, call, run, textbook
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from kernels import fused

MIXED = (torch.float32, torch.bfloat16)
all_functions = pytest.mark.parametrize("function", FUNCTIONS)
both_kinds = pytest.mark.parametrize("kind", kernels.KINDS)


def arguments_of(case, op):
    """What one forward and backward of the case hand to the operator when compiled, cut off from the graph."""
    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is op:
                seen.append(args)
            return func(*args, **(kwargs or {}))

    with Spy(), mock.patch.object(fused.Fused, "apply", torch.ops.nanonorm.forward):
        run(call, case, case.inputs(), case.gradients())
    (arguments,) = seen
    return [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]


@both_kinds
@all_functions
def test_opcheck(function, kind):
    case = Case(function, kind, (2, 3, 5), *MIXED)
    forward = arguments_of(case, torch.ops.nanonorm.forward.default)
    differentiable = [t.requires_grad_() if isinstance(t, torch.Tensor) else t for t in forward]
    torch.library.opcheck(torch.ops.nanonorm.forward.default, differentiable)
    backward = arguments_of(case, torch.ops.nanonorm.backward.default)
    torch.library.opcheck(torch.ops.nanonorm.backward.default, backward)


@both_kinds
@all_functions
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_fullgraph_compilation_changes_nothing(function, kind, impl):
    torch.compiler.reset()
    case = Case(function, kind, (2, 3, 5), *MIXED)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    eager = run(call, case, case.inputs(), case.gradients(), impl=impl)
    once = run(compiled, case, case.inputs(), case.gradients(), impl=impl)
    tolerance = {"rtol": 0, "atol": 0} if impl == "triton" else {}
    assert eager.keys() == once.keys()
    for name, value in eager.items():
        torch.testing.assert_close(once[name], value, **tolerance)


# Bytes that each function may keep for backward beyond tensors that exist anyway: [mean,] rstd per norm.
STATISTICS = {"norm": 1, "add_norm": 1, "add_norm_no_sum": 1, "norm_add": 1, "norm_add_norm": 2}
SAVED = {
    "norm": {"x", "weight", "bias"},
    "add_norm": {"r", "weight", "bias"},
    "add_norm_no_sum": {"x", "s", "weight", "bias"},
    "norm_add": {"s", "weight", "bias"},
    "norm_add_norm": {"r", "s", "weight", "bias", "out_weight", "out_bias"},
}


@both_kinds
@all_functions
def test_saved_tensors_are_those_of_the_table(function, kind):
    case = Case(function, kind, (2, 3, 16), torch.bfloat16, torch.bfloat16)
    tensors = {name: t.requires_grad_() for name, t in case.inputs().items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = call(case, tensors)
    known = {t.data_ptr(): name for name, t in (tensors | outputs).items()}
    assert {known[t.data_ptr()] for t in saved if t.data_ptr() in known} == SAVED[function] & (
        tensors | outputs
    ).keys()
    (statistics,) = (t for t in saved if t.data_ptr() not in known)
    assert statistics.dtype == torch.float32
    per_row = STATISTICS[function] * (2 if kind == "layernorm" else 1)
    assert statistics.numel() == 6 * per_row


def test_one_gradient_buffer_serves_both_terms_of_a_sum_in_one_dtype():
    x, s, dr, dh = (torch.ones(3, 4, device=DEVICE) for _ in range(4))
    leaves = x.requires_grad_(), s.requires_grad_()
    outputs = kernels.join(*leaves, then=(x[0].detach(), None), kind="rmsnorm", eps=EPS, impl="triton")
    dx, ds = torch.autograd.grad(outputs, leaves, (dr, dh))
    assert dx.data_ptr() == ds.data_ptr()


@all_functions
def test_launches_are_counted(function):
    case = Case(function, "rmsnorm", (3, 17))
    kernels.launches.clear()
    run(call, case, case.inputs(), case.gradients(), impl="torch")
    assert not kernels.launches
    run(call, case, case.inputs(), case.gradients(), impl="triton")
    assert kernels.launches == {"forward": 1, "backward": 1}


def test_second_derivatives_of_the_kernels_are_refused():
    """Backward has no backward of its own; a silent zero would be worse than an error."""
    case = Case("norm", "rmsnorm", (3, 5))
    leaves = {name: t.requires_grad_() for name, t in case.inputs().items()}
    y = call(case, leaves, impl="triton")["y"]
    (dx,) = torch.autograd.grad(y.square().sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


def test_the_textbook_is_not_the_torch_path():
    """The accuracy tests compare with F.rms_norm; eager RMSNorm on the CPU must be another computation."""
    case = Case("norm", "rmsnorm", (3, 5))
    leaves = {name: t.requires_grad_() for name, t in case.inputs().items()}
    assert call(case, leaves, impl="torch")["y"].grad_fn.name() != textbook(case, leaves)["y"].grad_fn.name()

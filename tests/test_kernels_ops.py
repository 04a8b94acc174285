"""The custom operators: registration, compilation, what they save, and which path ran."""

import itertools
from unittest import mock

import pytest
import torch
from kernel_cases import DEVICE, EPS, NORMED, PLACEMENTS, Case, call, run
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from kernels import fused
from kernels.bench import PYTORCH
from kernels.calls import CALLS

MIXED = (torch.float32, torch.bfloat16)
all_calls = pytest.mark.parametrize("name", PLACEMENTS)
both_kinds = pytest.mark.parametrize("kind", kernels.KINDS)
one_kind_each = pytest.mark.parametrize(
    ("name", "kind"), list(zip(NORMED, itertools.cycle(kernels.KINDS), strict=False))
)


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


@pytest.mark.parametrize(
    ("name", "kind"), [("norm", "rmsnorm"), ("pre", "layernorm"), ("scaled_out_post", "layernorm")]
)
def test_opcheck(name, kind):
    case = Case(name, kind, (2, 3, 5), *MIXED)
    forward = arguments_of(case, torch.ops.nanonorm.forward.default)
    differentiable = [t.requires_grad_() if isinstance(t, torch.Tensor) else t for t in forward]
    torch.library.opcheck(torch.ops.nanonorm.forward.default, differentiable)
    backward = arguments_of(case, torch.ops.nanonorm.backward.default)
    torch.library.opcheck(torch.ops.nanonorm.backward.default, backward)


def assert_compilation_changes_nothing(case, impl, **tolerance):
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    eager = run(call, case, case.inputs(), case.gradients(), impl=impl)
    once = run(compiled, case, case.inputs(), case.gradients(), impl=impl)
    torch.testing.assert_close(once, eager, **tolerance)


@one_kind_each
def test_fullgraph_compilation_changes_no_bit_of_the_kernels(name, kind):
    with mock.patch.object(fused.Fused, "apply", side_effect=fused.Fused.apply) as eager:
        assert_compilation_changes_nothing(Case(name, kind, (2, 3, 5), *MIXED), "triton", rtol=0, atol=0)
    assert eager.call_count == 1, "compiled, the operator is called"


@both_kinds
def test_fullgraph_compilation_of_the_torch_path(kind):
    assert_compilation_changes_nothing(Case("scaled_out_post", kind, (2, 3, 5), *MIXED), "torch")


# What each call may keep for backward beside gains and statistics: tensors that exist anyway.
SAVED = {
    **{"norm": {"x"}, "none": set(), "pre": {"r"}, "post": {"x", "s"}},
    **{"output": {"s"}, "sandwich": {"r", "s"}, "out_post": {"x", "s"}},
}


@both_kinds
@all_calls
def test_saved_tensors_are_those_of_the_table(name, kind):
    """And statistics in float32: rstd, for LayerNorm with the mean, of each row and norm."""
    case = Case(name, kind, (2, 3, 16), torch.bfloat16, torch.bfloat16)
    tensors = {name: t.requires_grad_() for name, t in case.inputs().items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = call(case, tensors, impl="triton")
    known = {t.data_ptr(): name for name, t in (tensors | results).items()}
    gains = tensors.keys() - {"x", "s"}
    assert {known[t.data_ptr()] for t in saved if t.data_ptr() in known} == SAVED[name] | gains
    (statistics,) = (t for t in saved if t.data_ptr() not in known)
    assert statistics.dtype == torch.float32
    assert statistics.numel() == 6 * len(CALLS[name].norms) * (2 if kind == "layernorm" else 1)


def test_one_gradient_buffer_serves_both_terms_of_a_sum_in_one_dtype():
    x, s, dr, dh = (torch.ones(3, 4, device=DEVICE) for _ in range(4))
    leaves = x.requires_grad_(), s.requires_grad_()
    outputs = kernels.join(*leaves, then=(x[0].detach(), None), kind="rmsnorm", eps=EPS, impl="triton")
    dx, ds = torch.autograd.grad(outputs, leaves, (dr, dh))
    assert dx.data_ptr() == ds.data_ptr()


@all_calls
def test_launches_are_counted(name):
    case = Case(name, "rmsnorm", (3, 17))
    kernels.launches.clear()
    run(call, case, case.inputs(), case.gradients(), impl="torch")
    assert not kernels.launches
    run(call, case, case.inputs(), case.gradients(), impl="triton")
    assert kernels.launches == ({"forward": 1} if name == "none" else {"forward": 1, "backward": 1})


def test_second_derivatives_of_the_kernels_are_refused():
    """Backward has no backward of its own; a silent zero would be worse than an error."""
    case = Case("norm", "rmsnorm", (3, 5))
    leaves = {name: t.requires_grad_() for name, t in case.inputs().items()}
    h = call(case, leaves, impl="triton")["h"]
    (dx,) = torch.autograd.grad(h.square().sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_tangent_is_refused_and_not_lost(impl):
    """As an operator's, it would be zero without a word."""
    x = torch.ones(3, 5)

    def norm(x):
        return kernels.norm(x, (None, None), kind="rmsnorm", eps=EPS, impl=impl)

    if DEVICE == "cpu" or impl == "triton":
        x = x.to(DEVICE)
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        norm(forward_ad.make_dual(x, x))
    for transform in (torch.func.jacfwd, torch.func.jacrev, torch.func.vmap):
        with pytest.raises(RuntimeError):
            transform(norm)(x)


def test_the_textbook_is_not_the_torch_path():
    """The accuracy tests compare with F.rms_norm; eager RMSNorm on the CPU must be another computation."""
    x = torch.ones(3, 5, requires_grad=True)
    names = {
        call(Case("norm", "rmsnorm", (3, 5)), {"x": x}, **how)["h"].grad_fn.name()
        for how in ({"impl": "torch"}, {"functions": PYTORCH})
    }
    assert len(names) == 2

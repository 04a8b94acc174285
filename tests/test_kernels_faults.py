"""One test for each fault that fused norms elsewhere have had, in the order of a list of twenty.

Each was seen to fail with its fault put into the kernels. The twentieth, statistics in less than float32, is the
table of saved tensors in test_kernels_ops.py.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import DEVICE, EPS, NORMED, Case, assert_accurate, call, run, run_exactly, textbook, worst

import kernels
from kernels import fused, triton_kernels
from kernels.calls import CALLS
from kernels.triton_kernels import Tiles

F32 = (torch.float32, torch.float32)
BF16 = (torch.bfloat16, torch.bfloat16)
MIXED = (torch.float32, torch.bfloat16)
all_calls = pytest.mark.parametrize("name", NORMED)
both_kinds = pytest.mark.parametrize("kind", kernels.KINDS)
both_impls = pytest.mark.parametrize("impl", ["torch", "triton"])


@both_kinds
@pytest.mark.parametrize("name", ["pre", "sandwich"])
def test_01_the_sums_gradient_joins_after_the_jacobian(name, kind):
    """With a gradient only through r, dx is that gradient, bit for bit; through both, it is added on top."""
    case = Case(name, kind, (4, 17))
    only_r, only_h, both = (
        run(call, case, case.inputs(), {name: case.gradients()[name] for name in used})["dx"]
        for used in ("r", "h", "rh")
    )
    assert torch.equal(only_r, case.gradients()["r"])
    torch.testing.assert_close(both, only_r + only_h, rtol=1e-6, atol=1e-6)


@both_impls
@pytest.mark.parametrize("dtypes", [F32, MIXED, BF16], ids=str)
def test_02_the_residual_keeps_its_gradient_when_the_sum_is_not_wanted(impl, dtypes):
    case = Case("post", "layernorm", (4, 17), *dtypes)
    assert_accurate(case, impl=impl)
    gradients = run(call, case, case.inputs(), case.gradients(), impl=impl)
    assert torch.equal(gradients["dx"].to(case.branch), gradients["ds"])
    assert gradients["dx"].abs().max() > 0


@both_impls
@all_calls
def test_03_expanded_gradients(name, impl):
    """`.sum().backward()` hands over one number with strides of zero."""
    case = Case(name, "rmsnorm", (4, 17))
    ones = {name: torch.ones((), device=DEVICE).expand(case.shape) for name in case.results}
    assert_accurate(case, impl=impl, gradients=ones)


@all_calls
@pytest.mark.parametrize("dtypes", [F32, BF16], ids=str)
def test_04_incoming_gradients_and_inputs_are_not_written(name, dtypes):
    case = Case(name, "rmsnorm", (3, 17), *dtypes)
    tensors, gradients = case.inputs(), case.gradients()
    run(call, case, tensors, gradients)
    for given, fresh in ((tensors, case.inputs()), (gradients, case.gradients())):
        for name, value in fresh.items():
            assert torch.equal(given[name], value), name


@all_calls
def test_05_results_share_no_memory_with_what_they_are_compared_to(name):
    case = Case(name, "layernorm", (3, 17))
    tensors = {name: t.requires_grad_() for name, t in case.inputs().items()}
    outputs, exact = call(case, tensors), textbook(case, tensors)
    pointers = [t.data_ptr() for group in (tensors, outputs, exact) for t in group.values()]
    assert len(set(pointers)) == len(pointers)


@both_kinds
@pytest.mark.parametrize("name", ["norm", "output"])
def test_06_reductions_of_a_bfloat16_row_are_in_float32(name, kind):
    """A sum over 1024 values near 3 in bfloat16 would be off by far more than the rounding of a result."""
    case = Case(name, kind, (2, 1024), *BF16, mean=3.0)
    results = run(call, case, case.inputs(), case.gradients())
    exact = run_exactly(case, case.inputs(), case.gradients())
    for name, truth in exact.items():
        rounding = 2**-8 if name in ("dx", "ds", "r", "h") else 1e-5
        assert worst(results[name], truth) <= 1.01 * rounding * truth.abs().max(), name


@triton.jit
def start_of(row, out, M, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first, _, _, _ = triton_kernels.tile_at(tl.load(row), M, D, ROWS, BLOCK)
    tl.store(out, first * D)


def test_07_row_offsets_do_not_wrap_at_2_to_the_31():
    index = torch.tensor([1 << 21], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    start_of[(1,)](index, out, 1 << 30, D=4096, ROWS=1, BLOCK=4096)
    assert out.item() == (1 << 21) * 4096


def test_08_kernels_run_on_the_tensors_device(monkeypatch):
    elsewhere = fused.on_device(SimpleNamespace(is_cuda=True, device=torch.device("cuda:3")))
    assert isinstance(elsewhere, torch.cuda.device)
    assert elsewhere.idx == 3

    current = []

    @contextmanager
    def guard(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    class Launch:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            assert [device.type for device in current] == [DEVICE]
            return self.kernel[grid]

    monkeypatch.setattr(fused, "on_device", guard)
    for name in ("forward", "backward", "sum_partials"):
        monkeypatch.setattr(triton_kernels, name, Launch(getattr(triton_kernels, name)))
    assert_accurate(Case("sandwich", "layernorm", (3, 17)))


@pytest.mark.parametrize("name", ["norm", "sandwich"])
def test_09_repeated_runs_give_equal_bits(name):
    """On a GPU; the compiled code's atomics are counted by `python -m kernels.aot` without one."""
    case = Case(name, "layernorm", (20, 70), *MIXED)
    first, second = (run(call, case, case.inputs(), case.gradients()) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@all_calls
def test_10_transposed_gradients(name):
    case = Case(name, "layernorm", (6, 17))
    transposed = {name: t.t().contiguous().t() for name, t in case.gradients().items()}
    assert_accurate(case, gradients=transposed)


@all_calls
def test_11_four_dimensions(name):
    assert_accurate(Case(name, "layernorm", (2, 3, 4, 17)))


@both_impls
@both_kinds
def test_12_queries_sliced_out_of_one_projection(kind, impl):
    """[B, T, H, head_dim] views whose rows are not evenly spaced."""
    B, T, H, head_dim = 2, 3, 4, 8
    case = Case("norm", kind, (B, T, H, head_dim))
    qkv = torch.randn(B, T, 3 * H * head_dim, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for part in qkv.split(H * head_dim, dim=-1):
        heads = part.view(B, T, H, head_dim)
        assert_accurate(case, impl=impl, tensors=case.inputs() | {"x": heads})
        assert_accurate(case, impl=impl, tensors=case.inputs() | {"x": heads.transpose(1, 2).transpose(1, 2)})


@both_impls
@pytest.mark.parametrize("name", ["pre", "output", "sandwich", "post"])
def test_13_a_float32_stream_does_not_reach_the_branches(name, impl):
    case = Case(name, "rmsnorm", (3, 17), *MIXED)
    t, call_of = case.inputs(), CALLS[name]
    norms = {norm: (t[f"{norm}_weight"], None) for norm in call_of.norms}
    how = {"want_sum": call_of.want_sum, "kind": "rmsnorm", "eps": EPS, "impl": impl}
    r, h = kernels.join(t["x"], t["s"], **norms, **how)
    assert h.dtype == torch.bfloat16
    assert (r is None) == (name == "post")
    assert r is None or r.dtype == torch.float32
    for name, gradient in run(call, case, t, case.gradients(), impl=impl).items():
        if name.startswith("d"):
            assert gradient.dtype == t[name.removeprefix("d")].dtype, name


@both_kinds
@all_calls
def test_14_every_gain_has_its_gradient(name, kind):
    case = Case(name, kind, (5, 17))
    names = {name for name in case.inputs() if "weight" in name or "bias" in name}
    results = run(call, case, case.inputs(), case.gradients())
    assert {"d" + name for name in names} <= results.keys()
    exact = run_exactly(case, case.inputs(), case.gradients())
    for name in names:
        torch.testing.assert_close(results["d" + name].double(), exact["d" + name], rtol=1e-5, atol=1e-5)


@pytest.fixture
def poisoned_memory():
    """torch.empty gives NaN instead of whatever the memory holds."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("name", "rows"),
    [*((name, 200) for name in NORMED), *(("sandwich", rows) for rows in (0, 1, 63, 64, 65))],
)
def test_15_everything_that_goes_out_is_written(poisoned_memory, monkeypatch, name, rows):
    """Tiles of 64 rows in up to two programs: one, both with equal work, or with unequal work."""
    monkeypatch.setattr(triton_kernels, "PROGRAMS", 2)
    case = Case(name, "layernorm", (rows, 5), *MIXED)
    for name, value in run(call, case, case.inputs(), case.gradients()).items():
        assert not value.isnan().any(), name


def test_16_the_partial_sums_do_not_depend_on_the_card(monkeypatch):
    """Nothing asks the card for anything, and there are never more programs than tiles."""

    def ask(*_):
        raise AssertionError("the number of programs must follow from the shape alone")

    case = Case("pre", "layernorm", (20, 70))
    exact = run(call, case, case.inputs(), case.gradients())
    monkeypatch.setattr(torch.cuda, "get_device_properties", ask)
    monkeypatch.setattr(torch.cuda, "get_device_capability", ask)
    Tiles.of.cache_clear()
    for name, value in run(call, case, case.inputs(), case.gradients()).items():
        assert torch.equal(value, exact[name]), name
    for D in (1, 64, 768, 4096, kernels.MAX_D):
        tiles = Tiles.of(D)
        for rows in (1, 3, 100, 1 << 24):
            P = tiles.programs(rows)
            assert 1 <= P <= tiles.count(rows)
            assert P & (P - 1) == 0, "one step for many lengths: nearly equal batches are summed alike"
        if D > 1:
            assert tiles.programs(16384) >= 2 * 148, "every multiprocessor of the largest card has two"


def test_17_more_than_65535_rows(monkeypatch):
    """Only the first axis of a grid may exceed 65,535."""
    grids = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    for name in ("forward", "backward", "sum_partials"):
        monkeypatch.setattr(triton_kernels, name, Recorder(getattr(triton_kernels, name)))
    case = Case("norm", "rmsnorm", (70_000, 1024), *BF16)
    zeros = torch.zeros(case.shape, dtype=torch.bfloat16, device=DEVICE)
    call(case, {"x": zeros, "then_weight": zeros[0]})
    assert grids == [(70_000,)]


@pytest.mark.parametrize("compiled", [False, True])
def test_18_one_tensor_as_two_arguments(compiled):
    case = Case("sandwich", "rmsnorm", (3, 17))
    tensors = case.inputs()
    x, w = tensors["x"], tensors["then_weight"]

    def twice(x, w, impl="triton"):
        options = {"kind": "rmsnorm", "eps": EPS, "impl": impl}
        gain = w, None
        return kernels.join(x, x, then=gain, **options) + kernels.join(x, x, out=gain, then=gain, **options)

    def gradients(name, *leaves):
        leaves = [t.detach().clone().requires_grad_() for t in leaves]
        outputs = name(*leaves)
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(x.shape, generator=generator).to(DEVICE) for _ in outputs]
        return torch.autograd.grad(outputs, leaves, weights)

    torch.compiler.reset()
    function = torch.compile(twice, fullgraph=True, backend="aot_eager") if compiled else twice
    exact = gradients(lambda x, w: twice(x, w, impl="torch"), x, w)
    for ours, truth in zip(gradients(function, x, w), exact, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)


@both_kinds
@all_calls
def test_19_the_torch_path_changes_no_float32_input_in_place(name, kind):
    """`x.float()` of a float32 tensor is that tensor."""
    case = Case(name, kind, (3, 17))
    tensors, gradients = case.inputs(), case.gradients()
    run(call, case, tensors, gradients, impl="torch")
    for given, fresh in ((tensors, case.inputs()), (gradients, case.gradients())):
        for name, value in fresh.items():
            assert torch.equal(given[name], value), name

"""The torch path and the Triton kernels against float64, over shapes, layouts, dtypes and used outputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, PLACEMENTS, Case, assert_accurate, call, run, strided

import kernels
from kernels import reference
from kernels.calls import CALLS
from kernels.triton_kernels import Tiles

MIXED = (torch.float32, torch.bfloat16)
DTYPES = (
    (torch.float32, torch.float32),
    MIXED,
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float64, torch.float64),
)
both_kinds = pytest.mark.parametrize("kind", kernels.KINDS)
all_calls = pytest.mark.parametrize("name", CALLS)
both_impls = pytest.mark.parametrize("impl", ["torch", "triton"])


@both_impls
@both_kinds
@all_calls
def test_dtypes(name, kind, impl):
    for stream, branch in DTYPES if name in PLACEMENTS else DTYPES[1::2]:
        assert_accurate(Case(name, kind, (3, 5, 17), stream, branch), impl=impl)


@both_impls
@both_kinds
@pytest.mark.parametrize("name", ["norm", "sandwich", "scaled_out_post"])
def test_gains_with_parts_missing(name, kind, impl):
    for weight, bias in ((True, False), (False, True), (False, False)):
        assert_accurate(Case(name, kind, (6, 17), *MIXED, weight=weight, bias=bias), impl=impl)


@both_impls
@pytest.mark.parametrize("gains", [torch.float16, torch.bfloat16])
def test_gains_in_half_precision_get_gradients_in_half_precision(gains, impl):
    assert_accurate(Case("sandwich", "layernorm", (6, 17), *MIXED, gains=gains), impl=impl)


@pytest.mark.parametrize(
    ("kind", "D"),
    [*zip(("layernorm", "rmsnorm") * 3, (1, 3, 17, 64, 768, 1000), strict=True), ("layernorm", 1002)],
)
def test_widths(kind, D):
    assert_accurate(Case("sandwich", kind, (3, D), *MIXED))


@pytest.mark.slow
@both_kinds
@pytest.mark.parametrize("D", [1, 3, 17, 64, 768, 1000, 1002, 4096, kernels.MAX_D])
@pytest.mark.parametrize(
    ("name", "dtypes"),
    [*((name, MIXED) for name in CALLS), *(("sandwich", dtypes) for dtypes in DTYPES if dtypes != MIXED)],
    ids=str,
)
def test_widths_with_everything_else(name, kind, D, dtypes):
    assert_accurate(Case(name, kind, (3, D), *dtypes))


def test_a_wide_row():
    assert_accurate(Case("out_post", "layernorm", (2, 4096), *MIXED))


@both_impls
@all_calls
def test_no_rows(name, impl):
    assert_accurate(Case(name, "layernorm", (0, 17)), impl=impl)


def rows_around_the_number_of_programs(D):
    P = Tiles.of(D).programs(1 << 30) * Tiles.of(D).rows
    return 1, P - 1, P, P + 1


def test_more_rows_than_the_programs_take_at_once(monkeypatch):
    monkeypatch.setattr(kernels.triton_kernels, "PROGRAMS", 2)
    for D in (17, 1002):
        for rows in rows_around_the_number_of_programs(D):
            assert_accurate(Case("sandwich", "layernorm", (rows, D)))


@both_impls
@pytest.mark.parametrize("name", ["pre", "sandwich"])
@pytest.mark.parametrize("shape", [(17,), (5, 17), (2, 3, 17), (2, 3, 2, 17)], ids=str)
def test_any_leading_shape(name, shape, impl):
    assert_accurate(Case(name, "layernorm", shape), impl=impl)


@both_impls
@both_kinds
@pytest.mark.parametrize("name", ["pre", "sandwich"])
@pytest.mark.parametrize("used", ["r", "h", "rh"])
def test_gradients_through_either_output(name, kind, used, impl):
    for dtypes in ((torch.float32, torch.float32), MIXED):
        assert_accurate(Case(name, kind, (5, 17), *dtypes), impl=impl, used=used)


@both_impls
@both_kinds
@all_calls
def test_rows_far_from_zero(name, kind, impl):
    assert_accurate(Case(name, kind, (5, 1002 if name == "sandwich" else 17), mean=100.0), impl=impl)


@both_impls
@pytest.mark.parametrize(("D", "mean"), [(3, 100.0), (2, 1000.0)])
def test_few_elements_far_from_zero_over_many_seeds(D, mean, impl):
    """Where the mean's rounding shows most; without its correction about every tenth seed fails."""
    case = Case("norm", "layernorm", (4, D), mean=mean)
    for seed in range(30):
        assert_accurate(case, impl=impl, tensors=case.inputs(seed), gradients=case.gradients(seed + 1000))


@pytest.mark.parametrize("D", [3, 7, 100])
def test_rows_that_differ_in_the_last_bit(D):
    """Their spread is that of the mean's rounding, which must stay out of the variance, too."""
    gain = torch.ones(D, device=DEVICE)
    for value in (1e5 / 3, 1e9 / 7, 1e18 / 3):
        x = torch.full((1, D), value, device=DEVICE)
        x[0, 0] = torch.nextafter(x[0, 0], torch.tensor(torch.inf, device=DEVICE))
        y = kernels.norm(x, (gain, None), kind="layernorm", eps=1e-5, impl="triton")
        exact = torch.nn.functional.layer_norm(x.double(), (D,), eps=1e-5)
        torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-5)


@both_kinds
@pytest.mark.parametrize("name", ["norm", "sandwich", "out_post"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's
def test_what_is_not_finite_is_as_the_reference_has_it_and_stays_in_its_row(name, kind, value):
    case = Case(name, kind, (5, 17))
    tensors, bad, gradients = case.inputs(), case.inputs(), case.gradients()
    bad["x"][2, 3] = value
    ours, theirs = (run(call, case, bad, gradients, functions=f) for f in (kernels, reference))
    assert not ours["h"][2].isfinite().all()
    for name, result in run(call, case, tensors, gradients).items():
        assert torch.equal(ours[name].isfinite(), theirs[name].isfinite()), name
        if result.dim() > 1:
            assert torch.equal(ours[name][[0, 1, 3, 4]], result[[0, 1, 3, 4]]), name


@both_impls
@pytest.mark.parametrize("D", [7, 1000])
def test_constant_rows_become_zero(D, impl):
    """Where the rounded mean is not the row's value, all that is left of the row is that error."""
    for value in (0.1, 100.3, 1e6 / 3, 1e9 / 7, 1e18 / 3):
        x = torch.full((2, D), value, device=DEVICE, requires_grad=True)
        y = kernels.norm(x, (None, None), kind="layernorm", eps=1e-5, impl=impl)
        assert y.abs().max() < 1e-3, value
        y.backward(torch.linspace(-1, 1, 2 * D, device=DEVICE).view(2, D))
        assert x.grad.isfinite().all(), value


LAYOUTS = ("contiguous", "transposed", "sliced", "offset")


@both_impls
@all_calls
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_strided_inputs_and_gradients(name, layout, impl):
    case = Case(name, "layernorm", (2, 5, 17))
    tensors = {name: strided(t, layout) if t.dim() > 1 else t for name, t in case.inputs().items()}
    gradients = {name: strided(t, layout) for name, t in case.gradients().items()}
    assert_accurate(case, impl=impl, tensors=tensors, gradients=gradients)


@settings(max_examples=25)
@given(data=st.data())
def test_any_combination(data):
    draw = data.draw
    case = Case(
        call=draw(st.sampled_from(tuple(CALLS))),
        kind=draw(st.sampled_from(kernels.KINDS)),
        shape=(*draw(st.lists(st.integers(0, 5), max_size=3)), draw(st.integers(1, 70))),
        stream=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        branch=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        gains=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        weight=draw(st.booleans()),
        bias=draw(st.booleans()),
        mean=draw(st.sampled_from([0.0, 3.0])),
    )
    layouts = st.sampled_from(LAYOUTS)
    tensors = {n: strided(t, draw(layouts)) if t.dim() > 1 else t for n, t in case.inputs().items()}
    used = draw(st.sampled_from(["r", "h", "rh"])) if len(case.results) == 2 else case.results
    gradients = {n: strided(t, draw(layouts)) for n, t in case.gradients(used=used).items()}
    assert_accurate(case, tensors=tensors, gradients=gradients, eps=draw(st.sampled_from([1e-6, 1e-5, 0.1])))


@both_kinds
@pytest.mark.parametrize(
    ("name", "impl"), [("norm", "torch"), ("scaled_sandwich", "torch"), ("scaled_out_post", "triton")]
)
def test_gradcheck(name, kind, impl):
    """Central differences; all other calls are compared with autograd's results in float64."""
    case = Case(name, kind, (2, 3), torch.float64, torch.float64, torch.float64)
    tensors = {name: t.requires_grad_() for name, t in case.inputs().items()}

    def results(*values):
        return tuple(call(case, dict(zip(tensors, values, strict=True)), impl=impl).values())

    assert torch.autograd.gradcheck(results, tuple(tensors.values()))
    if impl == "torch":
        assert torch.autograd.gradgradcheck(results, tuple(tensors.values()))


@both_impls
def test_both_outputs_read_by_later_layers(impl):
    """Two joins in a row: the gradient of each sum comes from the next join and from the branch."""
    generator = torch.Generator().manual_seed(0)
    x, w1, w2, mix = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(DEVICE)
        for shape in [(4, 6), (6,), (6,), (6, 6)]
    )
    options = {"kind": "layernorm", "eps": 1e-5}

    def gradients(impl, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, w1, w2, mix)]
        stream, first, second, matrix = leaves
        first, second = (first, None), (second, None)
        stream, read = kernels.join(stream, stream @ matrix, then=first, impl=impl, **options)
        stream, read = kernels.join(stream, read @ matrix, out=second, then=first, impl=impl, **options)
        return torch.autograd.grad((stream * read).square().mean(), leaves)

    results = gradients(impl, torch.float32), gradients("torch", torch.float64)
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)

"""The public face: which path is taken, what is refused and in which words, and where triton is missing."""

import os
import subprocess
import sys

import pytest
import torch
from kernel_cases import DEVICE, PLACEMENTS, Case, assert_accurate

import kernels
from kernels import eager

OPTIONS = {"kind": "rmsnorm", "eps": 1e-5}
x = torch.ones(2, 8)
gain = torch.ones(8)
PLAIN = (None, None)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("kind must be 'layernorm' or 'rmsnorm', not 'batchnorm'", {"kind": "batchnorm"}),
        ("impl must be 'auto', 'torch' or 'triton', not 'cuda'", {"impl": "cuda"}),
        ("eps must be", {"eps": 0.0}),
        ("eps must be", {"eps": -1e-5}),
        ("eps must be", {"eps": float("nan")}),
        ("eps must be", {"eps": float("inf")}),
        ("eps must be a positive number that torch.float32 can hold, not 1e-46", {"eps": 1e-46}),
        ("eps must be", {"eps": 1e39}),
        ("x and s must have the same shape", {"s": torch.ones(1, 8)}),
        ("x and s must have the same shape", {"x": torch.ones(()), "s": torch.ones(())}),
        (
            "the weight of then must have shape \\[8\\] like x's rows, not \\[1\\]",
            {"then": (torch.ones(1), None)},
        ),
        ("the weight of out must have shape", {"out": (gain[:4], None)}),
        ("RMSNorm has no bias, so the bias of then must be None", {"then": (gain, gain)}),
        ("RMSNorm has no bias, so the bias of out must be None", {"out": (None, gain)}),
        ("the bias of then must have shape", {"kind": "layernorm", "then": (None, torch.ones(2, 8))}),
        ("then must be a pair \\(weight or None, bias or None\\), not Tensor", {"then": gain}),
        ("x, s and out_dtype must be", {"x": x.long()}),
        ("x, s and out_dtype must be", {"out_dtype": torch.int8}),
        ("or all float64", {"x": x.double()}),
        ("the weight of then may not be torch.float64 where x is", {"then": (gain.double(), None)}),
        ("x is on cpu, but s is on meta", {"s": x.to("meta")}),
        ("x is on cpu, but the weight of then is on meta", {"then": (gain.to("meta"), None)}),
        ("the factors a and b must be finite numbers, not nan and 1.0", {"a": float("nan")}),
        ("want_sum=False needs a norm of the sum", {"then": None, "want_sum": False}),
    ],
)
def test_mistakes_are_refused_in_one_sentence(message, changes):
    arguments = {"x": x, "s": x, "out": (gain, None), "then": (gain, None), **OPTIONS}
    kernels.join(**arguments)
    with pytest.raises(ValueError, match=message) as error:
        kernels.join(**(arguments | changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_what_a_join_gives_without_a_norm_of_the_sum(impl):
    """h is the sum in the dtype that the branch has, or that is asked for."""
    stream, s = torch.tensor([[1.0, 2.0**-9]], device=DEVICE), torch.ones(1, 2, device=DEVICE).bfloat16()
    r, h = kernels.join(stream, s, a=2.0, b=0.5, impl=impl, **OPTIONS)
    assert torch.equal(r, torch.tensor([[2.5, 0.5 + 2.0**-8]], device=DEVICE))
    assert torch.equal(h, r.bfloat16())
    assert h.dtype == torch.bfloat16
    assert kernels.join(stream, s, out_dtype=torch.float16, impl=impl, **OPTIONS)[1].dtype == torch.float16


def test_a_small_eps_is_fine_in_float64():
    tiny = x.double() * 1e-60
    y = kernels.norm(tiny, PLAIN, kind="rmsnorm", eps=1e-200)
    torch.testing.assert_close(y, torch.ones_like(y))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_eps_reaches_the_statistics(impl):
    small = 1e-3 * x.to(DEVICE)
    expected = {1e-6: 2**-0.5, 1e-2: 1 / (1 + 1e4) ** 0.5}
    for eps, value in expected.items():
        y = kernels.norm(small, PLAIN, kind="rmsnorm", eps=eps, impl=impl)
        torch.testing.assert_close(y, torch.full_like(y, value), rtol=1e-5, atol=0)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_rows_of_zeros_and_float16_squares_that_overflow(impl):
    zeros = torch.zeros(2, 8, dtype=torch.float16, device=DEVICE)
    assert torch.equal(kernels.norm(zeros, PLAIN, impl=impl, **OPTIONS), zeros)
    large = torch.full_like(zeros, 6e4)
    torch.testing.assert_close(kernels.norm(large, PLAIN, impl=impl, **OPTIONS), torch.ones_like(large))


def test_rows_beyond_the_limit():
    wide = torch.ones(1, kernels.MAX_D + 1)
    with pytest.raises(ValueError, match=f"at most {kernels.MAX_D} elements, not {kernels.MAX_D + 1}"):
        kernels.norm(wide, PLAIN, impl="triton", **OPTIONS)
    assert kernels.norm(wide, PLAIN, **OPTIONS).shape == wide.shape


class OnCuda:
    """As much of a CUDA tensor as the choice of a path looks at."""

    device = torch.device("cuda")
    shape = (2, 8)


def test_auto_is_triton_on_cuda_and_torch_elsewhere(monkeypatch):
    assert kernels.backend("auto", x) is eager
    assert kernels.backend("torch", OnCuda) is eager
    assert kernels.backend("auto", OnCuda).__name__ == "kernels.fused"
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    assert kernels.backend("auto", OnCuda) is eager


def test_why_triton_cannot_run(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    assert kernels.triton_problem("cpu") is None
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "need a CUDA device, not cpu" in kernels.triton_problem("cpu")
    assert "torch finds none" in kernels.triton_problem("cuda")
    with pytest.raises(ValueError, match="need a CUDA device, not cpu"):
        kernels.norm(x, (gain, None), impl="triton", **OPTIONS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for problem in (None, "Triton needs a C compiler"):
        monkeypatch.setattr(kernels, "LAUNCHER_PROBLEM", problem)
        assert kernels.triton_problem("cuda") == problem
    monkeypatch.setattr(torch.version, "hip", "6.4")  # AMD's build, which calls its devices cuda
    assert "written for NVIDIA" in kernels.triton_problem("cuda")
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    assert "not installed" in kernels.triton_problem("cuda")


def test_triton_compiles_c_for_its_launcher(tmp_path, monkeypatch):
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    assert "headers, and there is no" in kernels.launcher_problem()
    (tmp_path / "Python.h").touch()
    assert kernels.launcher_problem() is None
    compiler.unlink()
    assert "no gcc and no clang;" in kernels.launcher_problem()
    monkeypatch.setenv("CC", "icx")
    assert "finds no icx;" in kernels.launcher_problem()


def test_a_broken_triton_is_as_good_as_a_missing_one(monkeypatch):
    monkeypatch.setattr(kernels, "HAS_TRITON", True)  # and what import_triton changes is as it was afterwards
    monkeypatch.setattr(kernels, "why_no_triton", "")
    monkeypatch.setitem(sys.modules, "triton", sys.modules.get("triton"))
    monkeypatch.setitem(sys.modules, "triton.language", None)
    kernels.import_triton()
    assert "breaks (ModuleNotFoundError: " in kernels.triton_problem("cuda")
    assert sys.modules["triton"] is None


WITHOUT_TRITON = """
import sys
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
import torch, kernels
assert not any(name.split(".")[0] == "triton" for name in sys.modules), "triton was imported"
x, gain = torch.ones(2, 8), torch.ones(8)
print(kernels.norm(x, (gain, None), kind="rmsnorm", eps=1e-5).sum().item())
try:
    kernels.norm(x, (gain, None), kind="rmsnorm", eps=1e-5, impl="triton")
except ValueError as error:
    print(error)
"""


def test_a_machine_without_triton():
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", WITHOUT_TRITON]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert float(first) == pytest.approx(16, rel=1e-4)
    assert "triton" in second
    assert "not installed" in second


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("call", PLACEMENTS)
def test_auto_on_a_gpu_runs_the_kernels(call):
    kernels.launches.clear()
    assert_accurate(Case(call, "layernorm", (64, 768), torch.float32, torch.bfloat16), impl="auto")
    assert kernels.launches["forward"] == 1

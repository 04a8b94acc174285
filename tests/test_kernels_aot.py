"""What the compiled kernels do on sm_80, sm_90 and sm_100, read from their PTX and cubins without a GPU."""

import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from base.cli import UserError
from kernels import aot


def compile_all(*options):
    """A process with the interpreter on, as this one is, cannot compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.aot", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_hopper_moves_no_byte_too_many():
    done = compile_all("--arch", "90", "--dim", "4096", "--call", "norm", "scaled_out_post")
    assert done.stdout.endswith("no faults\n"), done.stdout[-2000:] + done.stderr[-2000:]
    assert len(done.stdout.splitlines()[1:-2]) == 2 * 2 * 2 * 3  # kinds, streams, calls, kernels
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--arch", "80", "100", "--dim", "768"),
        ("--arch", "90", "--dim", "64", "8192", "--call", "sandwich", "scaled_out_post"),
    ],
)
def test_every_call_on_other_architectures_and_widths(options):
    """A part of the whole table, which is what `python -m kernels.aot` compiles without options."""
    done = compile_all(*options)
    assert done.stdout.endswith("no faults\n"), done.stdout[-2000:] + done.stderr[-2000:]


PTX = """
    ld.param.b64 %rd1, [forward_param_0];
    ld.param.b64 %rd2, [forward_param_1];
    ld.param.b32 %r1, [forward_param_2];
    mul.wide.s32 %rd3, %r1, 2;
    add.s64 %rd4, %rd1, %rd3;
    @%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd4 + 0 ];
    @%p1 ld.global.L1::evict_last.b16 { %rs1 }, [ %rd4 + 0 ];
    add.s64 %rd5, %rd2, %rd3;
    @%p2 st.global.v2.b32 [ %rd5 + 16 ], { %r2, %r3 };
"""
LOOPING = """
    ld.param.b64 %rd1, [backward_param_0];
    cp.async.cg.shared.global [ %r2 + 0 ], [ %rd1 + 0 ], 0x10, %r3;
$L__BB0_3:
    bar.sync 0;
    cp.async.cg.shared.global [ %r4 + 0 ], [ %rd1 + 64 ], 0x10, %r3;
    @%p12 bra $L__BB0_3;
    st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
"""


def test_accesses_are_traced_to_their_arguments():
    counts = aot.accesses(PTX, ["x", "y", "M"])
    assert counts == Counter({("x", 16): 1, ("x", 2): 1, ("y", 8): 1})
    assert aot.accesses(LOOPING, ["x"]) == Counter({("x", 16): 1}), "once for each turn of a loop"


def test_resident_warps_follow_from_registers_and_shared_memory():
    assert finding(registers=96, shared=12_000).resident == 20
    assert finding(registers=96, shared=100_000).resident == 8
    assert finding(registers=33, warps=16).resident == 48


LOOP = {"kernel": "backward", "bytes_per_element": 16, "barriers": 5, "copies": 4}


def finding(**changes):
    case = aot.Case("pre", "rmsnorm", torch.float32, 768, 90)
    clean = dict.fromkeys(("shared", "spilled", "float64", "atomics", "barriers", "copies"), 0)
    clean |= {"case": case, "kernel": "forward", "registers": 32, "widths": {"x": {16}, "s": {8}}}
    clean |= {"bytes_per_element": 12, "programs": 512, "warps": 4}
    return aot.Finding(**(clean | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bytes_per_element": 16}, "16 bytes per element where the limit is 12"),
        ({"widths": {"x": {8}}}, "x moves in accesses of 8 bytes"),
        ({"widths": {"s": {16, 4}}}, "s moves in accesses of 4 bytes"),
        ({"spilled": 32}, "32 bytes spilled"),
        ({"shared": 1 << 17}, "131072 bytes of shared memory"),
        ({**LOOP, "barriers": 6}, "6 barriers in the loop"),
        ({**LOOP, "copies": 0}, "nothing is loaded ahead"),
        ({**LOOP, "programs": 128}, "128 programs are fewer than 296"),
        ({"float64": 3}, "3 float64 instructions"),
        ({"atomics": 1}, "1 atomic instructions"),
    ],
)
def test_each_fault_is_reported(changes, message):
    assert list(finding().faults()) == list(finding(**LOOP).faults()) == []
    (fault,) = finding(**changes).faults()
    assert fault.startswith(message)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--dim", "0"), "--dim is 0; it must be at least 1"),
        (("--dim", "64", "16385"), "--dim is 16385; it must be at most 16384"),
        (("--dim", "x"), "--dim is x; it must be a whole number, such as 1000"),
        (("--arch", "12"), "--arch is 12; it must be 80, 86,"),
        (("--call", "pr"), "(did you mean pre?)"),
        (("--jobs", "0"), "--jobs is 0; it must be at least 1"),
    ],
)
def test_a_mistake_is_one_sentence(flags, says, monkeypatch):
    monkeypatch.setattr(aot, "INTERPRETED", False)
    monkeypatch.setattr(aot, "ProcessPoolExecutor", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(UserError) as error:
        aot.main(flags)
    assert says in str(error.value)


def test_what_cannot_compile_says_so(monkeypatch):
    monkeypatch.setattr(aot, "INTERPRETED", True)
    with pytest.raises(UserError, match="with TRITON_INTERPRET=1; unset it"):
        aot.main([])

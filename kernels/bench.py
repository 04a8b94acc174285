"""Times the calls of norm and join, forward and backward, against PyTorch and against the memory.

    python -m kernels.bench                                  # everything that this machine can measure
    python -m kernels.bench --call pre --dim 4096 --json bench.json
    python -m kernels.bench --quick                          # the calls that decide, within two minutes on a GPU

On a GPU: the Triton kernels, eager PyTorch, torch.compile and, where it is installed and has the function,
Liger; time, GB/s of the bytes that must move (kernels/calls.py), and their fraction of the bandwidth that a copy
reaches in the same run. The rows are those of a training step, and so many that they exceed the L2 cache several
times. The time is the kernels' own: the GPU is kept busy until the host has queued them, and the cache holds nothing
of theirs. On a CPU: the torch path against eager and compiled PyTorch.

Contenders take turns within a round, and the medians over the rounds are reported, forward and backward apart. Of
the columns, `of copy` is the share of the copy's bandwidth, `x ours` the time relative to ours, and `error` the
largest error against float64.
"""

import functools
import importlib.util
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

import kernels
from base import cli, flags, timing
from base.cli import STRICT, OneOf
from base.files import check_writable, write_text

from .aot import STREAMS
from .calls import CALLS

COMMAND = "python -m kernels.bench"
EPS = 1e-5
GPU_ELEMENTS = 1 << 27  # a row tensor of 256 MiB in bfloat16, several times the L2 of any card
GPU_ROWS = 16384  # of a training step
GPU_DIMS = (768, 1024, 2048, 4096, 8192)
CPU_ELEMENTS = 1 << 24  # at most, in a row tensor
LONGEST = 1 << 16  # row, far beyond those of the kernels
CPU_SHAPES = {128: 12 * 64, 384: 16 * 256}  # D: rows, the micro-batches of the laptop recipes
# clock cycles, 2 ms or more: longer than the host takes to queue a forward and a backward
HEAD_START = 4_000_000
QUICK = {"call": ("pre", "sandwich"), "dim": (768, 2048, 4096, 8192), "rounds": 10}


def make_inputs(call, kind, rows, D, stream, device):
    """(leaves, gradients of the results): leaves x, s, then weight and bias of N_out and of N_then."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    x, s = random(rows, D, dtype=stream), random(rows, D, dtype=torch.bfloat16)
    gains = [random(D) if kind == "layernorm" or i % 2 == 0 else None for i in range(4)]
    leaves = [t if t is None else t.requires_grad_() for t in (x, s, *gains)]
    with torch.no_grad():
        results = contender(PYTORCH, call, kind)(*leaves)
    return leaves, [random(rows, D, dtype=result.dtype) for result in results]


def contender(functions, call, kind, **how):
    """The call with `functions`: leaves -> results."""

    def compute(x, s, out_weight, out_bias, weight, bias):
        gains = (out_weight, out_bias), (weight, bias)
        return CALLS[call](functions, x, s, *gains, kind=kind, eps=EPS, **how)

    return compute


def normalize(v, gain, kind, eps):
    v = v if v.dtype == torch.float64 else v.float()
    weight, bias = (None if t is None else t.to(v.dtype) for t in gain)
    if kind == "layernorm":
        return F.layer_norm(v, v.shape[-1:], weight, bias, eps)
    return F.rms_norm(v, v.shape[-1:], weight, eps)


def norm(x, gain, *, kind, eps, out_dtype):
    return normalize(x, gain, kind, eps).to(out_dtype)


def join(x, s, *, out, then, a, b, kind, eps, out_dtype, want_sum):
    branch = s if out is None else normalize(s, out, kind, eps)
    r = ((x if a == 1 else a * x) + (branch if b == 1 else b * branch)).to(x.dtype)
    return r, (r if then is None else normalize(r, then, kind, eps)).to(out_dtype)


PYTORCH = SimpleNamespace(norm=norm, join=join)  # as one writes them with PyTorch; in float64 for such inputs


def liger(call, kind, stream):
    """Liger's kernel for the same computation, or None: it has no join after a norm, and no mixed sum."""
    if stream != torch.bfloat16 or importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import functional

    if call == "norm" and kind == "layernorm":
        return lambda x, s, ow, ob, w, b: [functional.liger_layer_norm(x, w, b, EPS)]
    if call == "norm":
        return lambda x, s, ow, ob, w, b: [functional.liger_rms_norm(x, w, EPS, in_place=False)]
    if call == "pre" and kind == "rmsnorm":
        fused = functional.liger_fused_add_rms_norm
        return lambda x, s, ow, ob, w, b: fused(s, x, w, EPS, in_place=False)[::-1]
    return None


def contenders(call, kind, stream, device, compiled=True):
    pytorch = contender(PYTORCH, call, kind)
    candidates = {
        "ours": contender(kernels, call, kind),
        "eager": pytorch,
        "compiled": torch.compile(pytorch, fullgraph=True) if compiled else None,
        "liger": liger(call, kind, stream) if device == "cuda" else None,
    }
    return {name: candidate for name, candidate in candidates.items() if candidate is not None}


def gradients_of(results, leaves, gradients):
    """Of all leaves that the call reads; None for the others."""
    wanted = [t for t in leaves if t is not None]
    return torch.autograd.grad(results, wanted, gradients, allow_unused=True)


def run(compute, leaves, gradients):
    results = list(compute(*leaves))
    return results, gradients_of(results, leaves, gradients)


def error_of(compute, call, kind, stream, D, device):
    """The largest error against float64 of any result or gradient, relative to its largest value."""
    leaves, gradients = make_inputs(call, kind, 64, D, stream, device)
    double = [t if t is None else t.detach().double().requires_grad_() for t in leaves]
    results, grads = run(compute, leaves, gradients)
    truth = run(contender(PYTORCH, call, kind), double, [g.double() for g in gradients])
    pairs = zip((*results, *grads), (*truth[0], *truth[1]), strict=True)
    errors = [(value - exact).abs().max() / exact.abs().max() for value, exact in pairs if exact is not None]
    return torch.stack(errors).max().item()  # NaN if any is


@functools.cache
def cache_filler(device):
    return torch.empty(GPU_ELEMENTS, dtype=torch.bfloat16, device=device)


def seconds(work, device):
    """The time that `work` takes on the device.

    An event is stamped when the GPU reaches it. On an idle GPU that is at once, and the host's way to the first
    kernel would count as the kernel's time: so the GPU waits for the host first, and not the reverse.
    """
    if device == "cpu":
        return timing.seconds(work, torch.cpu.synchronize)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START)
    cache_filler(device).zero_()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def medians(prepares, rounds, device):
    """Seconds of the work that each `prepare` returns anew, taken in turn; three rounds warm up."""
    turns = {name: lambda prepare=prepare: seconds(prepare(), device) for name, prepare in prepares.items()}
    return {name: statistics.median(own) for name, own in timing.in_turn(turns, rounds, warm_up=3).items()}


def copy_bandwidth(device):
    """Bytes per second, read plus written, of a copy of the benchmark's largest tensor."""
    source = torch.empty(GPU_ELEMENTS, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / medians({"copy": lambda: lambda: target.copy_(source)}, 20, device)["copy"]


def measure(call, kind, stream, rows, D, device, rounds, compiled=True):
    """One result per contender and direction."""
    leaves, gradients = make_inputs(call, kind, rows, D, stream, device)
    candidates, problems = contenders(call, kind, stream, device, compiled), {}
    for name, compute in list(candidates.items()):
        try:  # this compiles for the shape that is timed; another one before would make a kernel for any shape
            run(compute, leaves, gradients)
        except Exception as problem:  # a missing compiler must not cost the other numbers
            problems[name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
            del candidates[name]

    def backward_of(compute):
        def prepare():
            results = list(compute(*leaves))
            return lambda: gradients_of(results, leaves, gradients)

        return prepare

    prepares = {
        "forward": {name: lambda c=compute: lambda: c(*leaves) for name, compute in candidates.items()},
        "backward": {name: backward_of(compute) for name, compute in candidates.items()},
    }
    times = {direction: medians(prepares[direction], rounds, device) for direction in prepares}
    errors = {name: error_of(compute, call, kind, stream, D, device) for name, compute in candidates.items()}
    common = {"call": call, "kind": kind, "stream": str(stream)[6:], "D": D, "rows": rows}
    for name, problem in problems.items():
        yield common | {"contender": name, "problem": problem}
    for direction, of_direction in times.items():
        limits = getattr(CALLS[call], direction)
        for name, time_taken in of_direction.items() if limits else ():
            yield common | {
                "direction": direction,
                "contender": name,
                "seconds": time_taken,
                "bytes_per_second": limits[STREAMS.index(stream)] * rows * D / time_taken,
                "error": errors[name],
            }


HEADER = (
    f"{'call':15} {'kind':9} {'stream':8} {'D':>5} {'rows':>7} {'direction':9} {'contender':9} "
    f"{'time, us':>10} {'GB/s':>7} {'of copy':>7} {'x ours':>6} {'error':>7}"
)


def table_rows(results, bandwidth):
    """A line per contender and direction; ratios are times over ours."""
    reference = None
    for row in results:
        label = f"{row['call']:15} {row['kind']:9} {row['stream']:8} {row['D']:5} {row['rows']:7} "
        if "problem" in row:
            yield f"{label}{row['contender']}: {row['problem']}"
            continue
        reference = row["seconds"] if row["contender"] == "ours" else reference
        share = "-" if bandwidth is None else f"{row['bytes_per_second'] / bandwidth:.0%}"
        ratio = "-" if reference is None else f"{row['seconds'] / reference:.2f}"
        yield (
            f"{label}{row['direction']:9} {row['contender']:9} {row['seconds'] * 1e6:10.1f} "
            f"{row['bytes_per_second'] / 1e9:7.1f} {share:>7} {ratio:>6} {row['error']:7.1e}"
        )


@dataclass(frozen=True, config=STRICT)
class Options:
    """Times the calls of norm and join, forward and backward, against PyTorch and against the memory."""

    call: tuple[Annotated[str, AfterValidator(OneOf(CALLS))], ...] | None = None
    """Calls, as kernels/calls.py names them; all by default."""
    kind: tuple[Annotated[str, AfterValidator(OneOf(kernels.KINDS))], ...] = kernels.KINDS
    """Kinds of norm."""
    dim: tuple[Annotated[int, Field(ge=1, le=LONGEST)], ...] | None = None
    """Row lengths; by default those of common models, on a CPU those of the laptop recipes."""
    rounds: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Measurements per number; 30 by default."""
    quick: bool = False
    """Fewer calls and rounds, and torch.compile for one call alone."""
    json: str | None = None
    """A file for the results, too."""

    def __post_init__(self):
        if self.json is not None:
            check_writable("--json", self.json, COMMAND)

    def resolved(self, device):
        """(calls, dims, rounds) where flags, --quick and the device have had their say."""
        quick = QUICK if self.quick else {}
        dims = quick.get("dim", GPU_DIMS) if device == "cuda" else tuple(CPU_SHAPES)
        calls = self.call or quick.get("call", tuple(CALLS))
        return calls, self.dim or dims, self.rounds or quick.get("rounds", 30)


def numbers_of_rows(D, device):
    if device == "cuda":
        return (GPU_ROWS, GPU_ELEMENTS // D)
    return (CPU_SHAPES.get(D, min(4096, CPU_ELEMENTS // D)),)


def parts(asked, device):
    """The keyword arguments of each `measure`."""
    calls, dims, rounds = asked.resolved(device)
    for D in dims:
        for rows in numbers_of_rows(D, device):
            for call in calls:
                for kind in asked.kind:
                    compiled = not asked.quick or (call, kind) == ("pre", "rmsnorm")
                    for stream in reversed(STREAMS):
                        yield {
                            **{"call": call, "kind": kind, "stream": stream, "rows": rows, "D": D},
                            **{"device": device, "rounds": rounds, "compiled": compiled},
                        }


def main(argv: Sequence[str]) -> None:
    asked = flags.options(Options, argv, COMMAND)
    kernels.import_triton()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bandwidth = copy_bandwidth(device) if device == "cuda" else None
    if device == "cuda":
        name = torch.cuda.get_device_name()
        print(f"{name}, torch {torch.__version__}; a copy moves {bandwidth / 1e9:.0f} GB/s")
    else:
        name = f"CPU, {torch.get_num_threads()} threads"
        print(f"{name}, torch {torch.__version__}: no GPU, so `ours` is the torch path")
    print(HEADER)
    results = []
    for part in parts(asked, device):
        torch.compiler.reset()
        rows = list(measure(**part))
        print("\n".join(table_rows(rows, bandwidth)), flush=True)
        results += rows
    if asked.json:
        about = {"device": name, "torch": torch.__version__, "copy_bytes_per_second": bandwidth}
        write_text(Path(asked.json), json.dumps({"command": COMMAND, **about, "results": results}, indent=1))


if __name__ == "__main__":
    cli.run(main)

"""Times the four functions, forward and backward, against PyTorch and against the memory.

    python -m kernels.bench                                  # everything that this machine can measure
    python -m kernels.bench --function add_norm --dim 4096 --json bench.json

On a GPU: the Triton kernels, eager PyTorch, torch.compile and, where it is installed and has the function,
Liger; time, GB/s of the bytes that must move (`aot.LIMITS`), and their fraction of the bandwidth that a copy
reaches in the same run, on inputs far larger than the L2 cache. On a CPU: the torch path against eager and
compiled PyTorch. Every contender is compared with float64 first. Contenders take turns within a round, and
the medians over the rounds are reported, forward and backward apart. Of the columns, `of copy` is the share of the
copy's bandwidth, `x ours` the time relative to ours, and `error` the largest error against float64.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from . import KINDS, add_norm, norm, norm_add, norm_add_norm
from .aot import FUNCTIONS, LIMITS, STREAMS, whole

EPS = 1e-5
GPU_ELEMENTS = 1 << 27  # a row tensor of 256 MiB in bfloat16, several times the L2 of any card
GPU_DIMS = (768, 1024, 2048, 4096, 8192)
CPU_ELEMENTS = 1 << 24  # at most, in a row tensor
LONGEST = 1 << 16  # row, far beyond those of the kernels
CPU_SHAPES = {128: 12 * 64, 384: 16 * 256}  # D: rows, the micro-batches of the laptop recipes


def make_inputs(function, kind, rows, D, stream, device):
    """(leaves, output gradients): leaves x, s, then weight and bias of N_out and of N."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    x, s = random(rows, D, dtype=stream), random(rows, D, dtype=torch.bfloat16)
    gains = [random(D) if kind == "layernorm" or i % 2 == 0 else None for i in range(4)]
    leaves = [t if t is None else t.requires_grad_() for t in (x, s, *gains)]
    dr, dy = random(rows, D, dtype=stream), random(rows, D, dtype=torch.bfloat16)
    return leaves, {
        "norm": [dy],
        "add_norm": [dr, dy],
        "add_norm_no_sum": [dr],  # post-norm's y is the stream
        "norm_add": [dr],
        "norm_add_norm": [dr, dy],
    }[function]


def ours(function, kind):
    """The public functions as contenders: leaves -> outputs."""
    options = {"kind": kind, "eps": EPS}
    branch = torch.bfloat16
    return {
        "norm": lambda x, s, ow, ob, w, b: [norm(x, (w, b), out_dtype=branch, **options)],
        "add_norm": lambda x, s, ow, ob, w, b: add_norm(x, s, w, b, **options),
        "add_norm_no_sum": lambda x, s, ow, ob, w, b: [
            add_norm(x, s, w, b, out_dtype=x.dtype, want_sum=False, **options)[1]
        ],
        "norm_add": lambda x, s, ow, ob, w, b: [norm_add(x, s, ow, ob, **options)],
        "norm_add_norm": lambda x, s, ow, ob, w, b: norm_add_norm(x, s, ow, ob, w, b, **options),
    }[function]


def pytorch(function, kind):
    """The same as one writes it in PyTorch; float64 where the leaves are float64."""

    def normalize(v, weight, bias):
        v = v if v.dtype == torch.float64 else v.float()
        if kind == "layernorm":
            return F.layer_norm(v, weight.shape, weight, bias, EPS)
        return F.rms_norm(v, weight.shape, weight, EPS)

    def compute(x, s, out_weight, out_bias, weight, bias):
        if function == "norm":
            return [normalize(x, weight, bias).to(s.dtype)]
        if function.startswith("norm_add"):
            s = normalize(s, out_weight, out_bias)
        r = (x + s).to(x.dtype)
        if function == "norm_add":
            return [r]
        y = normalize(r, weight, bias)
        if function == "add_norm_no_sum":
            return [y.to(x.dtype)]
        return [r, y.to(torch.float64 if x.dtype == torch.float64 else torch.bfloat16)]

    return compute


def liger(function, kind, stream):
    """Liger's kernel for the same computation, or None: it has no join after a norm, and no mixed sum."""
    if stream != torch.bfloat16 or importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import functional

    if function == "norm" and kind == "layernorm":
        return lambda x, s, ow, ob, w, b: [functional.liger_layer_norm(x, w, b, EPS)]
    if function == "norm":
        return lambda x, s, ow, ob, w, b: [functional.liger_rms_norm(x, w, EPS, in_place=False)]
    if function == "add_norm" and kind == "rmsnorm":
        fused = functional.liger_fused_add_rms_norm
        return lambda x, s, ow, ob, w, b: fused(s, x, w, EPS, in_place=False)[::-1]
    return None


def contenders(function, kind, stream, device):
    candidates = {
        "ours": ours(function, kind),
        "eager": pytorch(function, kind),
        "compiled": torch.compile(pytorch(function, kind), fullgraph=True),
        "liger": liger(function, kind, stream) if device == "cuda" else None,
    }
    return {name: candidate for name, candidate in candidates.items() if candidate is not None}


def run(contender, leaves, gradients):
    """Outputs and the gradients of all leaves that the function reads."""
    outputs = list(contender(*leaves))
    wanted = [t for t in leaves if t is not None]
    return outputs, torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)


def check(contender, function, kind, stream, D, device):
    """The largest error against float64 of any output or gradient, relative to its largest value."""
    leaves, gradients = make_inputs(function, kind, 64, D, stream, device)
    double = [t if t is None else t.detach().double().requires_grad_() for t in leaves]
    outputs, grads = run(contender, leaves, gradients)
    exact_outputs, exact_grads = run(pytorch(function, kind), double, [g.double() for g in gradients])
    pairs = zip((*outputs, *grads), (*exact_outputs, *exact_grads), strict=True)
    errors = [(value - exact).abs().max() / exact.abs().max() for value, exact in pairs if exact is not None]
    return max(errors).item()


def seconds(work, device):
    if device == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def interleaved(prepares, rounds, device):
    """Median seconds of the work that each `prepare` returns anew, taken in turn in every round."""
    times = {name: [] for name in prepares}
    for i in range(rounds + 3):
        for name, prepare in prepares.items():
            elapsed = seconds(prepare(), device)
            if i >= 3:  # the first rounds compile and warm up
                times[name].append(elapsed)
    return {name: statistics.median(samples) for name, samples in times.items()}


def copy_bandwidth(device):
    """Bytes per second, read plus written, of a copy of the benchmark's largest tensor."""
    source = torch.empty(GPU_ELEMENTS, device=device)
    target = torch.empty_like(source)
    time_taken = interleaved({"copy": lambda: lambda: target.copy_(source)}, 20, device)["copy"]
    return 2 * source.nbytes / time_taken


def measure(function, kind, stream, rows, D, device, rounds):
    """One result per contender and direction."""
    candidates, errors, problems = {}, {}, {}
    for name, contender in contenders(function, kind, stream, device).items():
        try:
            errors[name] = check(contender, function, kind, stream, D, device)
            candidates[name] = contender
        except Exception as problem:  # a missing compiler must not cost the other numbers
            problems[name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
    leaves, gradients = make_inputs(function, kind, rows, D, stream, device)
    wanted = [t for t in leaves if t is not None]

    def forward_of(contender):
        return lambda: lambda: contender(*leaves)

    def backward_of(contender):
        def prepare():
            outputs = list(contender(*leaves))
            return lambda: torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)

        return prepare

    forward = {name: forward_of(contender) for name, contender in candidates.items()}
    backward = {name: backward_of(contender) for name, contender in candidates.items()}
    common = {"function": function, "kind": kind, "stream": str(stream)[6:], "D": D, "rows": rows}
    for name, problem in problems.items():
        yield common | {"contender": name, "problem": problem}
    for direction, prepares in (("forward", forward), ("backward", backward)):
        moved = LIMITS[function, direction][STREAMS.index(stream)] * rows * D
        for name, time_taken in interleaved(prepares, rounds, device).items():
            yield common | {
                "direction": direction,
                "contender": name,
                "seconds": time_taken,
                "bytes_per_second": moved / time_taken,
                "error": errors[name],
            }


HEADER = (
    f"{'function':17} {'kind':9} {'stream':8} {'D':>5} {'direction':9} {'contender':9} "
    f"{'time, us':>10} {'GB/s':>7} {'of copy':>7} {'x ours':>6} {'error':>7}"
)


def table_rows(results, bandwidth):
    """A line per contender and direction; ratios are times over ours."""
    reference = None
    for row in results:
        label = f"{row['function']:17} {row['kind']:9} {row['stream']:8} {row['D']:5} "
        if "problem" in row:
            yield f"{label}{row['contender']}: {row['problem']}"
            continue
        reference = row["seconds"] if row["contender"] == "ours" else reference
        share = "-" if bandwidth is None else f"{row['bytes_per_second'] / bandwidth:.0%}"
        yield (
            f"{label}{row['direction']:9} {row['contender']:9} {row['seconds'] * 1e6:10.1f} "
            f"{row['bytes_per_second'] / 1e9:7.1f} {share:>7} {row['seconds'] / reference:6.2f} {row['error']:7.1e}"
        )


def read_options(argv):
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__.split("\n")[0])
    for flag, names in (("--function", FUNCTIONS), ("--kind", KINDS)):
        about = f"of {', '.join(names)} (default all)"
        parser.add_argument(flag, nargs="+", choices=names, default=names, metavar="NAME", help=about)
    about = f"row lengths, from 1 to {LONGEST}"
    parser.add_argument("--dim", type=whole(1, LONGEST), nargs="+", metavar="D", help=about)
    about = "measurements per number (default 30)"
    parser.add_argument("--rounds", type=whole(1, 10**6), default=30, metavar="N", help=about)
    parser.add_argument("--json", metavar="PATH", help="write the results here, too")
    options = parser.parse_args(argv)
    folder = Path(options.json or ".").parent
    if not folder.is_dir():  # told before minutes of measuring
        parser.error(f"--json {options.json} cannot be written: there is no folder {folder}")
    if options.json and Path(options.json).is_dir():
        parser.error(f"--json {options.json} is a folder; name a file")
    return options


def main(argv=None):
    options = read_options(argv)
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
    for D in options.dim or (GPU_DIMS if device == "cuda" else CPU_SHAPES):
        rows = GPU_ELEMENTS // D if device == "cuda" else CPU_SHAPES.get(D, min(4096, CPU_ELEMENTS // D))
        for function in options.function:
            for kind in options.kind:
                for stream in reversed(STREAMS):
                    torch.compiler.reset()
                    part = list(measure(function, kind, stream, rows, D, device, options.rounds))
                    print("\n".join(table_rows(part, bandwidth)), flush=True)
                    results += part
    if options.json:
        report = {"device": name, "torch": torch.__version__, "copy_bytes_per_second": bandwidth}
        temporary = Path(f"{options.json}.writing")
        temporary.write_text(json.dumps(report | {"results": results}, indent=1), encoding="utf-8")
        temporary.replace(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

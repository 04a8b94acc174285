"""Compiles every kernel ahead of time, on a machine without a GPU, and reads what the machine code does.

    python -m kernels.aot                          # sm_80, sm_90, sm_100 at D = 64 ... 8192
    python -m kernels.aot --arch 90 --dim 4096 --call sandwich

The operators run as they do in training, on a few CPU rows, with the launch replaced by a recorder; what
they would have launched is compiled. From the PTX come the accesses to each argument, and from them the
bytes that one element costs; from the cubin come registers and spills. A row of the table is a fault, and
the exit status 1, if an element costs other bytes than the physical limit, if a row's accesses are narrower
than 16 bytes (8 in the narrower of two dtypes), if anything is computed in float64 or atomically, or if a
register is spilled at D <= 4096.
"""

import dataclasses
import itertools
import re
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

import kernels
from base import cli, flags
from base.cli import STRICT, OneOf, UserError

from . import INTERPRETED, KINDS, MAX_D
from .calls import CALLS

ARCHES = (80, 90, 100)
COMPILABLE = (80, 86, 87, 89, 90, 100, 103, 120, 121)  # what has bfloat16 and what Triton's compiler knows
DIMS = (64, 768, 1024, 4096, 8192)
NO_COMPROMISE_UP_TO = 4096  # D
SPILLED = 24  # bytes of a thread, six registers of 128, which stay in the cache
SHARED = 99 * 1024  # bytes that a program may have on any card
TRAINING_ROWS = 16384
PROGRAMS = 2 * 148  # two for each multiprocessor of a B200
MULTIPROCESSOR = {80: (64, 164), 90: (64, 228), 100: (64, 228), 103: (64, 228)}  # warps, KiB of shared memory
SMALL_MULTIPROCESSOR = (48, 100)

STREAMS = (torch.bfloat16, torch.float32)
ROW_ARGUMENTS = {"x", "s", "r", "h", "dr", "dh", "dx", "ds"}
SCALARS = {"M", "P", "a", "b"}
NARROW = {"s", "h", "dh", "ds"}  # what has the branch's dtype, except where h replaces the stream


@dataclasses.dataclass(frozen=True)
class Case:
    call: str
    kind: str
    stream: torch.dtype
    D: int
    arch: int

    def limit(self, kernel):
        """The bytes per element that this kernel must move."""
        return getattr(CALLS[self.call], kernel)[STREAMS.index(self.stream)]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One compiled kernel: what the table shows."""

    case: Case
    kernel: str
    registers: int
    shared: int
    spilled: int  # bytes of stack per thread
    widths: dict  # row argument -> the set of its access widths in bytes
    float64: int  # instructions
    atomics: int  # instructions
    bytes_per_element: float
    barriers: int  # in the loop
    copies: int  # asynchronous ones, in the loop
    programs: int
    warps: int  # of one program

    @property
    def resident(self):
        """Warps that a multiprocessor holds at once, of its 65,536 registers and its shared memory."""
        most, kilobytes = MULTIPROCESSOR.get(self.case.arch, SMALL_MULTIPROCESSOR)
        of_registers = 65536 // (-(-self.registers // 8) * 8 * 32 * self.warps)
        of_shared = kilobytes * 1024 // (self.shared + 1024)
        return min(of_registers, of_shared, most // self.warps) * self.warps

    def faults(self):
        if self.float64:
            yield f"{self.float64} float64 instructions"
        if self.atomics:
            yield f"{self.atomics} atomic instructions: the bits would depend on the order of the programs"
        if self.shared > SHARED:
            yield f"{self.shared} bytes of shared memory"
        if self.spilled > SPILLED and self.case.D <= NO_COMPROMISE_UP_TO:
            yield f"{self.spilled} bytes spilled"
        if self.kernel == "backward" and self.case.D <= NO_COMPROMISE_UP_TO:
            if self.barriers > 5 * len(CALLS[self.case.call].norms):
                yield f"{self.barriers} barriers in the loop"
            if not self.copies:
                yield "nothing is loaded ahead"
            if self.programs < PROGRAMS:
                yield f"{self.programs} programs are fewer than {PROGRAMS}"
        if self.kernel == "sum_partials":
            return
        limit = self.case.limit(self.kernel)
        if self.bytes_per_element != limit:
            yield f"{self.bytes_per_element:g} bytes per element where the limit is {limit}"
        for argument, widths in self.widths.items():
            narrow = 8 if argument in NARROW and self.case.stream == torch.float32 else 16
            if min(widths) < narrow:
                yield f"{argument} moves in accesses of {min(widths)} bytes"


class Recorder:
    """Stands in for a kernel: remembers the arguments of a launch."""

    def __init__(self, kernel, launched):
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid):
        return lambda *args, **options: self.launched.append((self.kernel, args, options))


def launches_of(case):
    """[(kernel, args, options)] that the forward and backward of one case launch."""
    from . import fused, triton_kernels

    launched = []
    kernels = {name: getattr(triton_kernels, name) for name in ("forward", "backward", "sum_partials")}
    rows = torch.zeros(2048, case.D, dtype=torch.bfloat16)
    x = rows.to(case.stream).requires_grad_()
    s = rows.clone().requires_grad_()
    gain = torch.ones(case.D, requires_grad=True)
    bias = gain if case.kind == "layernorm" else None
    settings = {"kind": case.kind, "eps": 1e-5}
    try:
        for name, kernel in kernels.items():
            setattr(triton_kernels, name, Recorder(kernel, launched))
        results = CALLS[case.call](fused, x, s, (gain, bias), (gain, bias), **settings)
        torch.autograd.backward(results, [torch.zeros_like(result) for result in results])
    finally:
        for name, kernel in kernels.items():
            setattr(triton_kernels, name, kernel)
    return launched


def compile_for(kernel, args, options, arch):
    """The compiled kernel, and the names of the arguments that it takes at run time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32", int: "i32", float: "fp32"}
    signature, constants = {}, {}
    for parameter, value in itertools.zip_longest(kernel.params, args):
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = options.get(parameter.name) if parameter.is_constexpr else None
        else:
            signature[parameter.name] = types[getattr(value, "dtype", type(value))]
    aligned = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compile_options = {name: options[name] for name in ("num_warps", "maxnreg") if options.get(name)}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=compile_options)
    return compiled, [name for name, kind in signature.items() if kind != "constexpr"]


def loop_of(ptx):
    """What the kernel repeats: from the last label that is jumped back to; without one, all of it."""
    body = ptx
    for jump in re.finditer(r"\bbra(?:\.uni)?\s+(\$L\w+);", ptx):
        start = ptx.find(f"\n{jump[1]}:")
        if 0 < start < jump.start():
            body = ptx[start : jump.start()]
    return body


LOAD_OR_STORE = r"(?:ld|st)(?:\.\w+)?\.global(?:\.\w+::\w+)*(?:\.v(\d))?\.[bfus](\d+)\s[^\[]*\[\s*(%\w+)"
COPY = r"cp\.async\.c[ag]\.shared\.global(?:\.\w+::\w+)*\s*\[[^\]]*\],\s*\[\s*(%\w+)[^\]]*\],\s*(\w+)"


def accesses(ptx, arguments):
    """Counter of (argument, bytes) over a kernel's loads from and stores to global memory, in its loop if it has one.

    An address is traced backwards through the instructions that defined it, to the parameter it came from.
    """
    sources = defaultdict(set)
    for line in ptx.splitlines():
        if match := re.match(r"\s*(?:@!?%p\d+\s+)?[\w.:]+\s+(%\w+),\s*(.*);", line):
            sources[match[1]].update(re.findall(r"%\w+|_param_\d+", match[2]))

    def parameters_behind(register):
        found, todo, seen = set(), [register], set()
        while todo:
            name = todo.pop()
            if name.startswith("_param_"):
                found.add(arguments[int(name.removeprefix("_param_"))])
            elif name not in seen:
                seen.add(name)
                todo.extend(sources[name])
        return found - SCALARS

    counts = Counter()
    body = loop_of(ptx)
    found = [
        (address, int(vector or 1) * int(bits) // 8)
        for vector, bits, address in re.findall(LOAD_OR_STORE, body)
    ]
    found += [(address, int(size, 0)) for address, size in re.findall(COPY, body)]
    for address, size in found:
        (argument,) = parameters_behind(address)
        counts[argument, size] += 1
    return counts


def resources(cubin):
    """(registers, spilled bytes per thread), from the cubin."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL")}
    return used["REG"], used["STACK"] + used["LOCAL"]


def examine(case):
    """The findings of one case: its forward, its backward and the sum of the partials."""
    from .triton_kernels import Tiles

    findings = []
    for kernel, args, options in launches_of(case):
        compiled, arguments = compile_for(kernel, args, options, case.arch)
        ptx = compiled.asm["ptx"]
        counts = accesses(ptx, arguments)
        widths = defaultdict(set)
        moved = 0
        for (argument, width), count in counts.items():
            if argument in ROW_ARGUMENTS:
                widths[argument].add(width)
                moved += width * count
        warps = compiled.metadata.num_warps
        registers, spilled = resources(compiled.asm["cubin"])
        findings.append(
            Finding(
                case=case,
                kernel=kernel.__name__,
                registers=registers,
                shared=compiled.metadata.shared,
                spilled=spilled,
                widths=dict(widths),
                float64=len(re.findall(r"\.f64", ptx)),
                atomics=len(re.findall(r"\b(?:atom|red)\.", ptx)),
                barriers=len(re.findall(r"bar\.sync|barrier\.sync", loop_of(ptx))),
                copies=len(re.findall(COPY, loop_of(ptx))),
                programs=Tiles.of(case.D).programs(TRAINING_ROWS),
                warps=warps,
                bytes_per_element=moved * 32 * warps / (options["ROWS"] * options["BLOCK"]),
            )
        )
    return findings


HEADER = f"{'call':15} {'kind':9} {'stream':8} {'D':>5} {'sm':>4} {'kernel':12} " + (
    f"{'regs':>4} {'shared':>6} {'spilled':>7} {'widths':>6} {'f64':>3} {'bytes/el':>8} {'limit':>5} "
    f"{'bars':>4} {'async':>5} {'programs':>8} {'warps':>5}"
)


def table_row(finding):
    case = finding.case
    if finding.kernel == "sum_partials":
        widths, moved, limit = "-", "-", "-"
    else:
        widths = ",".join(str(w) for w in sorted(set().union(*finding.widths.values())))
        moved = f"{finding.bytes_per_element:g}"
        limit = case.limit(finding.kernel)
    stream = str(case.stream).removeprefix("torch.")
    loop = ""
    if finding.kernel == "backward":
        loop = f" {finding.barriers:4} {finding.copies:5} {finding.programs:8} {finding.resident:5}"
    return (
        f"{case.call:15} {case.kind:9} {stream:8} {case.D:5} {case.arch:4} {finding.kernel:12} "
        f"{finding.registers:4} {finding.shared:6} {finding.spilled:7} {widths:>6} {finding.float64:3} "
        f"{moved:>8} {limit:>5}{loop}"
    )


@dataclass(frozen=True, config=STRICT)
class Options:
    """Compiles every kernel ahead of time, on a machine without a GPU, and reads what the machine code does."""

    arch: tuple[Annotated[int, AfterValidator(OneOf(COMPILABLE))], ...] = ARCHES
    """Architectures, 90 for sm_90."""
    dim: tuple[Annotated[int, Field(ge=1, le=MAX_D)], ...] = DIMS
    """Row lengths."""
    call: tuple[Annotated[str, AfterValidator(OneOf(CALLS))], ...] = tuple(CALLS)
    """Calls, as kernels/calls.py names them."""
    jobs: Annotated[int, Field(ge=1, le=1024)] = 2
    """Processes."""


def main(argv: Sequence[str]) -> None:
    asked = flags.options(Options, argv, "python -m kernels.aot")
    kernels.import_triton()
    if not kernels.HAS_TRITON:
        raise UserError(
            f"kernels.aot compiles with the package triton (Linux only), which {kernels.why_no_triton}"
        )
    if INTERPRETED:
        raise UserError("kernels.aot cannot compile in a process with TRITON_INTERPRET=1; unset it")
    start = time.perf_counter()
    grid = itertools.product(asked.arch, asked.dim, asked.call, KINDS, STREAMS)
    cases = [Case(call, kind, stream, D, arch) for arch, D, call, kind, stream in grid]
    print(HEADER)
    compiled, faults = 0, []
    with ProcessPoolExecutor(asked.jobs) as pool:
        for findings in pool.map(examine, cases, chunksize=4):
            for finding in findings:
                row = table_row(finding)
                print(row, flush=True)
                faults += [f"{row}: {fault}" for fault in finding.faults()]
                compiled += 1
    print(f"{compiled} kernels compiled in {time.perf_counter() - start:.0f} s")
    print("\n".join(["FAULTS", *faults]) if faults else "no faults")
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    cli.run(main)

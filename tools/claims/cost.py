"""Claims 23 to 25: what a norm costs. Times are this machine's, and are therefore told as shares and ratios."""

import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import torch

import kernels
from base.timing import in_turn
from configs import load_config
from kernels import aot, bench
from kernels.calls import CALLS
from tools.claims.claim import Skipped, at_least, at_most, claim, control, equal, figure, near
from tools.claims.small import random
from tools.profile.classes import flops, time_by_class
from tools.profile.steps import steps_of

RECIPE = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def speedup(share: float, factor: float) -> float:
    """How much faster the whole becomes when a share of its time becomes `factor` times faster (Amdahl 1967)."""
    return 1 / (1 - share + share / factor)


@claim(23, of_this_machine=True)
def training_step():
    """Normalization's share of a training step's time is above its share of the FLOPs."""
    steps = steps_of(load_config([str(RECIPE), "--kernel", "torch", "--device", "cpu"]))
    steps()  # the first one allocates
    counts = flops(steps)
    share_of_flops = {name: count / sum(counts.values()) for name, count in counts.items()}
    seconds = time_by_class(steps, rounds=5)
    for name, share in seconds.items():
        of_flops = f"{share_of_flops[name]:.2%}" if name in share_of_flops else "not counted"
        yield figure(f"{name}: share of FLOPs, of time", f"{of_flops}, {share:.2%}")
    ratio = seconds["norms and joins"] / share_of_flops["norms and joins"]
    yield at_least("norms and joins: share of time over share of FLOPs", ratio, 1)
    products = seconds["matrix products"] / share_of_flops["matrix products"]
    yield control(at_least("matrix products: share of time over share of FLOPs", products, 1))
    free = speedup(seconds["norms and joins"], math.inf)
    yield figure("speed-up if this step's norms and joins cost nothing", free)
    yield near("speed-up if a share of 25.5% cost nothing", speedup(0.255, math.inf), 1.342, 5e-4)
    yield near("speed-up if a share of 10% became twice as fast", speedup(0.10, 2), 1.053, 5e-4)


WIDTH, ARCH = 768, 90


def compiled(cases: list[aot.Case]) -> list[aot.Finding]:
    """What `kernels.aot` finds, in processes of their own: one that interprets Triton cannot compile."""
    if not kernels.HAS_TRITON:
        raise Skipped("the package triton, which compiles the kernels, exists for Linux only")
    with mock.patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
            return [finding for findings in pool.map(aot.examine, cases) for finding in findings]


def share_of_copy(device: str, rounds: int = 20) -> dict[str, float]:
    """The fraction of a copy's bandwidth that each fused forward reaches on rows of bfloat16."""
    prepares, rows = {}, bench.GPU_ELEMENTS // WIDTH
    for call in CALLS:
        leaves, _ = bench.make_inputs(call, "rmsnorm", rows, WIDTH, torch.bfloat16, device)
        work = partial(bench.contender(kernels, call, "rmsnorm"), *leaves)
        prepares[call] = lambda work=work: work
    copied = bench.copy_bandwidth(device)
    return {
        call: CALLS[call].forward[0] * rows * WIDTH / seconds / copied
        for call, seconds in bench.medians(prepares, rounds, device).items()
    }


@claim(24)
def traffic():
    """Each fused join moves every element once in and once out, and nothing else."""
    cases = [aot.Case(call, "rmsnorm", stream, WIDTH, ARCH) for call in CALLS for stream in aot.STREAMS]
    moved: dict[tuple[str, str], list[float]] = {}
    for finding in compiled(cases):
        if finding.kernel != "sum_partials":
            moved.setdefault((finding.case.call, finding.kernel), []).append(finding.bytes_per_element)
    for (call, kernel), found in moved.items():
        what = f"{call}, {kernel}: bytes per element, stream in bfloat16 and float32"
        yield equal(what, found, [float(limit) for limit in getattr(CALLS[call], kernel)])
    apart = [a + b for a, b in zip(moved["none", "forward"], moved["norm", "forward"], strict=True)]
    yield control(equal("pre as an addition and a norm of its own", apart, moved["pre", "forward"]))
    if torch.cuda.is_available():
        for call, share in share_of_copy("cuda").items():
            yield figure(f"{call}, forward: bandwidth over that of a copy", f"{share:.0%}")
    total = 1e6 * 4096 * moved["norm", "forward"][0]
    yield near("GB moved by one million rows of 4096 in bfloat16, norm alone", total / 1e9, 16.4, 0.1)
    yield near("milliseconds of that at 3 TB/s", total / 3e12 * 1e3, 5.5, 0.1)


ROWS, ROUNDS = 2048, 20


def processor_time(kind: str, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> float:
    """Seconds of one forward and backward of a norm, which others on the machine do not lengthen."""
    start = time.process_time()
    torch.autograd.grad(kernels.norm(x, (weight, None), kind=kind, eps=1e-5), (x, weight), dy)
    return time.process_time() - start


@claim(25, of_this_machine=True)
def kinds_compared():
    """RMSNorm saves arithmetic and no traffic, so its time is of LayerNorm's order; the ratio is measured."""
    x, dy = (random(ROWS, WIDTH, seed=seed).float() for seed in (1, 2))
    inputs = x.requires_grad_(), torch.ones(WIDTH, requires_grad=True), dy
    contenders = {kind: partial(processor_time, kind, *inputs) for kind in ("rmsnorm", "layernorm")}
    times = in_turn(contenders, ROUNDS)
    ratio = min(times["rmsnorm"]) / min(times["layernorm"])  # whatever disturbs a round only ever adds time
    what = f"RMSNorm's time over LayerNorm's, forward and backward, {ROWS} rows of {WIDTH}, best of {ROUNDS}"
    yield figure(what, ratio)
    yield at_most("the larger of that ratio and its inverse", max(ratio, 1 / ratio), 5)

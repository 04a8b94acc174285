"""Claims 23 to 25: what a norm costs. Times are this machine's, and are therefore told as shares and ratios."""

import math
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import kernels
from configs import OptimConfig
from kernels import aot, bench
from model import GPT, ModelConfig
from tools.claims.claim import Skipped, at_least, at_most, claim, control, equal, figure, near
from tools.claims.small import random
from training.optimizer import make_optimizer

aten = torch.ops.aten
CLASSES = ("matrix products", "attention", "normalization", "other")


def per_element(count: int):
    """A formula for the flop counter: so many operations per element of an operator's first tensor."""
    return lambda shape, *_, out_shape=None, **__: count * math.prod(shape)


def attention_flops(products: int):
    """So many T x T x head_dim products; the causal half that is skipped is counted, as is customary."""

    def formula(*shapes, out_shape=None, **_):
        B, H, T, head_dim = shapes[products == 5]  # the backward's first tensor is the incoming gradient
        return 2 * products * B * H * T * T * head_dim

    return formula


# Operations per element, counted from the formulas in kernels/reference.py and of GELU's tanh form, where a tanh
# counts as one. What is missing here (copies, sums over rows) moves data and computes next to nothing.
FLOPS = {
    aten.native_layer_norm: per_element(7),
    aten.native_layer_norm_backward: per_element(13),
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flops(2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_flops(5),
    aten.gelu: per_element(9),
    aten.gelu_backward: per_element(16),
    aten.add: per_element(1),
    aten.add_: per_element(1),
    aten._log_softmax: per_element(4),
    aten._log_softmax_backward_data: per_element(3),
}


def class_of(operator: str) -> str:
    """By an operator's name, as the profiler (aten::mm) and the flop counter (aten.mm) write it."""
    if "attention" in operator:
        return "attention"
    if "layer_norm" in operator:
        return "normalization"
    return "matrix products" if operator.replace("::", ".") in ("aten.mm", "aten.addmm") else "other"


def shares(counts: Counter) -> dict[str, float]:
    return {name: counts[name] / counts.total() for name in CLASSES}


def training_step_shares(steps: int = 2) -> tuple[dict[str, float], dict[str, float]]:
    """(share of FLOPs, share of time) by class of operator in training steps of a small pre-norm GPT on the CPU."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=4, n_head=4, n_embd=256, block_size=128, vocab_size=257))
    optimizer = make_optimizer(model, OptimConfig())
    tokens = torch.randint(257, (8, 128))

    def step() -> None:
        model(tokens, tokens.roll(-1, 1))[1].backward()
        optimizer.step()
        optimizer.zero_grad()

    flops, seconds = Counter(), Counter()
    with FlopCounterMode(display=False, custom_mapping=FLOPS) as counted:
        step()
    for operator, count in counted.get_flop_counts()["Global"].items():
        flops[class_of(str(operator))] += count
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            step()
    for event in profiled.key_averages():
        seconds[class_of(event.key)] += event.self_cpu_time_total
    return shares(flops), shares(seconds)


def speedup(share: float, factor: float) -> float:
    """How much faster the whole becomes when a share of its time becomes `factor` times faster (Amdahl 1967)."""
    return 1 / (1 - share + share / factor)


@claim(
    23,
    "Normalization's share of a training step's time is above its share of the FLOPs.",
    of_this_machine=True,
)
def training_step():
    flops, seconds = training_step_shares()
    for name in CLASSES:
        yield figure(f"{name}: share of FLOPs, of time", f"{flops[name]:.2%}, {seconds[name]:.2%}")
    ratio = seconds["normalization"] / flops["normalization"]
    yield at_least("normalization: share of time over share of FLOPs", ratio, 1)
    products = seconds["matrix products"] / flops["matrix products"]
    yield control(at_least("matrix products: share of time over share of FLOPs", products, 1))
    share = seconds["normalization"]
    yield figure("speed-up if this step's norms cost nothing", speedup(share, math.inf))
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
    for function in aot.FUNCTIONS:
        leaves, _ = bench.make_inputs(function, "rmsnorm", rows, WIDTH, torch.bfloat16, device)
        call = partial(bench.ours(function, "rmsnorm"), *leaves)
        prepares[function] = lambda call=call: call
    copied = bench.copy_bandwidth(device)
    return {
        function: aot.LIMITS[function, "forward"][0] * rows * WIDTH / seconds / copied
        for function, seconds in bench.interleaved(prepares, rounds, device).items()
    }


@claim(24, "Each fused join moves every element once in and once out, and nothing else.")
def traffic():
    cases = [
        aot.Case(function, "rmsnorm", stream, WIDTH, ARCH)
        for function in aot.FUNCTIONS
        for stream in aot.STREAMS
    ]
    moved: dict[tuple[str, str], list[float]] = {}
    for finding in compiled(cases):
        if finding.kernel != "sum_partials":
            moved.setdefault((finding.case.function, finding.kernel), []).append(finding.bytes_per_element)
    for (function, kernel), limits in aot.LIMITS.items():
        what = f"{function}, {kernel}: bytes per element, stream in bfloat16 and float32"
        yield equal(what, moved[function, kernel], [float(limit) for limit in limits])
    addition = (6, 10)  # x, s -> r
    apart = [a + b for a, b in zip(addition, moved["norm", "forward"], strict=True)]
    yield control(equal("add_norm as an addition and a norm of its own", apart, moved["add_norm", "forward"]))
    if torch.cuda.is_available():
        for function, share in share_of_copy("cuda").items():
            yield figure(f"{function}, forward: bandwidth over that of a copy", f"{share:.0%}")
    total = 1e6 * 4096 * moved["norm", "forward"][0]
    yield near("GB moved by one million rows of 4096 in bfloat16, norm alone", total / 1e9, 16.4, 0.1)
    yield near("milliseconds of that at 3 TB/s", total / 3e12 * 1e3, 5.5, 0.1)


ROWS, ROUNDS = 2048, 20


def seconds_of(kind: str, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> float:
    """Processor time of one forward and backward of a norm, which others on the machine do not lengthen."""
    start = time.process_time()
    torch.autograd.grad(kernels.norm(x, weight, kind=kind, eps=1e-5), (x, weight), dy)
    return time.process_time() - start


@claim(
    25,
    "RMSNorm saves arithmetic and no traffic, so its time is of LayerNorm's order; the ratio is measured.",
    of_this_machine=True,
)
def kinds_compared():
    x, dy = (random(ROWS, WIDTH, seed=seed).float() for seed in (1, 2))
    inputs = x.requires_grad_(), torch.ones(WIDTH, requires_grad=True), dy
    # Interleaved, and the quickest round of each: whatever disturbs one only ever adds time.
    rounds = [[seconds_of(kind, *inputs) for kind in ("rmsnorm", "layernorm")] for _ in range(ROUNDS)]
    rms, layer = map(min, zip(*rounds, strict=True))
    ratio = rms / layer
    yield figure(
        f"RMSNorm's time over LayerNorm's, forward and backward, {ROWS} rows of {WIDTH}, best of {ROUNDS}",
        ratio,
    )
    yield at_most("the larger of that ratio and its inverse", max(ratio, 1 / ratio), 3)

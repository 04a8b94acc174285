"""The time of a training step by class of operator, beside the share of FLOPs.

An operator of the backward pass belongs to the class of the forward operator that autograd made it for. FLOPs of
products are PyTorch's count; those of norms are counted by hand, as PyTorch counts products only. A compiled step
cannot be split up like this on the CPU: what was fused stands under `compiled`.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own notes; read when torch is loaded

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import kernels
from base.cli import UserError
from configs import Config, replace
from model import GPT, Norm
from tools.palette import drawing, line_style, save
from tools.profile.steps import Steps, matrix_rate, speeds, steps_of

CLASSES = (
    "matrix products",
    "attention",
    "norms and joins",
    "other elementwise",
    "compiled",
    "optimizer",
    "data",
)
MARK = "class: "
PRODUCTS = ("aten::mm", "aten::addmm", "aten::linear", "aten::matmul")
ATTENTION = (  # where compiled; the model has no other batched product
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_dot_product",
    "aten::_flash_attention",
    "aten::_efficient_attention",
    "aten::_cudnn_attention",
)
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
CPU_ATTENTION = {  # which PyTorch's counter does not know; backward has twice the products, none counted again
    FLASH: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    FLASH_BACKWARD: lambda dy, q, k, v, *_, **__: 2 * sdpa_flop_count(q, k, v),
}
# an element's, forward and backward; others count none
NORM_FLOPS = {"layernorm": 16, "rmsnorm": 12, "batchnorm": 16}


@contextlib.contextmanager
def marked(steps: Steps) -> Iterator[None]:
    """Ranges around everything that its operators' names do not give away."""
    trainer, handles, was = steps.trainer, [], kernels.attend
    for module in trainer.model.modules():
        if isinstance(module, Norm) or module in set(trainer.model.joins):
            handles += mark_module(module, "norms and joins")

    kernels.attend = mark(was, "attention")
    trainer.update = mark(trainer.update, "optimizer")
    trainer.norms.squares = mark(trainer.norms.squares, "optimizer")
    trainer.batches.batch = mark(trainer.batches.batch, "data")
    try:
        yield
    finally:
        kernels.attend = was
        for owner, name in ((trainer, "update"), (trainer.norms, "squares"), (trainer.batches, "batch")):
            delattr(owner, name)
        for handle in handles:
            handle.remove()


def mark(fn, name: str):
    def inside(*args, **kwargs):
        with record_function(MARK + name):
            return fn(*args, **kwargs)

    return inside


def mark_module(module: torch.nn.Module, name: str) -> list:
    ranges = []

    def enter(*_):
        ranges.append(record_function(MARK + name))
        ranges[-1].__enter__()

    def leave(*_):
        ranges.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def time_by_class(steps: Steps, rounds: int) -> dict[str, float]:
    """Share of a step's time by class; a class that takes none is left out."""
    compiled, cuda = steps.trainer.config.run.compile, steps.trainer.runtime.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with contextlib.nullcontext() if compiled else marked(steps), profile(activities=activities) as trace:
        for _ in range(rounds):
            steps()
        steps.wait()
    return class_shares(trace.events(), "self_device_time_total" if cuda else "self_cpu_time_total")


def class_shares(events, time: str) -> dict[str, float]:
    """The share of every class in the operators' `time`. A GPU's kernels count for the operators they belong to."""
    events = [event for event in events if event.device_type == DeviceType.CPU]
    owners, sums = forward_classes(events), dict.fromkeys(CLASSES, 0.0)
    for event in events:
        sums[class_of(event, owners)] += getattr(event, time)
    total = sum(sums.values())
    return {name: s / total for name, s in sums.items() if s}


def forward_classes(events) -> dict[int, str]:
    """The class that each autograd node was made in, by its sequence number."""
    owners = {}
    for event in events:
        if event.sequence_nr >= 0 and "evaluate_function" not in event.name:
            found = marked_class(event, {})
            if found:
                owners[event.sequence_nr] = found
    return owners


def marked_class(event, owners: dict[int, str]) -> str | None:
    """The class of the nearest range around an event, or of the node that it is the backward of."""
    while event is not None:
        if event.name.startswith(MARK):
            return event.name.removeprefix(MARK)
        if event.name.startswith("autograd::engine::evaluate_function") and event.sequence_nr in owners:
            return owners[event.sequence_nr]
        event = event.cpu_parent
    return None


def class_of(event, owners: dict[int, str]) -> str:
    found = marked_class(event, owners)
    if found:
        return found
    if event.name.startswith(PRODUCTS):
        return "matrix products"
    if event.name.startswith(ATTENTION):
        return "attention"
    if event.name.startswith("Optimizer."):
        return "optimizer"
    return "compiled" if "ompiled" in event.name or "fused_" in event.name else "other elementwise"


def flops(steps: Steps) -> dict[str, int]:
    """FLOPs of one step by class: products as PyTorch counts them, norms by hand."""
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        steps()
    counts = {"matrix products": 0, "attention": 0}
    for op, n in counter.get_flop_counts()["Global"].items():
        own = str(op).removeprefix("aten.") in ("mm", "addmm")
        counts["matrix products" if own else "attention"] += n
    return counts | {"norms and joins": norm_flops(steps.trainer.model) * steps.tokens}


def norm_flops(model: GPT) -> int:
    """Operations per token of all norms, and of the residual adds, forward and backward."""
    config = model.config
    heads = {"q_norm": config.n_head, "k_norm": config.kv_heads, "v_norm": config.kv_heads}
    widths = {name: count * config.head_width for name, count in heads.items()}
    norms = [name for name, module in model.named_modules() if isinstance(module, Norm)]
    elements = sum(widths.get(name.rpartition(".")[2], config.n_embd) for name in norms)
    return NORM_FLOPS.get(config.norm, 0) * elements + 2 * len(model.joins) * config.n_embd


def modes(config: Config, compiled: bool) -> dict[str, Steps]:
    """PyTorch's own operators; ours (on CUDA the fused kernels); and ours compiled, where there is a compiler."""
    ours = replace(replace(config, "model", kernel="auto"), "run", compile=False)
    found = {"torch": steps_of(replace(ours, "model", kernel="torch")), "eager": steps_of(ours)}
    if compiled:
        with contextlib.suppress(UserError):  # no C++ compiler
            found["compiled"] = steps_of(replace(ours, "run", compile=True))
    return found


def measure(config: Config, rounds: int, compiled: bool) -> dict[str, Any]:
    """FLOPs, shares of time, the ceiling, and the modes' speed relative to PyTorch's own operators."""
    runs = modes(config, compiled)
    times = speeds(runs, rounds, "torch")
    count = flops(runs["eager"])
    trainer = runs["eager"].trainer
    rate = matrix_rate(trainer.runtime.device, trainer.model.compute_dtype)
    shares = {name: time_by_class(steps, rounds) for name, steps in runs.items()}
    norms = shares["eager"].get("norms and joins", 0.0)
    total = sum(count.values())
    return {
        "device": trainer.runtime.device.type,
        "dtype": trainer.config.model.dtype,
        "flops_per_step": total,
        "flops_share": {name: n / total for name, n in count.items()},
        "time_share": shares,
        "ceiling_if_norms_were_free": 1 / (1 - norms),
        "ceiling_if_norms_took_half": 1 / (1 - norms / 2),
        "matrix_flops_per_s": rate,
        "share_of_matrix_rate": total / (rate * times["eager"]["step_ms"] / 1e3),
        "speed": times,
    }


def table(found: dict[str, Any]) -> Iterator[str]:
    """What `measure` has found, line by line."""
    names = list(found["time_share"])
    yield (f"{'':20}{'FLOPs':>10}" + "".join(f"{n:>12}" for n in names))
    for name in CLASSES:
        shares = [found["time_share"][n].get(name) for n in names]
        if any(shares) or name in found["flops_share"]:
            of_flops = found["flops_share"].get(name)
            row = [f"{of_flops:>10.2%}" if of_flops is not None else f"{'':>10}"]
            yield (f"{name:20}" + "".join(row + [f"{s:>12.1%}" if s else f"{'-':>12}" for s in shares]))
    speed = (f"{found['speed'][n]['ratio']:>12.2f}" for n in names)
    yield (f"{'speed':20}{'':>10}" + "".join(speed))
    yield (
        f"\nif norms and joins were free, a step would be {found['ceiling_if_norms_were_free']:.3f} times as fast; "
        f"at half their time, {found['ceiling_if_norms_took_half']:.3f} times\n"
        f"a step reaches {found['share_of_matrix_rate']:.1%} of the rate of a large {found['dtype']} matrix product"
    )


def draw(found: dict[str, Any], path: Path) -> None:
    bars = {"FLOPs": found["flops_share"]} | {f"time, {n}": s for n, s in found["time_share"].items()}
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 0.7 * len(bars) + 1.6), layout="constrained")
        axes = figure.subplots()
        for i, name in enumerate(CLASSES):
            widths = [shares.get(name, 0) for shares in bars.values()]
            left = [sum(shares.get(n, 0) for n in CLASSES[:i]) for shares in bars.values()]
            if any(widths):
                axes.barh(list(bars), widths, left=left, label=name, color=line_style(i)["color"])
        axes.invert_yaxis()
        axes.set_xlabel("share of one training step")
        axes.set_xlim(0, 1)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)

"""Throughput, as tokens and as a share of the device's peak, and the line on the screen."""

import re
import time

import torch

from base.threads import Neighbours
from model import GPT, Linear
from training.trainer import Trainer

# Dense bfloat16 FLOP/s (T4, V100: float16) with float32 accumulation, from the vendors' data sheets. The first
# name that fits counts.
PEAK_FLOPS = {
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H20": 148e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 6000 Ada": 364e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100-SXM2": 125e12,
    "V100-PCIE": 112e12,
    "T4": 65e12,
}


def peak_flops(device_name: str) -> float | None:
    """The device's peak, where it is known; a laptop's or a part of a GPU (MIG) is another device."""
    if re.search(r"\b(Laptop|MIG)\b", device_name):
        return None
    return next((f for name, f in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def flops_per_token(model: GPT) -> int:
    """FLOPs of forward and backward per token: 6 for each weight of a matrix product, 12 T per head feature.

    Chowdhery et al. 2022, "PaLM", appendix B: 6N + 12 L H Q T, the causal half of attention counted in full.
    N here is what tokens are multiplied with: the head, but neither embeddings nor norms.
    """
    config = model.config
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, Linear))
    return 6 * weights + 12 * config.n_layer * config.n_head * config.head_width * config.block_size


def peak_rate(trainer: Trainer) -> float | None:
    """Tokens per second of all processes at their devices' peak; None where that is not known."""
    runtime, model = trainer.runtime, trainer.model
    if runtime.device.type != "cuda" or model.compute_dtype not in (torch.bfloat16, torch.float16):
        return None
    peak = peak_flops(torch.cuda.get_device_name(runtime.device))
    return peak and peak * runtime.world / flops_per_token(model)


class Clock:
    """Throughput since the last look, and a line on the screen at most every two seconds."""

    def __init__(
        self,
        tokens_per_step: int,
        step: int,
        last: int,
        peak_rate: float | None = None,
        neighbours: Neighbours | None = None,
    ):
        self.tokens_per_step, self.last, self.peak_rate = tokens_per_step, last, peak_rate
        self.neighbours = neighbours
        self.rate, self.shown = 0.0, 0.0
        self.restart(step)

    def restart(self, step: int) -> None:
        """Leaves out what is not training: evaluation, checkpoints."""
        self.step, self.time = step, time.perf_counter()

    def lap(self, step: int) -> dict[str, float]:
        steps, seconds = step - self.step, time.perf_counter() - self.time
        self.restart(step)
        self.rate = steps * self.tokens_per_step / seconds
        row = {"perf/tokens_per_s": self.rate, "perf/step_ms": 1000 * seconds / steps}
        return row | ({"perf/mfu": self.rate / self.peak_rate} if self.peak_rate else {})

    def show(self, step: int, row: dict, tell) -> None:
        now = time.perf_counter()
        if "val/loss" not in row and now - self.shown < 2:
            return
        self.shown = now
        parts = [f"step {step}/{self.last}"]
        parts += [f"loss {row['train/loss']:.4f}"] if "train/loss" in row else []
        parts += [f"val loss {row['val/loss']:.4f}"] if "val/loss" in row else []
        if self.rate and step > 1:  # the first step is slow
            left = (self.last - step) * self.tokens_per_step / self.rate
            parts += [f"{self.rate:,.0f} tokens/s", f"{duration(left)} left"]
        tell("  ".join(parts))
        advice = self.neighbours.advice() if self.neighbours else ""
        if advice:
            tell(advice)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"

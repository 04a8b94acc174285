"""The optimizer, its parameter groups and the learning rate of each step."""

import math

import torch

from configs import OptimConfig
from model import GPT, LearnedPositions, Norm


def decays(model: GPT) -> dict[str, bool]:
    """For every parameter by name, whether weight decay applies: matrices, but not norms, biases or positions."""
    spared = (Norm, LearnedPositions)
    return {
        f"{prefix}.{name}" if prefix else name: param.ndim >= 2 and not isinstance(module, spared)
        for prefix, module in model.named_modules()
        for name, param in module.named_parameters(recurse=False)
    }


def make_optimizer(model: GPT, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019) in two groups. Fused, as that skips a step on the device."""
    decay = decays(model)
    named = dict(model.named_parameters())  # a tied weight once, under its first name
    groups = [
        {"params": [p for n, p in named.items() if decay[n]], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named.items() if not decay[n]], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


def learning_rate(step: int, config: OptimConfig) -> float:
    """The rate of optimizer step `step`, counted from 0; the first is lr / warmup_iters, the last min_lr.

    cosine: SGDR without restarts (Loshchilov & Hutter 2017). wsd: warm-up, stable, decay (Hu et al. 2024), the
    decay linear over the last fifth of the run. constant: lr to the end.
    """
    if step < config.warmup_iters:
        return config.lr * (step + 1) / config.warmup_iters
    last = config.max_iters - 1
    if config.schedule == "constant" or last <= config.warmup_iters:
        return config.lr
    begin = config.warmup_iters
    if config.schedule == "wsd":
        begin = max(begin, last - config.max_iters // 5)
    progress = min(max(step - begin, 0) / (last - begin), 1.0) if last > begin else 1.0
    shape = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "wsd": 1 - progress}[config.schedule]
    return config.min_lr + shape * (config.lr - config.min_lr)

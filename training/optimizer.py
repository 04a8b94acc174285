"""The optimizer, its parameter groups and the learning rate of each step."""

import math

import torch

from configs import OptimConfig
from model import GPT, LearnedPositions, Linear, Norm


def decay_rates(model: GPT, config: OptimConfig) -> dict[str, float]:
    """The decay of every parameter by name: matrices and gains have one, biases and positions do not."""

    def rate(module: torch.nn.Module, name: str, param: torch.nn.Parameter) -> float:
        if isinstance(module, Norm):
            return config.norm_decay if name == "weight" else 0.0
        return config.weight_decay if param.ndim >= 2 and not isinstance(module, LearnedPositions) else 0.0

    return {
        f"{prefix}.{name}" if prefix else name: rate(module, name, param)
        for prefix, module in model.named_modules()
        for name, param in module.named_parameters(recurse=False)
    }


def make_optimizer(model: GPT, config: OptimConfig) -> "torch.optim.AdamW | Skipping":
    """What `--optimizer` names; its `step` heeds `grad_scale` and `found_inf`, without asking the device.

    AdamW (Loshchilov & Hutter 2019) is fused, which does so by itself on a CPU and on CUDA, and not on MPS. Muon
    (Jordan et al. 2024) takes the hidden matrices. Its step is the momentum's nearest orthogonal matrix, here scaled
    to the RMS of AdamW's steps (Liu et al. 2025, "Muon is Scalable for LLM Training"), so that one learning rate and
    one decay serve both.
    """
    rates, hidden = decay_rates(model, config), hidden_matrices(model) if config.optimizer == "muon" else []
    others = {n: p for n, p in model.named_parameters() if not any(p is h for h in hidden)}
    groups = [  # a tied weight once, under its first name
        {"params": [p for n, p in others.items() if rates[n] == rate], "weight_decay": rate}
        for rate in sorted(set(rates.values()), reverse=True)
    ]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
    heeds = model.embed.weight.device.type != "mps"
    if not hidden:
        return adamw if heeds else Skipping(adamw)
    muon = torch.optim.Muon(
        hidden, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return Skipping(muon, fused=adamw) if heeds else Skipping(muon, adamw)


def hidden_matrices(model: GPT) -> list[torch.nn.Parameter]:
    """The weights between stream and branch, which Muon is meant for: neither embeddings nor the head."""
    return [m.weight for m in model.branches.modules() if isinstance(m, Linear)]


class Skipping:
    """Several of torch's optimizers as one, with the interface of fused AdamW.

    `step` divides the gradients by `grad_scale` and changes nothing, on the device, where `found_inf` is 1. `fused`
    heeds them by itself; the others do not know them, and what they change is kept aside and put back.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer, fused: torch.optim.AdamW | None = None):
        self.optimizers, self.fused = optimizers, fused
        self.every = [*optimizers, fused] if fused else optimizers
        self.state = self.every[0].state
        for optimizer in self.every:
            optimizer.state = self.state
        self.param_groups = [group for optimizer in self.every for group in optimizer.param_groups]
        self.grad_scale, self.found_inf = torch.tensor(1.0), torch.tensor(0.0)

    @torch.no_grad()
    def step(self) -> None:
        if self.fused:
            self.fused.grad_scale, self.fused.found_inf = self.grad_scale, self.found_inf
            self.fused.step()
        params = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        torch._foreach_div_([p.grad for p in params], self.grad_scale)
        before = [(p.clone(), {key: value.clone() for key, value in self.state[p].items()}) for p in params]
        for optimizer in self.optimizers:
            optimizer.step()
        skip = self.found_inf.bool()
        for p, (weight, state) in zip(params, before, strict=True):
            p.copy_(torch.where(skip, weight, p))
            for key, value in self.state[p].items():  # which the first step makes, of zeros
                value.copy_(torch.where(skip, state.get(key, 0.0), value))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.every:
            optimizer.zero_grad(set_to_none)


def learning_rate(step: int, config: OptimConfig) -> float:
    """The rate of optimizer step `step`, counted from 0; the first is lr / warmup_iters, the last end_lr.

    A run that ends as its warm-up does ends at lr.

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
    progress = 1.0 if step >= last else max(step - begin, 0) / max(last - begin, 1)
    shape = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "wsd": 1 - progress}[config.schedule]
    return config.end_lr + shape * (config.lr - config.end_lr)

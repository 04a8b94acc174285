"""One training run's moving parts: the model, its optimizer, and what one step does with a batch.

The randomness of step i (its windows and its dropout) is a function of the seed and i, so there is no random
state to save: a run that resumes at step i is the run that never stopped, where the device repeats its arithmetic.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from base.cli import UserError
from configs import Config
from data.batches import GOLDEN, EvalWindows, TrainBatches
from data.dataset import Dataset
from model import GPT
from training.checkpoint import model_weights
from training.dynamics import Observed, PartNorms, named
from training.metrics import depth_names, part_names
from training.optimizer import learning_rate, make_optimizer
from training.parallel import (
    Runtime,
    assign,
    compile_parts,
    pool_statistics,
    recompute,
    replicate,
    reshard,
    shard,
    synchronized,
    whole,
)
from training.setup import accumulation

SCALE_START, SCALE_INTERVAL = 2.0**16, 2000
MOMENTS = (set(), {"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"})  # of no step yet, AdamW, Muon


@dataclass
class LossScale:
    """float16 gradients underflow unless the loss is scaled up (Micikevicius et al. 2018); 1 for other dtypes.

    Halved at a step whose gradient is not finite, doubled after SCALE_INTERVAL good ones. Lives on the device.
    """

    scale: Tensor
    good_steps: Tensor
    dynamic: bool

    @classmethod
    def make(cls, dtype: str, device: torch.device) -> "LossScale":
        dynamic = dtype == "float16"
        start = torch.tensor(SCALE_START if dynamic else 1.0, device=device)
        return cls(start, torch.zeros((), dtype=torch.int64, device=device), dynamic)

    def update(self, bad: Tensor, hold: Tensor) -> None:
        """bad: the gradient is not finite; hold: the run has failed, and its state is to stay (bool scalars)."""
        if self.dynamic:
            good = torch.where(bad, 0, self.good_steps + 1)
            grown = torch.where(good % SCALE_INTERVAL == 0, 2.0, 1.0)
            factor = torch.where(bad, 0.5, grown)
            self.scale *= torch.where(hold, 1.0, factor)
            self.good_steps.copy_(torch.where(hold, self.good_steps, good))


class Trainer:
    def __init__(self, config: Config, runtime: Runtime, dataset: Dataset):
        self.config, self.runtime = config, runtime
        optim, self.block_size = config.optim, config.model.block_size
        self.accumulation, self.micro_batch = accumulation(config, runtime.world)
        self.batches, self.windows = self.sources(dataset)
        torch.manual_seed(config.run.seed)
        self.model = GPT(config.model).to(runtime.device)
        self.observed, self.module = self.wrapped()
        # The objects that the optimizer knows: under FSDP shards, whatever stands in the model later.
        self.parameters = dict(self.model.named_parameters())
        saved = model_weights(self.model).items()
        self.statistics = [b for name, b in saved if name not in self.parameters]  # BatchNorm's
        self.statistics_before: list[Tensor] = []
        self.optimizer = make_optimizer(self.model, optim)
        self.scale = LossScale.make(config.model.dtype, runtime.device)
        self.norms = PartNorms(self.model, runtime)
        self.max_norm = optim.grad_clip or math.inf
        self.loss_limit = torch.tensor(math.inf, device=runtime.device)
        self.high_steps, self.held_step = torch.tensor([0, -1], device=runtime.device)
        self.held, self.failed = torch.tensor([False, False], device=runtime.device)
        self.allowed_spike = -1

    def sources(self, dataset: Dataset) -> tuple[TrainBatches, EvalWindows]:
        """Where batches come from; a replay has another source."""
        optim, run = self.config.optim, self.config.run
        shape = {"block_size": self.block_size, "batch_size": optim.batch_size}
        batches = TrainBatches(dataset.train, **shape, seed=run.seed)
        return batches, EvalWindows(dataset.val, block_size=self.block_size, max_tokens=run.eval_tokens)

    def wrapped(self) -> tuple[Observed, torch.nn.Module]:
        """The model with its statistics, as evaluation runs it and, wrapped for several processes, as training does."""
        several, compiles = self.runtime.world > 1, self.config.run.compile
        fsdp = several and self.config.run.parallel == "fsdp"
        pool_statistics(self.model, self.runtime)
        if fsdp and compiles:
            compile_parts(self.model)
        if self.config.run.activation_checkpointing:
            recompute(self.model)
        if fsdp:
            shard(self.model, self.runtime)
        observed = Observed(self.model, self.config.optim.z_loss)
        if compiles and not fsdp:
            observed.compile()
        return observed, replicate(observed, self.runtime) if several and not fsdp else observed

    @property
    def tokens_per_step(self) -> int:
        return self.config.optim.batch_size * self.block_size

    def unigram_entropy(self) -> float:
        """Of the validation windows, in nats: the loss of a model that knows how often each token comes."""
        tokens, _ = self.windows.batch(range(len(self.windows)))
        share = tokens.flatten().bincount().double() / tokens.numel()
        return torch.special.entr(share).sum().item()

    def rows(self, micro_step: int) -> range:
        """This process's rows of the global batch in one micro-batch."""
        first = (micro_step * self.runtime.world + self.runtime.rank) * self.micro_batch
        return range(first, first + self.micro_batch)

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        if self.runtime.device.type == "cuda":
            return [t.pin_memory().to(self.runtime.device, non_blocking=True) for t in tensors]
        return [t.to(self.runtime.device) for t in tensors]

    def step(self, index: int, watch: bool) -> dict[str, Tensor | float]:
        """One optimizer step, the `index`-th counted from 0; its metrics by name, on the device, all if `watch`.

        A metric of each step is one line here. A step that fails changes nothing, and neither does any after it:
        `held_step` is its index then, and `held` and `failed` are true. So it is, without `failed`, with the first
        step of a spike, until it is taken again as the `allowed_spike`.
        """
        losses, squares, stream_squares = self.gradient(index, watch)
        norm = squares.sum().sqrt()
        self.update(index, losses["train/loss"], norm, stream_squares)
        metrics = losses | {"train/grad_norm": norm}
        if watch:
            metrics |= self.by_place(squares, stream_squares)
            metrics["train/lr"] = learning_rate(index, self.config.optim)
        return metrics | {"diverged": self.failed, "spike": 1 if index == self.allowed_spike else self.held}

    def by_place(self, squares: Tensor, stream_squares: Tensor) -> dict[str, Tensor]:
        """The gradient norm of every part and the stream's RMS at every depth, from what `gradient` gives."""
        n_layer = self.config.model.n_layer
        return named("grad_norm", part_names(n_layer), self.norms.by_part(squares)) | named(
            "residual_rms", depth_names(n_layer), stream_squares.sqrt()
        )

    def allow_spike(self) -> None:
        """Lets the step that began a spike, and with it the run, go on."""
        self.allowed_spike = int(self.held_step)
        self.held_step.fill_(-1)
        self.held.fill_(False)

    def gradient(self, index: int, watch: bool) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
        """(losses by name, squared gradient norm of every parameter, mean square of the stream by depth if `watch`).

        The gradient itself, times the loss scale, is left in the parameters.
        """
        self.statistics_before = [b.clone() for b in self.statistics]
        seen = []
        for micro_step in range(self.accumulation):
            self.seed(index, micro_step)
            tokens, targets = self.to_device(*self.batches.batch(index, self.rows(micro_step)))
            with synchronized(self.module, self.model, last=micro_step == self.accumulation - 1):
                loss, *rest = self.module(tokens, targets, watch)
                (loss * (self.scale.scale / self.accumulation)).backward()
            seen.append([loss.detach(), *rest])
        losses, z_losses, squares = zip(*seen, strict=True)
        found = {"train/loss": self.runtime.mean(torch.stack(losses).mean())}
        if self.config.optim.z_loss:
            found["train/z_loss"] = self.runtime.mean(torch.stack(z_losses).detach().mean())
            found["train/loss"] = found["train/loss"] - found["train/z_loss"]
        gradient_squares = self.norms.squares([p.grad for p in self.norms.params]) / self.scale.scale**2
        return found, gradient_squares, self.runtime.mean(torch.stack(squares).mean(0)) if watch else None

    def update(self, index: int, loss: Tensor, norm: Tensor, stream_squares: Tensor | None) -> None:
        """Clips, unscales and applies the gradient; skipped on the device where the step is held."""
        bad = norm * 0 != 0  # in half as many operations as isfinite
        overflow = bad & (self.scale.scale <= 1) if self.scale.dynamic else bad
        self.judge(index, loss, overflow, stream_squares)
        clip = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.grad_scale = self.scale.scale / clip
        self.optimizer.found_inf = (bad | self.held).float()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(index, self.config.optim)
        self.optimizer.step()
        self.scale.update(bad, hold=self.held)
        self.clear()

    def judge(self, index: int, loss: Tensor, overflow: Tensor, stream_squares: Tensor | None) -> None:
        """Notes, on the device, whether this step fails or begins a spike, unless one before it has."""
        fails = (loss * 0 != 0) | overflow
        if stream_squares is not None:
            fails = fails | ~stream_squares.isfinite().all()
        high_steps = (self.high_steps + 1) * (loss > self.loss_limit)
        if self.config.run.max_rise_steps:
            fails = fails | (high_steps >= self.config.run.max_rise_steps)
        stops = fails if index == self.allowed_spike else fails | (high_steps == 1)
        self.failed = torch.where(self.held, self.failed, fails)
        self.held_step = torch.where(self.held | ~stops, self.held_step, index)
        self.held = self.held | stops
        self.high_steps = torch.where(self.held, self.high_steps, high_steps)

    @torch.no_grad()
    def clear(self) -> None:
        """Drops the gradient; if the step is held, running statistics, which `gradient` moves, are as before it."""
        self.optimizer.zero_grad(set_to_none=True)
        for now, before in zip(self.statistics, self.statistics_before, strict=True):
            now.copy_(torch.where(self.held, before, now))

    def seed(self, index: int, micro_step: int) -> None:
        """Fixes the dropout of one micro-batch on one process."""
        place = (index * self.accumulation + micro_step) * self.runtime.world + self.runtime.rank
        seed = (self.config.run.seed * GOLDEN + place) % 2**63
        # The device's own generator: torch.manual_seed visits every kind of device, at each step.
        torch.default_generator.manual_seed(seed)
        if self.runtime.device.type != "cpu":
            torch.get_device_module(self.runtime.device).manual_seed(seed)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss in nats over the fixed validation windows, which the processes share."""
        self.observed.eval()
        losses, counts, share = [], [], self.micro_batch * self.runtime.world
        for first in range(0, len(self.windows), share):
            start = first + self.runtime.rank * self.micro_batch
            tokens, targets = self.eval_batch(range(start, start + self.micro_batch))
            losses.append(self.observed(*self.to_device(tokens, targets), False)[0])
            counts.append(int((targets != -1).sum()))
        self.observed.train()
        reshard(self.model)
        pairs = zip(torch.stack(losses).tolist(), counts, strict=True)  # the one wait for the device
        total, count = self.runtime.totals([sum(loss * n for loss, n in pairs if n), sum(counts)])
        return total / count

    def eval_batch(self, rows: range) -> tuple[Tensor, Tensor]:
        """Validation windows, filled up to a full micro-batch with rows that no loss counts."""
        present = range(min(rows.start, len(self.windows)), min(rows.stop, len(self.windows)))
        tokens = torch.zeros(len(rows), self.block_size, dtype=torch.int64)
        targets = torch.full_like(tokens, -1)
        if present:
            tokens[: len(present)], targets[: len(present)] = self.windows.batch(present)
        return tokens, targets

    def state(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], tuple[float, int]]:
        """(weights, optimizer, scaler) by parameter name, whole and on the CPU, on the first process only.

        A collective under FSDP.
        """
        main, states = self.runtime.is_main, self.optimizer.state
        weights = {name: whole(t, main) for name, t in model_weights(self.model).items()}
        moments = {n: {k: whole(v, main) for k, v in states[p].items()} for n, p in self.parameters.items()}
        return weights, moments, (self.scale.scale.item(), self.scale.good_steps.item())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Weights by name, which only the first process need have."""
        for name, own in model_weights(self.model).items():
            assign(own, weights.get(name))

    def load_state(self, moments: dict[str, dict[str, Tensor]], scaler: tuple[float, int]) -> None:
        """Optimizer and scaler as `state` gave them; only the first process need have the moments."""
        own = {name: {key: value.ndim for key, value in state.items()} for name, state in moments.items()}
        layout = self.runtime.on_main(lambda: own)
        for name, p in self.parameters.items():
            state = {
                key: torch.zeros_like(p) if ndim else torch.zeros((), device=p.device)
                for key, ndim in layout[name].items()
            }
            for key, value in state.items():
                assign(value, moments[name][key] if moments else None)
            self.optimizer.state[p] = state
        self.scale.scale.fill_(scaler[0])
        self.scale.good_steps.fill_(scaler[1])

    def check_state(self, moments: dict[str, dict[str, Tensor]], path: Path) -> None:
        """Raises UserError where the moments are not those of this model's parameters."""
        own, begun = self.parameters, any(moments.values())
        for name in sorted(own.keys() | moments.keys()):
            if name not in own or name not in moments:
                raise UserError(f"{path}/trainer.pt does not fit the model: {name} is in one of them only")
            if moments[name].keys() not in MOMENTS or (begun and not moments[name]):
                raise UserError(
                    f"{path}/trainer.pt does not fit the optimizer: {sorted(moments[name])} of {name}"
                )
            for key, value in moments[name].items():
                if value.ndim and value.shape != own[name].shape:
                    raise UserError(f"{path}/trainer.pt does not fit the model: {key} of {name}")

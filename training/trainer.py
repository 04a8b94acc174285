"""One training run's moving parts: the model, its optimizer, and what one step does with a batch.

The randomness of step i (its windows and its dropout) is a function of the seed and i, so there is no random
state to save: a run that resumes at step i is the run that never stopped, where the device repeats its arithmetic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from base.cli import UserError
from configs import Config
from data.batches import EvalWindows, TrainBatches
from data.dataset import Dataset
from model import GPT
from training.distributed import (
    assign,
    pool_statistics,
    recompute,
    replicate,
    reshard,
    shard,
    synchronized,
    whole,
)
from training.dynamics import Observed, PartNorms
from training.metrics import depth_names, part_names
from training.model_file import model_weights
from training.optimizer import learning_rate, make_optimizer
from training.runtime import Runtime, accumulation

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
        self.open(dataset)
        torch.manual_seed(config.run.seed)
        self.model = GPT(config.model).to(runtime.device)
        self.module = self.wrap()
        # The objects that the optimizer knows: under FSDP shards, whatever stands in the model later.
        self.parameters = dict(self.model.named_parameters())
        saved = model_weights(self.model).items()
        self.statistics = [b for name, b in saved if name not in self.parameters]  # BatchNorm's
        self.optimizer = make_optimizer(self.model, optim)
        self.scale = LossScale.make(config.model.dtype, runtime.device)
        self.norms = PartNorms(self.model, runtime)
        self.max_norm = optim.grad_clip or math.inf
        self.loss_limit = torch.tensor(math.inf, device=runtime.device)
        self.failed_step = torch.tensor(-1, device=runtime.device)

    def open(self, dataset: Dataset) -> None:
        """Where batches come from; a replay has another source."""
        optim, run = self.config.optim, self.config.run
        self.batches = TrainBatches(
            dataset.train, block_size=self.block_size, batch_size=optim.batch_size, seed=run.seed
        )
        self.windows = EvalWindows(dataset.val, block_size=self.block_size, max_tokens=run.eval_tokens)

    def wrap(self) -> torch.nn.Module:
        pool_statistics(self.model, self.runtime)
        if self.config.run.activation_checkpointing:
            recompute(self.model)
        fsdp = self.runtime.world > 1 and self.config.run.parallel == "fsdp"
        if fsdp:
            shard(self.model, self.runtime)
        self.observed = Observed(self.model)
        if self.config.run.compile:
            self.observed.compile()
        return (
            replicate(self.observed, self.runtime) if self.runtime.world > 1 and not fsdp else self.observed
        )

    def rows(self, micro_step: int) -> range:
        """This process's rows of the global batch in one micro-batch."""
        first = (micro_step * self.runtime.world + self.runtime.rank) * self.micro_batch
        return range(first, first + self.micro_batch)

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        if self.runtime.device.type == "cuda":
            return [t.pin_memory().to(self.runtime.device, non_blocking=True) for t in tensors]
        return [t.to(self.runtime.device) for t in tensors]

    def step(self, index: int, watch: bool) -> dict[str, Tensor]:
        """One optimizer step, the `index`-th counted from 0; the values of the first table, on the device.

        A step whose loss or gradient is not finite, or whose loss is above `loss_limit`, changes nothing, and
        neither does any after it: `failed_step` is then its index, and the state is the one before it.
        """
        put_back = self.keep_statistics()
        loss, squares, residual_rms = self.gradient(index, watch)
        norm = squares.sum().sqrt()
        self.update(index, loss, norm)
        put_back()
        values = {"diverged": self.diverged, "loss": loss, "grad_norm": norm}
        if watch:
            values |= {"parts": self.norms.by_part(squares), "residual_rms": residual_rms}
        return values

    def keep_statistics(self) -> Callable[[], None]:
        """A function that puts running statistics, which forward moves, back to what they are now if a step failed."""
        before = [b.clone() for b in self.statistics]

        @torch.no_grad()
        def put_back() -> None:
            for now, then in zip(self.statistics, before, strict=True):
                now.copy_(torch.where(self.diverged, then, now))

        return put_back

    @property
    def diverged(self) -> Tensor:
        """Whether a step has failed; bool, on the device."""
        return self.failed_step >= 0

    def gradient(self, index: int, watch: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """(loss, squared gradient norm of every parameter, stream RMS at every depth if `watch`) of one step.

        The gradient itself, times the loss scale, is left in the parameters.
        """
        losses, squares = [], []
        for micro_step in range(self.accumulation):
            self.seed(index, micro_step)
            tokens, targets = self.to_device(*self.batches.batch(index, self.rows(micro_step)))
            with synchronized(self.module, self.model, last=micro_step == self.accumulation - 1):
                loss, square = self.module(tokens, targets, watch)
                (loss * (self.scale.scale / self.accumulation)).backward()
            losses.append(loss.detach())
            squares.append(square)
        loss = self.runtime.mean(torch.stack(losses).mean())
        gradient_squares = self.norms.squares([p.grad for p in self.norms.params]) / self.scale.scale**2
        residual_rms = self.runtime.mean(torch.stack(squares).mean(0)).sqrt() if watch else None
        return loss, gradient_squares, residual_rms

    def update(self, index: int, loss: Tensor, norm: Tensor) -> None:
        """Clips, unscales and applies the gradient; skipped on the device where the step fails."""
        bad = ~norm.isfinite()
        fails = ~loss.isfinite() | (loss > self.loss_limit) | (bad & (self.scale.scale <= 1))
        self.failed_step = torch.where(fails & ~self.diverged, index, self.failed_step)
        clip = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.grad_scale = self.scale.scale / clip
        self.optimizer.found_inf = (bad | self.diverged).float()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(index, self.config.optim)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scale.update(bad, hold=self.diverged)

    def seed(self, index: int, micro_step: int) -> None:
        """Fixes the dropout of one micro-batch on one process."""
        place = (index * self.accumulation + micro_step) * self.runtime.world + self.runtime.rank
        seed = self.config.run.seed * 0x9E3779B97F4A7C15 + place & 0x7FFFFFFFFFFFFFFF
        # The device's own generator: torch.manual_seed visits every kind of device, at each step.
        torch.default_generator.manual_seed(seed)
        if self.runtime.device.type != "cpu":
            torch.get_device_module(self.runtime.device).manual_seed(seed)

    def row(self, values: dict[str, Tensor], index: int) -> dict[str, float]:
        """What `step(watch=True)` gave, by one transfer, under its names in metrics.jsonl; and `diverged`, 0 or 1."""
        n_layer = self.config.model.n_layer
        names = ["diverged", "train/loss", "train/grad_norm"]
        names += [f"grad_norm/{part}" for part in part_names(n_layer)]
        names += [f"residual_rms/{depth}" for depth in depth_names(n_layer)]
        flat = torch.cat([v.reshape(-1).float() for v in values.values()]).tolist()
        return dict(zip(names, flat, strict=True)) | {"train/lr": learning_rate(index, self.config.optim)}

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss in nats over the fixed validation windows, which the processes share."""
        self.observed.eval()
        total, count, share = 0.0, 0, self.micro_batch * self.runtime.world
        for first in range(0, len(self.windows), share):
            start = first + self.runtime.rank * self.micro_batch
            tokens, targets = self.eval_batch(range(start, start + self.micro_batch))
            loss, _ = self.observed(*self.to_device(tokens, targets), False)
            scored = int((targets != -1).sum())
            total, count = total + (loss.item() * scored if scored else 0.0), count + scored
        self.observed.train()
        reshard(self.model)
        total, count = self.runtime.totals([total, count])
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

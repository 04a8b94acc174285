"""When a run diverges: where it began, what was healthy, what usually helps, and the step kept for replay.

A step fails when its loss or gradient is not finite, or its loss is more than `max_loss_rise` nats above the
lowest loss logged since the run was started or resumed, once the warm-up is over. The device notices by
itself and changes nothing from then on (Trainer.update), so however late the host looks, the state is the
one before the failed step. The diagnosis computes that step's gradient again.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import pydantic
from torch import Tensor

from configs import Config, replace, to_toml
from data.dataset import Dataset
from training import checkpoint, model_file
from training.metrics import depth_names
from training.runtime import Runtime
from training.trainer import Trainer

EXIT_CODE = 3  # 2 is a user's mistake, 1 a fault of the program

ADVICE = {
    "pre": "a lower --lr or a longer --warmup-iters; --placement sandwich also bounds what each branch adds",
    "post": "a longer --warmup-iters first, then a lower --lr; deep post-norm wants --residual-scale deepnorm",
    "output": "a lower --lr or a longer --warmup-iters; --placement sandwich also normalizes what branches read",
    "sandwich": "a lower --lr or a longer --warmup-iters, as every branch is normalized on both sides already",
}


class Diverged(RuntimeError):
    """Training has stopped; the message is the report."""


@pydantic.dataclasses.dataclass(config=checkpoint.PLAIN)
class FailedState(checkpoint.TrainerState):
    """The state before a step that failed, and what `replay` needs besides."""

    loss_limit: float
    tokens: Tensor
    targets: Tensor
    healthy: dict[str, int | float]


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with one step, and the depth at which it begins (`layer_03.mlp`)."""

    cause: str
    place: str
    where: str


class Guard:
    """Follows the losses of a run and ends it when a step has failed."""

    def __init__(self, trainer: Trainer, dataset: Dataset, run_dir: Path):
        self.trainer, self.dataset, self.run_dir = trainer, dataset, run_dir
        self.lowest = math.inf
        self.healthy: dict[str, float] = {}

    def read(self, values: dict[str, Tensor], index: int, wait: bool) -> dict[str, float]:
        """The first table's row of step `index`, whose `values` Trainer.step gave; empty if it was not watched.

        Raises Diverged if this step or one before it has failed, which is looked at where the step was watched, or
        with `wait`: the host waits for the device then.
        """
        row = self.trainer.row(values, index) if "parts" in values else {}
        if row.pop("diverged") if row else wait and self.trainer.diverged.item():
            self.stop()
        if row:
            self.passed(index + 1, row)
        return row

    def passed(self, step: int, row: dict[str, float]) -> None:
        """A logged step that is healthy; from the end of the warm-up on it limits the losses to come."""
        self.healthy = row | {"iter": step}
        self.lowest = min(self.lowest, row["train/loss"])
        config = self.trainer.config
        if config.run.max_loss_rise and step >= config.optim.warmup_iters:
            self.trainer.loss_limit.fill_(self.lowest + config.run.max_loss_rise)

    def stop(self) -> None:
        """Diagnoses the failed step, saves it and raises Diverged; all processes take part."""
        trainer = self.trainer
        index = int(trainer.failed_step)
        found = diagnose(trainer, index, self.healthy)
        text = report(found, index, self.healthy, trainer.config)
        state = trainer.state()
        saved = trainer.runtime.on_main(lambda: self.save(index, *state, text))
        trainer.runtime.refuse(Diverged(f"{text}\n{saved}\n{self.way_on()}"), EXIT_CODE)

    def save(self, index: int, weights: dict, moments: dict, scaler: tuple[float, int], text: str) -> str:
        """A checkpoint of the state before the failed step, with its batch; whole or absent. Returns what it did."""
        trainer, folder = self.trainer, self.run_dir / "diverged"
        config = replace(trainer.config, "optim", micro_batch_size=trainer.micro_batch)
        tokens, targets = trainer.batches.batch(index, range(config.optim.batch_size))
        state = FailedState(
            progress=checkpoint.Progress(step=index),
            scaler=scaler,
            optimizer=moments,
            config=asdict(config),
            data=self.dataset.fingerprint,
            loss_limit=trainer.loss_limit.item(),
            tokens=tokens,
            targets=targets,
            healthy=self.healthy,
        )
        about = model_file.about(trainer.model, self.dataset.meta.get("tokenizer"))
        try:
            with checkpoint.writing(folder, replacing=True) as path:
                checkpoint.write(path, weights, about, state, None)
                (path / "config.toml").write_text(to_toml(config), encoding="utf-8")
                (path / "report.txt").write_text(text + "\n", encoding="utf-8")
        except OSError as e:
            return f"  saved    nothing, as {folder} cannot be written ({e.strerror or e})"
        return f"  saved    state, batch and this report; python train.py --replay {folder} repeats the step"

    def way_on(self) -> str:
        if not any(found.step for found in checkpoint.listed(self.run_dir)):
            return "  then     nothing was saved after step 0; start anew with --overwrite and one of these changes"
        return (
            f"  then     the checkpoints are untouched; --resume would meet the same step again, so start a new "
            f"run with --init-from {self.run_dir} and one of these changes"
        )


def diagnose(trainer: Trainer, index: int, healthy: dict[str, float]) -> Diagnosis | None:
    """Computes the gradient of step `index` and says where it fails; None if it does not.

    healthy: the last row of the first table before it, which a loss that jumps is compared with. A collective.
    """
    put_back = trainer.keep_statistics()
    loss, squares, residual_rms = trainer.gradient(index, watch=True)
    put_back()
    row = trainer.row(
        {
            "diverged": trainer.diverged,
            "loss": loss,
            "grad_norm": squares.sum().sqrt(),
            "parts": trainer.norms.by_part(squares),
            "residual_rms": residual_rms,
        },
        index,
    )
    limit = trainer.loss_limit.item()
    loss = row["train/loss"]
    if not math.isfinite(loss):
        cause = "the loss is not finite"
    elif loss > limit:
        rise = trainer.config.run.max_loss_rise
        cause = f"the loss is {loss:.4f}, more than {rise:g} nats above the lowest one logged"
    elif not math.isfinite(row["train/grad_norm"]):
        cause = "the gradient is not finite"
    else:
        return None
    place, where = (
        broken_weight(trainer)
        or broken_stream(trainer, residual_rms)
        or broken_gradient(trainer, squares)
        or largest_growth(row, healthy)
    )
    return Diagnosis(cause, place, where)


def broken_weight(trainer: Trainer) -> tuple[str, str] | None:
    """The lowest parameter that is not finite itself."""
    bad = broken_parameters(trainer, trainer.norms.finite())
    if not bad:
        return None
    depth, name = bad[0]
    others = f" (nor are {len(bad) - 1} others)" if len(bad) > 1 else ""
    return places(trainer)[depth], f"the weight {name} is not finite{others}"


def broken_stream(trainer: Trainer, residual_rms: Tensor) -> tuple[str, str] | None:
    """The lowest depth at which the stream is not finite."""
    names = depth_names(trainer.config.model.n_layer)
    finite = residual_rms.isfinite().tolist()
    if all(finite):
        return None
    depth = finite.index(False)
    below = f"finite up to {names[depth - 1]} and not" if depth else "not finite"
    return names[depth], f"the stream is {below} after {names[depth]}"


def broken_gradient(trainer: Trainer, squares: Tensor) -> tuple[str, str] | None:
    """The highest parameter whose gradient is not finite: backward passes it first."""
    bad = broken_parameters(trainer, squares.isfinite())
    if not bad:
        return None
    depth, name = bad[-1]
    above = places(trainer)[depth + 1 :][:1]
    down_to = f"finite down to {above[0]} and not" if above else "not finite"
    return places(trainer)[depth], f"the stream is finite; the gradient is {down_to} at {name}"


def largest_growth(row: dict[str, float], healthy: dict[str, float]) -> tuple[str, str]:
    """Where stream or gradient has grown most since the last healthy row."""
    tables = {"residual_rms": "the stream's RMS", "grad_norm": "the gradient norm"}
    growth = {
        (value / healthy.get(key, 1.0) if healthy.get(key) else 0.0): key
        for key, value in row.items()
        if key.partition("/")[0] in tables
    }
    factor, key = max(growth.items())
    table, _, place = key.partition("/")
    return place, f"everything is finite; {tables[table]} at {place} has grown most, {factor:.3g} times"


def broken_parameters(trainer: Trainer, finite: Tensor) -> list[tuple[int, str]]:
    """(index into `places`, name) of the parameters that are not `finite`, a bool for each, bottom to top."""
    names = [name for name, good in zip(trainer.norms.names, finite.tolist(), strict=True) if not good]
    return sorted((depth_of(name, trainer.config.model.n_layer), name) for name in names)


def places(trainer: Trainer) -> list[str]:
    return [*depth_names(trainer.config.model.n_layer), "head"]


def depth_of(name: str, n_layer: int) -> int:
    """Where in `places` a parameter acts: `branches.7.down.weight` and `joins.7.out_norm.weight` at 8."""
    top, _, rest = name.partition(".")
    if top in ("branches", "joins"):
        return 1 + int(rest.partition(".")[0])
    return 2 * n_layer + 1 if top == "head" else 0


def report(found: Diagnosis | None, index: int, healthy: dict[str, float], config: Config) -> str:
    """The message, a line per question."""
    if found is None:
        return f"step {index + 1} failed once, but computed again it is healthy: its arithmetic is not repeatable"
    lines = [f"step {index + 1} diverged: {found.cause}", f"  where    {found.place}: {found.where}"]
    if healthy:
        lines.append(
            f"  healthy  step {healthy['iter']}: loss {healthy['train/loss']:.4f}, "
            f"gradient norm {healthy['train/grad_norm']:.3g}, {healthy_here(healthy, found.place)}"
        )
    return "\n".join([*lines, *(f"  try      {advice}" for advice in advise(config))])


def healthy_here(healthy: dict[str, float], place: str) -> str:
    known = {"stream RMS": f"residual_rms/{place}", "gradient norm": f"grad_norm/{place}"}
    return f"at {place} " + ", ".join(f"{what} {healthy[k]:.3g}" for what, k in known.items() if k in healthy)


def advise(config: Config) -> list[str]:
    """What usually helps with this configuration, the most likely first."""
    model, advice = config.model, []
    if model.dtype == "float16":
        advice.append("--dtype bfloat16 or float32, as float16 ends at 65,504")
    if not config.optim.grad_clip:
        advice.append("--grad-clip 1")
    advice.append(ADVICE[model.placement])
    if model.qk_norm == "off":
        advice.append("--qk-norm head, which bounds the attention logits")
    return advice


@dataclass(frozen=True)
class SavedBatch:
    """The one batch of a failed step, in the place of a data set's."""

    tokens: Tensor
    targets: Tensor

    def batch(self, step: int, rows: range) -> tuple[Tensor, Tensor]:
        return self.tokens[rows.start : rows.stop], self.targets[rows.start : rows.stop]


class Replay(Trainer):
    """A trainer that knows one batch and has nothing to evaluate."""

    def open(self, dataset: SavedBatch) -> None:
        self.batches = dataset


def replay(config: Config, runtime: Runtime) -> None:
    """Repeats the failed step of `config.start.replay`; raises Diverged with the report if it fails again."""
    path = Path(config.start.replay)
    if not (path / "report.txt").exists():
        raise model_file.UserError(f"{path} is not the `diverged` folder that a run leaves behind")
    found = checkpoint.check(path)
    weights, _ = model_file.read_model(path)
    state = checkpoint.load_trainer(found, FailedState)
    trainer = Replay(config, runtime, SavedBatch(state.tokens, state.targets))
    model_file.check_weights(trainer.model, weights, path)
    trainer.check_state(state.optimizer, path)
    trainer.load_weights(weights)
    trainer.load_state(state.optimizer, state.scaler)
    trainer.loss_limit.fill_(state.loss_limit)
    step, healthy = state.progress.step, state.healthy
    diagnosis = diagnose(trainer, step, healthy)
    if diagnosis:
        runtime.refuse(Diverged(report(diagnosis, step, healthy, config)), EXIT_CODE)
    if runtime.is_main:
        print(f"step {step + 1} does not fail here: other kernels, another dtype or device than in the run")

"""When a run diverges: where it began, how it came to that, what usually helps, and the step kept for replay.

A step fails when its loss, its gradient or the RMS of its stream is not finite. A *spike* begins with a loss that is
more than `max_loss_rise` nats above the lowest one logged since the run was started or resumed, once the warm-up is
over; it fails when it has lasted `max_rise_steps` steps. The device notices both by itself and changes nothing from
then on (Trainer.judge), so however late the host looks, the state is the one before that step. A spike is reported,
kept for replay, and gone on with; a failure ends the run. The diagnosis computes the step's gradient again.
"""

import math
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pydantic
from torch import Tensor

from base.cli import UserError
from base.files import atomic_folder
from configs import Config, replace, to_toml
from model import PLACEMENTS
from training import checkpoint
from training.dynamics import fetch
from training.metrics import Row, depth_names, parse
from training.parallel import Runtime
from training.run import Run
from training.trainer import Trainer

EXIT_CODE = 3  # 2 is a user's mistake, 1 a fault of the program
KEPT_SPIKES = 3  # the newest
HISTORY = 64  # rows at most that a failed step is compared with


class Diverged(RuntimeError):
    """Training has stopped; the message is the report, and `row` is that of step `step`, which has failed."""

    def __init__(self, report: str, step: int, row: dict[str, float]):
        super().__init__(report)
        self.step, self.row = step, row


@pydantic.dataclasses.dataclass(config=checkpoint.PLAIN)
class FailedState(checkpoint.TrainerState):
    """The state before a step that failed or began a spike, and what `replay` needs besides."""

    loss_limit: float
    tokens: Tensor
    targets: Tensor
    high_steps: int
    history: list[dict[str, int | float]]
    """Rows before it, a few of them, the first and the last among them."""


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a step, the depth at which it begins (`layer_03.mlp`), and its row."""

    cause: str
    place: str
    where: str
    row: dict[str, float]


class History:
    """The rows of a run so far: the first, the last, and some between them that are evenly spread."""

    def __init__(self):
        self.spread: list[Row] = []
        self.last: list[Row] = []
        self.count, self.every = 0, 1

    def add(self, row: Row) -> None:
        if self.count % self.every == 0:
            self.spread.append(row)
        if len(self.spread) > HISTORY:
            del self.spread[1::2]
            self.every *= 2
        self.count, self.last = self.count + 1, [row]

    @property
    def rows(self) -> list[Row]:
        return self.spread + [row for row in self.last if row not in self.spread[-1:]]


class Guard:
    """Follows the rows of a run, tells of its spikes and ends it when a step has failed."""

    def __init__(self, trainer: Trainer, run: Run):
        self.trainer, self.run = trainer, run
        self.lowest = math.inf
        self.history = History()

    def check(self, row: dict[str, float], step: int) -> bool:
        """Whether `step`, counted from 1, has been made; takes `diverged` and `spike` out of its row where they are 0.

        False after a spike has been reported: the steps from the one that began it on are to be made again. Raises
        Diverged if a step has failed.
        """
        if row.pop("diverged"):
            self.stop()
        if row["spike"] and self.trainer.allowed_spike != step - 1:
            self.tell_spike()
            return False
        if not row["spike"]:
            del row["spike"]
        return True

    def passed(self, row: dict[str, float], step: int) -> None:
        """Takes note of a logged step; from the end of the warm-up on, it limits the losses to come."""
        if "spike" in row:
            return
        self.history.add({"iter": step} | row)
        self.lowest = min(self.lowest, row["train/loss"])
        config = self.trainer.config
        if config.run.max_loss_rise and step >= config.optim.warmup_iters:
            self.trainer.loss_limit.fill_(self.lowest + config.run.max_loss_rise)

    def tell_spike(self) -> None:
        """Reports and keeps the step that has begun a spike, and lets the run go on; all processes take part."""
        index = int(self.trainer.held_step)
        found = diagnose(self.trainer, index, self.history.rows)
        text = report(found, "spiked", index, self.history.rows, self.trainer.config)
        folder = self.run.folder.path / "spikes" / f"step_{index + 1:08d}"
        saved = self.save(folder, index, text)
        if self.trainer.runtime.is_main:
            for old in sorted(folder.parent.glob("step_*"))[:-KEPT_SPIKES]:
                shutil.rmtree(old, ignore_errors=True)
        self.run.tell(f"{text}\n{saved}\n  then     training goes on")
        self.trainer.allow_spike()

    def stop(self) -> NoReturn:
        """Diagnoses the failed step, saves it and raises Diverged; all processes take part."""
        index, rows = int(self.trainer.held_step), self.history.rows
        found = diagnose(self.trainer, index, rows)
        text = report(found, "diverged", index, rows, self.trainer.config)
        saved = self.save(self.run.folder.path / "diverged", index, text)
        row = (found.row if found else {}) | {"diverged": 1}
        error = Diverged(f"{text}\n{saved}\n{self.way_on()}", index + 1, row)
        self.trainer.runtime.raise_on_main(error, EXIT_CODE)

    def save(self, folder: Path, index: int, text: str) -> str:
        """A checkpoint of the state before a step, with its batch; whole or absent. Says what it did. A collective."""
        trainer = self.trainer
        config = replace(trainer.config, "optim", micro_batch_size=trainer.micro_batch)
        tokens, targets = trainer.batches.batch(index, range(config.optim.batch_size))
        weights, state = self.run.state(
            config,
            checkpoint.Progress(step=index),
            FailedState,
            loss_limit=trainer.loss_limit.item(),
            high_steps=int(trainer.high_steps),
            tokens=tokens,
            targets=targets,
            history=self.history.rows,
        )
        if not trainer.runtime.is_main:
            return ""
        try:
            with atomic_folder(folder, replace=True) as path:
                checkpoint.write(path, weights, self.run.header, state, None)
                (path / "config.toml").write_text(to_toml(config), encoding="utf-8")
                (path / "report.txt").write_text(text + "\n", encoding="utf-8")
        except UserError as e:
            return f"  saved    nothing, as {e}"
        return f"  saved    state, batch and this report; python train.py --replay {folder} repeats the step"

    def way_on(self) -> str:
        if not any(found.step for found in checkpoint.listed(self.run.folder.path)):
            return "  then     nothing was saved after step 0; start anew with --overwrite and one of these changes"
        return (
            "  then     the checkpoints are untouched; --resume would meet the same step again, so start a new "
            f"run with --init-from {self.run.folder.path} and one of these changes"
        )


def diagnose(trainer: Trainer, index: int, rows: list[Row]) -> Diagnosis | None:
    """Computes the gradient of step `index` and says where it fails; None if it does not.

    rows: of steps before it, which a loss that jumps is compared with. A collective.
    """
    losses, squares, stream_squares = trainer.gradient(index, watch=True)
    trainer.clear()
    metrics = losses | {"train/grad_norm": squares.sum().sqrt()}
    row = fetch(metrics | trainer.by_place(squares, stream_squares))
    place, where = (
        broken_weight(trainer)
        or broken_stream(trainer, stream_squares)
        or broken_gradient(trainer, squares)
        or largest_growth(row, rows)
    )
    if not math.isfinite(row["train/loss"]):
        cause = "the loss is not finite"
    elif row["train/loss"] > trainer.loss_limit.item():
        rise = trainer.config.run.max_loss_rise
        cause = f"the loss is {row['train/loss']:.4f}, more than {rise:g} nats above the lowest one logged"
        cause += f", as in {int(trainer.high_steps)} steps before" if trainer.high_steps else ""
    elif not math.isfinite(row["train/grad_norm"]):
        cause = "the gradient is not finite"
    elif not stream_squares.isfinite().all():
        cause = "the RMS of the stream is not finite"
    else:
        return None
    return Diagnosis(cause, place, where, row)


def broken_weight(trainer: Trainer) -> tuple[str, str] | None:
    """The lowest parameter that is not finite itself."""
    bad = broken_parameters(trainer, trainer.norms.finite())
    if not bad:
        return None
    depth, name = bad[0]
    others = f" (nor are {len(bad) - 1} others)" if len(bad) > 1 else ""
    return places(trainer)[depth], f"the weight {name} is not finite{others}"


def broken_stream(trainer: Trainer, stream_squares: Tensor) -> tuple[str, str] | None:
    """The lowest depth at which the stream, or its mean square, is not finite."""
    names = depth_names(trainer.config.model.n_layer)
    finite = stream_squares.isfinite().tolist()
    if all(finite):
        return None
    depth = finite.index(False)
    below = f"finite up to {names[depth - 1]} and not" if depth else "not finite"
    return names[depth], f"the stream's RMS is {below} after {names[depth]}"


def broken_gradient(trainer: Trainer, squares: Tensor) -> tuple[str, str] | None:
    """The highest parameter whose gradient is not finite: backward passes it first."""
    bad = broken_parameters(trainer, squares.isfinite())
    if not bad:
        return None
    depth, name = bad[-1]
    above = places(trainer)[depth + 1 :][:1]
    down_to = f"finite down to {above[0]} and not" if above else "not finite"
    return places(trainer)[depth], f"the stream is finite; the gradient is {down_to} at {name}"


def largest_growth(row: Row, rows: list[Row]) -> tuple[str, str]:
    """Where stream or gradient has grown most over their medians in the rows before; embed where there are none."""
    tables = {"residual_rms": "the stream's RMS", "grad_norm": "the gradient norm"}
    grown = {"residual_rms/embed": 1.0}
    for key, value in row.items():
        if parse(key)[0].name in tables and (seen := [r[key] for r in rows if r.get(key)]):
            grown[key] = value / statistics.median_low(seen)
    key = max(grown, key=grown.get)
    quantity, place = parse(key)
    what = f"{tables[quantity.name]} at {place.text}"
    return (
        place.text,
        f"everything is finite; {what} is {grown[key]:.3g} times its median so far, the most of all",
    )


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


def report(found: Diagnosis | None, what: str, index: int, rows: list[Row], config: Config) -> str:
    """The message, a line per question. what: diverged or spiked."""
    if found is None:
        return f"step {index + 1} {what} once, but computed again it is healthy: its arithmetic is not repeatable"
    lines = [f"step {index + 1} {what}: {found.cause}", f"  where    {found.place}: {found.where}"]
    if rows:
        lines.append(path_to(found, index + 1, rows))
    return "\n".join([*lines, *(f"  try      {advice}" for advice in advise(config))])


def path_to(found: Diagnosis, step: int, rows: list[Row]) -> str:
    """The first and the last row before a step, and the step itself, in a line."""
    seen = [rows[0], *rows[1:][-1:], {"iter": step} | found.row]
    names = {"loss": "train/loss", "gradient norm": "train/grad_norm"}
    here = {"stream RMS": f"residual_rms/{found.place}", "gradient norm": f"grad_norm/{found.place}"}
    names |= {f"{name} at {found.place}": key for name, key in here.items()}
    parts = [
        f"{name} {' -> '.join(f'{row[key]:.4g}' for row in seen)}"
        for name, key in names.items()
        if all(key in row for row in seen)
    ]
    return f"  path     step {' -> '.join(str(row['iter']) for row in seen)}: {', '.join(parts)}"


def advise(config: Config) -> list[str]:
    """What usually helps with this configuration, the most likely first."""
    model, advice = config.model, []
    if model.dtype == "float16":
        advice.append("--dtype bfloat16 or float32, as float16 ends at 65,504")
    if not config.optim.grad_clip:
        advice.append("--grad-clip 1")
    advice.append(advice_by_norms(frozenset().union(*(PLACEMENTS[name] for name in model.placements))))
    if model.qk_norm == "off":
        advice.append("--qk-norm head, which bounds the attention logits")
    return advice


def advice_by_norms(norms: frozenset[str]) -> str:
    """For branches that have these of the norms in, out and post."""
    if "post" in norms:
        first = "a longer --warmup-iters first, then a lower --lr"
        return first if "in" in norms else f"{first}; deep post-norm wants --residual-scale deepnorm"
    first = "a lower --lr or a longer --warmup-iters"
    if {"in", "out"} <= norms:
        return f"{first}, as every branch is normalized on both sides already"
    if "in" in norms:
        return f"{first}; --placement sandwich also bounds what each branch adds"
    return f"{first}; --placement sandwich also normalizes what branches read"


@dataclass(frozen=True)
class SavedBatch:
    """The one batch of a failed step, in the place of a data set's."""

    tokens: Tensor
    targets: Tensor

    def batch(self, step: int, rows: range) -> tuple[Tensor, Tensor]:
        return self.tokens[rows.start : rows.stop], self.targets[rows.start : rows.stop]


class Replay(Trainer):
    """A trainer that knows one batch and has nothing to evaluate."""

    def sources(self, dataset: SavedBatch) -> tuple[SavedBatch, None]:
        return dataset, None


def replay(config: Config, runtime: Runtime) -> None:
    """Repeats the step of `config.start.replay`; raises Diverged with the report if it fails or spikes again."""
    path = Path(config.start.replay)
    if not (path / "report.txt").exists():
        raise UserError(f"{path} is no folder that a run leaves in `diverged` or `spikes`")
    found = checkpoint.check(path)
    weights, _ = checkpoint.read_model(path)
    state = checkpoint.load_trainer(found, FailedState)
    trainer = Replay(config, runtime, SavedBatch(state.tokens, state.targets))
    checkpoint.check_weights(trainer.model, weights, path)
    trainer.check_state(state.optimizer, path)
    trainer.load_weights(weights)
    trainer.load_state(state.optimizer, state.scaler)
    trainer.loss_limit.fill_(state.loss_limit)
    trainer.high_steps.fill_(state.high_steps)
    index = state.progress.step
    diagnosis = diagnose(trainer, index, state.history)
    if diagnosis:
        what = "spiked" if path.parent.name == "spikes" else "diverged"
        text = report(diagnosis, what, index, state.history, config)
        runtime.raise_on_main(Diverged(text, index + 1, diagnosis.row), EXIT_CODE)
    if runtime.is_main:
        print(f"step {index + 1} does not fail here: other kernels, another dtype or device than in the run")

"""A run on disk: who may take its folder, what it starts from, how far it is, and being asked to stop.

    out/RUN/config.toml          the resolved configuration: with it a folder holds a run
            run.json             what became of it so far, and what it ran on
            metrics.jsonl        (training/tracker.py)
            checkpoints/         (training/checkpoint.py)
            diverged/, spikes/   (training/divergence.py)

Exit codes of train.py:

    0    done
    1    a fault of the program, or of another process of the run
    2    a user's mistake, told in one sentence
    3    the run diverged; what it leaves is in out/RUN/diverged
    74   the last checkpoint could not be written; what was saved before is untouched (EX_IOERR)
    75   stopped by a signal with everything saved: start it again with --resume (EX_TEMPFAIL)
    130  interrupted before training began, or by a second SIGINT, with nothing saved
"""

import contextlib
import dataclasses
import datetime
import json
import os
import shutil
import signal
import socket
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from base.cli import UserError
from base.files import Lock, lock, read_object, sync, write_text, writing
from configs import SECTIONS, Config, RunConfig, StartConfig, to_toml
from data import Dataset
from training import checkpoint
from training.checkpoint import Progress, TrainerState
from training.optimizer import learning_rate
from training.tracker import Tracker, cut_after
from training.trainer import Trainer

EXIT_UNSAVED, EXIT_STOPPED, EXIT_INTERRUPTED = 74, 75, 130
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SIGUSR1: Slurm's --signal before it preempts
MAY_CHANGE = {  # on resume; everything else decides what the run computes
    "model": {"kernel"},
    "data": {"dataset"},  # where it lies: the fingerprint says whether it is the same data
    "optim": {"max_iters", "micro_batch_size"},
    "run": {f.name for f in dataclasses.fields(RunConfig)} - {"seed"},
}
# of a start that is killed early
UNFINISHED = {".launch", ".overwritten", ".writing_config.toml", "checkpoints"}
OWN = {".launch", "config.toml", "run.json", "metrics.jsonl", "result.json", "wandb", "diverged", "spikes"}


class RunFolder:
    """OUT/RUN, of which the first process alone takes care."""

    def __init__(self, config: Config):
        self.path = Path(config.run.out_dir) / config.run.run_name
        self.lock: Lock | None = None
        self.described = False
        self.about: dict[str, Any] = {}
        self.seconds_before, self.begun = 0.0, time.monotonic()

    def choose(self, start: StartConfig) -> bool:
        """Whether to resume. Raises UserError if the folder holds something that no flag says what to do with."""
        path = self.path
        with writing(path):
            is_run, restarted = self.is_run(), self.restarted()
            if path.exists() and not path.is_dir():
                raise UserError(
                    f"{path} is a file, and the run needs a folder of that name; pass another --run-name"
                )
            if start.resume and not is_run:
                raise UserError(f"--resume: {path} holds no run")
            if is_run:
                if not (start.resume or start.overwrite or restarted):
                    raise UserError(
                        f"{path} already holds a run; pass --resume, --overwrite or another --run-name"
                    )
                self.take()
            elif path.exists() and any(p.name not in UNFINISHED for p in path.iterdir()):
                raise UserError(f"{path} holds files that are not a run's; pass another --run-name")
            return is_run and (start.resume or restarted)

    def is_run(self) -> bool:
        """Whether the folder holds a run of ours, if only its checkpoints: a config.toml has many programs."""
        if any(checkpoint.step_of(path) for path in checkpoint.folders(self.path)):
            return True
        try:
            return {"model", "run"} <= tomllib.loads(
                (self.path / "config.toml").read_text("utf-8-sig")
            ).keys()
        except (OSError, ValueError):
            return False

    def restarted(self) -> bool:
        """Whether `torchrun --max-restarts` has started this very run before, which then goes on by itself."""
        try:
            return launch() == (self.path / ".launch").read_text(encoding="utf-8") != ""
        except OSError:
            return False

    def take(self) -> None:
        """Locks the folder until `release`, or until the process ends in whatever way."""
        self.lock = self.lock or lock(self.path, held=f"{self.path} is being trained by another process")

    def release(self) -> None:
        if self.lock:
            self.lock.release()
            self.lock = None

    def prepare(self, resuming: bool, step: int) -> None:
        """Takes the folder for training from `step` on; only now does --overwrite delete anything."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.take()
            if resuming:
                checkpoint.clean(self.path)
                checkpoint.set_aside(self.path, step)
                cut_after(self.path / "metrics.jsonl", step or -1)  # the loop writes step 0's row itself
                about = read_object(self.path / "run.json")
                self.about = about if isinstance(about.get("seconds"), int | float) else {}
                self.seconds_before = self.about.get("seconds", 0.0)
            else:
                self.empty()
            (self.path / ".launch").write_text(launch(), encoding="utf-8")

    def own_files(self) -> list[Path]:
        """What a run has written in the folder; first what makes it a run, as half a run is none."""
        inside = [p for p in (self.path / "checkpoints").glob("*") if checkpoint.is_own(p)]
        own = [p for p in self.path.iterdir() if p.name in OWN or p.name.startswith(".writing_")]
        return sorted(own, key=lambda p: p.name not in ("config.toml", ".launch")) + inside

    def empty(self) -> None:
        """Deletes what a run has written in the folder: all or, where something cannot be moved, nothing."""
        aside = self.path / ".overwritten"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(exist_ok=True)
        moved: list[Path] = []
        try:
            for entry in self.own_files():
                entry.rename(aside / entry.name)
                moved.append(entry)
        except OSError:
            for entry in moved:
                (aside / entry.name).rename(entry)
            aside.rmdir()
            raise
        shutil.rmtree(aside, ignore_errors=True)

    def describe(self, config: Config) -> None:
        """Writes config.toml."""
        self.described = True
        write_text(self.path / "config.toml", to_toml(config))

    def renew(self, config: Config) -> None:
        """After a checkpoint: if somebody has moved or deleted the folder, the new one is a run, too."""
        if self.described and not (self.path / "config.toml").exists():
            self.release()
            self.take()
            (self.path / ".launch").write_text(launch(), encoding="utf-8")
            self.describe(config)

    def record(self, **news: Any) -> None:
        """Writes run.json with these news; a disk that fails costs only them. `seconds` counts over all starts."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        seconds = round(self.seconds_before + time.monotonic() - self.begun, 3)
        self.about = {"started": now} | self.about | {"seconds": seconds} | news
        with contextlib.suppress(UserError):
            write_text(self.path / "run.json", json.dumps(self.about, indent=1))


def launch() -> str:
    """Names the torchrun that has started this process, the same after its restarts; empty without torchrun.

    torchrun's own count of restarts would not do: one that another machine has caused is not counted.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return run_id and f"{socket.gethostname()}:{os.getppid()}:{run_id}"


class Run:
    """Restores and saves a run; the first process alone reads and writes, and all exchange what they hold.

    intact: whether the last checkpoint could be written, on the first process.
    """

    def __init__(self, trainer: Trainer, dataset: Dataset, folder: RunFolder, tell: Callable[[str], None]):
        self.trainer, self.dataset, self.folder, self.tell = trainer, dataset, folder, tell
        self.progress, self.intact = Progress(), True
        self.last_step, self.last_time = -1, time.monotonic()

    def begin(self, resuming: bool, about: dict[str, Any]) -> None:
        """Loads what the run starts from, and makes its folder ready. about: for run.json. Raises UserError.

        A new run saves itself once before it trains, so that a disk that cannot take a checkpoint is told now.
        """
        on_main, config = self.trainer.runtime.on_main, self.trainer.config
        self.load(resuming)
        on_main(lambda: self.folder.prepare(resuming, self.progress.step))
        if not resuming:
            self.save()
            on_main(self.require_intact)
        on_main(lambda: self.folder.describe(config))
        on_main(lambda: self.folder.record(**about, state="running", step=self.progress.step))

    def load(self, resuming: bool) -> None:
        weights, moments = {}, {}  # filled on the first process

        def read() -> tuple[Progress, tuple[float, int] | None]:
            if resuming:
                state = self.read_own(weights)
                moments.update(state.optimizer)
                return state.progress, state.scaler
            if self.trainer.config.start.init_from:
                self.read_foreign(weights)
            return Progress(), None

        self.progress, scaler = self.trainer.runtime.on_main(read)
        if resuming or self.trainer.config.start.init_from:
            self.trainer.load_weights(weights)
        if scaler:
            self.trainer.load_state(moments, scaler)
            self.last_step = self.progress.step

    def read_own(self, weights: dict) -> TrainerState:
        """This run's newest whole checkpoint."""
        found = checkpoint.newest(self.folder.path, self.tell)
        state = checkpoint.load_trainer(found)
        if state.data != self.dataset.fingerprint:
            raise UserError(f"--resume: {self.dataset.path} is not the data that this run has trained on")
        if found.step > self.trainer.config.optim.max_iters:
            raise UserError(
                f"--resume: {self.folder.path} is at step {found.step} already, beyond --max-iters "
                f"{self.trainer.config.optim.max_iters}"
            )
        changes = allowed_changes(self.trainer.config, state.config, found.step)
        weights.update(checkpoint.read_model(found.path)[0])
        checkpoint.check_weights(self.trainer.model, weights, found.path)
        self.trainer.check_state(state.optimizer, found.path)
        for change in changes:
            self.tell(change)
        self.tell(f"resuming {self.folder.path} at step {found.step}")
        return state

    def read_foreign(self, weights: dict) -> None:
        """The weights, and nothing else, that --init-from names."""
        path = checkpoint.find(self.trainer.config.start.init_from)
        found, about = checkpoint.read_model(path)
        checkpoint.check_weights(self.trainer.model, found, path)
        theirs, ours = about["tokenizer"], self.dataset.meta.get("tokenizer")
        if theirs and ours and theirs != ours:
            raise UserError(
                f"--init-from: {path} was trained on ids of another tokenizer than {self.dataset.path} holds"
            )
        if not (theirs and ours):
            known, size = self.trainer.config.model.vocab_size, self.dataset.vocab_size
            self.tell(
                f"warning: {self.dataset.path if theirs else path} does not say what its token ids mean; the model "
                f"knows {known:,} and the data have {size or 'an unknown number'}: unless they mean the same, what "
                "the model has learned is lost on these data"
            )
        for name, value in asdict(self.trainer.config.model).items():
            if about["model"].get(name, value) != value:
                self.tell(f"{name} was {about['model'][name]} in {path} and is {value} here")
        weights.update(found)
        self.tell(f"weights from {path}")

    def overdue(self) -> bool:
        """Whether checkpoint_minutes have passed since the last checkpoint."""
        return time.monotonic() - self.last_time >= 60 * self.trainer.config.run.checkpoint_minutes > 0

    def save(self, tracker: Tracker | None = None) -> None:
        """A checkpoint of this step, unless it has one; a disk that fails is told, and training goes on."""
        if tracker:  # a run that resumes here does not give wandb these rows again
            tracker.hand_over()
            self.progress.wandb_id = tracker.wandb_id
        if self.last_step == self.progress.step:
            return
        weights, state = self.state(self.trainer.config, self.progress)
        self.last_step, self.last_time = self.progress.step, time.monotonic()
        if self.trainer.runtime.is_main:
            self.write(weights, state)

    def state(
        self, config: Config, progress: Progress, kind: type[TrainerState] = TrainerState, **more: Any
    ) -> tuple[dict, TrainerState | None]:
        """(weights, the rest) of the trainer as it is now; whole on the first process, None on others. A collective."""
        weights, moments, scaler = self.trainer.state()
        if not self.trainer.runtime.is_main:
            return weights, None
        data = self.dataset.fingerprint
        return weights, kind(progress, scaler, moments, asdict(config), data, **more)

    @property
    def header(self) -> dict[str, Any]:
        """What model.safetensors says of itself."""
        return checkpoint.about(self.trainer.model, self.dataset.meta.get("tokenizer"))

    def write(self, weights: dict, state: TrainerState) -> None:
        config, progress = self.trainer.config, self.progress
        val_loss = progress.val_loss if progress.val_step == progress.step else None
        try:
            with contextlib.suppress(FileNotFoundError):  # rows before the checkpoint that counts on them
                sync(self.folder.path / "metrics.jsonl")
            checkpoint.save(
                self.folder.path, weights, self.header, state, val_loss, config.run.keep_checkpoints
            )
            self.folder.renew(config)
            self.folder.record(step=progress.step)
            self.intact = True
        except (OSError, UserError) as e:
            self.intact, self.problem = False, getattr(e.__cause__ or e, "strerror", None) or str(e)
            self.tell(
                f"the checkpoint of step {progress.step} could not be written to {self.folder.path} "
                f"({self.problem}); what was saved before is untouched, and the next interval tries again"
            )

    def require_intact(self) -> None:
        if not self.intact:
            raise UserError(f"{self.folder.path} cannot take a checkpoint: {self.problem}")


def allowed_changes(config: Config, saved: dict[str, Any], step: int) -> list[str]:
    """A sentence for each harmless change of a resumed run's configuration. Raises UserError that names the others."""
    allowed, refused = [], []
    for section, fields in asdict(config).items():
        defaults = asdict(SECTIONS[section]())  # a field that the run's version did not have yet
        for name, value in fields.items():
            before = saved.get(section, {}).get(name, defaults[name])
            if section == "start" or value == before:
                continue
            if name in MAY_CHANGE[section]:
                allowed.append(f"{name} was {before} and is {value} from here on")
            else:
                refused.append(f"{name} was {before} and is now {value}")
            if name == "max_iters" and step:
                then = learning_rate(step - 1, dataclasses.replace(config.optim, max_iters=before))
                now = learning_rate(step, config.optim)
                allowed[-1] += f": the learning rate was {then:.3g} at step {step} and goes on at {now:.3g}"
    if refused:
        raise UserError(
            f"--resume: {', '.join(refused)}, which would be another run; "
            "go on from its own config.toml, or start a new run with --init-from"
        )
    return allowed


class StopRequest:
    """While entered, SIGTERM, SIGINT and SIGUSR1 are remembered for the end of the step; a second SIGINT kills."""

    def __init__(self):
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "StopRequest":
        # A signal that is ignored stays so: a shell starts background jobs with SIGINT ignored.
        taken = [s for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
        self.before = {s: signal.signal(s, self.remember) for s in taken}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # which needs no Python to run, unlike a handler
            if os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):  # nobody reads it
                    os.write(2, b"\nsaving at the end of this step; once more to exit without\n")

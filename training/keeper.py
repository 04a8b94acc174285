"""What makes a run go on: how far it is, and the checkpoints that say so."""

import time
from dataclasses import asdict

from base.cli import UserError
from data import Dataset
from training import checkpoint, model_file
from training.checkpoint import Progress, TrainerState
from training.folder import RunFolder, check_same_run
from training.trainer import Trainer


class Keeper:
    """Restores and saves a run; the first process alone reads and writes, and all exchange what they hold.

    intact: whether the last checkpoint could be written, on the first process.
    """

    def __init__(self, trainer: Trainer, dataset: Dataset, folder: RunFolder, tell):
        self.trainer, self.dataset, self.folder, self.tell = trainer, dataset, folder, tell
        self.progress, self.intact = Progress(), True
        self.last_step, self.last_time = -1, time.monotonic()

    def begin(self, resuming: bool) -> None:
        """Loads what the run starts from, and makes its folder ready. Raises UserError or UserError.

        A new run saves itself once before it trains, so that a disk that cannot take a checkpoint is told now.
        """
        on_main, config = self.trainer.runtime.on_main, self.trainer.config
        self.load(resuming)
        on_main(lambda: self.folder.prepare(resuming, self.progress.step))
        if not resuming:
            self.save()
            on_main(self.require_intact)
        on_main(lambda: self.folder.describe(config))

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
        check_same_run(self.trainer.config, state.config, self.tell)
        weights.update(model_file.read_model(found.path)[0])
        model_file.check_weights(self.trainer.model, weights, found.path)
        self.trainer.check_state(state.optimizer, found.path)
        self.tell(f"resuming {self.folder.path} at step {found.step}")
        return state

    def read_foreign(self, weights: dict) -> None:
        """The weights, and nothing else, that --init-from names."""
        path = checkpoint.find(self.trainer.config.start.init_from)
        found, about = model_file.read_model(path)
        model_file.check_weights(self.trainer.model, found, path)
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

    def save(self) -> None:
        """A checkpoint of this step, unless it has one; a disk that fails is told, and training goes on."""
        if self.last_step == self.progress.step:
            return
        weights, moments, scaler = self.trainer.state()
        self.last_step, self.last_time = self.progress.step, time.monotonic()
        if not self.trainer.runtime.is_main:
            return
        config, progress = self.trainer.config, self.progress
        state = TrainerState(
            progress=progress,
            scaler=scaler,
            optimizer=moments,
            config=asdict(config),
            data=self.dataset.fingerprint,
        )
        about = model_file.about(self.trainer.model, self.dataset.meta.get("tokenizer"))
        val_loss = progress.val_loss if progress.val_step == progress.step else None
        try:
            self.folder.sync_metrics()
            checkpoint.save(self.folder.path, weights, about, state, val_loss, config.run.keep_checkpoints)
            self.folder.renew(config)
            self.intact = True
        except (OSError, UserError) as e:
            self.intact, self.problem = False, getattr(e, "strerror", None) or str(e)
            self.tell(
                f"the checkpoint of step {progress.step} could not be written to {self.folder.path} "
                f"({self.problem}); what was saved before is untouched, and the next interval tries again"
            )

    def require_intact(self) -> None:
        if not self.intact:
            raise UserError(f"{self.folder.path} cannot take a checkpoint: {self.problem}")

"""What makes a run go on: how far it is, and the checkpoints that say so."""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from configs import ConfigError
from data import Dataset
from training import checkpoint, folder
from training.trainer import Trainer

KEPT = 2  # newest checkpoints kept beside the best


@dataclass
class Progress:
    """How far a run is; what a checkpoint holds beside tensors."""

    step: int = 0
    best_loss: float = math.inf
    val_loss: float = math.inf
    wandb_id: str | None = None


class Keeper:
    """Restores and saves a run; all processes gather and load, the first one writes."""

    def __init__(self, trainer: Trainer, dataset: Dataset, run_dir: Path, tell):
        self.trainer, self.dataset, self.run_dir, self.tell = trainer, dataset, run_dir, tell
        self.progress = Progress()

    def begin(self) -> None:
        """Loads what the run starts from: its own newest checkpoint, other weights, or nothing."""
        start = self.trainer.config.start
        if start.init_from:
            path = checkpoint.find(start.init_from)
            weights, _ = checkpoint.read_model(path)
            self.trainer.load_weights(weights, path)
            self.tell(f"weights from {path}")
        if start.resume:
            found = checkpoint.newest(self.run_dir, self.tell)
            state = checkpoint.load_trainer(found)
            folder.check_same_run(self.trainer.config, state["config"], self.tell)
            if state["data"] != self.dataset.fingerprint:
                raise ConfigError(
                    f"--resume: {self.dataset.path} is not the data that this run has trained on"
                )
            self.trainer.load_weights(checkpoint.read_model(found.path)[0], found.path)
            self.trainer.load_state(state)
            self.progress = Progress(**{f.name: state[f.name] for f in fields(Progress)})
            self.tell(f"resuming {self.run_dir} at step {self.progress.step}")

    def save(self) -> None:
        weights, state = self.trainer.state()
        if not self.trainer.runtime.is_main:
            return
        state |= asdict(self.progress) | {"config": asdict(self.trainer.config)}
        state |= {"format": checkpoint.FORMAT, "data": self.dataset.fingerprint}
        about = checkpoint.about(self.trainer.model, self.dataset.meta.get("tokenizer"))
        checkpoint.save(self.run_dir, weights, about, state, self.progress.val_loss, KEPT)

"""A run's folder: what it holds, who may take it, and whether a resumed run is still the same run."""

import contextlib
import dataclasses
import errno
import fcntl
import os
import shutil
import socket
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from base.cli import UserError
from configs import SECTIONS, Config, RunConfig, StartConfig, to_toml
from training import checkpoint
from training.tracker import cut_after

MAY_CHANGE = {  # on resume; everything else decides what the run computes
    "model": {"kernel"},
    "data": {"dataset"},  # where it lies: the fingerprint says whether it is the same data
    "optim": {"max_iters", "micro_batch_size"},
    "run": {f.name for f in dataclasses.fields(RunConfig)} - {"seed"},
}
UNFINISHED = {
    "checkpoints",
    ".config.toml",
    ".launch",
    ".overwritten",
}  # what a start leaves that is killed too early


class RunFolder:
    """OUT/RUN. It holds a run as soon as config.toml is there, and that run then has a checkpoint."""

    def __init__(self, config: Config):
        self.path = Path(config.run.out_dir) / config.run.run_name
        self.lock: int | None = None
        self.described = False

    def choose(self, start: StartConfig) -> bool:
        """Whether to resume. Raises UserError if the folder holds something that no flag says what to do with."""
        with writing(self.path):
            return self.chosen(start)

    def chosen(self, start: StartConfig) -> bool:
        path, is_run = self.path, self.is_run()
        if path.exists() and not path.is_dir():
            raise UserError(
                f"{path} is a file, and the run needs a folder of that name; pass another --run-name"
            )
        if start.resume and not is_run:
            raise UserError(f"--resume: {path} holds no run")
        if is_run:
            if not (start.resume or start.overwrite or self.restarted()):
                raise UserError(
                    f"{path} already holds a run; pass --resume, --overwrite or another --run-name"
                )
            self.take()
        elif path.exists() and any(p.name not in UNFINISHED for p in path.iterdir()):
            raise UserError(f"{path} holds files that are not a run's; pass another --run-name")
        return is_run and (start.resume or self.restarted())

    def is_run(self) -> bool:
        """Whether the folder holds a run of ours, if only its checkpoints: a config.toml has many programs."""
        if any(checkpoint.step_of(path) for path in checkpoint.folders(self.path)):
            return True
        try:
            return {"model", "run"} <= tomllib.loads((self.path / "config.toml").read_text("utf-8")).keys()
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
        if self.lock is not None:
            return
        self.lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno == errno.EWOULDBLOCK:  # others: a file system without locks
                raise UserError(f"{self.path} is being trained by another process") from None

    def release(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
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
            else:
                self.empty()
            (self.path / ".launch").write_text(launch(), encoding="utf-8")

    def empty(self) -> None:
        """Deletes what the folder holds: all or, where something cannot be moved, nothing."""
        aside = self.path / ".overwritten"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(exist_ok=True)
        moved: list[Path] = []
        try:
            entries = [p for p in self.path.iterdir() if p != aside]
            for entry in sorted(
                entries, key=lambda p: p.name not in ("config.toml", ".launch")
            ):  # half a run is none
                entry.rename(aside / entry.name)
                moved.append(entry)
        except OSError:
            for entry in moved:
                (aside / entry.name).rename(entry)
            aside.rmdir()
            raise
        shutil.rmtree(aside, ignore_errors=True)

    def renew(self, config: Config) -> None:
        """After a checkpoint: if somebody has moved or deleted the folder, the new one is a run, too."""
        if self.described and not (self.path / "config.toml").exists():
            self.release()
            self.take()
            (self.path / ".launch").write_text(launch(), encoding="utf-8")
            self.describe(config)

    def describe(self, config: Config) -> None:
        """Writes config.toml."""
        self.described = True
        with writing(self.path):
            temporary = self.path / ".config.toml"
            temporary.write_text(to_toml(config), encoding="utf-8")
            checkpoint.sync(temporary)
            temporary.replace(self.path / "config.toml")
            checkpoint.sync(self.path)

    def sync_metrics(self) -> None:
        """The rows up to a checkpoint are on the disk before it is: a resumed run does not write them again."""
        with contextlib.suppress(FileNotFoundError):
            checkpoint.sync(self.path / "metrics.jsonl")


def launch() -> str:
    """Names the torchrun that has started this process, the same after its restarts; empty without torchrun.

    torchrun's own count of restarts would not do: one that another machine has caused is not counted.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    agent, born = os.getppid(), ""
    with contextlib.suppress(OSError):  # Linux; a number of a process alone may come again
        born = Path(f"/proc/{agent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"{socket.gethostname()}:{agent}:{born}"


@contextlib.contextmanager
def writing(path: Path):
    try:
        yield
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror}") from None


def check_same_run(config: Config, saved: dict[str, Any], tell) -> None:
    """Tells harmless changes of a resumed run's configuration and raises UserError for the others, by name."""
    refused = []
    for section, fields in asdict(config).items():
        defaults = asdict(SECTIONS[section]())  # a field that the run's version did not have yet
        for name, value in fields.items():
            before = saved.get(section, {}).get(name, defaults[name])
            if section == "start" or value == before:
                continue
            if name in MAY_CHANGE[section]:
                tell(f"{name} was {before} and is {value} from here on")
            else:
                refused.append(f"{name} was {before} and is now {value}")
    if refused:
        raise UserError(
            f"--resume: {', '.join(refused)}, which would be another run; "
            "go on from its own config.toml, or start a new run with --init-from"
        )

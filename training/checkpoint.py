"""Checkpoints: whole or absent, the same whatever the number of processes, and never unpickled.

    out/RUN/checkpoints/step_00001000/
        model.safetensors   weights by name; the header carries the model's configuration and the tokenizer
        trainer.pt          optimizer, loss scale, progress, configuration; plain containers and tensors
        manifest.json       step, validation loss and the checksum of each file
    out/RUN/checkpoints/latest, best   links for people; the program itself reads the manifests

A checkpoint is written under a temporary name, synced, and renamed, so one that has its name is whole. Names
that begin with a dot are unfinished work (`.writing_*`, `.deleting_*`), which the next start clears away.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from torch import Tensor

from base.cli import UserError
from model import GPT, ModelConfig
from training.model_file import check_weights, model_weights, read_model, save_model, sketch

FORMAT = 1
FILES = ("model.safetensors", "trainer.pt")


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Checkpoint:
    """A checkpoint on disk whose manifest is whole. val_loss: None where this step was not evaluated."""

    path: Path
    step: int
    val_loss: float | None
    sha256: dict[str, str]


@dataclass
class Progress:
    """How far a run is. val_loss is of step val_step, the last that was evaluated."""

    step: int = 0
    val_loss: float = math.inf
    val_step: int = -1
    best_loss: float = math.inf
    wandb_id: str | None = None

    def evaluated(self, loss: float) -> bool:
        """Notes the validation loss of this step; whether it is the best so far."""
        self.val_loss, self.val_step = loss, self.step
        improved = loss < self.best_loss
        self.best_loss = min(self.best_loss, loss)
        return improved


PLAIN = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


@dataclass(config=PLAIN)
class TrainerState:
    """What trainer.pt holds, in plain containers that `torch.load(weights_only=True)` accepts."""

    progress: Progress
    scaler: tuple[float, int]
    """The scale of the loss, and the good steps since it was last halved."""
    optimizer: dict[str, dict[str, Tensor]]
    """By parameter, then by moment."""
    config: dict[str, dict[str, bool | int | float | str | None]]
    data: str
    """Fingerprint of the data."""


State = TypeVar("State", bound=TrainerState)


def warn(message: str) -> None:
    print(message, file=sys.stderr)


def save(
    run_dir: Path,
    weights: dict[str, Tensor],
    about: dict[str, Any],
    state: TrainerState,
    val_loss: float | None,
    keep: int,
) -> Path:
    """Writes the checkpoint of step `state.progress.step`; deletes all but the best and the newest `keep`.

    weights: tensors by name. about: {"model": ..., "tokenizer": ...}, JSON. val_loss: of exactly this step, or
    None. Raises OSError when the disk fails, or when there is this step already, and leaves all as it was.
    """
    final = run_dir / "checkpoints" / f"step_{state.progress.step:08d}"
    with writing(final) as folder:
        write(folder, weights, about, state, val_loss)
    tidy(run_dir, keep)
    return final


@contextlib.contextmanager
def writing(final: Path, replacing: bool = False) -> Iterator[Path]:
    """A folder to write into. What it holds at the end is synced and renamed to `final`; after a failure it is gone.

    replacing: what `final` holds is deleted, but only then.
    """
    temporary = final.with_name(f".writing_{final.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for file in sorted(temporary.iterdir()):
            sync(file)
        sync(temporary)
        if replacing:
            shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write(path: Path, weights: dict, about: dict, state: TrainerState, val_loss: float | None) -> None:
    try:
        save_model(path, weights, about)
        torch.save(vars(state) | {"progress": asdict(state.progress)}, path / "trainer.pt")
    except (SafetensorError, RuntimeError) as e:  # how the two libraries report a failed write
        raise OSError(str(e).partition("\n")[0]) from None
    body = {"format": FORMAT, "step": state.progress.step, "val_loss": val_loss}
    body["sha256"] = {name: digest(path / name) for name in FILES}
    manifest = {"body": body, "sha256": digest_of(body)}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder to sync it
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def digest_of(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def remove(path: Path) -> None:
    """Deletes a checkpoint: first its name, so that a kill in between leaves no half of one under it."""
    doomed = path.with_name(f".deleting_{path.name}")
    with contextlib.suppress(OSError):
        os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's name says; None for what is no name of ours, such as a copy's."""
    found = re.fullmatch(r"step_(\d{8,})", path.name)
    return int(found[1]) if found else None


def folders(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, whole or not, oldest first."""
    found = [path for path in (run_dir / "checkpoints").glob("step_*") if step_of(path) is not None]
    return sorted(found, key=step_of)


def listed(run_dir: Path) -> list[Checkpoint]:
    """The checkpoints whose manifests are whole, oldest first."""
    found = []
    for path in folders(run_dir):
        with contextlib.suppress(UserError):
            found.append(read_manifest(path))
    return found


def by_loss(found: list[Checkpoint]) -> list[Checkpoint]:
    """Those with a finite validation loss, the best first, and of two equals the newer one."""
    evaluated = (c for c in found if c.val_loss is not None and math.isfinite(c.val_loss))
    return sorted(evaluated, key=lambda c: (c.val_loss, -c.step))


def tidy(run_dir: Path, keep: int) -> None:
    """Deletes what is neither the best nor among the newest `keep`, and points the two links."""
    folder, found = run_dir / "checkpoints", listed(run_dir)
    best = by_loss(found)[:1]
    for old in found[:-keep]:
        if old not in best:
            remove(old.path)
    for name, targets in (("latest", found[-1:]), ("best", best)):
        for target in targets:
            with contextlib.suppress(OSError):  # a file system without links
                link = folder / f".{name}"
                link.unlink(missing_ok=True)
                link.symlink_to(target.path.name)
                os.replace(link, folder / name)


def clean(run_dir: Path) -> None:
    """Removes what a killed save or deletion left behind."""
    for pattern in (".writing_*", ".deleting_*"):
        for stale in (run_dir / "checkpoints").glob(pattern):
            shutil.rmtree(stale, ignore_errors=True)


def set_aside(run_dir: Path, step: int) -> None:
    """Renames the checkpoints after `step`, from which the run goes on because they are damaged.

    Under their names they would count among the newest that are kept, and push out whole ones.
    """
    for path in folders(run_dir):
        if step_of(path) > step:
            aside = path.with_name(f"damaged_{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def read_manifest(path: Path) -> Checkpoint:
    """The checkpoint at `path`. Raises UserError, which says what is wrong with its manifest."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        body = manifest["body"]
        if digest_of(body) != manifest["sha256"]:
            raise UserError(f"{path}/manifest.json does not match its own checksum")
        if body["format"] != FORMAT:
            raise UserError(f"{path} has format {body['format']}, and this version reads format {FORMAT}")
        return Checkpoint(path, body["step"], body["val_loss"], body["sha256"])
    except FileNotFoundError:
        raise UserError(f"{path} has no manifest.json") from None
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}/manifest.json is damaged") from None


def check(path: Path) -> Checkpoint:
    """The checkpoint at `path` with every checksum verified. Raises UserError, which says what is wrong."""
    found = read_manifest(path)
    for name in FILES:
        file = path / name
        if not file.is_file():
            raise UserError(f"{file} is missing")
        try:
            same = digest(file) == found.sha256.get(name)
        except OSError as e:
            raise UserError(f"{file} cannot be read ({e.strerror})") from None
        if not same:
            raise UserError(f"{file} does not match its checksum")
    return found


def newest(run_dir: Path, tell: Callable[[str], None] = warn) -> Checkpoint:
    """The newest whole checkpoint of a run; every damaged one that was passed over is told."""
    return select(run_dir, folders(run_dir)[::-1], tell)


def best(run_dir: Path, tell: Callable[[str], None] = warn) -> Checkpoint:
    """The whole checkpoint with the lowest validation loss."""
    return select(run_dir, [c.path for c in by_loss(listed(run_dir))], tell)


def select(run_dir: Path, paths: list[Path], tell: Callable[[str], None]) -> Checkpoint:
    damage = []
    for path in paths:
        try:
            found = check(path)
        except UserError as e:
            damage.append(e)
            continue
        for problem in damage:
            tell(f"passing over a damaged checkpoint: {problem}")
        return found
    raise UserError(f"{run_dir} holds no whole checkpoint" + "".join(f"; {d}" for d in damage))


def load_trainer(checkpoint: Checkpoint, kind: type[State] = TrainerState) -> State:
    """trainer.pt, with nothing unpickled but tensors and plain containers. Raises UserError."""
    file = checkpoint.path / "trainer.pt"
    try:
        state = kind(**torch.load(file, map_location="cpu", weights_only=True))
    except ValidationError as e:
        raise UserError(f"{file} is not what nanonorm saves: {e.errors()[0]['loc'][0]} is wrong") from None
    except Exception as e:  # torch.load raises nearly anything on a damaged file
        raise UserError(f"{file} is refused, as it holds more than tensors ({type(e).__name__})") from None
    if state.progress.step != checkpoint.step:
        raise UserError(f"{file} is of another step than the manifest beside it")
    return state


def find(directory: str | Path, which: str = "latest") -> Path:
    """The folder with model.safetensors that a run, a checkpoint or a converted model stands for."""
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory} {'is no folder' if directory.exists() else 'does not exist'}")
    if (directory / "checkpoints").is_dir():
        return {"latest": newest, "best": best}[which](directory).path
    if (directory / "manifest.json").exists():
        check(directory)
    return directory


def load_model(directory: str | Path, which: str = "latest") -> GPT:
    """The GPT of a run, a checkpoint or a converted model, in evaluation mode, on the CPU.

    It computes in float32, whatever it was trained in, on any machine.

    which: "latest" or "best", for a run. Raises UserError in one sentence.
    """
    path = find(directory, which)
    weights, about = read_model(path)
    check_weights(sketch(about["model"], weights, path), weights, path)
    model = GPT(ModelConfig(**about["model"] | {"dtype": "float32", "kernel": "auto"}))
    with torch.no_grad():
        for name, own in model_weights(model).items():
            own.copy_(weights[name])
    return model.eval()

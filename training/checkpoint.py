"""Checkpoints: whole or absent, the same whatever the number of processes, and never unpickled.

    out/RUN/checkpoints/step_00001000/
        model.safetensors   weights by name; the header carries the model's configuration and the tokenizer
        trainer.pt          optimizer, loss scale, step, best loss, wandb id, configuration; plain containers
        manifest.json       step, validation loss and the checksum of each file
    out/RUN/checkpoints/latest, best   links for people; the program itself reads the manifests

A checkpoint is written under a temporary name, synced, and renamed, so one that has its name is whole.
"""

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model import GPT, ModelConfig

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another model, in one sentence."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose manifest is whole."""

    path: Path
    step: int
    val_loss: float
    sha256: dict[str, str]


def save(run_dir: Path, weights: dict, about: dict, trainer: dict, val_loss: float, keep: int) -> Path:
    """Writes the checkpoint of step `trainer["step"]` and deletes all but the best and the newest `keep`.

    weights: tensors by name. about: {"model": ..., "tokenizer": ...}, JSON. Raises OSError, and leaves what was
    there as it was, when the disk fails.
    """
    folder = run_dir / "checkpoints"
    folder.mkdir(exist_ok=True)
    final = folder / f"step_{trainer['step']:08d}"
    temporary = folder / f".writing_{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        write(temporary, weights, about, trainer, val_loss)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        sync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    tidy(folder, keep)
    return final


def write(path: Path, weights: dict, about: dict, trainer: dict, val_loss: float) -> None:
    path.mkdir()
    save_model(path, weights, about)
    torch.save(trainer, path / "trainer.pt")
    body = {"format": FORMAT, "step": trainer["step"], "val_loss": val_loss}
    body["sha256"] = {name: digest(path / name) for name in ("model.safetensors", "trainer.pt")}
    manifest = {"body": body, "sha256": digest_of(body)}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for file in path.iterdir():
        sync(file)
    sync(path)


def save_model(path: Path, weights: dict, about: dict) -> None:
    """`path/model.safetensors`: contiguous weights, and `about` in the header."""
    contiguous = {name: t.detach().contiguous() for name, t in weights.items()}
    save_file(
        contiguous, path / "model.safetensors", metadata={"format": "pt", "nanonorm": json.dumps(about)}
    )


def model_weights(model: GPT) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, by name: the parameters, a tied one once, and BatchNorm's running statistics."""
    saved = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in saved}
    return {name: p.detach() for name, p in model.named_parameters()} | buffers


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


def tidy(folder: Path, keep: int) -> None:
    """Deletes what neither `best` nor the newest `keep` need, and points the two links."""
    found = [c for c in map(read_manifest, folder.glob("step_*")) if isinstance(c, Checkpoint)]
    found.sort(key=lambda c: c.step)
    best = min(found, key=lambda c: (c.val_loss, -c.step))
    for old in found[:-keep]:
        if old is not best:
            shutil.rmtree(old.path, ignore_errors=True)
    for name, target in (("latest", found[-1]), ("best", best)):
        with contextlib.suppress(OSError):  # a file system without links
            link = folder / f".{name}"
            link.unlink(missing_ok=True)
            link.symlink_to(target.path.name)
            os.replace(link, folder / name)


def clean(run_dir: Path) -> None:
    """Removes what a killed save left behind."""
    for stale in (run_dir / "checkpoints").glob(".writing_*"):
        shutil.rmtree(stale, ignore_errors=True)


def read_manifest(path: Path) -> Checkpoint | str:
    """The checkpoint at `path`, or what is wrong with its manifest."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        body = manifest["body"]
        if digest_of(body) != manifest["sha256"]:
            return f"{path}/manifest.json does not match its own checksum"
        if body["format"] != FORMAT:
            return f"{path} has format {body['format']}, and this version reads format {FORMAT}"
        return Checkpoint(path, body["step"], body["val_loss"], body["sha256"])
    except FileNotFoundError:
        return f"{path} has no manifest.json"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path}/manifest.json is damaged"


def check(path: Path) -> Checkpoint | str:
    """The checkpoint at `path` with every checksum verified, or what is wrong with it."""
    found = read_manifest(path)
    if isinstance(found, str):
        return found
    for name, expected in found.sha256.items():
        try:
            if digest(path / name) != expected:
                return f"{path / name} does not match its checksum"
        except OSError as e:
            return f"{path / name} cannot be read ({e.strerror})"
    return found


def newest(run_dir: Path, tell=print) -> Checkpoint:
    """The newest whole checkpoint of a run; every damaged one that was passed over is told."""
    return select(run_dir, sorted((run_dir / "checkpoints").glob("step_*"), reverse=True), tell)


def best(run_dir: Path, tell=print) -> Checkpoint:
    """The whole checkpoint with the lowest validation loss."""
    found = [
        c for c in map(read_manifest, (run_dir / "checkpoints").glob("step_*")) if isinstance(c, Checkpoint)
    ]
    return select(run_dir, [c.path for c in sorted(found, key=lambda c: (c.val_loss, -c.step))], tell)


def select(run_dir: Path, paths: list[Path], tell) -> Checkpoint:
    for path in paths:
        found = check(path)
        if isinstance(found, Checkpoint):
            return found
        tell(f"skipping a damaged checkpoint: {found}")
    raise CheckpointError(f"{run_dir} holds no whole checkpoint")


def load_trainer(checkpoint: Checkpoint) -> dict[str, Any]:
    """trainer.pt, with nothing unpickled but tensors and plain containers."""
    try:
        state = torch.load(checkpoint.path / "trainer.pt", map_location="cpu", weights_only=True)
        if state["step"] != checkpoint.step:
            raise CheckpointError(f"{checkpoint.path}/trainer.pt is of step {state['step']}")
        return state
    except CheckpointError:
        raise
    except Exception as e:  # torch.load raises nearly anything on a damaged file
        raise CheckpointError(f"{checkpoint.path}/trainer.pt is refused: {type(e).__name__}") from None


def read_model(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(weights by name, what the header says about model and tokenizer) of `path/model.safetensors`."""
    file = path / "model.safetensors"
    try:
        with safe_open(file, "pt") as f:
            about = json.loads((f.metadata() or {})["nanonorm"])
            return {name: f.get_tensor(name) for name in f.keys()}, about  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"{path} holds no checkpoint: there is no {file}") from None
    except KeyError:
        raise CheckpointError(
            f"{file} was not written by nanonorm; `python -m tools.convert` reads others"
        ) from None
    except (SafetensorError, OSError, ValueError) as e:
        raise CheckpointError(f"{file} is damaged: {e}") from None


def find(directory: str | Path, which: str = "latest") -> Path:
    """The folder with model.safetensors that a run, a checkpoint or a converted model stands for."""
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} does not exist")
    if (directory / "checkpoints").is_dir():
        return {"latest": newest, "best": best}[which](directory).path
    if (directory / "manifest.json").exists():
        found = check(directory)
        if isinstance(found, str):
            raise CheckpointError(found)
    return directory


def load_model(directory: str | Path, which: str = "latest") -> GPT:
    """The GPT of a run, a checkpoint or a converted model, in evaluation mode, on the CPU, float32.

    which: "latest" or "best", for a run. Raises CheckpointError in one sentence.
    """
    path = find(directory, which)
    weights, about = read_model(path)
    try:
        config = ModelConfig(**about["model"])
    except (KeyError, TypeError, ValidationError):
        raise CheckpointError(f"{path}/model.safetensors does not say which model it holds") from None
    with torch.device("meta"):
        check_weights(GPT(config), weights, path)  # before anything of a stranger's size is allocated
    model = GPT(config)
    with torch.no_grad():
        for name, own in model_weights(model).items():
            own.copy_(weights[name])
    return model.eval()


def check_weights(model: GPT, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Raises CheckpointError that names the first weight that is missing, unknown or of another shape."""
    own = model_weights(model)
    for name in sorted(own.keys() | weights.keys()):
        if name not in weights:
            raise CheckpointError(f"{path} lacks the weight {name}, which this model has")
        if name not in own:
            raise CheckpointError(f"{path} has a weight {name}, which this model does not")
        if own[name].shape != weights[name].shape:
            have, want = tuple(weights[name].shape), tuple(own[name].shape)
            raise CheckpointError(f"{path}: {name} has shape {have}, and this model wants {want}")


def about(model: GPT, tokenizer: dict) -> dict[str, Any]:
    """What the header of model.safetensors says."""
    return {"model": asdict(model.config), "tokenizer": tokenizer}


def read_about(path: Path) -> dict[str, Any]:
    """What the header of `path/model.safetensors` says: {"model": ..., "tokenizer": ...}."""
    return read_model(path)[1]

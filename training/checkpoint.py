"""Checkpoints: whole or absent, the same whatever the number of processes, and never unpickled.

    out/RUN/checkpoints/step_00001000/
        model.safetensors   weights by name; the header carries the model's configuration and the tokenizer
        trainer.pt          optimizer, loss scale, progress, configuration; plain containers and tensors
        manifest.json       step, validation loss and the checksum of each file
    out/RUN/checkpoints/latest, best   links for people; the program itself reads the manifests

A checkpoint is written under a temporary name, synced, and renamed, so one that has its name is whole. Names
that begin with a dot are unfinished work (`.writing_*`, `.deleting_*`), which the next start clears away.

Nothing in a checkpoint is trusted: what does not describe a model, or is not this model's, is refused in one sentence.
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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import kernels
from base.cli import UserError, explanation
from base.files import atomic_folder
from model import GPT, ModelConfig

FORMAT = 1
FILES = ("model.safetensors", "trainer.pt")
RENAMED = {
    "post": (".next_norm.", ".post_norm.")
}  # by placement: parts of weights' names, and what they are today
T = TypeVar("T")


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
    None. Raises UserError when the disk fails, or when there is this step already, and leaves all as it was.
    """
    final = run_dir / "checkpoints" / f"step_{state.progress.step:08d}"
    with atomic_folder(final) as folder:
        write(folder, weights, about, state, val_loss)
    tidy(run_dir, keep)
    return final


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


def is_own(path: Path) -> bool:
    """Whether what lies in `checkpoints` is written here, as a copy under another name is not."""
    name = path.name.removeprefix("damaged_")
    return name in ("latest", "best") or name.startswith(".") or step_of(path.with_name(name)) is not None


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
        state.optimizer = upgraded(state.optimizer, state.config.get("model", {}))
    except ValidationError as e:
        raise UserError(f"{file} is not what nanonorm saves: {e.errors()[0]['loc'][0]} is wrong") from None
    except Exception as e:  # torch.load raises nearly anything on a damaged file
        raise UserError(f"{file} is refused, as it holds more than tensors ({type(e).__name__})") from None
    if state.progress.step != checkpoint.step:
        raise UserError(f"{file} is of another step than the manifest beside it")
    return state


def save_model(path: Path, weights: dict, about: dict) -> None:
    """`path/model.safetensors`: contiguous weights, and `about` in the header."""
    # One entry: the library writes several in an order that changes, and equal models would differ in their bytes.
    save_tensors(path / "model.safetensors", weights, {"nanonorm": json.dumps(about)})


def save_tensors(file: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file with the permissions that any new file gets; the library's own is its owner's alone."""
    file.touch()
    mode = file.stat().st_mode
    save_file({name: t.detach().contiguous() for name, t in weights.items()}, file, metadata=metadata)
    with contextlib.suppress(OSError):  # a file system without permissions
        file.chmod(mode)


def model_weights(model: GPT) -> dict[str, Tensor]:
    """What a checkpoint holds, by name: the parameters, a tied one once, and BatchNorm's running statistics."""
    saved = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in saved}
    return {name: p.detach() for name, p in model.named_parameters()} | buffers


def read_model(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(weights by name, {"model": ..., "tokenizer": ...} from the header) of `path/model.safetensors`.

    Raises UserError.
    """
    with opened(path) as f:
        about = header(f, path)
        return upgraded({name: f.get_tensor(name) for name in f.keys()}, about["model"]), about  # noqa: SIM118


def upgraded(named: dict[str, T], described: dict[str, Any]) -> dict[str, T]:
    """Weights, or what belongs to them, of a model so described, under the names that they have today."""
    old, new = RENAMED.get(described.get("placement"), ("", ""))
    return {name.replace(old, new) if old else name: value for name, value in named.items()}


def read_about(path: Path) -> dict[str, Any]:
    """What the header of `path/model.safetensors` says, without its weights. Raises UserError."""
    with opened(path) as f:
        return header(f, path)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """`path/model.safetensors`, with what goes wrong in reading it as a UserError."""
    file = path / "model.safetensors"
    try:
        with safe_open(file, "pt") as f:
            yield f
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} holds no checkpoint: there is no {file}") from None
    except (SafetensorError, OSError, ValueError, RecursionError) as e:
        raise UserError(f"{file} is damaged: {str(e).partition(chr(10))[0]}") from None


def header(f: Any, path: Path) -> dict[str, Any]:
    text = (f.metadata() or {}).get("nanonorm")
    about = text and json.loads(text)
    file = path / "model.safetensors"
    if about is None:
        raise UserError(f"{file} was not written by nanonorm; `python -m tools.convert` reads others")
    if not (isinstance(about, dict) and isinstance(about.get("model"), dict) and "tokenizer" in about):
        raise UserError(f"{file} does not say which model and tokenizer it holds")
    return about


def sketch(described: dict[str, Any], weights: dict[str, Tensor], path: Path) -> GPT:
    """The model that a header describes, on the meta device, where a lie about its size costs nothing."""
    problem = f"{path}/model.safetensors describes a model that cannot be built"
    try:
        config = ModelConfig(**described)
    except (TypeError, ValidationError) as e:
        reason = explanation(e) if isinstance(e, ValidationError) else e
        raise UserError(f"{problem}: {reason}") from None
    return on_meta(config, weights, problem)


def on_meta(config: ModelConfig, weights: dict[str, Tensor], problem: str) -> GPT:
    """The model on the meta device. Raises UserError, beginning with `problem`, where it cannot have these weights."""
    if not config.vocab_size:
        raise UserError(f"{problem}: vocab_size is 0; it must be positive")
    if config.n_layer > len(weights):
        raise UserError(f"{problem}: n_layer is {config.n_layer}, but there are only {len(weights)} weights")
    kernels.import_triton()  # torch does, for this device
    try:
        with torch.device("meta"):
            return GPT(config)
    except (RuntimeError, OverflowError, TypeError):
        raise UserError(f"{problem}: it is too large") from None


def check_weights(model: GPT, weights: dict[str, Tensor], where: Path | str) -> None:
    """Raises UserError that names the first weight that is missing, unknown or of another shape."""
    own = model_weights(model)
    for name in sorted(own.keys() | weights.keys()):
        if name not in weights:
            raise UserError(f"{where} lacks the weight {name}, which this model has")
        if name not in own:
            raise UserError(f"{where} has a weight {name}, which this model does not")
        if own[name].shape != weights[name].shape:
            have, want = tuple(weights[name].shape), tuple(own[name].shape)
            raise UserError(f"{where}: {name} has shape {have}, and this model wants {want}")
        if own[name].is_floating_point() != weights[name].is_floating_point():
            raise UserError(f"{where}: {name} holds {weights[name].dtype}, and weights are floating-point")


def about(model: GPT, tokenizer: dict) -> dict[str, Any]:
    """What the header of model.safetensors says."""
    return {"model": asdict(model.config), "tokenizer": tokenizer}


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

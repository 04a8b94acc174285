"""model.safetensors: a model's weights by name, and in its header what they are the weights of.

Nothing in it is trusted: what does not describe a model, or is not this model's, is refused in one sentence.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from base.cli import UserError
from model import GPT, ModelConfig


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
        return {name: f.get_tensor(name) for name in f.keys()}, header(f, path)  # noqa: SIM118


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
        reason = e.errors()[0]["msg"] if isinstance(e, ValidationError) else e
        raise UserError(f"{problem}: {reason}") from None
    if not config.vocab_size or config.n_layer > len(weights):
        raise UserError(f"{problem} from its weights")
    try:
        with torch.device("meta"):
            return GPT(config)
    except (RuntimeError, OverflowError):
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

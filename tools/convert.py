"""Models of other projects in and out, and other weights for the same logits.

python -m tools.convert from-hf openai-community/gpt2 -o out/gpt2
python -m tools.convert from-nanogpt ckpt.pt -o out/nano --tokenizer gpt2
python -m tools.convert to-hf out/run -o out/exported
python -m tools.convert fold out/run -o out/run-folded
python -m tools.convert ln-to-rms out/run -o out/run-rms

What comes in or is rewritten is a folder with model.safetensors, for tools.sample and train.py --init-from.
`docs/interchange.md` says which models convert.
"""

import contextlib
import dataclasses
import json
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from safetensors.torch import load_file

from base.cli import STRICT, UserError, require, run
from base.files import atomic_folder
from base.flags import Positional, Short, options
from configs import flags_of
from data import load_tokenizer
from data.tokenizer import TOKENIZER_JSON, CharTokenizer
from model import GPT, ModelConfig
from tools import fold as folding
from tools.families import NANOGPT, Family
from tools.interchange import (
    OF_A_RUN,
    Weights,
    family_for,
    family_of,
    our_config,
    our_weights,
    resolved,
    their_config,
    their_weights,
)
from tools.vocabulary import BESIDE, FILES, SIZES, recognize, tokenizer_files
from training.checkpoint import find, load_model, model_weights, read_about, save_model, save_tensors

WRITTEN = ("model.safetensors", "config.json", *BESIDE)  # what a conversion writes, and may replace


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Target:
    """Where a conversion writes."""

    out: Annotated[str, Short("-o")]
    """The folder to make."""
    overwrite: bool = False
    """Replace a converted model that the folder holds; a folder with any other file is left alone."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FromHf(Target):
    """A GPT-2, Llama, Qwen3, OLMo 2 or Gemma model of transformers, from a folder or from the Hugging Face hub."""

    source: Positional[str]
    """A folder with config.json and safetensors, or a model's name on the hub."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FromNanogpt(Target):
    """nanoGPT's ckpt.pt. Nothing in it is executed."""

    source: Positional[str]
    """The file."""
    tokenizer: Literal["none", "byte", "char", "gpt2"] = "none"
    """What its token ids mean, which the file does not say."""
    corpus: str = ""
    """The text whose characters are the vocabulary, for --tokenizer char."""

    def __post_init__(self):
        require(
            (self.tokenizer == "char") == bool(self.corpus),
            "--tokenizer char and --corpus FILE, whose characters it consists of, go together",
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ours(Target):
    run: Positional[str]
    """A run, a checkpoint or a converted model."""
    checkpoint: Literal["latest", "best"] = "latest"
    """Which checkpoint of a run."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ToHf(Ours):
    """A folder that transformers loads, in the family that expresses the model."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Fold(Ours):
    """The same logits with the gains of norms, and LayerNorm's biases, inside the linears that read them."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LnToRms(Ours):
    """A pre-norm LayerNorm model as the RMSNorm model with the same logits."""


Command = FromHf | FromNanogpt | ToHf | Fold | LnToRms


def from_hf(asked: FromHf) -> None:
    folder = local_folder(asked.source)
    theirs = read_json(folder / "config.json")
    family = family_of(theirs)
    config, weights = into_ours(family, theirs, read_safetensors(folder))
    tokenizer, why_not = recognize(folder)
    with written(asked, folder) as out:
        save(out, config, weights, tokenizer)
        for file in (folder / name for name in BESIDE):
            if tokenizer and tokenizer["name"] == TOKENIZER_JSON and file.exists():
                shutil.copyfile(file, out / file.name)
    print(f"{asked.out}: a {family.name} model, {summary(config)}")
    print(f"tokenizer {tokenizer['name']}" if tokenizer else f"no tokenizer: {why_not}")
    say_how_to_finetune(asked.out, config, tokenizer)


def from_nanogpt(asked: FromNanogpt) -> None:
    theirs, weights = read_nanogpt(Path(asked.source))
    config, weights = into_ours(NANOGPT, theirs, weights)
    tokenizer = named_tokenizer(asked, config.vocab_size)
    with written(asked, Path(asked.source)) as out:
        save(out, config, weights, tokenizer)
    print(f"{asked.out}: a nanoGPT model, {summary(config)}")
    say_how_to_finetune(asked.out, config, tokenizer)


def to_hf(asked: ToHf) -> None:
    model, meta, path = load(asked)
    family = family_for(model.config)
    theirs = their_config(family, model.config)
    weights = their_weights(family, model.config, model_weights(model))
    files, separator, note = vocabulary_files(meta, model.config.block_size)
    theirs |= {"bos_token_id": separator, "eos_token_id": separator, "pad_token_id": None}
    with written(asked, path) as out:
        (out / "config.json").write_text(json.dumps(theirs, indent=2) + "\n", encoding="utf-8")
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
        save_tensors(out / "model.safetensors", weights, {"format": "pt"})
    print(f"{asked.out}: a {family.name} model for transformers, {summary(model.config)}\n{note}")


def rewrite(asked: Fold | LnToRms) -> None:
    model, meta, path = load(asked)
    convert = folding.fold if isinstance(asked, Fold) else folding.ln_to_rms
    converted = convert(model)
    with written(asked, path) as out:
        save(out, converted.config, converted.weights, meta)
    print("\n".join([f"{asked.out}: {summary(converted.config)}", *converted.notes]))


def load(asked: Ours) -> tuple[GPT, dict | None, Path]:
    """(model, its tokenizer's meta, the folder it came from)."""
    path = find(asked.run, asked.checkpoint)
    return load_model(path), read_about(path).get("tokenizer"), path


def into_ours(family: Family, theirs: dict[str, Any], weights: Weights) -> tuple[ModelConfig, Weights]:
    """Their model as ours, every shape checked, and every number of its configuration given."""
    declared = ModelConfig(**resolved(our_config(family, theirs)))
    config, weights = our_weights(family, declared, theirs, weights)
    if config.tie_embeddings != declared.tie_embeddings:
        print("the model says that its head is its embedding, but holds another one: tie_embeddings is False")
    return config, weights


def save(out: Path, config: ModelConfig, weights: Weights, tokenizer: dict | None) -> None:
    """A folder that `load_model` reads."""
    save_model(out, weights, {"model": dataclasses.asdict(config), "tokenizer": tokenizer})


def vocabulary_files(meta: dict | None, block_size: int) -> tuple[dict[str, str], int | None, str]:
    """(tokenizer files by name, the separator's id, a sentence); no files where they cannot be had or written."""
    try:
        tokenizer = load_tokenizer(meta)
        files = tokenizer_files(tokenizer, block_size)
    except UserError as e:
        return {}, None, f"no tokenizer files: {e}"
    return files, tokenizer.separator, f"with the tokenizer {tokenizer.name}"


def named_tokenizer(asked: FromNanogpt, vocab_size: int) -> dict[str, Any] | None:
    """The meta of the tokenizer that the flags name. nanoGPT's characters are those of its corpus, sorted.

    Raises UserError where it has ids that the model does not know; a vocabulary may be padded, as GPT-2's often is.
    """
    if asked.tokenizer == "none":
        return None
    if asked.tokenizer != "char":
        meta, size, name = {"name": asked.tokenizer}, SIZES[asked.tokenizer], asked.tokenizer
    else:
        try:
            tokenizer = CharTokenizer(Path(asked.corpus).read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"{asked.corpus} cannot be read: {e}") from None
        meta, size, name = tokenizer.meta, tokenizer.vocab_size, asked.corpus
    if size > vocab_size or (asked.tokenizer == "char" and size < vocab_size):
        raise UserError(f"{name} has {size} different tokens, but the model's vocabulary has {vocab_size}")
    return meta


def local_folder(source: str) -> Path:
    """The folder itself, or the snapshot of a model on the hub. Raises UserError where there is neither."""
    if Path(source).is_dir():
        return Path(source)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        raise UserError(f"{source} is neither a folder nor the name of a model on the Hugging Face hub")
    from huggingface_hub import snapshot_download  # comes with datasets; slow to import

    try:
        return Path(snapshot_download(source, allow_patterns=["config.json", "*.safetensors*", *FILES]))
    except Exception as e:  # the hub's, the network library's and the file system's all have their own kinds
        raise UserError(
            f"{source} is no folder here, and the Hugging Face hub gave no model of that name ({type(e).__name__})"
        ) from None


def read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{file} does not exist, so {file.parent} holds no model of transformers") from None
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{file} cannot be read: {e}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no JSON object, but {str(found)[:40]}")
    return found


def read_safetensors(folder: Path) -> Weights:
    """All weights of model.safetensors, or of the shards that its index names."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        table = read_json(index).get("weight_map")
        found = list(table.values()) if isinstance(table, dict) else []
        if not found or not all(isinstance(name, str) for name in found):
            raise UserError(f"{index} has no weight_map that gives the file of each weight")
        names = sorted(set(found))
    weights: Weights = {}
    for name in names:
        try:
            weights |= load_file(folder / name)
        except FileNotFoundError:
            raise UserError(
                f"{folder / name} does not exist; weights are read from safetensors only"
            ) from None
        except (SafetensorError, OSError) as e:
            raise UserError(f"{folder / name} cannot be read: {e}") from None
    return weights


def read_nanogpt(file: Path) -> tuple[dict[str, Any], Weights]:
    """(what GPT-2's config.json would say, weights) of a ckpt.pt, of which only tensors and plain values are read.

    The MLP is the exact GELU of nanoGPT since 2023; the norm's eps is the 1e-5 of its source.
    """
    try:
        ckpt = torch.load(file, map_location="cpu", weights_only=True)
        args, weights = ckpt["model_args"], ckpt["model"]
        theirs = {name: args[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
        theirs |= {"n_positions": args["block_size"], "bias": args.get("bias", True)}
        if not all(isinstance(n, str) and isinstance(t, torch.Tensor) for n, t in weights.items()):
            raise TypeError
    except FileNotFoundError:
        raise UserError(f"{file} does not exist") from None
    except Exception as e:  # torch.load raises nearly anything on a file that is not what it expects
        raise UserError(f"{file} is not nanoGPT's ckpt.pt ({type(e).__name__})") from None
    return theirs | {"activation_function": "gelu"}, weights


def check_free(asked: Target) -> None:
    """Raises UserError where `asked.out` holds anything but what a conversion writes, which alone is replaced."""
    out = Path(asked.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder")
    held = sorted(f.name for f in out.iterdir()) if out.exists() else []
    kept = [name for name in held if name not in WRITTEN or not (out / name).is_file()]
    if "checkpoints" in held or "trainer.pt" in held:
        what = "a run" if "checkpoints" in held else "a checkpoint"
        raise UserError(f"--out {out} is {what}, which no conversion replaces; choose another folder")
    if kept or (held and "model.safetensors" not in held):
        first = (kept or held)[0]
        raise UserError(
            f"--out {out} holds other files than a model's, such as {first}; choose another folder"
        )
    if held and not asked.overwrite:
        raise UserError(f"--out {out} already holds a model; pass --overwrite to replace it")


@contextlib.contextmanager
def written(asked: Target, source: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `asked.out` when all is written. Raises UserError."""
    out = Path(asked.out)
    if out.resolve() in (source.resolve(), *source.resolve().parents):
        raise UserError(f"--out {out} holds what is being converted; choose another folder")
    with atomic_folder(out, replace=True) as folder:
        try:
            yield folder
        except SafetensorError as e:  # how it reports a full disk
            raise UserError(f"{out} cannot be written: {e}") from None
        check_free(asked)  # for what has come in the meantime


def summary(config: ModelConfig) -> str:
    return (
        f"{config.norm} {config.placement}, {config.n_layer} layers, {config.n_embd} wide, "
        f"context {config.block_size}, vocabulary {config.vocab_size}"
    )


def say_how_to_finetune(out: str, config: ModelConfig, tokenizer: dict | None) -> None:
    """The command that trains on, with every flag of the architecture: a recipe has values of its own for them.

    The recipe's data set are bytes. For another tokenizer the command names one that is still to be made.
    """
    words = ["configs/quickstart.toml", "--run-name", "auto", "--init-from", out]
    if tokenizer is None:
        print("YOURS, below, is a data set of this model's token ids, whatever tokenizer made them")
    elif tokenizer["name"] != "byte":
        name = out if tokenizer["name"] == TOKENIZER_JSON else tokenizer["name"]
        prepare = ["python", "-m", "data.prepare", "text", "--name", "YOURS", "--tokenizer", name, "--files"]
        print(f"YOURS, below, is a data set of its token ids: {shlex.join(prepare)} TEXT")
    if tokenizer != {"name": "byte"}:
        words += ["--dataset", "YOURS"]
    words += flags_of({k: v for k, v in resolved(config).items() if k not in OF_A_RUN and v is not None})
    print(f"finetune, with this or another recipe: {shlex.join(['python', 'train.py', *words])}")


COMMANDS = {FromHf: from_hf, FromNanogpt: from_nanogpt, ToHf: to_hf, Fold: rewrite, LnToRms: rewrite}


def main(argv: Sequence[str]) -> None:
    asked = options(Command, argv, "python -m tools.convert", __doc__.split("\n")[0])
    check_free(asked)
    COMMANDS[type(asked)](asked)


if __name__ == "__main__":
    run(main)

"""Defaults < recipe file < flags, checked once, into nested frozen dataclasses.

    config = load_config(["configs/quickstart.toml", "--norm", "rmsnorm"])

A recipe is TOML with a table per dataclass below: [model], [data], [optim], [run]. Every field is also a
flag (`--n-layer`). A mistake in either raises UserError, whose message is one sentence that names the
place, what is wrong and what is allowed.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

from base.cli import STRICT, Count, UserError, checked, did_you_mean, explain, nearest, require, sentence
from base.flags import HELP, Group, Parser, Positional, flags_from, underflows
from data import DataConfig
from model import ModelConfig

Interval = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, config=STRICT)
class OptimConfig:
    """What one optimizer step does, and how many there are."""

    max_iters: Count = 600_000
    """Optimizer steps of the whole run."""
    batch_size: Count = 12
    """Sequences per optimizer step, over all processes."""
    micro_batch_size: Count | None = None
    """Sequences one process runs at once; the rest is accumulated. All of its share if not given."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the branches' matrices and adamw for the rest; at the same lr. Only matrices decay."""
    lr: Amount = 6e-4
    """Peak learning rate."""
    min_lr: Amount = 6e-5
    """Learning rate at the end."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Learning rate at the end as a share of lr, which one grid of rates can have; takes the place of min_lr."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: half a cosine, flat with a linear decay over the last fifth (wsd), or flat."""
    warmup_iters: Interval = 100
    """Steps of linear warm-up."""
    weight_decay: Amount = 0.1
    """Decoupled decay of matrices; biases and positions have none."""
    norm_decay: Amount = 0.0
    """Decoupled decay of norms' gains, towards 1 where they are zero_centred, and else towards 0."""
    z_loss: Amount = 0.0
    """Times the mean square of logsumexp of the logits is added to the loss; train/loss and val/loss are without it."""
    beta1: Decay = 0.9
    """Adam's decay of the mean."""
    beta2: Decay = 0.95
    """Adam's decay of the mean square."""
    grad_clip: Amount = 1.0
    """Largest global gradient norm; 0 does not clip."""

    def __post_init__(self):
        require(
            self.warmup_iters < self.max_iters or self.warmup_iters == 0,
            f"warmup_iters {self.warmup_iters} is not shorter than max_iters {self.max_iters}; "
            f"try {self.max_iters // 10}",
        )
        require(self.end_lr <= self.lr, f"min_lr {self.min_lr} is above lr {self.lr}")

    @property
    def end_lr(self) -> float:
        """Learning rate at the end."""
        return self.min_lr if self.min_lr_ratio is None else self.min_lr_ratio * self.lr


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """Where a run executes, what it leaves behind, and how often."""

    out_dir: str = "out"
    """Folder of all runs."""
    run_name: str = ""
    """Folder of this run under out_dir; the recipe's name if not given, and "auto" numbers it if taken."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337
    """Fixes the initialization, the order of the data and dropout."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes cuda, else mps, else cpu."""
    tf32: bool = False
    """On CUDA, products of float32 in TF32: several times as fast, with 10 bits of mantissa in place of 23."""
    compile: bool = False
    """torch.compile the model."""
    activation_checkpointing: bool = False
    """Compute the inside of every branch again in backward instead of keeping it: slower, and less memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several processes (torchrun) share the work: a copy each, or sharded parameters."""
    log_interval: Count = 10
    """Steps between rows of metrics."""
    probe_interval: Interval = 250
    """Steps between closer looks (attention, angles, gradients of the stream), also at 0 and at the end; 0: never."""
    max_loss_rise: Amount = 3.0
    """Report, and keep for --replay, a loss so much above the lowest logged one after the warm-up; 0: never."""
    max_rise_steps: Interval = 100
    """Stop when the loss has stayed so high for so many steps; 1: at once, 0: never. Not finite is always at once."""
    eval_interval: Count = 250
    """Steps between evaluations; the last step is always evaluated."""
    eval_tokens: Count = 100_000
    """Validation tokens, in fixed windows."""
    checkpoint_interval: Count = 1000
    """Steps between checkpoints; one more at the beginning, the end and every best validation loss."""
    checkpoint_minutes: Amount = 30.0
    """A checkpoint also after so many minutes without one; 0 counts steps only."""
    keep_checkpoints: Count = 2
    """Newest checkpoints to keep beside the best one."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """offline writes OUT/wandb without an account; look with `wandb leet`, upload with `wandb sync`."""
    wandb_keys: Literal["core", "full"] = "full"
    """What wandb gets of each row: core leaves out what is recorded per depth, layer, head, part or norm."""
    wandb_project: str = "nanonorm"
    """Project in wandb."""

    def __post_init__(self):
        require(
            re.fullmatch(r"[\w.+=-]*", self.run_name) is not None and self.run_name not in (".", ".."),
            f"run_name {self.run_name!r} must be a plain folder name (letters, digits and . _ + = -)",
        )


@dataclass(frozen=True, config=STRICT)
class StartConfig:
    """How a run begins. These are flags of one launch and are not part of the saved configuration."""

    resume: bool = False
    """Go on from the newest checkpoint of this run."""
    overwrite: bool = False
    """Begin anew where the folder holds a run, whose files are deleted; others stay."""
    init_from: str = ""
    """A run, checkpoint or converted model whose weights the new run starts from."""
    replay: str = ""
    """The folder OUT/diverged that a run left behind: repeat the step that failed, and nothing else."""

    def __post_init__(self):
        chosen = [f.name for f in dataclasses.fields(self) if getattr(self, f.name)]
        clash = len(chosen) > 1 and not {"resume", "replay"}.isdisjoint(chosen)
        require(not clash, f"{' and '.join('--' + c.replace('_', '-') for c in chosen)} exclude each other")


@dataclass(frozen=True, config=STRICT)
class Config:
    """One training run."""

    model: ModelConfig = ModelConfig(vocab_size=0)
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    run: RunConfig = RunConfig()
    start: StartConfig = StartConfig()


SECTIONS = {f.name: f.type for f in dataclasses.fields(Config)}
GRID = "grid"  # a table of lists that tools.study reads, and a single run leaves alone
OWNER = {f.name: section for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)}


# the fields that --help shows first, and -h alone
NORMALIZATION = ("norm", "placement", "qk_norm", "v_norm", "gain", "out_gain_init", "residual_scale", "embed_norm",
                 "embed_scale", "norm_eps", "bias", "residual_dtype", "kernel")  # fmt: skip
DESCRIPTION = """Train a small GPT and record what its normalization does inside.

  python train.py configs/quickstart.toml
  python train.py configs/quickstart.toml --norm rmsnorm --placement sandwich --qk-norm head --run-name sandwich
  python train.py configs/quickstart.toml --run-name sandwich --resume
  torchrun --nproc-per-node 8 train.py configs/gpt2_124m.toml

Flags override the recipe, and the recipe overrides the defaults. The defaults shown are those of the recipe that
is named beside --help."""


@dataclass(frozen=True, config=STRICT)
class Recipe:
    recipe: Positional[str] = ""
    """A TOML file, such as configs/quickstart.toml."""


def load_config(argv: Sequence[str], prog: str = "python train.py") -> Config:
    """The configuration that a command line asks for. Raises UserError; `--help` and `-h` exit with 0."""
    shown = Config()
    if not set(HELP).isdisjoint(argv):
        shown = next((read_recipe(word) for word in argv if is_recipe(word)), shown)
    words = parser(prog, shown).parse(argv)
    recipe = words.pop("recipe", "")
    config = read_recipe(recipe) if recipe else Config()
    if recipe and "resume" in words:
        config = at_its_place(config, Path(recipe))
    config = with_flags(config, words)
    name, stem = config.run.run_name, Path(recipe).stem if recipe else "run"
    if name == "auto":
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            raise UserError("--run-name auto: a restart by torchrun could not find its run; give it a name")
        config = replace(config, "run", run_name=stem)
        name = claimed_name(Path(config.run.out_dir), stem)
    return replace(config, "run", run_name=name or stem)


def parser(prog: str, shown: Config) -> Parser:
    """Of all flags, with the values of `shown` as defaults in its help."""
    flags = {section: flags_from(cls, getattr(shown, section)) for section, cls in SECTIONS.items()}
    first = [flag for name in NORMALIZATION for flag in flags["model"] if flag.name == name]
    flags["model"] = [flag for flag in flags["model"] if flag not in first]
    groups = [Group("normalization", [*flags_from(Recipe), *first])]
    return Parser(prog, DESCRIPTION, groups + [Group(section, found) for section, found in flags.items()])


def with_flags(config: Config, words: dict[str, Any]) -> Config:
    """The configuration with these values from a command line over its own, checked."""
    if "min_lr" in words:  # a recipe's ratio would take its place
        words = {"min_lr_ratio": None} | words
    sections = {}
    for section, cls in SECTIONS.items():
        given = {name: word for name, word in words.items() if OWNER[name] == section}
        try:
            sections[section] = checked(cls, vars(getattr(config, section)) | given)
            check_printable(sections[section])
        except UserError as e:
            raise UserError(f"on the command line: {e}") from None
    return Config(**sections)


def at_its_place(config: Config, file: Path) -> Config:
    """A run's own config.toml means the run that it lies in, which may have been copied or moved."""
    folder = file.parent.resolve() if file.parent.name in ("", "..") else file.parent
    if file.name != "config.toml" or not (folder / "checkpoints").is_dir():
        return config
    return replace(config, "run", out_dir=str(folder.parent), run_name=folder.name)


def claimed_name(out_dir: Path, stem: str) -> str:
    """`stem`, or the first of stem-2, stem-3, ... whose folder can be made here, so that nobody else takes it.

    Only the first of several processes makes it; the others write nothing.
    """
    for name in itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2))):
        try:
            if os.environ.get("RANK", "0") == "0":
                (out_dir / name).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:  # the run itself will say what is wrong
            pass
        return name


def give_back_name(config: Config) -> None:
    """Removes the folder of a run that has not begun, such as a claimed one, if nothing is in it."""
    with contextlib.suppress(OSError):
        Path(config.run.out_dir, config.run.run_name).rmdir()


def replace(config: Config, section: str, **changes: Any) -> Config:
    """A copy of the configuration with some fields of one section changed, checked again. Raises UserError."""
    try:
        changed = dataclasses.replace(getattr(config, section), **changes)
    except ValidationError as e:
        raise UserError(clauses(e, section)) from None
    return dataclasses.replace(config, **{section: changed})


def flags_of(values: dict[str, Any]) -> list[str]:
    """The flags that give these fields these values."""
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def is_recipe(word: str) -> bool:
    return word.lower().endswith(".toml") and not word.startswith("-")


def read_recipe(name: str) -> Config:
    """The configuration in a recipe over the defaults. Raises UserError."""
    path = Path(name)
    known = {recipe.stem: recipe for recipe in sorted(Path("configs").glob("*.toml"))}
    own = path / "config.toml"
    meant = own if own.is_file() else known.get(nearest(path.stem, known))
    hint = f" (did you mean {meant}?)" if meant else ""
    if not is_recipe(name):
        raise UserError(f"{name} is no recipe, which is a file with the ending .toml{hint}")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"), parse_float=number)
    except FileNotFoundError:
        raise UserError(f"{name} does not exist{hint}") from None
    except RecursionError:
        raise UserError(f"{name} cannot be read: its arrays are nested too deeply") from None
    except (OSError, ValueError) as e:  # of TOML, of UTF-8, of a number with thousands of digits
        raise UserError(f"{name} cannot be read: {e}") from None
    for key in tables.keys() & OWNER.keys():
        raise UserError(f"{name}: {key} stands outside a table; put it under [{OWNER[key]}]")
    return validate(tables, name)


def number(word: str) -> float:
    require(not underflows(word), f"{word} is too small for a number and would be taken as 0")
    return float(word)


def validate(tables: dict, place: str) -> Config:
    """The configuration that the tables describe, on top of the defaults."""
    unknown = [key for key in tables if key not in SECTIONS and key != GRID]
    if unknown:
        hint = did_you_mean(unknown[0], SECTIONS)
        raise UserError(f"{place}: unknown table [{unknown[0]}]{hint}; the tables are {', '.join(SECTIONS)}")
    sections = {}
    for name, cls in SECTIONS.items():
        values = tables.get(name, {})
        if not isinstance(values, dict):
            raise UserError(f"{place}: {name} is {values!r}, but it is a table, written [{name}]")
        try:
            sections[name] = cls(**({"vocab_size": 0} if name == "model" else {}) | values)
            check_printable(sections[name])
        except ValidationError as e:
            raise UserError(f"{place}: {clauses(e, name)}") from None
        except UserError as e:
            raise UserError(f"{place}: {e}") from None
    return Config(**sections)


def check_printable(values: Any) -> None:
    for key, value in vars(values).items():
        if isinstance(value, str) and not value.isprintable():
            raise UserError(f"{key} is {value!r}, which holds characters that cannot be printed")


def clauses(mistake: ValidationError, section: str) -> str:
    """What is wrong with the values of a section; a key that it does not know is looked for in the others."""
    found = []
    for error in mistake.errors():
        name = str(error["loc"][0]) if error["loc"] else ""
        if error["type"] != "unexpected_keyword_argument":
            found.append(explain(error))
        elif name in OWNER:
            found.append(f"{name} belongs under [{OWNER[name]}], not [{section}]")
        else:
            found.append(f"unknown key {name}{did_you_mean(name, OWNER)}")
    return sentence(found)


def to_toml(config: Config) -> str:
    """The configuration as TOML that `load_config` reads back; how the run was started is left out."""
    lines = []
    for section in SECTIONS:
        if section != "start":
            values = dataclasses.asdict(getattr(config, section))
            lines += [
                f"[{section}]",
                *(f"{k} = {toml_value(v)}" for k, v in values.items() if v is not None),
                "",
            ]
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)

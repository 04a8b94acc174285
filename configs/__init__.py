"""Defaults < recipe file < flags, checked once, into nested frozen dataclasses.

    config = load_config(["configs/quickstart.toml", "--norm", "rmsnorm"])

A recipe is TOML with a table per dataclass below: [model], [data], [optim], [run]. Every field is also a
flag (`--n-layer`). A mistake in either raises UserError, whose message is one sentence that names the
place, what is wrong and what is allowed.
"""

import dataclasses
import itertools
import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from base.cli import UserError, did_you_mean
from data import DataConfig
from data.command_line import read_flags
from model import ModelConfig

STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, config=STRICT)
class OptimConfig:
    """What one optimizer step does, and how many there are."""

    max_iters: int = 600_000
    """Optimizer steps of the whole run."""
    batch_size: int = 12
    """Sequences per optimizer step, over all processes."""
    micro_batch_size: int | None = None
    """Sequences one process runs at once; the rest is accumulated. All of its share if not given."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the branches' matrices and adamw for the rest; at the same lr. Only matrices decay."""
    lr: float = 6e-4
    """Peak learning rate."""
    min_lr: float = 6e-5
    """Learning rate at the end."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: half a cosine, flat with a linear decay over the last fifth (wsd), or flat."""
    warmup_iters: int = 100
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; norms, biases and positions have none."""
    beta1: float = 0.9
    """Adam's decay of the mean."""
    beta2: float = 0.95
    """Adam's decay of the mean square."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 does not clip."""

    def __post_init__(self):
        for name in ("max_iters", "batch_size", "micro_batch_size"):
            value = getattr(self, name)
            require(
                value is None or 1 <= value < 2**31,
                f"{name} is {value}; it must be at least 1 and below 2^31",
            )
        for name in ("lr", "min_lr", "weight_decay", "grad_clip", "warmup_iters"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} is {value}; it must be a number not below 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} is {value}; it must be at least 0 and below 1")
        require(
            self.warmup_iters < self.max_iters or self.warmup_iters == 0,
            f"warmup_iters {self.warmup_iters} is not shorter than max_iters {self.max_iters}; "
            f"try {self.max_iters // 10}",
        )
        require(self.min_lr <= self.lr, f"min_lr {self.min_lr} is above lr {self.lr}")


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """Where a run executes, what it leaves behind, and how often."""

    out_dir: str = "out"
    """Folder of all runs."""
    run_name: str = ""
    """Folder of this run under out_dir; the recipe's name if not given, and "auto" numbers it if taken."""
    seed: int = 1337
    """Fixes the initialization, the order of the data and dropout."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes cuda, else mps, else cpu."""
    compile: bool = False
    """torch.compile the model."""
    activation_checkpointing: bool = False
    """Compute the inside of every branch again in backward instead of keeping it: slower, and less memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several processes (torchrun) share the work: a copy each, or sharded parameters."""
    log_interval: int = 10
    """Steps between rows of metrics."""
    probe_interval: int = 250
    """Steps between closer looks (attention, angles, gradients of the stream), also at 0 and at the end; 0: never."""
    max_loss_rise: float = 3.0
    """Report, and keep for --replay, a loss so much above the lowest logged one after the warm-up; 0: never."""
    max_rise_steps: int = 100
    """Stop when the loss has stayed so high for so many steps; 1: at once, 0: never. Not finite is always at once."""
    eval_interval: int = 250
    """Steps between evaluations; the last step is always evaluated."""
    eval_tokens: int = 100_000
    """Validation tokens, in fixed windows."""
    checkpoint_interval: int = 1000
    """Steps between checkpoints; one more at the beginning, the end and every best validation loss."""
    checkpoint_minutes: float = 30.0
    """A checkpoint also after so many minutes without one; 0 counts steps only."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep beside the best one."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """offline writes OUT/wandb without an account; look with `wandb leet`, upload with `wandb sync`."""
    wandb_project: str = "nanonorm"
    """Project in wandb."""

    def __post_init__(self):
        for name in (
            "log_interval",
            "eval_interval",
            "eval_tokens",
            "checkpoint_interval",
            "keep_checkpoints",
        ):
            value = getattr(self, name)
            require(value >= 1, f"{name} is {value}; it must be at least 1")
        for name in ("checkpoint_minutes", "probe_interval", "max_loss_rise", "max_rise_steps"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} is {value}; it must be a number not below 0")
        require(0 <= self.seed < 2**63, f"seed is {self.seed}; it must be from 0 to 2^63 - 1")
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
    """Delete what the run's folder holds and begin anew."""
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


def load_config(argv: Sequence[str], prog: str = "train.py") -> Config:
    """The configuration that a command line asks for. Raises UserError; `--help` exits with 0."""
    paths = [a for a in argv if a.endswith(".toml") and not a.startswith("-")]
    if len(paths) > 1:
        raise UserError(f"{len(paths)} recipe files are named ({', '.join(paths)}); one is allowed")
    base = read_recipe(Path(paths[0])) if paths else Config()
    if "--resume" in argv and paths:
        base = at_its_place(base, Path(paths[0]))
    flags = parse_flags([a for a in argv if a not in paths], base, prog)
    config = validate(flags, "on the command line")
    name, stem = config.run.run_name, Path(paths[0]).stem if paths else "run"
    if name == "auto":
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            raise UserError("--run-name auto: a restart by torchrun could not find its run; give it a name")
        name = free_name(Path(config.run.out_dir), stem)
    return replace(config, "run", run_name=name or stem)


def at_its_place(config: Config, file: Path) -> Config:
    """A run's own config.toml means the run that it lies in, which may have been copied or moved."""
    folder = file.parent.resolve() if file.parent.name in ("", "..") else file.parent
    if file.name != "config.toml" or not (folder / "checkpoints").is_dir():
        return config
    return replace(config, "run", out_dir=str(folder.parent), run_name=folder.name)


def free_name(out_dir: Path, stem: str) -> str:
    """`stem`, or the first of stem-2, stem-3, ... that no folder in `out_dir` has."""
    names = itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2)))
    return next(name for name in names if not (out_dir / name).exists())


def replace(config: Config, section: str, **changes: Any) -> Config:
    """A copy of the configuration with some fields of one section changed, checked again. Raises UserError."""
    try:
        changed = dataclasses.replace(getattr(config, section), **changes)
    except ValidationError as e:
        raise UserError("; ".join(explain(error, section) for error in e.errors())) from None
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


def read_recipe(path: Path) -> Config:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        known = sorted(str(p) for p in Path("configs").glob("*.toml"))
        raise UserError(f"{path} does not exist{did_you_mean(str(path), known)}") from None
    except RecursionError:
        raise UserError(f"{path} cannot be read: its arrays are nested too deeply") from None
    except (OSError, ValueError) as e:  # of TOML, of UTF-8, of a number with thousands of digits
        raise UserError(f"{path} cannot be read: {e}") from None
    for key in table.keys() & OWNER.keys():
        raise UserError(f"{path}: {key} stands outside a table; put it under [{OWNER[key]}]")
    return validate(table, str(path))


def validate(table: dict, place: str) -> Config:
    """The configuration that the tables describe, on top of the defaults."""
    unknown = [key for key in table if key not in SECTIONS and key != GRID]
    if unknown:
        hint = did_you_mean(unknown[0], SECTIONS)
        raise UserError(f"{place}: unknown table [{unknown[0]}]{hint}; the tables are {', '.join(SECTIONS)}")
    sections = {}
    for name, cls in SECTIONS.items():
        values = table.get(name, {})
        if not isinstance(values, dict):
            raise UserError(f"{place}: {name} is {values!r}, but it is a table, written [{name}]")
        try:
            sections[name] = cls(**({"vocab_size": 0} if name == "model" else {}) | values)
        except ValidationError as e:
            raise UserError(f"{place}: " + "; ".join(explain(err, name) for err in e.errors())) from None
        for key, value in vars(sections[name]).items():
            if isinstance(value, str) and not value.isprintable():
                raise UserError(f"{place}: {key} is {value!r}, which holds characters that cannot be printed")
    return Config(**sections)


def explain(error: dict, section: str) -> str:
    """One of pydantic's errors as a clause that names the field, the fault and what is allowed."""
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    name = str(error["loc"][0])
    if error["type"] == "unexpected_keyword_argument":
        if name in OWNER:
            return f"{name} belongs under [{OWNER[name]}], not [{section}]"
        return f"unknown key {name}{did_you_mean(name, OWNER)}"
    message = error["msg"][0].lower() + error["msg"][1:]
    hint = did_you_mean(str(error["input"]), re.findall(r"'(.*?)'", error.get("ctx", {}).get("expected", "")))
    return f"{name} is {error['input']!r}, but {message}{hint}"


def parse_flags(argv: Sequence[str], base: Config, prog: str) -> dict:
    """The flags over `base`, as a nested dictionary that is still to be validated."""
    flags = tyro.conf.OmitArgPrefixes[unchecked(Config, base)]
    return dataclasses.asdict(read_flags(flags, argv, f"{prog} [RECIPE.toml]", HELP, UserError))


def command_line(cls: Any, argv: Sequence[str], prog: str, description: str | None = None) -> Any:
    """An instance of a tool's pydantic dataclass of options from its flags. Raises UserError.

    A union of dataclasses is a choice of subcommands, and wants a description of the tool.
    """
    try:
        return read_flags(cls, argv, prog, description or cls.__doc__, UserError)
    except ValidationError as e:
        raise UserError("; ".join(explain(error, "") for error in e.errors())) from None


def unchecked(cls: type, values: Any) -> type:
    """A plain twin of a pydantic dataclass for tyro to fill, so that a flag and a file are checked by one code."""
    fields = []
    for f in dataclasses.fields(cls):
        value = getattr(values, f.name)
        if dataclasses.is_dataclass(f.type):
            twin = unchecked(f.type, value)
            fields.append((f.name, twin, dataclasses.field(default_factory=twin)))
        else:
            about = tyro.conf.arg(help=cls.__pydantic_fields__[f.name].description)
            fields.append((f.name, Annotated[f.type, about], dataclasses.field(default=value)))
    return dataclasses.make_dataclass(cls.__name__, fields, namespace={"__doc__": cls.__doc__})


HELP = """Train a small GPT and record what its normalization does inside, as in
`python train.py configs/quickstart.toml --norm rmsnorm --placement sandwich --qk-norm head`.
Values given in RECIPE.toml are shown as defaults here."""


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


def user_error(message: str) -> None:
    """Tell a user's mistake in one sentence and end with the exit code that means so."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)

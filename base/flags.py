"""Flags from dataclasses.

    @dataclass(frozen=True, config=STRICT)
    class Options:
        run: Positional[str]
        '''A run's folder.'''
        tokens: int = 500
        '''How many tokens to write.'''

    options(Options, ["out/quickstart", "--tokens", "100"], "python -m tools.sample")

A field is a flag: `n_layer` is --n-layer, a boolean `bias` is --bias and --no-bias, a tuple takes several words
(--files a b), and the docstring of the field is its help. pydantic checks the values.
"""

import re
import shutil
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator

from base.cli import OneOf, UserError, checked, did_you_mean

HELP = ("-h", "--help")
TRUTH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")  # which a flag does not take
VALUES = {int: "INT", float: "FLOAT", bool: ""}  # in --help


@dataclass(frozen=True)
class Short:
    """A second name of a flag: `Annotated[str, Short("-o")]`."""

    name: str


POSITIONAL = object()
T = TypeVar("T")
Positional = Annotated[T, POSITIONAL]


@dataclass(frozen=True)
class Flag:
    """A field of a pydantic dataclass as the command line shows it."""

    name: str
    kinds: tuple[Any, ...]
    """Its types, without None."""
    nullable: bool
    default: Any
    required: bool
    help: str
    metadata: tuple

    @property
    def spelled(self) -> str:
        return self.name if POSITIONAL in self.metadata else "--" + self.name.replace("_", "-")

    @property
    def negated(self) -> str:
        return self.spelled.replace("--", "--no-", 1)

    @property
    def kind(self) -> Any:
        return unannotated(self.kinds[0])

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.kind) in (tuple, list)

    def choices(self, kind: Any) -> Sequence[str]:
        """The values that a type allows by name; none where it is open."""
        if typing.get_origin(unannotated(kind)) is Literal:
            return typing.get_args(unannotated(kind))
        metadata = (*self.metadata, *getattr(kind, "__metadata__", ()))
        checks = [m.func for m in metadata if isinstance(m, AfterValidator)]
        return [name for check in checks if isinstance(check, OneOf) for name in check.names]

    def word(self, kind: Any) -> str:
        """What stands for a value of this type."""
        names = self.choices(kind)
        return "{" + ",".join(names) + "}" if names else VALUES.get(unannotated(kind), self.name.upper())

    @property
    def spellings(self) -> list[str]:
        if self.kind is bool:
            return [self.spelled, self.negated]
        return [self.spelled, *(m.name for m in self.metadata if isinstance(m, Short))]

    @property
    def metavar(self) -> str:
        if self.is_list:
            word = self.word(typing.get_args(self.kind)[0])
            return f"{word} [{word} ...]"
        return "|".join(map(self.word, self.kinds))

    @property
    def row(self) -> tuple[str, str]:
        """Its two columns in --help."""
        shown = "" if self.required or self.default in (None, "", ()) else str(self.default)
        if self.kind is bool:
            shown = self.spelled if self.default else self.negated
        left = self.metavar if POSITIONAL in self.metadata else ", ".join(self.spellings) + " " + self.metavar
        return left.strip(), self.help + (f" (default: {shown})" if shown else "")


def flags_from(cls: type, defaults: Any = None) -> list[Flag]:
    """The flags of a pydantic dataclass; `defaults`, an instance, has other defaults than the class."""
    flags = []
    for name, field in cls.__pydantic_fields__.items():
        kinds = typing.get_args(field.annotation) if is_union(field.annotation) else (field.annotation,)
        given = tuple(kind for kind in kinds if kind is not types.NoneType)
        required = field.is_required() and defaults is None
        default = getattr(defaults, name, None) if defaults else field.get_default(call_default_factory=True)
        about = " ".join(description(cls, name).split())
        nullable, metadata = len(given) < len(kinds), tuple(field.metadata)
        flags.append(Flag(name, given, nullable, default, required, about, metadata))
    return flags


def description(cls: type, name: str) -> str:
    """The docstring of a field. pydantic finds it in the class that defines the field, not in one that inherits it."""
    fields = [
        owner.__pydantic_fields__.get(name) for owner in cls.__mro__ if hasattr(owner, "__pydantic_fields__")
    ]
    return next((field.description for field in fields if field and field.description), "")


def unannotated(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


@dataclass(frozen=True)
class Group:
    """Flags under a title of --help."""

    title: str
    flags: list[Flag]


class Parser:
    """Splits the words of a command line into values by field name; types are checked afterwards."""

    def __init__(self, prog: str, description: str, groups: list[Group]):
        self.prog, self.description, self.groups = prog, description, groups
        flags = [flag for group in groups for flag in group.flags]
        self.positionals = [flag for flag in flags if POSITIONAL in flag.metadata]
        self.required = [flag for flag in flags if flag.required]
        self.known = {word: flag for flag in flags if flag not in self.positionals for word in flag.spellings}

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """Words, lists of words and booleans by field name. Raises UserError; `--help` and `-h` exit with 0."""
        for word in HELP:
            if word in argv:
                print(self.help(short=word == "-h"))
                raise SystemExit(0)
        values: dict[str, Any] = {}
        words = list(reversed(argv))
        while words:
            word = words.pop()
            if not is_flag(word):
                self.place(word, values)
                continue
            spelled, equals, value = word.partition("=")
            spelled = spelled.replace("_", "-")
            flag = self.known.get(spelled)
            if flag is None:
                hint = did_you_mean(spelled, self.known)
                raise UserError(f"unknown flag {spelled}{hint}; --help lists them all")
            if equals:
                words.append(value)
            if flag.kind is bool:
                values[flag.name] = boolean(flag, spelled, words, bool(equals))
            elif equals:
                values[flag.name] = taken(flag, [words.pop()])
            else:
                values[flag.name] = taken(flag, following(words, flag.is_list))
        missing = [flag.spelled for flag in self.required if flag.name not in values]
        if missing:
            raise UserError(f"{' and '.join(missing)} must be given; --help explains")
        return values

    def place(self, word: str, values: dict[str, Any]) -> None:
        """Takes a word that stands alone."""
        if not self.positionals:
            raise UserError(
                f"{word} is neither a flag nor a value that its flag takes; --help lists what there is"
            )
        for flag in self.positionals:
            if flag.is_list:
                values[flag.name] = [*values.get(flag.name, []), word]
                return
            if flag.name not in values:
                values[flag.name] = word
                return
        raise UserError(f"{flag.name} is given twice, {values[flag.name]} and {word}; one is allowed")

    def help(self, short: bool = False) -> str:
        """What --help prints; -h leaves out all but the first group."""
        width = min(shutil.get_terminal_size().columns, 120)
        words = " ".join(flag.metavar for flag in self.positionals)
        parts = [f"usage: {self.prog} {words + ' ' if words else ''}[flags]", self.description.strip()]
        groups = self.groups[:1] if short else self.groups
        for group in groups:
            parts.append(f"{group.title}:\n" + table([flag.row for flag in group.flags], width))
        left_out = sum(len(group.flags) for group in self.groups) - sum(len(group.flags) for group in groups)
        if left_out:
            parts.append(f"{left_out} more flags are listed by --help.")
        return "\n\n".join(part for part in parts if part)


def is_flag(word: str) -> bool:
    """Whether a word is meant as a flag: -1 and -.5 are numbers, and - alone is none."""
    return re.match(r"--?[A-Za-z]", word) is not None


def boolean(flag: Flag, spelled: str, words: list[str], equals: bool) -> bool:
    if equals or (words and words[-1].lower() in TRUTH_VALUES):
        raise UserError(
            f"{spelled} takes no value, such as {words[-1]}: write {flag.spelled} or {flag.negated}"
        )
    return spelled == flag.spelled


def following(words: list[str], several: bool) -> list[str]:
    """Takes the value that comes next, or all values up to the next flag, from the end of `words`."""
    found: list[str] = []
    while words and not is_flag(words[-1]) and (several or not found):
        found.append(words.pop())
    return found


def taken(flag: Flag, words: list[str]) -> Any:
    """What these words give a flag that takes values, as yet without its type."""
    if not words:
        raise UserError(
            f"{flag.spelled} is given without a value: write {flag.spelled} {flag.metavar}, or "
            f"{flag.spelled}=VALUE where the value begins with a dash"
        )
    if flag.is_list:
        return words
    [word] = words
    if float in map(unannotated, flag.kinds) and underflows(word):
        raise UserError(f"{flag.spelled} is {word}, which is too small for a number and would be taken as 0")
    return None if flag.nullable and word == "None" else word


def underflows(word: str) -> bool:
    """Whether `word` writes a number other than 0 that is too small to be held as one."""
    try:
        return float(word) == 0 and re.search("[1-9]", re.split("[eE]", word)[0]) is not None
    except ValueError:
        return False


def table(rows: list[tuple[str, str]], width: int, column: int = 30) -> str:
    """Two columns, of which the second is wrapped; where the first is long, the second begins below it."""
    lines = []
    for left, right in rows:
        text = textwrap.wrap(right, max(width - column, 30), break_long_words=False, break_on_hyphens=False)
        if len(left) + 4 > column or not text:
            lines.append(f"  {left}")
        else:
            lines.append(f"  {left:{column - 2}}{text.pop(0)}")
        lines += [" " * column + line for line in text]
    return "\n".join(lines)


def options(cls: Any, argv: Sequence[str], prog: str, description: str | None = None) -> Any:
    """An instance of a pydantic dataclass, or of one of a union of them (subcommands), from flags.

    Raises UserError; `--help` and `-h` print and exit with 0.
    """
    if is_union(cls):
        return subcommand(typing.get_args(cls), argv, prog, description or "")
    flags = sorted(flags_from(cls), key=lambda flag: not flag.required)
    parser = Parser(prog, description or cls.__doc__ or "", [Group("flags", flags)])
    return checked(cls, parser.parse(argv))


def subcommand(classes: Sequence[type], argv: Sequence[str], prog: str, description: str) -> Any:
    """An instance of the class whose name the first word is: `to-hf` is ToHf."""
    commands = {re.sub(r"(?<!^)([A-Z])", r"-\1", cls.__name__).lower(): cls for cls in classes}
    word = argv[0] if argv else ""
    if word in HELP:
        rows = [(name, " ".join((cls.__doc__ or "").split())) for name, cls in commands.items()]
        listed = table(rows, min(shutil.get_terminal_size().columns, 120))
        print(
            f"usage: {prog} COMMAND [flags]\n\n{description.strip()}\n\ncommands:\n{listed}\n\n"
            f"{prog} COMMAND --help lists the flags of a command."
        )
        raise SystemExit(0)
    if word not in commands:
        said = (
            f"there is no command {word}{did_you_mean(word, commands)}" if word else "a command must be named"
        )
        raise UserError(f"{said}; the commands are {', '.join(commands)}")
    return options(commands[word], argv[1:], f"{prog} {word}")

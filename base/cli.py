"""What every command shares: a user's mistake, flags from dataclasses, output that never fails, one way to run.

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

import difflib
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticKnownError

from base.output import forgive_output

EXIT_MISTAKE, EXIT_INTERRUPTED = 2, 130
STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
Count = Annotated[int, Field(ge=1, lt=2**31)]
HELP = ("-h", "--help")
TRUTH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")  # which a flag does not take
VALUES = {int: "INT", float: "FLOAT", bool: ""}  # in --help
ALLOWED = {  # by the beginning of pydantic's name for a mistake
    "int": "a whole number, such as 1000",
    "float": "a number, such as 0.001",
    "bool": "true or false",
    "string": "text",
    "finite": "a finite number",
}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class UserError(ValueError):
    """A user's mistake or a broken file: one sentence that says what is wrong, where, and what is allowed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that `name` may have been meant to be, or an empty string."""
    spelled = {word.casefold(): word for word in known}
    return next(
        (spelled[w] for w in difflib.get_close_matches(name.casefold(), spelled, n=1, cutoff=0.7)), ""
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean x?)"` for the known name nearest to `name`, or an empty string."""
    meant = nearest(name, known)
    return f" (did you mean {meant}?)" if meant else ""


def require(condition: bool, message: str) -> None:
    """Inside a dataclass's checks: pydantic makes a ValueError of this kind a part of its own error."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, eq=False)
class OneOf:
    """Allows the names that a registry holds when it is asked: `Annotated[str, AfterValidator(OneOf(NORMS))]`."""

    names: Collection[str]

    def __call__(self, name: str) -> str:
        if name not in self.names:
            *first, last = map(repr, self.names)
            expected = f"{', '.join(first)} or {last}" if first else last
            raise PydanticKnownError("literal_error", {"expected": expected})
        return name


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
        checks = [m.func for m in (*self.metadata, *metadata_of(kind)) if isinstance(m, AfterValidator)]
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


def metadata_of(kind: Any) -> tuple:
    return kind.__metadata__ if typing.get_origin(kind) is Annotated else ()


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


def checked(cls: type[T], values: dict[str, Any]) -> T:
    """The dataclass with these values, of which words from a command line are read as the types they stand for."""
    try:
        return TypeAdapter(cls).validate_python(values, strict=False)
    except ValidationError as e:
        raise UserError(explanation(e, flag=True)) from None


def explanation(mistake: ValidationError, flag: bool = False) -> str:
    """All of pydantic's errors in one sentence."""
    return sentence(explain(error, flag) for error in mistake.errors())


def sentence(clauses: Iterable[str]) -> str:
    """Clauses of `explain` joined: a value that fits none of several types has one, with all that it may be."""
    found: dict[str, str] = {}
    for clause in clauses:
        fault, must, allowed = clause.partition("; it must be ")
        found[fault] = f"{found[fault]} or {allowed}" if fault in found else fault + must + allowed
    return "; ".join(found.values())


def explain(error: dict, flag: bool = False) -> str:
    """One of pydantic's errors as a clause that names the field, the fault and what is allowed."""
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:  # of the whole dataclass, whose own check names its fields
        return message
    name = str(error["loc"][0])
    name = "--" + name.replace("_", "-") if flag else name
    if error["type"] == "missing":
        return f"{name} must be given"
    context = error.get("ctx", {})
    expected = context.get("expected", "")
    bounds = [f"{BOUNDS[key]} {bound:.10g}" for key, bound in context.items() if key in BOUNDS]
    allowed = "".join(bounds) or expected or ALLOWED.get(error["type"].split("_")[0])
    hint = did_you_mean(str(error["input"]), re.findall(r"'(.*?)'", expected))
    shown = error["input"] if flag else repr(error["input"])
    if allowed:
        return f"{name} is {shown}; it must be {allowed}{hint}"
    return f"{name} is {shown}; {message[0].lower()}{message[1:]}"


def run(main: Callable[[Sequence[str]], None], *, result_is_printed: bool = True) -> NoReturn:
    """Runs a command and ends the process: 0, 2 after a user's mistake, 130 after Ctrl-C; no traceback for either.

    result_is_printed: whether output that could not be written (a full disk) is a failure, too. A reader that has
    left, as `head` does, never is one.
    """
    outputs = forgive_output()
    code: Any = 0
    try:
        main(sys.argv[1:])
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        code = EXIT_MISTAKE
    except KeyboardInterrupt as e:
        print("; ".join(["interrupted", *map(str, e.args)]), file=sys.stderr)
        code = EXIT_INTERRUPTED
    except SystemExit as e:
        code = e.code
    sys.stdout.flush()
    lost = outputs[0].lost
    if result_is_printed and not code and lost and not isinstance(lost, BrokenPipeError):
        print(f"error: standard output cannot be written: {lost.strerror}", file=sys.stderr)
        code = EXIT_MISTAKE
    raise SystemExit(code)

"""What every command shares: a user's mistake told in one sentence, and one way to run."""

import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticKnownError

from base.output import forgive_output

EXIT_MISTAKE, EXIT_INTERRUPTED = 2, 130
STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
Count = Annotated[int, Field(ge=1, lt=2**31)]
ALLOWED = {  # by the beginning of pydantic's name for a mistake
    "int": "a whole number, such as 1000",
    "float": "a number, such as 0.001",
    "bool": "true or false",
    "string": "text",
    "finite": "a finite number",
}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


T = TypeVar("T")


class UserError(ValueError):
    """A user's mistake or a broken file: one sentence that says what is wrong, where, and what is allowed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that `name` may have been meant to be, or the only one that begins so, or an empty string."""
    spelled, name = {word.casefold(): word for word in known}, name.casefold()
    close = difflib.get_close_matches(name, spelled, n=1, cutoff=0.7)
    longer = [word for word in spelled if name and word.startswith(name)]
    found = close or (longer if len(longer) == 1 else [])
    return spelled[found[0]] if found else ""


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

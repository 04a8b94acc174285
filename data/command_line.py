"""Flags through tyro, whose framed messages become the one sentence that a mistake gets everywhere else."""

import contextlib
import io
import itertools
import re
from collections.abc import Sequence
from typing import Any

import tyro

from base.cli import did_you_mean


def read_flags(
    cls: Any, argv: Sequence[str], prog: str, description: str | None, mistake: type[ValueError]
) -> Any:
    """What tyro makes of a command line. Raises `mistake`, in one sentence; `--help` exits with 0."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(cls, args=list(argv), prog=prog, description=description)
    except SystemExit as e:
        if e.code in (0, None):
            raise
        raise mistake(unboxed(box.getvalue())) from None


def unboxed(text: str) -> str:
    """The first paragraph of tyro's framed message as one sentence, with the nearest flag to an unknown one."""
    plain = re.split(r"^-{9,}$", text, flags=re.M)  # where the terminal knows no frames, under a title
    text = plain[1].strip() if len(plain) > 1 else text
    rows = [line.strip("│ ") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
    first = list(itertools.takewhile(lambda row: not row.startswith("─"), rows))
    paragraph = " ".join(first)
    unknown = re.match(r"Unrecognized.*? options: (\S+?)[, ]", paragraph + " ")
    if unknown and unknown[1].startswith("-"):
        return f"unknown flag {unknown[1]}{did_you_mean(unknown[1], flags_in(rows))}; --help lists them all"
    if unknown:
        return f"{unknown[1]} is neither a flag nor a value that its flag takes; --help lists what there is"
    if paragraph.startswith("Missing from"):
        entries = re.findall(r"^│ {5}(\S.*?) *│\n│ {9}(\S.*?)(?: \(required\))? *│", text, re.MULTILINE)
        missing = [name.split()[0] if name.startswith("-") else about.rstrip(".") for name, about in entries]
        return f"{' and '.join(missing)} must be given; --help explains"
    ours = re.search(r"Value error, (.*?) \[type=", paragraph)  # raised by a dataclass's __post_init__
    if ours:
        return ours[1]
    union = re.match(r"Error parsing (\S+): no type matching (\S+) could.*? from \['(.*?)'\]", paragraph)
    if union:
        return f"{union[1]} is {union[3]!r}, but it takes {union[2].replace('|', ' or ')}"
    choice = re.match(r"invalid choice '(.*?)'.*Expected one of \((.*)\)", paragraph)
    hint = did_you_mean(choice[1], re.findall(r"'(.*?)'", choice[2])) if choice else ""
    return paragraph[0].lower() + paragraph[1:].rstrip(".") + hint


def flags_in(rows: list[str]) -> list[str]:
    """The flags whose help the rows of a framed message begin with."""
    return [row.split()[0] for row in rows if re.match(r"--[a-z]", row)]

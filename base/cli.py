"""A user's mistake in one sentence, and the hint that such sentences share."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A user's mistake or a broken file: one sentence that says what is wrong, where, and what is allowed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean x?)"` for the known name nearest to `name`, or an empty string."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f" (did you mean {nearest[0]}?)" if nearest else ""

"""The one exception of this package, and the hint that its messages share."""

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """A user's mistake or a broken file; the message says in one sentence what is wrong, where, and what to
    do."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean x?)"` for the known name nearest to `name`, or an empty string."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f" (did you mean {nearest[0]}?)" if nearest else ""

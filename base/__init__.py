"""The ground floor, below everything and without torch: what every command shares.

- `base.cli`: a user's mistake, how a command runs
- `base.flags`: flags from dataclasses
- `base.output`: printing that never fails
- `base.files`: files and folders that are whole or as they were, and locks
- `base.threads`: how threads wait for each other, before torch is imported
- `base.timing`: times that can be compared on a busy machine
"""

import sys


def end_quietly(kind, value, trace) -> None:
    """Ctrl-C while a command still imports what it needs, before `base.cli.run`, shows no traceback either."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, value, trace)


sys.excepthook = end_quietly

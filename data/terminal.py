"""What is printed: never a reason for a program to fail."""

import errno
import os
import sys
from typing import Any, TextIO


class Steady:
    """A text stream that outlives its reader (`| head`, `| tee` ended by Ctrl-C), its disk and its encoding.

    What a full disk does not take stays in the stream's buffer, and is tried again with what follows.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        self.survive(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self.survive(self.stream.flush)

    def survive(self, act, *arguments) -> None:
        try:
            act(*arguments)
        except OSError as e:
            if e.errno == errno.EPIPE:  # nobody reads it: the rest goes nowhere, and so does the buffer
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), self.stream.fileno())
        except ValueError:  # closed
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def steady_output() -> None:
    """Makes stdout and stderr such streams; characters that they cannot encode are printed as question marks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115 (None: the shell has closed it)
        stream.reconfigure(errors="replace")
        setattr(sys, name, Steady(stream))

"""Being asked to stop: a signal is remembered, and heeded at the next step boundary.

Exit codes of train.py:

    0    done
    1    a fault of the program, or of another process of the run
    2    a user's mistake, told in one sentence
    74   the last checkpoint could not be written; what was saved before is untouched (EX_IOERR)
    75   stopped by a signal with everything saved: start it again with --resume (EX_TEMPFAIL)
    130  interrupted before training began, or by a second SIGINT, with nothing saved
"""

import contextlib
import os
import signal
from types import FrameType

EXIT_UNSAVED, EXIT_STOPPED, EXIT_INTERRUPTED = 74, 75, 130
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SIGUSR1: Slurm's --signal before it preempts


class StopRequest:
    """While entered, SIGTERM, SIGINT and SIGUSR1 are remembered; a second SIGINT ends the process at once."""

    def __init__(self):
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "StopRequest":
        # A signal that is ignored stays so: a shell starts background jobs with SIGINT ignored.
        heeded = [s for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
        self.before = {s: signal.signal(s, self.remember) for s in heeded}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # which needs no Python to run, unlike a handler
            if os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):  # nobody reads it
                    os.write(2, b"\nsaving at the end of this step; once more to exit without\n")

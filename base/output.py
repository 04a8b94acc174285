"""What is printed is never a reason to fail: not its reader (`| head`), its disk, nor its encoding."""

import io
import os
import sys


class Forgiving(io.FileIO):
    """What nobody takes any more (a closed pipe, a full disk) is dropped; `lost` is why, the first time."""

    lost: OSError | None = None

    def write(self, data) -> int:
        try:
            written = super().write(data)
        except OSError as e:
            self.lost = self.lost or e
            return len(data)
        return len(data) if written is None else written  # None: a pipe that does not wait, and is full


def forgive_output() -> list[Forgiving]:
    """From here on printing never raises, so that the exit code tells of the work and not of its listeners.

    What the terminal cannot show is escaped. For the whole process: a program calls it when it begins.
    """
    outputs = []
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        encoding = getattr(getattr(sys, name), "encoding", None)
        if getattr(sys, name) is None:  # closed; the next file to be opened must not take its place
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        raw = Forgiving(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, stream)
        outputs.append(raw)
    return outputs

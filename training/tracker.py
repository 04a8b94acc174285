"""Where the numbers go: one JSON object per step in metrics.jsonl, and the same to wandb."""

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from base.files import atomic_file
from configs import Config
from training.metrics import parse

WANDB_ROOM = 2**20  # bytes that an offline run is left, enough for a step's numbers and for its end
WANDB_SECONDS = 15.0  # between two times that wandb is given rows; its service writes them as often


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a kill cut short is left out."""
    rows = []
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                rows.append(json.loads(line))
    return rows


def cut_after(path: Path, step: int) -> None:
    """Keeps the rows up to optimizer step `step`, so that a resumed run holds each step once.

    Damaged lines, such as one that a power cut left half written, go too; where rows follow them that are kept, the
    file as it was stays beside.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if step_of(line) <= step]
    if kept == lines[: len(kept)]:
        os.truncate(path, sum(map(len, kept)))
        return
    old = path.with_suffix(".damaged.jsonl")
    shutil.copyfile(path, old)
    with atomic_file(path) as file:
        file.write_bytes(b"".join(kept))
    print(f"{path} had damaged lines, which are left out now; {old} is the file as it was", file=sys.stderr)


def step_of(line: bytes) -> float:
    """The optimizer step of a row of metrics.jsonl; infinity for a damaged one."""
    try:
        return float(json.loads(line)["iter"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


class Tracker:
    """Writes metrics.jsonl whatever wandb does; a failure of wandb is told once and training goes on.

    A row is in metrics.jsonl at once. wandb gets the rows of WANDB_SECONDS together, a call for each: the first call
    after a while takes tens of times as long as those that follow it.

    first, last: the first and the last value that the run has had of each metric, before it was resumed too.
    """

    def __init__(self, run_dir: Path, config: Config, facts: dict[str, Any], wandb_id: str | None):
        self.path = run_dir / "metrics.jsonl"
        self.wandb_id, self.run = wandb_id, None
        self.resumed = wandb_id is not None
        self.offline, self.wandb_dir = config.run.wandb == "offline", run_dir / "wandb"
        self.core = config.run.wandb_keys == "core"
        self.unwritten = b""
        self.waiting: list[dict[str, Any]] = []
        self.handed = -math.inf
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        for row in read_metrics(self.path) if self.path.exists() else []:
            self.note(row)
        if config.run.wandb != "disabled":
            with self.surviving_wandb():
                self.start_wandb(run_dir, config, facts)

    @contextlib.contextmanager
    def surviving_wandb(self):
        try:
            yield
        except Exception as e:
            self.run = None
            reason = str(e).strip().partition("\n")[0] or type(e).__name__
            print(
                f"wandb failed ({reason}); training goes on, and {self.path} has everything", file=sys.stderr
            )

    def start_wandb(self, run_dir: Path, config: Config, facts: dict[str, Any]) -> None:
        logging.raiseExceptions = False  # wandb logs to files; on a full disk each line would be a traceback
        if self.offline:
            self.check_room()
            for name in ("CACHE", "CONFIG", "DATA"):
                os.environ.setdefault(
                    f"WANDB_{name}_DIR", str(run_dir.parent.absolute() / ".cache" / "wandb")
                )
        import wandb

        if config.run.wandb == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
            raise RuntimeError("no API key; run `wandb login` or take --wandb offline")
        self.run = wandb.init(
            project=config.run.wandb_project,
            name=config.run.run_name,
            id=self.wandb_id,
            resume="allow" if self.wandb_id else None,
            dir=run_dir,
            mode=config.run.wandb,
            config={k: v for k, v in asdict(config).items() if k != "start"} | facts,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.wandb_id = self.run.id
        for name in ("val/loss", "train/loss"):
            self.run.define_metric(name, summary="min")

    def check_room(self) -> None:
        """Raises where the disk is full, as wandb's service then loses what it is given and tells nobody."""
        self.wandb_dir.mkdir(exist_ok=True)
        if shutil.disk_usage(self.wandb_dir).free < WANDB_ROOM:
            raise RuntimeError(f"no space left in {self.wandb_dir}")

    def log(self, row: dict[str, Any]) -> None:
        """All numbers of one step, also as 0-d tensors; a number that is not finite is written as null."""
        row = {k: v if isinstance(v, int | None) else float(v) for k, v in row.items()}
        row = {k: v if v is None or math.isfinite(v) else None for k, v in row.items()}
        self.note(row)
        self.append(json.dumps(row, allow_nan=False).encode() + b"\n")
        if self.run:
            self.waiting.append(row | {"_timestamp": time.time()})
            if time.monotonic() - self.handed >= WANDB_SECONDS:
                self.hand_over()

    def note(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            self.first.setdefault(name, value)
        self.last |= row

    def hand_over(self) -> None:
        """Gives wandb the rows that wait; before a checkpoint, as a run that resumes there does not log them again."""
        rows, self.waiting, self.handed = self.waiting, [], time.monotonic()
        if self.run and rows:
            with self.surviving_wandb():
                for row in rows:
                    if self.offline:
                        self.check_room()
                    numbers = {k: v for k, v in row.items() if k != "iter" and self.wanted(k)}
                    self.run.log(numbers, step=row["iter"], commit=True)  # else wandb keeps the last one back

    def wanted(self, name: str) -> bool:
        """Whether wandb gets a number of this name."""
        return not self.core or parse(name)[0].per == "run"

    def append(self, line: bytes) -> None:
        """Whole lines or nothing; what a failing disk does not take is told once and tried again with the next."""
        told, self.unwritten = bool(self.unwritten), self.unwritten + line
        try:
            with self.path.open("ab", buffering=0) as f:
                before = f.tell()
                if f.write(self.unwritten) < len(self.unwritten):
                    f.truncate(before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.unwritten = b""
        except OSError as e:
            if not told:
                print(f"{self.path} cannot be written ({e.strerror}); training goes on", file=sys.stderr)

    def close(self, exit_code: int) -> None:
        """Ends wandb's run; any exit code but 0 marks it as failed there."""
        if self.unwritten:
            self.append(b"")
        self.hand_over()
        if self.run:
            with self.surviving_wandb():
                self.run.finish(exit_code=exit_code)

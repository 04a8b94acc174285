"""Where the numbers go: one JSON object per step in metrics.jsonl, and the same to wandb."""

import contextlib
import errno
import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs import Config


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a kill cut short is left out."""
    rows = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                rows.append(json.loads(line))
    return rows


def cut_after(path: Path, step: int) -> None:
    """Keeps the rows up to optimizer step `step`, so that a resumed run holds each step once."""
    if not path.exists():
        return
    keep = 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n") or json.loads(line)["iter"] > step:
                break
            keep += len(line)
    os.truncate(path, keep)


class Tracker:
    """Writes metrics.jsonl and wandb; what fails of them is told once, and training goes on."""

    def __init__(self, run_dir: Path, config: Config, facts: dict[str, Any], wandb_id: str | None):
        self.path = run_dir / "metrics.jsonl"
        self.wandb_id, self.run, self.told = wandb_id, None, set()
        if config.run.wandb != "disabled":
            with self.surviving("wandb", f"{self.path} has everything"):
                self.start_wandb(run_dir, config, facts)

    @contextlib.contextmanager
    def surviving(self, what: str, remedy: str):
        """Training goes on without wandb, or without a row of metrics.jsonl where the disk is full."""
        try:
            yield
        except Exception as e:
            if what == "wandb":
                self.run = None
            if what not in self.told:
                self.told.add(what)
                reason = str(e).strip().partition("\n")[0] or type(e).__name__
                print(f"{what} failed ({reason}); training goes on, and {remedy}", file=sys.stderr)

    def start_wandb(self, run_dir: Path, config: Config, facts: dict[str, Any]) -> None:
        if config.run.wandb == "offline":
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

    def log(self, row: dict[str, Any]) -> None:
        """All numbers of one step; a number that is not finite is written as null."""
        row = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
        with self.surviving("metrics.jsonl", "rows are missing from it"):
            self.append(json.dumps(row, allow_nan=False) + "\n")
        if self.run:
            with self.surviving("wandb", f"{self.path} has everything"):
                self.run.log({k: v for k, v in row.items() if k != "iter"}, step=row["iter"])

    def append(self, line: str) -> None:
        """Adds a whole line or, on a full disk, nothing. Raises OSError."""
        with self.path.open("ab", buffering=0) as f:
            size = f.tell()
            try:
                if f.write(line.encode()) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):
                    f.truncate(size)
                raise

    def close(self, exit_code: int) -> None:
        """Ends wandb's run; any exit code but 0 marks it as failed there."""
        if self.run:
            with self.surviving("wandb", f"{self.path} has everything"):
                self.run.finish(exit_code=exit_code)

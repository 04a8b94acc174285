"""What the experiments among the claims share: short training runs, and numbers that are kept as JSON.

An experiment does one piece of work for each of its jobs, which are spread over processes, seeds interleaved. What
comes back is rows of numbers; judging them and drawing them needs no training.
"""

import json
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from configs import Config, OptimConfig, RunConfig
from data import ensure_prepared, open_dataset
from model import ModelConfig
from tools.claims.claim import Check
from training.parallel import Runtime
from training.trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATASET = "stdlib"
SHAPE = {"n_layer": 8, "n_head": 4, "n_embd": 64, "block_size": 64, "dtype": "float32"}
SHORT = {"batch_size": 8, "max_iters": 100, "warmup_iters": 0, "schedule": "constant"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    number: int
    sentence: str
    setting: str
    """What is run, for the reader."""
    jobs: list[Row]
    work: Callable[[Row], Row]
    """From a job, what was measured."""
    judge: Callable[[list[Row]], Iterable[Check]]
    draw: Callable[[list[Row]], "Figure"]


def short_run(model: dict[str, Any], optim: dict[str, Any], seed: int) -> Trainer:
    """A small model before its first step, on the standard library's source text and the CPU."""
    dataset = open_dataset(DATASET)
    config = Config(
        model=ModelConfig(**SHAPE | model, vocab_size=dataset.vocab_size),
        optim=OptimConfig(**SHORT | optim),
        run=RunConfig(seed=seed, eval_tokens=8192, device="cpu"),
    )
    return Trainer(config, Runtime(torch.device("cpu")), dataset)


def run(experiment: Experiment, processes: int) -> list[Row]:
    """Does all jobs: each job with what it gave, in the order of the jobs."""
    ensure_prepared(DATASET)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, torch.set_num_threads, (1,)) as pool:
        given = tqdm(
            pool.map(experiment.work, experiment.jobs), f"claim {experiment.number}", len(experiment.jobs)
        )
        return [job | rounded(row) for job, row in zip(experiment.jobs, given, strict=True)]


def rounded(value: Any) -> Any:
    """Numbers to five digits, which is more than a seed repeats; and NaN and infinity, which JSON lacks, as None."""
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if abs(value) < float("inf") else None
    return value


def save(file: Path, rows: list[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def mean(rows: Iterable[list[float]]) -> torch.Tensor:
    """The mean over runs of equally long lists of numbers."""
    return torch.tensor(list(rows), dtype=torch.float64).mean(0)


def those(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def load(file: Path) -> list[Row]:
    return json.loads(file.read_text(encoding="utf-8"))

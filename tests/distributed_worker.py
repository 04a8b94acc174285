"""What test_distributed.py runs under torchrun.

torchrun ... tests/distributed_worker.py compare RECIPE RESULT.json   ten steps of every case, side by side
torchrun ... tests/distributed_worker.py compiled RECIPE RESULT.json  four steps of compiled models
torchrun ... tests/distributed_worker.py fail ARGUMENTS               train.py, whose second process fails
torchrun ... tests/distributed_worker.py slow-disk ARGUMENTS          train.py, asked to stop; saving takes seconds
torchrun ... tests/distributed_worker.py full-disk ARGUMENTS          the same; only the first checkpoint has room
"""

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch.distributed.tensor import DTensor

import train as script
from configs import load_config
from data import open_dataset
from training import checkpoint
from training.checkpoint import model_weights
from training.dynamics import fetch
from training.parallel import Runtime, exit_now, leave_group, whole
from training.probe import Probe
from training.setup import start
from training.trainer import Trainer

CASES = {  # of two layers: four branches
    "plain": (),
    "four placements": ("--placement", "none pre post output"),
    "four others, untied": ("--placement", "sandwich keel out_post all", "--no-tie-embeddings"),
    "methods": (
        *(
            "--placement",
            "sandwich",
            "--residual-scale",
            "lns",
            "--gain",
            "zero_centred",
            "--out-gain-init",
            "depth",
        ),
        *("--qk-norm", "head", "--v-norm", "--z-loss", "0.01", "--norm-decay", "0.1", "--logit-softcap", "5"),
    ),
    "derf": ("--norm", "derf", "--embed-scale", "sqrt_dim"),
    "bfloat16": ("--dtype", "bfloat16"),
    "float16": ("--dtype", "float16"),
}
STEPS = 10


def measure(runtime: Runtime, recipe: str, flags: tuple[str, ...]) -> dict:
    """Rows, a closer look, validation losses and dtypes of ten steps, and the weights' sum of squares after them."""
    config = load_config([recipe, "--lr", "3e-3", *flags])  # at 1e-2, ten steps make 1e-4 of rounding
    trainer = Trainer(config, runtime, open_dataset(config.data.dataset))
    begin = embedding(trainer)
    probe = Probe(trainer.model, trainer.windows, trainer.norms)
    rows = []
    for index in range(STEPS):
        probe.remember()
        rows.append(fetch(trainer.step(index, watch=True)))
        if index == STEPS // 2:  # the steps after it show that it has left everything as it was
            look = probe.measure(trainer.scale.scale)
    states = [v.dtype for state in trainer.optimizer.state.values() for v in state.values()]
    squares = {
        name: whole(t, True).double().square().sum().item()
        for name, t in model_weights(trainer.model).items()
    }
    return {
        "rows": rows,
        "look": look,
        "val_loss": trainer.evaluate(),
        "sharded": all(isinstance(p, DTensor) for p in trainer.model.parameters()),  # after the evaluation
        "dtypes": sorted({str(d) for d in (*states, *(p.dtype for p in trainer.model.parameters()))}),
        "tied": trainer.model.head.weight is trainer.model.embed.weight,
        "weights": squares,
        "moved": (embedding(trainer) - begin).norm().item() / begin.norm().item(),
    }


def embedding(trainer: Trainer) -> torch.Tensor:
    return whole(trainer.model.embed.weight, True).clone()


def compare(recipe: str, result: str) -> None:
    _, runtime = start(load_config([recipe]))
    found = {
        f"{parallel} {case}": measure(runtime, recipe, ("--parallel", parallel, *flags))
        for parallel in ("ddp", "fsdp")
        for case, flags in CASES.items()
    }
    if runtime.is_main:
        Path(result).write_text(json.dumps(found))
    leave_group()
    exit_now(0)


def compiled(recipe: str, result: str) -> None:
    """The losses of a few steps, and where Dynamo has given up a graph."""
    _, runtime = start(load_config([recipe]))
    found = {}
    for parallel in ("ddp", "fsdp"):
        torch._dynamo.utils.counters.clear()
        config = load_config([recipe, "--dropout", "0", "--compile", "--parallel", parallel])
        trainer = Trainer(config, runtime, open_dataset(config.data.dataset))
        losses = [fetch(trainer.step(index, index % 2 == 0))["train/loss"] for index in range(4)]
        counters = torch._dynamo.utils.counters
        graphs = counters["stats"]["unique_graphs"]
        found[parallel] = {"losses": losses, "breaks": dict(counters["graph_break"]), "graphs": graphs}
    if runtime.is_main:
        Path(result).write_text(json.dumps(found))
    leave_group()
    exit_now(0)


def fail(*argv: str) -> None:
    step = Trainer.step

    def patched(self, index, watch):
        if self.runtime.rank == 1 and index == 3:
            raise KeyError("the reason of process 1")
        return step(self, index, watch)

    Trainer.step = patched
    script.main(argv)


def asked_to_stop(argv: tuple[str, ...], saving) -> None:
    """train.py, whose second process gets a signal at step 6; `saving` comes between the first and its disk."""
    step, save = Trainer.step, checkpoint.save

    def signalled(self, index, watch):
        if self.runtime.rank == 1 and index == 5:
            signal.raise_signal(signal.SIGTERM)
        return step(self, index, watch)

    def wrapped(folder, weights, about, state, *rest):
        saving(state.progress.step)
        save(folder, weights, about, state, *rest)

    Trainer.step, checkpoint.save = signalled, wrapped
    try:
        script.main(argv)
    except SystemExit as e:
        exit_now(e.code)


def slow_disk(*argv: str) -> None:
    asked_to_stop(argv, lambda step: time.sleep(4))


def full_disk(*argv: str) -> None:
    def fail_later(step: int) -> None:
        if step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    asked_to_stop(argv, fail_later)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    modes = {
        "compare": compare,
        "compiled": compiled,
        "fail": fail,
        "slow-disk": slow_disk,
        "full-disk": full_disk,
    }
    modes[sys.argv[1]](*sys.argv[2:])

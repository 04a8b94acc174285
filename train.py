"""Train a GPT from a recipe and record what its normalization does inside.

    python train.py configs/quickstart.toml --norm rmsnorm --placement sandwich
    torchrun --nproc-per-node 8 train.py configs/gpt2_124m.toml

Read `train` for the order of things; what it leans on is in `training/`.
"""

from base.threads import Neighbours, share_processors

share_processors()  # before torch is imported, which reads the environment then

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kernels
from base import cli
from base.cli import UserError
from configs import Config, give_back_name, load_config
from data import Dataset
from model import NORMS, PLACEMENTS, ModelConfig
from training.clock import Clock, flops_per_token, peak_rate
from training.divergence import EXIT_CODE, Diverged, Guard, replay
from training.dynamics import fetch
from training.metrics import depth_table
from training.parallel import Runtime, exit_now, exit_quietly, is_local_main, leave_group, lost_peer
from training.probe import Probe
from training.run import EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_UNSAVED, Run, RunFolder, StopRequest
from training.sampling import grown
from training.setup import multiplies_bfloat16, open_data, out_of_memory, start
from training.tracker import Tracker
from training.trainer import Trainer

WITHOUT_WAIT = "cpu"  # the device whose numbers are there as soon as a step returns


def main(argv: Sequence[str]) -> None:
    """Raises UserError, or ends the process with one of the exit codes that training/run.py lists."""
    config = runtime = None
    try:
        if not argv:
            raise UserError(
                "name a recipe, as in `python train.py configs/quickstart.toml`; --help lists the flags"
            )
        config = load_config(argv)
        if config.start.replay:
            config = load_config([str(Path(config.start.replay, "config.toml")), *argv])
        keep_caches_in(Path(config.run.out_dir))
        config, runtime = start(config)
        if config.start.replay:
            replay(config, runtime)
        else:
            train(config, runtime, ["train.py", *argv])
    except UserError:
        if config:
            give_back_name(config)
        if runtime is None and not is_local_main():
            exit_quietly()  # the first process of this machine has found the same
        raise
    except Diverged as e:
        print(f"\n{e}", file=sys.stderr)
        raise SystemExit(EXIT_CODE) from None
    except (MemoryError, RuntimeError) as e:
        if out_of_memory(e):
            raise UserError(
                "there is not enough memory for this model and batch; a smaller --micro-batch-size takes less, and so "
                "does --activation-checkpointing"
            ) from None
        if not lost_peer(e):
            raise
        print("a process leaves, because another one of this run has ended before its time", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    finally:
        leave_group()


def train(config: Config, runtime: Runtime, command: list[str]) -> None:
    """One run from start to end. command: what was called, for run.json."""
    tell = partial(print, flush=True) if runtime.is_main else lambda *_, **__: None
    folder = RunFolder(config)
    try:
        resuming = runtime.on_main(lambda: folder.choose(config.start))
        config, dataset = open_data(config, runtime)
        trainer = runtime.on_all(lambda: Trainer(config, runtime, dataset))
        describe(trainer, dataset, tell)
        run, about = Run(trainer, dataset, folder, tell), facts(trainer, dataset)
        run.begin(resuming, about | {"command": command})
        with StopRequest() as request:
            with tracking(run, about) as tracker:
                loop(run, tracker, request)
            # The others wait until the first process has saved and told all: torchrun ends every process with the
            # first that leaves with a code.
            exit_code = runtime.on_main(lambda: early_end(run, request))
        if exit_code:
            raise SystemExit(exit_code)
        farewell(run, tracker)
    finally:
        folder.release()


@contextlib.contextmanager
def tracking(run: Run, about: dict[str, Any]) -> Iterator[Tracker | None]:
    """The tracker, on the first process; what ends in an exception is marked as failed, and run.json says so."""
    if not run.trainer.runtime.is_main:
        yield None
        return
    tracker = Tracker(run.folder.path, run.trainer.config, about, run.progress.wandb_id)
    exit_code = 1
    try:
        yield tracker
        done = run.progress.step == run.trainer.config.optim.max_iters
        run.folder.record(state="done" if done else "stopped", step=run.progress.step)
        exit_code = 0
    except Diverged as e:
        emit(run, tracker, e.step, e.row)
        run.folder.record(state="diverged", step=e.step, report=str(e).splitlines())
        raise
    except BaseException:
        run.folder.record(state="stopped", step=run.progress.step)
        raise
    finally:
        tracker.close(exit_code)


def early_end(run: Run, request: StopRequest) -> int:
    """The last words and the exit code of a run that was asked to stop; 0 for one that is done."""
    step = run.progress.step
    if not run.intact:
        run.tell(f"ending at step {step} without its checkpoint; --resume goes on from an earlier one")
        return EXIT_UNSAVED
    if step < run.trainer.config.optim.max_iters:
        reason = request.signal.name if request.signal else "a signal to another process"
        run.tell(f"stopped by {reason} at step {step}, which is saved; go on with --resume")
        return EXIT_STOPPED
    return 0


def loop(run: Run, tracker: Tracker | None, request: StopRequest) -> None:
    """Steps, and at their intervals metrics, evaluation and checkpoints, each of which the last step has too.

    A request to stop is followed after a step, on all processes after the same one. A row is made here: metrics of
    one's own may join it, as numbers or 0-d tensors.
    """
    trainer, progress = run.trainer, run.progress
    intervals, optim = trainer.config.run, trainer.config.optim
    probe = Probe(trainer.model, trainer.windows, trainer.norms, trainer.micro_batch)
    guard = Guard(trainer, run)

    def due(step: int, interval: int) -> bool:
        return interval > 0 and (step % interval == 0 or step == optim.max_iters)

    if progress.step == 0:
        at_start(run, tracker, probe)
    alone = trainer.runtime.device.type == "cpu" and trainer.runtime.world == 1
    neighbours = Neighbours() if alone else None
    clock = Clock(trainer.tokens_per_step, progress.step, optim.max_iters, peak_rate(trainer), neighbours)
    stopping = False
    while progress.step < optim.max_iters and not stopping:
        step = progress.step + 1
        log = step == 1 or due(step, intervals.log_interval) or progress.step == trainer.allowed_spike
        look, evaluate = due(step, intervals.probe_interval), due(step, intervals.eval_interval)
        if look:
            probe.remember()
        metrics = trainer.step(progress.step, log)
        stopping, overdue = trainer.runtime.any(request.signal is not None, run.overdue())
        save = stopping or overdue or due(step, intervals.checkpoint_interval)
        wait = log or look or evaluate or save or trainer.runtime.device.type == WITHOUT_WAIT
        row = fetch(metrics) if wait else {}
        if row and not guard.check(row, step):
            progress.step, stopping = trainer.allowed_spike, False
            clock.restart(progress.step)
            continue
        progress.step = step
        if log:
            guard.passed(row, step)
            row |= clock.lap(step)
        else:
            row = {}
        if look:
            row |= probe.measure(trainer.scale.scale)
        if evaluate:
            row["val/loss"] = trainer.evaluate()
            save = progress.evaluated(row["val/loss"]) or save
        if row:
            emit(run, tracker, step, row)
            clock.show(step, row, run.tell)
        if save:
            run.save(tracker)
        if look or evaluate or save:
            clock.restart(step)


def at_start(run: Run, tracker: Tracker | None, probe: Probe) -> None:
    """The row of step 0: validation loss and a closer look at the initialization."""
    run.progress.val_loss = run.trainer.evaluate()
    run.tell(f"step 0: val loss {run.progress.val_loss:.4f}")
    row = {"val/loss": run.progress.val_loss}
    if run.trainer.config.run.probe_interval:
        row |= probe.measure(run.trainer.scale.scale)
    emit(run, tracker, 0, row)


def emit(run: Run, tracker: Tracker | None, step: int, row: dict) -> None:
    if tracker:
        tracker.log({"iter": step, "tokens": step * run.trainer.tokens_per_step} | row)


def describe(trainer: Trainer, dataset: Dataset, tell) -> None:
    """The resolved configuration in short."""
    config, runtime = trainer.config, trainer.runtime
    model, optim = config.model, config.optim
    tf32 = (
        " in TF32" if config.run.tf32 and model.dtype == "float32" and runtime.device.type == "cuda" else ""
    )
    tell(
        f"model  {model.norm} {model.placement}, qk_norm {model.qk_norm}{methods(model)}, {model.pos} positions, "
        f"{model.mlp}; "
        f"{model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide; {trainer.model.n_params():,} parameters\n"
        f"data   {dataset.path}: {len(dataset.train):,} training and {len(dataset.val):,} validation tokens, "
        f"vocabulary {model.vocab_size:,}\n"
        f"step   {optim.batch_size} x {model.block_size} tokens in {trainer.accumulation} micro-batches on "
        f"{runtime.world} process(es); {optim.optimizer}, lr {optim.lr:g} to {optim.end_lr:g} ({optim.schedule}), "
        f"warm-up {optim.warmup_iters} of {optim.max_iters} steps\n"
        f"on     {runtime.device.type}, {model.dtype}{tf32}, stream in {model.residual_dtype}, "
        f"norms and joins on {norm_path(config, runtime)}{', compiled' if config.run.compile else ''}; "
        f"seed {config.run.seed}"
    )
    if model.dtype == "bfloat16" and multiplies_bfloat16(runtime.device):
        tell("       this processor multiplies bfloat16 faster than float32; --dtype float32 rounds less")
    if any("post" in PLACEMENTS[name] for name in model.placements) and not optim.warmup_iters:
        tell("warning: post-norm without a warm-up often fails to train; --warmup-iters gives it one")
    if optim.norm_decay:
        effect = {
            "one": "pulls all gains to 0; with --gain zero_centred it pulls them to 1",
            "zero_centred": "pulls all gains to 1",
            "none": "does nothing, as no norm has a gain",
        }[model.gain if NORMS[model.norm].has_gain else "none"]
        tell(f"warning: norm_decay {effect}")
    if model.norm == "batchnorm":
        tell(
            "warning: batchnorm leaks: in training, every prediction sees later tokens and other sequences through the "
            "statistics, so the training loss means little; read val/loss, which uses running statistics"
        )


def methods(model: ModelConfig) -> str:
    """The methods that a model has beside its norm, placement and QK-norm, by flag: those that are not the default."""
    defaults = ModelConfig()
    names = (
        "gain",
        "out_gain_init",
        "residual_scale",
        "v_norm",
        "embed_norm",
        "embed_scale",
        "logit_softcap",
    )
    chosen = {name: getattr(model, name) for name in names if getattr(model, name) != getattr(defaults, name)}
    return "".join(f", {name}" if value is True else f", {name} {value}" for name, value in chosen.items())


def norm_path(config: Config, runtime: Runtime) -> str:
    """What computes norms and joins, and where that is not what a GPU would rather run, why."""
    kind, model = runtime.device.type, config.model
    if (
        NORMS[model.norm].kind is None
        or model.kernel == "torch"
        or (model.kernel == "auto" and kind != "cuda")
    ):
        return "PyTorch"
    problem = kernels.triton_problem(kind, model.n_embd)
    return f"PyTorch ({problem})" if problem else "fused Triton kernels"


def facts(trainer: Trainer, dataset: Dataset) -> dict[str, Any]:
    """What run.json and wandb's config hold besides the configuration. unigram_entropy: of the validation windows."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    cuda = trainer.runtime.device.type == "cuda"
    return {
        "parameters": trainer.model.n_params(),
        "flops_per_token": flops_per_token(trainer.model),
        "dataset": str(dataset.path),
        "train_tokens": len(dataset.train),
        "unigram_entropy": trainer.unigram_entropy(),
        "commit": commit,
        "torch": torch.__version__,
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(trainer.runtime.device) if cuda else trainer.runtime.device.type,
        "processes": trainer.runtime.world,
    }


def farewell(run: Run, tracker: Tracker | None) -> None:
    """What became of every depth, a sample, and where to look next."""
    run_dir, progress, tell, trainer = run.folder.path, run.progress, run.tell, run.trainer
    tell(f"\ndone: {progress.step} steps, val loss {progress.val_loss:.4f}, best {progress.best_loss:.4f}")
    if tracker:
        table = depth_table(tracker.first, tracker.last)
        tell(f"\nfrom the first step to the last:\n{textwrap.indent(table, '    ')}")
    if trainer.runtime.world == 1 and "tokenizer" in run.dataset.meta:
        try:
            *_, [ids] = grown(trainer.model.eval(), run.dataset.tokenizer, tokens=200)
            text = run.dataset.tokenizer.decode(ids)
            tell(f"\na sample:\n{textwrap.indent(text, '    ')}")
        except UserError as e:  # a vocabulary that takes the network
            tell(f"\nno sample: {e}")
    places = {
        f"python -m tools.sample {run_dir}": "more text",
        f"python -m tools.report {run_dir}": "a page of what happened inside",
        f"wandb leet {run_dir}/wandb": "every curve, in the terminal; /loss finds the losses",
        f"{run_dir}/metrics.jsonl": "the same numbers, a JSON object per step",
    }
    if not (tracker and tracker.run):
        del places[f"wandb leet {run_dir}/wandb"]
    elif tracker.resumed:
        places[f"wandb leet {run_dir}/wandb"] += " (of this start alone; the page has all)"
    width = max(map(len, places))
    tell("\nwhere to look next:")
    tell("\n".join(f"    {place:{width}}    {what}" for place, what in places.items()))
    here, active = Path(__file__).parent / ".venv", os.environ.get("VIRTUAL_ENV")
    if not active and Path(sys.prefix) == here:
        tell(
            "(after `source .venv/bin/activate`, so that python and wandb are the ones that make has installed)"
        )


def keep_caches_in(out_dir: Path) -> None:
    """torch's compilation caches go under out/, unless the user has chosen a place or out/ cannot be written to."""
    for name in ("TORCHINDUCTOR", "TRITON"):
        folder = (out_dir / ".cache" / name.lower()).absolute()
        with contextlib.suppress(OSError):  # importing torch's compiler fails where it cannot make the folder
            folder.mkdir(parents=True, exist_ok=True)
            os.environ.setdefault(f"{name}_CACHE_DIR", str(folder))


if __name__ == "__main__":
    try:
        cli.run(main, result_is_printed=False)
    except SystemExit as e:
        if "WORLD_SIZE" in os.environ:
            exit_now(e.code or 0)
        raise

"""The first hour on a GPU in one command: what is expected of it, and what came.

    python -m tools.prove_gpu --out DIR [--nanogpt CHECKOUT]

The stages follow each other, each in a process of its own and with a time limit. One that fails or takes too long
does not stop the next. DIR/STAGE.json holds what a stage has found, DIR/STAGE.log what it printed, and DIR/table.md
the table that is printed last. An H200 should need less than eight minutes, most of it for compilation (not measured).

Needed: torch 2.11 or newer with CUDA, triton, numpy, and the wheels pydantic, safetensors, tiktoken, tqdm, pytest and
hypothesis; pytest-xdist makes the tests faster. No data set and no network. Exit code 1 if something is not as
expected.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from pydantic.dataclasses import dataclass

from base.cli import STRICT, require, run
from base.files import check_writable, make_folder, read_object, write_text
from base.flags import options
from base.timing import relative
from configs import load_config, replace
from kernels import LAUNCHER_PROBLEM
from tools.against_nanogpt import compete, load_nanogpt, peer_steps, summary, with_data
from tools.claims.claim import Check, at_least, at_most, equal, figure
from tools.claims.page import cell
from tools.profile.steps import matrix_rate, steps_of
from training.clock import peak_flops
from training.probe import Probe
from training.tracker import read_metrics

RECIPE = "configs/gpt2_124m.toml"
ROOT = Path(__file__).parents[1]
HEAD = "| stage | | expected | came | |"  # of the table


@dataclass(frozen=True, config=STRICT)
class Options:
    """The first hour on a GPU: what is expected of it, and what came."""

    out: str
    """Folder for the findings."""
    nanogpt: str = ""
    """Folder of a nanoGPT checkout, to be compared with."""
    stage: str = ""
    """Only this stage, without a time limit."""

    def __post_init__(self):
        known = not self.stage or self.stage in STAGES
        require(known, f"--stage is {self.stage!r}; the stages are {', '.join(STAGES)}")


class Stage(NamedTuple):
    find: Callable[[Options], Iterator[Check]]
    limit: int
    """Seconds, about twice what an H200 should take."""
    needs_cuda: bool = True


def machine(asked: Options) -> Iterator[Check]:
    """What is there, and how fast it can be at most."""
    yield figure("Python, torch", f"{platform.python_version()}, {torch.__version__}")
    if not torch.cuda.is_available():
        return
    import triton

    yield figure(
        "GPU, triton, CUDA", f"{torch.cuda.get_device_name()}, {triton.__version__}, {torch.version.cuda}"
    )
    yield equal("what Triton's launcher lacks", LAUNCHER_PROBLEM, None)
    from kernels.bench import copy_bandwidth

    yield figure("a copy moves, GB/s", copy_bandwidth("cuda") / 1e9)
    rate = matrix_rate(torch.device("cuda"), torch.bfloat16)
    peak = peak_flops(torch.cuda.get_device_name())
    yield figure("a product of bfloat16, 8,192 wide, TFLOP/s", rate / 1e12)
    if peak:
        yield at_least("its share of the data sheet's", rate / peak, 0.6)
        yield at_most("its share of the data sheet's, again", rate / peak, 1.0)


def tests(*chosen: str) -> Callable[[Options], Iterator[Check]]:
    """A stage of tests of this repository."""

    def find(asked: Options) -> Iterator[Check]:
        workers = ["-n", "8"] if importlib.util.find_spec("xdist") else []
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *workers, *chosen]
        last = ""
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
        yield figure("pytest", last)
        yield equal("its exit code", process.returncode, 0)

    return find


def bench(asked: Options) -> Iterator[Check]:
    """Every fused call's share of the bandwidth of a copy, and its time beside the others'."""
    file = Path(asked.out, "kernels.bench.json").absolute()
    command = [sys.executable, "-m", "kernels.bench", "--quick", "--json", str(file)]
    yield equal("exit code of kernels.bench", subprocess.run(command, cwd=ROOT).returncode, 0)
    report = json.loads(file.read_text(encoding="utf-8"))
    ours: dict[str, float] = {}
    for row in report["results"]:
        parts = ("call", "kind", "stream", "rows", "D", "direction")
        what = " ".join(str(row[part]) for part in parts if part in row)
        if "problem" in row:
            yield equal(f"{what}: {row['contender']}", row["problem"], "")
        elif row["contender"] == "ours":
            ours[what] = row["seconds"]
            share = row["bytes_per_second"] / report["copy_bytes_per_second"]
            yield at_least(f"{what}: share of a copy's bandwidth", share, 0.9)
        else:
            yield figure(f"{what}: time of {row['contender']} over ours", row["seconds"] / ours[what])


def speed(asked: Options) -> Iterator[Check]:
    """gpt2_124m, compiled: ours, ours on PyTorch's operators, and nanoGPT, in turn on one GPU."""
    flags = ["--batch-size", "64", "--micro-batch-size", "16", "--compile", "--device", "cuda"]
    with with_data(load_config([RECIPE, *flags]), random_tokens=True) as config:
        sides: dict[str, tuple] = {
            "ours": (steps_of, config),
            "ours on torch": (steps_of, replace(config, "model", kernel="torch")),
        }
        if asked.nanogpt:
            sides["nanogpt"] = (peer_steps, config, asked.nanogpt)
        times, peaks, device = compete(sides, rounds=7, count=3)
    found = summary(config, times, peaks, device)
    for name in sides:
        side = found[name]
        mfu = "unknown" if side["mfu"] is None else f"{side['mfu']:.1%}"
        yield figure(
            f"{name}: tokens/s, MFU, peak GiB", f"{side['tokens_per_s']:,.0f}, {mfu}, {side['peak_gib']:.1f}"
        )
    for name, least in (("ours on torch", 1.0), ("nanogpt", 1.15)):
        if name in sides:
            row = relative(times, name)["ours"]
            what = f"ours over {name} (quartiles {row['low']:.2f} to {row['high']:.2f})"
            yield at_least(what, row["ratio"], least)
    if asked.nanogpt:
        yield at_most("peak memory over nanoGPT's", peaks["ours"] / peaks["nanogpt"], 1.0)


def equal_losses(asked: Options) -> Iterator[Check]:
    """The same runs on PyTorch's operators and on the fused kernels, at the same time, on the standard library."""
    yield from losses_apart(asked, "bfloat16", 200, [], mean=5e-3, most=5e-2)
    yield from losses_apart(
        asked, "float32", 50, ["--n-layer", "6", "--dtype", "float32"], mean=1e-4, most=1e-3
    )


def losses_apart(
    asked: Options, name: str, steps: int, flags: list[str], mean: float, most: float
) -> Iterator[Check]:
    command = [sys.executable, "train.py", RECIPE, *SHORT.split(), *flags, "--max-iters", str(steps)]
    command += ["--out-dir", str(Path(asked.out, "runs").absolute())]
    processes = {}
    for kernel in ("torch", "triton"):
        of_kernel = [*command, "--kernel", kernel, "--run-name", f"{name}_{kernel}"]
        processes[kernel] = subprocess.Popen(of_kernel, cwd=ROOT)
    codes = [process.wait() for process in processes.values()]
    yield equal(f"{name}: exit codes of train.py", codes, [0, 0])
    if any(codes):
        return
    losses = []
    for kernel in processes:
        rows = read_metrics(Path(asked.out, "runs", f"{name}_{kernel}", "metrics.jsonl"))
        losses.append([row["train/loss"] for row in rows if "train/loss" in row])
    apart = [abs(a - b) for a, b in zip(*losses, strict=True)]
    yield figure(f"{name}: loss at the start and at the end", [losses[0][0], losses[0][-1]])
    late = statistics.mean(apart[-steps // 4 :])
    yield at_most(f"{name}: mean difference over the last quarter of the steps", late, mean)
    yield at_most(f"{name}: largest difference", max(apart), most)


SHORT = (
    "--dataset stdlib --vocab-size 0 --batch-size 16 --micro-batch-size 16 --warmup-iters 20 --log-interval 1 "
    "--probe-interval 0 --eval-tokens 4096 --wandb disabled --no-compile --overwrite"
)


def memory(asked: Options) -> Iterator[Check]:
    """Peak memory of a step and of the closer look, and what the host takes for a step."""
    for micro in ("2", "16"):
        flags = ["--batch-size", micro, "--micro-batch-size", micro, "--device", "cuda", "--no-compile"]
        with with_data(load_config([RECIPE, *flags]), random_tokens=True) as config:
            steps = steps_of(config)
            trainer = steps.trainer
            probe = Probe(trainer.model, trainer.windows, trainer.norms, trainer.micro_batch)
            step, look = peak_gib(steps), peak_gib(probe.measure)
            yield figure(f"micro-batch {micro}: peak of a step, of the closer look, GiB", [step, look])
            if micro == "2":
                yield at_most(
                    f"micro-batch {micro}: the closer look's peak over the step's", look / step, 1.05
                )
            begin = time.perf_counter()
            for _ in range(10):
                steps()
            host = time.perf_counter() - begin
            steps.wait()
            whole = time.perf_counter() - begin
            what = f"micro-batch {micro}: milliseconds of a step, on the host and in all"
            yield figure(what, [100 * host, 100 * whole])
        del steps, trainer, probe


def peak_gib(work: Callable[[], object]) -> float:
    """Most memory of tensors while `work` runs for the second time."""
    work()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() / 2**30


def sweep(asked: Options) -> Iterator[Check]:
    """The backward of pre-norm's join, by its number of programs and of tiles loaded ahead, at a step's rows."""
    from kernels import bench
    from kernels.triton_kernels import Tiles

    def microseconds(D: int) -> float:
        rows = bench.measure("pre", "rmsnorm", torch.bfloat16, bench.GPU_ROWS, D, "cuda", 10, compiled=False)
        ours = [row for row in rows if row["contender"] == "ours" and row["direction"] == "backward"]
        return 1e6 * ours[0]["seconds"]

    for D in (768, 2048, 4096, 8192):
        times, chosen = {}, microseconds(D)
        for programs, stages in itertools.product((128, 256, 512, 1024, 2048), (1, 2, 3)):
            fixed = {"programs": lambda self, M, n=programs: min(self.count(M), n)}
            fixed["stages"] = lambda self, *loaded, n=stages: n
            with mock.patch.multiple(Tiles, **fixed):
                times[f"{programs} programs, {stages} stages"] = microseconds(D)
        best = min(times, key=times.get)
        told = ", ".join(f"{name}: {time:.1f}" for name, time in times.items())
        yield figure(f"D {D}: microseconds as chosen, and otherwise", f"{chosen:.1f}; {told}")
        yield at_most(f"D {D}: as chosen over the best, {best}", chosen / times[best], 1.05)


STAGES = {
    "machine": Stage(machine, 60, needs_cuda=False),
    "kernels": Stage(
        tests("tests/test_kernels.py", "tests/test_kernels_accuracy.py", "tests/test_kernels_ops.py"), 240
    ),
    "gpu_tests": Stage(tests("-m", "gpu"), 240),
    "bench": Stage(bench, 240),
    "speed": Stage(speed, 300),
    "equal_losses": Stage(equal_losses, 150),
    "memory": Stage(memory, 90),
    "sweep": Stage(sweep, 120),
}


def findings(out: Path, name: str) -> list[Check]:
    """What a stage has found so far."""
    return [Check(**row) for row in read_object(out / f"{name}.json").get("checks", [])]


def keep(out: Path, name: str, checks: list[Check], **about: Any) -> None:
    text = json.dumps({"stage": name, **about, "checks": [asdict(check) for check in checks]}, indent=1)
    write_text(out / f"{name}.json", text + "\n")


def run_stage(asked: Options, name: str) -> None:
    """In the process of a stage: keeps each check as it comes."""
    checks: list[Check] = []
    for check in STAGES[name].find(asked):
        checks.append(check)
        keep(Path(asked.out), name, checks)


def started(asked: Options, name: str) -> str:
    """Runs a stage in a process of its own. How it ended: "done", or why not."""
    command = [sys.executable, "-m", "tools.prove_gpu", "--out", asked.out, "--stage", name]
    command += ["--nanogpt", asked.nanogpt] if asked.nanogpt else []
    with open(Path(asked.out, f"{name}.log"), "w", encoding="utf-8") as log:
        print(shlex.join(command), file=log, flush=True)
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(timeout=STAGES[name].limit)
        except subprocess.TimeoutExpired:
            return f"took more than {STAGES[name].limit} seconds"
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it has started ends with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "done" if code == 0 else f"ended with exit code {code}; see {name}.log"


def table(found: dict[str, tuple[str, list[Check]]]) -> str:
    """Markdown: for each stage how it ended, and for each of its lines what was expected and what came."""
    lines = [HEAD, "|---|---|---|---|---|"]
    for name, (ended, checks) in found.items():
        lines.append(f"| **{name}** | | | {ended} | |")
        for check in checks:
            texts = (cell(text) for text in (check.what, check.expected, check.measured))
            lines.append(f"| | {' | '.join(texts)} | {'' if check.holds else '**not so**'} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    asked = options(Options, argv, "python -m tools.prove_gpu", __doc__)
    if asked.nanogpt:
        load_nanogpt(asked.nanogpt)
    out = Path(asked.out)
    make_folder(out)
    if asked.stage:
        return run_stage(asked, asked.stage)
    check_writable("--out", f"{out}/table.md", HEAD)
    for name in STAGES:
        check_writable("--out", f"{out}/{name}.json", f'"stage": "{name}"')
        check_writable("--out", f"{out}/{name}.log", f"--stage {name}")
    found = {}
    for name, stage in STAGES.items():
        keep(out, name, [])
        begin = time.monotonic()
        if stage.needs_cuda and not torch.cuda.is_available():
            ended = "skipped: no CUDA device"
        else:
            ended = started(asked, name)
        found[name] = ended, findings(out, name)
        seconds = round(time.monotonic() - begin)
        keep(out, name, found[name][1], ended=ended, seconds=seconds)
        print(f"{name}: {ended} ({seconds} s)", flush=True)
    text = table(found)
    write_text(out / "table.md", text + "\n")
    print(f"\n{text}")
    fine = ("done", "skipped: no CUDA device")
    held = all(ended in fine and all(c.holds for c in checks) for ended, checks in found.values())
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    run(main)

"""Claims 15 to 18: short training runs, whose numbers are kept as JSON.

An experiment does one piece of work for each of its jobs, which are spread over processes, seeds interleaved.
"""

import itertools
import json
import math
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm import tqdm

from base.files import write_text
from configs import Config, OptimConfig, RunConfig
from data import ensure_prepared, open_dataset
from model import GPT, Linear, ModelConfig
from tools.claims.claim import Check, Experiment, Row, at_least, at_most, control, figure
from tools.palette import drawing, line_style
from training.dynamics import fetch
from training.metrics import depth_names
from training.parallel import Runtime
from training.probe import Probe
from training.trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATASET = "stdlib"
SHAPE = {"n_layer": 8, "n_head": 4, "n_embd": 64, "block_size": 64, "dtype": "float32"}
SHORT = {"batch_size": 8, "max_iters": 100, "warmup_iters": 0, "schedule": "constant"}
PLACEMENTS = ("pre", "post", "output", "sandwich")  # those on record
AVERAGED = 20  # last steps, whose mean loss is the final one


def short_run(model: dict[str, Any], seed: int, lr: float = 1e-3, warmup_iters: int = 0) -> Trainer:
    """A small model before its first step, on the standard library's source text and the CPU."""
    dataset = open_dataset(DATASET)
    optim = SHORT | {"lr": lr, "min_lr": lr, "warmup_iters": warmup_iters}
    config = Config(
        model=ModelConfig(**SHAPE | model, vocab_size=dataset.vocab_size),
        optim=OptimConfig(**optim),
        run=RunConfig(seed=seed, eval_tokens=8192, device="cpu"),
    )
    return Trainer(config, Runtime(torch.device("cpu")), dataset)


def jobs(seeds: Iterable[int], *varied: list[Row]) -> list[Row]:
    """A job for every seed, which changes slowest, and every combination of what is varied."""
    combinations = itertools.product([{"seed": seed} for seed in seeds], *varied)
    return [{name: value for part in parts for name, value in part.items()} for parts in combinations]


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
    write_text(file, f"[\n{lines}\n]\n")


def load(file: Path) -> list[Row]:
    return json.loads(file.read_text(encoding="utf-8"))


def mean(rows: Iterable[list[float]]) -> torch.Tensor:
    """The mean over runs of equally long lists of numbers."""
    return torch.tensor(list(rows), dtype=torch.float64).mean(0)


def rows_where(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


Curve = tuple[str, Sequence, Sequence]  # label, x, y


def panels(curves: dict[str, list[Curve]], size: tuple[float, float], ylabel: str, **settings) -> "Figure":
    """Plots side by side, by title. Curves of one label share a colour and an entry of the legend."""
    with drawing():
        from matplotlib.figure import Figure

        picture = Figure(figsize=size, layout="constrained")
        for axes, (title, own) in zip(
            picture.subplots(1, len(curves), sharey=True), curves.items(), strict=True
        ):
            labels = list(dict.fromkeys(label for label, _, _ in own))
            shown: set[str] = set()
            for label, x, y in own:
                few = {"marker": "." if 2 < len(x) < 40 else ""}
                name = None if label in shown else label
                axes.plot(x, y, **line_style(labels.index(label)), **few, linewidth=1.2, label=name)
                shown.add(label)
            axes.set(title=title, **settings)
        picture.axes[0].set_ylabel(ylabel)
        handles, names = picture.axes[-1].get_legend_handles_labels()
        picture.legend(handles, names, loc="outside lower center", ncols=6)
    return picture


# ---- 15: how the stream grows with depth and during training

LOOKED_AT = (0, 25, SHORT["max_iters"] - 1)  # steps
DEPTHS = [f"residual_rms/{name}" for name in depth_names(SHAPE["n_layer"])]


def growth(job: Row) -> Row:
    """RMS of the stream [len(LOOKED_AT), 2L + 1] at every depth before some of the steps."""
    trainer, rms = short_run({"placement": job["placement"]}, job["seed"]), []
    for step in range(LOOKED_AT[-1] + 1):
        values = trainer.step(step, watch=step in LOOKED_AT)
        if step in LOOKED_AT:
            row = fetch(values)
            rms.append([row[depth] for depth in DEPTHS])
    return {"rms": rms}


def judge_growth(rows: list[Row]) -> Iterator[Check]:
    def ratio(what: str, value: torch.Tensor, placement: str, least: float) -> Check:
        if placement == "post":
            return at_most(f"{placement}{what}", value.item(), 1.25)
        return at_least(f"{placement}{what}", value.item(), least)

    for placement in PLACEMENTS:
        first, *_, last = mean(row["rms"] for row in rows_where(rows, placement=placement))  # [2L + 1]
        for when, rms in (("before training", first), ("at the end", last)):
            places = rms[[0, len(rms) // 2, -1]]
            yield figure(f"{placement}, {when}: RMS at the embedding, half way, at the top", places)
            yield ratio(f", {when}: RMS at the top over the first join's", rms[-1] / rms[1], placement, 1.1)
        yield ratio(": RMS at the top, at the end over before training", last[-1] / first[-1], placement, 1.5)


def draw_growth(rows: list[Row]) -> "Figure":
    curves = {}
    for placement in PLACEMENTS:
        found = mean(row["rms"] for row in rows_where(rows, placement=placement))
        curves[placement] = [(f"step {s}", range(len(y)), y) for s, y in zip(LOOKED_AT, found, strict=True)]
    return panels(curves, (10, 2.6), "RMS of the stream", xlabel="joins passed", yscale="log")


GROWTH = Experiment(
    number=15,
    sentence="The stream's RMS grows with depth and training in pre, output and sandwich; in post every join holds it.",
    setting=f"{SHAPE['n_layer']} layers, width {SHAPE['n_embd']}, learning rate 1e-3, {SHORT['max_iters']} steps, "
    "means over seeds 1, 2",
    jobs=jobs((1, 2), [{"placement": placement} for placement in PLACEMENTS]),
    work=growth,
    judge=judge_growth,
    draw=draw_growth,
)


# ---- 16: the gradient by depth at initialization, and what of it is the initialization's

LAYERS, WIDTH = 16, 128
INITS = {"normal": "the model's own, N(0, 0.02)", "xavier": "Xavier"}


def xavier(model: GPT) -> None:
    """Glorot & Bengio 2010 for every linear of a branch."""
    for module in model.branches.modules():
        if isinstance(module, Linear):
            nn.init.xavier_normal_(module.weight)


def gradients(job: Row) -> Row:
    """L2 norm of the first batch's gradient of `down`, by layer."""
    trainer = short_run({"n_layer": LAYERS, "n_embd": WIDTH, "placement": job["placement"]}, job["seed"])
    if job["init"] == "xavier":
        xavier(trainer.model)
    trainer.gradient(0, watch=False)
    return {"gradient": [mlp.down.weight.grad.norm().item() for mlp in trainer.model.branches[1::2]]}


def judge_gradients(rows: list[Row]) -> Iterator[Check]:
    for init, placement in itertools.product(INITS, PLACEMENTS):
        gradient = mean(row["gradient"] for row in rows_where(rows, placement=placement, init=init))
        ratio, what = (gradient[0] / gradient[-1]).item(), f"{placement}, {init}: first layer over last"
        if placement == "post":
            yield at_most(f"{what}, or its inverse", max(ratio, 1 / ratio), 1.25)
            yield control(at_least(f"{what}, as where it falls", ratio, 1.25))
        else:
            yield at_least(what, ratio, 1.25)
        yield figure(f"{placement}, {init}: first, middle and last layer", gradient[[0, LAYERS // 2, -1]])


def draw_gradients(rows: list[Row]) -> "Figure":
    curves: dict[str, list[Curve]] = {title: [] for title in INITS.values()}
    for (init, title), placement in itertools.product(INITS.items(), PLACEMENTS):
        found = mean(row["gradient"] for row in rows_where(rows, placement=placement, init=init))
        curves[title].append((placement, range(LAYERS), found / found[-1]))
    return panels(curves, (8, 3), "gradient of down over the last layer's", xlabel="layer", ylim=(0, None))


GRADIENTS = Experiment(
    number=16,
    sentence="At initialization the gradient of `down` falls from the first to the last layer in pre, output and "
    "sandwich, and is flat in post, both with N(0, 0.02) and with Xavier initialization.",
    setting=f"{LAYERS} layers, width {WIDTH}, the first batch, means over seeds 1, 2, 3",
    jobs=jobs((1, 2, 3), [{"placement": p} for p in PLACEMENTS], [{"init": init} for init in INITS]),
    work=gradients,
    judge=judge_gradients,
    draw=draw_gradients,
)


# ---- 17: where post-norm fails to train without warm-up, and what warm-up and DeepNorm change there

PLACES = [(8, 3e-3), (16, 1e-3), (16, 3e-3)]  # (layers, learning rate)
SPACING = 5
STEPS, WARMUP = 220, 50
VARIANTS = {
    "post": ({"placement": "post"}, 0),
    "post, warm-up": ({"placement": "post"}, WARMUP),
    "post, DeepNorm": ({"placement": "post", "residual_scale": "deepnorm"}, 0),
    "pre": ({"placement": "pre"}, 0),
}


def warm_up(job: Row) -> Row:
    """The training loss every few steps, its mean over the last ones, and the unigram entropy of the data."""
    model, warmup = VARIANTS[job["variant"]]
    trainer = short_run(model | {"n_layer": job["n_layer"]}, job["seed"], job["lr"], warmup)
    losses = [trainer.step(step, watch=False)["train/loss"].item() for step in range(STEPS)]
    return {
        "loss": losses[::SPACING],
        "final": sum(losses[-AVERAGED:]) / AVERAGED,
        "unigram": trainer.unigram_entropy(),
    }


def judge_warm_up(rows: list[Row]) -> Iterator[Check]:
    unigram, stuck = rows[0]["unigram"], {}
    yield figure("unigram entropy: the loss of knowing how frequent each byte is, and nothing more", unigram)
    for (n_layer, lr), variant in itertools.product(PLACES, VARIANTS):
        runs = rows_where(rows, n_layer=n_layer, lr=lr, variant=variant)
        losses = [math.inf if row["final"] is None else row["final"] for row in runs]
        stuck[n_layer, lr, variant] = sum(loss >= unigram for loss in losses)
        what = f"{n_layer} layers, rate {lr:g}, {variant}: final loss by seed"
        yield figure(what, [round(loss, 2) for loss in losses])
    *easier, (n_layer, lr) = PLACES
    runs = len(runs)
    yield at_least(
        f"{n_layer} layers, rate {lr:g}, post: runs above it, of {runs}", stuck[n_layer, lr, "post"], runs
    )
    for layers, rate in easier:
        yield at_most(f"{layers} layers, rate {rate:g}, post: runs above it", stuck[layers, rate, "post"], 0)
    others = {variant: stuck[n_layer, lr, variant] for variant in list(VARIANTS)[1:]}
    for variant, count in others.items():
        yield at_most(f"{n_layer} layers, rate {lr:g}, {variant}: runs above it, of {runs}", count, runs - 1)
        yield control(at_most(f"{n_layer} layers, rate {lr:g}, {variant}: none above it", count, 0))


def draw_warm_up(rows: list[Row]) -> "Figure":
    curves: dict[str, list[Curve]] = {}
    for n_layer, lr in PLACES:
        own = curves[f"{n_layer} layers, rate {lr:g}"] = []
        for variant in VARIANTS:
            for row in rows_where(rows, n_layer=n_layer, lr=lr, variant=variant):
                losses = [math.nan if loss is None else loss for loss in row["loss"]]
                own.append((variant, range(0, STEPS, SPACING), losses))
        own.append(("unigram entropy", [0, STEPS], [rows[0]["unigram"]] * 2))
    return panels(curves, (10, 3), "training loss", xlabel="step", ylim=(2, 4.5))


WARM_UP = Experiment(
    number=17,
    sentence="16 layers of post-norm at a rate of 3e-3 without warm-up stay above the unigram entropy, and at half the "
    "depth or a third of the rate they do not; warm-up, DeepNorm or pre-norm helps one run there, and not every run.",
    setting=f"Width 64, {STEPS} steps, constant rate after {WARMUP} steps of warm-up or none, gradients clipped at 1; "
    f"the final loss is the mean training loss of the last {AVERAGED} steps; seeds 1, 2",
    jobs=jobs((1, 2), [{"n_layer": n, "lr": lr} for n, lr in PLACES], [{"variant": v} for v in VARIANTS]),
    work=warm_up,
    judge=judge_warm_up,
    draw=draw_warm_up,
)


# ---- 18: attention logits at a high learning rate, with and without QK-norm

RATES, QK_NORMS = (1e-3, 1e-2), ("off", "head")
LOGIT_STEPS, LOGIT_SPACING = 120, 20
LOGIT_MODEL = {"n_layer": 4, "norm": "rmsnorm", "bias": False}


def qk_bound(model: GPT) -> float:
    """What no logit exceeds with QK-norm per head: |q| and |k| are at most sqrt(head_dim) times the largest gain."""
    return max(
        attention.head_dim**0.5 * attention.q_norm.weight.abs().max() * attention.k_norm.weight.abs().max()
        for attention in model.branches[0::2]
    ).item()


def logits(job: Row) -> Row:
    """The largest attention logit of all layers every few steps, and the bound that QK-norm sets at the end."""
    trainer = short_run(LOGIT_MODEL | {"qk_norm": job["qk_norm"]}, job["seed"], job["lr"])
    probe = Probe(trainer.model, trainer.windows, trainer.norms, trainer.micro_batch)
    largest, losses = [], []
    for step in range(LOGIT_STEPS + 1):
        if step % LOGIT_SPACING == 0:
            seen = probe.measure()
            largest.append(max(v for name, v in seen.items() if name.startswith("attn_logit_max/")))
        losses.append(trainer.step(step, watch=False)["train/loss"].item())
    measured = {"logit": largest, "final": sum(losses[-AVERAGED:]) / AVERAGED}
    return measured if job["qk_norm"] == "off" else measured | {"bound": qk_bound(trainer.model)}


def judge_logits(rows: list[Row]) -> Iterator[Check]:
    top = {}
    for lr, qk_norm in itertools.product(RATES, QK_NORMS):
        runs = rows_where(rows, lr=lr, qk_norm=qk_norm)
        logit, what = mean(row["logit"] for row in runs), f"rate {lr:g}, QK-norm {qk_norm}"
        top[lr, qk_norm] = logit[-1].item()
        places = logit[[0, len(logit) // 2, -1]]
        yield figure(f"{what}: largest logit at the start, half way, at the end", places)
        yield figure(f"{what}: training loss at the end", mean([row["final"]] for row in runs).item())
        if qk_norm == "head":
            share = max(row["logit"][-1] / row["bound"] for row in runs)
            yield at_most(f"{what}: largest logit over its bound sqrt(head_dim) gain gain", share, 1)
    low, high = RATES
    yield at_least("without QK-norm, the high rate over the low one", top[high, "off"] / top[low, "off"], 2)
    yield at_least("at the high rate, without QK-norm over with it", top[high, "off"] / top[high, "head"], 2)


def draw_logits(rows: list[Row]) -> "Figure":
    curves: dict[str, list[Curve]] = {}
    for lr in RATES:
        curves[f"rate {lr:g}"] = [
            (f"QK-norm {row['qk_norm']}", range(0, LOGIT_STEPS + 1, LOGIT_SPACING), row["logit"])
            for qk_norm in QK_NORMS
            for row in rows_where(rows, lr=lr, qk_norm=qk_norm)
        ]
    return panels(curves, (8, 3), "largest attention logit", xlabel="step", yscale="log")


LOGITS = Experiment(
    number=18,
    sentence="At a high learning rate the largest attention logit grows without QK-norm and stays bounded with it.",
    setting=f"{LOGIT_MODEL['n_layer']} layers, width {SHAPE['n_embd']}, RMSNorm, pre, {LOGIT_STEPS} steps, "
    "means over seeds 1, 2",
    jobs=jobs((1, 2), [{"lr": lr} for lr in RATES], [{"qk_norm": qk_norm} for qk_norm in QK_NORMS]),
    work=logits,
    judge=judge_logits,
    draw=draw_logits,
)

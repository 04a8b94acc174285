"""Claim 17: where post-norm fails to train without warm-up, and what warm-up and DeepNorm change there."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from tools.claims.claim import Check, at_least, at_most, figure
from tools.claims.experiments import Experiment, Row, short_run, those

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = (1, 2)
PLACES = [(8, 3e-3), (16, 1e-3), (16, 3e-3)]  # (layers, learning rate)
STEPS, WARMUP, AVERAGED, SPACING = 220, 50, 20, 5
VARIANTS = {
    "post": ({"placement": "post"}, 0),
    "post, warm-up": ({"placement": "post"}, WARMUP),
    "post, DeepNorm": ({"placement": "post", "residual_scale": "deepnorm"}, 0),
    "pre": ({"placement": "pre"}, 0),
}


def unigram_entropy(tokens: torch.Tensor, vocab_size: int) -> float:
    """The loss, in nats, of a model that knows how frequent each token is and nothing else."""
    frequency = torch.bincount(tokens, minlength=vocab_size) / len(tokens)
    return torch.special.entr(frequency).sum().item()


def work(job: Row) -> Row:
    """The training loss every few steps, its mean over the last ones, and the unigram entropy of the data."""
    model, warmup = VARIANTS[job["variant"]]
    optim = {"lr": job["lr"], "min_lr": job["lr"], "warmup_iters": warmup}
    trainer = short_run(model | {"n_layer": job["n_layer"]}, optim, job["seed"])
    losses = [trainer.step(step, watch=False)["loss"].item() for step in range(STEPS)]
    tokens, _ = trainer.windows.batch(range(len(trainer.windows)))
    return {
        "loss": losses[::SPACING],
        "final": sum(losses[-AVERAGED:]) / AVERAGED,
        "unigram": unigram_entropy(tokens.flatten(), trainer.config.model.vocab_size),
    }


def finals(rows: list[Row]) -> dict[tuple[int, float], dict[str, float]]:
    """By (depth, rate): the final loss of every variant, a mean over seeds; infinite where a run diverged."""
    table = {}
    for n_layer, lr in PLACES:
        cell = those(rows, n_layer=n_layer, lr=lr)
        losses = {variant: [row["final"] for row in those(cell, variant=variant)] for variant in VARIANTS}
        table[n_layer, lr] = {v: math.inf if None in ls else sum(ls) / len(ls) for v, ls in losses.items()}
    return table


def judge(rows: list[Row]) -> Iterator[Check]:
    table, unigram = finals(rows), rows[0]["unigram"]
    yield figure("unigram entropy: what a model that has learned nothing but frequencies loses", unigram)
    for (n_layer, lr), loss in table.items():
        what = f"{n_layer} layers, rate {lr:g}: {'; '.join(VARIANTS)}"
        yield figure(what, [round(value, 3) for value in loss.values()])
    failed = [place for place, loss in table.items() if loss["post"] >= unigram]
    yield at_least("depths and rates at which post without warm-up ends no better than that", len(failed), 1)
    for n_layer, lr in failed[:1]:
        loss, where = table[n_layer, lr], f"at the first of these, {n_layer} layers and {lr:g}"
        yield figure(f"{where}: post without warm-up", loss["post"])
        for variant in list(VARIANTS)[1:]:
            yield at_most(f"{where}: {variant}", loss[variant], unigram)


def draw(rows: list[Row]) -> "Figure":
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 3), layout="constrained")
    for axes, (n_layer, lr) in zip(picture.subplots(1, len(PLACES), sharey=True), PLACES, strict=True):
        for number, variant in enumerate(VARIANTS):
            for row in those(rows, n_layer=n_layer, lr=lr, variant=variant):
                label = variant if row["seed"] == SEEDS[0] else None
                losses = [math.nan if loss is None else loss for loss in row["loss"]]
                axes.plot(range(0, STEPS, SPACING), losses, color=f"C{number}", lw=1, label=label)
        axes.axhline(rows[0]["unigram"], color="grey", ls=":", label="unigram entropy")
        axes.set(title=f"{n_layer} layers, rate {lr:g}", xlabel="step", ylim=(2, 4.5))
    picture.axes[0].set_ylabel("training loss")
    picture.axes[0].legend()
    return picture


EXPERIMENT = Experiment(
    number=17,
    sentence="Post-norm needs warm-up: without it there is a depth and a rate at which the loss does not fall below "
    "the unigram entropy, where pre-norm, warm-up and DeepNorm all learn.",
    setting=f"Width 64, {STEPS} steps, constant rate after {WARMUP} steps of warm-up or none, gradients clipped at 1; "
    f"the loss is the training loss over the last {AVERAGED} steps, a mean over seeds {', '.join(map(str, SEEDS))}",
    jobs=[
        {"n_layer": n_layer, "lr": lr, "variant": variant, "seed": seed}
        for seed in SEEDS
        for n_layer, lr in PLACES
        for variant in VARIANTS
    ],
    work=work,
    judge=judge,
    draw=draw,
)

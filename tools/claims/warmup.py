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
    losses = [trainer.step(step, watch=False)["train/loss"].item() for step in range(STEPS)]
    tokens, _ = trainer.windows.batch(range(len(trainer.windows)))
    return {
        "loss": losses[::SPACING],
        "final": sum(losses[-AVERAGED:]) / AVERAGED,
        "unigram": unigram_entropy(tokens.flatten(), trainer.config.model.vocab_size),
    }


def finals(rows: list[Row], place: tuple[int, float], variant: str) -> list[float]:
    """The final loss of every run, by seed; infinite where it diverged."""
    runs = those(rows, n_layer=place[0], lr=place[1], variant=variant)
    return [math.inf if row["final"] is None else row["final"] for row in runs]


def judge(rows: list[Row]) -> Iterator[Check]:
    unigram = rows[0]["unigram"]
    yield figure("unigram entropy: the loss of knowing how frequent each byte is, and nothing more", unigram)
    for place in PLACES:
        for variant in VARIANTS:
            losses = [round(loss, 2) for loss in finals(rows, place, variant)]
            yield figure(f"{place[0]} layers, rate {place[1]:g}, {variant}: final loss by seed", losses)

    def stuck(place: tuple[int, float], variant: str) -> int:
        return sum(loss >= unigram for loss in finals(rows, place, variant))

    lost = [place for place in PLACES if stuck(place, "post") == len(SEEDS)]
    yield at_least("depths and rates at which no run of post gets below it", len(lost), 1)
    for n_layer, lr in lost[:1]:
        for variant in list(VARIANTS)[1:]:
            what = f"{n_layer} layers, rate {lr:g}, {variant}: runs that do not get below it, of {len(SEEDS)}"
            yield at_most(what, stuck((n_layer, lr), variant), 0)


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
    picture.axes[-1].legend(loc="lower left", ncols=2, fontsize="small")
    return picture


EXPERIMENT = Experiment(
    number=17,
    sentence="Post-norm needs warm-up: without it there is a depth and a rate at which no run gets below the unigram "
    "entropy, where every run of pre-norm, and of post-norm with warm-up or DeepNorm, does.",
    setting=f"Width 64, {STEPS} steps, constant rate after {WARMUP} steps of warm-up or none, gradients clipped at 1; "
    f"the final loss is the mean training loss of the last {AVERAGED} steps; seeds {', '.join(map(str, SEEDS))}",
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

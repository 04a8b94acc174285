"""Claim 16: the gradient by depth at initialization, and how much of what is said of it is the initialization's."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from model import GPT, Linear
from tools.claims.claim import Check, at_least, at_most, figure
from tools.claims.experiments import Experiment, Row, mean, short_run, those
from tools.claims.small import PLACEMENTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = (1, 2, 3)
LAYERS, WIDTH = 16, 128
INITS = {"normal": "the model's own, N(0, 0.02)", "xavier": "Xavier"}


def xavier(model: GPT) -> None:
    """Glorot & Bengio 2010 for every linear of a branch."""
    for module in model.branches.modules():
        if isinstance(module, Linear):
            nn.init.xavier_normal_(module.weight)


def work(job: Row) -> Row:
    """L2 norm of the first batch's gradient of `down`, by layer."""
    shape = {"n_layer": LAYERS, "n_embd": WIDTH, "placement": job["placement"]}
    trainer = short_run(shape, {}, job["seed"])
    if job["init"] == "xavier":
        xavier(trainer.model)
    trainer.gradient(0, watch=False)
    return {"gradient": [mlp.down.weight.grad.norm().item() for mlp in trainer.model.branches[1::2]]}


def judge(rows: list[Row]) -> Iterator[Check]:
    for init in INITS:
        for placement in PLACEMENTS:
            gradient = mean(row["gradient"] for row in those(rows, placement=placement, init=init))
            ratio, what = (gradient[0] / gradient[-1]).item(), f"{placement}, {init}: first layer over last"
            if placement != "post":
                yield at_least(what, ratio, 1.25)
            elif init == "normal":
                yield at_most(f"{what}, or its inverse", max(ratio, 1 / ratio), 2)
            else:
                yield at_most(what, ratio, 0.5)
            yield figure(f"{placement}, {init}: first, middle and last layer", gradient[[0, LAYERS // 2, -1]])


def draw(rows: list[Row]) -> "Figure":
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 3), layout="constrained")
    for axes, (init, name) in zip(picture.subplots(1, len(INITS), sharey=True), INITS.items(), strict=True):
        for placement in PLACEMENTS:
            gradient = mean(row["gradient"] for row in those(rows, placement=placement, init=init))
            axes.plot(gradient / gradient[-1], marker=".", label=placement)
        axes.set(title=name, xlabel="layer", xticks=range(0, LAYERS, 5), ylim=(0, None))
    picture.axes[0].set_ylabel("gradient of down over the last layer's")
    picture.axes[0].legend()
    return picture


EXPERIMENT = Experiment(
    number=16,
    sentence="At initialization the gradient of `down` falls from the first to the last layer in pre, output and "
    "sandwich; in post it is flat with N(0, 0.02) and rises towards the output with Xavier initialization.",
    setting=f"{LAYERS} layers, width {WIDTH}, the first batch, means over seeds {', '.join(map(str, SEEDS))}",
    jobs=[
        {"placement": placement, "init": init, "seed": seed}
        for seed in SEEDS
        for placement in PLACEMENTS
        for init in INITS
    ],
    work=work,
    judge=judge,
    draw=draw,
)

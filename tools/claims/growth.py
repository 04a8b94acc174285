"""Claim 15: how the stream grows with depth and during training, under each placement."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tools.claims.claim import Check, at_least, at_most, figure
from tools.claims.experiments import SHAPE, SHORT, Experiment, Row, mean, short_run, those
from tools.claims.small import PLACEMENTS
from training.dynamics import fetch
from training.metrics import depth_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = (1, 2)
LOOKED_AT = (0, 25, SHORT["max_iters"] - 1)  # steps
DEPTHS = [f"residual_rms/{name}" for name in depth_names(SHAPE["n_layer"])]


def work(job: Row) -> Row:
    """RMS of the stream [len(LOOKED_AT), 2L + 1] at every depth before some of the steps."""
    trainer = short_run({"placement": job["placement"]}, {"lr": 1e-3, "min_lr": 1e-3}, job["seed"])
    rms = []
    for step in range(LOOKED_AT[-1] + 1):
        values = trainer.step(step, watch=step in LOOKED_AT)
        if step in LOOKED_AT:
            row = fetch(values)
            rms.append([row[depth] for depth in DEPTHS])
    return {"rms": rms}


def judge(rows: list[Row]) -> Iterator[Check]:
    for placement in PLACEMENTS:
        first, *_, last = mean(row["rms"] for row in those(rows, placement=placement))  # [2L + 1]
        for when, rms in (("before training", first), ("at the end", last)):
            places = rms[[0, len(rms) // 2, -1]]
            yield figure(f"{placement}, {when}: RMS at the embedding, half way, at the top", places)
            growth, what = (
                (rms[-1] / rms[1]).item(),
                f"{placement}, {when}: RMS at the top over the first join's",
            )
            yield at_most(what, growth, 1.25) if placement == "post" else at_least(what, growth, 1.1)
        trained, what = (
            (last[-1] / first[-1]).item(),
            f"{placement}: RMS at the top, at the end over before training",
        )
        yield at_most(what, trained, 1.25) if placement == "post" else at_least(what, trained, 1.5)


def draw(rows: list[Row]) -> "Figure":
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 2.6), layout="constrained")
    for axes, placement in zip(picture.subplots(1, len(PLACEMENTS), sharey=True), PLACEMENTS, strict=True):
        for step, rms in zip(
            LOOKED_AT, mean(row["rms"] for row in those(rows, placement=placement)), strict=True
        ):
            axes.plot(rms, marker=".", label=f"step {step}")
        axes.set(title=placement, xlabel="joins passed", yscale="log")
    picture.axes[0].set_ylabel("RMS of the stream")
    picture.axes[0].legend()
    return picture


EXPERIMENT = Experiment(
    number=15,
    sentence="The stream's RMS grows with depth and training in pre, output and sandwich; in post every join holds it.",
    setting=f"{SHAPE['n_layer']} layers, width {SHAPE['n_embd']}, learning rate 1e-3, {SHORT['max_iters']} steps, "
    f"means over seeds {', '.join(map(str, SEEDS))}",
    jobs=[{"placement": placement, "seed": seed} for seed in SEEDS for placement in PLACEMENTS],
    work=work,
    judge=judge,
    draw=draw,
)

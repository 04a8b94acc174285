"""Claim 18: attention logits at a high learning rate, with and without QK-norm."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from model import GPT
from tools.claims.claim import Check, at_least, at_most, figure
from tools.claims.experiments import SHAPE, Experiment, Row, mean, short_run, those
from training.probe import Probe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = (1, 2)
RATES, QK_NORMS = (1e-3, 1e-2), ("off", "head")
STEPS, SPACING, AVERAGED = 120, 20, 20
MODEL = {"n_layer": 4, "norm": "rmsnorm", "bias": False}


def qk_bound(model: GPT) -> float:
    """What no logit exceeds with QK-norm per head: |q| and |k| are at most sqrt(head_dim) times the largest gain."""
    return max(
        attention.head_dim**0.5 * attention.q_norm.weight.abs().max() * attention.k_norm.weight.abs().max()
        for attention in model.branches[0::2]
    ).item()


def work(job: Row) -> Row:
    """The largest attention logit of all layers every few steps, and the bound that QK-norm sets at the end."""
    trainer = short_run(
        MODEL | {"qk_norm": job["qk_norm"]}, {"lr": job["lr"], "min_lr": job["lr"]}, job["seed"]
    )
    probe = Probe(trainer.model, trainer.windows, trainer.norms)
    logits, losses = [], []
    for step in range(STEPS + 1):
        if step % SPACING == 0:
            seen = probe.measure()
            logits.append(max(v for name, v in seen.items() if name.startswith("attn_logit_max/")))
        losses.append(trainer.step(step, watch=False)["train/loss"].item())
    measured = {"logit": logits, "final": sum(losses[-AVERAGED:]) / AVERAGED}
    return measured if job["qk_norm"] == "off" else measured | {"bound": qk_bound(trainer.model)}


def judge(rows: list[Row]) -> Iterator[Check]:
    top = {}
    for lr in RATES:
        for qk_norm in QK_NORMS:
            runs = those(rows, lr=lr, qk_norm=qk_norm)
            logit, what = mean(row["logit"] for row in runs), f"rate {lr:g}, QK-norm {qk_norm}"
            top[lr, qk_norm] = logit[-1].item()
            yield figure(
                f"{what}: largest logit at the start, half way, at the end", logit[[0, len(logit) // 2, -1]]
            )
            yield figure(f"{what}: training loss at the end", mean([row["final"]] for row in runs).item())
            if qk_norm == "head":
                share = max(row["logit"][-1] / row["bound"] for row in runs)
                yield at_most(f"{what}: largest logit over its bound sqrt(head_dim) gain gain", share, 1)
    high = RATES[-1]
    yield at_least(
        "without QK-norm, the high rate over the low one", top[high, "off"] / top[RATES[0], "off"], 2
    )
    yield at_least("at the high rate, without QK-norm over with it", top[high, "off"] / top[high, "head"], 2)


def draw(rows: list[Row]) -> "Figure":
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 3), layout="constrained")
    for axes, lr in zip(picture.subplots(1, len(RATES), sharey=True), RATES, strict=True):
        for number, qk_norm in enumerate(QK_NORMS):
            for row in those(rows, lr=lr, qk_norm=qk_norm):
                label = f"QK-norm {qk_norm}" if row["seed"] == SEEDS[0] else None
                axes.plot(range(0, STEPS + 1, SPACING), row["logit"], color=f"C{number}", label=label)
        axes.set(title=f"rate {lr:g}", xlabel="step", yscale="log")
    picture.axes[0].set_ylabel("largest attention logit")
    picture.axes[0].legend()
    return picture


EXPERIMENT = Experiment(
    number=18,
    sentence="At a high learning rate the largest attention logit grows without QK-norm and stays bounded with it.",
    setting=f"{MODEL['n_layer']} layers, width {SHAPE['n_embd']}, RMSNorm, pre, {STEPS} steps, "
    f"means over seeds {', '.join(map(str, SEEDS))}",
    jobs=[
        {"lr": lr, "qk_norm": qk_norm, "seed": seed} for seed in SEEDS for lr in RATES for qk_norm in QK_NORMS
    ],
    work=work,
    judge=judge,
    draw=draw,
)

"""Pictures for a paper or a README, from the same numbers as the page."""

from collections.abc import Iterator
from pathlib import Path

from base.cli import UserError
from tools.output import new_file
from tools.report.runs import QUANTITIES, Quantity, Run, height

# Okabe & Ito 2008, "Color Universal Design"; seven colours and three dashes make 21 different lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#16191D")
DASHES = ("-", "--", ":")
MARKERS = {"next_norm": "o", "entry": "o", "out_norm": "s", "q_norm": "^", "k_norm": "v"}
OVERVIEW = ("residual_rms", "stream_grad_rms")
STYLE = {
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3},
    **{"font.size": 9, "axes.titlesize": 10, "legend.frameon": False, "legend.fontsize": 8},
    **{"figure.titlesize": 10, "legend.handlelength": 2.6},
}


def save_pictures(runs: list[Run], folder: Path) -> list[Path]:
    """overview.png, loss.png, and for each recorded quantity its profile over depth and its heat map."""
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "the pictures need matplotlib; install it with `pip install -e '.[report]'`"
        ) from None
    matplotlib.use("Agg")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"{folder} cannot be made: {e.strerror}") from None
    with matplotlib.rc_context(STYLE):
        return list(draw_all(runs, folder))


def draw_all(runs: list[Run], folder: Path) -> Iterator[Path]:
    recorded = [q for q in QUANTITIES if any(run.table(q).steps for run in runs)]
    yield overview(runs, folder / "overview.png", [q for q in recorded if q.id in OVERVIEW])
    yield single(folder / "loss.png", lambda ax: draw_loss(ax, runs))
    for quantity in recorded:
        path = folder / f"{quantity.id}_profile.png"
        yield single(path, lambda ax, q=quantity: draw_profile(ax, runs, q))
        yield heat_maps(runs, quantity, folder / f"{quantity.id}_heat.png")


def new_figure(rows: int, columns: int, size: tuple[float, float]):
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def finish(figure, path: Path) -> Path:
    import matplotlib.pyplot as plt

    with new_file(path) as file:
        figure.savefig(file, dpi=160, metadata={"Software": None})
    plt.close(figure)
    return path


def single(path: Path, draw) -> Path:
    figure, axes = new_figure(1, 1, (4.8, 3.2))
    draw(axes[0, 0])
    if axes[0, 0].lines:
        axes[0, 0].legend(ncols=2)
    return finish(figure, path)


def overview(runs: list[Run], path: Path, quantities: list[Quantity]) -> Path:
    """Loss, and the chosen quantities over depth, in one row with one legend."""
    figure, axes = new_figure(1, 1 + len(quantities), (3.6 * (1 + len(quantities)), 3.1))
    draw_loss(axes[0, 0], runs)
    for ax, quantity in zip(axes[0, 1:], quantities, strict=True):
        draw_profile(ax, runs, quantity)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(runs), 5))
    return finish(figure, path)


def line_style(i: int) -> dict:
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)]}


def draw_loss(ax, runs: list[Run]) -> None:
    for i, run in enumerate(runs):
        ax.plot(*run.series("train/loss", 400), color=line_style(i)["color"], linewidth=0.7, alpha=0.4)
        ax.plot(*run.series("val/loss", 400), **line_style(i), linewidth=1.8, label=run.label)
    ax.set(title="Validation loss (thin: training)", xlabel="steps", ylabel="nats per token")


def draw_profile(ax, runs: list[Run], quantity: Quantity) -> None:
    """One line per run at its last recorded step; for the gains one per kind of norm."""
    for i, run in enumerate(runs):
        table = run.table(quantity)
        if not table.steps:
            continue
        lines: dict[str, list[tuple[float, float]]] = {}
        for place, value in zip(table.places, table.values[-1], strict=True):
            kind = MARKERS.get(place.rpartition(".")[2], "o") if quantity.name == "gain" else ""
            if height(place)[0] < float("inf") and value is not None:
                lines.setdefault(kind, []).append((height(place)[0], value))
        for n, (kind, points) in enumerate(lines.items()):
            x, y = zip(*points, strict=True)
            label = run.label if n == 0 else None
            ax.plot(x, y, **line_style(i), marker=kind or None, markersize=3, linewidth=1.6, label=label)
    ax.set(title=f"{quantity.title} at the end", xlabel="layer")
    if quantity.log:
        ax.set_yscale("log")


def heat_maps(runs: list[Run], quantity: Quantity, path: Path) -> Path:
    """Depth over time, a panel per run, one colour scale."""
    from matplotlib.colors import LogNorm, Normalize

    runs = [run for run in runs if run.table(quantity).steps]
    columns = min(len(runs), 4)
    rows = -(-len(runs) // columns)
    figure, axes = new_figure(rows, columns, (3.1 * columns + 0.6, 2.6 * rows))
    tables = [run.table(quantity, 300) for run in runs]
    values = [
        v for t in tables for row in t.values for v in row if v is not None and (v > 0 or not quantity.log)
    ]
    scale = (LogNorm if quantity.log else Normalize)(min(values, default=1), max(values, default=1))
    for ax in axes.flat[len(runs) :]:
        ax.set_visible(False)
    for ax, run, table in zip(axes.flat, runs, tables, strict=False):
        keep = [i for i, place in enumerate(table.places) if height(place)[0] < float("inf")]
        grid = [[row[i] if row[i] is not None else float("nan") for row in table.values] for i in keep]
        image = ax.pcolormesh(
            table.steps,
            range(len(keep)),
            grid,
            norm=scale,
            cmap="cividis",
            shading="nearest",
            rasterized=True,
        )
        ticks = range(0, len(keep), max(1, len(keep) // 6))
        ax.set_yticks(ticks, [table.places[keep[i]] for i in ticks], fontsize=7)
        ax.set(title=run.label, xlabel="steps")
        ax.grid(False)
    figure.suptitle(quantity.title)
    figure.colorbar(image, ax=axes.ravel().tolist(), shrink=0.8)
    return finish(figure, path)

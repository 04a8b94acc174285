"""What a run records: the names in metrics.jsonl, how to read them, and how each quantity is drawn.

A name is that of one number of the run (`train/loss`, `logsumexp`), or `QUANTITY/PLACE`:

    residual_rms/embed                 a depth of the stream: after the embedding,
    residual_rms/layer_03.attn         or after the join of a branch
    grad_norm/norms                    a part of the model: embed, a branch, all norms, the head
    attn_entropy/layer_03              a layer
    attn_logit_max/layer_03.head_07    a head
    gain/layer_03.mlp.next_norm.max    a norm, and what of its gain

Everything that writes, draws or explains these numbers takes them from here. It needs no torch.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

BOOKKEEPING = ("iter", "tokens", "spike", "diverged")  # what stands in a row and measures nothing
Row = Mapping[str, float | None]  # of metrics.jsonl; None: the number was not finite
TABLE_LINES = 13  # of `depth_table`, with its heading and its last sentence
ODD_LOGIT = 50.0  # a larger attention logit is unusual,
# and so is a value so many times the median over depths.
ODD_FACTORS = {"residual_rms": 10.0, "grad_norm": 100.0}


def branch_names(n_layer: int) -> list[str]:
    return [f"layer_{i:02d}.{kind}" for i in range(n_layer) for kind in ("attn", "mlp")]


def depth_names(n_layer: int) -> list[str]:
    """The places where the stream is looked at, bottom to top."""
    return ["embed", *branch_names(n_layer)]


def part_names(n_layer: int) -> list[str]:
    """The disjoint parts that every parameter belongs to one of."""
    return ["embed", *branch_names(n_layer), "norms", "head"]


@dataclass(frozen=True)
class Quantity:
    """One kind of number: where it is recorded, and how it is drawn.

    alarm: the end of the scale that means trouble. stat: what of a gain is meant, and the end of its names.
    """

    name: str
    per: Literal["run", "depth", "part", "layer", "head", "norm"]
    scale: Literal["linear", "log"]
    alarm: Literal["high", "low"] | None
    title: str
    unit: str
    about: str
    stat: str = ""

    @property
    def id(self) -> str:
        """Unique among QUANTITIES, and fit for a file's name."""
        return "_".join(filter(None, (self.name.replace("/", "_"), self.stat, self.per == "head" and "head")))

    def key(self, place: str) -> str:
        """The name of this quantity at a place; of a number of the whole run, whatever `place` is, its name."""
        return self.name if self.per == "run" else f"{self.name}/{place}" + (self.stat and f".{self.stat}")


# fmt: off
QUANTITIES = (
    Quantity("train/loss", "run", "linear", "high", "Training loss", "nats",
             "mean over the tokens of a step"),
    Quantity("val/loss", "run", "linear", "high", "Validation loss", "nats",
             "mean over fixed windows"),
    Quantity("train/z_loss", "run", "log", "high", "z-loss", "nats",
             "its coefficient times the mean square of logsumexp"),
    Quantity("logsumexp", "run", "linear", "high", "Mean |logsumexp|", "nats",
             "of the logits over the vocabulary"),
    Quantity("train/lr", "run", "linear", None, "Learning rate", "",
             "of this step"),
    Quantity("train/grad_norm", "run", "log", "high", "Gradient norm", "",
             "of all parameters, before clipping"),
    Quantity("perf/tokens_per_s", "run", "linear", "low", "Throughput", "tokens/s",
             "of all processes"),
    Quantity("perf/step_ms", "run", "linear", "high", "Time of a step", "ms",
             "mean since the row before"),
    Quantity("perf/mfu", "run", "linear", "low", "Model FLOPs utilization", "",
             "share of the device's peak rate"),
    Quantity("residual_rms", "depth", "log", "high", "Stream RMS", "",
             "size of the residual stream after each join"),
    Quantity("branch_rms", "depth", "log", "high", "Branch RMS", "",
             "size of what each branch adds to the stream"),
    Quantity("angle_deg", "depth", "linear", "low", "Angle", "degrees",
             "by which each join turns the stream"),
    Quantity("stream_max", "depth", "log", "high", "Largest value of the stream", "RMS",
             "absolute, over the stream's RMS at this depth"),
    Quantity("stream_kurtosis", "depth", "log", "high", "Kurtosis of the stream", "",
             "mean fourth power over squared mean square; 3 for a normal distribution"),
    Quantity("grad_norm", "part", "log", "high", "Gradient norm by part", "",
             "of the parameters of each branch"),
    Quantity("stream_grad_rms", "depth", "log", "low", "Stream gradient RMS", "",
             "dL/dx of the stream: how the loss reaches this depth"),
    Quantity("update_ratio", "part", "log", "high", "Update ratio", "",
             "last update relative to the parameters, RMS over RMS"),
    Quantity("attn_logit_max", "layer", "log", "high", "Largest attention logit", "",
             "absolute, over the pairs that are not masked"),
    Quantity("attn_logit_max", "head", "log", "high", "Largest attention logit by head", "",
             "absolute, over the pairs that are not masked"),
    Quantity("attn_entropy", "layer", "linear", "low", "Attention entropy", "nats",
             "mean over rows; 0 looks at one token"),
    Quantity("gain", "norm", "linear", None, "Mean gain", "",
             "of the norms at each depth", stat="mean"),
    Quantity("gain", "norm", "linear", "high", "Largest gain", "",
             "absolute, of the norms at each depth", stat="max"),
    Quantity("alpha", "norm", "linear", "high", "alpha", "",
             "the learned slope of norms that squash: dyt, derf"),
    Quantity("saturated", "norm", "linear", "high", "Saturated share", "",
             "of the values that dyt or derf squash to within a hundredth of their bounds"),
)
# fmt: on
KNOWN = {(q.name, q.stat, q.per == "head"): q for q in QUANTITIES}


@dataclass(frozen=True)
class Place:
    """Where in the model a number was taken: `layer_03.attn`, `layer_03.head_07`, `entry`, `norms`."""

    text: str
    layer: int | None = None
    branch: str = ""
    head: int | None = None
    norm: str = ""

    @property
    def height(self) -> float:
        """In layers from the bottom: embed 0, layer_00.attn 0.5, layer_00.mlp 1; infinite for what has no depth."""
        if self.layer is None:
            return 0.0 if self.text in ("embed", "embed_norm", "entry") else math.inf
        return self.layer + (1.0 if self.branch == "mlp" else 0.5)

    @property
    def depth(self) -> str:
        """The depth that it belongs to: a layer's attention, and all in it, to the join of that attention."""
        if self.layer is None:
            return "embed" if self.height == 0.0 else ""
        return f"layer_{self.layer:02d}.{self.branch or 'attn'}"


PLACE = re.compile(
    r"(?P<text>(?:layer_(?P<layer>\d+)|[a-z_]+)(?:\.(?P<branch>attn|mlp))?"
    r"(?:\.head_(?P<head>\d+))?(?:\.(?P<norm>[a-z_]*norm))?)(?:\.(?P<stat>mean|max))?"
)


@cache
def parse(key: str) -> tuple[Quantity, Place]:
    """What a name in metrics.jsonl means; one that is nobody's here is a quantity of the whole run, named by itself."""
    name, _, rest = key.partition("/")
    if (found := PLACE.fullmatch(rest)) and (
        quantity := KNOWN.get((name, found["stat"] or "", bool(found["head"])))
    ):
        layer, head = (found[group] and int(found[group]) for group in ("layer", "head"))
        return quantity, Place(found["text"], layer, found["branch"] or "", head, found["norm"] or "")
    known = KNOWN.get((key, "", False))
    if known and known.per == "run":
        return known, Place("")
    return Quantity(key, "run", "linear", None, key, "", ""), Place("")


def by_height(keys: Iterable[str]) -> list[str]:
    """Names in the order of their places, bottom to top."""
    return sorted(keys, key=lambda key: (parse(key)[1].height, key))


def depth_table(first: Row, last: Row, most: int = TABLE_LINES) -> str:
    """Stream RMS, gradient norm and largest attention logit at each depth, the first and the last that a run has seen.

    first, last: names and values. No more than `most` lines, the last of them a sentence about what is unusual:
    what is not finite, logits above ODD_LOGIT, values above ODD_FACTORS times the median over all depths.
    """
    titles = {"residual_rms": "stream RMS", "grad_norm": "gradient norm", "attn_logit_max": "largest logit"}
    columns: dict[str, dict[str, str]] = {name: {} for name in titles}  # name, depth: key
    for key in by_height(last):
        quantity, place = parse(key)
        if quantity.name in titles and quantity.per != "head" and place.depth:
            columns[quantity.name][place.depth] = key
    odd: dict[str, str] = {}
    for name, keys in columns.items():
        for depth, text in oddities(name, {depth: last[key] for depth, key in keys.items()}).items():
            odd.setdefault(depth, f"  {titles[name]} {text}")
    depths = list(columns["residual_rms"])
    lines = [f"{'':14}" + "".join(f"{title:>22}" for title in titles.values())]
    for depth in some(depths, odd, most - 2):
        cells = [change(first, last, keys.get(depth)) for keys in columns.values()]
        line = f"{depth:14}" + "".join(f"{cell:>22}" for cell in cells) + odd.get(depth, "")
        lines.append(line.rstrip())
    lines.append(f"unusual: {len(odd)} of {len(depths)} depths" if odd else "nothing unusual at any depth")
    return "\n".join(lines)


def some(depths: list[str], odd: Collection[str], room: int) -> list[str]:
    """As many of the depths as the table has room for: the odd ones first, then evenly spread ones."""
    spread = {depths[round(i * (len(depths) - 1) / (room - 1))] for i in range(room) if depths}
    chosen = sorted(depths, key=lambda depth: (depth not in odd, depth not in spread))[:room]
    return [depth for depth in depths if depth in chosen]


def oddities(name: str, values: dict[str, float | None]) -> dict[str, str]:
    """What is unusual in one column of the table, by depth."""
    finite = sorted(v for v in values.values() if v is not None)
    median = finite[len(finite) // 2] if finite else 0.0
    factor = ODD_FACTORS.get(name)
    limit, over = ODD_LOGIT, f"above {ODD_LOGIT:g}"
    if factor:
        limit, over = factor * median, f"above {factor:g} times the median"
    return {d: "not finite" if v is None else over for d, v in values.items() if v is None or v > limit}


def change(first: Row, last: Row, key: str | None) -> str:
    if key is None:
        return ""
    return " -> ".join("not finite" if v is None else f"{v:.3g}" for v in (first.get(key), last[key]))

"""A closer look every probe_interval steps: one eager forward and backward on the same few windows.

It costs about one small step and leaves everything as it was: gradients are asked for by name and never
accumulated in the parameters, dropout is off, so no random number is drawn, and the optimizer is not called.
Every process computes the same numbers from the same windows, whatever the number of processes.

The norms run on PyTorch's operators here. A fused kernel returns the sum and its norm as two outputs of one
operator, so the gradient of the sum would lack what reaches it through the norm.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from data.batches import EvalWindows
from kernels.reference import promote
from model import GPT, Join, Norm
from training.dynamics import PartNorms, fetch, local, mean_square, named
from training.metrics import branch_names, depth_names
from training.parallel import is_shard

PROBE_WINDOWS = 4
SCORES = 2**22  # attention scores, or logits, that are taken together
BOUND = 0.99  # of what tanh and erf squash: values beyond it are saturated

Parts = dict[str, list[Tensor]]  # a number, or one of each head, for every place from the bottom


class Probe:
    """The closer look of a run. `remember` goes before the step whose update is to be measured.

    at_once: windows in one forward pass; as many as in a micro-batch, so that a look takes no more memory than a step.
    """

    def __init__(self, model: GPT, windows: EvalWindows, norms: PartNorms, at_once: int = PROBE_WINDOWS):
        self.model, self.norms, self.layers = model, norms, dict(norm_names(model))
        device = norms.runtime.device
        tokens, targets = windows.batch(range(min(PROBE_WINDOWS, len(windows))))
        self.tokens, self.targets = (t.to(device).split(at_once) for t in (tokens, targets))
        self.before: list[Tensor] | None = None

    def remember(self) -> None:
        """Keeps a copy of the parameters (of this process's shards) until the next `measure`."""
        self.before = [local(p).detach().clone() for p in self.norms.params]

    def measure(self, loss_scale: float | Tensor = 1.0) -> dict[str, float]:
        """What the closer look finds, by name, by one transfer. `update_ratio/...` only after a `remember`.

        loss_scale: what the loss is multiplied by for the backward pass, so that float16 does not underflow.
        """
        metrics = gains(self.layers)
        if self.before is not None:
            metrics |= update_ratios(self.norms, self.before)
            self.before = None
        means: dict[str, list[Tensor]] = defaultdict(list)
        largest: dict[str, list[Tensor]] = defaultdict(list)
        with evaluating(self.model), torch_norms(self.model):
            for tokens, targets in zip(self.tokens, self.targets, strict=True):
                seen = self.look(tokens, targets, loss_scale)
                share = len(tokens) / sum(map(len, self.tokens))
                for name, values in seen.means.items():
                    means[name].append(share * torch.stack(values))
                for name, values in seen.largest.items():
                    largest[name].append(torch.stack(values))
        return fetch(
            metrics
            | self.by_name(
                {name: torch.stack(parts).sum(0) for name, parts in means.items()},
                {name: torch.stack(parts).amax(0) for name, parts in largest.items()},
            )
        )

    def look(self, tokens: Tensor, targets: Tensor, loss_scale: float | Tensor) -> "Seen":
        """What passes the joins and the attention of a few windows, and the gradients of the stream there."""
        every = sum((t != -1).sum() for t in self.targets)
        with observed(self.model, self.layers) as seen:  # but not the forwards that backward may repeat
            loss, _ = self.model.loss(tokens, targets)
        seen.note_logits(self.model)
        seen.means["gradient"] = squared_gradients(
            loss * ((targets != -1).sum() / every), seen.streams, loss_scale
        )
        return seen

    def by_name(self, means: dict[str, Tensor], largest: dict[str, Tensor]) -> dict[str, Tensor]:
        """The metrics that the parts make together."""
        n_layer = self.model.config.n_layer
        branches, depths = branch_names(n_layer), depth_names(n_layer)
        layers = [f"layer_{i:02d}" for i in range(n_layer)]
        metrics = named("branch_rms", branches, means["added"].sqrt())
        metrics |= named("angle_deg", branches, means["angle"])
        metrics |= named("stream_grad_rms", depths, means["gradient"].sqrt())
        metrics |= named("stream_max", depths, largest["stream"] / means["square"].sqrt())
        metrics |= named("stream_kurtosis", depths, means["fourth"] / means["square"].square())
        metrics |= named("attn_entropy", layers, means["entropy"])
        metrics |= named("attn_logit_max", layers, largest["logit"].amax(1))
        for layer, heads in zip(layers, largest["logit"], strict=True):
            metrics |= named("attn_logit_max", [f"{layer}.head_{i:02d}" for i in range(len(heads))], heads)
        if "saturated" in means:
            metrics |= named("saturated", squashing(self.layers), means["saturated"])
        return metrics | {"logsumexp": means["logsumexp"][0]}


def squashing(layers: dict[str, Norm]) -> list[str]:
    """The names of norms that squash instead of measuring: dyt, derf."""
    return [name for name, norm in layers.items() if hasattr(norm, "alpha")]


@contextlib.contextmanager
def evaluating(model: GPT):
    """Dropout off, and afterwards as it was."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


@contextlib.contextmanager
def torch_norms(model: GPT):
    """The norms and joins on PyTorch's operators, and afterwards on what they ran before."""
    modules = [m for m in model.modules() if isinstance(m, Norm | Join)]
    was = [module.impl for module in modules]
    for module in modules:
        module.impl = "torch"
    try:
        yield
    finally:
        for module, impl in zip(modules, was, strict=True):
            module.impl = impl


class Seen:
    """What passes the joins, the attention and the squashing norms of one forward: means, and largest values."""

    def __init__(self):
        self.streams: list[Tensor] = []
        self.read: Tensor | None = None  # by the head, after the last join
        self.queries: Tensor | None = None
        self.means: Parts = defaultdict(list)
        self.largest: Parts = defaultdict(list)

    @torch.no_grad()
    def join(self, join: Join, inputs: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor]) -> None:
        """A forward hook. The branch's output s is what the join adds, or what it normalizes and then adds."""
        (x, s), (y, self.read) = inputs, outputs
        for stream in [y] if self.streams else [x, y]:
            self.streams.append(stream)
            self.note_stream(stream)
        added = join.b * (s if join.out_norm is None else join.out_norm(s))
        self.means["added"].append(mean_square(added))
        self.means["angle"].append(mean_angle(x, y))

    def note_stream(self, x: Tensor) -> None:
        x = promote(x)
        self.means["square"].append(mean_square(x))
        self.means["fourth"].append(x.square().square().mean(-1).mean())
        self.largest["stream"].append(x.abs().max())

    def rotate(self, rotate, inputs: tuple[Tensor], heads: Tensor) -> None:
        """A forward hook of Attention.rotate, which the queries of a layer pass first and then its keys."""
        if self.queries is None:
            self.queries = heads.detach()
            return
        largest, entropy = attention_statistics(self.queries, heads.detach())
        self.largest["logit"].append(largest)
        self.means["entropy"].append(entropy)
        self.queries = None

    def squashed(self, place: int, y: Tensor) -> Tensor:
        """What a norm has squashed, the `place`-th of those that do."""
        self.means["saturated"][place] = (y.detach().abs() > BOUND).float().mean()
        return y

    @torch.no_grad()
    def note_logits(self, model: GPT) -> None:
        """The mean |logsumexp| of the logits, a few rows of them at a time."""
        rows = self.read.flatten(0, 1)
        few = max(SCORES // model.config.vocab_size, 1)
        sizes = [model.logits(piece).logsumexp(-1).abs() for piece in rows.split(few)]
        self.means["logsumexp"].append(torch.cat(sizes).mean())


@contextlib.contextmanager
def observed(model: GPT, layers: dict[str, Norm]) -> Iterator[Seen]:
    """What passes the joins, the attention and the squashing norms of a forward."""
    seen = Seen()
    handles = [join.register_forward_hook(seen.join) for join in model.joins]
    handles += [attention.rotate.register_forward_hook(seen.rotate) for attention in model.branches[::2]]
    norms = [layers[name] for name in squashing(layers)]
    if norms:
        seen.means["saturated"] = [torch.empty(())] * len(norms)
    for place, norm in enumerate(norms):
        norm.normalize = lambda x, place=place, real=norm.normalize: seen.squashed(place, real(x))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for norm in norms:
            del norm.normalize


def mean_angle(x: Tensor, y: Tensor) -> Tensor:
    """The mean angle in degrees between the rows of x and y [..., D].

    2 atan2(|u - v|, |u + v|) of the unit vectors u, v keeps its digits where the cosine has lost them, near 0
    (Kahan 2006, "How Futile are Mindless Assessments of Roundoff").
    """
    u, v = F.normalize(promote(x), dim=-1), F.normalize(promote(y), dim=-1)
    return (2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))).rad2deg().mean()


def attention_statistics(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """(largest |q . k| / sqrt(head_dim) of each head over the pairs that the causal mask leaves [H], mean entropy of
    rows in nats).

    q [B, H, T, head_dim], k [B, H_kv, T, head_dim]; a few sequences at a time, as the scores are B H T^2 numbers.
    """
    _, heads, time, head_dim = q.shape
    future = torch.ones(time, time, dtype=torch.bool, device=q.device).triu(1)
    few = max(SCORES // (heads * time**2), 1)
    largest, entropies = [], []
    for queries, keys in zip(promote(q).split(few), promote(k).split(few), strict=True):
        keys = keys.repeat_interleave(heads // k.size(1), dim=1)
        logits = queries @ keys.mT * head_dim**-0.5  # [few, H, T, T]
        largest.append(logits.masked_fill(future, 0).abs().amax((0, 2, 3)))
        p = logits.masked_fill(future, float("-inf")).softmax(-1)
        entropies.append(torch.special.entr(p).sum(-1).flatten())
    return torch.stack(largest).amax(0), torch.cat(entropies).mean()


def squared_gradients(loss: Tensor, streams: list[Tensor], loss_scale: float | Tensor) -> list[Tensor]:
    """The mean square of dL/dx, over batch, time and features, at every depth; no parameter's gradient is touched."""
    return [mean_square(g) / loss_scale**2 for g in torch.autograd.grad(loss * loss_scale, streams)]


@torch.no_grad()
def update_ratios(norms: PartNorms, before: list[Tensor]) -> dict[str, Tensor]:
    """RMS of (parameter now - before) over RMS of the parameter before, for every part; 0 for one of zeros."""
    moved = torch._foreach_sub([local(p) for p in norms.params], before)
    moved, size = norms.by_part(norms.squares(moved)), norms.by_part(norms.squares(before))
    ratios = torch.where(size == 0, 0.0, moved / size)
    return named("update_ratio", norms.parts, ratios)


@torch.no_grad()
def gains(layers: dict[str, Norm]) -> dict[str, Tensor]:
    """Mean and largest absolute gain of every norm that has one, and the alpha of those that squash."""
    metrics = {}
    for name, norm in layers.items():
        if norm.weight is not None:
            gain = whole(norm.weight) + norm.zero_centred
            metrics[f"gain/{name}.mean"], metrics[f"gain/{name}.max"] = gain.mean(), gain.abs().max()
        if hasattr(norm, "alpha"):
            metrics[f"alpha/{name}"] = whole(norm.alpha)[0]
    return metrics


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if is_shard(t) else t


def norm_names(model: GPT) -> Iterator[tuple[str, Norm]]:
    """(name, norm) of every norm: `entry`, `embed_norm`, and `layer_03.mlp.next_norm` for `joins.7.next_norm`.

    A branch's norms (q_norm, k_norm) and those of its join carry the branch's name.
    """
    branches = branch_names(model.config.n_layer)
    for path, module in model.named_modules():
        if isinstance(module, Norm):
            top, _, rest = path.partition(".")
            index, _, norm = rest.partition(".")
            yield (f"{branches[int(index)]}.{norm}" if rest else top), module

"""A closer look every probe_interval steps: one eager forward and backward on the same few windows.

It costs about one small step and leaves everything as it was: gradients are asked for by name and never
accumulated in the parameters, dropout is off, so no random number is drawn, and the optimizer is not called.
Every process computes the same numbers from the same windows, whatever the number of processes.

The norms run on PyTorch's operators here. A fused kernel returns the sum and its norm as two outputs of one
operator, so the gradient of the sum would lack what reaches it through the norm.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from data.batches import EvalWindows
from model import GPT, Join, Norm
from training.dynamics import PartNorms, fetch, local, mean_square
from training.metrics import branch_names, depth_names
from training.parallel import is_shard

PROBE_WINDOWS = 4
SCORES = 2**22  # attention scores that are taken together


class Probe:
    """The closer look of a run. `remember` goes before the step whose update is to be measured."""

    def __init__(self, model: GPT, windows: EvalWindows, norms: PartNorms):
        self.model, self.norms, self.layers = model, norms, dict(norm_names(model))
        device = norms.runtime.device
        tokens, targets = windows.batch(range(min(PROBE_WINDOWS, len(windows))))
        self.tokens, self.targets = tokens.to(device), targets.to(device)
        self.before: list[Tensor] | None = None

    def remember(self) -> None:
        """Keeps a copy of the parameters (of this process's shards) until the next `measure`."""
        self.before = [local(p).detach().clone() for p in self.norms.params]

    def measure(self, loss_scale: float | Tensor = 1.0) -> dict[str, float]:
        """What the closer look finds, by name, by one transfer. `update_ratio/...` only after a `remember`.

        loss_scale: what the loss is multiplied by for the backward pass, so that float16 does not underflow.
        """
        values = gains(self.layers)
        if self.before is not None:
            values |= update_ratios(self.norms, self.before)
            self.before = None
        with evaluating(self.model), torch_norms(self.model):
            with observed(self.model) as (joins, scores):  # but not the forwards that backward may repeat
                _, loss = self.model(self.tokens, self.targets)
            values |= joins.values() | scores.values()
            values |= stream_gradients(loss, joins.streams, loss_scale)
        return fetch(values)


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


class JoinRecord:
    """What passed the joins in one forward: the stream at every depth, what was added, and how it turned."""

    def __init__(self):
        self.streams: list[Tensor] = []
        self.added: list[Tensor] = []
        self.angles: list[Tensor] = []

    def __call__(self, join, inputs: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor]) -> None:
        """A forward hook. The branch's output s is what the join adds, or what it normalizes and then adds."""
        (x, s), (y, _) = inputs, outputs
        self.streams += [y] if self.streams else [x, y]
        with torch.no_grad():
            added = s if join.out_norm is None else join.out_norm(s)
            self.added.append(mean_square(added).sqrt())
            self.angles.append(mean_angle(x, y))

    def values(self) -> dict[str, Tensor]:
        names = branch_names(len(self.added) // 2)
        rms = {f"branch_rms/{name}": v for name, v in zip(names, self.added, strict=True)}
        return rms | {f"angle_deg/{name}": v for name, v in zip(names, self.angles, strict=True)}


def mean_angle(x: Tensor, y: Tensor) -> Tensor:
    """The mean angle in degrees between the rows of x and y [..., D].

    2 atan2(|u - v|, |u + v|) of the unit vectors u, v keeps its digits where the cosine has lost them, near 0
    (Kahan 2006, "How Futile are Mindless Assessments of Roundoff").
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    u, v = F.normalize(x.to(dtype), dim=-1), F.normalize(y.to(dtype), dim=-1)
    return (2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))).rad2deg().mean()


class AttentionRecord:
    """The attention logits of one forward, from the queries and keys of every layer, bottom to top."""

    def __init__(self):
        self.queries: Tensor | None = None
        self.largest: list[Tensor] = []
        self.entropies: list[Tensor] = []

    def __call__(self, rotate, inputs: tuple[Tensor], heads: Tensor) -> None:
        """A forward hook of Attention.rotate, which the queries of a layer pass first and then its keys."""
        if self.queries is None:
            self.queries = heads.detach()
            return
        largest, entropy = attention_statistics(self.queries, heads.detach())
        self.largest.append(largest)
        self.entropies.append(entropy)
        self.queries = None

    def values(self) -> dict[str, Tensor]:
        largest = {f"attn_logit_max/layer_{i:02d}": v for i, v in enumerate(self.largest)}
        return largest | {f"attn_entropy/layer_{i:02d}": v for i, v in enumerate(self.entropies)}


@contextlib.contextmanager
def observed(model: GPT) -> Iterator[tuple[JoinRecord, AttentionRecord]]:
    """Fills two records with what passes the joins and the attention of a forward."""
    joins, scores = JoinRecord(), AttentionRecord()
    handles = [join.register_forward_hook(joins) for join in model.joins]
    handles += [attention.rotate.register_forward_hook(scores) for attention in model.branches[::2]]
    try:
        yield joins, scores
    finally:
        for handle in handles:
            handle.remove()


def attention_statistics(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """(largest |q . k| / sqrt(head_dim) over the pairs that the causal mask leaves, mean entropy of rows in nats).

    q [B, H, T, head_dim], k [B, H_kv, T, head_dim]; a few sequences at a time, as the scores are B H T^2 numbers.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    _, heads, time, head_dim = q.shape
    future = torch.ones(time, time, dtype=torch.bool, device=q.device).triu(1)
    few = max(SCORES // (heads * time**2), 1)
    largest, entropies = [], []
    for queries, keys in zip(q.to(dtype).split(few), k.to(dtype).split(few), strict=True):
        keys = keys.repeat_interleave(heads // k.size(1), dim=1)
        logits = queries @ keys.mT * head_dim**-0.5  # [few, H, T, T]
        largest.append(logits.masked_fill(future, 0).abs().max())
        p = logits.masked_fill(future, float("-inf")).softmax(-1)
        entropies.append(torch.special.entr(p).sum(-1).flatten())
    return torch.stack(largest).max(), torch.cat(entropies).mean()


def stream_gradients(loss: Tensor, streams: list[Tensor], loss_scale: float | Tensor) -> dict[str, Tensor]:
    """RMS over batch, time and features of dL/dx at every depth; parameters' gradients are not touched."""
    gradients = torch.autograd.grad(loss * loss_scale, streams)
    names = depth_names(len(streams) // 2)
    return {
        f"stream_grad_rms/{name}": mean_square(g).sqrt() / loss_scale
        for name, g in zip(names, gradients, strict=True)
    }


@torch.no_grad()
def update_ratios(norms: PartNorms, before: list[Tensor]) -> dict[str, Tensor]:
    """RMS of (parameter now - before) over RMS of the parameter before, for every part; 0 for one of zeros."""
    moved = torch._foreach_sub([local(p) for p in norms.params], before)
    moved, size = norms.by_part(norms.squares(moved)), norms.by_part(norms.squares(before))
    ratios = torch.where(size == 0, 0.0, moved / size)
    return {f"update_ratio/{part}": ratio for part, ratio in zip(norms.parts, ratios, strict=True)}


@torch.no_grad()
def gains(layers: dict[str, Norm]) -> dict[str, Tensor]:
    """Mean and largest absolute gain of every norm, by the names of `norm_names`."""
    values = {}
    for name, norm in layers.items():
        if norm.weight is not None:
            weight = norm.weight.full_tensor() if is_shard(norm.weight) else norm.weight
            gain = weight + norm.zero_centred
            values[f"gain/{name}.mean"], values[f"gain/{name}.max"] = gain.mean(), gain.abs().max()
    return values


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

"""Other weights that compute the same logits: gains moved into linears, LayerNorm's centring moved into weights.

A norm is N(x) = gain * core(x) + shift. Where only linears read it, W N(x) + c = (W diag(gain)) core(x) + (W shift
+ c), so gain and shift can be the linears' business and the norm keeps gain 1 and shift 0. What a norm writes into
the stream (N_out, N_post, the embedding's) is added to and read by others, so that norm stays. A BatchNorm in
evaluation mode is such an affine map with nothing left as its core; as N_out it goes into the linear before it.
All of it is computed in float64 and rounded once.
"""

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from base.cli import UserError
from model import GPT, NORMS, BatchNorm, ModelConfig, Norm
from training.checkpoint import model_weights

Weights = dict[str, Tensor]
INNER = ("qkv", "gate", "up")  # the linears by which branches read
FIELDS = {"q_norm": "qk_norm", "k_norm": "qk_norm", "v_norm": "v_norm", "embed_norm": "embed_norm"}
LEFT = {
    "out_norm": "joins.*.out_norm: what they write is added to the stream, and no linear follows",
    "post_norm": "joins.*.post_norm: what they write is the stream, and the next branch is added to it",
    "q_norm": "q_norm and k_norm: queries and keys are rotated and multiplied, no linear follows",
    "embed_norm": "embed_norm: what it writes is the stream",
}


@dataclass(frozen=True)
class Converted:
    """A model as configuration and weights, and what was done to it, in sentences."""

    config: ModelConfig
    weights: Weights
    notes: list[str]


def norms_of(model: GPT) -> dict[str, Norm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Norm)}


def first_linears(model: GPT, branch: int) -> list[str]:
    linears = dict(model.branches[branch].named_children())
    return [f"branches.{branch}.{name}" for name in INNER if name in linears]


def last_linear(branch: int) -> str:
    return f"branches.{branch}.{'down' if branch % 2 else 'out'}"


def readers(model: GPT) -> Iterator[tuple[str, list[str]]]:
    """(norm, the linears that read it) of every norm that nothing but linears reads: N_in and the one before the head.

    Nothing but the head reads the last join, so there N_post is as good as a final norm.
    """
    norms, last = norms_of(model), len(model.joins) - 1
    places = {"entry": first_linears(model, 0)}
    places |= {f"joins.{k}.next_norm": first_linears(model, k + 1) for k in range(last)}
    places[f"joins.{last}.{'post' if model.joins[last].next_norm is None else 'next'}_norm"] = ["head"]
    return ((norm, linears) for norm, linears in places.items() if norm in norms)


def affine(norm: Norm) -> tuple[Tensor, Tensor]:
    """(gain, shift) of a norm in evaluation mode, each [D] or, where it has none, a scalar 1 or 0.

    c of the equation multiplies what the norm writes, so the shift contains it; the gain leaves it with the norm.
    """
    gain = torch.tensor(1.0) if norm.weight is None else norm.weight + norm.zero_centred
    shift = torch.tensor(0.0) if norm.bias is None else norm.bias
    if isinstance(norm, BatchNorm):
        gain = gain * (norm.running_var + norm.eps).rsqrt()
        shift = shift - gain * norm.running_mean
    return gain, shift * norm.factor


def take(norm: Norm) -> tuple[Tensor, Tensor]:
    """(gain, shift) of a norm, which is left with gain 1 and shift 0; a BatchNorm becomes the identity."""
    taken = affine(norm)
    neutral = {
        "weight": 1.0 - norm.zero_centred,
        "bias": 0.0,
        "running_mean": 0.0,
        "running_var": 1.0 - norm.eps,
    }
    for name, value in neutral.items():
        if getattr(norm, name, None) is not None:
            getattr(norm, name).fill_(value)
    return taken


def into_readers(model: GPT, linears: list[str], gain: Tensor, shift: Tensor) -> None:
    """W (gain * x + shift) + c = (W diag(gain)) x + (W shift + c)."""
    for linear in map(model.get_submodule, linears):
        if shift.any():
            linear.bias = nn.Parameter(bias_of(linear) + linear.weight @ shift)
        linear.weight *= gain


def into_writer(model: GPT, name: str, gain: Tensor, shift: Tensor) -> None:
    """gain * (W x + c) + shift = (diag(gain) W) x + (gain * c + shift)."""
    linear = model.get_submodule(name)
    linear.bias = nn.Parameter(gain * bias_of(linear) + shift)
    linear.weight *= gain[:, None]


def bias_of(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias


@torch.no_grad()
def fold(model: GPT) -> Converted:
    """The model with every norm's gain and shift in the linears around it, as far as that is exact.

    Raises UserError for a kind of norm that is not known to end in a gain and a shift, and where all norms but the
    last write the stream.
    """
    folded, notes = untied(model), []
    kind, read = NORMS[model.config.norm], dict(readers(folded))
    if kind.kind is None and not issubclass(kind, BatchNorm):
        raise UserError(
            f"norm is {model.config.norm}; layernorm, rmsnorm and batchnorm are what folds exactly"
        )
    if all(norm.endswith("post_norm") for norm in read):
        raise UserError(
            f"placement is {model.config.placement}: what its norms write is the stream, which the next join adds to, "
            "so that their gains cannot move into linears; a placement with a norm before a branch folds"
        )
    norms = norms_of(folded)
    for norm, linears in read.items():
        gain, shift = take(norms.pop(norm))
        into_readers(folded, linears, gain, shift)
        if gain.dim() or shift.any():  # and not neither, as with --gain none
            notes.append(f"folded {norm} into {', '.join(linears)}")
    for branch, join in enumerate(folded.joins):
        if isinstance(join.out_norm, BatchNorm):
            norm, linear = f"joins.{branch}.out_norm", last_linear(branch)
            into_writer(folded, linear, *take(norms.pop(norm)))
            notes.append(f"folded {norm} into {linear}")
    kept = {name.rpartition(".")[2] for name, norm in norms.items() if norm.weight is not None}
    notes += [f"left {why}" for name, why in LEFT.items() if name in kept]
    return finished(model.config, folded, notes)


@torch.no_grad()
def ln_to_rms(model: GPT) -> Converted:
    """The RMSNorm model with the logits of a LayerNorm model whose stream no norm writes and only norms read.

    Whatever writes the stream is projected onto the vectors of mean zero. LayerNorm never saw the mean that this
    removes, and the variance of the rest is its mean square. RMSNorm has no bias, so that goes into the linears.
    Raises UserError, by the field that stands in the way, for any other layout.
    """
    check_centred(model)
    centred, read = untied(model), dict(readers(model))
    for embed in (centred.embed, centred.pos_embed):
        if hasattr(embed, "weight"):
            embed.weight -= embed.weight.mean(dim=-1, keepdim=True)
    for branch in range(len(centred.branches)):
        for p in centred.get_submodule(last_linear(branch)).parameters():
            p -= p.mean(dim=0)
    norms = norms_of(centred)
    for norm, linears in read.items():
        gain, shift = affine(norms[norm])
        into_readers(centred, linears, torch.ones_like(gain), shift)
        norms[norm].bias = None
    notes = ["projected embed, pos_embed and every out and down onto the vectors of mean zero"]
    if model.config.bias:
        notes.append("folded every LayerNorm's bias into the linears that read it")
    return finished(dataclasses.replace(model.config, norm="rmsnorm"), centred, notes)


def check_centred(model: GPT) -> None:
    """Raises UserError for a model that `ln_to_rms` cannot convert exactly."""
    config, read = model.config, dict(readers(model))
    exact = "ln-to-rms is exact where every branch reads through a norm and no other norm is there"
    for name in sorted(norms_of(model).keys() - read.keys()):
        field = FIELDS.get(name.rpartition(".")[2], "placement")
        raise UserError(f"{field} is {getattr(config, field)}; {exact}, and {name} is one")
    if len(read) <= len(model.branches):
        raise UserError(
            f"placement is {config.placement}; {exact}, and one reads the stream itself, mean and all"
        )
    if config.norm != "layernorm":
        raise UserError(f"norm is {config.norm}; ln-to-rms is exact for norm layernorm only")


def untied(model: GPT) -> GPT:
    """A copy in float64, with a head of its own."""
    own = copy.deepcopy(model).double()
    own.head.weight = nn.Parameter(own.head.weight.clone())
    return own


def finished(config: ModelConfig, model: GPT, notes: list[str]) -> Converted:
    """In float32, and with the biases that the linears have got; those that the model's others lack are zero."""
    linears = [module for module in model.branches.modules() if isinstance(module, nn.Linear)]
    grown = any(linear.bias is not None for linear in linears)
    changes = {
        "tie_embeddings": False,
        "bias": config.bias or grown,
        "head_bias": model.head.bias is not None,
    }
    notes += [f"{name} is now {value}" for name, value in changes.items() if getattr(config, name) != value]
    config = dataclasses.replace(config, **changes)
    with torch.device("meta"):
        own = model_weights(GPT(config))
    zeros = {name: torch.zeros(p.shape) for name, p in own.items() if name.endswith(".bias")}
    return Converted(config, zeros | {name: t.float() for name, t in model_weights(model).items()}, notes)

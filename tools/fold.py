"""Other weights that compute the same logits: gains moved into linears, LayerNorm's centring moved into weights.

A norm is N(x) = gain * core(x) + shift. Where only linears read it, W N(x) + c = (W diag(gain)) core(x) + (W shift
+ c), so gain and shift can be the linears' business and the norm keeps gain 1 and shift 0. A BatchNorm in
evaluation mode is such an affine map with nothing left as its core, so it can also go into the linear before it.
All of it is computed in float64 and rounded once.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from base.cli import UserError
from model import GPT, ModelConfig
from training.checkpoint import model_weights

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Converted:
    """A model as configuration and weights, and what was done to it, in sentences."""

    config: ModelConfig
    weights: Weights
    notes: list[str]


def inner_linears(config: ModelConfig, branch: int) -> list[str]:
    """The linears through which a branch reads the stream."""
    names = ["qkv"] if branch % 2 == 0 else ["gate", "up"] if config.mlp == "swiglu" else ["up"]
    return [f"branches.{branch}.{name}" for name in names]


def last_linear(branch: int) -> str:
    return f"branches.{branch}.{'down' if branch % 2 else 'out'}"


def readers(config: ModelConfig) -> Iterator[tuple[str, list[str]]]:
    """(norm, the linears that read it) of every norm that nothing but linears reads; post has none that is inner."""
    last = 2 * config.n_layer - 1
    if config.placement in ("pre", "sandwich"):
        yield "entry", inner_linears(config, 0)
        for join in range(last):
            yield f"joins.{join}.next_norm", inner_linears(config, join + 1)
    yield f"joins.{last}.next_norm", ["head"]


def affine(config: ModelConfig, weights: Weights, norm: str) -> tuple[Tensor, Tensor]:
    """(gain [D], shift [D]) of a norm in evaluation mode."""
    gain = weights[f"{norm}.weight"]
    shift = weights.get(f"{norm}.bias", torch.zeros_like(gain))
    if config.norm == "batchnorm":
        gain = gain * (weights[f"{norm}.running_var"] + config.norm_eps).rsqrt()
        shift = shift - gain * weights[f"{norm}.running_mean"]
    return gain, shift


def reset(config: ModelConfig, weights: Weights, norm: str) -> None:
    """Gives a norm gain 1 and shift 0; a BatchNorm becomes the identity."""
    neutral = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0 - config.norm_eps}
    for kind, value in neutral.items():
        if f"{norm}.{kind}" in weights:
            weights[f"{norm}.{kind}"] = torch.full_like(weights[f"{norm}.{kind}"], value)


def into_readers(weights: Weights, linears: list[str], gain: Tensor, shift: Tensor) -> None:
    """W (gain * x + shift) + c = (W diag(gain)) x + (W shift + c)."""
    for linear in linears:
        matrix = weights[f"{linear}.weight"]
        weights[f"{linear}.weight"] = matrix * gain
        if shift.any():
            bias = weights.get(f"{linear}.bias", torch.zeros(len(matrix), dtype=matrix.dtype))
            weights[f"{linear}.bias"] = bias + matrix @ shift


def into_writer(weights: Weights, linear: str, gain: Tensor, shift: Tensor) -> None:
    """gain * (W x + c) + shift = (diag(gain) W) x + (gain * c + shift)."""
    matrix = weights[f"{linear}.weight"]
    bias = weights.get(f"{linear}.bias", torch.zeros(len(matrix), dtype=matrix.dtype))
    weights[f"{linear}.weight"] = gain[:, None] * matrix
    weights[f"{linear}.bias"] = gain * bias + shift


def fold(model: GPT) -> Converted:
    """The model with every norm's gain and shift in the linears around it, as far as that is exact.

    Raises UserError for placement post, whose norms write the stream itself.
    """
    config, weights = model.config, untied(model)
    if config.placement == "post":
        raise UserError(
            "placement is post: what its norms write is the stream, which the next join adds to, so that their gains "
            "cannot move into the linears; pre and sandwich fold"
        )
    done = list(readers(config))
    for norm, linears in done:
        into_readers(weights, linears, *affine(config, weights, norm))
        reset(config, weights, norm)
    notes = [f"folded {norm} into {', '.join(linears)}" for norm, linears in done]
    if config.norm == "batchnorm" and config.placement in ("output", "sandwich"):
        for branch in range(2 * config.n_layer):
            norm, linear = f"joins.{branch}.out_norm", last_linear(branch)
            into_writer(weights, linear, *affine(config, weights, norm))
            reset(config, weights, norm)
            notes.append(f"folded {norm} into {linear}")
    return finished(config, weights, notes + left(config))


def left(config: ModelConfig) -> list[str]:
    """A sentence for every kind of norm that stays as it is."""
    notes = []
    if config.placement in ("output", "sandwich") and config.norm != "batchnorm":
        notes.append("left joins.*.out_norm: what they write is added to the stream, and no linear follows")
    if config.qk_norm != "off":
        notes.append("left q_norm and k_norm: queries and keys are rotated and multiplied, no linear follows")
    if config.embed_norm:
        notes.append("left embed_norm: what it writes is the stream")
    return notes


def ln_to_rms(model: GPT) -> Converted:
    """The RMSNorm model with the logits of a pre-norm LayerNorm model.

    Whatever writes the stream is projected onto the vectors of mean zero. LayerNorm never saw the mean that this
    removes, and the variance of the rest is its mean square. RMSNorm has no bias, so that goes into the linears.
    Raises UserError, by the field that stands in the way, for any other layout.
    """
    config, weights = model.config, untied(model)
    needed = {"norm": "layernorm", "placement": "pre", "qk_norm": "off", "embed_norm": False}
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise UserError(f"{name} is {getattr(config, name)}; ln-to-rms is exact for {name} {value} only")
    for name in ("embed.weight", "pos_embed.weight"):
        if name in weights:
            weights[name] = weights[name] - weights[name].mean(dim=-1, keepdim=True)
    for branch in range(2 * config.n_layer):
        for kind in ("weight", "bias"):
            name = f"{last_linear(branch)}.{kind}"
            if name in weights:
                weights[name] = weights[name] - weights[name].mean(dim=0)
    for norm, linears in readers(config):
        gain, shift = affine(config, weights, norm)
        into_readers(weights, linears, torch.ones_like(gain), shift)
        weights.pop(f"{norm}.bias", None)
    notes = ["projected embed, pos_embed and every out and down onto the vectors of mean zero"]
    if config.bias:
        notes.append("folded every LayerNorm's bias into the linears that read it")
    return finished(dataclasses.replace(config, norm="rmsnorm"), weights, notes)


def untied(model: GPT) -> Weights:
    """The weights in float64, with a head of their own."""
    weights = {name: t.double() for name, t in model_weights(model).items()}
    return {"head.weight": weights["embed.weight"]} | weights


def finished(config: ModelConfig, weights: Weights, notes: list[str]) -> Converted:
    """In float32, and with the biases that the linears have got; those that the model's others lack are zero."""
    grown = any(name.startswith("branches.") and name.endswith(".bias") for name in weights)
    changes = {
        "tie_embeddings": False,
        "bias": config.bias or grown,
        "head_bias": "head.bias" in weights,
    }
    notes += [f"{name} is now {value}" for name, value in changes.items() if getattr(config, name) != value]
    config = dataclasses.replace(config, **changes)
    with torch.device("meta"):
        own = model_weights(GPT(config))
    zeros = {name: torch.zeros(p.shape) for name, p in own.items() if name.endswith(".bias")}
    return Converted(config, zeros | {name: t.float() for name, t in weights.items()}, notes)

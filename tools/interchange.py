"""The same weights under other projects' names, by the tables of tools/families.py, in both directions.

What a table cannot say is refused by name.
"""

import dataclasses
import re
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from base.cli import UserError, explanation
from model import ModelConfig
from tools.families import COMMON_ONLY, FAMILIES, Family, modules
from training.checkpoint import check_weights, on_meta

Weights = dict[str, Tensor]

# Fields that do not say what a model computes of its weights in float32.
OF_A_RUN = ("dropout", "dtype", "residual_dtype", "kernel", "out_gain_init", "alpha_init", "force_placement")
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # beside the weights in older files
# What DDP, the compiler, FSDP and checkpointed activations put before a weight's name.
WRAPPERS = r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."


def get(table: dict, path: str, default: Any = None) -> Any:
    """table["a"]["b"] for the path "a.b", or the default where a step is missing."""
    for step in path.split("."):
        if not isinstance(table, dict) or step not in table:
            return default
        table = table[step]
    return table


def family_of(theirs: dict[str, Any]) -> Family:
    """The family of a config.json. Raises UserError for one that is none of FAMILIES."""
    kind = theirs.get("model_type")
    if kind not in list(FAMILIES):  # which a list in the file can be compared with
        raise UserError(f"model_type is {kind!r}; the families that convert are {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def our_config(family: Family, theirs: dict[str, Any]) -> ModelConfig:
    """Our configuration of a model of theirs. Raises UserError that names the field we cannot express."""
    theirs = modern_rope(theirs)
    for name, allowed in (COMMON_ONLY | family.only).items():
        value = get(theirs, name, allowed[0])
        if not all(v in allowed for v in (value if isinstance(value, list) else [value])):
            raise UserError(f"{name} is {value!r}, which this repository's model cannot express")
    key, known = family.activation
    kind = theirs.get(key, next(iter(known)))
    if kind not in list(known):
        raise UserError(f"{key} is {kind!r}; what {family.name} converts with is {', '.join(known)}")
    for name in filter(lambda name: isinstance(name, str), family.biased.values()):
        if not isinstance(theirs.get(name, False), bool):
            raise UserError(f"{name} is {theirs[name]!r}, but it is true or false")
    values = {}
    for ours, name in family.fields.items():
        values[ours] = get(theirs, name, family.defaults.get(name, dataclasses.MISSING))
        if values[ours] is dataclasses.MISSING:
            raise UserError(f"config.json of a {family.name} model lacks {name}")
    bias = any(has_bias(family, place, theirs) for place in family.biased)
    try:
        return ModelConfig(**family.layout | values, mlp=known[kind], bias=bias)
    except ValidationError as e:
        raise UserError("config.json: " + explanation(e)) from None


def modern_rope(theirs: dict[str, Any]) -> dict[str, Any]:
    """The configuration with transformers 4's rope_theta under rope_parameters, where version 5 has it."""
    old = {"rope_theta": theirs["rope_theta"]} if "rope_theta" in theirs else {}
    new = theirs.get("rope_parameters") or {}
    if not isinstance(new, dict):
        raise UserError(f"rope_parameters is {new!r}, but it is an object")
    if old and new.get("rope_theta") not in (None, old["rope_theta"]):
        raise UserError(f"rope_theta is {old['rope_theta']}, and {new['rope_theta']} in rope_parameters")
    return theirs | {"rope_parameters": old | new}


def has_bias(family: Family, ours: str, theirs: dict[str, Any]) -> bool:
    """Whether a module, by its name in the table, has a bias in a model of theirs."""
    answer = family.biased.get(ours.partition(".")[0], False)
    return answer if isinstance(answer, bool) else bool(theirs.get(answer, False))


def bare(family: Family, weights: Weights) -> Weights:
    """Their weights by the names in the table: no prefix, nothing of a wrapper, no buffers.

    Raises UserError where two become one, or one holds no floating-point numbers.
    """
    found: Weights = {}
    for name, t in weights.items():
        short = re.sub(WRAPPERS, "", name).removeprefix(family.prefix)
        if short.endswith(BUFFERS):
            continue
        if short in found:
            raise UserError(f"the {family.name} model has the weight {short} twice, once as {name}")
        if not t.is_floating_point():
            raise UserError(
                f"the {family.name} model's {name} holds {t.dtype}, and weights are floating-point"
            )
        found[short] = t
    return found


def tied_as_held(family: Family, config: ModelConfig, rest: Weights) -> tuple[ModelConfig, Weights]:
    """The configuration of a model that says it is tied, and its bare weights, as the weights themselves have it.

    One tensor under either name, or two equal ones, are the embedding and the head. Two different ones are not tied.
    """
    embed, head = f"{family.modules['embed']}.weight", "lm_head.weight"
    if not config.tie_embeddings or head not in rest:
        return config, rest
    if embed in rest and not torch.equal(rest[embed].float(), rest[head].float()):
        return dataclasses.replace(config, tie_embeddings=False), rest
    others = {name: t for name, t in rest.items() if name != head}
    return config, {embed: rest[head]} | others


def our_weights(
    family: Family, config: ModelConfig, theirs: dict[str, Any], weights: Weights
) -> tuple[ModelConfig, Weights]:
    """The configuration, untied where the head is another matrix than the embedding, and their weights under our
    names, in float32; a bias that they do not have is zero.

    Raises UserError for a weight of theirs that is missing, or that the table does not know.
    """
    config, rest = tied_as_held(family, config, bare(family, weights))
    own = on_meta(config, weights, "config.json describes a model that cannot be built")
    named, ours = dict(own.named_parameters()), {}
    for table_name, module, names in modules(family, config):
        for kind in ("weight", "bias"):
            if f"{module}.{kind}" not in named:
                continue
            if kind == "bias" and not has_bias(family, table_name, theirs):
                ours[f"{module}.bias"] = torch.zeros(len(ours[f"{module}.weight"]))
                continue
            missing = [f"{name}.{kind}" for name in names if f"{name}.{kind}" not in rest]
            if missing:
                raise UserError(f"the {family.name} model lacks the weight {missing[0]}")
            value = [stored(family, table_name, rest.pop(f"{name}.{kind}")).float() for name in names]
            try:
                ours[f"{module}.{kind}"] = torch.cat(value)
            except RuntimeError:
                shapes = ", ".join(
                    f"{name}.{kind} {tuple(t.shape)}" for name, t in zip(names, value, strict=True)
                )
                raise UserError(f"the {family.name} model has weights that are no rows: {shapes}") from None
    if rest:
        raise UserError(f"the {family.name} model has a weight {min(rest)}, for which there is no place")
    check_weights(own, ours, "the converted model")
    return config, ours


def stored(family: Family, ours: str, t: Tensor) -> Tensor:
    """A tensor turned from our orientation to the family's, or back."""
    turned = family.transposed and ours.startswith(("{attn}.", "{mlp}.")) and t.dim() == 2
    return t.T if turned else t


def obstacles(family: Family, config: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """The fields in which the model is none of the family: {field: (what it is, what the family needs)}.

    A switch that the family says nothing of must have its default.
    """
    free = (
        *OF_A_RUN,
        *family.fields,
        "bias",
        "rope_theta",
    )  # every family that rotates has a field for theta
    switches = {f.name: f.default for f in dataclasses.fields(ModelConfig) if f.name not in free}
    needed = switches | family.layout
    known = tuple(family.activation[1].values())
    needed["mlp"] = config.mlp if config.mlp in known else known[0]
    if "n_kv_head" not in family.fields:
        needed["n_kv_head"] = config.n_head
    if "head_dim" not in family.fields:
        needed["head_dim"] = config.n_embd // config.n_head
    if family.even_heads:
        needed["n_embd"] = -(-config.n_embd // config.n_head) * config.n_head
    ours = resolved(config)
    return {name: (ours[name], value) for name, value in needed.items() if ours[name] != value}


def resolved(config: ModelConfig) -> dict[str, Any]:
    """The configuration with the numbers that its defaults stand for, and a pattern of one placement by its name."""
    numbers = {"n_kv_head": config.kv_heads, "head_dim": config.head_width, "mlp_hidden": config.hidden}
    first, *others = set(config.placements)
    return dataclasses.asdict(config) | numbers | {"placement": config.placement if others else first}


def family_for(config: ModelConfig) -> Family:
    """The family that expresses a model of ours. Raises UserError that names what stands in the way."""
    found = {family.name: obstacles(family, config) for family in FAMILIES.values()}
    fewest = min(map(len, found.values()))
    nearest = {name: what for name, what in found.items() if len(what) == fewest}
    if fewest == 0:
        return FAMILIES[next(iter(nearest))]
    ways = [
        f"{name} would if " + " and ".join(f"{k} were {need}, not {have}" for k, (have, need) in what.items())
        for name, what in nearest.items()
    ]
    raise UserError(
        f"no family of transformers expresses this model; {'; '.join(ways)}; docs/interchange.md exports any model "
        "with torch.export"
    )


def their_config(family: Family, config: ModelConfig) -> dict[str, Any]:
    """config.json of a model of ours, which `family_for` has found expressible."""
    ours = resolved(config)
    theirs = {"architectures": [family.architecture], "model_type": family.name, "dtype": "float32"}
    theirs |= {name: ours[field] for field, name in family.fields.items() if field != "rope_theta"}
    theirs |= {name: values[0] for name, values in family.only.items() if values[0] is not None}
    if config.pos == "rope":  # both spellings: transformers 4 reads the first, 5 the second
        theirs["rope_theta"] = config.rope_theta
        theirs["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    key, known = family.activation
    theirs[key] = next(name for name, ours in known.items() if ours == config.mlp)
    theirs |= {name: config.bias for name in family.biased.values() if isinstance(name, str)}
    return theirs | family.constants


def their_weights(family: Family, config: ModelConfig, weights: Weights) -> Weights:
    """Our weights under their names; a bias that they always have and we do not is zero.

    Raises UserError for a bias that is not zero and for which they have no place.
    """
    n_q, n_kv = config.n_head * config.head_width, config.kv_heads * config.head_width
    theirs = {}
    for table_name, module, names in modules(family, config):
        place = family.biased.get(table_name.partition(".")[0])
        weight, bias = weights[f"{module}.weight"], weights.get(f"{module}.bias")
        if bias is None and place is True:
            bias = torch.zeros(len(weight))
        if bias is not None and place is None:
            if bias.any():
                raise UserError(
                    f"bias: {module}.bias is not zero, and a {family.name} model has none there; train with --no-bias"
                )
            bias = None
        for kind, value in (("weight", weight), ("bias", bias)):
            if value is None:
                continue
            parts = value.split((n_q, n_kv, n_kv)) if len(names) > 1 else [value]
            for name, part in zip(names, parts, strict=True):
                prefix = "" if name == "lm_head" else family.prefix
                theirs[f"{prefix}{name}.{kind}"] = stored(family, table_name, part).contiguous()
    return theirs

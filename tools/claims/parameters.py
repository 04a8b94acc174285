"""Claims 19 to 22: a norm's parameters, how they train, and how they can move into other weights."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from base.cli import UserError
from configs import OptimConfig
from model import GPT, PLACEMENTS, BatchNorm, ModelConfig
from tools.claims.claim import at_least, at_most, claim, control, equal, near
from tools.claims.small import NAMES, NEGLIGIBLE, VOCAB, largest, random, random_tokens, small_model
from tools.claims.values import after_new_suffix
from tools.fold import Converted, fold, last_linear, ln_to_rms, readers
from training.checkpoint import model_weights
from training.optimizer import make_optimizer
from training.probe import norm_names

FOLDS = [placement for placement, norms in PLACEMENTS.items() if "in" in norms or "post" not in norms]
LAYOUTS = [
    {"norm": kind, "placement": placement, "qk_norm": qk_norm}
    for kind in NAMES
    for placement in PLACEMENTS
    for qk_norm in ("off", "head", "full")
]
LAYOUTS += [{"norm": kind, "embed_norm": True, "tie_embeddings": False} for kind in NAMES]


def width_of(name: str, config: ModelConfig) -> int:
    """How many features a norm looks at."""
    per_head = config.qk_norm == "head" and name.endswith((".q_norm", ".k_norm"))
    return config.head_width if per_head else config.n_embd


def decay_faults(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """How many parameters decay that must not, or the other way round, or are not in exactly one group."""
    names = {id(p): name for name, p in model.named_parameters()}
    decays: dict[str, list[bool]] = {name: [] for name in names.values()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            decays[names[id(p)]].append(group["weight_decay"] == OptimConfig().weight_decay)
    vectors = {name for name, p in model.named_parameters() if p.ndim < 2} | {"pos_embed.weight"}
    return {
        "gains, biases and positions that decay": sum(any(decays[name]) for name in vectors),
        "matrices that do not": sum(not all(found) for name, found in decays.items() if name not in vectors),
        "parameters that are not in exactly one group": sum(len(found) != 1 for found in decays.values()),
    }


def gain_faults(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """How many gains of a model lack each of the things that make them trained parameters."""
    tokens, norms = random_tokens(), dict(norm_names(model))
    registered = {id(p) for p in model.parameters()}
    before = {name: norm.weight.detach().clone() for name, norm in norms.items()}
    model(tokens, tokens.roll(-1, 1))[1].backward()
    with_gradient = [norm.weight.grad is not None and bool(norm.weight.grad.any()) for norm in norms.values()]
    optimizer.step()
    return {
        "not registered": sum(id(norm.weight) not in registered for norm in norms.values()),
        "of another shape": sum(list(v.shape) != [width_of(n, model.config)] for n, v in before.items()),
        "without a gradient": with_gradient.count(False),
        "unchanged by a step": sum(norms[n].weight.equal(before[n]) for n in norms),
    }


def with_plain_gain() -> GPT:
    """The control: the entry norm's gain is a tensor, which no optimizer finds."""
    model = small_model(torch.float32)
    gain = model.entry.weight.detach()
    del model.entry.weight
    model.entry.weight = gain
    return model


@claim(19)
def gains_train():
    """Gains are registered, of shape [D], have a gradient, change in a step, and do not decay."""
    gains, decays, count = Counter(), Counter(), 0
    for switches in LAYOUTS:
        model = small_model(torch.float32, **switches)
        optimizer = make_optimizer(model, OptimConfig())
        count += len(list(norm_names(model)))
        decays.update(decay_faults(model, optimizer))
        gains.update(gain_faults(model, optimizer))
    for fault, number in gains.items():
        yield equal(f"gains {fault}, of {count} in {len(LAYOUTS)} models", number, 0)
    for fault, number in decays.items():
        yield equal(fault, number, 0)
    plain = with_plain_gain()
    for fault, number in gain_faults(plain, make_optimizer(plain, OptimConfig())).items():
        if fault != "of another shape":
            yield control(equal(f"gains {fault}, if one is a plain tensor", number, 0))
    for decay, what in ((0.1, "gains, biases and positions that decay"), (0.0, "matrices that do not")):
        one_group = torch.optim.AdamW(model.parameters(), weight_decay=decay)
        found = decay_faults(model, one_group)[what]
        yield control(equal(f"{what}, in one group with weight decay {decay:g}", found, 0))


def logits(model: GPT) -> Tensor:
    with torch.no_grad():
        return model(random_tokens(time=model.config.block_size))[0]


def logits_of(converted: Converted) -> Tensor:
    model = GPT(converted.config)
    model.load_state_dict(converted.weights)
    return logits(model.eval())


def difference(converted: Converted, model: GPT) -> float:
    """The largest difference of a logit, relative to the largest logit."""
    return largest(logits_of(converted) - logits(model)) / largest(logits(model))


def refuses(convert: Callable[[GPT], Converted], model: GPT) -> bool:
    try:
        convert(model)
    except UserError:
        return True
    return False


def tracked(**switches) -> GPT:
    """A BatchNorm model in evaluation mode that has seen a batch."""
    model = small_model(torch.float32, norm="batchnorm", **switches).train()
    logits(model)
    return model.eval()


@claim(20)
def folding():
    """A gain that only linears read folds into them, and a BatchNorm in evaluation mode too, with the same logits."""
    for placement in FOLDS:
        for kind, name in NAMES.items():
            model = small_model(torch.float32, norm=kind, placement=placement)
            folded = fold(model)
            yield at_most(f"{placement}, {name}: change of the logits", difference(folded, model), 1e-5)
            own = model_weights(model)
            gains = {f"{norm}.weight": own[f"{norm}.weight"] for norm, _ in readers(model)}
            twice = difference(replace(folded, weights=folded.weights | gains), model)
            yield control(at_most(f"{placement}, {name}: with the gain in the norm as well", twice, 1e-5))
        model = tracked(placement=placement)
        yield at_most(f"{placement}, BatchNorm: change of the logits", difference(fold(model), model), 1e-5)
    for placement in [placement for placement in PLACEMENTS if placement not in FOLDS]:
        for kind, name in NAMES.items():
            model = small_model(torch.float32, norm=kind, placement=placement)
            yield equal(f"{placement}, {name}: the fold refuses", refuses(fold, model), True)


@torch.no_grad()
def after_other_sequence(model: GPT) -> float:
    """The largest change of the first sequence's logits when the second sequence changes."""
    before = random_tokens()
    after = before.clone()
    after[1] = (before[1] + 1) % VOCAB
    return largest((model(after)[0] - model(before)[0])[0])


@claim(21)
def batchnorm():
    """BatchNorm leaks future tokens and other sequences in training, and does not in evaluation."""
    models = [small_model(norm="batchnorm", placement=placement) for placement in PLACEMENTS]
    suffix, other = "a prefix logit with the suffix", "a logit with another sequence"
    of = f"in any of the {len(models)} placements"
    for what, change in ((suffix, lambda m: after_new_suffix(m)[0]), (other, after_other_sequence)):
        yield at_most(f"evaluation: change of {what}, {of}", max(change(m) for m in models), 1e-12)
        least = min(change(m.train()) for m in models)
        yield control(at_most(f"training: least change of {what}, {of}", least, 1e-12))
        for model in models:
            model.eval()
    x = random(2, 5, 3) + 1  # two sequences
    norm = BatchNorm(3, ModelConfig(norm="batchnorm", norm_eps=NEGLIGIBLE)).double()
    y = norm(x).flatten(0, 1)
    rows = x.flatten(0, 1)
    yield near("biased variance of what goes out", y.var(0, correction=0), [1] * 3, 1e-12)
    yield control(near("its unbiased variance", y.var(0), [1] * 3, 1e-12))
    yield near("running mean: 0.1 of the batch's", norm.running_mean, 0.1 * rows.mean(0), 1e-7)
    unbiased, biased = (0.9 + 0.1 * rows.var(0, correction=c) for c in (1, 0))
    yield near("running variance: 0.9 + 0.1 of the unbiased", norm.running_var, unbiased, 1e-7)
    yield control(near("running variance: 0.9 + 0.1 of the biased", norm.running_var, biased, 1e-7))
    yield at_least(
        "smallest change of a running mean by one batch of two sequences",
        norm.running_mean.abs().min().item(),
        0.01,
    )


@claim(22)
def centring_in_the_weights():
    """In pre-norm LayerNorm's centring can move into the weights: RMSNorm on those gives the same logits."""
    for tied in (True, False):
        model = small_model(torch.float32, tie_embeddings=tied)
        converted, head = ln_to_rms(model), "tied" if tied else "untied"
        yield equal(f"{head} head: the norm is then", converted.config.norm, "rmsnorm")
        yield at_most(f"{head} head: change of the logits", difference(converted, model), 1e-5)
        writers = ["embed", "pos_embed", *map(last_linear, range(2 * model.config.n_layer))]
        own = model_weights(model).items()
        unprojected = {name: t for name, t in own if name.rpartition(".")[0] in writers}
        unchanged = replace(converted, weights=converted.weights | unprojected)
        yield control(at_most(f"{head} head: without the projection", difference(unchanged, model), 1e-5))

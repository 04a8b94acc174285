"""Learning rates, the decay of gains, Muon. Which parameters decay by default is claim 19."""

import math

import pytest
import torch

from configs import OptimConfig
from model import GPT, ModelConfig, Norm
from training.optimizer import Skipping, learning_rate, make_optimizer

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 11}


def config(**changes) -> OptimConfig:
    return OptimConfig(**{"max_iters": 100, "warmup_iters": 10, "lr": 1.0, "min_lr": 0.1} | changes)


def rates(**changes) -> list[float]:
    c = config(**changes)
    return [learning_rate(step, c) for step in range(c.max_iters)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_never_zero(schedule):
    assert rates(schedule=schedule)[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert rates(schedule=schedule, warmup_iters=0)[0] == 1.0


def test_cosine_falls_from_the_peak_to_the_floor_on_the_last_step():
    got = rates()
    assert got[10] == 1.0
    assert got[-1] == pytest.approx(0.1)
    for step in range(10, 100):
        assert got[step] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (step - 10) / 89)) / 2)


def test_wsd_is_flat_and_then_linear_over_the_last_fifth():
    got = rates(schedule="wsd")
    assert got[10:80] == [1.0] * 70
    assert got[79:] == pytest.approx([1 - 0.9 * i / 20 for i in range(21)])


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_wsd_of_a_few_steps_falls_on_the_last_only(steps):
    assert rates(schedule="wsd", max_iters=steps, warmup_iters=0) == [*[1.0] * (steps - 1), 0.1]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_ratio_takes_the_place_of_the_floor(schedule):
    got = rates(schedule=schedule, lr=2.0, min_lr_ratio=0.25)
    assert (max(got), got[-1]) == (2.0, pytest.approx(0.5))


def test_constant_stays():
    assert rates(schedule="constant")[10:] == [1.0] * 90


def test_one_step_runs_at_the_peak_rate():
    assert rates(max_iters=1, warmup_iters=0) == [1.0]


@pytest.mark.parametrize("gain", ["one", "zero_centred"])
def test_norm_decay_is_of_gains_alone(gain):
    """It pulls the parameter to 0: a gain of 1 + w, to 1."""
    model = GPT(ModelConfig(**TINY, gain=gain))
    optimizer = make_optimizer(model, config(lr=0.1, weight_decay=0.5, norm_decay=0.2))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
            p.grad = torch.zeros_like(p)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    gains = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, Norm)}
    for name, p in model.named_parameters():
        kept = 0.98 if name in gains else 0.95 if p.ndim == 2 and name != "pos_embed.weight" else 1.0
        torch.testing.assert_close(p.detach(), before[name] * kept)


def muon():
    torch.manual_seed(0)
    model = GPT(ModelConfig(**TINY))
    optimizer = make_optimizer(model, config(optimizer="muon", lr=0.02, min_lr=0.0, weight_decay=0.5))
    torch.manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    return model, optimizer


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest():
    model, optimizer = muon()
    hidden = {id(p) for p in optimizer.param_groups[0]["params"]}
    for name, p in model.named_parameters():
        assert (id(p) in hidden) == (name.startswith("branches") and p.ndim == 2), name
    every = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(every) == sorted(id(p) for p in model.parameters())


def test_muons_first_step_is_the_orthogonalized_gradient_at_adamws_rms():
    """p (1 - lr wd) - lr 0.2 sqrt(max(rows, columns)) U V^T, up to Newton-Schulz' singular values in 0.7 to 1.2."""
    model, optimizer = muon()
    p = model.branches[1].up.weight  # [64, 16]
    before, grad = p.detach().clone(), p.grad.clone()
    optimizer.step()
    moved = (before * (1 - 0.02 * 0.5) - p.detach()) / (0.02 * 0.2 * 64**0.5)
    U, _, Vh = torch.linalg.svd(grad, full_matrices=False)
    factors = U.mT @ moved @ Vh.mT
    assert 0.6 < factors.diagonal().min() < factors.diagonal().max() < 1.3
    off = factors - torch.diag(factors.diagonal())
    assert off.abs().max() < 0.05
    gain = model.joins[0].next_norm.weight
    torch.testing.assert_close(gain.detach(), 1 - 0.02 * gain.grad.sign(), rtol=0, atol=1e-3)


def test_muon_divides_by_the_loss_scale():
    model, optimizer = muon()
    grad = model.branches[0].out.weight.grad.clone()
    optimizer.step()
    momentum = optimizer.state[model.branches[0].out.weight]["momentum_buffer"]
    torch.testing.assert_close(momentum, 0.05 * grad / 4)


def test_a_skipped_step_leaves_muons_weights_and_state_bitwise():
    model, optimizer = muon()
    optimizer.step()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = {n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad.fill_(torch.nan)
    optimizer.found_inf.fill_(1.0)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), weights[name], rtol=0, atol=0)
        for key, value in state[name].items():
            torch.testing.assert_close(optimizer.state[p][key], value, rtol=0, atol=0)


def adamws() -> list[tuple[GPT, torch.optim.AdamW | Skipping]]:
    """The same model with fused AdamW, and with what stands for it where it heeds neither scale nor failure."""
    made = []
    for wrap in (lambda adamw: adamw, Skipping):
        torch.manual_seed(0)
        model = GPT(ModelConfig(**TINY))
        made.append((model, wrap(make_optimizer(model, config(lr=0.02, min_lr=0.0)))))
    return made


def test_skipping_makes_the_steps_that_fused_adamw_makes():
    """Also with a first step that is skipped, and with gradients that are not finite there."""
    made = adamws()
    for skip in (1.0, 0.0, 1.0, 0.0):
        for model, optimizer in made:
            torch.manual_seed(3)
            for p in model.parameters():
                p.grad = torch.randn_like(p) * (torch.nan if skip else 1.0)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(skip)
            optimizer.step()
    (model, fused), (twin, skipping) = made
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=0)
        assert fused.state[p].keys() == skipping.state[q].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in fused.state[p].items():
            torch.testing.assert_close(skipping.state[q][key], value, rtol=0, atol=0)


def test_only_mps_lacks_it(monkeypatch):
    [(model, fused), _] = adamws()
    assert isinstance(fused, torch.optim.AdamW)
    monkeypatch.setattr(type(model.embed.weight), "device", torch.device("mps"))
    assert isinstance(make_optimizer(model, config()), Skipping)


def test_what_a_norm_learns_besides_its_gain_does_not_decay():
    model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=5, norm="derf"))
    optimizer = make_optimizer(model, OptimConfig(norm_decay=0.5))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert id(model.entry.weight) in decayed
    assert not {id(model.entry.alpha), id(model.entry.shift), id(model.entry.bias)} & decayed

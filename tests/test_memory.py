"""What is kept for backward: the loss in pieces, and activation checkpointing."""

import pytest
import torch
from torch import Tensor

import model as model_file
from model import GPT, ModelConfig
from training.parallel import recompute

CONFIG = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32, "vocab_size": 400}


def make(**changes) -> tuple[GPT, Tensor, Tensor]:
    torch.manual_seed(0)
    model = GPT(ModelConfig(**CONFIG | changes)).double()
    tokens, targets = torch.randint(400, (2, 3, 32))
    targets[0, :7] = -1
    return model, tokens, targets


def loss_and_gradients(model: GPT, loss: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def kept(fn) -> int:
    """Bytes that autograd keeps between the forward pass in `fn` and its backward pass, each storage once."""
    storages = {}

    def pack(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fn()
    return sum(s.nbytes() for s in storages.values())


@pytest.mark.parametrize("rows", [1, 7, 96])
def test_the_loss_in_pieces_is_forwards(rows, monkeypatch):
    model, tokens, targets = make()
    want = loss_and_gradients(model, model(tokens, targets)[1])
    monkeypatch.setattr(model_file, "LOSS_LOGITS", rows * 400)
    calls, logits = [], model.logits
    monkeypatch.setattr(model, "logits", lambda h: calls.append(h.shape[:-1].numel()) or logits(h))
    got = loss_and_gradients(model, model.loss(tokens, targets))
    assert max(calls) == rows
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


def test_the_loss_in_pieces_keeps_less(monkeypatch):
    model, tokens, targets = make()
    whole = kept(lambda: model.loss(tokens, targets))
    monkeypatch.setattr(model_file, "LOSS_LOGITS", 8 * 400)
    logits = 96 * 400 * 8
    assert kept(lambda: model.loss(tokens, targets)) <= whole - logits


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_keeps_less_and_changes_nothing(dropout):
    plain, tokens, targets = make(dropout=dropout)
    again, _, _ = make(dropout=dropout)
    recompute(again)
    results = []
    for model in (plain, again):
        torch.manual_seed(3)
        results.append(loss_and_gradients(model, model.loss(tokens, targets)))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    sizes = [kept(lambda m=model: m.loss(tokens, targets)) for model in (plain, again)]
    assert sizes[1] < 0.7 * sizes[0], sizes
    assert plain.state_dict().keys() == again.state_dict().keys()

"""What is kept for backward: the loss in pieces, and activation checkpointing."""

import pytest
import torch
from torch import Tensor

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


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_keeps_less_and_changes_nothing(dropout):
    plain, tokens, targets = make(dropout=dropout)
    again, _, _ = make(dropout=dropout)
    recompute(again)
    results = []
    for model in (plain, again):
        torch.manual_seed(3)
        results.append(loss_and_gradients(model, model.loss(tokens, targets)[0]))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    sizes = [kept(lambda m=model: m.loss(tokens, targets)) for model in (plain, again)]
    assert sizes[1] < 0.7 * sizes[0], sizes
    assert plain.state_dict().keys() == again.state_dict().keys()

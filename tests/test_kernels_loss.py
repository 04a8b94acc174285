"""The loss whose logits are never all in memory: the plain loss's numbers, FLOPs, and less kept for backward."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernels import loss

N, D, V = 300, 16, 50


def case(dtype=torch.float64) -> tuple[list[torch.Tensor], torch.Tensor]:
    """h, weight, bias with gradients, and targets of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((N, D), (V, D), (V,))
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    targets = torch.randint(V, (N,), generator=generator)
    targets[::7] = -1
    return [t.requires_grad_() for t in leaves], targets


def textbook(h, weight, bias, targets, softcap, z_loss):
    logits = h @ weight.T + bias
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logits, targets = logits[targets != -1], targets[targets != -1]
    norm = logits.exp().sum(-1).log()
    z = z_loss * (norm**2).mean()
    return (norm - logits.gather(-1, targets[:, None])[:, 0]).mean() + z, z


def in_pieces(monkeypatch) -> None:
    """Three pieces: 128, 128 and 44 rows."""
    monkeypatch.setattr(loss, "LOGITS", 128 * V)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_equals_the_textbook(pieces, softcap, z_loss, monkeypatch):
    if pieces:
        in_pieces(monkeypatch)
    leaves, targets = case()
    want, want_z = textbook(*leaves, targets, softcap, z_loss)
    expected = torch.autograd.grad(7 * want, leaves)
    got, z = loss.linear_cross_entropy(*leaves, targets, softcap=softcap, z_loss=z_loss)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert (z is None) == (z_loss == 0)
    if z_loss:
        torch.testing.assert_close(z, want_z.detach(), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(7 * got, leaves), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(
            loss.linear_cross_entropy(*leaves, targets, softcap=softcap, z_loss=z_loss)[0], got
        )


def test_no_more_flops_than_the_plain_loss(monkeypatch):
    def flops(function) -> int:
        leaves = [torch.empty(t.shape, device="meta", requires_grad=True) for t in case()[0]]
        with FlopCounterMode(display=False) as counter:
            function(*leaves, torch.empty(N, dtype=torch.int64, device="meta")).backward()
        return counter.get_total_flops()

    plain = flops(lambda h, w, b, t: F.cross_entropy(F.linear(h, w, b), t))
    in_pieces(monkeypatch)
    assert flops(lambda *arguments: loss.linear_cross_entropy(*arguments)[0]) == plain == 3 * 2 * N * D * V


def test_keeps_no_logits(monkeypatch):
    in_pieces(monkeypatch)
    kept = []
    leaves, targets = case()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss.linear_cross_entropy(*leaves, targets)
    assert max(kept) < N * V


def test_small_gradients_survive_float16(monkeypatch):
    """A mean over many rows, under a loss scale: h's gradient is that of float64, rounded."""
    in_pieces(monkeypatch)
    (h, weight, bias), targets = case(torch.float16)
    scale = 2.0**16
    got, _ = loss.linear_cross_entropy(h, weight.float(), bias.float(), targets)
    [ours] = torch.autograd.grad(scale * got, [h])
    leaf = h.detach().double().requires_grad_()
    exact, _ = textbook(leaf, weight.detach().double(), bias.detach().double(), targets, 0.0, 0.0)
    [theirs] = torch.autograd.grad(scale * exact, [leaf])
    torch.testing.assert_close(ours.double(), theirs, rtol=2e-2, atol=2e-3 * theirs.abs().max().item())

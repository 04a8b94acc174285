"""The cross-entropy of logits that are never all in memory: h W^T + bias, some rows at a time.

The gradient of a piece's logits is at hand as soon as its softmax is. It becomes the gradient of h and of W in the
forward pass, so that backward keeps no logits and computes none again (Hsu et al. 2024, "Liger Kernel", section
3.2). With p the softmax of the logits z, and z_loss adding z_loss * logsumexp(z)^2 to every row's loss,

    d loss / d z = p (1 + 2 z_loss logsumexp(z)) - onehot(target)

A soft-cap z = c tanh(u / c) (Gemma 2) multiplies that by 1 - (z / c)^2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .reference import promote

LOGITS = 2**26  # float32 logits at once: 256 MiB
MULTIPLE = 128  # of rows in a piece, for the matrix products


def cross_entropy(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """(mean of cross-entropy + z_loss * logsumexp^2, the mean of the second alone), over targets that are not -1.

    logits [N, V] in float32 or float64, targets [N] int64; nats. The second has no gradient; for z_loss 0 it is None.
    """
    loss = F.cross_entropy(logits, targets, ignore_index=-1)
    if not z_loss:
        return loss, None
    squares = torch.where(targets == -1, 0.0, logits.logsumexp(-1).square())
    z = z_loss * squares.sum() / (targets != -1).sum()
    return loss + z, z.detach()


def softcapped(u: Tensor, cap: float) -> Tensor:
    """cap * tanh(u / cap); u itself for cap 0."""
    return cap * torch.tanh(u / cap) if cap else u


def linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    softcap: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """`cross_entropy` of the logits h W^T + bias, soft-capped, with LOGITS of them in memory at once.

    h [N, D], weight [V, D], bias [V] or None, targets [N] int64. The products are in h's dtype, sums in float32 at
    least. Where all logits fit, they are computed whole.
    """
    rows = max(LOGITS // len(weight) // MULTIPLE * MULTIPLE, MULTIPLE)
    if len(h) <= rows:
        bias = None if bias is None else bias.to(h.dtype)
        logits = softcapped(promote(F.linear(h, weight.to(h.dtype), bias)), softcap)
        return cross_entropy(logits, targets, z_loss)
    loss, z = InPieces.apply(h, weight, bias, targets, softcap, z_loss, rows, torch.is_grad_enabled())
    return loss, z if z_loss else None


class InPieces(torch.autograd.Function):
    """Gradients are kept without the mean's 1 / count and the loss scale, so that float16 does not lose them."""

    @staticmethod
    def forward(ctx, h, weight, bias, targets, softcap, z_loss, rows, with_gradient):
        w, b = weight.to(h.dtype), None if bias is None else bias.to(h.dtype)
        counted = targets != -1
        loss, squares = promote(h.new_zeros(())), promote(h.new_zeros(()))
        dh = torch.empty_like(h) if with_gradient else None
        dweight = torch.zeros_like(promote(weight)) if with_gradient else None
        dbias = torch.zeros_like(promote(bias)) if with_gradient and bias is not None else None
        for first in range(0, len(h), rows):
            piece = slice(first, first + rows)
            mask, target = counted[piece], targets[piece].clamp(min=0)[:, None]
            logits = softcapped(promote(F.linear(h[piece], w, b)), softcap)
            norm = logits.logsumexp(-1)
            loss += torch.where(mask, norm - logits.gather(-1, target)[:, 0], 0.0).sum()
            squares += torch.where(mask, norm.square(), 0.0).sum()
            if with_gradient:
                slope = 1 - (logits / softcap).square() if softcap else None
                d = logits.sub_(norm[:, None]).exp_().mul_((1 + 2 * z_loss * norm)[:, None])
                d = d.scatter_add_(-1, target, d.new_full((), -1.0).expand(target.shape))
                d = d.mul_(mask[:, None]) if slope is None else d.mul_(slope).mul_(mask[:, None])
                d = d.to(h.dtype)
                dh[piece] = d @ w
                dweight += d.T @ h[piece]
                if dbias is not None:
                    dbias += d.sum(0)
        count = counted.sum()
        z = z_loss * squares / count
        if with_gradient:
            ctx.save_for_backward(dh, dweight, dbias, count)
        ctx.mark_non_differentiable(z)
        return loss / count + z, z

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _):
        *gradients, count = ctx.saved_tensors
        scaled = (None if g is None else g * (dloss / count) for g in gradients)
        return *scaled, None, None, None, None, None

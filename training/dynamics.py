"""What happens inside: the stream's RMS at every depth and the gradient norm of every part.

Depths are named after the branch whose join they follow: `embed`, `layer_00.attn`, `layer_00.mlp`, ...
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from base.cli import UserError
from kernels.reference import statistics_dtype
from model import GPT, Norm
from training.metrics import branch_names, depth_names, part_names
from training.parallel import Runtime, is_shard


def parts(model: GPT) -> Iterator[tuple[str, nn.Parameter, str]]:
    """(name, parameter, part) of every parameter; all norms are one part, a tied head belongs to `embed`."""
    norms = {id(p) for m in model.modules() if isinstance(m, Norm) for p in m.parameters()}
    branches = branch_names(model.config.n_layer)
    for name, param in model.named_parameters():
        top, _, rest = name.partition(".")
        if id(param) in norms:
            part = "norms"
        elif top == "branches":
            part = branches[int(rest.partition(".")[0])]
        else:
            part = {"embed": "embed", "pos_embed": "embed", "head": "head"}[top]
        yield name, param, part


class Observed(nn.Module):
    """The model as training runs it: (loss, z-loss in it, mean square of the stream at every depth [2L + 1] or None).

    z_loss: the coefficient of the z-loss, which evaluation leaves out.

    The mean squares are float32 means over batch, time and features, computed inside the (compiled) forward, on the
    steps that are logged only. They are not taken from the statistics that the fused kernels save: 1 / rstd^2 - eps
    is the mean square in exact arithmetic, but not in float32 where eps outweighs it.
    """

    def __init__(self, model: GPT, z_loss: float = 0.0):
        super().__init__()
        self.model, self.z_loss = model, z_loss

    def forward(self, tokens: Tensor, targets: Tensor, watch: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        z_loss = self.z_loss if self.training else 0.0
        if not watch:
            return *self.model.loss(tokens, targets, z_loss=z_loss), None
        lengths: list[Tensor] = []
        see = lambda x: lengths.append(row_norms(x))  # noqa: E731
        loss, z = self.model.loss(tokens, targets, watch=see, z_loss=z_loss)
        return loss, z, torch.stack(lengths).square().mean((1, 2)) / self.model.config.n_embd


def named(quantity: str, places: Sequence[str], values: Tensor) -> dict[str, Tensor]:
    """Metrics by name: a quantity at each place, values [number of places]."""
    return {f"{quantity}/{place}": value for place, value in zip(places, values.unbind(), strict=True)}


def fetch(metrics: dict[str, Tensor | float]) -> dict[str, float]:
    """The same metrics as numbers; those that are 0-d tensors come by one transfer from their device."""
    tensors = {name: value.float() for name, value in metrics.items() if isinstance(value, Tensor)}
    numbers = torch.stack(list(tensors.values())).tolist() if tensors else []
    return metrics | dict(zip(tensors, numbers, strict=True))


def row_norms(x: Tensor) -> Tensor:
    """The L2 norm over features of x [..., D], in float32 (float64 for float64) and without a graph.

    Of rows, as the sum that one norm takes over ten million numbers loses four digits on the CPU.
    """
    return torch.linalg.vector_norm(x.detach(), dim=-1, dtype=statistics_dtype(x))


@torch.no_grad()
def check_stream(model: GPT, name: str) -> None:
    """Raises UserError where the stream's RMS is not finite for the first ids: a norm would give zeros in silence."""
    finite: list[bool] = []
    device, config = next(model.parameters()).device, model.config
    tokens = torch.arange(min(config.vocab_size, config.block_size), device=device)[None]
    model.read(tokens, watch=lambda x: finite.append(mean_square(x).isfinite().item()))
    if not all(finite):
        depth = depth_names(config.n_layer)[finite.index(False)]
        raise UserError(f"{name}: the stream's RMS is not finite after {depth}; such weights predict nothing")


def mean_square(x: Tensor) -> Tensor:
    """The mean of x^2 over every axis of x [..., D]; see `row_norms`."""
    return row_norms(x).square().mean() / x.size(-1)


class PartNorms:
    """L2 norms of tensors that are shaped like the parameters, in one foreach pass; sums over FSDP's shards."""

    def __init__(self, model: GPT, runtime: Runtime):
        self.names, self.params, part_of = zip(*parts(model), strict=True)
        self.parts = part_names(model.config.n_layer)
        self.index = torch.tensor([self.parts.index(p) for p in part_of], device=runtime.device)
        self.runtime = runtime
        self.sharded = any(is_shard(p) for p in self.params)

    def squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Squared L2 norm of each tensor, one per parameter, float32 [number of parameters]."""
        norms = torch._foreach_norm([local(t) for t in tensors])
        squares = torch.stack([n.float() for n in norms]).square()
        return self.runtime.sum(squares) if self.sharded else squares

    @torch.no_grad()
    def finite(self) -> Tensor:
        """Whether every number of a parameter is finite, for each; bool [number of parameters]."""
        bad = torch.stack([(~local(p).isfinite()).sum() for p in self.params])
        return (self.runtime.sum(bad) if self.sharded else bad) == 0

    def by_part(self, squares: Tensor) -> Tensor:
        """L2 norms of the parts in the order of `part_names`."""
        return torch.zeros(len(self.parts), device=squares.device).index_add_(0, self.index, squares).sqrt()


def local(t: Tensor) -> Tensor:
    """The shard that this process holds, or the tensor itself."""
    return t.to_local() if is_shard(t) else t

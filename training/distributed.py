"""One model on several processes: wrapping, gradient synchronization, and whole tensors from shards."""

import contextlib

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from model import GPT, BatchNorm
from training.runtime import Runtime


def shard(model: GPT, runtime: Runtime) -> None:
    """FSDP2 in place: every branch is a unit, and the root holds the embedding, the joins and the head."""
    mesh = init_device_mesh(runtime.device.type, (runtime.world,))
    for branch in model.branches:
        fully_shard(branch, mesh=mesh)
    fully_shard(model, mesh=mesh)


def replicate(module: nn.Module, runtime: Runtime) -> nn.Module:
    """DistributedDataParallel; gradients are averaged over the processes by backward."""
    devices = [runtime.device.index] if runtime.device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)


def pool_statistics(model: GPT, runtime: Runtime) -> None:
    """BatchNorms normalize by the statistics of the batch on all processes together."""
    if runtime.world > 1:
        for module in model.modules():
            if isinstance(module, BatchNorm):
                module.over_processes = all_reduce  # its backward sums the gradients as well


@contextlib.contextmanager
def synchronized(module: nn.Module, model: GPT, last: bool):
    """Around forward and backward of one micro-batch: only the last one of a step exchanges gradients."""
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(next(model.parameters()), DTensor):
        model.set_requires_gradient_sync(last)
    yield


def whole(t: Tensor) -> Tensor:
    """The full tensor on the CPU; under FSDP a collective that every process takes part in."""
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu()


@torch.no_grad()
def assign(own: Tensor, value: Tensor) -> None:
    """Copies a full tensor into `own`, of which this process may hold a shard."""
    if isinstance(own, DTensor):
        value = distribute_tensor(value.to(own.device), own.device_mesh, own.placements)
    own.copy_(value)

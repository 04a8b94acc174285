"""One model on several processes: wrapping, gradient synchronization, and whole tensors from shards."""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from model import GPT, BatchNorm
from training.runtime import Runtime


def recompute(model: GPT) -> None:
    """Activation checkpointing: backward computes the inside of every branch again instead of keeping it."""
    for branch in model.branches:
        branch.forward = partial(checkpoint, branch.forward, use_reentrant=False)


# torch.distributed.tensor and fsdp take half as long to import as torch itself, so only those who shard do.
def is_shard(t: Tensor) -> bool:
    """Whether this is FSDP's DTensor."""
    return hasattr(t, "full_tensor")


def is_sharded(model: GPT) -> bool:
    """Whether this is FSDP's module."""
    return hasattr(model, "set_requires_gradient_sync")


def shard(model: GPT, runtime: Runtime) -> None:
    """FSDP2 in place: every branch is a unit, and the root holds the embedding, the joins and the head."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(runtime.device.type, (runtime.world,))
    for branch in model.branches:
        fully_shard(branch, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss")


def reshard(model: GPT) -> None:
    """To be called after forward passes that no backward pass follows.

    They leave the root's parameters whole, and `model.parameters()` yields these then, which no optimizer knows.
    """
    if is_sharded(model):
        model.reshard()


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
    if is_sharded(model):
        model.set_requires_gradient_sync(last)
    yield


def whole(t: Tensor, keep: bool) -> Tensor:
    """The full tensor on the CPU where `keep`; under FSDP a collective that every process takes part in.

    Elsewhere something empty, so that one process, not each, holds the model a second time.
    """
    t = (t.full_tensor() if is_shard(t) else t).detach()
    return t.cpu() if keep else t.new_empty(0)


@torch.no_grad()
def assign(own: Tensor, value: Tensor | None) -> None:
    """Copies a full tensor, which only the first process need have, into `own`, perhaps a shard of it.

    A collective where there are several processes.
    """
    if is_shard(own):
        from torch.distributed.tensor import distribute_tensor

        full = torch.empty(own.shape, dtype=own.dtype, device=own.device)
        if value is not None:
            full.copy_(value)
        own.copy_(distribute_tensor(full, own.device_mesh, own.placements))  # the first process's data counts
        return
    if value is not None:
        own.copy_(value)
    if dist.is_initialized():
        dist.broadcast(own, 0)

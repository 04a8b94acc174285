"""One run on several processes: how they meet, agree and end, and one model on all of them."""

import contextlib
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from base.cli import UserError
from model import GPT, BatchNorm

T = TypeVar("T")
PATIENCE = 10.0  # seconds that a process waits for others before it says so
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")


def is_shard(t: Tensor) -> bool:
    """Whether this process holds a part of the tensor only. (Importing DTensor takes half as long as torch itself.)"""
    return hasattr(t, "to_local")


@dataclass(frozen=True)
class Runtime:
    """One process's place: its device, its rank and the number of processes.

    control: the group in which the processes agree on things that live on the host.
    """

    device: torch.device
    rank: int = 0
    world: int = 1
    control: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the processes, in place."""
        return self.sum(value).div_(self.world)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the processes, in place."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def totals(self, values: list[float]) -> list[float]:
        """Numbers added up over the processes, in float64."""
        if self.world == 1:
            return values
        return self.sum(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()

    def any(self, *flags: bool) -> list[bool]:
        """Each flag, or'ed over the processes: the same answer on all of them."""
        votes = torch.tensor(flags, dtype=torch.int32)
        if self.world > 1:
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.control)
        return votes.bool().tolist()

    def on_main(self, work: Callable[[], T]) -> T:
        """What `work` returns on the first process, which alone runs it, on every process.

        A user's error is raised on the first process, so that it is told once; the others leave quietly.
        """
        if self.world == 1:
            return work()
        result, error = None, None
        if self.is_main:
            try:
                result = work()
            except UserError as e:
                error = e
        answer = [(error is None, result)]
        dist.broadcast_object_list(answer, src=0, group=self.control)
        if error:
            raise error
        fine, result = answer[0]
        return result if fine else exit_quietly()

    def raise_on_main(self, error: Exception, exit_code: int) -> NoReturn:
        """Raises on the first process an error that all have found; the others leave quietly, with its exit code."""
        if self.is_main:
            raise error
        exit_quietly(exit_code)

    def on_all(self, work: Callable[[], T]) -> T:
        """What `work` returns here; a user's error on any process is raised on the first that has one, and
        makes all leave."""
        if self.world == 1:
            return work()
        result, error = None, None
        try:
            result = work()
        except UserError as e:
            error = e
        failed: list[bool] = [False] * self.world
        dist.all_gather_object(failed, error is not None, group=self.control)
        if error and not any(failed[: self.rank]):
            raise error
        return exit_quietly() if any(failed) else result


def exit_quietly(exit_code: int = 2) -> NoReturn:
    """Ends a process whose error another process tells: late, as torchrun ends all with the first that ends."""
    time.sleep(10)
    raise SystemExit(exit_code)


def lost_peer(error: Exception) -> bool:
    """Whether a collective failed because another process is gone, which then has the reason."""
    return isinstance(error, dist.DistBackendError) or any(sign in str(error) for sign in LOST_PEER)


def is_local_main() -> bool:
    """True on local rank 0, and where LOCAL_RANK is missing or no number."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    return not local_rank.isdecimal() or int(local_rank) == 0


def number_of(variable: str, default: int, least: int = 0) -> int:
    """One of the variables by which torchrun, or a job script in its place, tells a process its place."""
    text = os.environ.get(variable, str(default))
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"the environment's {variable} is {text!r}, and not a number from {least} up")
    return int(text)


def check_environment(world: int) -> tuple[int, str, int]:
    """(rank, address, port) by which to meet the others. Raises UserError where the environment does not say them."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"the environment's WORLD_SIZE is {world}, but it lacks {', '.join(missing)}; torchrun sets them"
        )
    rank, port, address = (
        number_of("RANK", 0),
        number_of("MASTER_PORT", 0, least=1),
        os.environ["MASTER_ADDR"],
    )
    if rank >= world:
        raise UserError(f"the environment's RANK is {rank}, with a WORLD_SIZE of {world}")
    if port > 65535:
        raise UserError(f"the environment's MASTER_PORT is {port}; the highest port is 65535")
    try:
        socket.getaddrinfo(address, port)
    except OSError as e:
        raise UserError(
            f"the environment's MASTER_ADDR is {address!r}, which is not found: {e.strerror}"
        ) from None
    return rank, address, port


def join(device: torch.device, world: int) -> None:
    """Meets the other processes of the run, and says so where that takes long. Raises UserError.

    torchrun on one machine keeps its store when it restarts the processes, and they would find in it the
    addresses of the dead. On several machines the restarts are not counted alike, and tell nothing.
    """
    rank, address, port = check_environment(world)
    others = "process 0" if rank else f"{world - 1} other process(es)"
    waiting = threading.Timer(
        PATIENCE, print, (f"process {rank} waits for {others} at {address}:{port} ...",), {"file": sys.stderr}
    )
    waiting.daemon = True
    waiting.start()
    try:
        store, _, _ = next(dist.rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            store = dist.PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        cuda = device if device.type == "cuda" else None
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, device_id=cuda)
    except (dist.DistNetworkError, dist.DistStoreError) as e:
        if "EADDRINUSE" in str(e):
            raise UserError(
                f"the environment's MASTER_PORT {port} is taken by another program; {free_port()} is free"
            ) from None
        reason = str(e).partition("\n")[0]
        raise UserError(f"process {rank} has met no {others} at {address}:{port} ({reason})") from None
    finally:
        waiting.cancel()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def leave_group() -> None:
    """Leaves the group of processes, unless an error is under way: its others may be gone, and leaving would abort."""
    if dist.is_initialized() and sys.exc_info()[0] is None:
        dist.destroy_process_group()


def exit_now(exit_code: int) -> NoReturn:
    """Ends one of several processes with its own code.

    On the interpreter's way out, threads of a process group that a device mesh still holds can abort it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def recompute(model: GPT) -> None:
    """Activation checkpointing: backward computes the inside of every branch again instead of keeping it."""
    for branch in model.branches:
        branch.forward = partial(checkpoint, branch.forward, use_reentrant=False)


def compile_parts(model: GPT) -> None:
    """Compiles what FSDP's hooks, which no graph can hold, stand between: every branch and every join.

    Their forward alone, as hooks are called before and after it.
    """
    for module in (*model.branches, *model.joins):
        module.forward = torch.compile(module.forward)


def shard(model: GPT, runtime: Runtime) -> None:
    """FSDP2 in place: every branch is a unit, and the root holds the embedding, the joins and the head."""
    # These take half as long to import as torch itself.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(runtime.device.type, (runtime.world,))
    for branch in model.branches:
        fully_shard(branch, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss")


def is_sharded(model: GPT) -> bool:
    """Whether `shard` has changed the model's class, which then has FSDP's methods."""
    return hasattr(model, "set_requires_gradient_sync")


def reshard(model: GPT) -> None:
    """To be called after forward passes that no backward pass follows.

    They leave the root's parameters whole, and `model.parameters()` yields these then, which no optimizer knows.
    """
    if is_sharded(model):
        model.reshard()


def replicate(module: nn.Module, runtime: Runtime) -> nn.Module:
    """DistributedDataParallel; gradients are averaged over the processes by backward."""
    devices = [runtime.device.index] if runtime.device.type == "cuda" else None
    name = "forward_sync_buffers"  # of torch 2.13 on; buffers are equal by construction
    name = name if name in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers"
    return DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True, **{name: False})


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

"""Where a run executes: processes first, then the device, then the dtype that suits it."""

import ctypes
import math
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

import kernels
from base.cli import UserError
from configs import Config, replace

T = TypeVar("T")
WIDE = 96  # width from which a CPU's faster products outweigh the casts (docs/performance.md)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
HEAP = 2**30  # bytes of the allocator's memory that are in huge pages
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")


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
        return result if fine else leave()

    def refuse(self, error: Exception, exit_code: int) -> NoReturn:
        """Raises on the first process an error that all have found; the others leave quietly, with its exit code."""
        if self.is_main:
            raise error
        leave(exit_code)

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
        return leave() if any(failed) else result


def leave(exit_code: int = 2) -> NoReturn:
    """Ends a process whose error another process tells: late, as torchrun ends all with the first that ends."""
    time.sleep(10)
    raise SystemExit(exit_code)


def out_of_memory(error: Exception) -> bool:
    """Whether more memory was asked for than the machine or its GPU has left."""
    signs = ("can't allocate memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(s in str(error) for s in signs)


def lost_peer(error: Exception) -> bool:
    """Whether a collective failed because another process is gone, which then has the reason."""
    return isinstance(error, dist.DistBackendError) or any(sign in str(error) for sign in LOST_PEER)


def start(config: Config) -> tuple[Config, Runtime]:
    """Joins the processes of torchrun, if any, and settles device, dtype and kernel. Raises UserError."""
    kind = choose_device(config.run.device)
    world, local_rank = number_of("WORLD_SIZE", 1, least=1), number_of("LOCAL_RANK", 0)
    if kind == "cuda":
        here, devices = number_of("LOCAL_WORLD_SIZE", local_rank + 1), torch.cuda.device_count()
        if here > devices:
            raise UserError(f"{here} processes share {devices} CUDA device(s); start at most {devices} here")
        torch.cuda.set_device(local_rank)
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if config.model.norm == "batchnorm" and world > 1 and kind != "cuda":
        raise UserError(
            f"norm is batchnorm, whose statistics are pooled over processes on CUDA only, and {world} processes "
            f"run on {kind}; start one"
        )
    if config.optim.optimizer == "muon" and config.run.parallel == "fsdp" and world > 1:
        raise UserError(
            "optimizer muon needs whole matrices, which parallel fsdp shards; take --parallel ddp"
        )
    if kind == "cpu":
        keep_freed_memory()
    check_division(config, world)
    config = replace(config, "model", dtype=choose_dtype(config.model.dtype, device, config.model.n_embd))
    problem = kernels.triton_problem(kind, config.model.n_embd)
    if problem and config.model.kernel == "triton":
        raise UserError(f"--kernel triton: {problem[0].lower()}{problem[1:]}")
    if config.run.compile and kind == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++", "cl"))):
        raise UserError(
            "--compile needs a C++ compiler on the CPU, and none was found; install g++ or leave it out"
        )
    if world > 1:
        check_environment(world)
        join("nccl" if kind == "cuda" else "gloo")
        control = dist.new_group(backend="gloo") if kind == "cuda" else dist.group.WORLD
        return config, Runtime(device, dist.get_rank(), world, control)
    return config, Runtime(device)


def is_local_main() -> bool:
    """Whether this is the first process of its machine, or says nothing of its place that makes sense."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    return not local_rank.isdecimal() or int(local_rank) == 0


def number_of(variable: str, default: int, least: int = 0) -> int:
    """One of the variables by which torchrun, or a job script in its place, tells a process its place."""
    text = os.environ.get(variable, str(default))
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"the environment's {variable} is {text!r}, and not a number from {least} up")
    return int(text)


def check_environment(world: int) -> None:
    """Raises UserError where it does not say how to meet the other processes."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"the environment's WORLD_SIZE is {world}, but it lacks {', '.join(missing)}; torchrun sets them"
        )
    if number_of("RANK", 0) >= world:
        raise UserError(f"the environment's RANK is {os.environ['RANK']}, with a WORLD_SIZE of {world}")


def keep_freed_memory() -> None:
    """Lets glibc's allocator reuse what a step frees, in huge pages; nothing happens without glibc.

    By itself it gives much of that memory back, and the next step has it zeroed again, page by page; and small
    pages are more than a processor's table of them holds. Peak memory stays what it was.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
    libc.mallopt(M_MMAP_THRESHOLD, 2 * HEAP - 1)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.madvise.argtypes = (
        [ctypes.c_void_p],
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
    )
    if begin := libc.malloc(HEAP):  # the next addresses that it will hand out; none is touched yet
        page = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        libc.madvise(page, begin + HEAP - page, mmap.MADV_HUGEPAGE)
        libc.free(begin)


def join(backend: str) -> None:
    """Meets the other processes of the run.

    torchrun on one machine keeps its store when it restarts the processes, and they would find in it the
    addresses of the dead. On several machines the restarts are not counted alike, and tell nothing.
    """
    store, rank, world = next(dist.rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def stop() -> None:
    """Leaves the group of processes, unless an error is under way: its others may be gone, and leaving would abort."""
    if dist.is_initialized() and sys.exc_info()[0] is None:
        dist.destroy_process_group()


def end(exit_code: int) -> NoReturn:
    """Ends one of several processes with its own code.

    On the interpreter's way out, threads of a process group that a device mesh still holds can abort it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def choose_device(asked: str) -> str:
    have = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if asked == "auto":
        return next(kind for kind in ("cuda", "mps", "cpu") if have[kind])
    if not have[asked]:
        usable = ", ".join(kind for kind in have if have[kind])
        raise UserError(
            f"device is {asked}, but torch {torch.__version__} finds none here; usable: auto, {usable}"
        )
    return asked


def choose_dtype(asked: str, device: torch.device, width: int) -> str:
    """What a model whose stream is `width` wide computes in: on a CPU bfloat16 only where its products are faster."""
    if asked != "auto":
        return asked
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "bfloat16" if multiplies_bfloat16(device) and width >= WIDE else "float32"


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether this is a processor with instructions for products of bfloat16, which are faster there."""
    has = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return bool(has.get("amx_bf16") or has.get("avx512_bf16"))


def check_division(config: Config, world: int) -> None:
    """batch_size must be a whole number of micro-batches on every process; else propose what is."""
    batch, micro = config.optim.batch_size, config.optim.micro_batch_size
    step = world * (micro or 1)
    if batch % step == 0:
        return
    several = f"{world} processes" if world > 1 else "one process"
    share = f"{several} of micro_batch_size {micro}" if micro else several
    near = sorted({max(batch // step, 1) * step, (batch // step + 1) * step})
    advice = f"batch_size {' or '.join(map(str, near))} would"
    if micro and batch % world == 0:
        own = batch // world
        small = [i for i in range(1, math.isqrt(own) + 1) if own % i == 0]
        divisors = {*small, *(own // i for i in small)}
        advice += f", or micro_batch_size {max(d for d in divisors if d < micro)}"
    raise UserError(f"batch_size {batch} does not divide among {share}; {advice}")


def accumulation(config: Config, world: int) -> tuple[int, int]:
    """(micro-batches per step, sequences in each) of one process."""
    share = config.optim.batch_size // world
    micro = config.optim.micro_batch_size or share
    return share // micro, micro

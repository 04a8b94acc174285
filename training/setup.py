"""What a run needs before its first step: device, dtype and kernel, processes, a batch that divides, and the data."""

import math
import shutil

import torch
import torch.distributed as dist

import kernels
from base.cli import UserError
from configs import Config, replace
from data import Dataset, check_token_range, ensure_prepared, open_dataset
from training.malloc import keep_freed_memory
from training.parallel import Runtime, is_local_main, join, number_of

WIDE = 96  # width from which a CPU's faster products outweigh the casts (docs/performance.md)


def start(config: Config) -> tuple[Config, Runtime]:
    """Joins the processes of torchrun, if any, and settles device, dtype and kernel. Raises UserError."""
    kind = choose_device(config.run.device)
    world, local_rank = number_of("WORLD_SIZE", 1, least=1), number_of("LOCAL_RANK", 0)
    device = own_gpu(local_rank) if kind == "cuda" else torch.device(kind)
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
    torch.backends.cuda.matmul.allow_tf32 = config.run.tf32
    check_division(config, world)
    config = replace(config, "model", dtype=choose_dtype(config.model.dtype, device, config.model.n_embd))
    kernels.import_triton()
    problem = kernels.triton_problem(kind, config.model.n_embd)
    if problem and config.model.kernel == "triton":
        raise UserError(f"--kernel triton: {problem[0].lower()}{problem[1:]}")
    if config.run.compile and kind == "cuda" and kernels.LAUNCHER_PROBLEM:
        raise UserError(f"--compile: {kernels.LAUNCHER_PROBLEM}")
    if config.run.compile and kind == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++", "cl"))):
        raise UserError(
            "--compile needs a C++ compiler on the CPU, and none was found; install g++ or leave it out"
        )
    if world > 1:
        join(device, world)
        control = dist.new_group(backend="gloo") if kind == "cuda" else dist.group.WORLD
        runtime = Runtime(device, dist.get_rank(), world, control)
        if kind == "cuda":
            check_gpus(runtime)
        return config, runtime
    return config, Runtime(device)


def own_gpu(local_rank: int) -> torch.device:
    """The GPU of this process: that of its local rank, or the only one that a job script lets it see."""
    here, devices = number_of("LOCAL_WORLD_SIZE", local_rank + 1), torch.cuda.device_count()
    if here > devices > 1:
        raise UserError(f"{here} processes share {devices} CUDA device(s); start at most {devices} here")
    device = torch.device("cuda", local_rank if devices > 1 else 0)
    torch.cuda.set_device(device)
    return device


def check_gpus(runtime: Runtime) -> None:
    """Raises UserError where two processes use one GPU."""
    own = str(torch.cuda.get_device_properties(runtime.device).uuid)
    found: list[str] = [""] * runtime.world
    dist.all_gather_object(found, own, group=runtime.control)
    if len(set(found)) < len(found):
        error = UserError(
            f"{len(found)} processes share {len(set(found))} CUDA device(s); start one for each"
        )
        runtime.raise_on_main(error, 2)


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


def open_data(config: Config, runtime: Runtime) -> tuple[Config, Dataset]:
    """The configuration with its vocabulary, and the data set; the default one is prepared if it is missing.

    Raises UserError, on the first process only.
    """
    runtime.on_main(lambda: ensure_prepared(config.data.dataset))
    dataset = runtime.on_all(lambda: open_dataset(config.data.dataset))
    return runtime.on_all(lambda: fit(config, dataset)), dataset


def fit(config: Config, dataset: Dataset) -> Config:
    """The configuration with the data set's vocabulary, checked against the ids that the data really holds."""
    if config.model.vocab_size == 0:
        if dataset.vocab_size is None:
            raise UserError(
                f"{dataset.path} does not say how large its vocabulary is; pass --vocab-size, say 65"
            )
        config = replace(config, "model", vocab_size=dataset.vocab_size)
    if is_local_main():  # as this may read all of it
        check_token_range(dataset, config.model.vocab_size)
    return config


def out_of_memory(error: Exception) -> bool:
    """Whether more memory was asked for than the machine or its GPU has left."""
    signs = ("can't allocate memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(s in str(error) for s in signs)

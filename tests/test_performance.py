"""What makes a step fast, checked without a clock: operator calls, graph breaks, recompilations, synchronization."""

import gc
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from configs import load_config, replace
from data import open_dataset
from model import PLACEMENTS
from training.dynamics import Observed, fetch
from training.parallel import Runtime
from training.trainer import Trainer

VIEWS = "view transpose.int t expand detach slice.Tensor split.Tensor split_with_sizes alias _unsafe_view unsqueeze"
VIEWS += " squeeze.dim as_strided unbind.int _reshape_alias select.int"


class Calls(TorchDispatchMode):
    """Counts the operators that reach a device, under their names with overload."""

    def __init__(self):
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func).removeprefix("aten.").removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def work(self) -> int:
        return sum(n for name, n in self.counts.items() if name not in VIEWS.split())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    for split in ("train", "val"):
        np.random.default_rng(0).integers(0, 65, 4000).astype("<u2").tofile(folder / f"{split}.bin")
    return open_dataset(str(folder))


def trainer(data, *flags, vocab_size=65) -> Trainer:
    config = load_config(["configs/shakespeare_char_cpu.toml", "--batch-size", "2", *flags])
    return Trainer(replace(config, "model", vocab_size=vocab_size), Runtime(torch.device("cpu")), data)


def counts(made: Trainer, watch: bool = False) -> Calls:
    for index in range(2):
        made.step(index, watch)
    with Calls() as calls:
        made.step(2, watch)
    return calls


@pytest.mark.parametrize(
    ("norm", "dtype", "most"),
    [
        ("layernorm", "float32", 173),
        ("rmsnorm", "float32", 245),
        ("layernorm", "bfloat16", 267),
        ("rmsnorm", "bfloat16", 339),
    ],
)
def test_a_step_makes_no_more_operator_calls_than_it_did(data, norm, dtype, most):
    calls = counts(trainer(data, "--norm", norm, "--dtype", dtype))
    assert calls.work <= most, calls.counts.most_common()


def test_a_steps_calls_do_not_grow_with_its_index(data):
    made = trainer(data)
    first = counts(made).counts
    with Calls() as calls:
        made.step(3, False)
    assert calls.counts == first


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_nothing_is_read_back_between_logs(data, optimizer):
    """`.item()`, `bool(tensor)` and `.tolist()` are all _local_scalar_dense or a copy to the host."""
    made = trainer(data, "--optimizer", optimizer, "--dtype", "bfloat16")
    calls = counts(made)
    assert calls.counts["_local_scalar_dense"] == 0
    with Calls() as control:
        made.held.item()
    assert control.counts["_local_scalar_dense"] == 1


@pytest.mark.parametrize("norm", ["rmsnorm", "dyt"])
def test_the_model_compiles_without_a_graph_break(data, norm):
    """A kind that the kernels have and one that they have not; the eight branches have a placement each."""
    flags = ("--norm", norm, "--qk-norm", "head", "--force-placement")
    made = trainer(data, "--placement", " ".join(PLACEMENTS), *flags)
    assert made.config.model.placements == tuple(PLACEMENTS)
    torch._dynamo.reset()
    tokens, targets = made.batches.batch(0, range(2))
    for watch in (False, True):
        found = torch._dynamo.explain(Observed(made.model))(tokens, targets, watch)
        assert found.graph_break_count == 0, found.break_reasons
        assert found.graph_count == 1


def test_nothing_is_compiled_again_after_the_first_steps(data):
    made = trainer(data, "--n-layer", "1", "--dropout", "0.1")
    torch._dynamo.reset()
    counter = CompileCounter()
    made.observed.compile(backend=counter)
    made.step(0, True)
    made.step(1, False)
    compiled = counter.frame_count
    assert compiled == 2  # with and without the stream's RMS
    for index in range(2, 6):
        made.step(index, index % 2 == 0)
    assert counter.frame_count == compiled


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="glibc's allocator and Linux's page faults")
def test_a_step_faults_no_page_in_again(data):
    """Of a model whose step allocates more than glibc keeps by itself; in a process of its own, as it is for good."""
    script = """
        import resource, sys
        from configs import load_config
        from training.parallel import Runtime
        from training.setup import start
        from training.trainer import Trainer
        from data import open_dataset

        flags = ["configs/shakespeare_char_cpu.toml", "--vocab-size", "65", "--dataset", sys.argv[1]]
        config, runtime = start(load_config([*flags, "--device", "cpu"]))
        trainer = Trainer(config, runtime, open_dataset(config.data.dataset))

        def faults(steps):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for index in steps:
                trainer.step(index, False)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        first = faults(range(5))
        print(first, faults(range(5, 15)))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(data.path)]
    first, later = map(
        int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    )
    assert later < first / 5  # without it, thousands at every step


def resident() -> int:
    """Bytes of memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_does_not_grow_over_five_thousand_steps(data):
    made = trainer(data, "--n-layer", "1", "--n-embd", "32", "--block-size", "16", "--dropout", "0.1")
    sizes = []
    for index in range(5000):
        values = made.step(index, index % 10 == 0)
        if index % 10 == 0:
            fetch(values)
        if index % 1000 == 999:
            gc.collect()
            sizes.append(resident())
    assert sizes[-1] - sizes[0] < 4 * 2**20, sizes

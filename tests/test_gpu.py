"""What only a GPU can show: waits, streams, graphs, compiled kernels, its memory. None of it has run on one yet."""

import signal

import pytest
import torch
from kernel_cases import Case, assert_accurate, call, run, strided
from tiny_runs import assert_same_course, before_step, recipe, train

import kernels
from configs import load_config
from data import open_dataset
from kernels.loss import LOGITS, linear_cross_entropy
from training.divergence import EXIT_CODE
from training.run import EXIT_STOPPED
from training.setup import start
from training.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIXED = (torch.float32, torch.bfloat16)
MODERN = "--norm rmsnorm --placement sandwich --qk-norm head --v-norm --pos rope --n-kv-head 1 --mlp swiglu"


def trainer(folder, *flags: str) -> Trainer:
    config, runtime = start(load_config([str(recipe(folder)), "--device", "cuda", *flags]))
    return Trainer(config, runtime, open_dataset(config.data.dataset))


@pytest.mark.parametrize(
    "flags",
    [
        *(
            "",
            MODERN,
            "--kernel torch",
            "--dtype float16",
            "--dtype float32",
            "--norm batchnorm",
            "--compile",
        ),
        *("--optimizer muon", "--activation-checkpointing", "--norm dyt --z-loss 1e-4 --logit-softcap 5"),
    ],
)
def test_the_host_waits_for_no_step(flags, tmp_path):
    made = trainer(tmp_path, *flags.split())
    for index in range(4):  # these compile, and fill the caches of memory
        made.step(index, watch=index % 2 == 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in (4, 5):
            made.step(index, watch=index % 2 == 0)
        with pytest.raises(RuntimeError, match="synchronizing"):
            made.held.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def again(work):
    return work()


def on_a_side_stream(work):
    """Late there, so that what runs on another stream comes too early."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        found = work()
    stream.synchronize()
    return found


def as_a_graph(work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    graph.replay()
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("how", [again, on_a_side_stream, as_a_graph])
@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize("name", ["norm", "sandwich"])
def test_equal_bits(name, kind, how):
    case = Case(name, kind, (16384, 768), *MIXED)
    given = case.inputs(), case.gradients()

    def work():
        return run(call, case, *({name: t.clone() for name, t in group.items()} for group in given))

    first = work()
    for name, value in how(work).items():
        assert torch.equal(value, first[name]), name


def test_a_models_gradient_as_a_graph(tmp_path):
    made = trainer(tmp_path, "--dropout", "0", "--dtype", "float32", *MODERN.split())
    batch, parameters = made.to_device(*made.batches.batch(0, range(8))), list(made.model.parameters())

    def work():
        return torch.autograd.grad(made.model.loss(*batch)[0], parameters)

    first = work()
    torch.testing.assert_close(as_a_graph(work), first)


@pytest.mark.parametrize("layout", ["contiguous", "offset"])
@pytest.mark.parametrize("dtypes", [MIXED, (torch.float16,) * 2, (torch.float64,) * 2], ids=str)
@pytest.mark.parametrize("D", [768, kernels.MAX_D])
def test_accurate(D, dtypes, layout):
    """Compiled: the shortest and the longest rows of whole warps, aligned and not."""
    case = Case("sandwich", "layernorm", (600, D), *dtypes)
    given = ({name: strided(t, layout) for name, t in g.items()} for g in (case.inputs(), case.gradients()))
    assert_accurate(case, **dict(zip(("tensors", "gradients"), given, strict=True)))


@pytest.mark.parametrize("flags", ["", MODERN])
def test_inductor_trains_as_eager_does(flags, tmp_path):
    losses = []
    for mode in ("--no-compile", "--compile"):
        made = trainer(tmp_path / mode, mode, "--dropout", "0", "--dtype", "float32", *flags.split())
        losses.append([made.step(index, False)["train/loss"].item() for index in range(6)])
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
    assert losses[0][-1] < losses[0][0]


def test_the_loss_takes_the_memory_of_a_piece():
    """Whole, the logits alone are 12 pieces."""
    h = torch.randn(16384, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50304, 768, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(h, weight, None, torch.zeros(16384, dtype=torch.int64, device="cuda"))[0].backward()
    gradients = sum(t.numel() * t.element_size() for t in (h, weight))
    assert torch.cuda.max_memory_allocated() - before < 4 * LOGITS * 4 + 2 * gradients


def test_a_run_goes_on_and_is_replayed(tmp_path, monkeypatch):
    argv = (recipe(tmp_path), "--device", "cuda", "--dtype", "float32", "--run-name")
    assert train(*argv, "whole") == 0
    with monkeypatch.context() as patch:
        before_step(patch, 8, lambda: signal.raise_signal(signal.SIGUSR1))
        assert train(*argv, "stopped") == EXIT_STOPPED
    assert train(*argv, "stopped", "--resume") == 0
    assert_same_course(tmp_path / "stopped", tmp_path / "whole")
    assert train(*argv, "bad", "--lr", "1e38", "--min-lr", "1e38") == EXIT_CODE
    assert train("--replay", tmp_path / "bad" / "diverged") == EXIT_CODE

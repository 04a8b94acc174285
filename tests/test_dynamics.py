"""The first table: its values against a textbook network, and what it costs the training step."""

import json
import math

import pytest
import torch
from dynamics_cases import CASES, Textbook, known_model, rms, tiny_trainer, tokens_and_targets, train_here
from test_probe import part_of
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, Linear, ModelConfig
from training.clock import Clock, duration, flops_per_token, peak_flops
from training.dynamics import Observed, PartNorms, fetch, mean_square
from training.metrics import branch_names, depth_names, part_names
from training.parallel import Runtime

DEPTHS = ["embed", "layer_00.attn", "layer_00.mlp", "layer_01.attn", "layer_01.mlp"]


@pytest.mark.parametrize("placement", CASES)
def test_every_value_is_the_textbook_one(placement):
    model = known_model(placement)
    loss, _, squares = Observed(model)(*tokens_and_targets(), True)
    loss.backward()
    norms = PartNorms(model, Runtime(torch.device("cpu")))
    by_part = norms.by_part(norms.squares([p.grad for p in norms.params])).tolist()

    book = Textbook(model)
    params = dict(model.named_parameters())
    gradients = torch.autograd.grad(book.loss(*tokens_and_targets()), list(params.values()))
    right = dict.fromkeys(part_names(2), 0.0)
    for name, gradient in zip(params, gradients, strict=True):
        right[part_of(name)] += float((gradient**2).sum())
    assert loss.item() == pytest.approx(book.loss(*tokens_and_targets()).item(), rel=1e-9)
    assert squares.sqrt().tolist() == pytest.approx([rms(x) for x in book.streams[:5]], rel=1e-9)
    assert by_part == pytest.approx([math.sqrt(v) for v in right.values()], rel=1e-5)
    assert (right["head"] == 0) == model.config.tie_embeddings


def test_micro_batches_and_accumulation_average_as_mean_squares(tmp_path):
    """The table of one step in two micro-batches is that of the same step at once."""
    whole, halves = tiny_trainer(tmp_path), tiny_trainer(tmp_path, "--micro-batch-size", "2")
    rows = [fetch(trainer.step(0, True)) for trainer in (whole, halves)]
    assert rows[0] == pytest.approx(rows[1], rel=1e-5)
    batch = whole.batches.batch(0, range(4))
    first, second = (Textbook(tiny_trainer(tmp_path).model) for _ in range(2))
    first.loss(*(t[:2] for t in batch))
    second.loss(*(t[2:] for t in batch))
    for k, depth in enumerate(DEPTHS):
        a, b = rms(first.streams[k]), rms(second.streams[k])
        assert rows[1][f"residual_rms/{depth}"] == pytest.approx(math.sqrt((a * a + b * b) / 2), rel=1e-5)
    assert a != pytest.approx(b, rel=1e-3), "or the mean of the RMS would do as well"


def test_exact_keys_and_parts_that_add_up(tmp_path):
    trainer = tiny_trainer(tmp_path, "--no-tie-embeddings", "--qk-norm", "head")
    row = fetch(trainer.step(0, True))
    assert row.keys() == {
        *("diverged", "spike", "train/loss", "train/lr", "train/grad_norm"),
        *(f"grad_norm/{part}" for part in [*DEPTHS, "norms", "head"]),
        *(f"residual_rms/{depth}" for depth in DEPTHS),
    }
    parts = [value for name, value in row.items() if name.startswith("grad_norm/")]
    assert math.fsum(v * v for v in parts) == pytest.approx(row["train/grad_norm"] ** 2, rel=1e-5)
    assert min(parts) > 0
    assert row["train/lr"] == pytest.approx(1e-2 / 2)
    assert trainer.step(1, False).keys() == {"diverged", "spike", "train/loss", "train/grad_norm"}


def test_the_z_loss_is_reported_apart_and_evaluation_is_without_it(tmp_path):
    plain, with_z = (tiny_trainer(tmp_path, "--z-loss", z, "--micro-batch-size", "2") for z in ("0", "0.5"))
    first, second = fetch(plain.step(0, True)), fetch(with_z.step(0, True))
    logits = tiny_trainer(tmp_path).model(plain.batches.batch(0, range(4))[0])[0]
    assert second["train/z_loss"] == pytest.approx(
        0.5 * logits.logsumexp(-1).square().mean().item(), rel=1e-5
    )
    assert second["train/loss"] == pytest.approx(first["train/loss"], rel=1e-5)
    assert second["train/grad_norm"] > 1.1 * first["train/grad_norm"], "it is in the gradient"
    assert "train/z_loss" not in first
    with_z.load_weights(plain.state()[0])
    assert with_z.evaluate() == plain.evaluate()


@pytest.mark.parametrize("n_layer", [1, 12])
def test_names_of_depths(n_layer):
    assert len(branch_names(n_layer)) == 2 * n_layer
    assert depth_names(n_layer) == sorted(depth_names(n_layer)), "names sort as the stream flows"


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.bfloat16, 1e-6), (torch.float32, 1e-6), (torch.float64, 1e-14)]
)
def test_the_mean_square_of_a_large_stream_keeps_its_digits(dtype, error):
    """In float32, where one norm over these ten million numbers is wrong in the fourth digit; float64 in itself."""
    x = torch.randn(10_000, 1_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert mean_square(x).item() == pytest.approx(x.double().square().mean().item(), rel=error)


class Transfers(TorchDispatchMode):
    """Counts what makes the host wait for the device: reading a scalar, or copying to another device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("watch", [False, True])
def test_a_step_never_waits_for_the_device(watch, tmp_path):
    trainer = tiny_trainer(tmp_path, "--micro-batch-size", "2")
    with Transfers() as transfers:
        trainer.step(0, watch)
        assert transfers.count == 0
        bool(trainer.held)
        assert transfers.count == 1, "it would have been seen"


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_values_are_the_eager_ones_and_move(backend, tmp_path):
    """No graph break, nothing compiled after the second step, and the table of step t is that of step t."""
    eager, compiled = (tiny_trainer(tmp_path) for _ in range(2))
    compiled.observed.compile(backend=backend)
    torch._dynamo.utils.counters.clear()
    rows = []
    for index in range(6):
        watch = index != 1
        pair = [trainer.step(index, watch) for trainer in (eager, compiled)]
        if index == 1:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if watch:
            rows.append([fetch(metrics) for metrics in pair])
            assert rows[-1][1] == pytest.approx(rows[-1][0], rel=2e-4, abs=1e-7)
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    for depth in DEPTHS:
        seen = [row[1][f"residual_rms/{depth}"] for row in rows]
        assert len(set(seen)) == len(seen), depth


def test_model_flops_utilization_only_where_the_peak_is_known():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert [peak_flops(name) for name in ("Tesla T4", "NVIDIA A10G", "NVIDIA A10")] == [65e12, 70e12, 125e12]
    assert (peak_flops("NVIDIA GH200 480GB"), peak_flops("NVIDIA H20")) == (989e12, 148e12)
    for unknown in (
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 2060",
    ):
        assert peak_flops(unknown) is None
    clock = Clock(1000, 0, 10, peak_rate=1e9)
    row = clock.lap(5)
    assert row["perf/mfu"] == row["perf/tokens_per_s"] / 1e9
    assert Clock(1000, 0, 10).lap(5).keys() == {"perf/tokens_per_s", "perf/step_ms"}


def test_flops_per_token_of_gpt2():
    """PaLM's appendix B: 6N + 12 L H Q T, with N the 124M less the positions and norms, the head counted once."""
    with torch.device("meta"):
        model = GPT(ModelConfig())
    n = 12 * (4 * 768 * 768 + 2 * 4 * 768 * 768) + 768 * 50257
    assert n == sum(m.weight.numel() for m in model.modules() if isinstance(m, Linear))
    assert flops_per_token(model) == 6 * n + 12 * 12 * 12 * 64 * 1024


def test_rows_of_a_run(tmp_path):
    """Which step has which numbers, exactly."""
    folder = train_here(tmp_path, "--dropout", "0.1")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    sections = {row["iter"]: sorted({key.partition("/")[0] for key in row}) for row in rows}
    log = ["grad_norm", "iter", "perf", "residual_rms", "tokens", "train"]
    look = ["angle_deg", "attn_entropy", "attn_logit_max", "branch_rms", "gain", "logsumexp"]
    look += ["stream_grad_rms", "stream_kurtosis", "stream_max"]
    assert sections == {
        0: sorted(["iter", "tokens", "val", *look]),
        **dict.fromkeys((1, 2, 10), log),
        **dict.fromkeys((4, 8), sorted([*log, *look, "update_ratio"])),
        6: sorted([*log, "val"]),
        12: sorted([*log, *look, "update_ratio", "val"]),
    }
    assert [row["tokens"] for row in rows] == [24 * row["iter"] for row in rows]


def test_the_clock_tells_the_rate_of_the_last_lap_and_the_time_that_is_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("training.clock.time.perf_counter", lambda: now[0])
    clock, told = Clock(1000, 0, 1000), []
    now[0] += 2.0
    row = clock.lap(4)
    assert row == {"perf/tokens_per_s": 2000.0, "perf/step_ms": 500.0}
    for step, more in ((4, 0), (5, 1.9), (6, 0.2)):
        now[0] += more
        clock.show(step, {"train/loss": 1.5}, lambda text: told.append(text))
    clock.show(800, {"val/loss": 2.0}, lambda text: told.append(text))
    assert told == [
        "step 4/1000  loss 1.5000  2,000 tokens/s  8:18 left",
        "step 6/1000  loss 1.5000  2,000 tokens/s  8:17 left",
        "step 800/1000  val loss 2.0000  2,000 tokens/s  1:40 left",
    ]
    assert duration(2 * 3600 + 65) == "2:01:05"

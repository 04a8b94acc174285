"""BatchNorm as the contrast: what torch's own computes, and what a run with it says and keeps.

What it leaks and tracks is claim 21.
"""

import json

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import train
from base.cli import UserError
from configs import load_config
from data import prepare
from model import GPT, PLACEMENTS, BatchNorm, ModelConfig
from training import parallel, setup
from training.checkpoint import load_model, model_weights

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 23, "norm": "batchnorm"}


def build(**switches) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(**SMALL | switches))


def single(dim: int = 6, **switches) -> BatchNorm:
    norm = BatchNorm(dim, ModelConfig(**SMALL | switches))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in norm.parameters():
            p += torch.randn(p.shape, generator=generator)
    return norm.double()


def rows(batch: int = 3, time: int = 5, dim: int = 6) -> torch.Tensor:
    x = torch.randn(batch, time, dim, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return 3 * x + 7


def ids(batch: int = 4, time: int = 8) -> torch.Tensor:
    return torch.randint(23, (batch, time), generator=torch.Generator().manual_seed(3))


# ---- the module


def test_it_is_torchs_batchnorm_over_batch_and_time():
    """Values, gradients and running statistics, over three batches and then in evaluation mode."""
    own, x = single(), rows().requires_grad_()
    torchs = torch.nn.BatchNorm1d(6).double()
    torchs.load_state_dict(own.state_dict(), strict=False)
    for scale in (1.0, 2.0, 0.5):
        y, expected = own(scale * x), torchs((scale * x).flatten(0, 1)).view(x.shape)
        assert torch.allclose(y, expected, rtol=0, atol=1e-12)
        g = rows().flip(0)
        ours = torch.autograd.grad((y * g).sum(), [x, own.weight, own.bias])
        theirs = torch.autograd.grad((expected * g).sum(), [x, torchs.weight, torchs.bias])
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-9)
    assert torch.allclose(own.running_mean, torchs.running_mean, rtol=0, atol=1e-12)
    assert torch.allclose(own.running_var, torchs.running_var, rtol=0, atol=1e-12)
    assert torch.allclose(own.eval()(x), torchs.eval()(x.flatten(0, 1)).view(x.shape), rtol=0, atol=1e-12)


def test_half_precision_is_normalized_in_float32():
    norm = BatchNorm(1, ModelConfig(**SMALL))
    x = torch.tensor([[[1000.0], [2000.0], [3000.0], [4000.0]]])
    assert norm(x.half()).dtype == torch.float16
    assert torch.equal(norm(x.half()), norm(x).half())


# ---- the model


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_is_the_one_equation(placement):
    """y = N_post(x + N_out(S(N_in(x)))) with the norms that the placement has, written out with torch's own."""
    model, stream, norms = build(placement=placement).train(), [], PLACEMENTS[placement]

    def n(module, x):
        y = F.batch_norm(x.flatten(0, 1), None, None, module.weight, module.bias, training=True, eps=1e-5)
        return y.view(x.shape)

    logits, _ = model(ids(), watch=stream.append)
    x = model.pos_embed(model.embed(ids()))
    for k, (branch, join) in enumerate(zip(model.branches, model.joins, strict=True)):
        norm_in = model.entry if k == 0 else model.joins[k - 1].next_norm
        s = branch(n(norm_in, x) if "in" in norms else x)
        x = x + (n(join.out_norm, s) if "out" in norms else s)
        x = n(join.post_norm, x) if "post" in norms else x
        assert torch.allclose(stream[k + 1], x, rtol=0, atol=1e-5)
    h = x if "post" in norms else n(model.joins[-1].next_norm, x)
    assert torch.allclose(logits, model.head(h), rtol=0, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_the_bias_switch_and_the_count_of_parameters(bias):
    d, h, v, t, n = 16, 64, 23, 8, 2
    linears = n * (4 * d * d + 2 * d * h + bias * (4 * d + h + d))
    assert build(bias=bias).n_params() == v * d + t * d + linears + (2 * n + 1) * (1 + bias) * d


@pytest.mark.parametrize(
    ("switches", "reason"),
    [({"kernel": "triton"}, "never fused"), ({"qk_norm": "head"}, "are for norms of a token")],
)
def test_what_does_not_go_with_it_is_refused(switches, reason):
    with pytest.raises(ValueError, match=reason):
        ModelConfig(**SMALL | switches)


# ---- several processes


def test_several_processes_are_refused_off_cuda(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = load_config(["--norm", "batchnorm", "--device", "cpu", "--batch-size", "2"])
    with pytest.raises(UserError, match=r"batchnorm.*on CUDA only, and 2 processes run on cpu"):
        setup.start(config)


def pooled(rank: int, place: str) -> None:
    """One process's half of a batch: outputs, gradients and statistics into a file."""
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
    model = torch.nn.ModuleList([single()])
    parallel.pool_statistics(model, parallel.Runtime(torch.device("cpu"), rank, 2))
    x = rows(4).chunk(2)[rank].clone().requires_grad_()
    y = model[0](x)
    (y * rows(4).flip(1).chunk(2)[rank]).sum().backward()
    torch.save([y.detach(), x.grad, model[0].running_mean, model[0].running_var], f"{place}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_normalize_as_one(tmp_path):
    mp.spawn(pooled, (str(tmp_path),), nprocs=2)
    halves = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    norm, x = single(), rows(4).requires_grad_()
    y = norm(x)
    (y * rows(4).flip(1)).sum().backward()
    alone = single()
    alone(rows(4)[:2])
    assert (alone.running_mean - norm.running_mean).abs().max() > 1e-3, "the halves differ"
    for found, expected in zip(zip(*halves, strict=True), (y, x.grad), strict=False):
        assert torch.allclose(torch.cat(found), expected, rtol=0, atol=1e-10)
    for half in halves:
        assert torch.allclose(half[2], norm.running_mean, rtol=0, atol=1e-12)
        assert torch.allclose(half[3], norm.running_var, rtol=0, atol=1e-12)


# ---- a run


def test_a_run_warns_keeps_its_statistics_and_goes_on_with_them(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("to be, or not to be: that is the question\n" * 200, encoding="utf-8")
    prepared = ["text", "--name", "bard", "--files", str(tmp_path / "text.txt"), "--tokenizer", "char"]
    prepare.main([*prepared, "--data-dir", str(tmp_path)])
    flags = (
        "--n-layer 1 --n-head 2 --n-embd 16 --block-size 16 --batch-size 4 --eval-tokens 256 --norm batchnorm"
    )
    flags += " --lr 1e-2 --warmup-iters 2 --eval-interval 20 --wandb disabled --device cpu --log-interval 10"
    flags += f" --out-dir {tmp_path} --dataset {tmp_path}/bard"

    flags += " --schedule constant"

    def run(name, *more):
        train.main([*flags.split(), "--run-name", name, *more])

    run("whole", "--max-iters", "40")
    assert "warning: batchnorm leaks" in capsys.readouterr().out
    whole = load_model(tmp_path / "whole")
    assert whole.entry.running_var.mean() < 0.1, "the embedding's variance is far below the 1 it began with"

    run("parts", "--max-iters", "20", "--probe-interval", "3")  # a look inside moves no statistics
    run("parts", "--max-iters", "40", "--probe-interval", "3", "--resume")
    parts = model_weights(load_model(tmp_path / "parts"))
    assert any("running_mean" in name for name in parts)
    for name, tensor in model_weights(whole).items():
        assert torch.equal(tensor, parts[name]), name
    losses = [
        json.loads(row).get("val/loss") for row in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()
    ]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < 0.8 * losses[0]

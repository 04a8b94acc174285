"""The model on the Triton kernels against the model on PyTorch's operators."""

import itertools

import pytest
import torch

import kernels
from model import GPT, ModelConfig

pytestmark = pytest.mark.skipif(
    kernels.triton_problem("cpu") is not None and not torch.cuda.is_available(),
    reason=str(kernels.triton_problem("cpu")),
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"n_layer": 1, "n_head": 2, "n_embd": 24, "block_size": 8, "vocab_size": 13}
KERNELS = {"pre": 3, "post": 2, "output": 2, "sandwich": 3}  # norms that are kernel calls, in one layer


def build(kernel: str, **switches) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(**SMALL | {"kernel": kernel} | switches)).to(DEVICE)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(SMALL["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(step)).to(DEVICE)
    return ids[:, :-1], ids[:, 1:]


def trained(model: GPT, steps: int = 20) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(steps):
        loss = model(*batch(step))[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("norm", "placement"),
    list(itertools.product(("layernorm", "rmsnorm"), ("pre", "post", "output", "sandwich"))),
)
def test_training_follows_pytorch_and_runs_the_kernels(norm, placement):
    qk_norm = {"pre": "head", "output": "full"}.get(placement, "off")
    switches = {"norm": norm, "placement": placement, "qk_norm": qk_norm}
    expected = trained(build("torch", **switches))
    kernels.launches.clear()
    model = build("triton", **switches)
    losses = trained(model)
    per_step = KERNELS[placement] + (0 if qk_norm == "off" else 2)
    assert kernels.launches == {"forward": 20 * per_step, "backward": 20 * per_step}
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=2e-6)
    assert len(set(losses)) == 20


def test_torch_runs_no_kernel():
    kernels.launches.clear()
    trained(build("torch"), steps=1)
    assert not kernels.launches


@pytest.mark.parametrize("placement", ["pre", "post", "output", "sandwich"])
def test_compiles_as_one_graph_with_the_kernels_in_it(placement):
    model = build("triton", norm="rmsnorm", placement=placement, qk_norm="head")
    logits, loss = model(*batch(0))
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    kernels.launches.clear()
    got, loss = compiled(*batch(0))
    loss.backward()
    assert kernels.launches["forward"] > 0 < kernels.launches["backward"]
    torch.testing.assert_close(got, logits)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], msg=lambda m, n=name: f"{n}: {m}")

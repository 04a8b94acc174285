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
# Kernels of a step with one layer, forward and backward; the sum of a join without norms needs no backward of ours.
KERNELS = {
    **{"none": (2, 1), "pre": (3, 3), "post": (2, 2), "output": (2, 2), "sandwich": (3, 3)},
    **{"keel": (4, 4), "out_post": (2, 2), "all": (4, 4), "attn:post mlp:sandwich": (3, 3)},
}
STEPS = 6


def build(kernel: str, **switches) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(**SMALL | {"kernel": kernel} | switches)).to(DEVICE)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(SMALL["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(step)).to(DEVICE)
    return ids[:, :-1], ids[:, 1:]


def trained(model: GPT, steps: int = STEPS) -> list[float]:
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
    ("placement", "norm"), list(zip(KERNELS, itertools.cycle(("layernorm", "rmsnorm")), strict=False))
)
def test_training_follows_pytorch_and_runs_the_kernels(norm, placement):
    qk_norm = {"pre": "head", "output": "full"}.get(placement, "off")
    switches = {"norm": norm, "placement": placement, "qk_norm": qk_norm}
    expected = trained(build("torch", **switches))
    kernels.launches.clear()
    losses = trained(build("triton", **switches))
    forward, backward = (STEPS * (n + (0 if qk_norm == "off" else 2)) for n in KERNELS[placement])
    assert kernels.launches == {"forward": forward, "backward": backward}
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert len(set(losses)) == STEPS


def test_torch_runs_no_kernel():
    kernels.launches.clear()
    trained(build("torch"), steps=1)
    assert not kernels.launches


@pytest.mark.parametrize("placement", ["sandwich", "attn:out_post mlp:none"])
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

"""The small models and norms that claims are measured on, with every parameter far from its initialization."""

import torch
from torch import Tensor

from model import GPT, ModelConfig, Norm, make_norm

TIME, VOCAB, SIZE = 8, 13, 8
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": SIZE, "block_size": TIME, "vocab_size": VOCAB}
NAMES = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
NEGLIGIBLE = 1e-30  # stands for an eps of 0, which the norms refuse


def small_model(dtype: torch.dtype = torch.float64, **switches) -> GPT:
    """Two layers, in evaluation mode, whose gains, biases and weights are all random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(ModelConfig(**SHAPE | switches)).to(dtype)
    randomize(model, spread=0.3)
    return model.eval()


@torch.no_grad()
def randomize(module: torch.nn.Module, spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for p in module.parameters():
        p += spread * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def small_norm(kind: str, width: int, eps: float = NEGLIGIBLE, bias: bool = True) -> Norm:
    """A norm as the model makes it, with gain 1 and bias 0, in float32."""
    return make_norm(width, ModelConfig(norm=kind, norm_eps=eps, bias=bias))


def row(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """One token's features, [1, 1, D]."""
    return torch.tensor([[values]], dtype=dtype)


def random(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_tokens(batch: int = 2, time: int = TIME, seed: int = 3) -> Tensor:
    return torch.randint(VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


def largest(t: Tensor) -> float:
    """The largest magnitude in a tensor; NaN if it holds one."""
    return t.detach().abs().max().item()

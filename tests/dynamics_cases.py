"""Small models with known weights, a textbook network to compare them with, and trainers on a tiny data set."""

import math
from pathlib import Path

import numpy as np
import torch

import train
from configs import load_config
from data import open_dataset
from model import GPT, ModelConfig
from training.parallel import Runtime
from training.trainer import Trainer

CASES = {
    "pre": {"norm": "layernorm", "bias": True, "qk_norm": "off", "pos": "learned"},
    "post": {"norm": "rmsnorm", "bias": False, "qk_norm": "head", "pos": "rope", "n_head": 4, "n_kv_head": 2},
    "output": {"norm": "layernorm", "bias": False, "qk_norm": "full", "pos": "learned"},
    "sandwich": {"norm": "rmsnorm", "bias": True, "qk_norm": "full", "pos": "rope", "tie_embeddings": False},
}
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 6, "vocab_size": 11, "norm_eps": 1e-5}


def known_model(placement: str, **changes) -> GPT:
    """Two layers in float64 whose every parameter is random, gains and biases too."""
    torch.manual_seed(5)
    model = GPT(ModelConfig(**SHAPE | CASES[placement] | changes, placement=placement)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model.eval()


def tokens_and_targets(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    window = torch.randint(SHAPE["vocab_size"], (rows, SHAPE["block_size"] + 1), generator=generator)
    return window[:, :-1], window[:, 1:]


class Textbook:
    """y = N_post(x + N_out(S(N_in(x)))), written out from the equations with the model's weights."""

    def __init__(self, model: GPT):
        self.config, self.p = model.config, dict(model.named_parameters())
        self.head = model.head.weight
        self.streams, self.added, self.logits, self.weights = [], [], [], []

    def norm(self, x, name):
        centre = x.mean(-1, keepdim=True) if self.config.norm == "layernorm" else 0.0
        square = ((x - centre) ** 2).mean(-1, keepdim=True)
        bias = self.p.get(f"{name}.bias", 0.0)
        return (x - centre) / (square + self.config.norm_eps) ** 0.5 * self.p[f"{name}.weight"] + bias

    def linear(self, x, name):
        return x @ self.p[f"{name}.weight"].T + self.p.get(f"{name}.bias", 0.0)

    def rotate(self, x):  # [B, T, head_dim]
        half = x.size(-1) // 2
        angle = torch.arange(x.size(1)).double()[:, None] * 10000.0 ** -(torch.arange(half).double() / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def attention(self, h, name):
        config, d = self.config, self.config.head_width
        n_q, n_kv = config.n_head * d, config.kv_heads * d
        q, k, v = self.linear(h, f"{name}.qkv").split((n_q, n_kv, n_kv), -1)
        if config.qk_norm == "full":
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        heads, logits, weights = [], [], []
        visible = torch.ones(h.size(1), h.size(1)).tril().bool()
        for i in range(config.n_head):
            j = i // (config.n_head // config.kv_heads)
            qi, kj, vj = q[..., i * d : (i + 1) * d], k[..., j * d : (j + 1) * d], v[..., j * d : (j + 1) * d]
            if config.qk_norm == "head":
                qi, kj = self.norm(qi, f"{name}.q_norm"), self.norm(kj, f"{name}.k_norm")
            if config.pos == "rope":
                qi, kj = self.rotate(qi), self.rotate(kj)
            score = qi @ kj.transpose(-1, -2) / math.sqrt(d)
            weight = torch.where(visible, score, -math.inf).softmax(-1)
            logits.append(score[:, visible])
            weights.append(weight)
            heads.append(weight @ vj)
        self.logits.append(torch.stack(logits))
        self.weights.append(torch.stack(weights))
        return self.linear(torch.cat(heads, -1), f"{name}.out")

    def mlp(self, h, name):
        u = self.linear(h, f"{name}.up")
        gelu = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        return self.linear(gelu, f"{name}.down")

    def loss(self, tokens, targets):
        config, placement = self.config, self.config.placement
        x = self.p["embed.weight"][tokens]
        if config.pos == "learned":
            x = x + self.p["pos_embed.weight"][: tokens.size(1)]
        self.streams.append(x)
        for k in range(2 * config.n_layer):
            n_in = "entry" if k == 0 else f"joins.{k - 1}.next_norm"
            h = self.norm(x, n_in) if placement in ("pre", "sandwich") else x
            s = (self.attention, self.mlp)[k % 2](h, f"branches.{k}")
            if placement in ("output", "sandwich"):
                s = self.norm(s, f"joins.{k}.out_norm")
            self.added.append(s)
            x = x + s
            if placement == "post":
                x = self.norm(x, f"joins.{k}.post_norm")
            self.streams.append(x)
        if placement != "post":
            x = self.norm(x, f"joins.{2 * config.n_layer - 1}.next_norm")
        log_p = (x @ self.head.T).log_softmax(-1)
        return -log_p.gather(-1, targets[..., None]).mean()


def rms(x) -> float:
    return math.sqrt(float((x.detach().double() ** 2).mean()))


def tiny_data(folder: Path, tokens: int = 4000):
    """A headerless uint16 data set of small ids."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(3).integers(0, SHAPE["vocab_size"], tokens).astype("<u2")
    for split in ("train", "val"):
        ids.tofile(folder / f"{split}.bin")
    return open_dataset(str(folder))


TINY = {
    **{"n-layer": 2, "n-head": 2, "n-embd": 8, "block-size": 6, "vocab-size": 11, "dtype": "float32"},
    **{"max-iters": 12, "batch-size": 4, "warmup-iters": 2, "lr": 1e-2, "min-lr": 1e-3, "eval-tokens": 60},
    **{"log-interval": 2, "probe-interval": 4, "eval-interval": 6, "checkpoint-interval": 6},
    **{"wandb": "disabled", "device": "cpu"},
}
FLAGS = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]


def tiny_trainer(folder: Path, *flags: str, world: int = 1, rank: int = 0) -> Trainer:
    config = load_config([*FLAGS, *flags])
    return Trainer(config, Runtime(torch.device("cpu"), rank, world), tiny_data(folder / "data"))


def train_here(folder: Path, *flags: str) -> Path:
    """Trains in this process, into `folder/run`, as train.py does; the run's folder."""
    tiny_data(folder / "data")
    where = ["--dataset", str(folder / "data"), "--out-dir", str(folder), "--run-name", "run"]
    train.main([*FLAGS, *where, *flags])
    return folder / "run"


DIVERGING = ["--placement", "post", "--dropout", "0.1", "--micro-batch-size", "2"]

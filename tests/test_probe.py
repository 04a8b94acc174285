"""The second table: its values against a textbook network, and that looking changes nothing."""

import math

import pytest
import torch
from dynamics_cases import CASES, Textbook, known_model, rms, tiny_trainer, tokens_and_targets

from model import GPT, Join, ModelConfig, Norm
from training import probe
from training.dynamics import PartNorms
from training.metrics import branch_names, depth_names
from training.parallel import Runtime
from training.probe import Probe, attention_statistics, mean_angle, squared_gradients


class Windows:
    """The probe's windows, given."""

    def __init__(self, tokens, targets):
        self.tokens, self.targets = tokens, targets

    def __len__(self):
        return len(self.tokens)

    def batch(self, rows):
        return self.tokens[rows.start : rows.stop], self.targets[rows.start : rows.stop]


def probe_of(model: GPT, rows: int = 4, at_once: int = 4) -> Probe:
    norms = PartNorms(model, Runtime(model.embed.weight.device))
    return Probe(model, Windows(*tokens_and_targets(rows)), norms, at_once)


def angle(x, y) -> float:
    """Degrees between rows by the cosine, which is exact enough in float64 away from 0."""
    x, y = x.detach(), y.detach()
    cosine = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
    return float(cosine.acos().mean()) * 180 / math.pi


def part_of(name: str) -> str:
    top, *rest = name.split(".")
    if "norm" in name or top in ("joins", "entry"):
        return "norms"
    if top == "branches":
        return f"layer_{int(rest[0]) // 2:02d}.{('attn', 'mlp')[int(rest[0]) % 2]}"
    return {"pos_embed": "embed"}.get(top, top)


def expected(model: GPT, before: dict) -> dict[str, float]:
    """The whole second table from the textbook network."""
    book = Textbook(model)
    loss = book.loss(*tokens_and_targets())
    gradients = torch.autograd.grad(loss, book.streams)
    values = {f"stream_grad_rms/{d}": rms(g) for d, g in zip(depth_names(2), gradients, strict=True)}
    for depth, x in zip(depth_names(2), book.streams, strict=True):
        values[f"stream_max/{depth}"] = x.abs().max().item() / rms(x)
        values[f"stream_kurtosis/{depth}"] = (x**4).mean().item() / (x**2).mean().item() ** 2
    values["logsumexp"] = model(tokens_and_targets()[0])[0].logsumexp(-1).abs().mean().item()
    for k, branch in enumerate(branch_names(2)):
        values[f"branch_rms/{branch}"] = rms(book.added[k])
        values[f"angle_deg/{branch}"] = angle(book.streams[k], book.streams[k + 1])
    for i in range(2):
        weights = book.weights[i]
        surprise = torch.where(weights > 0, -weights * weights.clamp(min=1e-300).log(), 0.0)
        values[f"attn_logit_max/layer_{i:02d}"] = book.logits[i].abs().max().item()
        for head, logits in enumerate(book.logits[i]):
            values[f"attn_logit_max/layer_{i:02d}.head_{head:02d}"] = logits.abs().max().item()
        values[f"attn_entropy/layer_{i:02d}"] = surprise.sum(-1).mean().item()
    for name, p in model.named_parameters():
        if part_of(name) == "norms" and name.endswith("weight"):
            top, *rest = name.removesuffix(".weight").split(".")
            short = ".".join([branch_names(2)[int(rest[0])], *rest[1:]]) if rest else top
            values[f"gain/{short}.mean"] = p.mean().item()
            values[f"gain/{short}.max"] = p.abs().max().item()
    parts = ["embed", *branch_names(2), "norms", "head"]
    moved, size = dict.fromkeys(parts, 0.0), dict.fromkeys(parts, 0.0)
    for name, p in model.named_parameters():
        moved[part_of(name)] += ((p - before[name]) ** 2).sum().item()
        size[part_of(name)] += (before[name] ** 2).sum().item()
    for part in parts:
        values[f"update_ratio/{part}"] = math.sqrt(moved[part] / size[part]) if size[part] else 0.0
    return values


@pytest.mark.parametrize("at_once", [1, 3, 4])
@pytest.mark.parametrize("placement", CASES)
def test_every_value_is_the_textbook_one(placement, at_once):
    """Of all windows, however many pass at once."""
    model = known_model(placement)
    probe, before = (
        probe_of(model, at_once=at_once),
        {n: p.detach().clone() for n, p in model.named_parameters()},
    )
    probe.remember()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01).add_(0.01)
    values, right = probe.measure(), expected(model, before)
    assert values.keys() == right.keys()
    for key, value in right.items():
        assert values[key] == pytest.approx(value, rel=1e-5, abs=1e-9), key


def test_names_of_a_sandwich_of_one_layer():
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=6, vocab_size=11, placement="sandwich"))
    probe = probe_of(model)
    first = probe.measure()
    assert sorted(first) == [
        *("angle_deg/layer_00.attn", "angle_deg/layer_00.mlp", "attn_entropy/layer_00"),
        *("attn_logit_max/layer_00", "attn_logit_max/layer_00.head_00", "attn_logit_max/layer_00.head_01"),
        *("branch_rms/layer_00.attn", "branch_rms/layer_00.mlp"),
        *("gain/entry.max", "gain/entry.mean"),
        *("gain/layer_00.attn.next_norm.max", "gain/layer_00.attn.next_norm.mean"),
        *("gain/layer_00.attn.out_norm.max", "gain/layer_00.attn.out_norm.mean"),
        *("gain/layer_00.mlp.next_norm.max", "gain/layer_00.mlp.next_norm.mean"),
        *("gain/layer_00.mlp.out_norm.max", "gain/layer_00.mlp.out_norm.mean"),
        "logsumexp",
        *("stream_grad_rms/embed", "stream_grad_rms/layer_00.attn", "stream_grad_rms/layer_00.mlp"),
        *("stream_kurtosis/embed", "stream_kurtosis/layer_00.attn", "stream_kurtosis/layer_00.mlp"),
        *("stream_max/embed", "stream_max/layer_00.attn", "stream_max/layer_00.mlp"),
    ]
    probe.remember()
    assert sorted(probe.measure().keys() - first.keys()) == [
        f"update_ratio/{part}" for part in ("embed", "head", "layer_00.attn", "layer_00.mlp", "norms")
    ]


def test_small_angles_keep_their_digits():
    x = torch.tensor([[1.0, 0.0]])
    y = torch.tensor([[1.0, 1e-5]])
    assert mean_angle(x, y).item() == pytest.approx(math.degrees(1e-5), rel=1e-4)
    assert mean_angle(x, x).item() == 0


@pytest.mark.parametrize("few", [1, 2, 3])
def test_attention_is_looked_at_a_few_sequences_at_a_time(few, monkeypatch):
    """Five of them, so that the last piece is a smaller one."""
    q, k = torch.randn(5, 4, 6, 8).double(), torch.randn(5, 2, 6, 8).double()
    whole = attention_statistics(q, k)
    monkeypatch.setattr(probe, "SCORES", (few + 1) * 4 * 6**2 - 1)
    sizes, softmax = [], torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda p, dim: sizes.append(len(p)) or softmax(p, dim))
    torch.testing.assert_close(attention_statistics(q, k), whole, rtol=1e-12, atol=0)
    assert sizes == {1: [1] * 5, 2: [2, 2, 1], 3: [3, 2]}[few]


def everything(trainer) -> dict:
    """All that a look must leave as it was, copied."""
    named = dict(trainer.model.named_modules())
    state = {f"{n}.weight": p.detach().clone() for n, p in trainer.model.named_parameters()}
    state |= {f"{n}.grad": p.grad.clone() for n, p in trainer.model.named_parameters()}
    for i, moments in trainer.optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{i}.{k}": v.clone() for k, v in moments.items()}
    state["hooks"] = torch.tensor([len(m._forward_hooks) for m in named.values()])
    state["random"] = torch.get_rng_state()
    state["mode"] = torch.tensor([m.training for m in named.values()])
    state["kernels"] = torch.tensor([m.impl == "auto" for m in named.values() if isinstance(m, Norm | Join)])
    return state


@pytest.mark.parametrize("placement", ["post", "sandwich"])
def test_looking_changes_nothing_nor_the_training_that_follows(placement, tmp_path):
    flags = ["--placement", placement, "--dropout", "0.3", "--qk-norm", "head"]
    watched, alone = (tiny_trainer(tmp_path, *flags) for _ in range(2))
    probe = Probe(watched.model, watched.windows, watched.norms)
    for index in range(3):
        for trainer in (watched, alone):
            trainer.step(index, watch=False)
        watched.gradient(index, watch=False)
        before = everything(watched)
        probe.remember()
        first = probe.measure()
        assert first == first | probe.measure(), "the same weights give the same numbers"
        after = everything(watched)
        assert before.keys() == after.keys()
        assert [k for k in before if not torch.equal(before[k], after[k])] == []
        watched.optimizer.zero_grad(set_to_none=True)
    for (name, p), q in zip(watched.model.named_parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_attention_is_looked_at_once_though_backward_repeats_it(tmp_path, monkeypatch):
    calls, real = [], probe.attention_statistics
    monkeypatch.setattr(probe, "attention_statistics", lambda q, k: calls.append(q.shape) or real(q, k))
    plain, again = (tiny_trainer(tmp_path, *flags) for flags in ((), ("--activation-checkpointing",)))
    first, second = (Probe(t.model, t.windows, t.norms).measure() for t in (plain, again))
    assert first == pytest.approx(second, rel=1e-5)
    assert len(calls) == 2 * 2


def test_dropout_is_off_in_the_probe_and_would_have_been_seen(tmp_path):
    trainer = tiny_trainer(tmp_path, "--dropout", "0.5")
    probe = Probe(trainer.model, trainer.windows, trainer.norms)
    assert trainer.model.training
    first = probe.measure()
    trainer.model.eval()
    assert probe.measure() == first
    assert not trainer.model.training, "the mode is left as it was"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_agrees_with_float32(dtype, tmp_path):
    """The loss scale keeps float16's stream gradients from underflowing."""
    exact, low = (tiny_trainer(tmp_path, "--dtype", d, "--qk-norm", "head") for d in ("float32", dtype))
    right = Probe(exact.model, exact.windows, exact.norms).measure()
    values = Probe(low.model, low.windows, low.norms).measure(low.scale.scale)
    for key, value in right.items():
        assert values[key] == pytest.approx(value, rel=0.05, abs=1e-6), key


def test_the_loss_scale_keeps_a_float16_gradient_from_underflowing():
    x = torch.ones(3, 4, dtype=torch.float16, requires_grad=True)

    def look(scale):
        return squared_gradients((1e-9 * x.float()).sum(), [x], scale)[0].sqrt().item()

    assert look(2.0**16) == pytest.approx(1e-9, rel=1e-3)
    assert look(1.0) == 0, "control"


def test_the_gradient_of_a_fused_sum_includes_what_flows_through_its_norm():
    """A fused join gives the sum and its norm as two outputs of one operator, where autograd sees two tensors."""
    values, device = {}, "cuda" if torch.cuda.is_available() else "cpu"
    for kernel in ("torch", "triton"):
        torch.manual_seed(1)
        shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 6, "vocab_size": 11}
        values[kernel] = probe_of(GPT(ModelConfig(kernel=kernel, **shape)).to(device), rows=1).measure()
    assert values["triton"] == values["torch"]


@pytest.mark.parametrize("norm", ["dyt", "derf"])
def test_alpha_and_the_saturated_share_of_norms_that_squash(norm):
    model = known_model("pre", norm=norm, alpha_init=3.0)
    read = {}
    for name in ("entry", "joins.2.next_norm"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda module, inputs, y, name=name: read.update({name: inputs[0]}))
    values = probe_of(model, at_once=2).measure()
    tokens, _ = tokens_and_targets()
    model(tokens)
    for name, place in (("entry", "entry"), ("joins.2.next_norm", "layer_01.attn.next_norm")):
        module = model.get_submodule(name)
        share = (module.normalize(read[name]).abs() > 0.99).double().mean().item()
        assert values[f"saturated/{place}"] == pytest.approx(share, abs=1e-6)
        assert 0 < share < 1
        assert values[f"alpha/{place}"] == pytest.approx(module.alpha.item())
    assert sum(name.startswith("saturated/") for name in values) == 5
    assert not any("saturated" in name for name in probe_of(known_model("pre")).measure())
    assert "normalize" not in vars(model.entry), "it is as it was"


def test_a_look_keeps_no_more_for_backward_than_a_step(tmp_path):
    """Of a vocabulary whose logits outweigh the model, in micro-batches of one sequence."""
    flags = "--micro-batch-size 1 --block-size 32 --vocab-size 5000 --n-embd 16 --eval-tokens 400"
    trainer = tiny_trainer(tmp_path, *flags.split())
    most = {}
    for what, work in {
        "step": lambda: trainer.step(0, True),
        "look": Probe(trainer.model, trainer.windows, trainer.norms, trainer.micro_batch).measure,
        "all at once": Probe(trainer.model, trainer.windows, trainer.norms).measure,
    }.items():
        held = Held()
        with held:
            work()
        most[what] = held.most
    assert most["look"] <= 1.2 * most["step"], most
    assert most["all at once"] > 2 * most["step"], "it would have been seen"


class Held(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for one backward pass."""

    def __init__(self):
        self.now, self.most, self.backward = 0, 0, False
        super().__init__(self.pack, self.unpack)

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        self.now = t.nbytes + (0 if self.backward else self.now)
        self.most, self.backward = max(self.most, self.now), False
        return t

    def unpack(self, t: torch.Tensor) -> torch.Tensor:
        self.backward = True
        return t

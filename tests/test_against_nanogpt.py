"""Both sides on the same batches, and the arithmetic of the line that is printed."""

import json
import resource
import sys

import pytest
import torch
from tiny_runs import recipe as tiny_recipe

from base.cli import UserError
from configs import load_config
from tools import against_nanogpt as against
from tools.against_nanogpt import Options, Peer, with_data
from tools.profile.steps import steps_of

PEER = '''
from dataclasses import dataclass
import torch

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class GPT(torch.nn.Module):
    """The interface that a checkout has, around a table of bigrams."""
    seen = []

    def __init__(self, config):
        super().__init__()
        self.logits = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)

    def forward(self, tokens, targets):
        self.seen.append(tokens)
        loss = torch.nn.functional.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())
        return None, loss
'''


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "model.py").write_text(PEER, encoding="utf-8")
    return tmp_path / "peer"


@pytest.mark.parametrize("random_tokens", [False, True])
def test_the_peer_trains_on_our_batches(tmp_path, checkout, random_tokens):
    with with_data(load_config([str(tiny_recipe(tmp_path))]), random_tokens) as config:
        ours, peer = steps_of(config).trainer, Peer(config, str(checkout))
        seen = sys.modules["nanogpt_model"].GPT.seen
        for index in range(2):
            peer.step(index, watch=False)
        expected = [ours.batches.batch(i, ours.rows(m))[0] for i in range(2) for m in range(4)]
    assert torch.equal(torch.stack(seen), torch.stack(expected))
    assert len({t.sum().item() for t in expected}) > 4  # and they are not one batch
    assert torch.stack(expected).max() < 64


def test_the_peer_learns(tmp_path, checkout):
    with with_data(load_config([str(tiny_recipe(tmp_path))]), False) as config:
        peer = Peer(config, str(checkout))
        tokens, targets = peer.batches.batch(0, range(2))
        before = peer.model(tokens, targets)[1].item()
        for index in range(20):
            peer.step(index, watch=False)
        assert peer.model(tokens, targets)[1].item() < before - 0.1


TIMES = {"ours": [1.0, 2.0, 4.0], "nanogpt": [3.0, 2.0, 8.0]}
PEAKS = {"ours": 2**30, "nanogpt": 3 * 2**29}


@pytest.mark.parametrize(("peak", "mfu"), [(None, (None, None)), (4.0, (0.25, 1 / 6))])
def test_the_line_is_by_hand(monkeypatch, checkout, peak, mfu):
    """Of 16 steps of one token: 2 seconds of ours and 3 of nanoGPT's a step, where the peak is 4 tokens a second."""
    config = load_config(["--batch-size", "8", "--vocab-size", "5", "--n-layer", "1", "--block-size", "2"])
    monkeypatch.setattr(against, "flops_per_token", lambda model: 10 * model.config.n_layer)
    monkeypatch.setattr(against, "peak_flops", lambda device: peak and peak * 80)
    monkeypatch.setattr(against, "compete", lambda *_: (TIMES, PEAKS, "a device"))
    found = against.compare(Options("recipe", str(checkout), random_tokens=True), config)
    assert (found["device"], found["tokens_per_step"]) == ("a device", 16)
    assert (found["ours"]["tokens_per_s"], found["nanogpt"]["tokens_per_s"]) == (8.0, 16 / 3)
    assert (found["ours"]["peak_gib"], found["nanogpt"]["peak_gib"]) == (1.0, 1.5)
    assert found["ratio"] == {"median": 2.0, "low": 1.5, "high": 2.5}
    assert (found["ours"]["mfu"], found["nanogpt"]["mfu"]) == mfu


def test_one_command_prints_one_line(tmp_path, checkout, capsys):
    file = str(tiny_recipe(tmp_path))
    against.main(
        [file, "--nanogpt", str(checkout), "--rounds", "2", "--steps", "1", "--", "--batch-size", "4"]
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["tokens_per_step"] == 4 * 16
    assert found["ratio"]["low"] <= found["ratio"]["median"] <= found["ratio"]["high"]
    # Each side is a process of its own with torch in it, as this one is.
    here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert all(0.05 < found[side]["peak_gib"] < 2 * here for side in ("ours", "nanogpt"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "model.py does not exist"),
        (("--rounds", "1"), "--rounds is 1; it must be at least 2"),
        (("--random-tokens", "--", "--vocab-size", "0"), "--random-tokens wants a vocabulary"),
        (("--", "--batch-size", "3", "--micro-batch-size", "2"), "batch_size 3 does not divide"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, checkout, flags, says):
    folder = checkout if flags else tmp_path
    with pytest.raises(UserError) as told:
        against.main([str(tiny_recipe(tmp_path)), "--nanogpt", str(folder), *flags])
    assert says in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def (:", "(SyntaxError: invalid syntax"),
        ("", "(AttributeError: module 'nanogpt_model' has no attribute 'GPTConfig')"),
        ("import no_such_module", "(ModuleNotFoundError: No module named 'no_such_module')"),
        ("raise SystemExit(3)", "(SystemExit: 3)"),
        (PEER.replace("n_embd: int; ", ""), ": it has no n_embd"),
        (PEER.replace("configure_optimizers", "optimizers"), ": it has no configure_optimizers"),
    ],
)
def test_a_model_py_of_another_kind_is_one_sentence(tmp_path, checkout, text, says):
    (checkout / "model.py").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as told:
        against.main([str(tiny_recipe(tmp_path)), "--nanogpt", str(checkout)])
    message = str(told.value)
    assert message.startswith(f"--nanogpt: {checkout / 'model.py'} is not nanoGPT's model.py")
    assert says in message
    assert "\n" not in message


def test_help_says_where_the_flags_of_train_py_go(capsys):
    with pytest.raises(SystemExit):
        against.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Flags of train.py follow after `--`, as in `-- --batch-size 4`." in said

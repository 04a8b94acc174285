"""tools.sample: what is drawn, and text that is shown as it comes."""

import os
import random
import signal
import subprocess
import sys

import pytest
import torch
from convert_cases import build

from base.cli import UserError
from data import load_tokenizer
from model import GPT, ModelConfig
from tools import sample
from training.checkpoint import about, load_model, model_weights, save_model
from training.sampling import draw, grown

BYTE = {"name": "byte"}


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A model of random weights whose tokens are bytes."""
    model, folder = build(vocab_size=257), tmp_path_factory.mktemp("talker")
    save_model(folder, model_weights(model), about(model, BYTE))
    return folder


def test_a_sample_is_what_the_model_says_at_its_own_length():
    """Greedy, from a context of 3 tokens to one that is longer than the model reads."""
    torch.manual_seed(0)
    config = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=100, vocab_size=50, pos="rope")
    model = GPT(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5)  # so that what was read last decides
        expected = torch.randint(40, (2, 3))
        begin = expected
        for _ in range(130):
            logits = model(expected[:, -100:])[0][:, -1, :40]
            expected = torch.cat((expected, logits.argmax(-1, keepdim=True)), dim=1)
    lengths = set()
    model.register_forward_pre_hook(lambda _, inputs: lengths.add(inputs[0].size(1)))

    def drawn(count: int, **how) -> torch.Tensor:
        return torch.stack(list(draw(model, begin, count, **how, seed=0)), dim=1)

    found = drawn(130, vocab_size=40, temperature=0, top_k=0)
    assert torch.equal(found, expected[:, 3:])
    # A tokenizer that knows more ids than the model is given the model's only.
    wide = drawn(20, vocab_size=60, temperature=1.0, top_k=0)
    assert torch.equal(wide, drawn(20, vocab_size=50, temperature=1.0, top_k=50))
    assert len(set(expected[0].tolist())) > 4
    assert lengths == {64, 100}


def test_text_that_comes_in_pieces_is_the_whole_text():
    tokenizer = load_tokenizer(BYTE)
    rng = random.Random(0)
    texts = [list("été 北京 🙂 e\u0301 \ufffd!".encode())] + [
        rng.choices(range(257), k=40) for _ in range(200)
    ]
    for ids in texts:
        stream, pieces = sample.TextStream(tokenizer.decode), []
        for n in range(1, len(ids) + 1):
            pieces.append(stream.next(ids[:n]))
        assert "".join([*pieces, stream.rest(ids)]) == tokenizer.decode(ids)
    stream, said = sample.TextStream(tokenizer.decode), []
    for n in range(1, 6):
        said.append(stream.next(texts[0][:n]))
    assert said == ["", "é", "t", "", "é"], "each as soon as it is whole"


def test_a_tokenizer_may_spell_an_id_by_what_stands_before_it():
    """As SentencePiece does, which writes no space at the start of a text."""
    words = ["one", "two", "three"]
    stream = sample.TextStream(lambda ids: " ".join(words[i] for i in ids))
    assert [stream.next([0, 1, 2][:n]) for n in (1, 2, 3)] == ["one", " two", " three"]


def test_what_is_printed_is_every_sample_in_turn(talker, capsys):
    flags = ["--prompt", "ab", "--tokens", "20", "--samples", "3", "--device", "cpu", "--seed", "3"]
    sample.main([str(talker), *flags])
    printed = capsys.readouterr().out.removesuffix("\n").split("\n\n---\n\n")
    tokenizer = load_tokenizer(BYTE)
    *_, rows = grown(load_model(talker), tokenizer, "ab", tokens=20, samples=3, seed=3)
    expected = [tokenizer.decode(row) for row in rows]
    assert printed == expected
    assert len(set(expected)) == 3
    assert all(text.startswith("ab") for text in expected)


def test_a_prompt_that_the_model_does_not_know_prints_nothing_else(tmp_path, capsys):
    model = build()
    save_model(tmp_path, model_weights(model), about(model, BYTE))
    with pytest.raises(UserError, match="the prompt has token 122, and the model knows ids below 23 only"):
        sample.main([str(tmp_path), "--prompt", "z", "--device", "cpu"])
    assert capsys.readouterr().out == ""


def test_ctrl_c_keeps_what_was_shown(talker):
    """The text comes before the end, and an interrupt ends with 130 and no traceback."""
    command = [sys.executable, "-m", "tools.sample", str(talker), "--tokens", "1000000", "--samples", "2"]
    command += ["--prompt", "shown at once", "--device", "cpu"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, env=os.environ | {"PYTHONUTF8": "1"})
    try:
        begin = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert begin.startswith(b"shown at once")
    assert process.returncode == 130
    assert err == b"interrupted\n"
    _, second = (begin + out).split(b"\n\n---\n\n")
    assert second.startswith(b"shown at once")
    assert second.endswith(b"\n")

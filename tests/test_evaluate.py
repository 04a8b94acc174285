"""tools.evaluate against loss, standard error and bits per byte as a textbook has them."""

import json
import math
import statistics

import numpy as np
import pytest
import tiktoken
import torch
from convert_cases import build

from base.cli import UserError
from data.batches import EvalWindows
from data.dataset import open_dataset
from data.tokenizer import ByteTokenizer, CharTokenizer, TiktokenTokenizer
from tools import evaluate, sample
from tools.vocabulary import token_bytes
from training.checkpoint import about, load_model, model_weights, save_model

TEXTS = ["to be, or not to be: été", "that is the question", "whether 'tis nobler in the mind to suffer"] * 5


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two models whose tokens are bytes, one with a shorter context, and a data set with separators."""
    folder = tmp_path_factory.mktemp("evaluate")
    for name, switches in (("a", {}), ("b", {"placement": "post"}), ("short", {"block_size": 8})):
        model = build(vocab_size=257, **switches)
        (folder / name).mkdir()
        save_model(folder / name, model_weights(model), about(model, {"name": "byte"}))
    ids = [i for text in TEXTS for i in (*text.encode(), 256)]
    (folder / "data").mkdir()
    for split, part in (("train", ids[:300]), ("val", ids)):
        np.array(part, "<u2").tofile(folder / "data" / f"{split}.bin")
    sizes = {"train": {"tokens": 300, "max_id": 256}, "val": {"tokens": len(ids), "max_id": 256}}
    meta = {"tokenizer": {"name": "byte"}, "vocab_size": 257, "dtype": "uint16", "request": {}} | sizes
    (folder / "data" / "meta.json").write_text(json.dumps(meta))
    return folder


def evaluated(capsys, place, *words) -> list[dict]:
    runs = [str(place / word) if (place / word).is_dir() else word for word in words]
    evaluate.main([*runs, "--dataset", str(place / "data"), "--device", "cpu", "--json"])
    return json.loads(capsys.readouterr().out)["runs"]


def textbook(folder, ids, context, windows) -> list[list[tuple[int, float]]]:
    """(id, nats) of every target, window by window, one position at a time."""
    model, found = load_model(folder).double(), []
    for start in windows:
        piece = ids[start : start + context + 1]
        with torch.no_grad():
            p = model(torch.tensor([piece[:-1]]))[0][0].softmax(-1)
        found.append([(token, -math.log(p[t, token])) for t, token in enumerate(piece[1:])])
    return found


def test_every_number_is_the_textbooks(place, capsys):
    ids = [i for text in TEXTS for i in (*text.encode(), 256)]
    expected = textbook(place / "a", ids, 12, range(0, len(ids) - 1, 12))
    assert 0 < len(expected[-1]) < 12, "the last window is not full, and counts by its targets"
    [found] = evaluated(capsys, place, "a")
    nats = [sum(n for _, n in window) for window in expected]
    counts = [len(window) for window in expected]
    loss = sum(nats) / sum(counts)
    assert (found["windows"], found["tokens"]) == (len(expected), len(ids) - 1)
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    text = [(token, n) for window in expected for token, n in window if token != 256]
    assert len(text) < len(ids) - 1
    assert found["bits_per_byte"] == pytest.approx(
        sum(n for _, n in text) / math.log(2) / len(text), rel=1e-6
    )
    mean_count = sum(counts) / len(counts)
    residuals = [(n - loss * c) / mean_count for n, c in zip(nats, counts, strict=True)]
    error = math.sqrt(sum(r * r for r in residuals) / (len(residuals) - 1) / len(residuals))
    assert found["standard_error"] == pytest.approx(error, rel=1e-5)


def test_windows_of_one_size_have_the_error_of_a_mean(place, capsys):
    ids = [i for text in TEXTS for i in (*text.encode(), 256)]
    a, b = evaluated(capsys, place, "a", "b", "--eval-tokens", "120")
    starts = EvalWindows(open_dataset(str(place / "data")).val, block_size=12, max_tokens=120).starts.tolist()
    means = {
        name: [statistics.fmean(n for _, n in window) for window in textbook(place / name, ids, 12, starts)]
        for name in "ab"
    }
    assert len(starts) == 10
    for found, name in ((a, "a"), (b, "b")):
        assert found["standard_error"] == pytest.approx(
            statistics.stdev(means[name]) / math.sqrt(10), rel=1e-5
        )
    differences = [y - x for x, y in zip(means["a"], means["b"], strict=True)]
    assert b["difference"] == pytest.approx(statistics.fmean(differences), rel=1e-4)
    assert b["difference_error"] == pytest.approx(statistics.stdev(differences) / math.sqrt(10), rel=1e-4)
    assert "difference" not in a


def test_other_windows_are_not_compared_and_a_context_can_be_shared(place, capsys):
    long, short = evaluated(capsys, place, "a", "short")
    assert (long["context"], short["context"]) == (12, 8)
    assert "difference" not in short
    long, short = evaluated(capsys, place, "a", "short", "--context", "8")
    assert "difference" in short
    train = evaluated(capsys, place, "a", "--split", "train")[0]
    assert train["tokens"] == 299
    [one] = evaluated(capsys, place, "a", "--eval-tokens", "5")
    assert (one["windows"], one["standard_error"]) == (1, None)


def test_many_windows_at_once_are_the_same_windows(place, capsys, monkeypatch):
    [whole] = evaluated(capsys, place, "a")
    monkeypatch.setattr(evaluate, "LOGITS", 3 * 12 * 257)
    [split] = evaluated(capsys, place, "a")
    for name in ("loss", "standard_error", "bits_per_byte", "tokens"):
        assert split[name] == pytest.approx(whole[name], rel=1e-6), name


def test_the_table_has_a_row_for_each_run_and_no_more(place, capsys):
    evaluate.main([str(place / "a"), str(place / "b"), "--dataset", str(place / "data"), "--device", "cpu"])
    about, head, first, second = capsys.readouterr().out.splitlines()
    assert about == f"val of {place}/data, loss in nats per token ± its standard error"
    assert head.split() == ["loss", "perplexity", "bits/byte", "to", "the", "first", "context", "tokens"]
    a, b = evaluated(capsys, place, "a", "b")
    assert first.split()[1:4] == [f"{a['loss']:.4f}", "±", f"{a['standard_error']:.4f}"]
    assert first.split()[-2:] == ["12", f"{a['tokens']:,}"]
    assert second.split()[6:9] == [f"{b['difference']:.4f}", "±", f"{b['difference_error']:.4f}"]


def test_the_bytes_of_an_id_are_known_where_the_tokenizer_says_them():
    assert token_bytes(ByteTokenizer()).tolist() == [1] * 256 + [0]
    assert token_bytes(CharTokenizer("aé北")).tolist() == [1, 2, 3]
    ranks = {bytes([i]): i for i in range(256)} | {b"the": 256}
    encoding = tiktoken.Encoding(
        "x", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 257}
    )
    assert token_bytes(TiktokenTokenizer("x", encoding)).tolist() == [1] * 256 + [3, 0]


def test_data_that_do_not_say_their_tokenizer_have_a_loss_and_no_bytes(place, tmp_path, capsys):
    for split in ("train", "val"):
        np.array([1, 2, 3] * 20, "<u2").tofile(tmp_path / f"{split}.bin")
    model = build()
    (tmp_path / "m").mkdir()
    save_model(tmp_path / "m", model_weights(model), about(model, None))
    evaluate.main([str(tmp_path / "m"), "--dataset", str(tmp_path), "--device", "cpu", "--json"])
    printed = capsys.readouterr()
    [found] = json.loads(printed.out)["runs"]
    assert found["bits_per_byte"] is None
    assert found["tokens"] == 59
    assert printed.err.startswith(f"{tmp_path / 'm'} does not say what its token ids mean")


def test_ids_that_pad_a_vocabulary_are_no_text(tmp_path, capsys):
    """The data hold one of them, and only the model names its tokenizer."""
    for split in ("train", "val"):
        np.array([1, 2, 22] * 20, "<u2").tofile(tmp_path / f"{split}.bin")
    model = build()
    save_model(tmp_path, model_weights(model), about(model, {"name": "char", "characters": "abc"}))
    evaluate.main([str(tmp_path), "--dataset", str(tmp_path), "--device", "cpu", "--json"])
    printed = capsys.readouterr()
    [found] = json.loads(printed.out)["runs"]
    text = [n for part in textbook(tmp_path, [1, 2, 22] * 20, 12, range(0, 59, 12)) for i, n in part if i < 3]
    assert found["bits_per_byte"] == pytest.approx(sum(text) / math.log(2) / len(text), rel=1e-6)
    assert printed.err.startswith(f"{tmp_path} does not say what its token ids mean")


def test_what_cannot_be_evaluated_is_refused_in_one_sentence(place, tmp_path, capsys):
    model = build()
    save_model(tmp_path, model_weights(model), about(model, None))
    other = build(vocab_size=300)
    (tmp_path / "other").mkdir()
    save_model(tmp_path / "other", model_weights(other), about(other, {"name": "char", "characters": "ab"}))
    for words, says in (
        ([tmp_path / "other"], "was trained on ids of the tokenizer char, and .* holds those of byte"),
        ([tmp_path], "the data hold token \\d+, and the model knows ids below 23 only"),
        ([place / "short", "--context", "9"], "--context is 9, and .*short reads no more than 8 tokens"),
        ([place / "a", place / "nowhere"], "nowhere does not exist"),
    ):
        with pytest.raises(UserError, match=says):
            evaluate.main([*map(str, words), "--dataset", str(place / "data"), "--device", "cpu"])
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("tool", [evaluate, sample])
def test_weights_whose_squares_overflow_are_refused(tool, place, tmp_path):
    """The norm of such a row is 0, and all ids would be equally likely."""
    model = build(vocab_size=257, norm="rmsnorm")
    with torch.no_grad():
        model.embed.weight.mul_(1e23)
    save_model(tmp_path, model_weights(model), about(model, {"name": "byte"}))
    data = ["--dataset", str(place / "data")] if tool is evaluate else []
    with pytest.raises(UserError, match=r": the stream's RMS is not finite after embed; such weights"):
        tool.main([str(tmp_path), *data, "--device", "cpu"])

"""Text to ids and back."""

import json
import os
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from base.cli import UserError
from data import load_tokenizer, open_dataset
from data import tokenizer as tokenizer_module
from data.build import prepare
from data.sources import TextFiles, seam
from data.tokenizer import ByteTokenizer, CharTokenizer, tokenizer_meta

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
# the characters that the patterns of tiktoken's encodings tell apart
AWKWARD = st.text("ab \u00c9s'dl9.?/!- \n\r\t\u00a0\u3000\x1c\x85\u4e2d\u0301", min_size=10, max_size=120)


@pytest.fixture(scope="module")
def gpt2():
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", "")
    if not (cache and any(Path(cache).glob("*"))):
        pytest.skip("needs GPT-2's vocabulary in TIKTOKEN_CACHE_DIR")
    return load_tokenizer({"name": "gpt2"})


@given(TEXT)
def test_bytes_are_utf8_and_come_back(text):
    tokenizer = load_tokenizer({"name": "byte"})
    assert tokenizer.encode(text) == tokenizer.encode_array(text).tolist() == list(text.encode("utf-8"))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_are_an_encoding_of_tiktokens():
    byte = load_tokenizer({"name": "byte"})
    assert isinstance(byte._encoding, tiktoken.Encoding)
    assert byte.mergeable_ranks == {bytes([i]): i for i in range(256)}
    assert (byte.vocab_size, byte.separator, byte.meta) == (257, 256, {"name": "byte"})
    assert byte.separator not in byte.encode("a <|endoftext|> in the text")
    assert byte.decode([104, 256, 105]) == "h<|endoftext|>i"


def test_bytes_of_half_a_character_are_replaced():
    assert ByteTokenizer().decode([0x61, 0xC3, 0x62]) == "a\ufffdb"


@given(TEXT.filter(bool))
def test_characters_come_back(text):
    tokenizer = CharTokenizer(text)
    assert tokenizer.vocab_size == len(set(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    stored = json.loads(json.dumps(tokenizer.meta))
    assert load_tokenizer(stored).encode(text) == tokenizer.encode(text)


def test_character_ids_follow_code_points_as_nanogpts_do():
    tokenizer = CharTokenizer("hello, 🙂")
    characters = sorted(set("hello, 🙂"))
    assert tokenizer.encode("ho🙂 ") == [characters.index(c) for c in "ho🙂 "]
    assert tokenizer.separator is None


@pytest.mark.parametrize(
    "unknown", ["!", "~", "i", "\U0010ffff"]
)  # before, behind and between the known ones
def test_an_unknown_character_is_named(unknown):
    with pytest.raises(UserError) as caught:
        CharTokenizer("hello").encode("he" + unknown)
    assert repr(unknown) in str(caught.value)
    assert "'ehlo'" in str(caught.value)


def test_half_a_surrogate_pair_as_a_command_line_may_hold_is_no_traceback():
    assert ByteTokenizer().decode(ByteTokenizer().encode("a\udcff")) == "a\ufffd"
    with pytest.raises(UserError, match=r"the character '\\udcff' is not among the 4"):
        CharTokenizer("hello").encode("he\udcff")


def test_unknown_tokenizer():
    with pytest.raises(UserError, match=r"no tokenizer 'cl100k-base' \(did you mean cl100k_base\?\)"):
        load_tokenizer({"name": "cl100k-base"})
    with pytest.raises(UserError, match="no tokenizer 'None'"):
        load_tokenizer({})
    with pytest.raises(UserError, match="without its characters"):
        load_tokenizer({"name": "char"})


def test_no_network_is_told_within_seconds(monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(tokenizer_module, "DOWNLOAD_SECONDS", 0.2)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: never.wait(60))
    with pytest.raises(UserError, match=r"no answer in 0\.2 seconds.*TIKTOKEN_CACHE_DIR.*byte tokenizer"):
        load_tokenizer({"name": "gpt2"})
    never.set()


def test_a_failing_download_is_told(monkeypatch):
    def refuse(name):
        raise ConnectionError("a page of text")

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    with pytest.raises(UserError, match=r"'gpt2' could not be fetched \(ConnectionError\).*byte tokenizer"):
        load_tokenizer({"name": "gpt2"})


def test_vocabularies_are_kept_inside_the_project_unless_the_user_says_where(monkeypatch):
    seen = []

    def record(name):
        seen.append(os.environ.get("TIKTOKEN_CACHE_DIR"))
        raise ConnectionError

    monkeypatch.setattr(tiktoken, "get_encoding", record)
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    for chosen in (None, "/chosen"):
        monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
        if chosen:
            monkeypatch.setenv("TIKTOKEN_CACHE_DIR", chosen)
        with pytest.raises(UserError):
            load_tokenizer({"name": "gpt2"})
    inside = Path(tokenizer_module.__file__).parent / ".cache" / "tiktoken"
    assert seen == [str(inside), "/chosen"]


def test_gpt2(gpt2):
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.vocab_size, gpt2.separator) == (50257, 50256)
    assert gpt2.separator not in gpt2.encode("a <|endoftext|> in the text")
    assert gpt2.decode(gpt2.encode("naïve <|endoftext|>\n")) == "naïve <|endoftext|>\n"


@given(AWKWARD, st.integers(5, 60))
def test_gpt2_does_not_notice_a_seam(gpt2, text, limit):
    end = seam(text, limit)
    if end < limit:
        assert gpt2.encode(text[:end]) + gpt2.encode(text[end:]) == gpt2.encode(text)


@pytest.fixture(scope="module")
def patterns():
    """How each of tiktoken's encodings splits a text into words; that takes no vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            patch.setattr(openai_public, loader, lambda *args, **kwargs: {})
        return [regex.compile(make()["pat_str"]) for make in openai_public.ENCODING_CONSTRUCTORS.values()]


@settings(max_examples=300)
@given(AWKWARD, st.integers(5, 60))
def test_no_encoding_has_a_word_that_runs_over_a_seam(patterns, text, limit):
    end = seam(text, limit)
    if end < limit:
        for pattern in patterns:
            assert pattern.findall(text[:end]) + pattern.findall(text[end:]) == pattern.findall(text)


def test_seam_is_before_the_last_space_behind_a_character():
    assert seam("ab cd  ef", 9) == 5
    assert seam("ab cd  ef", 5) == 2
    assert seam("ab  \n  cd", 8) == 2
    assert seam(" " * 9, 6) == 6
    assert seam("abcdefghi", 6) == 6


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory) -> Path:
    """A byte-level BPE of 262 tokens and two special ones, as Hugging Face's library saves it."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=264,
        special_tokens=["<pad>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat and the hat, the other and the brother"] * 10, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path), pretty=True)
    return path


def test_a_tokenizer_json_is_carried_whole_by_its_meta(tokenizer_json):
    tokenizer = load_tokenizer(json.loads(json.dumps(tokenizer_meta(str(tokenizer_json)))))
    assert (tokenizer.vocab_size, tokenizer.separator) == (264, 1)
    text = "the naïve cat 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the cat")) < len("the cat")
    assert tokenizer.encode_array(text).tolist() == tokenizer.encode(text)
    assert tokenizer.separator not in tokenizer.encode("a <|endoftext|> in the text")
    assert tokenizer.decode(tokenizer.encode("a\udcff")) == "a?"


@pytest.mark.parametrize(
    ("configuration", "separator"),
    [
        ({}, 1),
        ({"eos_token": "<pad>"}, 0),
        ({"eos_token": {"content": "<pad>"}}, 0),
        ({"eos_token": None}, 1),
    ],
)
def test_the_separator_is_the_one_that_the_configuration_beside_names(
    tokenizer_json, tmp_path, configuration, separator
):
    shutil.copy(tokenizer_json, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(configuration), encoding="utf-8")
    assert tokenizer_meta(str(tmp_path))["separator"] == separator


def test_data_prepared_with_a_tokenizer_json_keep_it_beside(tokenizer_json, tmp_path):
    (tmp_path / "t.txt").write_text("the cat and the hat\n" * 50, encoding="utf-8")
    source = TextFiles((tmp_path / "t.txt",))
    folder = prepare(source, name="d", tokenizer=str(tokenizer_json), root=tmp_path)
    assert (folder / "meta.json").stat().st_size < 1000
    assert (folder / "tokenizer.json").exists()
    dataset = open_dataset(str(folder))
    tokens = dataset.train.read(np.array([0]), len(dataset.train))[0].tolist()
    assert dataset.tokenizer.decode(tokens) == ("the cat and the hat\n" * 50)[:900]
    assert dataset.meta["tokenizer"] == tokenizer_meta(str(tokenizer_json))
    prepare(source, name="d", tokenizer=str(tokenizer_json.parent), root=tmp_path)  # the same: nothing to do
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="is not the one that was used; prepare the data again"):
        _ = open_dataset(str(folder)).tokenizer


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"added_tokens": [5]}', "\udcff", "[" * 100_000])
def test_what_is_no_tokenizer_json_is_told(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError, match=r"tokenizer\.json is no tokenizer\.json of the tokenizers library"):
        tokenizer_meta(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": []}', encoding="utf-8")
    with pytest.raises(UserError, match=r"the tokenizer\.json cannot be read: "):
        load_tokenizer(tokenizer_meta(str(tmp_path)))


def test_without_the_library_its_name_is_told(tokenizer_json, monkeypatch):
    meta = tokenizer_meta(str(tokenizer_json))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="pip install tokenizers"):
        load_tokenizer(meta)

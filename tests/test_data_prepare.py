"""From text to token files: exact contents, the same from any number of workers, whole or not at all."""

import bz2
import errno
import gzip
import lzma
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from base.cli import UserError
from data import build as build_module
from data import ensure_prepared, open_dataset
from data import sources as sources_module
from data.build import Amounts, TokenFile, prepare
from data.sources import Piece, StandardLibrary, TextFiles, find_files

ROOT = Path(__file__).parents[1]
SEPARATOR = 256


@dataclass(frozen=True)
class Documents:
    """A source of given documents."""

    texts: tuple[str, ...]
    one_text = False
    own_validation = False

    def describe(self) -> dict:
        return {"source": "documents", "texts": list(self.texts)}

    def pieces(self):
        for text in self.texts:
            yield Piece(text, last=True)


def bins(folder: Path) -> dict[str, bytes]:
    return {split: (folder / f"{split}.bin").read_bytes() for split in ("train", "val")}


def ids(folder: Path, split: str) -> list[int]:
    tokens = getattr(open_dataset(str(folder)), split)
    return tokens.read(np.array([0]), len(tokens))[0].tolist()


def text_file(path: Path, text: str) -> TextFiles:
    path.write_bytes(text.encode("utf-8"))
    return TextFiles((path,))


def test_one_text_is_cut_at_nine_tenths_of_its_characters_as_nanogpt_does(tmp_path):
    # as many characters, of as many kinds, as the well-known Shakespeare file has
    alphabet = [chr(48 + i) for i in range(64)] + ["\u00e9"]
    indices = np.random.default_rng(0).integers(0, 65, 1_115_394)
    text = "".join(np.array(alphabet)[indices])
    folder = prepare(text_file(tmp_path / "t.txt", text), name="t", tokenizer="char", root=tmp_path)
    dataset = open_dataset(str(folder))
    assert (dataset.vocab_size, len(dataset.train), len(dataset.val)) == (65, 1_003_854, 111_540)
    assert ids(folder, "train") + ids(folder, "val") == indices.tolist()  # alphabet in code point order
    assert dataset.tokenizer.decode(ids(folder, "val")) == text[1_003_854:]


def test_one_text_keeps_its_line_ends_and_ends_with_one_separator(tmp_path):
    text = "first\r\nsecond\n\n" * 20
    folder = prepare(text_file(tmp_path / "t.txt", text), name="t", root=tmp_path, amounts=Amounts(0.25))
    assert ids(folder, "train") == list(text[:225].encode())
    assert ids(folder, "val") == [*text[225:].encode(), SEPARATOR]


def test_documents_stay_whole_and_each_is_followed_by_one_separator(tmp_path):
    texts = tuple(f"document {i} says <|endoftext|>" * (1 + i % 3) for i in range(100))
    folder = prepare(Documents(texts), name="d", root=tmp_path)
    found = {}
    for split in ("train", "val"):
        raw = ids(folder, split)
        assert raw[-1] == SEPARATOR
        byte_strings = "".join(map(chr, raw)).split(chr(SEPARATOR))[:-1]
        found[split] = byte_strings
    assert sorted(found["train"] + found["val"]) == sorted(texts)
    assert found["train"] == [text for text in texts if text in found["train"]]  # in order
    share = sum(map(len, found["val"])) / sum(map(len, texts))
    assert share == pytest.approx(0.1, abs=0.03)


def test_char_sets_several_documents_apart_with_a_newline(tmp_path):
    folder = prepare(Documents(("ab", "ba", "aa")), name="d", tokenizer="char", root=tmp_path)
    tokenizer = open_dataset(str(folder)).tokenizer
    assert tokenizer.characters == "\nab"
    assert tokenizer.decode(ids(folder, "train")) == "ab\naa\n"
    assert tokenizer.decode(ids(folder, "val")) == "ba\n"


def test_amounts(tmp_path):
    texts = tuple("x" * 9 for _ in range(100))  # 10 tokens each
    amounts = Amounts(val_fraction=0.5, val_tokens=25, max_tokens=333)
    dataset = open_dataset(str(prepare(Documents(texts), name="d", root=tmp_path, amounts=amounts)))
    assert (len(dataset.train), len(dataset.val)) == (303, 30)


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_workers_and_pieces_change_nothing(tmp_path, monkeypatch, tokenizer):
    paths = []
    for i, size in enumerate((3000, 40, 20_000, 1, 700)):
        words = np.random.default_rng(i).choice(["na\u00efve", " ", "\n", "\U0001f642", "x" * 90], size)
        paths.append(tmp_path / f"{i}.txt")
        paths[-1].write_text("".join(words), encoding="utf-8")
    source = TextFiles(tuple(paths))
    whole = bins(prepare(source, name="whole", tokenizer=tokenizer, root=tmp_path))
    monkeypatch.setattr(sources_module, "PIECE_CHARS", 1000)
    monkeypatch.setattr(sources_module, "READ_BYTES", 777)
    monkeypatch.setattr(build_module, "TASK_CHARS", 5000)
    for workers in (1, 2):
        made = prepare(source, name=f"by{workers}", tokenizer=tokenizer, root=tmp_path, workers=workers)
        assert bins(made) == whole
    joined = "".join(path.read_text(encoding="utf-8") for path in paths)
    assert len(whole["train"]) + len(whole["val"]) > 2 * len(joined)


def test_a_vocabulary_beyond_uint16_is_written_wide(tmp_path):
    characters = [chr(0x10000 + i) for i in range(70_000)]
    source = text_file(tmp_path / "t.txt", "".join(characters))
    folder = prepare(source, name="t", tokenizer="char", root=tmp_path, amounts=Amounts(0.01))
    dataset = open_dataset(str(folder))
    assert dataset.meta["dtype"] == "uint32"
    assert dataset.meta["val"]["max_id"] == 69_999
    assert ids(folder, "train") + ids(folder, "val") == list(range(70_000))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_dtype_follows_the_vocabulary_and_ids_are_checked(tmp_path, vocab_size, dtype):
    with TokenFile(tmp_path / "t.bin", vocab_size) as file:
        file.append(np.array([0, vocab_size - 1], np.uint32))
        with pytest.raises(UserError, match=f"id {vocab_size}"):
            file.append(np.array([1, vocab_size], np.uint32))
    assert np.fromfile(tmp_path / "t.bin", dtype).tolist() == [0, vocab_size - 1]
    assert (file.tokens, file.max_id) == (2, vocab_size - 1)


def test_a_second_run_repeats_nothing_and_says_so(tmp_path, capsys, monkeypatch):
    folder = prepare(Documents(("one", "two")), name="d", root=tmp_path)
    monkeypatch.setattr(Documents, "pieces", None)
    capsys.readouterr()
    assert prepare(Documents(("one", "two")), name="d", root=tmp_path) == folder
    assert "nothing to do" in capsys.readouterr().out


def test_something_else_under_the_same_name_is_refused_unless_overwritten(tmp_path):
    folder = prepare(Documents(("one", "two")), name="d", root=tmp_path)
    before = bins(folder)
    with pytest.raises(UserError, match=r"different: texts\); .*--overwrite"):
        prepare(Documents(("three", "four")), name="d", root=tmp_path)
    with pytest.raises(UserError, match="different: tokenizer"):
        prepare(Documents(("one", "two")), name="d", root=tmp_path, tokenizer="char")
    with pytest.raises(UserError, match="different: val_fraction"):
        prepare(Documents(("one", "two")), name="d", root=tmp_path, amounts=Amounts(0.2))
    assert bins(folder) == before
    prepare(Documents(("three", "four")), name="d", root=tmp_path, overwrite=True)
    assert ids(folder, "train") == [*b"three", SEPARATOR]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


def test_a_folder_that_is_not_ours_is_never_replaced(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.bin").write_bytes(b"precious")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"not made by data.prepare"):
            prepare(Documents(("one", "two")), name="d", root=tmp_path, overwrite=overwrite)
    assert (tmp_path / "d" / "train.bin").read_bytes() == b"precious"


def test_a_file_beside_a_data_set_is_never_deleted(tmp_path):
    """Such as its own source."""
    folder = prepare(Documents(("one", "two")), name="d", root=tmp_path)
    (folder / "source.txt").write_text("three", encoding="utf-8")
    before = bins(folder)
    with pytest.raises(UserError, match=r"other files than a data set's, such as source\.txt"):
        prepare(Documents(("three", "four")), name="d", root=tmp_path, overwrite=True)
    assert bins(folder) == before
    assert (folder / "source.txt").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "__pycache__", "a b"])
def test_names_that_are_no_folder_names(tmp_path, name):
    with pytest.raises(UserError, match="cannot name a data set"):
        prepare(Documents(("one", "two")), name=name, root=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("texts", [(), ("alone",), ("a" * 10, "")])
def test_too_little_text_is_refused_and_leaves_nothing(tmp_path, texts):
    source = Documents(tuple(filter(None, texts)))
    for tokenizer in ("byte", "char"):
        with pytest.raises(UserError, match="no text to speak of"):
            prepare(source, name="d", root=tmp_path, tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_cannot_be_read_is_told_as_such_and_the_old_data_stay(tmp_path, monkeypatch):
    before = bins(prepare(Documents(("one", "two")), name="d", root=tmp_path))

    def broken(self):
        yield Piece("first", last=True)
        raise OSError(errno.EIO, "Input/output error", "/mnt/text.txt")

    monkeypatch.setattr(Documents, "pieces", broken)
    with pytest.raises(UserError, match=r"^/mnt/text.txt cannot be read: Input/output error$"):
        prepare(Documents(()), name="d", root=tmp_path, overwrite=True)
    assert bins(tmp_path / "d") == before
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_file_names_in_other_bytes_leave_meta_json_whole(tmp_path, capsys):
    try:
        source = text_file(tmp_path / os.fsdecode(b"caf\xe9.txt"), "some text\n" * 10)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    folder = prepare(source, name="d", root=tmp_path)
    [[path, *_]] = open_dataset(str(folder)).meta["request"]["files"]
    assert path == str(tmp_path / r"caf\udce9.txt")
    capsys.readouterr()
    prepare(source, name="d", root=tmp_path)
    assert "nothing to do" in capsys.readouterr().out


def test_standard_library(tmp_path, capsys, monkeypatch):
    ensure_prepared("another", root=tmp_path)
    assert list(tmp_path.iterdir()) == []
    ensure_prepared("stdlib", root=tmp_path)
    assert "preparing" in capsys.readouterr().out
    paths = StandardLibrary()._files()
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in paths)
    files = [path.read_bytes() for path in paths]
    assert 5e6 < sum(map(len, files)) < 5e7
    train, val = (np.fromfile(tmp_path / f"stdlib/{split}.bin", np.uint16) for split in ("train", "val"))
    assert (train == SEPARATOR).sum() + (val == SEPARATOR).sum() == sum(map(bool, files))  # some are empty
    assert len(train) + len(val) == sum(len(file) + bool(file) for file in files)
    assert bytes(train[: len(files[0])].astype(np.uint8)) == files[0]
    monkeypatch.setattr(StandardLibrary, "_files", None)
    ensure_prepared("stdlib", root=tmp_path)
    assert capsys.readouterr().out == ""


PEAK = """
import sys
from pathlib import Path
from data.build import prepare
from data.sources import TextFiles

root, tokenizer = Path(sys.argv[1]), sys.argv[2]
prepare(TextFiles((root / "large.txt",)), name=tokenizer, tokenizer=tokenizer, root=root)
status = Path("/proc/self/status").read_text(encoding="utf-8")
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its peak of memory from /proc")
@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_memory_is_bounded_on_a_large_file(tmp_path, tokenizer):
    with open(tmp_path / "large.txt", "w", encoding="utf-8") as file:
        for _ in range(200):
            file.write(("some words and a number 12345\n" * 35_000)[: 2**20])
    command = [sys.executable, "-c", PEAK, str(tmp_path), tokenizer]
    peak = int(subprocess.check_output(command, cwd=ROOT, text=True).split()[-1]) * 1024
    assert peak < 150 * 2**20  # the text alone is larger


def test_find_files(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.jsonl", "sub/d.parquet", "sub/e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def names(*patterns):
        return [path.name for path in find_files([str(tmp_path / pattern) for pattern in patterns])]

    assert names(".") == ["a.md", "b.txt", "c.jsonl", "d.parquet"]
    assert names("b.txt", "*.md", "b.txt") == ["b.txt", "a.md"]
    assert names("sub/e.py") == ["e.py"]
    assert names("**/*.py") == ["e.py"]
    for nothing in ("absent.txt", "*.csv"):
        with pytest.raises(UserError, match="no file, folder or match"):
            names(nothing)
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match=r"bare holds no .txt, .md, .jsonl, .parquet file"):
        names("bare")


def test_suffixes_in_any_case_and_how_many_files_are_left_out(tmp_path, capsys):
    for name in ("a.TXT", "b.JSONL", "c.Parquet", "sub/d.json", "sub/e.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in find_files([str(tmp_path)])] == ["a.TXT", "b.JSONL", "c.Parquet"]
    said = capsys.readouterr().out
    assert "3 files are read, and 2 of other kinds than .txt, .md, .jsonl, .parquet are left out" in said
    assert "such as sub/d.json" in said
    (tmp_path / "sub" / "f.md").touch()
    find_files([str(tmp_path / "sub" / "f.md"), str(tmp_path / "a.TXT")])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.txt", "c.jsonl"])
@pytest.mark.parametrize(
    ("compress", "kind"), [(gzip.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "xz")]
)
def test_a_compressed_file_is_called_one(tmp_path, name, compress, kind):
    (tmp_path / name).write_bytes(compress(b"text\n" * 100))
    with pytest.raises(UserError, match=rf"{name} is compressed \({kind}\); unpack it first"):
        find_files([str(tmp_path / name)])


def test_own_validation_files(tmp_path):
    training, validation = (tmp_path / name for name in ("train.txt", "val.txt"))
    training.write_bytes(b"to train on")
    validation.write_bytes(b"to validate")
    for tokenizer, ends in (("byte", [SEPARATOR]), ("char", [])):
        source = TextFiles((training,), val_files=(validation,))
        folder = prepare(source, name=tokenizer, tokenizer=tokenizer, root=tmp_path)
        encode = open_dataset(str(folder)).tokenizer.encode
        assert ids(folder, "train") == encode("to train on") + ends
        assert ids(folder, "val") == encode("to validate") + ends
    several = TextFiles((training, training), val_files=(validation,))
    folder = prepare(several, name="several", tokenizer="char", root=tmp_path)
    assert open_dataset(str(folder)).tokenizer.decode(ids(folder, "train")) == "to train on\n" * 2
    with pytest.raises(UserError, match="different: val_files"):
        prepare(TextFiles((training,)), name="byte", root=tmp_path)


def test_only_files_of_a_folder_count(tmp_path):
    (tmp_path / "dir.md").mkdir()
    for name in ("dir.md/a.txt", "b.txt"):
        (tmp_path / name).touch()
    (tmp_path / "gone.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    assert find_files([str(tmp_path)]) == (tmp_path / "b.txt", tmp_path / "dir.md" / "a.txt")
    for name in ("gone.txt", "pipe.txt"):
        with pytest.raises(UserError, match=f"{name} is neither a file nor a folder"):
            find_files([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("owner", "function", "pattern"),
    [(os, "scandir", "closed"), (os, "scandir", "."), (Path, "exists", "closed/t.txt")],
)
def test_a_folder_that_may_not_be_entered_is_named(tmp_path, monkeypatch, owner, function, pattern):
    (tmp_path / "closed").mkdir()
    (tmp_path / "open.txt").touch()
    original = getattr(owner, function)

    def denied(path):  # as modes do, but for root
        if "closed" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(owner, function, denied)
    with pytest.raises(UserError, match=r"/closed\S* cannot be read: Permission denied"):
        find_files([str(tmp_path / pattern)])

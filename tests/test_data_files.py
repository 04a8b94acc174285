"""Token files of all three layouts: what is read, and what is refused with which words."""

import builtins
import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from base.cli import UserError
from data import check_token_range, open_dataset
from data import dataset as dataset_module
from data import files as files_module
from data.files import Shard, Tokens

UINT16 = np.dtype("<u2")


def contents(tokens: Tokens) -> list[int]:
    return tokens.read(np.array([0]), len(tokens))[0].tolist()


def write_nanogpt(folder: Path, train=(1, 2, 3, 50_000), val=(7, 8)) -> Path:
    folder.mkdir()
    np.array(train, UINT16).tofile(folder / "train.bin")
    np.array(val, UINT16).tofile(folder / "val.bin")
    return folder


def write_llmc(path: Path, tokens, *, magic=20240520, version=1, count=None) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.array(tokens, UINT16).tobytes())


def write_shards(folder: Path) -> Path:
    folder.mkdir()
    write_llmc(folder / "fineweb_train_000002.bin", [40, 50])
    write_llmc(folder / "fineweb_train_000001.bin", [10, 20, 30])
    write_llmc(folder / "fineweb_val_000000.bin", [9, 50_256])
    return folder


def write_prepared(folder: Path, dtype="uint32") -> Path:
    folder.mkdir()
    np.array([1, 70_000, 3], dtype).tofile(folder / "train.bin")
    np.array([4, 5], dtype).tofile(folder / "val.bin")
    meta = {
        "tokenizer": {"name": "cl100k_base"},
        "vocab_size": 100_277,
        "dtype": dtype,
        "train": {"tokens": 3, "max_id": 70_000},
        "val": {"tokens": 2, "max_id": 5},
        "request": {"source": "text"},
    }
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


def test_nanogpt_folder(tmp_path):
    dataset = open_dataset(str(write_nanogpt(tmp_path / "char")))
    assert contents(dataset.train) == [1, 2, 3, 50_000]
    assert contents(dataset.val) == [7, 8]
    assert dataset.vocab_size is None
    with pytest.raises(UserError, match="does not say which tokenizer"):
        _ = dataset.tokenizer


class Payload:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_beside_the_tokens_is_never_loaded(tmp_path):
    folder = write_nanogpt(tmp_path / "char")
    (folder / "meta.pkl").write_bytes(pickle.dumps(Payload(tmp_path / "attacked")))
    dataset = open_dataset(str(folder))
    check_token_range(dataset, 50_001)
    _ = dataset.fingerprint
    assert not (tmp_path / "attacked").exists()


def test_llmc_shards_are_one_sequence_in_the_order_of_their_names(tmp_path):
    dataset = open_dataset(str(write_shards(tmp_path / "fineweb")))
    assert contents(dataset.train) == [10, 20, 30, 40, 50]
    assert contents(dataset.val) == [9, 50_256]
    assert dataset.vocab_size == 50_257
    assert dataset.meta["tokenizer"] == {"name": "gpt2"}


@pytest.mark.parametrize(
    ("train", "val"),
    [
        (["tiny_shakespeare_train.bin"], ["tiny_shakespeare_val.bin"]),
        (["TinyStories_train.bin"], ["TinyStories_val.bin"]),
        (["train_000001.bin", "train_000002.bin"], ["val_000000.bin"]),
        (["edu_fineweb_train_000001.bin", "edu_fineweb_train_000002.bin"], ["edu_fineweb_val_000000.bin"]),
        (["a_val_set_train_1.bin"], ["a_train_set_val_1.bin"]),  # the last word counts, and never both
    ],
)
def test_every_name_that_llmc_gives_a_shard_is_known(tmp_path, train, val):
    for i, name in enumerate(train):
        write_llmc(tmp_path / name, [i, 100 + i])
    write_llmc(tmp_path / val[0], [7, 8])
    write_llmc(tmp_path / "training_values.bin", [9])  # these words are others
    (tmp_path / "corpus_train.txt").touch()
    dataset = open_dataset(str(tmp_path))
    assert contents(dataset.train) == [0, 100, 1, 101][: 2 * len(train)]
    assert contents(dataset.val) == [7, 8]
    assert dataset.vocab_size == 50_257


def test_llmc_tokens_under_nanogpts_names_are_read_without_their_header(tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    write_llmc(folder / "train.bin", [1, 2])
    write_llmc(folder / "val.bin", [3])
    assert contents(open_dataset(str(folder)).train) == [1, 2]


def test_prepared_folder_obeys_the_recorded_dtype(tmp_path):
    write_prepared(tmp_path / "wide")
    dataset = open_dataset("wide", root=tmp_path)
    assert contents(dataset.train) == [1, 70_000, 3]
    assert dataset.vocab_size == 100_277
    assert json.loads(json.dumps(dataset.meta)) == dataset.meta


def damage_cut_half_a_token(folder):
    os.truncate(folder / "train.bin", 11)


def damage_cut_a_token(folder):
    os.truncate(folder / "train.bin", 8)


def damage_remove_val(folder):
    (folder / "val.bin").unlink()


def damage_cut_meta(folder):
    os.truncate(folder / "meta.json", 40)


def damage_dtype(folder):
    text = (folder / "meta.json").read_text(encoding="utf-8").replace("uint32", "float64")
    (folder / "meta.json").write_text(text, encoding="utf-8")


def damage_drop_vocab(folder):
    text = (folder / "meta.json").read_text(encoding="utf-8").replace("vocab_size", "vocab")
    (folder / "meta.json").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut_half_a_token, r"train\.bin is 11 bytes long, no whole number of uint32 tokens"),
        (damage_cut_a_token, r"train\.bin holds 2 tokens, but meta\.json beside it records 3"),
        (damage_remove_val, r"val\.bin cannot be read: No such file"),
        (damage_cut_meta, r"meta\.json is damaged \(the file: Invalid JSON"),
        (damage_dtype, r"meta\.json is damaged \(dtype: Input should be 'uint16' or 'uint32'\)"),
        (damage_drop_vocab, r"meta\.json is damaged \(vocab_size: Field required\)"),
    ],
)
def test_damaged_prepared_folder(tmp_path, damage, message):
    folder = write_prepared(tmp_path / "wide")
    damage(folder)
    with pytest.raises(UserError, match=message):
        open_dataset(str(folder))


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ({"magic": 20240801}, "starts with 20240801, not with 20240520"),
        ({"version": 2}, "header version 2"),
        ({"count": 4}, "should hold 4 tokens by its header, but has room for 3.0"),
        ({"count": 2}, "should hold 2 tokens by its header, but has room for 3.0"),
        ({"count": -1}, "should hold -1 tokens"),
    ],
)
def test_bad_shards(tmp_path, shard, message):
    folder = write_shards(tmp_path / "fineweb")
    write_llmc(folder / "fineweb_train_000002.bin", [1, 2, 3], **shard)
    with pytest.raises(UserError, match=f"fineweb_train_000002.bin.*{message}"):
        open_dataset(str(folder))


def test_shards_that_are_no_shards(tmp_path):
    folder = write_shards(tmp_path / "fineweb")
    (folder / "fineweb_val_000000.bin").write_bytes(b"short")
    with pytest.raises(UserError, match="shorter than the 1,024 bytes of header"):
        open_dataset(str(folder))
    (folder / "fineweb_val_000000.bin").unlink()
    expected = r"holds no val tokens: expected train\.bin and val\.bin, or .* tiny_shakespeare_val\.bin"
    with pytest.raises(UserError, match=expected):
        open_dataset(str(folder))
    write_nanogpt(tmp_path / "char")
    (tmp_path / "char" / "val.bin").rename(folder / "char_val.bin")
    with pytest.raises(UserError, match=r"char_val\.bin is shorter than the 1,024 bytes of header"):
        open_dataset(str(folder))


def test_odd_sized_nanogpt_file(tmp_path):
    folder = write_nanogpt(tmp_path / "char")
    os.truncate(folder / "val.bin", 3)
    with pytest.raises(UserError, match=r"val\.bin is 3 bytes long, no whole number of uint16 tokens"):
        open_dataset(str(folder))


def make_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [make_folder, os.mkfifo])
@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_nanogpt, "train.bin"),
        (write_nanogpt, "val.bin"),
        (write_shards, "fineweb_train_000001.bin"),
        (write_prepared, "val.bin"),
        (write_prepared, "meta.json"),
    ],
)
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, write, name, make):
    folder = write(tmp_path / "d")
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(UserError, match=f"d/{name} is a folder, a pipe or a device; only regular files"):
        open_dataset(str(folder))


def deny(monkeypatch, owner, function: str, path: Path) -> None:
    """`function` fails for `path` as it does where modes forbid it, which they do not forbid root."""
    original = getattr(owner, function)

    def denied(first, *rest, **options):
        if first == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(first, *rest, **options)

    monkeypatch.setattr(owner, function, denied)


@pytest.mark.parametrize(
    ("write", "owner", "function", "closed"),
    [
        (write_nanogpt, builtins, "open", "d/train.bin"),
        (write_shards, builtins, "open", "d/fineweb_val_000000.bin"),
        (write_prepared, builtins, "open", "d/train.bin"),
        (write_prepared, builtins, "open", "d/meta.json"),
        (write_nanogpt, Path, "iterdir", "d"),
        (write_nanogpt, Path, "stat", "d/val.bin"),
        (write_nanogpt, Path, "is_dir", "d"),  # the folder above it is closed
    ],
)
def test_what_may_not_be_read_is_named(tmp_path, monkeypatch, write, owner, function, closed):
    folder = write(tmp_path / "d")
    deny(monkeypatch, owner, function, tmp_path / closed)
    with pytest.raises(UserError, match=f"{closed} cannot be read: Permission denied"):
        open_dataset(str(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a" * 5000, "a cannot be read: File name too long|there is no data set 'a"),
        ("a\0b", r"there is no data set 'a\\x00b'"),
        ("\udcff", r"there is no data set '\\udcff'"),
        ("loop", "loop cannot be read: Too many levels of symbolic links|there is no data set 'loop'"),
    ],
)
def test_names_that_no_folder_can_have(tmp_path, name, message):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=message):
        open_dataset(name, root=tmp_path)


def test_a_missing_data_set_names_the_nearest_and_the_way_to_make_one(tmp_path):
    write_nanogpt(tmp_path / "shakespeare")
    with pytest.raises(UserError) as caught:
        open_dataset("shakespear", root=tmp_path)
    message = str(caught.value)
    assert "did you mean shakespeare?" in message
    assert "python -m data.prepare" in message


def test_short_reads_are_gone_on_with(tmp_path, monkeypatch):
    dataset = open_dataset(str(write_nanogpt(tmp_path / "char", train=range(100))))
    original = os.pread
    # 7 bytes are no whole number of tokens
    monkeypatch.setattr(os, "pread", lambda fd, size, position: original(fd, min(size, 7), position))
    assert contents(dataset.train) == list(range(100))


def test_a_read_error_is_told(tmp_path, monkeypatch):
    dataset = open_dataset(str(write_nanogpt(tmp_path / "char")))

    def broken(fd, size, position):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(UserError, match=r"train\.bin cannot be read: Input/output error"):
        contents(dataset.train)


def test_a_file_that_shrinks_while_in_use_is_told(tmp_path):
    folder = write_nanogpt(tmp_path / "char")
    dataset = open_dataset(str(folder))
    os.truncate(folder / "train.bin", 4)
    with pytest.raises(UserError, match=r"train\.bin has become shorter"):
        contents(dataset.train)


def test_a_shard_that_is_gone_is_told_by_the_read_and_not_by_the_hint_before_it(tmp_path):
    folder = write_shards(tmp_path / "fineweb")
    dataset = open_dataset(str(folder))
    (folder / "fineweb_train_000002.bin").unlink()
    dataset.train.expect(np.array([0, 3]), 2)
    with pytest.raises(UserError, match=r"000002\.bin cannot be read: No such file"):
        contents(dataset.train)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts its open files in /proc")
def test_few_files_are_open_however_many_shards_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "OPEN_FILES", 4)
    shards = []
    for i in range(50):
        np.array([i, i], UINT16).tofile(tmp_path / f"{i}.bin")
        shards.append(Shard(tmp_path / f"{i}.bin", UINT16, 2))
    tokens = Tokens(shards)
    assert contents(tokens) == [i // 2 for i in range(100)]
    # Only these shards count: what else this process has open (earlier tests, Python's own) comes and goes.
    targets = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
    assert len([target for target in targets if Path(target).parent == tmp_path.resolve()]) == 4


def test_token_range_of_foreign_files_is_found_in_every_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_module, "SCAN_TOKENS", 3)
    dataset = open_dataset(str(write_nanogpt(tmp_path / "a", train=[1] * 10 + [65], val=[64])))
    check_token_range(dataset, 66)
    with pytest.raises(UserError, match=r"train\.bin holds token id 65.*ends at 64; .*at least 66"):
        check_token_range(dataset, 65)
    dataset = open_dataset(str(write_nanogpt(tmp_path / "b", train=[1], val=[2, 2, 2, 90])))
    with pytest.raises(UserError, match=r"val\.bin holds token id 90"):
        check_token_range(dataset, 65)


def test_token_range_of_prepared_data_is_known_without_reading(tmp_path, monkeypatch):
    dataset = open_dataset(str(write_prepared(tmp_path / "wide")))
    monkeypatch.setattr(os, "pread", None)
    check_token_range(dataset, 70_001)
    with pytest.raises(UserError, match=r"token id 70,000.*at least 100277"):
        check_token_range(dataset, 50_304)


def test_fingerprint_is_the_tokens_not_the_place(tmp_path):
    first = write_prepared(tmp_path / "first")
    shutil.copytree(first, tmp_path / "elsewhere")
    fingerprint = open_dataset(str(first)).fingerprint
    assert open_dataset(str(tmp_path / "elsewhere")).fingerprint == fingerprint
    changed = {fingerprint}
    for split, ids in (("train", [1, 70_000, 2]), ("val", [4, 4])):
        shutil.copytree(first, tmp_path / split)
        np.array(ids, "uint32").tofile(tmp_path / split / f"{split}.bin")
        changed.add(open_dataset(str(tmp_path / split)).fingerprint)
    shutil.copytree(first, tmp_path / "other_tokenizer")
    meta = (first / "meta.json").read_text(encoding="utf-8").replace("cl100k_base", "o200k_base")
    (tmp_path / "other_tokenizer" / "meta.json").write_text(meta, encoding="utf-8")
    changed.add(open_dataset(str(tmp_path / "other_tokenizer")).fingerprint)
    assert len(changed) == 4

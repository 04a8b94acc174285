"""Where text comes from: records, encodings, and Hugging Face data sets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from base.cli import UserError
from data import sources as sources_module
from data.sources import TextFiles, read_text

ROOT = Path(__file__).parents[1]


def texts(path: Path, column: str | None = None) -> list[str]:
    """The documents of one file."""
    documents, document = [], ""
    for piece in TextFiles((path,), column).pieces():
        document += piece.text
        if piece.last:
            documents.append(document)
            document = ""
    assert document == ""
    return documents


def test_text_is_read_as_utf8_whatever_the_platform_prefers(tmp_path):
    (tmp_path / "t.txt").write_bytes("naïve 🙂\r\n".encode())
    script = "import sys; from data.sources import *; print(ascii(''.join(read_text(Path(sys.argv[1])))))"
    out = subprocess.check_output(
        [sys.executable, "-c", script, str(tmp_path / "t.txt")],
        cwd=ROOT,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        text=True,
    )
    assert out.strip() == ascii("naïve 🙂\r\n")


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("text", ["", "\ufeff", "first\ufeffsecond"])
def test_a_byte_order_mark_is_left_out_at_the_start_of_a_file_alone(tmp_path, monkeypatch, block, text):
    monkeypatch.setattr(sources_module, "READ_BYTES", block)
    (tmp_path / "t.txt").write_text("\ufeff" + text, encoding="utf-8")
    assert "".join(read_text(tmp_path / "t.txt")) == text


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("raw", "offset"),
    [(b"abc\xff", 3), ("é".encode() * 5 + b"\xc3(", 10), ("🙂".encode() + b"\xf0\x9f\x99", 4), (b"\x80", 0)],
)
def test_bytes_that_are_not_utf8_are_named_by_file_and_offset(tmp_path, monkeypatch, block, raw, offset):
    monkeypatch.setattr(sources_module, "READ_BYTES", block)
    (tmp_path / "bad.txt").write_bytes(raw)
    with pytest.raises(UserError, match=rf"bad\.txt is not UTF-8 text: see byte {offset};"):
        list(read_text(tmp_path / "bad.txt"))


@pytest.mark.parametrize("name", ["a.json", "b.csv", "c.txt", "noname"])
def test_a_column_of_a_plain_file_is_a_mistake(tmp_path, name):
    with pytest.raises(
        UserError, match=rf"{name} is read as plain text, which has no column 'body'; --column is for"
    ):
        TextFiles((tmp_path / "rows.jsonl", tmp_path / name), "body")


@pytest.mark.parametrize("name", ["t.jsonl", "t.JSONL"])
def test_jsonl(tmp_path, name):
    lines = ['{"text": "one\\n", "id": 1}', "", '{"text": null}', '{"text": "\\ud83d alone, \\ud83d\\ude42"}']
    (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    assert texts(tmp_path / name) == ["one\n", "? alone, 🙂"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "line 2: not JSON in UTF-8"),
        (b'{"text": "\xff"}', "line 2: not JSON in UTF-8"),
        (b'["text"]', "line 2: expected an object with a column 'text'"),
        (
            b'{"texts": "", "id": 1}',
            r"line 2 has no column 'text' \(did you mean texts\?\).*one of: texts, id",
        ),
        (b"[" * 100_000, "line 2: the JSON is nested too deeply to be read"),
        (b'{"text": 5}', "line 2: column 'text' holds int, not text"),
    ],
)
def test_bad_jsonl(tmp_path, line, message):
    (tmp_path / "t.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(UserError, match=message):
        texts(tmp_path / "t.jsonl")


def write_parquet(path: Path, **columns) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_parquet(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", body=["one", None, "three", "é" * 1000], id=[1, 2, 3, 4])
    assert texts(path, "body") == ["one", "three", "é" * 1000]
    with pytest.raises(
        UserError, match=r"t\.parquet has no column 'text'; pass --column with one of: body, id"
    ):
        texts(path)
    with pytest.raises(UserError, match="column 'id' holds int, not text"):
        texts(path, "id")
    os.truncate(path, 20)
    with pytest.raises(UserError, match=r"t\.parquet is no readable Parquet file"):
        texts(path)


def test_parquet_text_that_is_not_utf8(tmp_path):
    raw = pyarrow.array([b"caf\xe9"]).buffers()
    path = write_parquet(tmp_path / "t.parquet", text=pyarrow.StringArray.from_buffers(1, raw[1], raw[2]))
    with pytest.raises(UserError, match=r"t\.parquet, column 'text': not all of its text is UTF-8"):
        texts(path)


def test_local_text_imports_neither_datasets_nor_pyarrow(tmp_path, monkeypatch):
    for name in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    (tmp_path / "t.txt").write_text("plain", encoding="utf-8")
    (tmp_path / "t.jsonl").write_text('{"text": "record"}', encoding="utf-8")
    assert texts(tmp_path / "t.txt") + texts(tmp_path / "t.jsonl") == ["plain", "record"]


HF = """
import json, os, sys
from base.cli import UserError
from data.sources import HuggingFace
for arguments in json.loads(sys.argv[1]):
    try:
        print(json.dumps([piece.text for piece in HuggingFace(**arguments).pieces()]))
    except UserError as error:
        print(error)
sys.stdout.flush()
os._exit(0)  # as data.prepare does after streaming
"""


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    """What `HuggingFace(**arguments)` yields or raises, for a list of arguments.

    In a process of its own, as `datasets` settles its caches when it is imported, and with an empty home.
    """

    def pieces(*arguments: dict) -> list[str]:
        home = tmp_path_factory.mktemp("home")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_", "HUGGING"))}
        env |= {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", HF, json.dumps(arguments)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert list(home.iterdir()) == []  # nothing is written outside the project
        return done.stdout.splitlines()

    return pieces


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory) -> Path:
    """A local folder in the hub's format: Parquet shards in data/, two splits, a card."""
    folder = tmp_path_factory.mktemp("hub") / "corpus"
    for shard in range(2):
        rows = [f"document {shard} {i} " + "é " * i for i in range(50)]
        write_parquet(folder / f"data/train-0000{shard}-of-00002.parquet", text=rows, id=list(range(50)))
    write_parquet(folder / "data/test-00000-of-00001.parquet", text=["held out"] * 3, id=[1, 2, 3])
    (folder / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    return folder


def test_hugging_face_folder_in_the_hubs_format(hugging_face, hub_folder):
    train, test = hugging_face({"path": str(hub_folder)}, {"path": str(hub_folder), "split": "test"})
    assert json.loads(train) == [f"document {s} {i} " + "é " * i for s in range(2) for i in range(50)]
    assert json.loads(test) == ["held out"] * 3


def test_hugging_face_mistakes(hugging_face, hub_folder, tmp_path):
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_text("print('this ran')", encoding="utf-8")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "train.parquet").write_bytes(b"no table" * 100)
    mistakes = {
        "has no column 'txt' (did you mean text?); pass --column with one of: text, id": {"column": "txt"},
        "column 'id' holds int, not text": {"column": "id"},
        "cannot be read: Bad split: dev. Available splits: ['train', 'test']": {"split": "dev"},
        "cannot be read: BuilderConfig 'large' not found. Available: ['default']": {"config": "large"},
        "it is a script, which datasets no longer runs": {"path": str(tmp_path / "scripted")},
        "cannot be read: Parquet magic bytes": {"path": str(tmp_path / "damaged")},
        "(a folder must exist; a hub id takes the network)": {"path": str(tmp_path / "absent")},
    }
    said = hugging_face(*({"path": str(hub_folder)} | mistake for mistake in mistakes.values()))
    assert len(said) == len(mistakes)
    for message, line in zip(mistakes, said, strict=True):
        assert message in line
    assert "this ran" not in said

"""python -m data.prepare as a user meets it: results, help, one sentence and exit code 2 for a mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from base.cli import UserError
from data import open_dataset
from data.prepare import main

ROOT = Path(__file__).parents[1]
# no cache and a proxy that refuses: without network, on any machine
OFFLINE = {"TIKTOKEN_CACHE_DIR": "", "HTTPS_PROXY": "http://127.0.0.1:9", "COLUMNS": "200"}


def run_prepare(*arguments: str, shell: str = '"$@"', **env: str) -> subprocess.CompletedProcess:
    """data.prepare with these arguments, as the command `"$@"` of a line of shell."""
    command = ["bash", "-c", shell, "bash", sys.executable, "-m", "data.prepare", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | OFFLINE | env, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "good.txt").write_text("good text\n" * 100, encoding="utf-8")
    (folder / "empty.txt").write_text("", encoding="utf-8")
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "rows.jsonl").write_text('{"body": "text"}\n', encoding="utf-8")
    (folder / "deep.jsonl").write_text("[" * 100_000, encoding="utf-8")
    os.mkfifo(folder / "pipe.txt")
    return folder


def test_two_runs(tmp_path, corpus):
    command = ["text", "--name", "d", "--files", str(corpus / "good.txt"), "--tokenizer", "char"]
    first = run_prepare(*command, "--data-dir", str(tmp_path / "data"))
    assert (first.returncode, first.stderr) == (0, "")
    assert "900 tokens to train on, 100 for validation, vocabulary of 8 (char)" in first.stdout
    assert len(open_dataset("d", root=tmp_path / "data").train) == 900
    second = run_prepare(*command, "--data-dir", str(tmp_path / "data"))
    assert (second.returncode, second.stderr) == (0, "")
    assert "nothing to do" in second.stdout


def test_hugging_face_stops_at_max_tokens(tmp_path):
    (tmp_path / "corpus").mkdir()
    rows = pyarrow.table({"text": ["nine char"] * 500})  # with their separators 10 tokens each
    parquet.write_table(rows, tmp_path / "corpus" / "train.parquet")
    where = f"--path={tmp_path / 'corpus'}", f"--data-dir={tmp_path / 'data'}"
    done = run_prepare("hf", "--name", "d", *where, "--max-tokens", "1234", "--val-tokens", "20")
    assert (done.returncode, done.stderr) == (0, "")
    dataset = open_dataset("d", root=tmp_path / "data")
    assert (len(dataset.train), len(dataset.val)) == (1214, 20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("text --name d --files FOLDER/absent.txt", "no file, folder or match for"),
        ("text --name d --files FOLDER/empty.txt", "no text to speak of"),
        ("text --name d --files FOLDER/latin.txt", "latin.txt is not UTF-8 text: see byte 3"),
        ("text --name d --files FOLDER/rows.jsonl", "no column 'text'; pass --column with one of: body"),
        ("text --name d --files FOLDER/good.txt --tokenizer gpt-2", "did you mean gpt2?"),
        ("text --name d --files FOLDER/good.txt --tokenizer cl100k_base", "use the byte tokenizer"),
        ("text --name a/b --files FOLDER/good.txt", "'a/b' cannot name a data set"),
        ("text --name d --files FOLDER/good.txt --val-fraction 1", "--val-fraction is 1; it must be below 1"),
        ("text --name d --files FOLDER/good.txt --workers -1", "--workers is -1; it must be at least 0"),
        ("text --name d --files FOLDER/deep.jsonl", "deep.jsonl, line 1: the JSON is nested too deeply"),
        ("text --name d --files FOLDER/pipe.txt", "pipe.txt is neither a file nor a folder"),
        (f"text --name d --files {'a' * 5000}", "a" * 5000),
        (
            "text --name d --files FOLDER/good.txt --column text",
            "good.txt is read as plain text, which has no column",
        ),
        ("text --name d --files FOLDER/good.txt --val-files FOLDER/good.txt", "name the same files"),
        ("text --name d --files FOLDER/good.txt --val-files FOLDER/none", "no file, folder or match for"),
        (
            "text --name d --files FOLDER/good.txt --tokenizer none.json",
            "none.json cannot be read: No such file",
        ),
        ("hf --name d --path FOLDER --max-tokens 0", "--max-tokens is 0; it must be at least 2"),
        ("stdlb", "there is no command stdlb (did you mean stdlib?); the commands are stdlib, text, hf"),
        ("text", "--name and --files must be given"),
        ("text --name d --files FOLDER/good.txt --tokeniser byte", "did you mean --tokenizer?"),
        (
            "text --name d --files FOLDER/good.txt --val-fraction much",
            "--val-fraction is much; it must be a number",
        ),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, corpus, monkeypatch, arguments, message):
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    arguments = arguments.replace("FOLDER", str(corpus)).split()
    with pytest.raises(UserError) as refused:
        main([*arguments, "--data-dir", str(tmp_path / "data")])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "data").glob("*"))


def test_a_mistake_is_told_and_ends_with_2():
    done = run_prepare()
    assert done.returncode == 2
    assert done.stderr == "error: a command must be named; the commands are stdlib, text, hf\n"


def test_a_place_that_cannot_be_written_to(tmp_path, corpus):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"{tmp_path}/file/d cannot be written: Not a directory|File exists"):
        main(["text", "--name=d", f"--files={corpus / 'good.txt'}", f"--data-dir={tmp_path / 'file'}"])


@pytest.mark.parametrize(
    "shell", ['"$@" >&-', '"$@" | true; exit ${PIPESTATUS[0]}', '"$@" >/dev/full', '"$@" >&- 2>&-']
)
def test_that_nobody_listens_is_no_failure(tmp_path, corpus, shell):
    if "/dev/full" in shell and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    command = ["text", "--name=d", f"--files={corpus / 'good.txt'}", f"--data-dir={tmp_path / 'data'}"]
    done = run_prepare(*command, shell=shell)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["d"]
    assert len(open_dataset("d", root=tmp_path / "data").train) == 900


def test_a_mistake_has_its_exit_code_whoever_listens():
    assert run_prepare("text", shell='"$@" 2>&-').returncode == 2


def test_help_says_what_a_newcomer_asks(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["text", "--help"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "--files",
        "byte (no download)",
        "(default: 0.1)",
        "Local .txt, .md, .jsonl and .parquet files",
        "or the path of a Hugging Face tokenizer.json. (default: byte)",
        "0: one per CPU. (default: 0)",
    ):
        assert words in shown

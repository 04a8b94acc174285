"""Flags from dataclasses, the sentence that a mistake gets, and how a command ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from base.cli import STRICT, OneOf, UserError, require
from base.flags import Positional, Short, options

NORMS = {"layernorm": 1, "rmsnorm": 2}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Run:
    run: Positional[str]
    """A run's folder."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ToHf(Run):
    """Write a model."""

    out: Annotated[str, Short("-o")]
    """The folder to make."""
    n_layer: int = 12
    """How many."""
    head_dim: int | None = None
    """How wide."""
    lr: float = 1e-3
    """How fast."""
    scale: float | Literal["depth"] | Annotated[str, AfterValidator(OneOf(NORMS))] = 1.0
    """How much."""
    norm: Annotated[str, AfterValidator(OneOf(NORMS))] = "layernorm"
    """Which norm."""
    qk_norm: Literal["off", "head"] = "off"
    """Which of query and key."""
    bias: bool = True
    """Whether there is one."""
    files: tuple[str, ...] = ()
    """Some files."""

    def __post_init__(self):
        require(self.n_layer > 0, f"n_layer is {self.n_layer}; it must be at least 1")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Report:
    """Draw runs."""

    runs: Positional[tuple[str, ...]]
    """Folders."""
    open: bool = False
    """Show them."""


COMMAND = ToHf | Report


def given(words: str):
    return options(COMMAND, words.split(), "prog", "What it does.")


def test_words_become_the_types_of_the_fields():
    assert given("to-hf a -o b") == ToHf(run="a", out="b")
    words = "--out=b --n_layer 3 --head-dim 8 a --lr 1e-4 --norm rmsnorm --no-bias --files x y --qk-norm=head"
    numbers, names = {"n_layer": 3, "head_dim": 8, "lr": 1e-4}, {"norm": "rmsnorm", "qk_norm": "head"}
    expected = ToHf(run="a", out="b", bias=False, files=("x", "y"), **numbers, **names)
    assert given(f"to-hf {words}") == expected
    assert given("report a b --open c") == Report(runs=("a", "b", "c"), open=True)


def test_the_last_of_a_repeated_flag_wins_and_numbers_may_be_negative_and_none_is_none():
    assert given("to-hf a -o b --lr 1 --lr -.5 --head-dim 4 --head-dim None --no-bias --bias") == ToHf(
        run="a", out="b", lr=-0.5
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "a command must be named; the commands are to-hf, report"),
        ("reprot", "there is no command reprot (did you mean report?); the commands are to-hf, report"),
        ("to-hf", "run and --out must be given"),
        ("report", "runs must be given"),
        ("to-hf a b -o c", "run is given twice, a and b; one is allowed"),
        ("to-hf a -o b --nrom x", "unknown flag --nrom (did you mean --norm?)"),
        ("to-hf a -o b --nobias", "unknown flag --nobias (did you mean --no-bias?)"),
        ("to-hf a -o b --bias true", "--bias takes no value, such as true: write --bias or --no-bias"),
        ("to-hf a -o b --no-bias=0", "--no-bias takes no value, such as 0: write --bias or --no-bias"),
        ("to-hf a -o b --n-layer", "--n-layer is given without a value: write --n-layer INT"),
        ("to-hf a -o --n-layer 3", "--out is given without a value: write --out OUT"),
        ("to-hf a -o b --files", "--files is given without a value"),
        ("to-hf a -o b --n-layer 1E3", "--n-layer is 1E3; it must be a whole number, such as 1000"),
        ("to-hf a -o b --n-layer 2.5", "--n-layer is 2.5; it must be a whole number, such as 1000"),
        ("to-hf a -o b --head-dim x", "--head-dim is x; it must be a whole number, such as 1000"),
        ("to-hf a -o b --lr fast", "--lr is fast; it must be a number, such as 0.001"),
        ("to-hf a -o b --lr 1e-400", "--lr is 1e-400, which is too small for a number"),
        (
            "to-hf a -o b --norm rmsnrm",
            "--norm is rmsnrm; it must be 'layernorm' or 'rmsnorm' (did you mean rmsnorm?)",
        ),
        ("to-hf a -o b --scale 1e-999", "--scale is 1e-999, which is too small for a number"),
        (
            "to-hf a -o b --scale dpeth",
            "--scale is dpeth; it must be a number, such as 0.001 or 'depth' (did you mean depth?) or 'layernorm'",
        ),
        ("to-hf a -o b --qk-norm haed", "--qk-norm is haed; it must be 'off' or 'head'"),
        ("to-hf a -o b --n-layer 0", "n_layer is 0; it must be at least 1"),
    ],
)
def test_a_mistake_is_one_sentence(words, says):
    with pytest.raises(UserError) as caught:
        given(words)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_registry_is_read_when_it_is_asked(monkeypatch):
    monkeypatch.setitem(NORMS, "mine", 3)
    assert given("to-hf a -o b --norm mine").norm == "mine"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            "--help",
            "usage: prog COMMAND [flags] What it does. commands: to-hf Write a model. report Draw runs.",
        ),
        (
            "to-hf -h",
            "usage: prog to-hf RUN [flags] Write a model. flags: RUN A run's folder. --out, -o OUT The",
        ),
        ("to-hf --help", "--norm {layernorm,rmsnorm} Which norm. (default: layernorm)"),
        (
            "to-hf --help",
            "--bias, --no-bias Whether there is one. (default: --bias) --files FILES [FILES ...]",
        ),
        ("to-hf --nonsense --help", "How wide. --lr FLOAT How fast. (default: 0.001)"),
        ("to-hf --help", "--scale FLOAT|{depth}|{layernorm,rmsnorm} How much. (default: 1.0)"),
        ("report --help", "RUNS [RUNS ...] Folders."),
    ],
)
def test_help(words, shown, capsys):
    with pytest.raises(SystemExit) as stopped:
        given(words)
    assert stopped.value.code == 0
    assert shown in " ".join(capsys.readouterr().out.split())


def command(body: str, shell: str = '"$@"', **how) -> subprocess.CompletedProcess:
    """A process that runs `main`, whose body this is, through `base.cli.run`."""
    source = f"import os, signal, sys\nfrom base.cli import UserError, run\ndef main(argv): {body}\nrun(main)"
    words = ["bash", "-c", shell, "bash", sys.executable, "-c", source]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, **how)


@pytest.mark.parametrize(
    ("body", "code", "out", "err"),
    [
        ("print('é\\ud800')", 0, "\\xe9\\ud800\n", ""),
        ("raise UserError('this is wrong')", 2, "", "error: this is wrong\n"),
        ("print('a'); os.kill(os.getpid(), signal.SIGINT)", 130, "a\n", "interrupted\n"),
        ("sys.exit(75)", 75, "", ""),
        ("sys.exit()", 0, "", ""),
    ],
)
def test_how_a_command_ends(body, code, out, err):
    done = command(body, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


@pytest.mark.parametrize(
    ("shell", "code"),
    [
        ('"$@" | true; exit ${PIPESTATUS[0]}', 0),
        ('"$@" >&-', 0),
        ('"$@" >&- 2>&-', 0),
        ('"$@" >/dev/full', 2),
    ],
)
def test_a_reader_that_has_left_is_no_failure_and_a_full_disk_is_one(shell, code):
    if "/dev/full" in shell and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    done = command("print('x' * 10**6)", shell)
    assert done.returncode == code
    assert ("cannot be written" in done.stderr) == bool(code)


def test_a_pipe_that_does_not_wait_and_is_full_costs_nothing():
    source = "from base.cli import run; run(lambda argv: print('x' * 10**6, flush=True))"
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    done = subprocess.run([sys.executable, "-c", source], stdout=theirs, stderr=subprocess.PIPE)
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_interrupt_before_a_command_runs_is_no_traceback():
    source = "import os, signal, tools; os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "interrupted\n")


def test_the_ground_floor_imports_nothing_heavy():
    source = "import sys, base.cli, base.files; print(sorted({'torch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", source], text=True) == "[]\n"

"""The command around the measurements: its flags, its columns and its file."""

import json

import pytest

from kernels import aot, bench

ROWS = [
    {
        **{"function": "add_norm_no_sum", "kind": "layernorm", "stream": "bfloat16", "D": 65536, "rows": 4},
        **{"direction": "backward", "contender": name, "seconds": seconds, "bytes_per_second": 2.5e11},
        "error": 3e-3,
    }
    for name, seconds in (("ours", 2e-4), ("compiled", 3e-4))
]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--dim", "-5"), "argument --dim: -5 is not from 1 to 65536"),
        (("--dim", "100000000000"), "argument --dim: 100000000000 is not from 1 to 65536"),
        (("--rounds", "0"), "argument --rounds: 0 is not from 1 to 1000000"),
        (("--rounds", "-9"), "argument --rounds: -9 is not from 1 to 1000000"),
        (
            ("--json", "/nonexistent/x"),
            "--json /nonexistent/x cannot be written: there is no folder /nonexistent",
        ),
        (("--json", "tests"), "--json tests is a folder; name a file"),
        (("--function", "add_norm, no sum"), "argument --function: invalid choice: 'add_norm, no sum'"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(flags, says, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(SystemExit) as stopped:
        bench.main(flags)
    assert stopped.value.code == 2
    assert f"python -m kernels.bench: error: {says}" in capsys.readouterr().err


def test_a_header_stands_over_the_columns(tmp_path, capsys, monkeypatch):
    """With names that need no quotes on a command line, and a share of the bandwidth where it is known."""
    assert all(name.isidentifier() for name in aot.FUNCTIONS)
    monkeypatch.setattr(bench, "measure", lambda *_: ROWS)
    monkeypatch.setattr(bench, "STREAMS", bench.STREAMS[:1])
    flags = ["--function", "add_norm_no_sum", "--kind", "layernorm", "--dim", "65536"]
    bench.main([*flags, "--json", str(tmp_path / "b.json")])
    _, header, ours, compiled = capsys.readouterr().out.splitlines()
    assert header == bench.HEADER
    assert [line.split() for line in (ours, compiled)] == [
        ["add_norm_no_sum", "layernorm", "bfloat16", "65536", "backward", *rest]
        for rest in (
            ["ours", "200.0", "250.0", "-", "1.00", "3.0e-03"],
            ["compiled", "300.0", "250.0", "-", "1.50", "3.0e-03"],
        )
    ]
    *_, line = bench.table_rows(ROWS, 1e12)
    for name, text in (("direction", "backward"), ("contender", "compiled")):
        assert header.index(name) == line.index(text), "left-aligned"
    texts = {"time, us": "300.0", "GB/s": "250.0", "of copy": "25%", "x ours": "1.50", "error": "3.0e-03"}
    for name, text in texts.items():
        assert header.index(name) + len(name) == line.index(text) + len(text), "right-aligned"
    assert json.loads((tmp_path / "b.json").read_text())["results"] == ROWS
    assert [file.name for file in tmp_path.iterdir()] == ["b.json"]

"""The command around the measurements: its flags, its columns and its file."""

import json
import math
import time

import pytest
import torch

from base.cli import UserError
from kernels import bench

ROWS = [
    {
        **{"call": "post", "kind": "layernorm", "stream": "bfloat16", "D": 65536, "rows": 4},
        **{"direction": "backward", "contender": name, "seconds": seconds, "bytes_per_second": 2.5e11},
        "error": 3e-3,
    }
    for name, seconds in (("ours", 2e-4), ("compiled", 3e-4))
]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--dim", "-5"), "--dim is -5; it must be at least 1"),
        (("--dim", "100000000000"), "--dim is 100000000000; it must be at most 65536"),
        (("--rounds", "0"), "--rounds is 0; it must be at least 1"),
        (("--json", "/nonexistent/x"), "--json /nonexistent/x cannot be written: there is no folder"),
        (("--json", "tests"), "--json tests is a folder; name a file"),
        (("--call", "posst"), "(did you mean post?)"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(flags, says, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda **_: pytest.fail("it has begun"))
    with pytest.raises(UserError) as error:
        bench.main(flags)
    assert says in str(error.value)


def test_a_header_stands_over_the_columns(tmp_path, capsys, monkeypatch):
    """With a share of the bandwidth where it is known."""
    monkeypatch.setattr(bench, "measure", lambda **_: ROWS)
    monkeypatch.setattr(bench, "STREAMS", bench.STREAMS[:1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = ["--call", "post", "--kind", "layernorm", "--dim", "65536"]
    bench.main([*flags, "--json", str(tmp_path / "b.json")])
    _, header, ours, compiled = capsys.readouterr().out.splitlines()
    assert header == bench.HEADER
    assert [line.split() for line in (ours, compiled)] == [
        ["post", "layernorm", "bfloat16", "65536", "4", "backward", *rest]
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
    bench.main([*flags, "--json", str(tmp_path / "b.json")])  # again
    (tmp_path / "b.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="exists and was not written by this command"):
        bench.main([*flags, "--json", str(tmp_path / "b.json")])


def test_a_gpu_is_busy_before_the_first_event(monkeypatch):
    """Else the host's way to the first kernel would count as its time."""
    seen = []

    class Event:
        def __init__(self, enable_timing):
            self.record = lambda: seen.append("event")
            self.synchronize = lambda: None

        def elapsed_time(self, end):
            return 5.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append(cycles))
    monkeypatch.setattr(bench, "cache_filler", lambda device: torch.ones(1))
    assert bench.seconds(lambda: seen.append("work"), "cuda") == 5e-3
    assert seen == [bench.HEAD_START, "event", "work", "event"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_hosts_time_is_not_the_kernels():
    bench.seconds(lambda: None, "cuda")
    assert bench.seconds(lambda: time.sleep(3e-4), "cuda") < 5e-5


def test_the_timed_shape_comes_first(monkeypatch):
    """What compiles for several shapes makes a kernel for any; the check has few rows."""
    lengths = []

    def ours(x, s, *gains):
        lengths.append(len(x))
        return [x + s]

    monkeypatch.setattr(bench, "contenders", lambda *_: {"ours": ours})
    rows = list(bench.measure("none", "rmsnorm", torch.float32, 5, 3, "cpu", rounds=1))
    assert lengths.index(64) == lengths.count(5)
    assert [row["direction"] for row in rows] == ["forward"]
    assert rows[0]["bytes_per_second"] == pytest.approx(10 * 15 / rows[0]["seconds"])


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_that_is_no_number_is_shown(place):
    """max() drops a NaN that does not come first."""

    def broken(x, s, *gains):
        results = list(bench.contender(bench.PYTORCH, "sandwich", "rmsnorm")(x, s, *gains))
        results[place] = results[place] * torch.nan
        return results

    error = bench.error_of(broken, "sandwich", "rmsnorm", torch.float32, 8, "cpu")
    assert math.isnan(error)


def test_quick_is_few_calls_and_one_of_them_compiled():
    parts = list(bench.parts(bench.Options(quick=True), "cuda"))
    assert {part["rows"] for part in parts if part["D"] == 768} == {16384, 2**27 // 768}
    assert {(part["call"], part["kind"]) for part in parts if part["compiled"]} == {("pre", "rmsnorm")}
    everything = list(bench.parts(bench.Options(), "cuda"))
    assert len(parts) < len(everything) / 5
    assert {part["call"] for part in bench.parts(bench.Options(quick=True, call=("norm",)), "cpu")} == {
        "norm"
    }

"""Threads sleep while they wait where other programs are busy, and a run says where it would be faster so."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from base import threads
from training.clock import Clock

QUIET = "cpu  0 0 0 0\ncpu0 10 0 10 {idle0} 0 0 0 0 0 0\ncpu1 10 0 {busy1} {idle1} 0 0 0 0 0 0\nintr 5\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two processors at a time that passes by `machine.sleep(seconds)`, as `machine.then` says."""

    def write(idle0, busy1, idle1, own=0.0):
        threads.STAT.write_text(QUIET.format(idle0=idle0, busy1=busy1, idle1=idle1), encoding="utf-8")
        found.own = own

    def sleep(seconds):
        found.time += seconds
        write(*found.then)

    monkeypatch.setattr(threads, "STAT", tmp_path / "stat")
    found = SimpleNamespace(time=0.0, sleep=sleep, then=(100, 10, 100))
    write(*found.then)
    found.monotonic, found.process_time = lambda: found.time, lambda: found.own
    monkeypatch.setattr(threads, "time", found)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    return found


@pytest.mark.parametrize(
    ("then", "chosen"),
    [
        ((105, 10, 105), None),
        ((105, 12, 103), None),
        ((105, 15, 100), "PASSIVE"),
        ((105, 15, 100, threads.LOOK_SECONDS), None),
        ((100, 10, 100), None),
    ],
    ids=["quiet", "nearly quiet", "one busy", "this process busy", "no time passed"],
)
def test_the_wait_is_passive_where_half_a_processor_is_in_use(machine, then, chosen):
    machine.then, environment = then, {}
    threads.share_processors(environment)
    assert environment.get("OMP_WAIT_POLICY") == chosen


def test_processors_that_this_process_may_not_use_do_not_count(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert threads.processor_times(QUIET.format(idle0=7, busy1=10, idle1=100)) == {0: (7, 27)}


@pytest.mark.parametrize("name", threads.CHOICES)
def test_what_the_user_has_chosen_stays(machine, name):
    machine.then, environment = (105, 15, 100), {name: "1"}
    threads.share_processors(environment)
    assert environment == {name: "1"}
    assert threads.Neighbours(environment).last is None


def test_a_run_says_once_that_another_program_has_begun(machine):
    clock, told = Clock(1, 0, 10, neighbours=threads.Neighbours({})), []
    for seconds, then in (
        (9, (200, 110, 100)),
        (2, (200, 110, 100)),
        (10, (300, 210, 100)),
        (10, (400, 310, 100)),
    ):
        machine.then = then
        machine.sleep(seconds)
        clock.shown = 0.0
        clock.show(1, {}, told.append)
    assert [line for line in told if "step" not in line] == [told[2]]
    assert told[2].startswith("other programs use 1.0 of the 2 processors")
    assert "OMP_WAIT_POLICY=PASSIVE" in told[2]


def test_a_run_says_nothing_of_its_own_threads(machine):
    neighbours = threads.Neighbours({})
    machine.then = (100, 110, 100, 10.0)
    machine.sleep(10)
    assert neighbours.advice() == ""


def test_a_program_that_starts_at_the_same_moment_is_seen_at_its_imports():
    source = """
import sys
import base.threads
real = base.threads.Look.now
base.threads.Look.now = lambda: print("pydantic.dataclasses" in sys.modules) or real()
base.threads.share_processors({})
"""
    assert subprocess.check_output([sys.executable, "-c", source], text=True) == "False\nTrue\n"


@pytest.mark.parametrize("module", ["train", "tools.sample"])
def test_the_choice_comes_before_torch_is_imported(module):
    source = f"""
import sys
import base.threads
base.threads.share_processors = lambda: print("torch" in sys.modules)
import {module}
"""
    assert subprocess.check_output([sys.executable, "-c", source], text=True) == "False\n"

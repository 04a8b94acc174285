"""Threads sleep while they wait where other programs are busy, and only there."""

import os
import subprocess
import sys

import pytest

from base import threads

QUIET = "cpu  0 0 0 0\ncpu0 10 0 10 {idle0} 0 0 0 0 0 0\ncpu1 10 0 {busy1} {idle1} 0 0 0 0 0 0\nintr 5\n"


@pytest.mark.parametrize(
    ("idle0", "busy1", "idle1", "chosen"),
    [(105, 10, 105, None), (105, 12, 103, None), (105, 15, 100, "PASSIVE"), (100, 10, 100, None)],
    ids=["quiet", "nearly quiet", "one busy", "no time passed"],
)
def test_the_wait_is_passive_where_half_a_processor_is_in_use(
    tmp_path, monkeypatch, idle0, busy1, idle1, chosen
):
    stat = tmp_path / "stat"
    stat.write_text(QUIET.format(idle0=100, busy1=10, idle1=100), encoding="utf-8")
    after = QUIET.format(idle0=idle0, busy1=busy1, idle1=idle1)
    monkeypatch.setattr(threads, "STAT", stat)
    monkeypatch.setattr(threads.time, "sleep", lambda _: stat.write_text(after, encoding="utf-8"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    environment = {}
    threads.share_processors(environment)
    assert environment.get("OMP_WAIT_POLICY") == chosen


def test_processors_that_this_process_may_not_use_do_not_count(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert threads.processor_times(QUIET.format(idle0=7, busy1=10, idle1=100)) == {0: (7, 27)}


@pytest.mark.parametrize("name", threads.CHOICES)
def test_what_the_user_has_chosen_stays(monkeypatch, name):
    monkeypatch.setattr(threads, "busy_processors", lambda before, after: 9.0)
    environment = {name: "1"}
    threads.share_processors(environment)
    assert environment == {name: "1"}


def test_training_chooses_before_torch_is_imported():
    source = """
import sys
import base.threads
base.threads.share_processors = lambda: print("torch" in sys.modules)
import train
"""
    assert subprocess.check_output([sys.executable, "-c", source], text=True) == "False\n"

"""The arithmetic of the cost of logging, and that both kinds of logging are really in it."""

import time

import pytest
from dynamics_cases import FLAGS, tiny_data

from configs import load_config
from tools.logging_cost import LoggingCost, measure
from training.probe import Probe
from training.tracker import Tracker
from training.trainer import Trainer


def test_share_of_the_throughput():
    cost = LoggingCost(step_ms=10.0, logged_ms=2.0, look_ms=25.0, log_interval=10, probe_interval=250)
    assert cost.share == pytest.approx(0.3 / 10.3)
    assert LoggingCost(10.0, 2.0, 25.0, 10, 0).share == pytest.approx(0.2 / 10.2)


def test_every_kind_of_work_is_counted_where_it_belongs(tmp_path, monkeypatch):
    """On a clock that only these functions move."""
    now = 0.0

    def takes(owner, name, seconds):
        real = getattr(owner, name)

        def slow(*args):
            nonlocal now
            now += seconds
            return real(*args)

        monkeypatch.setattr(owner, name, slow)

    takes(Trainer, "step", 0.010)
    takes(Trainer, "row", 0.001)
    takes(Tracker, "log", 0.003)
    takes(Probe, "remember", 0.050)
    takes(Probe, "measure", 0.200)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    tiny_data(tmp_path / "data")
    cost = measure(load_config([*FLAGS, "--dataset", str(tmp_path / "data")]), rounds=3)
    assert (cost.step_ms, cost.logged_ms, cost.look_ms) == pytest.approx((10, 4, 253))
    assert (cost.log_interval, cost.probe_interval) == (2, 4)

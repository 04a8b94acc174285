"""The arithmetic of the cost of logging, and that both kinds of logging are really in it."""

import time

import pytest
from dynamics_cases import FLAGS, tiny_data

from configs import load_config
from tools import logging_cost
from tools.logging_cost import LoggingCost
from training.probe import Probe
from training.tracker import Tracker
from training.trainer import Trainer


def test_share_of_the_throughput():
    cost = LoggingCost(step_ms=10.0, logged_ms=2.0, look_ms=25.0, log_interval=10, probe_interval=250)
    assert cost.share == pytest.approx(0.3 / 10.3)
    assert LoggingCost(10.0, 2.0, 25.0, 10, 0).share == pytest.approx(0.2 / 10.2)


@pytest.mark.parametrize(
    ("rounds", "flags", "length", "looks"),
    [
        (
            16,
            "",
            8,
            16,
        ),  # rows every 2 steps would leave none between; looks are due sooner than a round is over
        (16, "--log-interval 10 --probe-interval 20", 10, 8),
        (16, "--log-interval 10 --probe-interval 1000", 10, 8),  # or there would be none
        (16, "--probe-interval 0", 8, 0),
        (9, "", 8, 9),  # as many as SECONDS hold, of 84 ms each
    ],
)
def test_every_kind_of_work_is_counted_where_it_belongs(rounds, flags, length, looks, tmp_path, monkeypatch):
    """On a clock that only these functions move."""
    now, calls = 0.0, []

    def takes(owner, name, seconds):
        real = getattr(owner, name)

        def slow(*args):
            nonlocal now
            now += seconds
            calls.append((name, *args[1:]))
            return real(*args)

        monkeypatch.setattr(owner, name, slow)

    takes(Trainer, "step", 0.010)
    takes(Trainer, "row", 0.001)
    takes(Tracker, "log", 0.003)
    takes(Tracker, "hand_over", 0.048)  # at the end, as it would be WANDB_SECONDS later
    takes(Probe, "remember", 0.050)
    takes(Probe, "measure", 0.200)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(logging_cost, "SECONDS", 0.7)
    tiny_data(tmp_path / "data")
    config = load_config([*FLAGS, "--dataset", str(tmp_path / "data"), *flags.split()])
    cost = logging_cost.measure(config, rounds if rounds == 16 else None)
    assert (cost.step_ms, cost.logged_ms) == pytest.approx((10, 4 + 48 / rounds))
    assert cost.look_ms == pytest.approx(253 if looks else 0)
    assert (cost.log_interval, cost.probe_interval) == (config.run.log_interval, config.run.probe_interval)
    watched = [call[1] for call in calls if call[0] == "step" and call[2]]
    assert watched == list(range(0, (2 + rounds) * length, length)), "two to warm up"
    assert sum(call[0] == "measure" for call in calls) == 1 + looks

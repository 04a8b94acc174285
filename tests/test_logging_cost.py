"""The arithmetic of the cost of logging, and that both kinds of logging are really in it."""

import itertools
import math
import statistics
import time
from dataclasses import replace

import pytest
from dynamics_cases import FLAGS, tiny_data

from configs import load_config
from tools.profile import logging_cost
from tools.profile.logging_cost import LoggingCost
from training.probe import Probe
from training.tracker import Tracker
from training.trainer import Trainer


def test_share_of_the_throughput():
    cost = LoggingCost(
        step_ms=10.0, logged_ms=2.0, look_ms=25.0, log_interval=10, probe_interval=250, logged_error_ms=0.2
    )
    assert cost.share == pytest.approx(0.3 / 10.3)
    assert replace(cost, probe_interval=0).share == pytest.approx(0.2 / 10.2)
    assert str(cost).endswith("2.91% +- 0.20% of the throughput")


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
        (9, "", 8, 9),  # as many as SECONDS hold, of 86 ms each
    ],
)
def test_every_kind_of_work_is_counted_where_it_belongs(rounds, flags, length, looks, tmp_path, monkeypatch):
    """On a clock that only these functions move."""
    now, calls = 0.0, []

    def takes(owner, name, *seconds):
        real, in_turn = getattr(owner, name), itertools.cycle(seconds)

        def slow(*args):
            nonlocal now
            now += next(in_turn)
            calls.append((name, *args[1:]))
            return real(*args)

        monkeypatch.setattr(owner, name, slow)

    takes(Trainer, "step", 0.010)
    takes(logging_cost, "fetch", 0.001, 0.003)
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
    logged = [3 + (1, 3)[i % 2] for i in range(rounds)]
    assert (cost.step_ms, cost.logged_ms) == pytest.approx((10, statistics.mean(logged) + 48 / rounds))
    assert cost.logged_error_ms == pytest.approx(statistics.stdev(logged) / math.sqrt(rounds))
    assert cost.look_ms == pytest.approx(253 if looks else 0)
    assert (cost.log_interval, cost.probe_interval) == (config.run.log_interval, config.run.probe_interval)
    watched = [call[1] for call in calls if call[0] == "step" and call[2]]
    assert watched == list(range(0, (2 + rounds) * length, length)), "two to warm up"
    assert sum(call[0] == "measure" for call in calls) == 1 + looks

"""What is printed and not read, or cannot be written, costs a run nothing."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import STEPS, assert_same_end, rows, saved, start, train, wait_for

from training.run import EXIT_STOPPED


def test_a_reader_of_the_output_that_goes_away_costs_nothing(argv, tmp_path):
    """As in `train.py ... 2>&1 | head -1`, and `| tee log` that Ctrl-C has ended first."""
    process = start(*argv, "--run-name", "unread")
    process.stdout.readline()
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=600) == 0
    assert train(*argv, "--run-name", "whole") == 0
    assert_same_end(tmp_path / "unread", tmp_path / "whole")


def test_an_interrupt_that_nobody_reads_about_saves(argv, tmp_path):
    """Ctrl-C reaches every process of `train.py ... 2>&1 | tee log`, and tee is gone first."""
    process = start(*argv, "--max-iters", "100000")
    for line in process.stdout:
        if line.startswith("step 0"):
            break
    process.stdout.close()
    process.stderr.close()
    wait_for(lambda: (tmp_path / "tiny" / "metrics.jsonl").exists())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=600) == EXIT_STOPPED
    assert saved(tmp_path / "tiny")[1].progress.step >= rows(tmp_path / "tiny")[-1]["iter"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="wants /dev/full")
def test_output_on_a_full_disk_costs_nothing(argv, tmp_path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "train.py", *map(str, argv)]
        assert subprocess.run(command, stdout=full, stderr=full, timeout=600).returncode == 0
    assert saved(tmp_path / "tiny")[1].progress.step == STEPS

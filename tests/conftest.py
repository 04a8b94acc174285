"""Test settings that must stand before anything is imported."""

import os
import resource
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and several workers share the cores

import pytest
import torch
from hypothesis import HealthCheck, settings

# A slow machine fails no test, and what fails on one machine fails on all: the same examples every time.
settings.register_profile(
    "nanonorm", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("nanonorm")

# Without a GPU the Triton kernels run in Triton's interpreter, which is chosen when they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background jobs ignore SIGINT, and so would every run that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def argv(tmp_path) -> tuple[str]:
    """What train.py trains a run of seconds from."""
    from tiny_runs import recipe

    return (str(recipe(tmp_path)),)


@pytest.fixture
def full_disk():
    """Lets files grow to so many bytes only, as on a full disk; without a number, as far as before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int = soft) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    yield limit
    limit()

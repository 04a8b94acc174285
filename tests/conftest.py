"""Test settings that must stand before anything is imported."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and several workers share the cores

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

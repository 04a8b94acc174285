"""Test settings that must stand before anything is imported."""

import os

import torch

# Without a GPU the Triton kernels run in Triton's interpreter, which is chosen when they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

"""Data: token files, and the batches that a step of training or evaluation takes from them.

- `data.prepare`: text to token files, on the command line; `data.sources` reads, `data.build` tokenizes and
  writes
- `data.dataset`: opens a folder of token files; `data.files` knows their layouts
- `data.batches`: which windows belong to which step
- `data.tokenizer`: text to ids and back
"""

from typing import TYPE_CHECKING

import pydantic

from data.build import ensure_prepared
from data.dataset import Dataset, check_token_range, open_dataset
from data.files import Tokens
from data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from data.batches import EvalWindows, TrainBatches

__all__ = [
    "DataConfig",
    "Dataset",
    "EvalWindows",
    "Tokens",
    "TrainBatches",
    "check_token_range",
    "ensure_prepared",
    "load_tokenizer",
    "open_dataset",
]


@pydantic.dataclasses.dataclass(
    frozen=True, config=pydantic.ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
)
class DataConfig:
    """Which text."""

    dataset: str = "stdlib"
    """What to train on: the name of a data set made by `python -m data.prepare`, or a folder of .bin token
    files (nanoGPT's, llm.c's or modded-nanogpt's)."""


def __getattr__(name: str):
    # Batches are torch tensors, and importing torch takes seconds that data.prepare need not spend.
    if name in ("EvalWindows", "TrainBatches"):
        from data import batches

        return getattr(batches, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

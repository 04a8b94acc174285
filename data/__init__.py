"""Data: token files, and the batches that a step of training or evaluation takes from them.

data.prepare    text -> token files (command line: python -m data.prepare --help), through data.sources and
data.build data.dataset    opening token files: ours, nanoGPT's, llm.c's data.batches    which windows belong
to which step data.tokenizer  text <-> ids
"""

from typing import TYPE_CHECKING

import pydantic

from data.build import ensure_prepared
from data.dataset import Dataset, check_token_range, open_dataset
from data.errors import DataError
from data.files import Tokens
from data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from data.batches import EvalWindows, TrainBatches

__all__ = [
    "DataConfig",
    "DataError",
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
    # Batches are torch tensors, and importing torch takes seconds that data.prepare and its workers need not
    # wait.
    if name in ("EvalWindows", "TrainBatches"):
        from data import batches

        return getattr(batches, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

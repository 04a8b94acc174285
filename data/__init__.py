"""Data: token files, and the batches that a step of training or evaluation takes from them.

- `data.prepare`: text to token files, on the command line; `data.sources` reads, `data.build` tokenizes and
  writes
- `data.dataset`: opens a folder of token files; `data.files` knows their layouts
- `data.batches`: which windows belong to which step; needs torch, and is not imported here
- `data.tokenizer`: text to ids and back
"""

from pydantic.dataclasses import dataclass

from base.cli import STRICT
from data.build import ensure_prepared
from data.dataset import Dataset, check_token_range, open_dataset
from data.files import Tokens
from data.tokenizer import load_tokenizer

__all__ = [
    "DataConfig",
    "Dataset",
    "Tokens",
    "check_token_range",
    "ensure_prepared",
    "load_tokenizer",
    "open_dataset",
]


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Which text."""

    dataset: str = "stdlib"
    """What to train on: the name of a data set made by `python -m data.prepare`, or a folder of .bin token
    files (nanoGPT's, llm.c's or modded-nanogpt's)."""

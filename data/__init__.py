"""Data: token files, and the batches that a step of training or evaluation takes from them.

- `data.prepare`: text to token files, on the command line; `data.sources` reads, `data.build` tokenizes and
  writes
- `data.dataset`: opens a folder of token files; `data.files` knows their layouts
- `data.batches`: which windows belong to which step; needs torch, and is not imported here
- `data.tokenizer`: text to ids and back
"""

from pydantic.dataclasses import dataclass

from base.cli import STRICT
from data.build import ensure_prepared as ensure_prepared
from data.dataset import Dataset as Dataset
from data.dataset import check_token_range as check_token_range
from data.dataset import open_dataset as open_dataset
from data.files import Tokens as Tokens
from data.tokenizer import load_tokenizer as load_tokenizer


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Which text."""

    dataset: str = "stdlib"
    """What to train on: the name of a data set made by `python -m data.prepare`, or a folder of .bin token
    files (nanoGPT's, llm.c's or modded-nanogpt's)."""

"""How well models predict a text: loss, perplexity and bits per byte over fixed windows, with the standard error.

python -m tools.evaluate out/quickstart out/other --dataset stdlib
python -m tools.evaluate out/gpt2 --dataset mine --split train --eval-tokens 1000000 --json

A run, a checkpoint and a converted model are evaluated alike, in float32. Several on the same windows are compared
window by window: the difference to the first has a much smaller error than either loss.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic.dataclasses
import torch
import torch.nn.functional as F

from base.cli import STRICT, Count, UserError, run
from base.flags import Positional, options
from data.batches import EvalWindows
from data.dataset import Dataset, open_dataset
from data.tokenizer import load_tokenizer
from model import GPT
from tools.vocabulary import token_bytes
from training.checkpoint import find, load_model, read_about
from training.dynamics import check_stream
from training.setup import choose_device

LOGITS = 2**26  # that are in memory at once


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Options:
    """Loss, perplexity and bits per byte of models on a data set."""

    runs: Positional[tuple[str, ...]]
    """Runs, checkpoints or converted models."""
    dataset: str
    """The name of a data set, or a folder of token files."""
    split: Literal["val", "train"] = "val"
    """Which part of it."""
    eval_tokens: Count = 100_000
    """Tokens to predict, in windows spread evenly over the part; as many as train.py's val/loss, if not given."""
    context: Count | None = None
    """Tokens of a window; each model's block_size if not given."""
    checkpoint: Literal["latest", "best"] = "latest"
    """Which checkpoint of a run."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes cuda, else mps, else cpu."""
    json: bool = False
    """Print JSON, with every number in full."""


@dataclass(frozen=True)
class Sums:
    """What a model makes of each window, in float64 [W]: nats and targets, and the bytes of text with their nats."""

    nats: np.ndarray
    targets: np.ndarray
    text_nats: np.ndarray
    bytes: np.ndarray


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, float | None]:
    """(sum over sum, its standard error over windows drawn at random) of two arrays [W].

    The error of a ratio estimator: Cochran 1977, "Sampling Techniques", section 2.11. None for a single window.
    """
    mean, count = numerators.sum() / denominators.sum(), len(numerators)
    if count == 1:
        return float(mean), None
    variance = np.square(numerators - mean * denominators).sum() / (count - 1)
    return float(mean), float(math.sqrt(variance * count) / denominators.sum())


@torch.no_grad()
def measure(model: GPT, windows: EvalWindows, sizes: np.ndarray | None) -> Sums:
    """What a model in evaluation mode makes of the windows. Raises UserError for an id that it does not know."""
    device, config = next(model.parameters()).device, model.config
    rows = max(LOGITS // (windows.block_size * config.vocab_size), 1)
    if sizes is not None:  # ids that pad the vocabulary are no text
        sizes = np.pad(sizes, (0, max(config.vocab_size - len(sizes), 0)))
    found = []
    for first in range(0, len(windows), rows):
        tokens, targets = windows.batch(range(first, min(first + rows, len(windows))))
        largest = max(int(tokens.max()), int(targets.max()))
        if largest >= config.vocab_size:
            raise UserError(
                f"the data hold token {largest}, and the model knows ids below {config.vocab_size} only"
            )
        logits = model(tokens.to(device))[0]
        nats = F.cross_entropy(
            logits.flatten(0, 1), targets.to(device).flatten(), ignore_index=-1, reduction="none"
        )
        nats, counted = nats.view(targets.shape).cpu().double().numpy(), (targets != -1).numpy()
        written = np.zeros(targets.shape) if sizes is None else sizes[targets.clamp(min=0).numpy()] * counted
        found.append([nats.sum(1), counted.sum(1), (nats * (written > 0)).sum(1), written.sum(1)])
    return Sums(*(np.concatenate(column) for column in zip(*found, strict=True)))


def known_sizes(path: Path, tokenizer: dict | None, dataset: Dataset) -> np.ndarray | None:
    """The bytes that each id of the data writes; None where that cannot be known.

    Raises UserError for a model of another tokenizer than the data's.
    """
    ours = dataset.meta.get("tokenizer")
    if tokenizer and ours and tokenizer != ours:
        raise UserError(
            f"{path} was trained on ids of the tokenizer {tokenizer.get('name')}, and {dataset.path} holds those of "
            f"{ours.get('name')}; prepare the text again with the model's"
        )
    if not (tokenizer and ours):
        place = dataset.path if tokenizer else path
        print(
            f"{place} does not say what its token ids mean; the numbers hold if both mean the same",
            file=sys.stderr,
        )
    try:
        return token_bytes(load_tokenizer(ours or tokenizer))
    except UserError:
        return None


def result(path: str, context: int, sums: Sums, first: Sums | None) -> dict[str, Any]:
    """A model's numbers by name; those of `first`, on the same windows, are taken off."""
    loss, error = ratio(sums.nats, sums.targets)
    bits = float(sums.text_nats.sum() / math.log(2) / sums.bytes.sum()) if sums.bytes.any() else None
    numbers = {
        "run": path,
        "context": context,
        "windows": len(sums.targets),
        "tokens": int(sums.targets.sum()),
        "loss": loss,
        "standard_error": error,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": bits,
    }
    if first is not None:
        numbers["difference"], numbers["difference_error"] = ratio(sums.nats - first.nats, sums.targets)
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}


COLUMNS = {"loss": 19, "perplexity": 13, "bits/byte": 11, "to the first": 21, "context": 9, "tokens": 11}


def line(name: str, cells: Iterable[str], width: int) -> str:
    return f"{name:{width}}" + "".join(
        f"{c:>{size}}" for c, size in zip(cells, COLUMNS.values(), strict=True)
    )


def row(numbers: dict[str, Any]) -> list[str]:
    """What stands in COLUMNS; a dash for what is not known, or is not finite."""

    def shown(key: str, form: str) -> str:
        return "-" if numbers.get(key) is None else format(numbers[key], form)

    return [
        f"{shown('loss', '.4f')} ± {shown('standard_error', '.4f')}",
        shown("perplexity", ".5g"),
        shown("bits_per_byte", ".4f"),
        f"{shown('difference', '.4f')} ± {shown('difference_error', '.4f')}"
        if "difference" in numbers
        else "",
        shown("context", ","),
        shown("tokens", ","),
    ]


def evaluations(asked: Options, dataset: Dataset) -> Iterator[dict[str, Any]]:
    """The numbers of one model after another, each against the first on the same windows."""
    device, firsts = choose_device(asked.device), {}
    paths = [find(name, asked.checkpoint) for name in asked.runs]
    sizes = [known_sizes(path, read_about(path)["tokenizer"], dataset) for path in paths]
    for name, path, written in zip(asked.runs, paths, sizes, strict=True):
        model = load_model(path).to(device)
        check_stream(model, name)
        context = asked.context or model.config.block_size
        if context > model.config.block_size:
            raise UserError(
                f"--context is {context}, and {name} reads no more than {model.config.block_size} tokens"
            )
        windows = EvalWindows(getattr(dataset, asked.split), block_size=context, max_tokens=asked.eval_tokens)
        sums = measure(model, windows, written)
        first = firsts.setdefault(context, sums)
        yield result(name, context, sums, None if first is sums else first)


def main(argv: Sequence[str]) -> None:
    asked = options(Options, argv, "python -m tools.evaluate", __doc__)
    dataset = open_dataset(asked.dataset)
    found = evaluations(asked, dataset)
    if asked.json:
        about = {"dataset": str(dataset.path), "split": asked.split}
        print(json.dumps(about | {"runs": list(found)}, indent=2))
        return
    width = max(map(len, asked.runs)) + 1
    for i, numbers in enumerate(found):
        if i == 0:
            print(f"{asked.split} of {dataset.path}, loss in nats per token ± its standard error")
            print(line("", COLUMNS, width))
        print(line(numbers["run"], row(numbers), width), flush=True)


if __name__ == "__main__":
    run(main)

"""Text from a trained model.

python -m tools.sample out/quickstart --prompt "def " --temperature 0.8 --top-k 50 --seed 1
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from base.cli import STRICT, Count, require, run
from base.flags import Positional, options
from data import load_tokenizer
from training.checkpoint import find, load_model, read_about
from training.dynamics import check_stream
from training.sampling import grown
from training.setup import choose_device


@dataclass(frozen=True, config=STRICT)
class Options:
    """Continue a prompt with a trained model."""

    run: Positional[str]
    """A run, a checkpoint or a converted model."""
    prompt: str = ""
    """Text to continue; a new document if empty."""
    tokens: Count = 300
    """How many tokens to add."""
    samples: Count = 1
    """How many continuations."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """Divides the logits; 0 always takes the most likely token."""
    top_k: Annotated[int, Field(ge=0)] = 50
    """Draw from the k most likely tokens only; 0 draws from all."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """The same seed gives the same text."""
    checkpoint: Literal["latest", "best"] = "latest"
    """Which checkpoint of a run."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes cuda, else mps, else cpu."""

    def __post_init__(self):
        lone = any("\ud800" <= character <= "\udfff" for character in self.prompt)
        require(not lone, "--prompt holds bytes that are no UTF-8")


class TextStream:
    """The text of a row of token ids that grows, without ever splitting a character."""

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode = decode
        # Ids before `shown` were returned as text, the last piece of it from `start` on.
        self.start = self.shown = 0

    def next(self, ids: list[int]) -> str:
        """The text that is complete now. What ends in U+FFFD may be half a character, and waits."""
        text = self.rest(ids)
        if not text or text.endswith("\ufffd"):
            return ""
        self.start, self.shown = self.shown, len(ids)
        return text

    def rest(self, ids: list[int]) -> str:
        """All text that was not returned; what stands before an id may decide how it is spelled."""
        before = self.decode(ids[self.start : self.shown])
        return self.decode(ids[self.start :])[len(before) :]


def main(argv: Sequence[str]) -> None:
    asked = options(Options, argv, "python -m tools.sample")
    path = find(asked.run, asked.checkpoint)
    model = load_model(path).to(choose_device(asked.device))
    check_stream(model, asked.run)
    tokenizer = load_tokenizer(read_about(path)["tokenizer"])
    how = {
        name: getattr(asked, name) for name in ("prompt", "tokens", "samples", "temperature", "top_k", "seed")
    }
    growing, first = grown(model, tokenizer, **how), TextStream(tokenizer.decode)
    rows = next(growing)
    try:
        for rows in growing:
            print(first.next(rows[0]), end="", flush=True)
    finally:  # Ctrl-C may have ended it
        print("\n\n---\n\n".join([first.rest(rows[0]), *map(tokenizer.decode, rows[1:])]))


if __name__ == "__main__":
    run(main)

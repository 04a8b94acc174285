"""Text from a trained model.

python -m tools.sample out/quickstart --prompt "def " --temperature 0.8 --top-k 50 --seed 1
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor

from base.cli import STRICT, Positional, UserError, options, require, run
from data import load_tokenizer
from model import GPT
from training.checkpoint import find, load_model, read_about
from training.setup import choose_device

LENGTHS = 64  # contexts are filled up to multiples of this


@dataclass(frozen=True, config=STRICT)
class Options:
    """Continue a prompt with a trained model."""

    run: Positional[str]
    """A run, a checkpoint or a converted model."""
    prompt: str = ""
    """Text to continue; a new document if empty."""
    tokens: int = 300
    """How many tokens to add."""
    samples: int = 1
    """How many continuations."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int = 50
    """Draw from the k most likely tokens only; 0 draws from all."""
    seed: int = 1
    """The same seed gives the same text."""
    checkpoint: Literal["latest", "best"] = "latest"
    """Which checkpoint of a run."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes cuda, else mps, else cpu."""

    def __post_init__(self):
        for name in ("tokens", "samples"):
            require(getattr(self, name) >= 1, f"--{name} is {getattr(self, name)}; it must be at least 1")
        require(self.temperature >= 0, f"--temperature is {self.temperature}; it must not be below 0")
        require(self.top_k >= 0, f"--top-k is {self.top_k}; it must not be below 0")
        require(0 <= self.seed < 2**63, f"--seed is {self.seed}; it must be from 0 to 2^63 - 1")
        lone = any("\ud800" <= character <= "\udfff" for character in self.prompt)
        require(not lone, "--prompt holds bytes that are no UTF-8")


@torch.no_grad()
def draw(
    model: GPT, tokens: Tensor, n_new: int, *, vocab_size: int, temperature: float, top_k: int, seed: int
) -> Iterator[Tensor]:
    """`n_new` times the ids [B] int64 that come next after `tokens` [B, T] int64 and those before.

    Ids from vocab_size up, which pad the embedding, are never drawn. temperature 0 is greedy; top_k 0 draws from
    all. The model reads its last block_size tokens, and zeros after them that they do not see: a CPU prepares its
    products anew, and keeps them, for every length.
    """
    generator = torch.Generator().manual_seed(seed)
    block_size = model.config.block_size
    for _ in range(n_new):
        tokens = tokens[:, -block_size:]
        length = tokens.size(1)
        rows = F.pad(tokens, (0, min(-length % LENGTHS, block_size - length)))
        logits = model(rows)[0][:, length - 1, :vocab_size].float().cpu()
        if temperature == 0:
            drawn = logits.argmax(-1, keepdim=True)
        else:  # the largest first, so that no temperature is too small to divide by
            values, ids = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))
            scaled = (values - values[:, :1]) / temperature
            choice = torch.multinomial(scaled.softmax(-1), 1, generator=generator)
            drawn = ids.gather(-1, choice)
        yield drawn[:, 0]
        tokens = torch.cat((tokens, drawn.to(tokens.device)), dim=1)


def generate(model: GPT, tokens: Tensor, n_new: int, **how) -> Tensor:
    """`tokens` [B, T] int64 with `n_new` more for each row, by what `draw` takes: [B, T + n_new]."""
    drawn = torch.stack(list(draw(model, tokens, n_new, **how)), dim=1)
    return torch.cat((tokens, drawn.to(tokens.device)), dim=1)


class TextStream:
    """The text of a row of token ids that grows, without ever splitting a character."""

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode = decode
        self.start = self.shown = (
            0  # the ids before `shown` were returned as text, those from `start` in the last piece
        )

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


def first_tokens(tokenizer, prompt: str, known: int) -> list[int]:
    """The prompt's ids; for an empty one the separator that begins a document, or a line break, or id 0.

    known: how many ids the model knows. Raises UserError for a prompt that needs others.
    """
    if prompt:
        ids = tokenizer.encode(prompt)
        if max(ids) >= known:
            raise UserError(f"the prompt has token {max(ids)}, and the model knows ids below {known} only")
        return ids
    if tokenizer.separator is not None and tokenizer.separator < known:
        return [tokenizer.separator]
    try:
        return [i for i in tokenizer.encode("\n") if i < known] or [0]
    except UserError:
        return [0]


def grown(model: GPT, tokenizer, asked: Options) -> Iterator[list[list[int]]]:
    """The rows of ids that `asked` wants as text, one token longer each time. The model is in evaluation mode."""
    known = min(tokenizer.vocab_size, model.config.vocab_size)
    begin = first_tokens(tokenizer, asked.prompt, known)
    rows = [list(begin) if asked.prompt else [] for _ in range(asked.samples)]
    yield rows
    tokens = torch.tensor([begin] * asked.samples, device=next(model.parameters()).device)
    how = {"temperature": asked.temperature, "top_k": asked.top_k, "seed": asked.seed}
    for drawn in draw(model, tokens, asked.tokens, vocab_size=known, **how):
        for row, token in zip(rows, drawn.tolist(), strict=True):
            row.append(token)
        yield rows


def continuations(model: GPT, tokenizer, asked: Options) -> list[str]:
    """The texts that `asked` wants of a model in evaluation mode."""
    *_, rows = grown(model, tokenizer, asked)
    return [tokenizer.decode(row) for row in rows]


def main(argv: Sequence[str]) -> None:
    asked = options(Options, argv, "python -m tools.sample")
    path = find(asked.run, asked.checkpoint)
    model = load_model(path).to(choose_device(asked.device))
    tokenizer = load_tokenizer(read_about(path)["tokenizer"])
    growing, first = grown(model, tokenizer, asked), TextStream(tokenizer.decode)
    rows = next(growing)
    try:
        for rows in growing:
            print(first.next(rows[0]), end="", flush=True)
    finally:  # Ctrl-C may have ended it
        print("\n\n---\n\n".join([first.rest(rows[0]), *map(tokenizer.decode, rows[1:])]))


if __name__ == "__main__":
    run(main)

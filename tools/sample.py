"""Text from a trained model.

python -m tools.sample out/quickstart --prompt "def " --temperature 0.8 --top-k 50 --seed 1
"""

import sys
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from pydantic.dataclasses import dataclass
from torch import Tensor

from base.cli import UserError
from configs import STRICT, command_line, require, user_error
from data import load_tokenizer
from model import GPT
from tools.output import say
from training.checkpoint import find, load_model, read_about
from training.setup import choose_device

LENGTHS = 64  # contexts are filled up to multiples of this


@dataclass(frozen=True, config=STRICT)
class Options:
    """Continue a prompt with a trained model."""

    run: tyro.conf.Positional[str]
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
def generate(
    model: GPT, tokens: Tensor, n_new: int, *, vocab_size: int, temperature: float, top_k: int, seed: int
) -> Tensor:
    """`tokens` [B, T] int64 with `n_new` more drawn for each row: [B, T + n_new].

    Ids from vocab_size up, which pad the embedding, are never drawn. temperature 0 is greedy; top_k 0 draws from
    all. The model reads its last block_size tokens, and zeros after them that they do not see: a CPU prepares its
    products anew, and keeps them, for every length.
    """
    generator = torch.Generator().manual_seed(seed)
    block_size = model.config.block_size
    for _ in range(n_new):
        seen = tokens[:, -block_size:]
        length = seen.size(1)
        rows = F.pad(seen, (0, min(-length % LENGTHS, block_size - length)))
        logits = model(rows)[0][:, length - 1, :vocab_size].float().cpu()
        if temperature == 0:
            drawn = logits.argmax(-1, keepdim=True)
        else:
            k = min(top_k or logits.size(-1), logits.size(-1))
            values, ids = logits.topk(
                k
            )  # the largest first, so that no temperature is too small to divide by
            scaled = (values - values[:, :1]) / temperature
            choice = torch.multinomial(scaled.softmax(-1), 1, generator=generator)
            drawn = ids.gather(-1, choice)
        tokens = torch.cat((tokens, drawn.to(tokens.device)), dim=1)
    return tokens


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


def continuations(model: GPT, tokenizer, options: Options) -> list[str]:
    """The texts that `options` ask of a model in evaluation mode."""
    known = min(tokenizer.vocab_size, model.config.vocab_size)
    begin = first_tokens(tokenizer, options.prompt, known)
    rows = torch.tensor([begin] * options.samples, device=next(model.parameters()).device)
    how = {"temperature": options.temperature, "top_k": options.top_k, "seed": options.seed}
    rows = generate(model, rows, options.tokens, vocab_size=known, **how)
    skip = 0 if options.prompt else len(begin)
    return [tokenizer.decode(row[skip:].tolist()) for row in rows]


def main(argv: Sequence[str]) -> None:
    try:
        options = command_line(Options, argv, "python -m tools.sample")
        path = find(options.run, options.checkpoint)
        model = load_model(path).to(choose_device(options.device))
        texts = continuations(model, load_tokenizer(read_about(path)["tokenizer"]), options)
        say("\n\n---\n\n".join(texts))
    except UserError as e:
        user_error(str(e))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Text from a model: ids drawn one after the other."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from base.cli import UserError
from model import GPT

LENGTHS = 64  # contexts are filled up to multiples of this


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


def grown(
    model: GPT,
    tokenizer,
    prompt: str = "",
    tokens: int = 300,
    samples: int = 1,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 1,
) -> Iterator[list[list[int]]]:
    """The rows of ids that are the text asked for, one token longer each time. The model is in evaluation mode."""
    known = min(tokenizer.vocab_size, model.config.vocab_size)
    begin = first_tokens(tokenizer, prompt, known)
    rows = [list(begin) if prompt else [] for _ in range(samples)]
    yield rows
    ids = torch.tensor([begin] * samples, device=next(model.parameters()).device)
    how = {"temperature": temperature, "top_k": top_k, "seed": seed}
    for drawn in draw(model, ids, tokens, vocab_size=known, **how):
        for row, token in zip(rows, drawn.tolist(), strict=True):
            row.append(token)
        yield rows

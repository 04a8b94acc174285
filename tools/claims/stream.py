"""Claims 13 and 14: what adding does to a stream that nothing rescales."""

import torch

from model import Join, ModelConfig
from tools.claims.claim import claim, control, near
from tools.claims.small import NEGLIGIBLE, row
from training.dynamics import mean_square
from training.probe import mean_angle


def pre_join(kind: str, width: int) -> Join:
    """r = x + s, of which the stream keeps r and the next branch reads N(r)."""
    return Join(ModelConfig(n_embd=width, n_head=1, norm=kind, norm_eps=NEGLIGIBLE)).double()


UPDATES = 3
RMS_AFTER = {0: 2.739, 1: 3.674, 3: 5.612}


def after_updates(kind: str) -> tuple[list[float], list[torch.Tensor]]:
    """(RMS of the stream after 0, 1, ... updates by ones, what the next branch reads then)."""
    x, ones, join = row(1, 2, 3, 4), row(1, 1, 1, 1), pre_join(kind, 4)
    rms, reads = [mean_square(x).sqrt().item()], [join.next_norm(x)]
    for _ in range(UPDATES):
        x, h = join(x, ones)
        rms.append(mean_square(x).sqrt().item())
        reads.append(h)
    return rms, reads


def spread(rows: list[torch.Tensor]) -> float:
    return max((r - rows[0]).abs().max().item() for r in rows)


@claim(13, "Adding [1, 1, 1, 1] to [1, 2, 3, 4] makes the stream's RMS grow, and LayerNorm never sees it.")
def constant_updates():
    rms, reads = after_updates("layernorm")
    for count, value in RMS_AFTER.items():
        yield near(f"RMS of the stream after {count} updates", round(rms[count], 3), value, 1e-9)
    yield near("change of what LayerNorm reads", spread(reads), 0, 1e-12)
    yield control(near("change of what RMSNorm reads", spread(after_updates("rmsnorm")[1]), 0, 1e-12))


@claim(
    14,
    "The same update turns a longer stream less: (c, 0) + (0, 1) turns by 45 degrees at c = 1, by 5.711 at 10.",
)
def angles():
    join, update = pre_join("rmsnorm", 2), row(0, 1)
    reads = {c: join.next_norm(row(c, 0)) for c in (1, 10)}
    for c, degrees in ((1, 45), (10, 5.711)):
        x = row(c, 0)
        r, _ = join(x, update)
        yield near(f"degrees at c = {c}", round(mean_angle(x, r).item(), 3), degrees, 1e-9)
    yield near("|N((10, 0)) - N((1, 0))|: the branch reads the same", spread([reads[1], reads[10]]), 0, 1e-12)
    scaled = mean_angle(row(10, 0), row(10, 0) + 10 * update).item()
    yield control(near("degrees at c = 10 if the update grew with the stream", round(scaled, 3), 5.711, 1e-9))

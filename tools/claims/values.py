"""Claims 5 to 9: the numbers that come out, in every dtype."""

import torch
from torch import Tensor

import kernels
from kernels import reference
from tools.claims.claim import at_most, claim, control, equal, near
from tools.claims.small import KINDS, NAMES, NEGLIGIBLE, largest, random, row, small_norm

SHOWN = {
    "layernorm": [-1.34164, -0.44721, 0.44721, 1.34164],
    "rmsnorm": [0.36515, 0.73030, 1.09545, 1.46059],
}


@claim(5, "[1, 2, 3, 4] becomes the values below (gain 1, negligible eps).")
def values():
    x = row(1, 2, 3, 4, dtype=torch.float32)
    for kind in KINDS:
        yield near(NAMES[kind], small_norm(kind, 4)(x).flatten(), SHOWN[kind], 1e-5)
    unbiased = ((x - x.mean()) / x.std()).flatten()  # torch's std divides by D - 1
    yield control(near("LayerNorm by the unbiased variance", unbiased, SHOWN["layernorm"], 1e-5))


@claim(
    6,
    "mean(x^2) = variance + mean^2. A positive factor is invisible to both norms up to eps, a negative one flips.",
)
def moments_and_factors():
    x = random(3, 8) + 0.5
    _, rstd = reference.standardize(x, "rmsnorm", NEGLIGIBLE)
    _, centred = reference.standardize(x, "layernorm", NEGLIGIBLE)
    difference = rstd**-2 - (centred**-2 + x.mean(-1, keepdim=True) ** 2)
    yield at_most(
        "|mean(x^2) - variance - mean^2|, from the norms' own statistics", largest(difference), 1e-12
    )
    for kind in KINDS:
        norm = small_norm(kind, 8).double()
        yield at_most(f"{NAMES[kind]}: |N(3x) - N(x)|", largest(norm(3 * x) - norm(x)), 1e-12)
        yield at_most(f"{NAMES[kind]}: |N(-3x) + N(x)|", largest(norm(-3 * x) + norm(x)), 1e-12)
        coarse = small_norm(kind, 8, eps=1.0).double()
        yield control(at_most(f"{NAMES[kind]} with eps 1", largest(coarse(3 * x) - coarse(x)), 1e-12))


def rms_without_promotion(x: Tensor) -> Tensor:
    """The control: the square of 1000 is beyond float16's 65504, and 1 / sqrt(inf) is 0."""
    return x * x.square().mean(-1, keepdim=True).rsqrt()


@claim(7, "float16 [1000, 2000, 3000, 4000] gives float32's result, rounded: statistics are promoted.")
def promotion():
    x = row(1000, 2000, 3000, 4000, dtype=torch.float16)
    for kind in KINDS:
        norm = small_norm(kind, 4, eps=1e-5)
        truth = norm(x.float()).half()
        yield near(NAMES[kind], norm(x).flatten(), truth.flatten(), 0)
        assert torch.isfinite(truth).all()
    wrong = rms_without_promotion(x)
    yield control(near("RMSNorm without promotion", wrong.flatten(), truth.flatten(), 0))
    yield equal(
        "and what it gives is finite, so that isfinite does not catch it", bool(wrong.isfinite().all()), True
    )


def layernorm_of_moments(x: Tensor) -> Tensor:
    """The control: E[x^2] - E[x]^2 subtracts two numbers near 10,000 that agree in float32's last digits."""
    mean, square = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
    return (x - mean) * (square - mean.square()).rsqrt()


@claim(
    8, "Around a mean of 100 with a spread of 0.01, float32 keeps the variance, because it is centred first."
)
def centred_variance():
    x = (100 + 0.01 * random(64, 512)).float()
    norm = small_norm("layernorm", 512)
    truth = small_norm("layernorm", 512).double()(x.double())
    yield at_most("error of LayerNorm in float32", largest(norm(x) - truth), 5e-3)
    rstd = reference.standardize(x, "layernorm", NEGLIGIBLE)[1].double()
    exact = reference.standardize(x.double(), "layernorm", NEGLIGIBLE)[1]
    yield at_most("relative error of the specification's 1/std", largest(rstd / exact - 1), 5e-3)
    yield control(at_most("error with E[x^2] - E[x]^2", largest(layernorm_of_moments(x) - truth), 5e-3))


UNDERFLOWS = 1e-46  # is 0 in float32


def takes(kind: str, eps: float) -> bool:
    """Whether a float32 norm accepts this eps."""
    ones = torch.ones(4)
    try:
        kernels.norm(ones, (ones, None), kind=kind, eps=eps)
    except ValueError:
        return False
    return True


@claim(9, "An eps that underflows in the statistics' dtype is refused; a row of zeros gives zeros, not NaN.")
def eps():
    zeros = row(0, 0, 0, 0, dtype=torch.float16)
    for kind in KINDS:
        yield equal(f"{NAMES[kind]} takes eps {UNDERFLOWS:g}", takes(kind, UNDERFLOWS), False)
        yield equal(f"{NAMES[kind]} takes eps {NEGLIGIBLE:g}", takes(kind, NEGLIGIBLE), True)
        y = small_norm(kind, 4, eps=1e-8)(zeros)
        yield near(f"{NAMES[kind]} of zeros in float16, eps 1e-8", y.flatten(), zeros.flatten(), 0)
    in_half = zeros * (zeros.square().mean(-1, keepdim=True) + torch.tensor(1e-8).half()).rsqrt()
    yield control(near("zeros with eps in float16, where 1e-8 is 0", in_half.flatten(), zeros.flatten(), 0))

"""What the kernels' tests share: inputs, the textbook's answer, and the rule for how far off one may be."""

from dataclasses import dataclass
from functools import partial

import torch

import kernels
from kernels.bench import PYTORCH
from kernels.calls import CALLS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACEMENTS = tuple(name for name in CALLS if not name.startswith("scaled"))
NORMED = tuple(name for name in PLACEMENTS if name != "none")
ATOL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One call on some tensors. `gains` is the dtype of weights and biases."""

    call: str
    kind: str
    shape: tuple
    stream: torch.dtype = torch.float32
    branch: torch.dtype = torch.float32
    gains: torch.dtype = torch.float32
    weight: bool = True
    bias: bool = True
    mean: float = 0.0

    @property
    def results(self):
        return CALLS[self.call].results

    def inputs(self, seed=0):
        """Random tensors by name; the gains are not near 1, so that a forgotten one shows."""
        generator = torch.Generator().manual_seed(seed)

        def random(shape, dtype, mean=0.0):
            return (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(DEVICE, dtype)

        tensors = {"x": random(self.shape, self.stream, self.mean)}
        if CALLS[self.call].is_join:
            tensors["s"] = random(self.shape, self.branch, self.mean)
        for norm in CALLS[self.call].norms:
            if self.weight:
                tensors[f"{norm}_weight"] = random(self.shape[-1:], self.gains)
            if self.bias and self.kind == "layernorm":
                tensors[f"{norm}_bias"] = random(self.shape[-1:], self.gains)
        return tensors

    def gradients(self, seed=1, used=None):
        """Random gradients for the results that are used."""
        generator = torch.Generator().manual_seed(seed)
        dtypes = {"r": self.stream, "h": self.branch if CALLS[self.call].want_sum else self.stream}
        return {
            name: torch.randn(self.shape, generator=generator, dtype=torch.float64).to(DEVICE, dtypes[name])
            for name in used or self.results
        }


def strided(t, layout):
    """The same values under other strides."""
    if layout == "transposed":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        return torch.cat([t, t + 1, t], -1)[..., : t.shape[-1]]
    if layout == "offset":
        return torch.cat([t.flatten()[:3], t.flatten()])[3:].view(t.shape)
    return t


def call(case, tensors, functions=kernels, eps=EPS, **how):
    """The results by name, from `functions` with norm and join: those of `kernels` run Triton unless told otherwise."""
    how = ({"impl": "triton"} if functions is kernels else {}) | how
    gains = (tuple(tensors.get(f"{norm}_{part}") for part in ("weight", "bias")) for norm in ("out", "then"))
    x = tensors["x"]
    s = tensors.get("s", x if x.dtype == torch.float64 else x.to(case.branch))  # a norm looks at its dtype
    results = CALLS[case.call](functions, x, s, *gains, kind=case.kind, eps=eps, **how)
    return dict(zip(case.results, results, strict=True))


textbook = partial(call, functions=PYTORCH)


def run(function, case, tensors, gradients, **how):
    """Results, and the gradients of every input under the name d<input>. `tensors` are not touched."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    results = function(case, leaves, **how)
    torch.autograd.backward([results[name] for name in gradients], list(gradients.values()))
    found = {name: t.detach() for name, t in results.items()}
    return found | {"d" + name: t.grad for name, t in leaves.items() if t.grad is not None}


def run_exactly(case, tensors, gradients, eps=EPS):
    """The textbook's results in float64."""
    double = [{name: t.double() for name, t in group.items()} for group in (tensors, gradients)]
    return run(textbook, case, *double, eps=eps)


def assert_accurate(case, *, impl="triton", tensors=None, gradients=None, used=None, eps=EPS):
    """Against float64, at most twice PyTorch's own error in the same dtypes, and a small constant."""
    tensors = tensors or case.inputs()
    gradients = gradients or case.gradients(used=used)
    exact = run_exactly(case, tensors, gradients, eps=eps)
    pytorch = run(textbook, case, tensors, gradients, eps=eps)
    ours = run(call, case, tensors, gradients, impl=impl, eps=eps)
    assert ours.keys() == pytorch.keys() == exact.keys()
    atol = max(ATOL[dtype] for dtype in (case.stream, case.branch, case.gains))
    for name, truth in exact.items():
        assert ours[name].dtype == pytorch[name].dtype, name
        assert ours[name].shape == truth.shape, name
        error, allowed = (worst(other[name], truth) for other in (ours, pytorch))
        assert error <= 2 * allowed + atol, f"{name} is off by {error:.2e}, PyTorch by {allowed:.2e}: {case}"


def worst(value, truth):
    return (value.double() - truth).abs().max().item() if truth.numel() else 0.0

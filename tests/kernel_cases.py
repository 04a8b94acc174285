"""What the kernels' tests share: inputs, the textbook's answer, and the rule for how far off one may be."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUNCTIONS = ("norm", "add_norm", "add_norm_no_sum", "norm_add", "norm_add_norm")
ATOL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One call: which function on which tensors. `gains` is the dtype of weights and biases."""

    function: str
    kind: str
    shape: tuple
    stream: torch.dtype = torch.float32
    branch: torch.dtype = torch.float32
    gains: torch.dtype = torch.float32
    bias: bool = True
    mean: float = 0.0

    @property
    def outputs(self):
        return {"norm": "y", "add_norm_no_sum": "y", "norm_add": "r"}.get(self.function, "ry")

    def inputs(self, seed=0):
        """Random tensors by name; the gains are not near 1, so that a forgotten one shows."""
        generator = torch.Generator().manual_seed(seed)

        def random(shape, dtype, mean=0.0):
            return (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(DEVICE, dtype)

        tensors = {"x": random(self.shape, self.stream, self.mean)}
        if self.function != "norm":
            tensors["s"] = random(self.shape, self.branch, self.mean)
        prefixes = ("out_", "") if self.function == "norm_add_norm" else ("",)
        for prefix in prefixes:
            tensors[prefix + "weight"] = random(self.shape[-1:], self.gains)
            if self.bias and self.kind == "layernorm":
                tensors[prefix + "bias"] = random(self.shape[-1:], self.gains)
        return tensors

    def gradients(self, seed=1, outputs=None):
        """Random gradients for the outputs that are used."""
        generator = torch.Generator().manual_seed(seed)
        dtypes = {"r": self.stream, "y": self.branch}
        used = self.outputs if outputs is None else outputs
        return {
            name: torch.randn(self.shape, generator=generator, dtype=torch.float64).to(DEVICE, dtypes[name])
            for name in used
        }


def call(case, tensors, impl="triton", eps=EPS, out_dtype=None):
    """The outputs of kernels.<function>, by name."""
    t = tensors
    settings = {"kind": case.kind, "eps": eps, "impl": impl}
    weight, bias = t["weight"], t.get("bias")
    out_dtype = out_dtype or case.branch
    if case.function == "norm":
        return {"y": kernels.norm(t["x"], (weight, bias), out_dtype=out_dtype, **settings)}
    if case.function == "norm_add":
        return {"r": kernels.norm_add(t["x"], t["s"], weight, bias, **settings)}
    if case.function == "norm_add_norm":
        gains = t["out_weight"], t.get("out_bias"), weight, bias
        r, y = kernels.norm_add_norm(t["x"], t["s"], *gains, out_dtype=out_dtype, **settings)
        return {"r": r, "y": y}
    want_sum = case.function == "add_norm"
    r, y = kernels.add_norm(t["x"], t["s"], weight, bias, out_dtype=out_dtype, want_sum=want_sum, **settings)
    return {"r": r, "y": y} if want_sum else {"y": y}


def textbook(case, tensors, eps=EPS, out_dtype=None):
    """The same from PyTorch's own functions and autograd, in the tensors' dtypes or in float64."""

    def normalize(v, prefix=""):
        v = v if v.dtype == torch.float64 else v.float()
        weight = tensors[prefix + "weight"].to(v.dtype)
        if case.kind == "rmsnorm":
            return F.rms_norm(v, weight.shape, weight, eps)
        bias = tensors.get(prefix + "bias")
        return F.layer_norm(v, weight.shape, weight, None if bias is None else bias.to(v.dtype), eps)

    x, s = tensors["x"], tensors.get("s")
    out_dtype = out_dtype or (torch.float64 if x.dtype == torch.float64 else case.branch)
    if case.function == "norm":
        return {"y": normalize(x).to(out_dtype)}
    if case.function == "norm_add":
        return {"r": (x + normalize(s)).to(x.dtype)}
    branch = normalize(s, "out_") if case.function == "norm_add_norm" else s
    r = (x + branch).to(x.dtype)
    y = normalize(r).to(out_dtype)
    return {"y": y} if case.function == "add_norm_no_sum" else {"r": r, "y": y}


def run(function, case, tensors, gradients, **options):
    """Outputs, and the gradients of every input under the name d<input>. `tensors` are not touched."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    outputs = function(case, leaves, **options)
    torch.autograd.backward([outputs[name] for name in gradients], list(gradients.values()))
    results = {name: t.detach() for name, t in outputs.items()}
    return results | {"d" + name: t.grad for name, t in leaves.items() if t.grad is not None}


def run_exactly(case, tensors, gradients, eps=EPS):
    """The textbook's results in float64."""
    double = [{name: t.double() for name, t in group.items()} for group in (tensors, gradients)]
    return run(textbook, case, *double, eps=eps)


def assert_accurate(case, *, impl="triton", tensors=None, gradients=None, outputs=None, eps=EPS):
    """Against float64, at most twice PyTorch's own error in the same dtypes, and a small constant."""
    tensors = tensors or case.inputs()
    gradients = gradients or case.gradients(outputs=outputs)
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

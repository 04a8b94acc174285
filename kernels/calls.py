"""The calls that a model makes of `norm` and `join`, by placement: what aot compiles, bench times and tests check."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Call:
    """One call, and the bytes per element that it must move.

    The two numbers are for a stream in bfloat16 and in float32, beside a branch in bfloat16: every input is read
    once, every output written once.
    """

    norms: tuple[str, ...]
    """Those of `out` and `then`."""
    forward: tuple[int, int]
    backward: tuple[int, int] | None
    """None where autograd passes the gradient of the sum on, without a kernel of ours."""
    is_join: bool = True
    want_sum: bool = True
    a: float = 1.0
    b: float = 1.0

    @property
    def results(self) -> str:
        """Which of r and h the kernel writes."""
        return ("r" if self.is_join and self.want_sum else "") + ("h" if "then" in self.norms else "")

    def __call__(self, functions, x: Tensor, s: Tensor, out, then, **how) -> list[Tensor]:
        """These results from functions.norm or functions.join. `out` and `then` are gains, if need be unused.

        h is what the next branch reads and has its dtype, except where h replaces the stream.
        """
        if not self.is_join:
            return [functions.norm(x, then, out_dtype=s.dtype, **how)]
        gains = {"out": out, "then": then}
        norms = {name: gains[name] if name in self.norms else None for name in gains}
        out_dtype = s.dtype if self.want_sum else x.dtype
        settings = {"a": self.a, "b": self.b, "out_dtype": out_dtype, "want_sum": self.want_sum}
        r, h = functions.join(x, s, **norms, **settings, **how)
        return [{"r": r, "h": h}[name] for name in self.results]


FACTORS = {"a": 1.5, "b": 0.75}
OUT, THEN, BOTH = ("out",), ("then",), ("out", "then")

# Where dx and ds have one dtype and no factors tell them apart, they are one tensor. Without N_then dx is a dr.
CALLS = {
    "norm": Call(THEN, (4, 6), (6, 10), is_join=False),  # x -> h           dh, x -> dx
    "none": Call((), (6, 10), None),  #                    x, s -> r
    "pre": Call(THEN, (8, 12), (8, 16)),  #                x, s -> r, h     dh, dr, r -> dx, ds
    "post": Call(THEN, (6, 10), (8, 16), want_sum=False),  # x, s -> h      dh, x, s -> dx, ds
    "output": Call(OUT, (6, 10), (6, 8)),  #               x, s -> r        dr, s -> ds
    "sandwich": Call(BOTH, (8, 12), (12, 18)),  #          x, s -> r, h     dh, dr, r, s -> dx, ds
    "out_post": Call(BOTH, (6, 10), (10, 16), want_sum=False),  # x, s -> h  dh, x, s -> dx, ds
    "scaled_pre": Call(THEN, (8, 12), (10, 16), **FACTORS),
    "scaled_post": Call(THEN, (6, 10), (10, 16), want_sum=False, **FACTORS),
    "scaled_output": Call(OUT, (6, 10), (8, 12), **FACTORS),  #             dr, s -> dx, ds
    "scaled_sandwich": Call(BOTH, (8, 12), (12, 18), **FACTORS),
    "scaled_out_post": Call(BOTH, (6, 10), (10, 16), want_sum=False, **FACTORS),
}

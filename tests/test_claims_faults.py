"""Breaking the implementation on purpose makes the claims about it fail."""

import pytest
import torch.nn.functional as F

import kernels
import model
from configs import OptimConfig
from kernels import eager, reference
from tools import fold
from tools.claims import parameters, values
from tools.claims.page import check_claim
from training import optimizer


def breaks(function):
    """A wrong `normalize`: a row of x, its weight, bias, kind and eps."""

    def normalize(x, gain, kind, eps):
        weight, bias = gain
        y = function(x, kind, eps) * weight.to(x.dtype)
        return y if bias is None else y + bias.to(x.dtype)

    return normalize


def centred(x, kind):
    return x - x.mean(-1, keepdim=True) if kind == "layernorm" else x


def moments(x, kind, eps):
    mean = x.mean(-1, keepdim=True) if kind == "layernorm" else 0
    return (x - mean) * (x.square().mean(-1, keepdim=True) - mean**2 + eps).rsqrt()


def over_time(x, kind, eps):
    c = centred(x, kind)
    return c * (c.square().mean((-2, -1), keepdim=True) + eps).rsqrt()


def in_the_input_dtype(x, kind, eps):
    c = centred(x, kind)
    return c * (c.square().mean(-1, keepdim=True) + eps).rsqrt()


def eps_outside(x, kind, eps):
    x = reference.promote(x)
    c = centred(x, kind)
    return c / (c.square().mean(-1, keepdim=True).sqrt() + eps)


def unbiased(x, kind, eps):
    x = reference.promote(x)
    c = centred(x, kind)
    return c * (c.square().sum(-1, keepdim=True) / (x.shape[-1] - 1) + eps).rsqrt()


def never_centred(x, kind, eps):
    return in_the_input_dtype(reference.promote(x), "rmsnorm", eps)


def always_centred(x, kind, eps):
    return in_the_input_dtype(reference.promote(x), "layernorm", eps)


def statistics_detached(x, kind, eps):
    x = reference.promote(x)
    c = centred(x, kind)
    return c * (c.square().mean(-1, keepdim=True) + eps).rsqrt().detach()


def absolute(x, kind, eps):
    return in_the_input_dtype(reference.promote(x), kind, eps).abs()


NORMS = {
    over_time: (2,),
    never_centred: (3, 4, 5, 10, 11, 12),
    always_centred: (3, 4, 5, 12, 13),
    unbiased: (5,),
    absolute: (5, 6),
    in_the_input_dtype: (7,),
    moments: (8,),
    eps_outside: (11, 12),
    statistics_detached: (11, 12),
}


def failing(*numbers):
    """Those of the claims that fail now; one that raises has failed."""
    return {n for n in numbers if fails(n)}


def fails(number: int) -> bool:
    try:
        return check_claim(number).verdict == "FAIL"
    except (RuntimeError, AssertionError, KeyError, ValueError):
        return True


@pytest.mark.parametrize("function", NORMS, ids=lambda f: f.__name__)
def test_a_wrong_norm_fails(monkeypatch, function):
    monkeypatch.setattr(eager, "normalize", breaks(function))
    assert failing(*NORMS[function]) == set(NORMS[function])


def join_otherwise(monkeypatch, wrong):
    """Joins give what `wrong` gives, or where that is None what they should."""
    whole = model.Join.forward
    monkeypatch.setattr(model.Join, "forward", lambda self, x, s: wrong(self, x, s) or whole(self, x, s))


def half_the_update(monkeypatch):
    whole = model.Join.forward
    monkeypatch.setattr(model.Join, "forward", lambda self, x, s: whole(self, x, s / 2))


def pre_where_post_was_asked_for(monkeypatch):
    join_otherwise(monkeypatch, lambda join, x, s: (x + s, join.post_norm(x + s)) if join.post_norm else None)


def post_where_pre_was_asked_for(monkeypatch):
    join_otherwise(monkeypatch, lambda join, x, s: (join.next_norm(x + s),) * 2 if join.next_norm else None)


def sandwich_without_its_inner_norm(monkeypatch):
    join_otherwise(monkeypatch, lambda join, x, s: (x + join.out_norm(s),) * 2 if join.out_norm else None)


def no_final_norm(monkeypatch):
    whole = model.next_norm

    def inner_only(config, branch):
        return None if branch == 2 * config.n_layer else whole(config, branch)

    monkeypatch.setattr(model, "next_norm", inner_only)


def sums_gradient_before_the_jacobian(monkeypatch):
    def backward_of_sum(dr, dh, r, then, kind, eps):
        dh = dh if dr is None else dh + dr
        return (dh, None) if then is None else reference.normalize_backward(dh, r, then, kind, eps)

    monkeypatch.setattr(reference, "backward_of_sum", backward_of_sum)


def gradient_without_the_projection(monkeypatch):
    def normalize_backward(dy, x, gain, kind, eps):
        xh, rstd = reference.standardize(x, kind, eps)
        weight, bias = gain
        dbias = None if bias is None else reference.over_rows(dy)
        return rstd * dy * weight, (reference.over_rows(dy * xh), dbias)

    monkeypatch.setattr(reference, "normalize_backward", normalize_backward)


def any_eps_is_taken(monkeypatch):
    monkeypatch.setattr(kernels, "check", lambda *args, **gains: None)


def attention_sees_the_future(monkeypatch):
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *qkv, **how: attend(*qkv, **how | {"is_causal": False})
    )
    monkeypatch.setattr(values, "COMBINATIONS", values.COMBINATIONS[::40])


def decay_everywhere(monkeypatch, rate):
    monkeypatch.setattr(
        optimizer, "decay_rates", lambda model, _: dict.fromkeys(dict(model.named_parameters()), rate)
    )


def everything_decays(monkeypatch):
    decay_everywhere(monkeypatch, OptimConfig().weight_decay)


def nothing_decays(monkeypatch):
    decay_everywhere(monkeypatch, 0.0)


def keel_without_its_inner_norm(monkeypatch):
    join_otherwise(
        monkeypatch,
        lambda join, x, s: (join.post_norm(x + s),) * 2 if join.post_norm and join.next_norm else None,
    )


def frozen_gains(monkeypatch):
    build = model.Norm.__init__

    def frozen(self, *args):
        build(self, *args)
        self.weight.requires_grad_(False)

    monkeypatch.setattr(model.Norm, "__init__", frozen)


def fold_forgets_the_bias(monkeypatch):
    whole = fold.into_readers
    monkeypatch.setattr(
        fold, "into_readers", lambda w, linears, gain, shift: whole(w, linears, gain, 0 * shift)
    )


def fold_takes_post(monkeypatch):
    monkeypatch.setattr(parameters, "fold", lambda model: fold.finished(model.config, fold.untied(model), []))


def mlp_is_not_projected(monkeypatch):
    whole = fold.last_linear
    monkeypatch.setattr(fold, "last_linear", lambda branch: whole(0) if branch % 2 else whole(branch))


def batchnorm_tracks_nine_tenths(monkeypatch):
    monkeypatch.setattr(model.BatchNorm, "momentum", 0.9)


def batchnorm_evaluates_by_the_batch(monkeypatch):
    whole = model.BatchNorm.forward

    def forward(self, x, out_dtype=None):
        was, self.training = self.training, True
        y = whole(self, x, out_dtype)
        self.training = was
        return y

    monkeypatch.setattr(model.BatchNorm, "forward", forward)


FAULTS = {
    half_the_update: (12, 13, 14),
    pre_where_post_was_asked_for: (10, 12),
    post_where_pre_was_asked_for: (10, 12),
    sandwich_without_its_inner_norm: (12,),
    no_final_norm: (20,),
    sums_gradient_before_the_jacobian: (12,),
    gradient_without_the_projection: (12,),
    any_eps_is_taken: (9,),
    attention_sees_the_future: (1,),
    keel_without_its_inner_norm: (12,),
    everything_decays: (19,),
    nothing_decays: (19,),
    frozen_gains: (19,),
    fold_forgets_the_bias: (20, 22),
    fold_takes_post: (20,),
    mlp_is_not_projected: (22,),
    batchnorm_tracks_nine_tenths: (21,),
    batchnorm_evaluates_by_the_batch: (20, 21),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_fails(monkeypatch, fault):
    fault(monkeypatch)
    assert failing(*FAULTS[fault]) == set(FAULTS[fault])

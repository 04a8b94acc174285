"""Every claim holds, and no longer holds when what it is about is broken."""

import re

import pytest
import torch.nn.functional as F

import kernels
import model
from configs import command_line
from data import ensure_prepared
from kernels import aot, bench, eager, reference
from tools import fold
from tools.claims import __main__ as claims
from tools.claims import cost, experiments, growth, logits, page, parameters, warmup
from tools.claims import outcome as outcomes
from tools.claims.claim import Claim, at_least, at_most, control, near
from tools.claims.outcome import (
    CLAIMS,
    DOCS,
    EXPERIMENTS,
    NUMBERS,
    as_text,
    check_claim,
    judge_experiment,
    picture_of,
    record_of,
)
from training import optimizer

SLOW = {24}  # compiles every kernel


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CLAIMS]
)
def test_claim_holds(number):
    outcome = check_claim(number)
    if outcome.verdict == "skipped":
        pytest.skip(outcome.note)
    assert [check for check in outcome.checks if not check.holds] == []
    assert any(check.control for check in outcome.checks) or CLAIMS[number].of_this_machine


def test_the_claims_are_numbered_without_gaps():
    assert list(range(1, 26)) == NUMBERS


# ---- what a check is, and what is made of it


def test_nothing_agrees_with_nan():
    nan = float("nan")
    checks = [
        near("", nan, nan, 1),
        at_most("", nan, 1),
        at_least("", nan, 1),
        near("", [0.0, nan], [0, 0], 1),
    ]
    assert not any(check.agrees for check in checks)
    assert all(control(check).holds for check in checks)


def test_a_control_that_agrees_fails_its_claim(monkeypatch):
    def measure():
        yield at_most("right", 0, 1)
        yield control(at_most("wrong", 0, 1))

    monkeypatch.setitem(CLAIMS, 1, Claim(1, "A claim.", measure))
    outcome = check_claim(1)
    assert outcome.verdict == "FAIL"
    assert "CONTROL AGREES  wrong" in as_text(outcome)
    assert "**agrees, and must not**" in page.as_markdown([outcome])


def test_a_claim_that_cannot_be_checked_says_why(monkeypatch):
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    outcome = check_claim(24)
    assert outcome.verdict == "skipped"
    assert "Linux only" in as_text(outcome)


def test_the_share_of_a_copy_is_bytes_over_time(monkeypatch):
    """With one second for everything, a copy of n float32 moves 8 n bytes and each join its limit of n."""
    monkeypatch.setattr(bench, "GPU_ELEMENTS", 4 * cost.WIDTH)
    monkeypatch.setattr(bench, "interleaved", lambda prepares, *_: dict.fromkeys(prepares, 1.0))
    limits = {f: aot.LIMITS[f, "forward"][0] / 8 for f in aot.FUNCTIONS}
    assert cost.share_of_copy("cpu") == pytest.approx(limits)


@pytest.mark.parametrize(("argv", "code"), [("--only 5", 0), ("--only 5,6", 1), ("--quick --only 6", 1)])
def test_the_exit_code_tells_whether_a_claim_failed(monkeypatch, capsys, argv, code):
    monkeypatch.setitem(CLAIMS, 6, Claim(6, "Claim 6.", lambda: [at_most("x", 2, 1)]))
    with pytest.raises(SystemExit) as stop:
        claims.main(argv.split())
    assert stop.value.code == code
    assert ("NOT SO  x: 2, expected <= 1" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--only 26", "--only names '26', but the claims are 1 to 25"),
        ("--only 1,x", "--only names 'x'"),
        ("--only 1,", "--only names ''"),
        ("--jobs 0", "--jobs is 0; it must be at least 1"),
        ("--quik", "--quik"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, argv, says):
    with pytest.raises(SystemExit) as stop:
        claims.main(argv.split())
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


# ---- the experiments, on their record


def test_an_experiment_off_record_is_skipped(monkeypatch, tmp_path):
    monkeypatch.setattr(outcomes, "DOCS", tmp_path)
    assert judge_experiment(15).verdict == "skipped"


@pytest.mark.parametrize("number", EXPERIMENTS)
def test_the_record_belongs_to_the_experiment(number):
    rows = experiments.load(record_of(number))
    jobs = EXPERIMENTS[number].jobs
    assert [{name: row[name] for name in job} for job, row in zip(jobs, rows, strict=True)] == jobs


def exchanged(rows, name, one, other):
    """Rows in which two values of what a job varies have changed places."""
    places = {one: other, other: one}
    return [row | {name: places.get(row[name], row[name])} for row in rows]


@pytest.mark.parametrize(
    ("number", "name", "one", "other"),
    [
        (15, "placement", "pre", "post"),
        (16, "placement", "pre", "post"),
        (17, "variant", "post", "post, DeepNorm"),
        (18, "qk_norm", "off", "head"),
    ],
)
def test_other_numbers_are_judged_otherwise(number, name, one, other):
    rows = experiments.load(record_of(number))
    before, after = (judge_experiment(number, r) for r in (rows, exchanged(rows, name, one, other)))
    assert sum(not c.holds for c in after.checks) > sum(not c.holds for c in before.checks)
    assert after.verdict == "not shown"
    assert "not borne out here by" in page.as_markdown([after])


def test_numbers_survive_the_record(tmp_path):
    rows = [{"seed": 1, "loss": [1.234567, float("nan")], "final": float("inf"), "variant": "post"}]
    experiments.save(tmp_path / "docs" / "1.json", [experiments.rounded(row) for row in rows])
    kept = {"seed": 1, "loss": [1.2346, None], "final": None, "variant": "post"}
    assert experiments.load(tmp_path / "docs" / "1.json") == [kept]


@pytest.mark.slow
@pytest.mark.parametrize("number", EXPERIMENTS)
def test_an_experiment_runs(monkeypatch, number):
    """One job, shortened, gives what the record has, in the shape of the shortened run."""
    monkeypatch.setattr(growth, "LOOKED_AT", (0, 1, 2))
    monkeypatch.setattr(warmup, "STEPS", 25)
    monkeypatch.setattr(logits, "STEPS", 25)
    experiment, recorded = EXPERIMENTS[number], experiments.load(record_of(number))[0]
    ensure_prepared(experiments.DATASET)
    job = experiment.jobs[0]
    assert (job | experiment.work(job)).keys() == recorded.keys()


# ---- the pages


def test_the_page_is_that_of_the_claims():
    """Generated from these claims: the sentences, in order, and each experiment's outcome on its record."""
    text = (DOCS / "claims.md").read_text(encoding="utf-8")
    sentences = {n: found.sentence for n, found in (CLAIMS | EXPERIMENTS).items()}
    assert re.findall(r"^### (\d+)\. (.*)$", text, re.M) == [(str(n), sentences[n]) for n in NUMBERS]
    for number in EXPERIMENTS:
        assert page.section(judge_experiment(number)) in text
        assert picture_of(number).exists()


def test_every_command_on_the_teaching_page_is_one():
    text = (DOCS / "norms.md").read_text(encoding="utf-8")
    commands = re.findall(r"`(python [^`]*)`", text)
    shown = set()
    for command in commands:
        program, *argv = command.split(" ", 3)[2:]
        assert program == "tools.claims"
        shown.update(claims.selected(command_line(claims.Options, argv[0].split(), program)))
    assert shown == set(NUMBERS)
    _, *paragraphs = (p for p in re.split(r"\n\s*\n", text) if re.match(r"[A-Z]", p))
    without = [p for p in paragraphs if not re.search(r"(`|:)$", p)]
    assert without == []
    assert {file.name for file in (DOCS / "img").glob("claims_*")} == set(
        re.findall(r"claims_\d+\.png", text)
    )


# ---- breaking the implementation: each of these makes the claims it names fail


def breaks(function):
    """A wrong `normalize`: a row of x, its weight, bias, kind and eps."""

    def normalize(x, weight, bias, kind, eps):
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
    except (RuntimeError, AssertionError, KeyError):
        return True


@pytest.mark.parametrize("function", NORMS, ids=lambda f: f.__name__)
def test_a_wrong_norm_fails(monkeypatch, function):
    monkeypatch.setattr(eager, "normalize", breaks(function))
    assert failing(*NORMS[function]) == set(NORMS[function])


def half_the_update(monkeypatch):
    whole = model.PreJoin.forward
    monkeypatch.setattr(model.PreJoin, "forward", lambda self, x, s: whole(self, x, s / 2))


def pre_where_post_was_asked_for(monkeypatch):
    monkeypatch.setattr(model, "PostJoin", model.PreJoin)


def post_where_pre_was_asked_for(monkeypatch):
    monkeypatch.setattr(model, "PreJoin", model.PostJoin)


def sandwich_without_its_inner_norm(monkeypatch):
    monkeypatch.setattr(model.SandwichJoin, "forward", model.OutputJoin.forward)


def no_final_norm(monkeypatch):
    class Bare(model.PreJoin):
        def forward(self, x, s):
            return x + s, x + s

    whole = model.joins

    def joins(config):
        made = whole(config)
        made[-1] = Bare(config)
        return made

    monkeypatch.setattr(model, "joins", joins)


def sums_gradient_before_the_jacobian(monkeypatch):
    def backward_of_sum(dr, dy, r, weight, kind, eps):
        dy = dy if dr is None else dy + dr
        return reference.standardize_backward(dy, r, weight, kind, eps)

    monkeypatch.setattr(reference, "backward_of_sum", backward_of_sum)


def gradient_without_the_projection(monkeypatch):
    def standardize_backward(dy, x, weight, kind, eps):
        xh, rstd = reference.standardize(x, kind, eps)
        return rstd * dy * weight, reference.over_rows(dy * xh), reference.over_rows(dy)

    monkeypatch.setattr(reference, "standardize_backward", standardize_backward)


def any_eps_is_taken(monkeypatch):
    monkeypatch.setattr(kernels, "check", lambda *args, **gains: None)


def attention_sees_the_future(monkeypatch):
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *qkv, **how: attend(*qkv, **how | {"is_causal": False})
    )


def everything_decays(monkeypatch):
    monkeypatch.setattr(
        optimizer, "decays", lambda model: dict.fromkeys(dict(model.named_parameters()), True)
    )


def frozen_gains(monkeypatch):
    build = model.Norm.__init__

    def frozen(self, dim, config):
        build(self, dim, config)
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
    everything_decays: (19,),
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

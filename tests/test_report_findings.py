"""Each sentence that the report says: runs that make it true, and runs of which it must not be said."""

import math

import pytest
from report_runs import write_run

from tools.report.findings import findings
from tools.report.runs import load_runs
from training.metrics import depth_names

STEPS = 100
FACTS = {"state": "done"}


def rows(steps: int = STEPS, **changes) -> list[dict]:
    """A calm run: every number the same in all rows. A function in `changes` gives a number by its step; `_` is `/`."""
    calm = {"train/loss": 2.5, "val/loss": 2.5, "train/lr": 1e-3, "train/grad_norm": 0.5}
    calm |= {f"residual_rms/{d}": 1.0 for d in depth_names(2)} | {
        f"grad_norm/{d}": 0.2 for d in depth_names(2)
    }
    calm |= {f"branch_rms/{d}": 0.3 for d in depth_names(2)[1:]} | {
        f"update_ratio/{d}": 1e-3 for d in depth_names(2)
    }
    calm |= {f"attn_logit_max/layer_0{i}": 8.0 for i in range(2)} | {
        f"attn_entropy/layer_0{i}": 5.0 for i in range(2)
    }
    calm |= {f"stream_grad_rms/{d}": 1e-4 for d in depth_names(2)}
    own = {key.replace("__", "/"): value for key, value in changes.items()}
    return [
        {"iter": step, "tokens": step}
        | {key: value(step) if callable(value) else value for key, value in (calm | own).items()}
        for step in range(steps + 1)
    ]


@pytest.fixture
def said(tmp_path):
    """What is said of runs: said(a=rows(...), b=(rows(...), {"seed": 2}, facts))."""

    def say(**runs) -> str:
        folders = []
        for name, run in runs.items():
            found, settings, facts = run if isinstance(run, tuple) else (run, {}, FACTS)
            optim = {"max_iters": STEPS, "warmup_iters": 10}
            model = {key: value for key, value in settings.items() if key != "seed"}
            seed = {"seed": settings.get("seed", 1)}
            folders.append(
                write_run(tmp_path / name, found, n_layer=2, optim=optim, run=seed, facts=facts, **model)
            )
        return "\n".join(findings(load_runs(folders)))

    return say


def test_of_a_calm_run_its_loss_is_said_and_nothing_else(said):
    assert said(a=rows()) == "a: validation loss 2.5000 at step 100, best 2.5000 at step 0."
    assert said(b=rows(val__loss=lambda s: 3 - s / 100)) == "b: validation loss 2.0000 at step 100, its best."


def test_who_is_best_and_by_how_much(said):
    text = said(
        a=rows(val__loss=2.6), b=rows(val__loss=2.5), c=(rows(val__loss=1.0), {}, {"state": "diverged"})
    )
    assert "b is best, validation loss 2.5000 at step 100; a +0.100." in text, (
        "one that diverged is not ranked"
    )
    assert "One seed each" in text


def test_the_ranking_is_at_the_last_step_that_all_were_evaluated_at(said):
    text = said(a=rows(val__loss=lambda s: 3 - s / 100), b=rows(50, val__loss=2.45))
    assert "b is best, validation loss 2.4500 at step 50; a +0.050." in text
    odd = [row for row in rows() if row["iter"] % 2]
    even = [row for row in rows() if row["iter"] % 2 == 0]
    assert "no step in common" in said(c=odd, d=even)


def test_losses_on_different_data_are_not_compared(said):
    text = said(a=(rows(), {"vocab_size": 50}, FACTS), b=(rows(val__loss=2.0), {"vocab_size": 60}, FACTS))
    assert "are on different data or vocabularies" in text
    assert "best" not in text


@pytest.mark.parametrize(
    ("others", "verdict"), [((2.9, 2.91, 2.92), "is beyond"), ((2.5, 2.56, 2.61), "is not beyond")]
)
def test_a_lead_is_held_against_what_seeds_alone_do(others, verdict, said):
    """Three seeds each, standard deviations of 0.01 to 0.06."""
    runs = {f"pre{i}": (rows(val__loss=2.48 + i / 100), {"seed": i}, FACTS) for i in range(3)}
    runs |= {
        f"post{i}": (rows(val__loss=v), {"seed": i, "placement": "post"}, FACTS) for i, v in enumerate(others)
    }
    text = said(**runs)
    assert "placement pre (3 seeds) is best, validation loss 2.4900 at step 100" in text
    assert (
        f"The lead of placement pre (3 seeds) over placement post (3 seeds), {sum(others) / 3 - 2.49:.4f}, {verdict}"
        in text
    )
    assert "One seed each" not in text


def test_the_reach_of_seeds_is_students(said):
    """Deviation 0.01 in both, three seeds each: t(4) = 2.78, times 0.01 sqrt(2 / 3)."""
    runs = {f"{p}{i}": (rows(val__loss=2.5 + i / 100 + (p == "post")), {"seed": i, "placement": p}, FACTS)
            for p in ("pre", "post") for i in range(3)}  # fmt: skip
    assert f"({2.78 * 0.01 * math.sqrt(2 / 3):.4f}: 95 % of Student's t with 4 degrees" in said(**runs)


def test_two_seeds_of_one_setting_give_their_mean_and_spread(said):
    text = said(a=(rows(val__loss=2.4), {"seed": 1}, FACTS), b=(rows(val__loss=2.6), {"seed": 2}, FACTS))
    assert "a (2 seeds): mean validation loss 2.5000 at step 100, standard deviation 0.1414." in text


def test_how_runs_ended(said):
    report = ["step 41 diverged: the loss is not finite", "  where    layer_01.mlp"]
    text = said(
        a=(rows(40), {}, {"state": "diverged", "report": report}),
        b=(rows(30), {}, {"state": "stopped"}),
        c=(rows(20), {}, {"state": "running"}),
        d=rows(),
    )
    assert "a: diverged at step 41, the loss is not finite." in text
    assert "Not at their end: b (stopped, at step 30 of 100)." in text
    assert "Not at their end: c (running, at step 20 of 100)." in text
    assert "d (" not in text


def test_spikes_that_training_reported(said):
    marked = [row | ({"spike": 1} if row["iter"] in (20, 60) else {}) for row in rows()]
    assert "a: training reported 2 loss spikes and went on; step 20, 60." in said(a=marked)


def test_a_row_that_stands_out(said):
    text = said(
        a=rows(
            train__loss=lambda s: 4.0 if s == 70 else 2.5, grad_norm__embed=lambda s: 30.0 if s == 60 else 0.2
        ),
        b=rows(
            train__loss=lambda s: 3.2 if s == 70 else 2.5, grad_norm__embed=lambda s: 1.9 if s == 60 else 0.2
        ),
        c=rows(
            train__loss=lambda s: 5.0 if s <= 10 else 2.5, grad_norm__embed=lambda s: 30.0 if s < 5 else 0.2
        ),
    )
    assert (
        "a: stands out from its neighbours: gradient norm by part 30 at embed, step 60 (usual there: 0.2), "
        in text
    )
    assert "training loss 4, step 70 (usual there: 2.5)" in text
    assert "b: stands" not in text
    assert "c: stands" not in text, "what was high before is no excursion"
    falls = rows(
        train__loss=lambda s: 2.5 + 5 * math.exp(-s / 8),
        grad_norm__embed=lambda s: 0.2 + 30 * math.exp(-s / 4),
    )
    shifts = rows(train__loss=lambda s: 2.5 + 2 * (s > 53), grad_norm__embed=lambda s: 0.2 + 9 * (s > 53))
    assert "stands" not in said(d=falls, e=shifts), "a steady fall and another level are none"


def test_numbers_that_were_not_finite(said):
    text = said(a=rows(train__grad_norm=lambda s: None if s in (30, 40) else 0.5), b=rows())
    assert "a: a number was not finite; first train/grad_norm, in 2 rows from step 30 on." in text
    assert "b: a number" not in text


def test_a_rate_that_rises_after_the_warm_up(said):
    text = said(
        a=rows(train__lr=lambda s: 1e-3 * min(s / 10, 1) if s < 50 else 3e-3),
        b=rows(train__lr=lambda s: 1e-3 * min(s / 10, 1, (101 - s) / 50)),
    )
    assert "a: the learning rate rises after its warm-up, from 0.001 to 0.003 at step 50." in text
    assert "b: the learning" not in text


def test_clipping(said):
    text = said(
        a=rows(train__grad_norm=lambda s: 2.0 if s > 25 else 0.5),
        b=rows(train__grad_norm=lambda s: 2.0 if s > 75 else 0.5),
    )
    assert "a: the gradient was clipped in 74% of the logged steps (grad_clip 1)." in text
    assert "b: the gradient" not in text


def test_overfitting(said):
    text = said(
        a=rows(train__loss=lambda s: 3 - s / 50, val__loss=lambda s: 2.5 + abs(s - 60) / 100),
        b=rows(train__loss=lambda s: 2 + s / 50, val__loss=lambda s: 2.5 + abs(s - 60) / 100),
        c=rows(train__loss=lambda s: 3 - s / 50, val__loss=lambda s: 2.5 + s % 2 / 10 + (s == 100) / 10),
    )
    assert (
        "a: overfits: validation loss has risen from 2.5000 at step 60 to 2.9000, while training loss fell."
        in text
    )
    assert "b: overfits" not in text, "its training loss rises, too"
    assert "c: overfits" not in text, "its evaluations move as much from one to the next"


ENTROPY = "below 2.374, two fifths of what attention to all tokens alike has,"
BRANCH = "below a thousandth of the median branch"


@pytest.mark.parametrize(
    ("key", "calm", "wild", "words", "limit"),
    [
        (
            "attn_logit_max__layer_01",
            49.0,
            267.0,
            "largest attention logit 267 at layer_01, step {}",
            "above 50",
        ),
        ("attn_entropy__layer_01", 2.5, 1.07, "attention entropy 1.07 at layer_01, step {}", ENTROPY),
        (
            "update_ratio__layer_01.mlp",
            0.09,
            0.2,
            "update 0.2 times the parameters at layer_01.mlp, step {}",
            "above 0.1",
        ),
        (
            "branch_rms__layer_01.mlp",
            1e-3,
            1e-4,
            "layer_01.mlp adds next to nothing, RMS 0.0001 at step {}",
            BRANCH,
        ),
    ],
)
def test_a_limit_is_passed(key, calm, wild, words, limit, said):
    text = said(
        a=rows(**{key: lambda s: wild if s > 60 else calm}),
        b=rows(**{key: lambda s: wild if s == 60 else calm}),
        c=rows(**{key: calm}),
    )
    assert f"a: {words.format(61)}; {limit} since step 61." in text
    assert f"b: {words.format(60)}; {limit} at 1 of 91 looks, the last at step 60." in text
    assert f"c: {words[:12]}" not in text


def test_a_limit_is_not_held_against_the_warm_up(said):
    assert "logit" not in said(a=rows(attn_logit_max__layer_00=lambda s: 90.0 if s < 10 else 8.0))


def test_extremes_that_are_far_apart(said):
    loud = {f"residual_rms__{d}": 1.0 + 3 * i for i, d in enumerate(depth_names(2))}
    gone = (rows(residual_rms__embed=1e9), {}, {"state": "diverged"})
    text = said(a=rows(**loud), b=rows(), c=rows(stream_grad_rms__embed=2e-5), gone=gone)
    assert (
        "Stream RMS at the end, largest of all depths: a 13 (layer_01.mlp), b 1 (embed), c 1 (embed)." in text
    )
    assert (
        "Stream gradient RMS at the end, least of all depths: c 2e-05 (embed), a 0.0001 (embed), b 0.0001 (embed)."
        in text
    )
    assert "Branch RMS" not in text
    assert "at the end" not in said(d=rows(**loud)), "one run has nobody to be compared with"


def test_what_is_true_of_many_runs_is_said_twice_and_the_others_are_named(said):
    text = said(**{name: rows(attn_logit_max__layer_01=60.0) for name in "abcd"})
    assert text.count("largest attention logit 60") == 2
    assert "Likewise: c, d." in text

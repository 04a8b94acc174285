"""Every claim holds, and no longer holds when what it is about is broken."""

import re

import pytest

import kernels
from base.cli import UserError
from base.flags import options
from data import ensure_prepared
from kernels import bench
from kernels.calls import CALLS
from tools.claims import __main__ as claims
from tools.claims import cost, experiments, page
from tools.claims.claim import Claim, at_least, at_most, control, near
from tools.claims.page import (
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
    monkeypatch.setattr(bench, "medians", lambda prepares, *_: dict.fromkeys(prepares, 1.0))
    limits = {name: call.forward[0] / 8 for name, call in CALLS.items()}
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
def test_a_mistake_is_one_sentence(argv, says):
    with pytest.raises(UserError) as told:
        claims.main(argv.split())
    assert says in str(told.value)
    assert "\n" not in str(told.value)


# ---- the experiments, on their record


def test_an_experiment_off_record_is_skipped(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "DOCS", tmp_path)
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
        (18, "lr", 1e-3, 1e-2),
    ],
)
def test_other_numbers_are_judged_otherwise(number, name, one, other):
    rows = experiments.load(record_of(number))
    before, after = (judge_experiment(number, r) for r in (rows, exchanged(rows, name, one, other)))
    failed_before, failed_after = ({c.what for c in o.checks if not c.holds} for o in (before, after))
    assert failed_after - failed_before
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
    monkeypatch.setattr(experiments, "LOOKED_AT", (0, 1, 2))
    monkeypatch.setattr(experiments, "STEPS", 25)
    monkeypatch.setattr(experiments, "LOGIT_STEPS", 25)
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
        shown.update(claims.selected(options(claims.Options, argv[0].split(), program)))
    assert shown == set(NUMBERS)
    _, *paragraphs = (p for p in re.split(r"\n\s*\n", text) if re.match(r"[A-Z]", p))
    without = [p for p in paragraphs if not re.search(r"(`|:)$", p)]
    assert without == []
    assert {file.name for file in (DOCS / "img").glob("claims_*")} == set(
        re.findall(r"claims_\d+\.png", text)
    )

"""What docs/extending.md says, done to a copy of the repository; and a kind of norm that comes from outside."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_model import assert_causal, build, tokens_and_targets
from textbook import NORMS_OF, PATTERNS
from tiny_runs import STEPS, assert_same_end, recipe, train

from base.cli import UserError
from configs import load_config
from model import GPT, NORMS, Norm
from tools.fold import fold, ln_to_rms
from training.checkpoint import load_model

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
EVERY_PLACEMENT = " ".join(NORMS_OF)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def apply(diff: str, root: Path) -> None:
    """Each hunk's lines before the change stand in the file exactly once; without any, the hunk goes to its end."""
    for file, hunks in re.findall(r"--- a/(\S+)\n\+\+\+ b/\S+\n(.*?)(?=--- a/|\Z)", diff, re.DOTALL):
        path = root / file
        text = path.read_text(encoding="utf-8")
        for hunk in re.split(r"@@.*@@\n", hunks)[1:]:
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if not line.startswith("+"))
            after = "".join(line[1:] for line in lines if not line.startswith("-"))
            assert not before or text.count(before) == 1, f"{file} has {text.count(before)} times:\n{before}"
            text = text.replace(before, after) if before else text + after
        path.write_text(text, encoding="utf-8")


def test_the_page(tmp_path):
    for name in ("base", "configs", "data", "kernels", "training", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.bin", "__pycache__"))
    for name in ("model.py", "train.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    diffs = blocks("diff")
    assert len(diffs) == 4
    for diff in diffs:
        apply(diff, tmp_path)
    [mine] = blocks("python")
    (tmp_path / "mine.py").write_text(mine, encoding="utf-8")

    def run(*words: str) -> str:
        how = {"cwd": tmp_path, "capture_output": True, "text": True, "encoding": "utf-8", "timeout": 600}
        done = subprocess.run([sys.executable, *words], **how)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-m", "data.prepare", "numbers", "--count", "20000")
    command = """mine.py configs/quickstart.toml --norm maxnorm --placement sandwich --qk-norm head
        --residual-scale upper_half --dataset numbers --n-layer 2 --n-embd 16 --n-head 2 --block-size 16
        --max-iters 3 --warmup-iters 1 --log-interval 1 --eval-tokens 200 --wandb disabled --device cpu"""
    said = run(*command.split())
    assert "maxnorm sandwich" in said
    rows = [json.loads(r) for r in (tmp_path / "out/quickstart/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 3
    for row in steps:
        assert row["train/perplexity"] == pytest.approx(
            torch.tensor(row["train/loss"]).exp().item(), rel=1e-5
        )
    assert rows[-1]["embedding_max"] > 0.02
    assert rows[-1]["gain/layer_01.mlp.out_norm.mean"] == pytest.approx(1.0, abs=0.1)


class MeanAbsolute(Norm):
    """x / mean |x|."""

    has_bias = False

    def normalize(self, x):
        return x / (x.abs().mean(-1, keepdim=True) + self.eps)


@pytest.fixture
def toy():
    NORMS["mean_absolute"] = MeanAbsolute
    yield "mean_absolute"
    NORMS.pop("mean_absolute", None)


def test_a_kind_from_outside_learns_in_every_placement(toy):
    tokens, targets = tokens_and_targets(batch=2)
    for placement in (*NORMS_OF, *PATTERNS):
        model = build(norm=toy, placement=placement, qk_norm="head", embed_norm=True)
        assert_causal(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        start = model(tokens, targets)[1].item()
        for _ in range(60):
            loss = model(tokens, targets)[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert model(tokens, targets)[1].item() < start / 3, placement


def test_a_kind_that_is_gone_is_refused_by_name(toy, tmp_path, capsys):
    with pytest.raises(SystemExit):
        load_config(["--help"])
    assert "mean_absolute}" in capsys.readouterr().out
    for convert in (fold, ln_to_rms):
        with pytest.raises(UserError, match=toy):
            convert(build(norm=toy))
    file = recipe(tmp_path)
    assert train(file, "--norm", toy, "--max-iters", 3, "--run-name", "mine") == 0
    model = load_model(tmp_path / "mine")
    del NORMS[toy]
    with pytest.raises(UserError, match=toy):
        load_model(tmp_path / "mine")
    with pytest.raises(UserError, match=f"norm is '?{toy}"):
        load_config([str(tmp_path / "mine" / "config.toml")])
    NORMS[toy] = MeanAbsolute
    assert isinstance(model, GPT)


@pytest.mark.parametrize(
    "norm", ["layernorm", "rmsnorm", "batchnorm", "dyt", "derf", "none", "mean_absolute"]
)
def test_every_kind_resumes_to_the_bit_in_every_placement(norm, toy, tmp_path):
    """Four layers with all eight placements, gains, biases, alphas and running statistics."""
    argv = (recipe(tmp_path), "--norm", norm, "--placement", EVERY_PLACEMENT, "--force-placement")
    argv += ("--n-layer", 4, "--schedule", "constant", "--probe-interval", STEPS // 2)
    assert train(*argv, "--run-name", "whole") == 0
    assert train(*argv, "--run-name", "tiny", "--max-iters", STEPS // 2) == 0
    assert train(*argv, "--run-name", "tiny", "--resume") == 0
    assert_same_end(tmp_path / "tiny", tmp_path / "whole")

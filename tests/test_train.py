"""train.py as a user runs it: what it leaves behind, and what it says to a mistake."""

import math
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_runs
import torch

import train
from base.cli import UserError
from configs import load_config
from data import load_tokenizer, open_dataset, prepare
from tools import sample
from training import parallel, setup
from training.checkpoint import load_model
from training.dynamics import fetch
from training.parallel import Runtime
from training.sampling import first_tokens
from training.setup import fit
from training.tracker import read_metrics
from training.trainer import Trainer

TEXT = "to be, or not to be, that is the question:\n" * 400
TINY = """
[model]
n_layer = 2
n_head = 2
n_embd = 32
block_size = 32
[optim]
max_iters = 120
batch_size = 8
micro_batch_size = 4
lr = 1e-2
min_lr = 1e-3
warmup_iters = 5
[run]
eval_interval = 40
log_interval = 20
eval_tokens = 512
wandb = "disabled"
"""


def python(*argv, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
    )


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """A folder with a recipe and a small data set of characters, prepared from text."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    files = ["--files", folder / "text.txt", "--tokenizer", "char", "--data-dir", folder]
    prepare.main(["text", "--name", "bard", *map(str, files)])
    (folder / "tiny.toml").write_text(
        f"{TINY}out_dir = '{folder}'\n[data]\ndataset = '{folder}/bard'\n", encoding="utf-8"
    )
    return folder


@pytest.fixture(scope="session")
def run(place) -> tuple[Path, str]:
    """(folder, what was printed) of one finished run, with wandb offline."""
    done = python("train.py", place / "tiny.toml", "--run-name", "first", "--wandb", "offline")
    assert done.returncode == 0, done.stderr
    return place / "first", done.stdout


def test_a_run_learns_and_says_so(run):
    folder, printed = run
    rows = read_metrics(folder / "metrics.jsonl")
    val = [row["val/loss"] for row in rows if "val/loss" in row]
    vocab = len(set(TEXT))
    assert val[0] == pytest.approx(math.log(vocab), abs=0.2)
    assert val[-1] < 0.5
    assert f"step 120/120  loss {rows[-1]['train/loss']:.4f}  val loss {val[-1]:.4f}" in printed
    assert "a sample:" in printed
    assert "to be" in printed.partition("a sample:")[2]
    assert f"python -m tools.sample {folder}" in printed
    assert f"{load_model(folder).n_params():,} parameters" in printed


def test_the_resolved_configuration_is_saved_and_repeats_the_run(run, place, capsys):
    folder = run[0]
    config = load_config([str(folder / "config.toml")])
    assert config.model.vocab_size == len(set(TEXT))
    assert config.model.dtype in ("float32", "bfloat16")
    again = tiny_runs.train(folder / "config.toml", "--run-name", "again", "--wandb", "disabled")
    assert again == 0, capsys.readouterr().err
    first, second = load_model(folder), load_model(place / "again")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(run):
    folder = run[0]
    before = (folder / "metrics.jsonl").read_bytes()
    refused = f"{folder} already holds a run; pass --resume, --overwrite or another --run-name"
    with pytest.raises(UserError, match=re.escape(refused)):
        train.main([str(folder / "config.toml")])
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_run_whose_vocabulary_cannot_be_fetched_ends_well_without_a_sample(place, monkeypatch, capsys):
    def fail(meta):
        raise UserError("the vocabulary could not be fetched")

    monkeypatch.setattr("data.dataset.load_tokenizer", fail)
    flags = ["--run-name", "offline", "--max-iters", "2", "--warmup-iters", "1", "--wandb", "disabled"]
    train.main([str(place / "tiny.toml"), *flags])
    printed = capsys.readouterr().out
    assert "no sample: the vocabulary could not be fetched\n\nwhere to look next" in printed


TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', and not a number from 1 up"),
        ({"LOCAL_RANK": "first"}, "LOCAL_RANK is 'first', and not a number from 0 up"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', and not a number from 1 up"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but it lacks RANK, MASTER_ADDR, MASTER_PORT"),
        (TWO | {"RANK": "2"}, "RANK is 2, with a WORLD_SIZE of 2"),
        (TWO | {"MASTER_PORT": "notaport"}, "MASTER_PORT is 'notaport', and not a number from 1 up"),
        (TWO | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; the highest port is 65535"),
        (
            TWO | {"MASTER_ADDR": "no.such.host.invalid"},
            "MASTER_ADDR is 'no.such.host.invalid', which is not found",
        ),
    ],
)
def test_an_environment_that_names_no_place_is_one_sentence(place, variables, says, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as stopped:
        train.main([str(place / "tiny.toml"), "--run-name", "nowhere"])
    assert says in str(stopped.value)


def test_a_port_that_is_taken_is_one_sentence(place, monkeypatch, capsys):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        for name, value in (TWO | {"MASTER_PORT": str(other.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        assert tiny_runs.train(place / "tiny.toml", "--run-name", "nowhere") == 2
    said = capsys.readouterr().err
    assert re.search(
        r"error: the environment's MASTER_PORT \d+ is taken by another program; \d+ is free\n$", said
    )


def test_a_process_that_waits_for_others_says_whom_it_waits_for(monkeypatch, capsys):
    def nobody_comes(url):
        time.sleep(0.5)
        raise torch.distributed.DistStoreError("timed out after 300s")

    monkeypatch.setattr(parallel, "PATIENCE", 0.01)
    monkeypatch.setattr(torch.distributed, "rendezvous", nobody_comes)
    for name, value in (TWO | {"RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="process 1 has met no process 0 at localhost:1"):
        parallel.join(torch.device("cpu"), 2)
    assert capsys.readouterr().err == "process 1 waits for process 0 at localhost:1 ...\n"


def test_each_process_takes_the_gpu_it_sees(monkeypatch):
    """All of a machine, each the one of its rank; or one each, as a job script deals them out."""
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for devices, local_rank in ((4, 2), (1, 2)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=devices: count)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        setup.own_gpu(local_rank)
    assert [device.index for device in taken] == [2, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"4 processes share 2 CUDA device\(s\); start at most 2 here"):
        setup.own_gpu(0)


def test_two_processes_on_one_gpu_are_refused(monkeypatch):
    found = ["GPU-1", "GPU-1"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda out, own, group: out.__setitem__(slice(None), found)
    )
    with pytest.raises(UserError, match=r"2 processes share 1 CUDA device\(s\); start one for each"):
        setup.check_gpus(Runtime(torch.device("cpu"), 0, 2))
    found[1] = "GPU-2"
    setup.check_gpus(Runtime(torch.device("cpu"), 0, 2))


def test_compile_without_a_c_compiler_is_refused(monkeypatch):
    monkeypatch.setattr(setup, "choose_device", lambda asked: "cuda")
    monkeypatch.setattr(setup, "own_gpu", lambda local_rank: torch.device("cpu"))
    monkeypatch.setattr(setup.kernels, "LAUNCHER_PROBLEM", "Triton needs a C compiler.")
    with pytest.raises(UserError, match="--compile: Triton needs a C compiler"):
        setup.start(load_config(["configs/shakespeare_char.toml", "--compile"]))


def test_post_norm_without_warm_up_is_warned_of(place, capsys):
    flags = ["--placement", "post", "--max-iters", "1", "--wandb", "disabled", "--run-name"]
    train.main([str(place / "tiny.toml"), *flags, "cold", "--warmup-iters", "0"])
    assert "warning: post-norm without a warm-up" in capsys.readouterr().out
    train.main([str(place / "tiny.toml"), *flags, "warm", "--max-iters", "2", "--warmup-iters", "1"])
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", "pulls all gains to 0; with --gain zero_centred"),
        ("--gain zero_centred", "pulls all gains to 1"),
        ("--gain none", "does nothing, as no norm has a gain"),
        ("--norm none", "does nothing, as no norm has a gain"),
    ],
)
def test_what_norm_decay_does_is_told(place, capsys, flags, says):
    argv = [str(place / "tiny.toml"), "--max-iters", "1", "--warmup-iters", "0", "--wandb", "disabled"]
    train.main([*argv, "--overwrite", "--norm-decay", "0.1", *flags.split()])
    assert f"warning: norm_decay {says}" in capsys.readouterr().out


def test_only_one_process_of_a_machine_reads_foreign_tokens_through(place, monkeypatch):
    config = load_config([str(place / "tiny.toml"), "--vocab-size", "5"])  # fewer than the data holds
    dataset = open_dataset(config.data.dataset)
    with pytest.raises(UserError, match="holds token id"):
        fit(config, dataset)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert fit(config, dataset) == config


def test_a_prompt_that_the_model_cannot_read_is_refused():
    """The byte tokenizer's separator is 256, its line break 10; the model knows fewer ids, as --vocab-size allows."""
    tokenizer = load_tokenizer({"name": "byte"})
    assert first_tokens(tokenizer, "", 257) == [256]
    assert first_tokens(tokenizer, "", 256) == [10]
    assert first_tokens(tokenizer, "", 5) == [0]
    assert first_tokens(tokenizer, "aA", 98) == [97, 65]
    with pytest.raises(UserError, match="the prompt has token 97, and the model knows ids below 97 only"):
        first_tokens(tokenizer, "aA", 97)


def test_sampling_is_seeded_and_knows_the_corpus(run, capsys):
    def draw(*flags):
        sample.main([str(run[0]), "--tokens", "60", "--prompt", "to be, or", *flags])
        return capsys.readouterr().out

    assert draw("--seed", "3") == draw("--seed", "3")
    assert draw("--temperature", "5", "--seed", "3") != draw("--temperature", "5", "--seed", "4")
    assert draw("--temperature", "0").startswith("to be, or not to be, that is the question")
    assert draw("--top-k", "1", "--temperature", "9") == draw("--temperature", "0")
    assert draw("--temperature", "1e-40") == draw("--temperature", "0")  # too small to divide by


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--block-size 100000", "a context of 100,000 tokens is longer than the training data"),
        ("--micro-batch-size 3", "batch_size 8 does not divide among one process of micro_batch_size 3"),
        ("--vocab-size 5", "--vocab-size"),
        ("--dataset nowhere", "nowhere"),
        ("--device cuda", "device is cuda, but torch"),
        ("--kernel triton", "--kernel triton"),
        ("--resume", "holds no run"),
        ("--init-from nowhere", "nowhere does not exist"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(place, flags, says, monkeypatch):
    if "cuda" in says and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    monkeypatch.setattr("kernels.INTERPRETED", False)
    with pytest.raises(UserError, match=re.escape(says)):
        train.main([str(place / "tiny.toml"), "--run-name", "bad", *flags.split()])
    assert not (place / "bad").exists()


def test_no_arguments_name_a_recipe_and_exit_with_2():
    done = python("train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: name a recipe, as in `python train.py configs/quickstart.toml`")
    assert done.stderr.count("\n") == 1


def test_nanogpt_tokens_need_a_vocabulary_and_their_range_is_checked(tmp_path, place):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        rng.integers(0, 65, 4000).astype("<u2").tofile(tmp_path / f"{split}.bin")
    flags = [str(place / "tiny.toml"), "--dataset", str(tmp_path), "--run-name", "foreign"]
    flags += ["--max-iters", "6", "--warmup-iters", "2"]
    for vocabulary, says in ((), "--vocab-size"), (("--vocab-size", "60"), "64"):
        with pytest.raises(UserError, match=says):
            train.main([*flags, *vocabulary])
    train.main([*flags, "--vocab-size", "65"])
    assert load_model(place / "foreign").config.vocab_size == 65


# ---- one step, in this process


def trainer(place, *flags) -> Trainer:
    config = load_config([str(place / "tiny.toml"), "--vocab-size", "40", "--dtype", "float32", *flags])
    return Trainer(config, Runtime(torch.device("cpu")), open_dataset(config.data.dataset))


def test_accumulation_changes_nothing(place):
    """The same losses, gradient norms and residual RMS, however the batch is cut."""
    whole, parts = (trainer(place, "--micro-batch-size", size) for size in ("8", "2"))
    for i in range(4):
        a, b = (fetch(t.step(i, True)) for t in (whole, parts))
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-4), key


def test_the_gradient_norm_is_the_one_before_clipping(place):
    clipped, free = trainer(place, "--grad-clip", "1e-3"), trainer(place, "--grad-clip", "0")
    a, b = (fetch(t.step(0, True)) for t in (clipped, free))
    assert a["train/grad_norm"] == b["train/grad_norm"] > 0.01
    model = trainer(place, "--micro-batch-size", "8").model
    model(*free.batches.batch(0, range(8)))[1].backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert b["train/grad_norm"] == pytest.approx(expected, rel=1e-5)


def test_clipping_scales_the_gradient_to_the_limit(place):
    """After one Adam step the mean is 0.1 of the gradient that was applied."""
    clipped = trainer(place, "--grad-clip", "0.01")
    clipped.step(0, False)
    applied = torch.cat([clipped.optimizer.state[p]["exp_avg"].flatten() for p in clipped.model.parameters()])
    assert applied.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_float16_scales_the_loss_and_an_overflow_only_skips(place):
    half = trainer(place, "--dtype", "float16")
    half.scale.scale.fill_(2.0**40)
    before = [p.detach().clone() for p in half.model.parameters()]
    half.step(0, True)
    assert half.scale.scale.item() == 2.0**39
    assert all(torch.equal(a, b) for a, b in zip(before, half.model.parameters(), strict=True))
    half.scale.scale.fill_(2.0**10)
    row = fetch(half.step(0, True))
    exact = trainer(place)
    expected = fetch(exact.step(0, True))
    assert row["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.02)
    assert not half.held
    assert not any(torch.equal(a, b) for a, b in zip(before, half.model.parameters(), strict=True))


def test_validation_is_a_token_mean_that_disturbs_nothing(place):
    t = trainer(place, "--dropout", "0.5")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    loss = t.evaluate()
    assert torch.equal(torch.get_rng_state(), state)
    assert t.model.training
    total = count = 0
    t.model.eval()
    with torch.no_grad():
        for i in range(len(t.windows)):
            tokens, targets = t.windows.batch(range(i, i + 1))
            each = t.model(tokens)[0].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
            total -= each[targets != -1].sum().item()
            count += (targets != -1).sum().item()
    assert count <= 512
    assert loss == pytest.approx(total / count, rel=1e-6)

"""FLOPs against the formula, the classes of a step's time, and the arithmetic of ratios."""

import json
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tiny_runs import recipe as tiny_recipe
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

from base import timing
from base.cli import UserError
from configs import load_config
from model import GPT, NORMS, PLACEMENTS
from tools.profile import __main__ as command
from tools.profile import classes, logging_cost
from tools.profile import steps as whole_steps
from tools.profile.classes import CLASSES, flops, time_by_class
from tools.profile.logging_cost import LoggingCost
from tools.profile.steps import Steps, steps_of
from training.clock import flops_per_token


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    threads = torch.get_num_threads()
    file = tiny_recipe(tmp_path_factory.mktemp("profile"))
    torch.set_num_threads(threads)
    return file


def steps(recipe, *flags) -> Steps:
    made = steps_of(load_config([str(recipe), *flags]))
    made()
    return made


def test_the_modes_are_what_train_py_runs(recipe, monkeypatch):
    """--kernel torch, neither flag, and --compile; nothing is compiled before the first step."""
    monkeypatch.setattr("shutil.which", lambda *_: "a compiler")
    config = load_config([str(recipe), "--dtype", "bfloat16", "--kernel", "torch", "--compile"])
    made = {name: steps.trainer.config for name, steps in classes.modes(config, compiled=True).items()}
    settings = {name: (c.model.kernel, c.run.compile) for name, c in made.items()}
    assert settings == {"torch": ("torch", False), "eager": ("auto", False), "compiled": ("auto", True)}


@pytest.mark.parametrize("dropout", ["0.1", "0"])  # attention by matrix products, and PyTorch's own
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_pytorchs_count_of_flops_is_the_formulas(recipe, mlp, dropout):
    """6 per weight and token, and 12 T per head feature: attention's square counted in full."""
    made = steps(recipe, "--dtype", "bfloat16", "--mlp", mlp, "--dropout", dropout)
    counted = flops(made)
    model = made.trainer.model
    config = model.config
    attention = 12 * config.n_layer * config.n_head * config.head_width * config.block_size
    assert counted["attention"] == attention * made.tokens
    assert counted["matrix products"] + counted["attention"] == flops_per_token(model) * made.tokens


@pytest.mark.parametrize(
    ("flags", "per_token"),
    [
        ("", 12 * 5 * 16 + 2 * 4 * 16),  # 5 norms and 4 adds of 16 features
        ("--qk-norm head", 12 * (5 + 4) * 16 + 2 * 4 * 16),  # queries and keys of 2 layers
        ("--qk-norm full --gain none --v-norm", 12 * (5 + 6) * 16 + 2 * 4 * 16),
        ("--qk-norm head --n-kv-head 1", 12 * (5 * 16 + 2 * (16 + 8)) + 2 * 4 * 16),
        ("--norm dyt", 2 * 4 * 16),
    ],
)
def test_norms_are_counted_by_hand(recipe, flags, per_token):
    config = load_config([str(recipe), "--norm", "rmsnorm", *flags.split()])
    with torch.device("meta"):
        assert classes.norm_flops(GPT(config.model)) == per_token


def test_a_step_counts_the_norms_of_its_tokens(recipe):
    made = steps(recipe)
    assert flops(made)["norms and joins"] == 8 * 16 * classes.norm_flops(made.trainer.model)


def test_every_class_takes_a_share_and_tracing_leaves_the_trainer_as_it_was(recipe):
    made = steps(recipe)
    before = set(vars(made.trainer))
    shares = time_by_class(made, 2)
    assert sum(shares.values()) == pytest.approx(1)
    assert set(shares) == set(CLASSES) - {"compiled"}
    assert set(vars(made.trainer)) == before


def test_backward_counts_as_the_forward_it_belongs_to(recipe):
    """Attention's backward runs bmm, and the norm's a product with a vector: neither is a `matrix product`."""
    made = steps(recipe, "--norm", "rmsnorm", "--dtype", "bfloat16")
    with classes.marked(made), torch.profiler.profile() as trace:
        made()
    owners = classes.forward_classes(trace.events())
    found = {}
    for event in trace.events():
        found.setdefault(event.name, set()).add(classes.class_of(event, owners))
    assert found["aten::bmm"] == {"attention"}
    assert found["CpuRMSNormBackward"] == {"norms and joins"}
    assert found["aten::mm"] >= {"matrix products"}
    assert found["aten::_fused_adamw_"] == {"optimizer"}


def test_a_kernel_on_the_gpu_counts_once_and_for_the_operator_that_started_it():
    """As a trace of CUDA lists them: the range, the operator in it, the kernel itself, and the range's copy."""

    def event(name, device_type, time, parent=None):
        return SimpleNamespace(
            name=name, device_type=device_type, self_device_time_total=time, cpu_parent=parent, sequence_nr=-1
        )

    CPU, CUDA = DeviceType.CPU, DeviceType.CUDA
    around = event("class: norms and joins", CPU, 0)
    trace = [around, event("nanonorm::forward", CPU, 3, around), event("kernel of Triton", CUDA, 3)]
    trace += [event("class: norms and joins", CUDA, 9), event("aten::_flash_attention_forward", CPU, 5)]
    trace += [event("aten::mm", CPU, 2), event("gemm", CUDA, 2)]
    found = classes.class_shares(trace, "self_device_time_total")
    assert found == {"norms and joins": 0.3, "attention": 0.5, "matrix products": 0.2}


def test_ratios_are_taken_within_a_turn():
    times = {"a": [1.0, 10.0, 2.0], "b": [2.0, 20.0, 2.0]}  # the machine was slow in the second turn
    table = timing.relative(times, "a")
    assert table["b"] == {"ratio": 0.5, "low": 0.5, "high": 0.75}
    assert table["a"]["ratio"] == 1


def test_the_contenders_take_turns():
    order = []

    def contender(name):
        def run() -> float:
            order.append(name)
            return float(len(order))

        return run

    times = timing.in_turn({name: contender(name) for name in "ab"}, 2, warm_up=1)
    assert "".join(order) == "abbaab"
    assert times == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_the_time_of_work_is_that_of_the_device(monkeypatch):
    """What is still queued before is not counted, and what is queued by the work is."""
    now, queued = 0.0, 5.0

    def work():
        nonlocal queued
        queued += 2.0

    def wait():
        nonlocal now, queued
        now, queued = now + queued, 0.0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    assert timing.seconds(work, wait) == 2.0


@pytest.mark.parametrize(("kind", "rate"), [("cuda", 800e12), ("mps", 14e12), ("cpu", 2e12)])
def test_the_rate_of_products_is_that_of_the_device_and_not_of_the_host(monkeypatch, kind, rate):
    """Where starting a product and waiting for it take 25 microseconds, as on a GPU: within a tenth."""

    def seconds(work, wait):
        with FlopCounterMode(display=False) as counter:
            work()
        return 25e-6 + counter.get_total_flops() / rate

    monkeypatch.setattr(whole_steps, "seconds", seconds)
    randn = torch.randn
    with mock.patch("torch.randn", lambda *shape, device: randn(*shape, device="meta")):
        found = whole_steps.matrix_rate(torch.device(kind), torch.bfloat16)
    assert 0.9 * rate < found <= rate


@pytest.fixture(scope="module")
def whole_command(recipe):
    """The command in a process of its own, as the profiler's notes are settled once."""
    files = ["--json", str(recipe.with_name("p.json")), "--picture", str(recipe.with_name("p.png"))]
    argv = [str(recipe), "--rounds", "2", "--no-compiled", *files, "--", "--norm", "rmsnorm"]
    return subprocess.run([sys.executable, "-m", "tools.profile", *argv], capture_output=True, text=True)


def test_the_terminal_has_the_table_alone(whole_command):
    assert (whole_command.returncode, whole_command.stderr) == (0, "")
    assert whole_command.stdout.split()[:3] == ["FLOPs", "torch", "eager"]


def test_the_command_writes_what_it_prints(whole_command, recipe):
    found = json.loads(recipe.with_name("p.json").read_text())["results"]
    share = found["time_share"]["eager"]["norms and joins"]
    assert found["ceiling_if_norms_were_free"] == pytest.approx(1 / (1 - share))
    assert f"{share:.1%}" in whole_command.stdout
    assert 0 < found["share_of_matrix_rate"] < 1
    assert recipe.with_name("p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flag", "name", "other"), [("--json", "p.json", "p.png"), ("--picture", "p.png", "q.svg")]
)
def test_only_its_own_files_are_replaced(whole_command, recipe, flag, name, other, monkeypatch):
    recipe.with_name("q.svg").write_text("<svg>mine</svg>", encoding="utf-8")
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(UserError, match=f"{other} exists and was not written by this command"):
        command.main([str(recipe), flag, str(recipe.with_name(other))])
    with pytest.raises(pytest.fail.Exception, match="it has begun"):
        command.main([str(recipe), flag, str(recipe.with_name(name))])


def test_the_table_of_switches_has_every_one(recipe):
    """In a recipe that has some of them: what it has already is not a switch."""
    config = load_config(
        [str(recipe), "--n-layer", "1", "--norm", "rmsnorm", "--qk-norm", "full", "--no-bias"]
    )
    table = whole_steps.switches(config, 2)
    pairs = {f"{norm} {p}" for norm in ("layernorm", "rmsnorm") for p in PLACEMENTS}
    words = "qk_norm head, qk_norm full, v_norm, gain zero_centred, gain none, embed_norm, pos rope, bias"
    words += ", no tie_embeddings, mlp gelu, mlp swiglu, mlp geglu, logit_softcap 30"
    scales = {"deepnorm in post", "lns in pre", "keel in keel", "depth in pre"}
    alone = {*words.split(", "), *(f"norm {norm}" for norm in NORMS.keys() - {"layernorm", "rmsnorm"})}
    assert table.keys() == pairs | alone | {f"residual_scale {scale}" for scale in scales}
    assert table[whole_steps.REFERENCE]["ratio"] == 1
    assert len({row["step_ms"] for row in table.values()}) == len(table)


@pytest.mark.parametrize("act", ["switches", "logging", "step"])
def test_each_act_is_reached_by_its_name(recipe, act, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(whole_steps, "switches", lambda config, rounds: seen.append("switches") or {})
    monkeypatch.setattr(classes, "measure", lambda *_: seen.append("step") or {})
    monkeypatch.setattr(classes, "table", lambda found: [])
    cost = LoggingCost(10.0, 2.0, 0.2, 25.0, 10, 250)
    monkeypatch.setattr(logging_cost, "measure", lambda *_: seen.append("logging") or cost)
    command.main([act, str(recipe), "--", "--batch-size", "4"])
    assert seen == [act]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--rounds", "1"), "--rounds is 1; it must be at least 2"),
        (("logging", "--rounds", "1"), "--rounds is 1; it must be at least 2"),
        (("--picture", "p.jpg"), "--picture wants a .png or an .svg, not '.jpg'"),
        (
            ("--picture", "/nonexistent/x.png"),
            "--picture /nonexistent/x.png cannot be written: there is no folder /nonexistent",
        ),
        (
            ("--json", "/nonexistent/x"),
            "--json /nonexistent/x cannot be written: there is no folder /nonexistent",
        ),
        (("--json", "tests"), "--json tests is a folder; name a file"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_measured(recipe, flags, says, monkeypatch):
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it has begun"))
    act = [] if flags[0].startswith("-") else [flags[0]]
    with pytest.raises(UserError) as told:
        command.main([*act, str(recipe), *flags[len(act) :]])
    assert str(told.value) == says


def test_help_says_where_the_flags_of_train_py_go(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Flags of train.py follow after `--`, as in `-- --batch-size 4`." in said

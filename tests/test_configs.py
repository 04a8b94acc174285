"""Recipes, flags, and the sentence that a mistake in either gets."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

from base.cli import UserError
from configs import SECTIONS, Config, load_config, to_toml, toml_value

RECIPES = sorted(Path("configs").glob("*.toml"))


def refusal(argv) -> str:
    with pytest.raises(UserError) as caught:
        load_config(argv)
    message = str(caught.value)
    assert "\n" not in message, message
    assert "Error" not in message, message
    return message


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_loads_and_names_its_command(path):
    config = load_config([str(path)])
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    table.pop("grid", None)
    for section, values in table.items():
        for name, value in values.items():
            assert getattr(getattr(config, section), name) == value
    assert config.run.run_name == path.stem
    header = path.read_text(encoding="utf-8")
    assert f"train.py {path}" in header
    assert "duration" in header
    assert "expect" in header


@pytest.mark.parametrize(
    ("name", "layout"),
    {
        "layout_original": ("layernorm", "post", "off"),
        "layout_gpt2": ("layernorm", "pre", "off"),
        "layout_llama": ("rmsnorm", "pre", "off"),
        "layout_olmo2": ("rmsnorm", "output", "full"),
        "layout_qwen3": ("rmsnorm", "pre", "head"),
        "layout_sandwich": ("rmsnorm", "sandwich", "head"),
        "layout_gemma3": ("rmsnorm", "sandwich", "head"),
        "layout_trinity": ("rmsnorm", "sandwich", "head"),
        "layout_keel": ("rmsnorm", "keel", "off"),
        "layout_mix_ln": ("rmsnorm", "post*2 pre*6", "off"),
        "layout_hybrid_norm": ("rmsnorm", "attn:post mlp:none", "head"),
        "layout_lns": ("rmsnorm", "pre", "off"),
        "layout_dyt": ("dyt", "pre", "off"),
    }.items(),
)
def test_the_layouts_of_known_models(name, layout):
    model = load_config([f"configs/{name}.toml"]).model
    assert (model.norm, model.placement, model.qk_norm) == layout


def test_nanogpts_settings():
    small, large = (load_config([f"configs/shakespeare_char{s}.toml"]) for s in ("_cpu", ""))
    model, optim = small.model, small.optim
    shape = [getattr(model, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "dropout")]
    assert shape == [4, 4, 128, 64, 0.0]
    assert (optim.batch_size, optim.max_iters, optim.lr, optim.min_lr) == (12, 2000, 1e-3, 1e-4)
    assert (optim.beta2, optim.warmup_iters) == (0.99, 100)
    model, optim = large.model, large.optim
    shape = [getattr(model, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "dropout")]
    assert shape == [6, 6, 384, 256, 0.2]
    assert (optim.batch_size, optim.max_iters) == (64, 5000)
    gpt2 = load_config(["configs/gpt2_124m.toml"])
    assert gpt2.optim.batch_size * gpt2.model.block_size == 491_520


def test_flags_win_over_the_recipe_and_the_recipe_over_the_defaults(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[model]\nnorm = "rmsnorm"\nn_layer = 3\n[optim]\nlr = 0.01\n', encoding="utf-8")
    config = load_config([str(recipe), "--n-layer", "5", "--no-bias", "--compile"])
    assert (config.model.norm, config.model.n_layer, config.optim.lr) == ("rmsnorm", 5, 0.01)
    assert (config.model.bias, config.run.compile) == (False, True)
    assert config.model.n_head == Config().model.n_head
    assert config.run.run_name == "mine"


def test_one_ratio_holds_for_all_rates_and_a_rate_wins_over_a_recipes_ratio(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[optim]\nmin_lr_ratio = 0.1\n", encoding="utf-8")
    for lr in (1e-2, 1e-5):  # of which the second lies below the default of min_lr
        assert load_config([str(recipe), "--lr", str(lr)]).optim.end_lr == pytest.approx(lr / 10)
    assert load_config([str(recipe), "--min-lr", "2e-5"]).optim.end_lr == 2e-5
    assert load_config(["configs/quickstart.toml", "--min-lr-ratio", "0"]).optim.end_lr == 0


def test_the_saved_configuration_reads_back(tmp_path):
    config = load_config(["configs/layout_qwen3.toml", "--head-dim", "16", "--min-lr", "1e-5", "--seed", "7"])
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    assert load_config([str(tmp_path / "config.toml")]) == config


def test_a_recipe_whose_name_cannot_name_a_run_is_refused_in_one_sentence(tmp_path):
    file = tmp_path / "my recipe.toml"
    file.write_text("", encoding="utf-8")
    assert "run_name 'my recipe' must be a plain folder name" in refusal([str(file)])
    assert load_config([str(file), "--run-name", "mine"]).run.run_name == "mine"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--out-dir", "a\nb"), "out_dir is 'a\\nb', which holds characters that cannot be printed"),
        (("--out-dir", "a\udcffb"), "holds characters that cannot be printed"),
        (("--batch-size", str(10**20)), f"--batch-size is {10**20}; it must be below 2147483648"),
    ],
)
def test_values_that_nothing_can_hold_are_refused(flags, says):
    assert says in refusal(["configs/quickstart.toml", *flags])


def test_a_runs_own_configuration_is_found_from_inside_its_folder(tmp_path, monkeypatch):
    inside = tmp_path / "runs" / "second" / "wandb"
    inside.mkdir(parents=True)
    (inside.parent / "checkpoints").mkdir()
    (inside.parent / "config.toml").write_text(
        to_toml(load_config(["--run-name", "first"])), encoding="utf-8"
    )
    for place, file in ((inside, "../config.toml"), (inside.parent, "config.toml")):
        monkeypatch.chdir(place)
        run = load_config([file, "--resume"]).run
        assert (run.out_dir, run.run_name) == (str(tmp_path / "runs"), "second")
        assert load_config([file]).run.run_name == "first"


@pytest.mark.parametrize("name", ['say "hi" \\ now', "tab\there", "\x7f\x01", "é→"])
def test_any_string_survives_toml(name):
    assert tomllib.loads(f"key = {toml_value(name)}") == {"key": name}


def test_a_recipe_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbf[model]\nn_layer = 3\n")
    assert load_config([str(tmp_path / "bom.toml")]).model.n_layer == 3


def test_auto_names_a_new_folder(tmp_path):
    argv = ["configs/quickstart.toml", "--out-dir", str(tmp_path), "--run-name", "auto"]
    assert load_config(argv).run.run_name == "quickstart"
    (tmp_path / "quickstart-2").mkdir()
    assert load_config(argv).run.run_name == "quickstart-3"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--norm rmsnrm", "'dyt', 'derf' or 'none' (did you mean rmsnorm?)"),
        (
            "--residual-scale LNS",
            "such as 0.001 or 'one', 'deepnorm', 'lns', 'keel' or 'depth' (did you mean lns?)",
        ),
        ("--out-gain-init -1", "--out-gain-init is -1; it must be above 0 or 'depth'"),
        ("--placement post*6", "placement 'post*6' names 6 branches; n_layer 12 makes 24"),
        ("--lr 1e-400 --min-lr 0", "--lr is 1e-400, which is too small for a number and would be taken as 0"),
        (
            "quickstart",
            "quickstart is no recipe, which is a file with the ending .toml (did you mean configs/q",
        ),
        (
            "configs/quickstart",
            "configs/quickstart is no recipe, which is a file with the ending .toml (did ",
        ),
        ("configs/quickstart.TOML", "does not exist (did you mean configs/quickstart.toml?)"),
        (
            "quickstart.yaml",
            "is no recipe, which is a file with the ending .toml (did you mean configs/quicks",
        ),
        ("docs/runs/pre", "with the ending .toml (did you mean docs/runs/pre/config.toml?)"),
        ("--norm=rms", "'derf' or 'none' (did you mean rmsnorm?)"),
        ("--norm rmsnorm layernorm", "layernorm is no recipe"),
        ("--n-head 5", "n_embd 768 does not divide into n_head 5 heads; 765 would"),
        ("--pos rope --head-dim 3", "needs an even head_dim"),
        ("--max-iters 100 --warmup-iters 100", "warmup_iters 100 is not shorter than max_iters 100; try 10"),
        ("--lr nan", "--lr is nan; it must be a finite number"),
        ("--lr -1", "--lr is -1; it must be at least 0"),
        ("--min-lr 1", "min_lr 1.0 is above lr"),
        ("--min-lr-ratio 1.5", "--min-lr-ratio is 1.5; it must be at most 1"),
        ("--beta1 1.0", "--beta1 is 1.0; it must be below 1"),
        ("--seed=-1", "--seed is -1; it must be at least 0"),
        ("--run-name a/b", "run_name 'a/b' must be a plain folder name"),
        ("--resume --overwrite", "--resume and --overwrite exclude each other"),
        ("a.toml b.toml", "recipe is given twice, a.toml and b.toml; one is allowed"),
        ("configs/quickstrat.toml", "does not exist (did you mean configs/quickstart.toml?)"),
    ],
)
def test_a_mistake_in_the_flags_is_one_sentence(flags, says):
    assert says in refusal(flags.split())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model]\nnrom = 'rmsnorm'", "unknown key nrom (did you mean norm?)"),
        ("[modle]\nnorm = 'rmsnorm'", "unknown table [modle] (did you mean model?)"),
        ("[model]\nlr = 0.1", "lr belongs under [optim], not [model]"),
        ("norm = 'rmsnorm'", "norm stands outside a table; put it under [model]"),
        ("[model]\nn_layer = '4'", "n_layer is '4'; it must be a whole number"),
        ("[model]\nn_layer = 4.0", "n_layer is 4.0; it must be a whole number"),
        ("[model]\nbias = 1", "bias is 1; it must be true or false"),
        ("[model]\nnorm = 'rms'", "norm is 'rms'; it must be 'layernorm', 'rmsnorm', 'batchnorm', "),
        ("[optim]\nlr = 'fast'", "lr is 'fast'; it must be a number, such as 0.001"),
        ("[optim]\nlr = 1e-400", "1e-400 is too small for a number"),
        ("[optim]\nbatch_size = 0", "batch_size is 0; it must be at least 1"),
        ("model = 3", "model is 3, but it is a table"),
        ("[model\n", "cannot be read"),
        (f"[model]\nn_layer = {'9' * 5000}", "cannot be read: Exceeds the limit"),
        (f"[model]\nn_layer = {'[' * 5000}", "cannot be read: its arrays are nested too deeply"),
    ],
)
def test_a_mistake_in_a_recipe_names_the_file(tmp_path, text, says):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(text, encoding="utf-8")
    message = refusal([str(recipe)])
    assert says in message
    assert str(recipe) in message


def help_of(capsys, *argv) -> str:
    with pytest.raises(SystemExit) as stopped:
        load_config(argv)
    assert stopped.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_opens_with_examples_and_the_norms_and_explains_every_flag(capsys):
    shown = help_of(capsys, "--help")
    order = [
        "python train.py configs/quickstart.toml --norm",
        "--norm {layernorm,rmsnorm,batchnorm,dyt,derf,none} (x",
        "--n-layer",
    ]
    assert [shown.index(words) for words in order] == sorted(shown.index(words) for words in order)
    assert "--grad-clip FLOAT Largest global gradient norm; 0 does not clip. (default: 1.0)" in shown
    for section in SECTIONS.values():
        for field in dataclasses.fields(section):
            assert f"--{field.name.replace('_', '-')}" in shown


def test_help_has_the_values_of_the_recipe_and_h_is_short(capsys):
    long, short = (help_of(capsys, "configs/layout_llama.toml", word) for word in ("--help", "-h"))
    for shown in (long, short):
        assert "erf(alpha x + shift), none. (default: rmsnorm)" in shown
    assert "--n-layer" in long
    assert "--n-layer" not in short
    assert len(short) < len(long) / 3


def test_a_recipe_may_end_in_capitals(tmp_path):
    (tmp_path / "MINE.TOML").write_text("[model]\nn_layer = 3\n", encoding="utf-8")
    config = load_config([str(tmp_path / "MINE.TOML")])
    assert (config.model.n_layer, config.run.run_name) == (3, "MINE")

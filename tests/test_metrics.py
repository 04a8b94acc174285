"""The names of metrics: each is taken apart as it was put together, and the table of a run's end."""

import math
import re
import subprocess
import sys

import pytest

from training.metrics import QUANTITIES, TABLE_LINES, by_height, depth_names, depth_table, parse

PLACES = {
    "depth": {"embed": 0.0, "layer_00.attn": 0.5, "layer_11.mlp": 12.0},
    "part": {"embed": 0.0, "layer_11.attn": 11.5, "norms": math.inf, "head": math.inf},
    "layer": {"layer_00": 0.5, "layer_100": 100.5},
    "head": {"layer_03.head_07": 3.5, "layer_00.head_115": 0.5},
    "norm": {"entry": 0.0, "embed_norm": 0.0, "layer_02.mlp.post_norm": 3.0, "layer_02.attn.q_norm": 2.5},
    "run": {"": math.inf},
}


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda q: q.id)
def test_a_name_is_read_as_it_was_made(quantity):
    for text, height in PLACES[quantity.per].items():
        found, place = parse(quantity.key(text))
        assert (found, place.text, place.height) == (quantity, text, height)


def test_the_parts_of_a_place():
    _, place = parse("attn_logit_max/layer_03.head_07")
    assert (place.layer, place.head, place.depth) == (3, 7, "layer_03.attn")
    _, place = parse("gain/layer_12.mlp.next_norm.max")
    assert (place.layer, place.branch, place.norm, place.depth) == (12, "mlp", "next_norm", "layer_12.mlp")
    assert len({q.id for q in QUANTITIES}) == len(QUANTITIES)


@pytest.mark.parametrize(
    "key", ["my/loss", "iter", "residual_rms", "gain/entry.median", "residual_rms/Layer 1"]
)
def test_a_name_of_somebody_else_is_a_curve_of_its_own(key):
    quantity, place = parse(key)
    assert (quantity.name, quantity.title, quantity.per, place.text) == (key, key, "run", "")


def test_places_are_ordered_from_the_bottom():
    keys = [f"residual_rms/{depth}" for depth in depth_names(120)]
    assert by_height(keys[::-1]) == keys


def run_of(n_layer: int, **last: float | None) -> tuple[dict, dict]:
    """(first, last) numbers of a run, the last of them but for the changes twice the first."""
    first = {f"residual_rms/{depth}": 1.0 + i for i, depth in enumerate(depth_names(n_layer))}
    first |= {f"grad_norm/{depth}": 0.5 for depth in depth_names(n_layer)} | {"train/loss": 4.0}
    first |= {f"attn_logit_max/layer_{i:02d}": 3.0 for i in range(n_layer)}
    first |= {"attn_logit_max/layer_00.head_00": 99.0, "grad_norm/norms": 88.0}
    return first, {key: 2 * value for key, value in first.items()} | last


def test_the_table_shows_first_and_last_at_each_depth():
    lines = depth_table(*run_of(2)).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == depth_names(2)
    assert re.split("  +", lines[2]) == ["layer_00.attn", "2 -> 4", "0.5 -> 1", "3 -> 6"]
    assert re.split("  +", lines[1]) == ["embed", "1 -> 2", "0.5 -> 1"]
    assert lines[-1] == "nothing unusual at any depth", "that everything has doubled is usual"


def test_a_deep_run_has_a_short_table_with_what_is_unusual_in_it():
    odd = {
        "residual_rms/layer_30.mlp": 5000.0,
        "attn_logit_max/layer_11": 51.0,
        "grad_norm/layer_01.mlp": None,
    }
    lines = depth_table(*run_of(48, **odd)).splitlines()
    assert len(lines) == TABLE_LINES == 13
    marked = {
        line.split()[0]: line.split("  ")[-1] for line in lines if "above" in line or "not finite" in line
    }
    assert marked == {
        "layer_01.mlp": "gradient norm not finite",
        "layer_11.attn": "largest logit above 50",
        "layer_30.mlp": "stream RMS above 10 times the median",
    }
    assert lines[-1] == "unusual: 3 of 97 depths"
    tied = {"grad_norm/embed": 12.0}  # the head's gradient, too
    assert depth_table(*run_of(48, **tied)).splitlines()[-1] == "nothing unusual at any depth"
    everywhere = {f"residual_rms/{depth}": None for depth in depth_names(48)}
    assert len(depth_table(*run_of(48, **everywhere)).splitlines()) == TABLE_LINES


def test_a_run_without_a_closer_look_has_a_table():
    first, last = ({k: v for k, v in row.items() if "logit" not in k} for row in run_of(1))
    assert len(depth_table(first, last).splitlines()) == 5
    assert depth_table({}, {}).splitlines()[1:] == ["nothing unusual at any depth"]


def test_names_need_no_torch():
    code = "import sys, training.metrics; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

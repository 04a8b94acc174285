"""The page of tools.report in a real browser: no faults, no requests, every chart with its traces."""

import shutil
from pathlib import Path

import pytest
from test_report import CHARTS, PLACEMENTS, write_run

from tools.report.__main__ import main


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(browser, path: Path, width: int, scheme: str):
    """The page at a window's width, and lists that its faults and requests are put into."""
    faults, requests = [], []
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab.on("pageerror", lambda e: faults.append(str(e)))
    tab.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("request", lambda r: requests.append(r.url))
    tab.goto(path.as_uri())
    tab.wait_for_function("document.querySelectorAll('.js-plotly-plot').length > 0")
    return tab, faults, requests


def draw_all(tab) -> None:
    """Charts that are out of view too, as for printing."""
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")


def charts(tab) -> dict[str, int]:
    """Number of traces with at least one number, of every chart."""
    draw_all(tab)
    return tab.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')].map((c) => [c.id,
             c.data.filter((t) => (t.z ? t.z.flat() : t.y).some((v) => v !== null)).length]))"""
    )


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1440, "dark")])
def test_the_page_in_a_browser(width, scheme, browser, tmp_path):
    runs = [str(write_run(tmp_path / p, placement=p, n_head=4, cut=p == "post")) for p in PLACEMENTS]
    lines = (
        Path(runs[0], "metrics.jsonl")
        .read_text(encoding="utf-8")
        .replace('"val/loss": 3.0', '"val/loss": 2.51054')
    )
    Path(runs[0], "metrics.jsonl").write_text(lines, encoding="utf-8")
    main([*runs, "-o", str(tmp_path / "report.html")])
    tab, faults, requests = opened(browser, tmp_path / "report.html", width, scheme)
    everything = {"loss": 8, **{f"heat-{i}": 1 for i in range(4)}}
    everything |= {f"{kind}-{c}": 4 for kind in ("profile", "time") for c in CHARTS}
    assert charts(tab) == everything
    assert tab.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out"
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    assert tab.locator("#table tr").count() == 5
    chips = tab.locator("#runs small").all_inner_texts()
    assert chips == ["2.511", "3", "3", "3"]
    assert [row.split("\t")[3] for row in tab.locator("#table").inner_text().splitlines()[1:]] == chips
    assert tab.locator("#table").inner_text().count("sandwich") == 2
    assert (faults, requests) == ([], [(tmp_path / "report.html").as_uri()])
    tab.close()


@pytest.mark.browser
def test_the_page_follows_its_controls(browser, tmp_path):
    runs = [str(write_run(tmp_path / p, placement=p, n_head=4)) for p in PLACEMENTS]
    main([*runs, "-o", str(tmp_path / "report.html")])
    tab, faults, _ = opened(browser, tmp_path / "report.html", 1440, "light")

    def y(chart, trace=0):
        draw_all(tab)
        return tab.evaluate(f"document.getElementById('{chart}').data[{trace}].y")

    assert y("profile-residual_rms") == [20 * (1 + i) for i in range(7)]
    tab.locator("#step").fill("0")
    assert y("profile-residual_rms") == [1 + i for i in range(7)]
    assert tab.locator("#step-shown").inner_text() == "0"
    assert y("time-residual_rms") == [7, 7, 7, 7, 140]
    tab.locator("#place").select_option("layer_00.mlp")
    assert y("time-residual_rms") == [3, 3, 3, 3, 60]
    assert y("time-attn_logit_max") == [0.5, 0.5, 0.5, 0.5, 8], "of the layer"
    tab.locator("#heat-quantity").select_option("angle_deg")
    draw_all(tab)
    assert tab.evaluate("document.getElementById('heat-0').data[0].zmax") == 40
    tab.locator("#loss-axis").select_option("tokens")
    draw_all(tab)
    assert tab.evaluate("document.getElementById('loss').data[0].x")[1] == 5 * 12 * 1024
    tab.locator("#runs button").nth(1).click()
    assert charts(tab)["profile-residual_rms"] == 3
    tab.locator("#runs button").nth(2).dblclick()
    assert charts(tab)["profile-residual_rms"] == 1
    tab.locator("#runs button").nth(2).dblclick()
    assert charts(tab)["profile-residual_rms"] == 4
    tab.emulate_media(color_scheme="dark")
    tab.wait_for_function("document.querySelector('#runs line').getAttribute('stroke') === '#4DA3E0'")
    assert faults == []
    tab.close()


@pytest.mark.browser
def test_twenty_deep_runs_in_a_browser(browser, tmp_path):
    runs = [str(write_run(tmp_path / f"run_{i:02d}", n_layer=96)) for i in range(20)]
    main([*runs, "-o", str(tmp_path / "report.html")])
    tab, faults, _ = opened(browser, tmp_path / "report.html", 390, "light")
    drawn = tab.locator(".js-plotly-plot").count()
    assert 0 < drawn < 10, "only what is in view"
    found = charts(tab)
    assert found["loss"] == 40
    assert {found[f"profile-{c}"] for c in CHARTS} == {20}
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    assert faults == []
    tab.close()

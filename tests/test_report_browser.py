"""The page of tools.report in a real browser: no faults, no requests, and what each control does."""

import shutil
import threading
from pathlib import Path

import pytest
from report_runs import PLACEMENTS, rows_of, write_rows, write_run

from tools.report.__main__ import main
from tools.report.watch import server

pytestmark = pytest.mark.browser
TABLES = ("residual_rms", "branch_rms", "angle_deg", "grad_norm", "stream_grad_rms", "update_ratio", "attn_logit_max",
          "attn_entropy", "gain_mean", "gain_max")  # fmt: skip
CURVES = ("train_grad_norm", "train_lr", "perf_tokens_per_s", "gap")
BAD = ("error", "warning")
GONE = "ERR_CONNECTION_REFUSED"  # what the browser says when the server of --watch has ended
FACTS = {"state": "done", "parameters": 1000, "flops_per_token": 6e3, "seconds": 60.0, "unigram_entropy": 3.0}


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Path:
    """The page of four placements."""
    folder = tmp_path_factory.mktemp("four")
    for i, p in enumerate(PLACEMENTS):
        rows = rows_of(3, 20)
        rows[-1]["val/loss"] = 2.51054 + i / 10
        write_run(folder / p, rows, placement=p, n_head=4, cut=p == "post", facts=FACTS)
    return report(folder)


@pytest.fixture
def opened(browser):
    """opened(path): the page in a tab; at the end, no fault was told and nothing but the page was asked for."""
    tabs = []

    def open_page(path: Path | str, width: int = 1440, scheme: str = "light"):
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        tab.set_default_timeout(120_000)  # on a busy machine
        url = path if isinstance(path, str) else path.as_uri()
        faults: list[str] = []
        tab.on("pageerror", lambda e: faults.append(str(e)))
        tab.on("console", lambda m: faults.extend([m.text] * (m.type in BAD and GONE not in m.text)))
        tab.on("request", lambda r: faults.extend([r.url] * (not r.url.startswith((url, "blob:")))))
        tab.goto(url)
        tab.wait_for_function("document.querySelectorAll('.js-plotly-plot').length > 0")
        tabs.append((tab, faults))
        return tab

    yield open_page
    for tab, faults in tabs:
        tab.close()
        assert faults == []


def draw(tab, *charts: str) -> None:
    """These charts, or all, also where they are out of view."""
    tab.evaluate("(ids) => (ids.length ? ids : [...waiting]).forEach(drawNow)", list(charts))


def lines(tab) -> dict[str, int]:
    """Of every chart the number of runs that have a number in it."""
    draw(tab)
    return tab.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')].map((c) => [c.id, new Set(
             c.data.filter((t) => (t.z ? t.z.flat() : t.y).some((v) => v !== null)).map((t) => t.meta)
               .filter((name) => name || c.id.startsWith('heat'))).size]))"""
    )


def trace(tab, chart: str, what: str, label: str = "pre") -> list:
    """x or y of a run's last line, which is the one in front."""
    draw(tab, chart)
    ours = f"(t) => t.meta === '{label}' && t.mode !== 'markers' && !t.spread"
    return tab.evaluate(f"document.getElementById('{chart}').data.filter({ours}).pop().{what}")


def of(tab, chart: str, what: str):
    """Something of a chart, as JavaScript names it behind the chart's element."""
    return tab.evaluate(f"document.getElementById('{chart}').{what}")


def report(folder: Path) -> Path:
    """The page of the runs in a folder."""
    main([str(folder), "-o", str(folder / "report.html")])
    return folder / "report.html"


def texts(tab, selector: str) -> list[str]:
    return tab.locator(selector).all_inner_texts()


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1440, "dark")])
def test_the_page(width, scheme, opened, four):
    tab = opened(four, width, scheme)
    everything = {"loss": 4, **{f"heat-{i}": 1 for i in range(4)}, **{f"curve-{c}": 4 for c in CURVES}}
    everything |= {f"{kind}-{c}": 4 for kind in ("profile", "time") for c in TABLES}
    assert lines(tab) == everything
    assert tab.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out"
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    assert texts(tab, "#runs small") == ["2.711", "2.611", "2.511", "2.811"], "in the order of their folders"
    assert texts(tab, "#findings li")[0] == (
        "pre is best, validation loss 2.5105 at step 20; post +0.100, output +0.200, sandwich +0.300."
    )
    rows = [row.split("\t") for row in tab.locator("#table").inner_text().splitlines()]
    assert rows[0][:5] == ["run", "state", "val loss", "to the best", "placement"]
    assert [row[:4] for row in rows[1:3]] == [
        ["pre", "done", "2.511", "+0.0000"],
        ["post", "done", "2.611", "+0.1000"],
    ]


def test_the_table_is_sorted_and_tells_all_settings(opened, four):
    tab = opened(four)
    first = "#table td:first-child"
    assert texts(tab, first) == ["pre", "post", "output", "sandwich"]
    tab.locator("#table th button").first.click()
    assert texts(tab, first) == ["output", "post", "pre", "sandwich"]
    tab.locator("#table th button").first.click()
    assert texts(tab, first) == ["sandwich", "pre", "post", "output"]
    assert tab.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    tab.get_by_text("All settings").click()
    settings = tab.locator("#identity").inner_text()
    assert "placement\toutput\tpost\tpre\tsandwich" in settings
    assert "commit\tunknown\tunknown" in settings


def test_chips_hide_show_and_isolate(opened, four):
    tab = opened(four)
    chip = tab.locator("#runs button")
    chip.nth(1).click()
    assert chip.nth(1).get_attribute("aria-pressed") == "false"
    found = lines(tab)
    assert (found["profile-residual_rms"], found["loss"]) == (3, 3)
    hidden = tab.locator("#heats figure").evaluate_all("(all) => all.map((f) => f.hidden)")
    assert hidden == [False, True, False, False]
    chip.nth(2).dblclick()
    assert lines(tab)["profile-residual_rms"] == 1
    chip.nth(2).dblclick()
    assert lines(tab)["profile-residual_rms"] == 4
    tab.locator("#find").fill("sand")
    assert lines(tab)["profile-residual_rms"] == 1
    assert chip.evaluate_all("(all) => all.filter((b) => !b.hidden).length") == 1


def test_sliders_and_choices(opened, four):
    tab = opened(four)
    assert trace(tab, "profile-residual_rms", "y") == [20 * (1 + i) for i in range(7)]
    tab.locator("#step").fill("0")
    assert trace(tab, "profile-residual_rms", "y") == [1 + i for i in range(7)]
    assert tab.locator("#step-shown").inner_text() == "0"
    assert trace(tab, "time-residual_rms", "y") == [4, 4, 4, 4, 80], "the median over depths"
    tab.locator("#place").select_option("max")
    assert trace(tab, "time-residual_rms", "y") == [7, 7, 7, 7, 140]
    tab.locator("#place").select_option("layer_00.mlp")
    assert trace(tab, "time-residual_rms", "y") == [3, 3, 3, 3, 60]
    assert trace(tab, "time-attn_logit_max", "y") == [0.5, 0.5, 0.5, 0.5, 8], "of the layer"
    tab.locator("#heat-quantity").select_option("angle_deg")
    draw(tab, "heat-0")
    assert of(tab, "heat-0", "data[0].zmax") == 40
    assert tab.locator("#heat-high").inner_text() == "40"
    tab.emulate_media(color_scheme="dark")
    tab.wait_for_function("document.querySelector('#runs line').getAttribute('stroke') === '#4DA3E0'")


def test_one_x_axis_for_the_page(opened, four):
    tab = opened(four)
    tokens = 20 * 12 * 1024
    for axis, last in (("tokens", tokens), ("hours", 2000 / 1000 / 3600), ("FLOPs", 6e3 * tokens)):
        tab.locator("#axis").select_option(axis)
        for chart in ("loss", "curve-train_lr", "time-residual_rms"):
            assert trace(tab, chart, "x")[-1] == pytest.approx(last, rel=1e-4), chart
        draw(tab, "heat-0")
        assert of(tab, "heat-0", "data[0].x.at(-1)") == pytest.approx(last, rel=1e-4)


def test_the_band_and_the_caption_name_the_layer_of_the_extreme(opened, four, tmp_path):
    rows = rows_of(3, 20)
    rows[2]["attn_entropy/layer_01"] = 1.07
    write_run(tmp_path / "a", rows)
    tab = opened(report(tmp_path))
    draw(tab, "time-attn_entropy", "time-residual_rms")
    assert of(tab, "time-attn_entropy", "data[0].y") == [5, 5, 1.07, 5, 5]
    assert of(tab, "time-attn_entropy", "data[0].text[2]") == "layer_01"
    caption = tab.locator("figure", has=tab.locator("#time-attn_entropy")).locator(".extreme")
    assert caption.inner_text() == "least 1.07: a, layer_01, step 10"
    ours = [text for text in texts(tab, ".extreme") if text.startswith("largest 140")]
    assert ours == ["largest 140: a, layer_02.mlp, step 20"]


def test_reference_lines(opened, four):
    tab = opened(four)
    draw(tab, "loss", "curve-train_grad_norm", "time-attn_entropy", "profile-angle_deg")

    names = "data.filter((t) => !t.meta).map((t) => t.name)"
    assert of(tab, "loss", names) == ["unigram entropy 3"]
    assert of(tab, "curve-train_grad_norm", names) == ["clip 1"]
    assert of(tab, "time-attn_entropy", names) == ["ln T 6.931"]
    assert of(tab, "profile-angle_deg", names) == ["90 90"]


def test_hovering_lifts_a_run_and_reads_all_out_in_order(opened, four):
    tab = opened(four)
    tab.locator("#smooth").fill("0")
    tab.locator("#loss").scroll_into_view_if_needed()
    tab.wait_for_timeout(300)
    place = tab.evaluate(
        """() => { const c = document.getElementById('loss'), l = c._fullLayout, b = c.getBoundingClientRect();
             return [b.x + l.xaxis._offset + l.xaxis.d2p(15), b.y + l.yaxis._offset + l.yaxis.d2p(3.5)]; }"""
    )
    tab.mouse.move(*place)
    words = tab.locator("#losses .extreme")
    tab.wait_for_function("document.querySelector('#losses .extreme').textContent.startsWith('at 15')")
    assert words.inner_text().startswith("at 15 steps: output 4 · post 4 · pre 4 · sandwich 4")
    assert tab.locator("#runs .faded").count() == 3
    tab.mouse.move(5, 5)
    tab.wait_for_function("document.querySelectorAll('.faded').length === 0")
    tab.locator("#runs button").nth(2).hover()
    bright = """() => [...document.querySelectorAll('#loss .scatterlayer .trace')]
      .filter((g) => g.style.opacity > 0.2).map((g) => g.__data__[0].trace.meta)"""
    assert set(tab.evaluate(bright)) <= {"pre", None}
    assert tab.locator("#table tr.faded").count() == 3


def test_a_zoom_is_kept_linked_and_undone(opened, four):
    tab = opened(four)
    reset = tab.locator("#reset")
    assert reset.is_disabled()
    tab.evaluate(
        "scrollBy(0, document.getElementById('curve-train_grad_norm').getBoundingClientRect().top - 300)"
    )
    tab.wait_for_timeout(300)
    box = tab.locator("#curve-train_grad_norm .nsewdrag").bounding_box()
    tab.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 30)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + box["height"] - 30, steps=4)
    tab.mouse.up()
    tab.wait_for_function("!document.getElementById('reset').disabled")

    def ranges(axis, *charts):
        draw(tab, *charts)
        return [of(tab, chart, f"_fullLayout.{axis}.range") for chart in charts]

    first, *others = ranges("xaxis", "curve-train_grad_norm", "loss", "time-residual_rms", "heat-0")
    assert 4 < first[0] < 12 < first[1] < 20
    assert others == [first] * 3
    [y] = ranges("yaxis", "curve-train_grad_norm")
    tab.locator("#runs button").nth(0).click()
    assert ranges("xaxis", "curve-train_grad_norm", "loss") == [first] * 2, "kept when a chip is pressed"
    assert ranges("yaxis", "curve-train_grad_norm") == [y]
    reset.click()
    undone = ranges("xaxis", "curve-train_grad_norm", "loss", "time-residual_rms")
    assert all(low <= 0 and high >= 20 for low, high in undone)
    assert ranges("yaxis", "curve-train_grad_norm") != [y]


def test_a_chart_is_enlarged_and_saved(opened, four):
    tab = opened(four)
    tab.get_by_role("button", name="enlarge Stream RMS").first.click()
    tab.wait_for_selector("#large .main-svg")
    assert of(tab, "large", "clientHeight") > 500
    assert tab.locator("#large .legendtext").all_text_contents() == ["output", "post", "pre", "sandwich"]
    for kind, begins in (("png", b"\x89PNG"), ("svg", b"<svg")):
        with tab.expect_download() as download:
            tab.locator(f"#save-{kind}").click()
        saved = Path(download.value.path()).read_bytes()
        assert saved.startswith(begins)
        assert download.value.suggested_filename == f"profile-residual_rms.{kind}"
    tab.get_by_role("button", name="close").click()
    assert not tab.locator("#enlarged").is_visible()


def test_colours_by_a_setting_and_seeds_as_mean_and_band(opened, tmp_path):
    for placement in ("pre", "post"):
        for seed in (1, 2, 3):
            rows = [row | {"train/loss": row["train/loss"] + seed / 10} for row in rows_of(3, 20)]
            write_run(tmp_path / f"{placement}{seed}", rows, placement=placement, run={"seed": seed})
    tab = opened(report(tmp_path))
    tab.locator("#colour").select_option("placement")
    tab.locator("#dash").select_option("seed")
    strokes, dashes = (
        tab.locator("#runs line").evaluate_all(f"(all) => all.map((l) => l.getAttribute('{name}'))")
        for name in ("stroke", "stroke-dasharray")
    )
    assert (len(set(strokes)), len(set(strokes[:3])), len(set(dashes))) == (2, 1, 3)
    tab.get_by_role("button", name="placement pre").click()
    assert lines(tab)["loss"] == 3, "the name of a group is for all its runs"
    tab.locator("#seeds").check()
    labels = [text.split("\n")[0] for text in texts(tab, "#runs button[data-run]")]
    assert labels == ["post1 (3 seeds)", "pre1 (3 seeds)"]
    draw(tab, "loss")
    ours = f"data.filter((t) => t.meta === '{labels[1]}')"
    curves = of(tab, "loss", f"{ours}.slice(0, 3).map((t) => t.y[0])")
    assert curves == pytest.approx([5.6, 5.8, 5.7]), "least, largest, mean"
    assert lines(tab)["profile-residual_rms"] == 2


def test_a_run_that_diverged_flattens_no_other(opened, tmp_path):
    wild = [row | {"train/loss": 5.5 if row["iter"] == 0 else 400.0} for row in rows_of(3, 20)[:3]]
    wild[-1] |= {key: 1e6 for key in wild[-1] if key.startswith("residual_rms/")}
    told = ["step 11 diverged: the loss is not finite", "  where    layer_01.mlp"]
    write_run(tmp_path / "a good one")
    write_run(tmp_path / "bad", wild, facts={"state": "diverged", "report": told})
    tab = opened(report(tmp_path))
    draw(tab, "loss")
    assert of(tab, "loss", "_fullLayout.yaxis.range[1]") < 6
    mark = of(tab, "loss", "data.filter((t) => t.marker && t.marker.symbol === 'x')")
    assert [(m["meta"], m["x"], m["text"]) for m in mark] == [("bad", [10], ["diverged at step 11"])]
    assert "bad: diverged at step 11" in tab.locator("#reports").inner_text()
    assert "where    layer_01.mlp" in tab.locator("#reports").inner_text()
    assert tab.locator("#heat-high").inner_text() == "140"
    assert texts(tab, "#runs small")[1] == "diverged at step 11"
    assert texts(tab, "#table td:nth-child(2)") == ["done", "diverged at step 11"]
    tab.locator("#whole").check()
    draw(tab, "loss")
    assert of(tab, "loss", "_fullLayout.yaxis.range[1]") > 400


def test_a_spike_of_one_row_is_seen_in_the_loss_and_in_the_heat_map(opened, tmp_path):
    stream = {"residual_rms/embed": 1.0, "residual_rms/layer_00.mlp": 2.0}
    rows = [{"iter": i, "train/loss": 2.0 + (i % 7) / 100} | stream for i in range(20_000)]
    rows[12_345] |= {"train/loss": 9.0, "residual_rms/embed": 40.0, "spike": 1}
    write_run(tmp_path / "a", rows, n_layer=1)
    tab = opened(report(tmp_path))
    draw(tab, "loss", "heat-0")
    loss = of(tab, "loss", "data[0]")
    assert dict(zip(loss["x"], loss["y"], strict=True))[12_345] == 9.0
    high = of(tab, "loss", "_fullLayout.yaxis.range[1]")
    arrow = of(tab, "loss", "data.find((t) => t.marker && t.marker.symbol === 'triangle-up')")
    assert (arrow["x"], arrow["text"]) == ([12_345], ["loss 9 at step 12,345"])
    assert arrow["y"][0] <= high < 3, "the range is that of the other rows"
    star = of(tab, "loss", "data.find((t) => t.marker && t.marker.symbol === 'star').text")
    assert star == ["spike: loss 9 at step 12,345"]
    assert max(of(tab, "heat-0", "data[0].customdata[0]")) == 40.0
    assert "20,000 rows" in tab.locator("#axis-hint").inner_text()


def test_long_lines_have_no_markers_and_are_smoothed(opened, tmp_path):
    rows = [{"iter": i, "train/loss": 2.0 + i % 2, "val/loss": 2.0} for i in range(200)]
    write_run(tmp_path / "a", rows, n_layer=1)
    tab = opened(report(tmp_path))
    modes = "data.map((t) => t.mode).filter((m) => m !== 'markers')"
    assert set(of(tab, "loss", modes)) == {"lines"}
    assert all(2.3 < y < 2.7 for y in of(tab, "loss", "data[1].y.slice(-2)"))
    tab.locator("#smooth").fill("0")
    draw(tab, "loss")
    assert of(tab, "loss", "data[0].y.slice(-2)") == [2, 3]


def test_twenty_deep_runs(opened, tmp_path):
    rows = rows_of(96, 20)
    for i in range(20):
        write_run(tmp_path / f"run_{i:02d}", rows, n_layer=96)
    tab = opened(report(tmp_path), 390)
    assert 0 < tab.locator(".js-plotly-plot").count() < 10, "only what is in view"
    found = lines(tab)
    assert found["loss"] == 20
    assert {found[f"profile-{c}"] for c in TABLES} == {20}
    assert tab.evaluate("document.documentElement.scrollWidth") == 390


def test_names_of_folders_are_text_and_nothing_else(opened, tmp_path):
    names = ["<!--<script>", "<title>&amp;", "[[script]] $&", "__proto__", "a (2 seeds)", "x" * 200]
    for name in names:
        write_run(tmp_path / name)
    tab = opened(report(tmp_path))
    assert set(lines(tab).values()) == {1, len(names)}, "a heat map of each, all others of all"
    assert set(texts(tab, "#table td:first-child")) == set(names)
    assert tab.title() == f"nanonorm: {' · '.join(sorted(names)[:3])} …"
    assert tab.evaluate("document.documentElement.scrollWidth") == 1440, "nothing sticks out"


def test_watching_shows_new_rows_and_new_runs_and_keeps_what_was_chosen(opened, tmp_path):
    rows = rows_of(3, 20)
    write_run(tmp_path / "a", rows[:3])
    with server([str(tmp_path)], 0) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        tab = opened(f"http://127.0.0.1:{running.server_port}/")
        tab.locator("#place").select_option("max")
        assert trace(tab, "time-residual_rms", "y", "a") == [7, 7, 7]
        write_rows(tmp_path / "a", rows)
        tab.wait_for_function("data.runs[0].lastStep === 20")
        assert trace(tab, "time-residual_rms", "y", "a") == [7, 7, 7, 7, 140]
        assert tab.locator("#step-shown").inner_text() == "20", "the slider stays at the end"
        assert tab.locator("#place").input_value() == "max"
        write_run(tmp_path / "b", rows)
        tab.wait_for_function("data.runs.length === 2")
        assert lines(tab)["loss"] == 2
        running.shutdown()
    tab.wait_for_function("document.getElementById('live').textContent.startsWith('the server has ended')")
    tab.close()

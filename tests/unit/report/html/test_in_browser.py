"""HTML reports in a real browser: they draw, answer to pointer and keys, sort and filter.

Needs Chromium and its driver on the PATH (Debian: chromium, chromium-driver) and selenium.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.bench.report.charts import charts
from memfit.bench.report.page import page as bench_page
from memfit.ir.bench import BenchReport
from memfit.ir.plan import VariantPlan
from memfit.ir.run_file import RunFile
from memfit.report.html.ended import ended_page
from memfit.report.html.page import html_page
from memfit.report.run_report import EndedReport, RunReport

webdriver = pytest.importorskip("selenium.webdriver", reason="driving a browser needs selenium")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="Chromium or its driver is not installed (Debian: apt install chromium-driver)",
)
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-quic --hide-scrollbars"
)
REQUEST = "Network.requestWillBeSent"
LAPTOP, PHONE = (1366, 900), (390, 844)
EXAMPLE = Path(__file__).parents[4] / "docs/examples/gpt2-large-16GB"
BENCHMARK = Path(__file__).parents[4] / "benchmarks/results/savings-h200.json"
Driver = Any


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    browser = webdriver.Chrome(options=options, service=service)
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def file(run: RunReport, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(html_page(run), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def opened(driver: Driver, file: str) -> Callable[..., Driver]:
    """Open the report at a size and in a scheme, in a browser that has no network."""

    def open_at(size: tuple[int, int] = LAPTOP, scheme: str = "light", page: str = file) -> Driver:
        driver.execute_cdp_cmd("Network.enable", {})
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        _resize(driver, size)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        driver.get_log("browser")  # what an earlier page said
        driver.get_log("performance")
        driver.get(page)
        return driver

    return open_at


def _resize(driver: Driver, size: tuple[int, int]) -> None:
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def _all(driver: Driver, selector: str) -> list[Any]:
    return driver.find_elements("css selector", selector)


def _one(driver: Driver, selector: str) -> Any:
    return driver.find_element("css selector", selector)


def _lightness(driver: Driver, selector: str, name: str) -> float:
    """The mean of a colour's red, green and blue, as it is drawn."""
    words = _one(driver, selector).value_of_css_property(name)
    return sum(float(n) for n in re.findall(r"[\d.]+", words)[:3]) / 3


def _point_at(driver: Driver, selector: str, x: float, y: float) -> str:
    """Move the pointer to a share of an element's width and height; return the tooltip's words."""
    script = """
        const element = document.querySelector(arguments[0]);
        element.scrollIntoView({block: "center"});
        return new Promise((done) => requestAnimationFrame(() => {
          const box = element.getBoundingClientRect();
          done([box.left, box.top, box.width, box.height]);
        }));"""
    left, top, width, height = driver.execute_script(script, selector)
    place = {"x": left + x * width, "y": top + y * height}
    driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", **place})
    return "" if _one(driver, "#tip").get_attribute("hidden") else _one(driver, "#tip").text


def _column(driver: Driver, table: str, title: str) -> list[str]:
    return [cell.text for cell in _all(driver, f"#{table} td[data-label='{title}']")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_it_opens_offline_without_an_error_and_without_scrolling_sideways(
    opened: Callable[..., Driver], size: tuple[int, int], scheme: str
) -> None:
    driver = opened(size, scheme)
    assert driver.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == REQUEST]
    assert asked and all(url.startswith(("file:", "data:")) for url in asked)
    wide = driver.execute_script("return document.documentElement.scrollWidth")
    assert wide <= size[0]
    assert len(_all(driver, "#memory svg path[data-category]")) >= 10
    assert driver.execute_script("return document.documentElement.dataset.theme") == scheme


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_a_fit_without_memory_is_readable_in_both_schemes(
    opened: Callable[..., Driver],
    ended: EndedReport,
    size: tuple[int, int],
    scheme: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "ended.html"
    path.write_text(ended_page(ended), encoding="utf-8")
    driver = opened(size, scheme, path.as_uri())
    assert driver.get_log("browser") == []
    assert driver.execute_script("return document.documentElement.scrollWidth") <= size[0]
    ground, ink = (_lightness(driver, "body", name) for name in ("background-color", "color"))
    assert (ground < 50 and ink > 200) if scheme == "dark" else (ground > 200 and ink < 50)
    assert "warming up: out of memory, in backward at <b>" in _one(driver, "#how-far").text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_a_benchmark_is_readable_in_both_schemes_charts_included(
    opened: Callable[..., Driver], size: tuple[int, int], scheme: str, tmp_path: Path
) -> None:
    """It was white in a dark browser, and a phone showed parts of charts and tables."""
    pytest.importorskip("matplotlib", reason="charts need matplotlib")
    report = BenchReport.load(BENCHMARK)
    path = tmp_path / "bench.html"
    path.write_text(bench_page(report, charts(report)), encoding="utf-8")
    driver = opened(size, scheme, path.as_uri())
    assert driver.get_log("browser") == []
    assert driver.execute_script("return document.documentElement.scrollWidth") <= size[0]
    right = size[0] - 10
    for selector in ("figure svg", ".wide"):
        ends = [e.rect["x"] + e.rect["width"] for e in _all(driver, selector)]
        assert ends and max(ends) <= right, selector
    for name in _all(driver, "td:first-child"):  # stays while its row is moved
        assert name.value_of_css_property("position") == "sticky"
    drawn = {"body": ("background-color", "color"), "figure #patch_1 path": ("fill",)}
    drawn |= {"figure text": ("fill",), "td": ("color",), "figure #patch_3 path": ("stroke",)}
    for selector, names in drawn.items():
        for name in names:
            ground = name == "background-color" or "patch_1" in selector
            light = _lightness(driver, selector, name) > 127
            assert light == (ground == (scheme == "light")), (selector, name)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_example_of_a_run_on_a_gpu_opens_and_answers(
    opened: Callable[..., Driver], scheme: str
) -> None:
    driver = opened(LAPTOP, scheme, EXAMPLE.with_suffix(".html").as_uri())
    assert driver.get_log("browser") == []
    run = RunFile.load(EXAMPLE.with_suffix(".json.gz"))
    assert run.result.device["name"] == "NVIDIA H200" and run.result.baseline.measured
    peak = run.result.measured.peak_bytes / 2**30
    assert f"{peak:.2f} GiB" in _one(driver, "main, body").text
    assert "parameters" in _point_at(driver, "#memory-after svg", 0.35, 0.85)
    assert run.plan is not None
    shown = _column(driver, "segment-table", "segment")
    assert shown and set(shown) <= {segment.name for segment in run.plan.segments}
    places = [_point_at(driver, "#memory-before svg", x / 20, 0.5) for x in range(6, 14)]
    assert any("transformer.h." in text and ".py:" in text for text in places)
    _one(driver, "#decision-table input").send_keys("transformer.h.7")
    assert set(_column(driver, "decision-table", "segment")) == {"transformer.h.7"}
    _one(driver, "#decision-table th[data-column=size] button").click()
    order = _one(driver, "#decision-table th[data-column=size]").get_attribute("aria-sort")
    assert order == "ascending"  # it opens with the largest first
    _resize(driver, PHONE)
    driver.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 50))")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
    assert driver.get_log("browser") == []


@pytest.mark.parametrize(
    "changes",
    [{"result": None}, {"curve": ()}, {"budget": None}, {"baseline": None}, {"tensors": ()}],
    ids=lambda changes: next(iter(changes)),
)
def test_reports_of_every_kind_open_without_an_error(
    driver: Driver, run: RunReport, changes: dict[str, Any], tmp_path: Path
) -> None:
    if "budget" in changes:  # a strategy that was given none
        changes = {"result": None, "plan": replace(run.plan, budget_bytes=None)}
    elif "baseline" in changes:  # the plain step does not fit on the device
        changes = {"profile": replace(run.profile, baseline=None, copy=None)}
    elif "tensors" in changes:  # nothing is kept for the backward
        plan = replace(run.plan, variants=tuple(_emptied(v) for v in run.plan.variants))
        segments = tuple(replace(s, activations=()) for s in plan.segments)
        changes = {"plan": replace(plan, segments=segments)}
    page = tmp_path / "report.html"
    page.write_text(html_page(replace(run, **changes)), encoding="utf-8")
    driver.get_log("browser")
    driver.get(page.as_uri())
    assert driver.get_log("browser") == []
    assert _all(driver, "#memory-after path[data-category]")
    assert _all(driver, "#segment-table tbody tr")
    assert bool(_all(driver, "#budget-curve svg")) == bool(changes.get("curve", True))
    for button in _all(driver, "#memory-legend button"):  # all are taken out, budget or not
        button.click()
    assert not _all(driver, "#memory path[data-category]")
    assert "NaN" not in driver.execute_script("return document.body.innerHTML")
    assert driver.get_log("browser") == []


def _emptied(variant: VariantPlan) -> VariantPlan:
    return replace(variant, activations=())


def test_the_two_schemes_have_other_colours_and_a_button(opened: Callable[..., Driver]) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    driver = opened(scheme="light")
    light = driver.execute_script(ground)
    _one(driver, "#theme").click()
    dark = driver.execute_script(ground)
    assert light != dark
    assert opened(scheme="dark").execute_script(ground) == dark


def test_pointing_at_memory_names_tensor_module_and_line(opened: Callable[..., Driver]) -> None:
    driver = opened()
    words = _point_at(driver, "#memory-before svg", 0.35, 0.5)
    named = {w: _one(driver, f"#tip [data-what={w}]").text for w in ("tensor", "module", "source")}
    assert named["module"].startswith("transformer.h.")
    assert ".py:" in named["source"]
    assert all(part in words for part in (*named.values(), "activations", "GiB"))
    assert _point_at(driver, "#memory-before svg", 0.35, 0.85).count("parameters") == 2
    assert _one(driver, "#tip [data-what=module]").text.startswith("there before the step")


def test_what_is_pointed_at_changes_with_the_place(opened: Callable[..., Driver]) -> None:
    driver = opened()
    found = set()
    for x in (0.25, 0.3, 0.35, 0.45):
        _point_at(driver, "#memory-before svg", x, 0.52)
        found.add((_one(driver, "#tip [data-what=tensor]").text, _one(driver, "#tip .dim").text))
    assert len(found) == 4


def test_pointing_above_the_memory_lists_the_largest(opened: Callable[..., Driver]) -> None:
    driver = opened()
    words = _point_at(driver, "#memory-after svg", 0.4, 0.12)
    assert words.splitlines()[0].endswith("GiB") and "transformer.h." in words
    assert _point_at(driver, "#memory h2", 0.5, 0.5) == ""


def test_keys_move_through_time(opened: Callable[..., Driver]) -> None:
    from selenium.webdriver.common.keys import Keys

    driver = opened()
    svg = _one(driver, "#memory-after svg")
    svg.send_keys(Keys.ARROW_RIGHT * 40)
    first = _one(driver, "#tip .dim").text
    svg.send_keys(Keys.ARROW_RIGHT * 40)
    assert _one(driver, "#tip .dim").text != first


def test_a_category_can_be_taken_out(opened: Callable[..., Driver]) -> None:
    driver = opened()
    before = len(_all(driver, "#memory-before path[data-category]"))
    (button,) = [b for b in _all(driver, "#memory-legend button") if b.text == "parameters"]
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    shown = _all(driver, "#memory-before path[data-category]")
    assert len(shown) == before - 1
    assert "parameters" not in {path.get_attribute("data-category") for path in shown}


def test_the_drawn_peak_is_that_of_the_report(
    opened: Callable[..., Driver], run: RunReport
) -> None:
    driver = opened()
    drawn = driver.execute_script(
        "return data.memory.charts.map((c, i) => {"
        "  const m = prepareMemory(data.memory, c, i);"
        "  return Math.max(...memoryColumns(m, new Set()).map((column) => column.total)); })"
    )
    assert drawn == [run.before.peak_bytes, run.after.peak_bytes]
    seconds = driver.execute_script(
        "return data.memory.charts.map((c, i) => prepareMemory(data.memory, c, i).seconds)"
    )
    assert seconds == pytest.approx([run.before.seconds, run.after.seconds])


def test_a_table_sorts_both_ways(opened: Callable[..., Driver], run: RunReport) -> None:
    driver = opened()
    head = "#decision-table th[data-column='to recompute'] button"
    _one(driver, head).click()
    script = (
        "return [...document.querySelectorAll('#decision-table tbody tr')]"
        ".map((row) => row.querySelector('[data-label=\"to recompute\"]').textContent)"
    )
    down = driver.execute_script(script)
    most = max(row["recomp_time_s"] for row in _decisions(run))
    assert down[0] == f"{most * 1e3:.1f} ms"
    sort = _one(driver, "#decision-table th[data-column='to recompute']").get_attribute("aria-sort")
    assert sort == "descending"
    _one(driver, head).click()
    up = driver.execute_script(script)
    assert up[0] != down[0]
    assert _one(driver, "#decision-table th[aria-sort=ascending]").text.startswith("to recompute")


def test_names_sort_as_people_count(opened: Callable[..., Driver]) -> None:
    driver = opened()
    _one(driver, "#segment-table th[data-column=segment] button").click()
    names = [n for n in _column(driver, "segment-table", "segment") if ".h." in n]
    assert names == [f"transformer.h.{i}" for i in range(len(names))] and len(names) > 10


def test_a_table_filters_by_words_and_decision(
    opened: Callable[..., Driver], run: RunReport
) -> None:
    driver = opened()
    rows = _decisions(run)
    count = _one(driver, "#decision-table .count")
    assert count.text.startswith(f"{len(rows)} of {len(rows)}, ")
    search = _one(driver, "#decision-table input")
    search.send_keys("transformer.h.7 addmm")
    assert set(_column(driver, "decision-table", "segment")) == {"transformer.h.7"}
    words = [row.text for row in _all(driver, "#decision-table tbody tr")]
    assert 0 < len(words) < 30 and all("addmm" in text for text in words)
    _one(driver, "#decision-table select option[value=recompute]").click()
    assert set(_column(driver, "decision-table", "decision")) <= {"recompute"}
    search.clear()
    search.send_keys("there is no such word")
    assert count.text.startswith(f"0 of {len(rows)}")
    assert not _all(driver, "#decision-table tbody tr")


def _decisions(run: RunReport) -> list[Any]:
    from memfit.report.decisions import explained_rows

    return list(explained_rows(run.plan))


def test_long_tables_come_in_pieces(opened: Callable[..., Driver]) -> None:
    driver = opened()
    assert len(_all(driver, "#decision-table tbody tr")) == 30
    _one(driver, "#decision-table .more").click()
    assert len(_all(driver, "#decision-table tbody tr")) == 330


def test_a_narrower_window_draws_anew(opened: Callable[..., Driver]) -> None:
    driver = opened()
    view = "return document.querySelector('#memory-after svg').getAttribute('viewBox')"
    wide = driver.execute_script(view)
    _resize(driver, PHONE)
    driver.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 50))")
    narrow = driver.execute_script(view)
    assert int(wide.split()[2]) > 1000 and int(narrow.split()[2]) < PHONE[0]
    assert driver.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
    assert driver.get_log("browser") == []


def test_on_a_phone_rows_are_cards_sorted_by_a_list(opened: Callable[..., Driver]) -> None:
    driver = opened(PHONE)
    assert not _one(driver, "#segment-table thead").is_displayed()
    _one(driver, "#segment-table .sort-by option[value='saved|down']").click()
    assert _column(driver, "segment-table", "segment")[0].startswith("transformer.h.")


@pytest.mark.parametrize("width", [390, 800])
def test_narrow_tables_show_every_column(opened: Callable[..., Driver], width: int) -> None:
    """The variant, the seconds and the ranks of a row were left out below 1000 pixels."""
    driver = opened((width, 844))
    shown = "return [...document.querySelectorAll(arguments[0])].some((c) => c.offsetWidth > 0)"
    for table, title in (
        *(("segment-table", name) for name in ("class", "variant", "forward", "backward")),
        *(("decision-table", name) for name in ("made at", "read at")),
    ):
        assert driver.execute_script(shown, f"#{table} td[data-label='{title}']"), title
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width


def test_pointing_at_the_curve_names_strategy_and_budget(opened: Callable[..., Driver]) -> None:
    driver = opened()
    words = _point_at(driver, "#budget-curve [data-series='0']", 0.5, 0.5)
    assert words.splitlines()[0].startswith("ratio (recompute)")
    assert "14.90 GiB" in words and "this plan" in words


def test_a_strategy_far_slower_is_left_out_until_asked_for(opened: Callable[..., Driver]) -> None:
    driver = opened()
    assert not _all(driver, "#budget-curve [data-series='1']")
    (button,) = [b for b in _all(driver, "#curve-legend button") if b.text.startswith("swap")]
    assert "x and more" in button.text
    button.click()
    assert len(_all(driver, "#budget-curve [data-series='1']")) == 2
    assert driver.get_log("browser") == []

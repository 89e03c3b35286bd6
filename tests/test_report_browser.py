"""The report in a real browser: it is quiet, asks for nothing, sorts, reads out its curves, fits a screen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedkper.report.shape import COLUMNS
from terminal import TINY, fedkper, strict, write_data

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"
)
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)
EVIL = "<b>x</b><script>alert(1)</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on two methods with two seeds; the class names hold markup, and a round has no value."""
    folder = tmp_path_factory.mktemp("browser")
    data = write_data(folder / "tiny.npz")
    words = ["compare", "--dataset", data, *TINY, "--rounds", 4, "--methods", "fedavg", "fedkper"]
    assert fedkper(*words, "--seeds", 1, 2, "--out", folder / "runs") == 0
    for path in (folder / "runs").glob("*/run.json"):
        stored = strict(path)
        stored["data"]["classes"] = [EVIL, "second", "third"]
        path.write_text(json.dumps(stored))
    for seed in (1, 2):
        table = folder / "runs" / f"fedavg-seed{seed}" / "rounds.csv"
        head, first, second, *rest = table.read_text().splitlines()
        cells = second.split(",")
        table.write_text("\n".join([head, first, ",".join([cells[0], "", *cells[2:]]), *rest]) + "\n")
    assert fedkper("report", folder / "runs", "--out", folder / "report.html") == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


def show(browser: Any, page: Path, width: int = 1280, scheme: str = "light") -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


def quiet(browser: Any) -> None:
    """Nothing in the console: no script error, nothing that the policy had to refuse."""
    assert browser.get_log("browser") == []


def found(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def texts(browser: Any, selector: str) -> list[str]:
    return [e.text for e in browser.find_elements("css selector", selector)]


def test_it_is_quiet_and_asks_for_nothing(browser: Any, page: Path) -> None:
    browser.get_log("performance")
    show(browser, page)
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    ours = [
        s["request"]["url"] for s in sent if s["documentURL"] == page.as_uri()
    ]  # not the empty first tab's
    assert page.as_uri() in ours
    assert set(ours) <= {page.as_uri(), "data:,"}
    quiet(browser)


def test_the_policy_stops_other_scripts(browser: Any, page: Path, tmp_path: Path) -> None:
    source = page.read_text(encoding="utf-8").replace(
        "</main>", "<script>document.title = 'in'</script></main>"
    )
    (tmp_path / "changed.html").write_text(source, encoding="utf-8")
    show(browser, tmp_path / "changed.html")
    assert browser.title.startswith("Report: ")
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]


def test_the_numbers_shown_are_those_of_the_summaries(browser: Any, page: Path) -> None:
    show(browser, page)
    runs = page.parent / "runs"
    summaries = [strict(runs / f"fedkper-seed{seed}" / "summary.json") for seed in (1, 2)]
    cells = browser.find_elements("css selector", "tr[data-method=FedKPer] td")[: len(COLUMNS)]
    for cell, key in zip(cells, COLUMNS, strict=True):
        values = [s[key]["mean"] for s in summaries if s[key]["mean"] is not None]
        if not values:
            assert cell.text == "–"
            continue
        mean = sum(values) / len(values)
        assert float(cell.get_attribute("data-v")) == pytest.approx(mean, rel=1e-14)
        assert cell.text.splitlines()[0] == f"{mean:.3f}".replace("-", "−").replace("−0.000", "0.000")


def test_the_words_of_a_failed_script_are_nowhere(browser: Any, page: Path) -> None:
    show(browser, page)
    browser.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
    shown = found(browser, "body").text
    for word in ("NaN", "Infinity", "undefined", "null"):
        assert word not in shown
    blocks = browser.find_elements("css selector", "script[type='application/json']")
    for block in blocks:
        json.loads(block.get_attribute("textContent"), parse_constant=lambda name: pytest.fail(name))
    assert len(blocks) == 1


def test_markup_in_names_is_text(browser: Any, page: Path) -> None:
    show(browser, page)
    assert EVIL in texts(browser, "table.heat tbody th")
    assert browser.find_elements("css selector", "table b, table script") == []


def test_a_table_sorts_by_click_and_by_key(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    show(browser, page)
    table = "table.clients "

    def column(number: int) -> list[str]:
        return [
            e.get_attribute("data-v")
            for e in browser.find_elements("css selector", f"{table}tbody tr > :nth-child({number})")
        ]

    head = found(browser, f"{table}th:nth-child(2) button")
    head.click()
    values = [float(v) for v in column(2)]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 1
    assert found(browser, f"{table}th:nth-child(2)").get_attribute("aria-sort") == "descending"
    head.send_keys(Keys.ENTER)
    assert [float(v) for v in column(2)] == sorted(values)
    assert found(browser, f"{table}th:nth-child(2)").get_attribute("aria-sort") == "ascending"
    found(browser, f"{table}th:nth-child(1) button").send_keys(Keys.SPACE)
    assert [int(v) for v in column(1)] == [4, 3, 2, 1, 0]
    assert found(browser, f"{table}th:nth-child(2)").get_attribute("aria-sort") is None
    quiet(browser)


def test_a_curve_reads_out_its_values(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    show(browser, page)
    plot = found(browser, ".plot")
    plot.send_keys(Keys.HOME)
    readout = found(browser, ".readout")
    runs = page.parent / "runs"
    first = sum(_global(runs / f"fedkper-seed{seed}", 0) for seed in (1, 2)) / 2
    assert readout.text.startswith("round 1: ")
    assert f"FedKPer {first:.3f}" in readout.text
    plot.send_keys(Keys.ARROW_RIGHT)
    assert readout.text.startswith("round 2: ")
    assert "FedAvg –" in readout.text  # no seed has a value in that round
    found(browser, ".legend input[data-n='0']").click()
    plot.send_keys(Keys.ARROW_RIGHT)
    assert "FedAvg" not in readout.text
    assert not found(browser, ".plot path.line[data-n='0']").is_displayed()
    quiet(browser)


def _global(run: Path, at: int) -> float:
    return float((run / "rounds.csv").read_text().splitlines()[at + 1].split(",")[1])


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_and_can_be_read(browser: Any, page: Path, width: int, scheme: str) -> None:
    show(browser, page, width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    for selector in ("p.lead", ".soft", ".care p", "nav a", "td", "table.heat td.h", "th button"):
        assert contrast(browser, selector) >= 4.5, selector


def contrast(browser: Any, selector: str) -> float:
    """Contrast ratio of a text with what is behind it (WCAG 2), the lowest of all that the selector finds."""
    return float(
        browser.execute_script(
            """
            const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
            const light = (rgb) => {
              const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
              const [r, g, b] = rgb.map((v) => linear(v / 255));
              return .2126 * r + .7152 * g + .0722 * b;
            };
            const behind = (e) => {
              const [r, g, b, a = 1] = e ? numbers(getComputedStyle(e).backgroundColor) : [255, 255, 255];
              if (a === 1) return [r, g, b];
              const under = behind(e.parentElement);
              return [r, g, b].map((v, i) => v * a + under[i] * (1 - a));
            };
            return Math.min(...[...document.querySelectorAll(arguments[0])].map((e) => {
              const [a, b] = [light(numbers(getComputedStyle(e).color).slice(0, 3)), light(behind(e))];
              return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
            }));
            """,
            selector,
        )
    )


def test_light_and_dark_differ(browser: Any, page: Path) -> None:
    seen = []
    for scheme in ("light", "dark"):
        show(browser, page, scheme=scheme)
        seen.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert seen == ["rgb(255, 255, 255)", "rgb(17, 22, 28)"]


def test_it_prints_in_light_colours_with_everything_unfolded(browser: Any, page: Path) -> None:
    show(browser, page, scheme="dark")
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script("return [...document.querySelectorAll('details')].every((d) => d.open)")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert colour == "rgb(255, 255, 255)"
        assert len(browser.print_page()) > 10_000
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})

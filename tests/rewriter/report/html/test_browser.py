"""The page in headless Chromium: it loads in silence, fits a phone, sorts, and is whole without scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewriter.report.html import render
from tests.rewriter.report.html.browser import Browser, needs_browser
from tests.rewriter.report.html.samples import REPORTS

pytestmark = needs_browser

SHOWN = ("gelu", "relu", "failed", "left", "hostile", "large", "extreme")

OVERFLOWING = """
[...document.querySelectorAll("body *")].filter((each) =>
  !each.closest(".scroll") && !each.matches(".skip") && !each.closest("svg")
  && each.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5
).map((each) => each.outerHTML.slice(0, 120))
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name in SHOWN:
        (folder / f"{name}.html").write_text(render(REPORTS[name]()), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in SHOWN}


def complaints(browser: Browser) -> list[object]:
    """What the console said, policy violations included, and every request beside the page itself."""
    loud = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    requests = [event["params"] for event in browser.events if event["method"] == "Network.requestWillBeSent"]
    others = [each for each in requests if not each["request"]["url"].startswith(("file:", "data:"))]
    return [*(event for event in browser.events if event["method"] in loud), *others, *requests[1:2]]


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", SHOWN)
def test_page_fits_and_is_silent(name: str, width: int, dark: bool, browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages[name], width=width, dark=dark)
    browser.value("for (const each of document.querySelectorAll('details')) each.open = true")
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    assert browser.value(OVERFLOWING) == []
    assert browser.value("matchMedia('(prefers-color-scheme: dark)').matches") is dark
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(253, 252, 250)") is not dark
    assert complaints(browser) == []


def test_policy_stops_what_a_name_would_do(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    """Were escaping forgotten somewhere, the page would still load and run nothing."""
    text = pages["gelu"].read_text(encoding="utf-8")
    bad = "<script>document.title = 'run'</script><img src='https://example.invalid/x' onerror='document.title = 2'>"
    (tmp_path / "bad.html").write_text(text.replace("<main", f"{bad}<main"), encoding="utf-8")
    browser.open(tmp_path / "bad.html", width=1280)
    assert browser.value("document.title").startswith("Passed")
    assert [event for event in browser.events if event["method"] == "Log.entryAdded"]
    assert complaints(browser) != []


def test_hostile_names_run_nothing(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"], width=1280)
    assert browser.value("document.scripts.length") == 1
    assert browser.value("document.images.length") == 0
    assert browser.value("document.querySelector('h1').textContent.trim()") == "Passed"


TABLE = "document.querySelector('#blocks ~ * table')"


def test_tables_sort_with_the_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["large"], width=1280)
    browser.value("document.querySelector('#blocks ~ details').open = true")
    column = f"[...{TABLE}.tBodies[0].rows].map((row) => row.cells[1].textContent)"
    assert browser.value(column) == [str(number) for number in range(1, 101)]
    browser.value(f"{TABLE}.querySelectorAll('thead button')[1].focus()")
    heading = f"{TABLE}.querySelectorAll('thead th')[1].getAttribute('aria-sort')"
    for state, expected in (("ascending", range(1, 101)), ("descending", range(100, 0, -1))):
        browser.press("Enter", 13)
        assert browser.value(heading) == state
        assert browser.value(column) == [str(number) for number in expected]


def test_first_tab_skips_to_the_report(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["gelu"], width=1280)
    browser.press("Tab", 9)
    assert browser.value("document.activeElement.textContent") == "Skip to the report"
    assert browser.value("document.activeElement.getBoundingClientRect().left >= 0")
    browser.press("Enter", 13)
    assert browser.value("location.hash") == "#main"


def test_whole_without_scripts(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["gelu"], width=1280, script=False)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.value("document.querySelectorAll('table').length") >= 5
    assert browser.value("document.querySelectorAll('thead button').length") == 0
    browser.open(pages["gelu"], width=1280)

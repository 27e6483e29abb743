"""The page of a saved report in headless Chromium: hostile names do nothing there either."""

from __future__ import annotations

from pathlib import Path

from rewriter.cli import run
from tests.rewriter.report.html.browser import Browser, needs_browser
from tests.rewriter.report.html.samples import REPORTS

pytestmark = needs_browser


def test_hostile_names_do_nothing(tmp_path: Path, browser: Browser) -> None:
    REPORTS["hostile"]().write(tmp_path / "report.json")
    assert run(["page", str(tmp_path / "report.json"), "-o", str(tmp_path / "page.html"), "-q"]) == 0
    browser.open(tmp_path / "page.html", width=1000)
    loud = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    assert [event for event in browser.events if event["method"] in loud] == []
    assert browser.value("document.querySelectorAll('h2').length") > 2
    assert browser.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")

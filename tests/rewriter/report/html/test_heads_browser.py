"""The page of heads in headless Chromium: what is drawn, mouse and keyboard, narrow and dark, hostile names."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewriter.report.html.page import render_heads
from tests.conftest import slow
from tests.rewriter.report.html.browser import Browser, needs_browser
from tests.rewriter.report.html.test_browser import OVERFLOWING, complaints
from tests.rewriter.report.html.test_page_of_heads import EVIL, sample

pytestmark = needs_browser

PAGES = {"plain": sample("a"), "hostile": sample(EVIL), "long": sample("w" * 5000)}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, made in PAGES.items():
        (folder / f"{name}.html").write_text(render_heads(made), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in PAGES}


def texts(browser: Browser, selector: str) -> list[str]:
    return list(browser.value(f"[...document.querySelectorAll({selector!r})].map((each) => each.textContent)"))


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, False), (1280, True)])
@pytest.mark.parametrize("name", ["plain", "hostile", pytest.param("long", marks=slow)])
def test_it_fits_and_is_silent(name: str, width: int, dark: bool, browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages[name], width=width, dark=dark)
    assert browser.value("document.getElementById('main').hidden") is False
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    assert browser.value(OVERFLOWING) == []
    assert (browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(253, 252, 250)") is not dark
    assert complaints(browser) == []


def test_what_is_drawn(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["plain"], width=1280)
    # The head with the largest attribution comes first.
    assert texts(browser, "#head") == ["a.0.attn.1"]
    assert texts(browser, "#number option") == ["head 0", "head 1"]
    assert browser.value("document.querySelectorAll('#patterns rect.cell').length") == 9
    assert browser.value("document.querySelectorAll('#patterns rect.cell')[8].style.getPropertyValue('--v')") == "0.837"
    assert texts(browser, "#strip span") == ["a", " x", "y"]
    assert browser.value(
        "[...document.querySelectorAll('#strip span')].map((each) => each.classList.contains('minus'))"
    ) == [False, True, False]
    assert texts(browser, "#ranking button")[:2] == ["a.0.attn.1", "a.0.mlp_heads.1"]
    assert "Logit 5 minus logit 6 is 3.00" in texts(browser, "#about")[0]
    assert "Queries read, values read" in texts(browser, "#vocabulary p")[0]
    assert "cannot be shown: a." in texts(browser, "#vocabulary p")[-1]


def test_choosing_heads(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["plain"], width=1280)
    browser.value("document.getElementById('next').click()")
    assert texts(browser, "#head") == ["a.0.mlp_heads.0"]
    assert texts(browser, "#patterns svg text")[:2] == ["itself", "bias 1"]
    assert browser.value("document.querySelectorAll('#patterns rect.cell').length") == 6
    browser.value("document.getElementById('sublayer').value = 'a.0.attn'")
    browser.value("document.getElementById('sublayer').dispatchEvent(new Event('change'))")
    assert texts(browser, "#head") == ["a.0.attn.0"]
    assert browser.value("location.hash") == "#a.0.attn.0"
    browser.value("document.querySelectorAll('#ranking button')[1].click()")
    assert texts(browser, "#head") == ["a.0.mlp_heads.1"]
    assert browser.value("document.activeElement.id") == "head"
    browser.value("[...document.querySelectorAll('#measures button')].at(-1).click()")
    assert browser.value("document.querySelectorAll('#strip span')[2].title") == "2: 2.00"


def test_patterns_are_read_with_mouse_and_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["plain"], width=1280)
    browser.value(
        "document.querySelectorAll('#patterns rect.cell')[3]"
        ".dispatchEvent(new PointerEvent('pointermove', {bubbles: true}))"
    )
    assert texts(browser, "#patterns .reading") == [" x attends to a: 0.5"]
    browser.value("document.querySelector('#patterns svg').focus()")
    browser.press("ArrowDown", 40)
    assert texts(browser, "#patterns .reading") == ["y attends to a: 0.1"]
    browser.press("ArrowRight", 39)
    browser.press("ArrowRight", 39)
    browser.press("ArrowRight", 39)
    assert texts(browser, "#patterns .reading") == ["y attends to y: 0.7"]


def test_hostile_names_run_nothing(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"], width=1280)
    assert browser.value("document.scripts.length") == 2
    assert browser.value("document.images.length") == 0
    assert browser.value("document.title").startswith("Heads: </script>")
    assert texts(browser, "#head")[0].startswith("</script><script>document.title='run'")
    assert texts(browser, "#strip span")[0].startswith("</script>")


def test_without_scripts_it_says_so(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["plain"], width=1280, script=False)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.value("getComputedStyle(document.getElementById('main')).display") == "none"
    assert "which your browser does not run" in browser.value("document.querySelector('noscript').textContent")

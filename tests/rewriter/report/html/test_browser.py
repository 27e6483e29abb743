"""Both pages in headless Chromium: they load in silence, fit a phone, light and dark; names run nothing; keyboard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rewriter.report.html import render, render_heads
from tests.rewriter.report.html.browser import EXECUTABLE, Browser, needs_browser
from tests.rewriter.report.html.samples import EVIL, REPORTS, heads_data

pytestmark = needs_browser

SHOWN = ("gelu", "failed", "left", "hostile", "large", "extreme")
HEADS = {"heads": "a", "heads-hostile": EVIL, "heads-long": "w" * 5000}

OVERFLOWING = """
[...document.querySelectorAll("body *")].filter((each) =>
  !each.closest(".scroll") && !each.matches(".skip") && !each.closest("svg")
  && each.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5
).map((each) => each.outerHTML.slice(0, 120))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Headless Chromium, for all tests of the module."""
    assert EXECUTABLE is not None
    with Browser(EXECUTABLE, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {name: render(REPORTS[name]()) for name in SHOWN}
    made |= {name: render_heads(heads_data(text)) for name, text in HEADS.items()}
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


def complaints(browser: Browser) -> list[object]:
    """What the console said, policy violations included, and every request beside the page itself."""
    loud = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    requests = [event["params"] for event in browser.events if event["method"] == "Network.requestWillBeSent"]
    others = [each for each in requests if not each["request"]["url"].startswith(("file:", "data:"))]
    return [*(event for event in browser.events if event["method"] in loud), *others, *requests[1:2]]


def texts(browser: Browser, selector: str) -> list[str]:
    return list(browser.value(f"[...document.querySelectorAll({selector!r})].map((each) => each.textContent)"))


@pytest.mark.sample(4)
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", [*SHOWN, "heads", "heads-hostile", "heads-long"])
def test_page_fits_and_is_silent(name: str, width: int, dark: bool, browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages[name], width=width, dark=dark)
    browser.value("for (const each of document.querySelectorAll('details')) each.open = true")
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    assert browser.value(OVERFLOWING) == []
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(253, 252, 250)") is not dark
    assert complaints(browser) == []


def test_names_run_nothing(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    """Were escaping forgotten somewhere, the page would still load and run nothing."""
    for name, scripts in (("hostile", 1), ("heads-hostile", 2)):
        browser.open(pages[name], width=1280)
        assert browser.value("document.scripts.length") == scripts
        assert browser.value("document.images.length") == 0
        assert browser.value("document.title") != "run"
    text = pages["gelu"].read_text(encoding="utf-8")
    bad = "<script>document.title = 'run'</script><img src='https://example.invalid/x' onerror='document.title = 2'>"
    (tmp_path / "bad.html").write_text(text.replace("<main", f"{bad}<main"), encoding="utf-8")
    browser.open(tmp_path / "bad.html", width=1280)
    assert browser.value("document.title").startswith("Passed")
    assert complaints(browser) != []


def test_tables_sort_with_the_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["large"], width=1280)
    table = "document.querySelector('#blocks ~ * table')"
    browser.value("document.querySelector('#blocks ~ details').open = true")
    column = f"[...{table}.tBodies[0].rows].map((row) => row.cells[0].textContent)"
    names = [f"model.decoder.layers.{number}.mlp" for number in range(100)]
    assert browser.value(column) == names
    browser.value(f"{table}.querySelector('thead button').focus()")
    for expected in (names, names[::-1]):
        browser.press("Enter", 13)
        assert browser.value(column) == expected


def test_a_head_is_drawn_chosen_and_read(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["heads"], width=1280)
    assert texts(browser, "#parts li") == ["a0.250", " x-0.500", "y2.00", "everything else1.25"]
    # The head with the largest attribution comes first.
    assert texts(browser, "#head") == ["a.0.attn.1"]
    assert browser.value("document.querySelectorAll('#patterns rect.cell')[5].style.getPropertyValue('--v')") == "0.837"
    assert texts(browser, "#strip span") == ["a", " x", "y"]
    assert texts(browser, "#ranking button")[:2] == ["a.0.attn.1", "a.0.mlp_heads.1"]
    assert "Queries read, values read" in texts(browser, "#vocabulary p")[0]
    browser.value("document.querySelector('#patterns svg').focus()")
    browser.press("ArrowUp", 38)
    browser.press("ArrowRight", 39)
    assert texts(browser, "#patterns .reading") == [" x attends to  x: 0.5"]
    assert texts(browser, ".terms")[0].startswith("Why  x for  x: not on this page")
    browser.press("ArrowDown", 40)
    browser.press("ArrowRight", 39)
    assert texts(browser, ".terms p") == ["Why y for y: the score before the softmax is 1.50, a sum over pairs"]
    cells = ["a.0.attn[0]", "a", "3.00", "a", "a", "-1.25", "all other pairs", "0.250", "masks and position biases"]
    assert texts(browser, ".terms td") == [*cells, "-0.500"]
    browser.value("document.querySelector('.terms button').click()")
    assert texts(browser, "#head") == ["a.0.attn.0"]
    browser.value("document.getElementById('next').click()")
    browser.value("document.getElementById('next').click()")
    assert texts(browser, "#head") == ["a.0.mlp_heads.0"]
    assert texts(browser, "#patterns svg text") == ["a", " x", "y", "itself", "bias 1"]
    assert browser.value("location.hash") == "#a.0.mlp_heads.0"


def test_all_heads_on_a_map(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["heads"], width=1280)
    names = "[...document.querySelectorAll('#map button')].map((each) => each.getAttribute('aria-label'))"
    assert browser.value(names) == ["a.0.attn.0", "a.0.attn.1", "a.0.mlp_heads.1", "a.0.mlp_heads.0"]
    drawn = "document.querySelector('#map canvas').getContext('2d').getImageData(0, 0, 3, 3).data"
    opacity = browser.value(f"[...{drawn}].filter((_, place) => place % 4 === 3)")
    assert opacity == pytest.approx([round(255 * each**0.5) for each in (1, 0, 0, 0.5, 0.5, 0, 0.1, 0.2, 0.7)], abs=1)
    browser.value("document.querySelector('#map button').click()")
    assert texts(browser, "#head") == ["a.0.attn.0"]
    browser.value("document.getElementById('bysize').click()")
    assert browser.value(names) == ["a.0.attn.1", "a.0.attn.0", "a.0.mlp_heads.1", "a.0.mlp_heads.0"]
    for text, found in (("mlp_heads", 2), ("ATTN.1", 1), ("b", 4), ("nothing", 0)):
        browser.value(f"document.getElementById('search').value = '{text}'; search()")
        assert texts(browser, "#matching") == [f"{found} of 4"]
        assert browser.value("document.querySelectorAll('#map button.other').length") == 4 - found


def test_heads_that_rest_on_the_first_token(browser: Browser, tmp_path: Path) -> None:
    data, page = heads_data(), tmp_path / "heads.html"
    for head in data["heads"][:2]:
        head["pattern"] = [[[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.6, 0.36, 0.04]]]
    page.write_text(render_heads(data), encoding="utf-8")
    browser.open(page, width=1280)
    cells = "[...document.querySelectorAll('#patterns rect.cell')].slice(3)"
    colours = f"{cells}.map((each) => each.style.fill || each.style.getPropertyValue('--v'))"
    assert browser.value(colours) == ['url("#hatch")', "1.000", "0.333"]
    assert "75 % to the first token: hatched" in texts(browser, "#resting")[0]
    assert texts(browser, ".terms")[0].startswith("Why y for  x: not on this page")
    browser.value("document.getElementById('without').click()")
    assert browser.value(colours) == ["0.775", "0.600", "0.200"]


def test_a_token_and_what_it_attends_to(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["heads"], width=1280)
    browser.value("document.querySelectorAll('#strip span')[2].dispatchEvent(new Event('pointerenter'))")
    assert texts(browser, "#told") == ["y attends most to y (0.7),  x (0.2), a (0.1)."]
    weights = "[...document.querySelectorAll('#strip span')].map((each) => each.style.getPropertyValue('--w'))"
    assert browser.value(weights) == ["0.316", "0.447", "0.837"]
    line = "document.querySelector('#patterns .line')"
    cell = "document.querySelectorAll('#patterns rect.cell')[5]"
    assert browser.value(f"{line}.getAttribute('y') === {cell}.getAttribute('y')")
    browser.value("document.querySelectorAll('#strip span')[2].dispatchEvent(new Event('pointerleave'))")
    assert browser.value(f"{line}.getAttribute('visibility')") == "hidden"
    corner = "{clientX: box.right - 4, clientY: box.top + 4}"  # where nothing is drawn
    browser.value("box = document.querySelector('rect.frame').getBoundingClientRect()")
    browser.value(f"document.querySelector('svg.map').dispatchEvent(new PointerEvent('pointermove', {corner}))")
    assert texts(browser, "#patterns .reading") == ["a attends to y: 0"]

"""The page: its structure, what it never holds, and what it always says; the committed example is one of today's."""

import json
import re
import shlex
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rewriter.cli import run
from rewriter.report import html as page
from rewriter.report.html import render, render_heads, resource, short
from tests.rewriter.report.html.samples import EVIL, HOSTILE, REPORTS, heads_data, large

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """A page taken apart; text is kept with the tags around it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[tuple[str, ...], str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1:] == [tag], (tag, self._open)
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append((tuple(self._open), data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def visible(self) -> str:
        return "".join(text for around, text in self.text if not {"style", "script", "head"} & set(around))

    def of(self, tag: str) -> list[str]:
        return [text.strip() for around, text in self.text if around and around[-1] == tag and text.strip()]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    made = {name: render(make()) for name, make in REPORTS.items()}
    return made | {"heads": render_heads(heads_data()), "heads-hostile": render_heads(heads_data(EVIL))}


each_page = pytest.mark.parametrize("name", REPORTS)
REST = ["Only run", "Blocks", "Operators", "Made with"]
ALL = ["Proved for every input", "Reference measurement of rounding", *REST]
ONE_BLOCK = "1 block, read as 8 attention heads"


@pytest.mark.sample(8)
@each_page
def test_nothing_comes_from_outside(name: str, pages: dict[str, str]) -> None:
    taken = Page(pages[name])
    for tag, attributes in taken.tags:
        assert tag not in {"img", "iframe", "object", "embed", "base", "form", "use", "image", "foreignobject"}, tag
        for key, value in attributes.items():
            assert not key.startswith("on"), (tag, key)
            assert key not in {"style", "srcset", "xlink:href", "src", "action", "ping"}, (tag, key)
            if key == "href":
                assert re.fullmatch(r"#[a-z]+|data:,", value or ""), value
    assert "@import" not in pages[name]
    assert "url(" not in pages[name].split("</style>")[0]


@pytest.mark.parametrize("name", [*REPORTS, "heads", "heads-hostile"])
def test_policy_allows_the_page_itself_and_nothing_else(name: str, pages: dict[str, str]) -> None:
    taken = Page(pages[name])
    policies = [meta["content"] for meta in taken.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    (styles,) = [text for around, text in taken.text if around[-1:] == ("style",)]
    *_, scripts = [text for around, text in taken.text if around[-1:] == ("script",)]
    hashes = f"style-src '{page._hash(styles)}'; script-src '{page._hash(scripts)}'"
    assert policies == [f"default-src 'none'; {hashes}; img-src data:; base-uri 'none'; form-action 'none'"]


@each_page
def test_headings_are_in_order_and_links_lead_somewhere(name: str, pages: dict[str, str]) -> None:
    taken = Page(pages[name])
    levels = [int(tag[1]) for tag, _ in taken.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
    identities = [attributes["id"] for _, attributes in taken.tags if "id" in attributes]
    assert len(identities) == len(set(identities))
    links = [(link["href"] or "")[1:] for link in taken.all("a")]
    assert links[0] == "main"
    assert set(links) <= set(identities)
    references = [value for _, attributes in taken.tags for value in (attributes.get("aria-labelledby") or "").split()]
    assert set(references) <= set(identities)


@each_page
def test_tables_are_named(name: str, pages: dict[str, str]) -> None:
    taken = Page(pages[name])
    assert all(picture.get("aria-hidden") == "true" for picture in taken.all("svg"))
    assert all(text for text in (*taken.of("title"), *taken.of("caption")))
    assert len(taken.all("caption")) == len(taken.all("table")) == len(taken.all("thead"))
    assert all(heading.get("scope") in {"col", "row"} for heading in taken.all("th"))
    assert all(region.get("aria-label") for _, region in taken.tags if region.get("role") == "region")
    assert taken.all("html") == [{"lang": "en"}]


@pytest.mark.parametrize(
    ("name", "verdict", "meaning", "sections"),
    [
        ("gelu", "Passed", "1 block, read as 72 attention heads, certified for every input, run on cpu", ALL),
        ("failed", "Failed", "refuted, nothing was written", ["What failed", *ALL[1:]]),
        ("left", "Nothing to convert", "1 candidate left", ["Blocks", "Made with"]),
        ("nothing-at-all", "Nothing to convert", "no candidate was found", ["Made with"]),
        ("dry-run", "Planned", f"{ONE_BLOCK} in <memory>; nothing was written", ["Blocks", "Made with"]),
        ("not-proved", "Not proved", f"{ONE_BLOCK}, in memory", REST[1:]),
        ("extreme", "Failed", "And 800 more; the JSON report holds them all.", ["What failed", ALL[0], *REST]),
    ],
)
def test_verdict_and_sections(
    name: str, verdict: str, meaning: str, sections: list[str], pages: dict[str, str]
) -> None:
    taken = Page(pages[name])
    assert taken.of("h1") == [verdict]
    assert taken.of("h2") == sections
    assert meaning in taken.visible()
    assert taken.of("title")[0].startswith(f"{verdict}: ")
    assert ("differs" in taken.of("span")) is (name == "failed")


def test_two_sentences_say_how_sure_it_is(pages: dict[str, str]) -> None:
    shown = " ".join(Page(pages["gelu"]).visible().split())
    proved, only_run = (shown.index(word) for word in ("Proved for every", "Only run on"))
    assert proved < only_run < shown.index(" ".join(ALL))
    assert "over the reals: each activation within 2.1e-08 of max(1, |f|); all else identical. Rounding is" in shown
    measured = r"measured with onnxruntime 1\.32\.0 on AVX-512; here: onnxruntime \d.*float321\.7e-07"
    assert re.search(measured, shown)
    ran = r"Only run on 3 inputs, on cpu(, cuda)?: the outputs differ by at most \d.\de-\d+; against float64 their root"
    assert re.search(ran, shown)
    assert "certainty" not in str(Page(pages["dry-run"]).all("ul"))


def test_left_blocks_have_their_reason_and_long_tables_are_folded(pages: dict[str, str]) -> None:
    taken = Page(pages["left"])
    assert any(text.startswith("no known activation") for text in taken.of("span"))
    assert taken.all("details") == []
    assert [text for text in Page(pages["large"]).of("summary") if "Left as they were" in text]
    assert {*map(str, Page(pages["large"]).all("details"))} == {"{}"}


def test_hostile_names_are_text(pages: dict[str, str]) -> None:
    taken = Page(pages["hostile"])
    known = {tag for tag, _ in Page(pages["large"]).tags} | {"ul", "li", "p", "details"}
    assert {tag for tag, _ in taken.tags} <= known
    assert len(taken.all("script")) == 1
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x00\x1b]", pages["hostile"])
    shown = taken.visible()
    for name in HOSTILE:
        if name.isprintable() and len(name) < 100:
            assert name in shown
    assert "\N{REPLACEMENT CHARACTER}drow\N{REPLACEMENT CHARACTER}" in shown
    assert "a" * 301 not in shown
    assert "7 * 7" in shown
    assert "שלום" in " ".join(taken.of("bdi")), "isolated from the direction of the text"


def test_a_large_model_makes_a_small_page(pages: dict[str, str]) -> None:
    assert len(pages["large"].encode()) < 2_000_000
    assert len(Page(pages["large"]).all("tr")) > 2100
    assert "model.decoder.layers.1999.conv" in pages["large"]
    assert render(large(3, 3)) == render(large(3, 3))


@pytest.mark.slow
def test_as_many_heads_as_a_page_has_make_a_small_page() -> None:
    """40 neurons and 40 original heads on 256 tokens, with the longest numbers, and 16 weights that are shown a row."""
    uniform, data = np.random.default_rng(0).uniform(size=(256, 256)), heads_data()
    weights = np.where(uniform < 1 / 16, np.tril(uniform) + 0.0101, 0.0).round(4)
    first, neuron = data["heads"][0], data["heads"][-1]
    row = {"activation": [-1.234e-05] * 256, "effects": [-1.234e-05] * 256}
    heads = [{**first, **row, "pattern": [weights.tolist()]}] * 40
    data["heads"] = heads + [{**neuron, **row, "pattern": [(uniform[:, :2] / 10).round(4).tolist()] * 2}] * 40
    made = render_heads(data)
    assert len(made.encode()) < 2_000_000
    shown = json.loads(Page(made).of("script")[0])["heads"][0]["pattern"]
    rows = [[weight for each in row for weight in (-each * [0] if each < 0 else [each])] for row in shown[0]]
    np.testing.assert_allclose([row + [0] * (256 - len(row)) for row in rows], 1e4 * weights, atol=1e-8)


@pytest.mark.parametrize("text", [EVIL, "x" * 5000], ids=["hostile", "long"])
def test_names_change_nothing_but_text_in_the_page_of_heads(text: str) -> None:
    found, plain = Page(render_heads(heads_data(text))), Page(render_heads(heads_data()))
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in plain.tags]
    data, script = found.of("script")
    assert script == plain.of("script")[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(|https://", script)
    assert not {*"<>"} & {*data}
    shown = json.loads(data)
    assert len(shown["model"]) <= 245
    assert shown["model"].isprintable()
    assert shown["heads"][0]["tokens"][0]["top"][0][0] == shown["model"]


def test_short_keeps_both_ends() -> None:
    assert short("x" * 240) == "x" * 240
    assert short("begin" + "x" * 10**6 + "end") == f"begin{'x' * 115}…{'x' * 116}end"
    assert short("a\x00\u202eb") == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"


# -- the committed example, made as the documentation says ------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[4]
EXAMPLE = ROOT / "docs" / "example-report.html"


def documented() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`rewrite (.* --html docs/example-report\.html)`", text)
    return shlex.split(command)


@pytest.mark.slow
def test_example_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = EXAMPLE.read_text(encoding="utf-8")
    assert f"<style>{resource('style.css')}</style>" in committed
    assert f"<script>{resource('script.js')}</script>" in committed
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "docs").mkdir()
    assert run([*documented(), "-q", "--provider", "cpu"]) == 0
    made = (tmp_path / "docs" / EXAMPLE.name).read_text(encoding="utf-8")
    headings = re.compile(r"<h[1-3].*?</h[1-3]>|<caption>.*?</caption>|<th scope=\"col\".*?</th>")
    assert headings.findall(made) == headings.findall(committed)
    assert re.findall("<dt>.*?</dt>", made) == re.findall("<dt>.*?</dt>", committed)


def test_example_is_small_and_tells_nothing_of_its_machine() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text) < 100_000
    assert not re.search(r"(?<![<\w.])/(?:home|root|tmp|work|usr)\b", text)

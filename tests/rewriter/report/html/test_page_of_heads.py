"""The page of heads as text: structure, escaping, the policy. Its script runs in test_heads_browser.py."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rewriter import UsageError
from rewriter.report.html import rendering
from rewriter.report.html.page import render_heads, write_heads_page
from tests.rewriter.report.html.test_page import contrast, themes

EVIL = "</script><script>document.title='run'</script><!--<img src=x onerror=alert(1)>\u2028\u202e\x1b[31m&amp;'\"\\"


def head(sublayer: str, number: int, kind: str, text: str) -> dict[str, Any]:
    pattern = (
        [[[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]]
        if kind == "neuron"
        else [[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.1, 0.2, 0.7]]]
    )
    scores = [[text, 1.5], ["b", 0.5]]
    return {
        "name": f"{sublayer}.{number}",
        "sublayer": sublayer,
        "number": number,
        "kind": kind,
        "cross": False,
        "activation": [0.5, -1.0, 2.0],
        "pattern": pattern,
        "tokens": [
            {"side": side, "share": 1.0, "top": scores, "bottom": [["c", -0.5], [text, -2.0]]} for side in ("QV", "O")
        ],
        "effects": [0.1, -0.2, 0.3 + number],
        "effect": 0.2 + number,
    }


def sample(text: str = "a") -> dict[str, Any]:
    """A small page; `text` stands wherever a model or a tokenizer could put something."""
    attention, neurons = f"{text}.0.attn", f"{text}.0.mlp_heads"
    return {
        "model": text,
        "tokens": [{"place": place, "text": each} for place, each in enumerate((text, " x", "y"))],
        "logit": {"logit": 5, "minus": 6, "position": -1, "output": None, "value": 3.0},
        "sublayers": [
            {"name": attention, "kind": "heads", "count": 2, "shown": 2},
            {"name": neurons, "kind": "neurons", "count": 9, "shown": 2},
        ],
        "heads": [
            head(name, number, kind, text)
            for name, kind in ((attention, "head"), (neurons, "neuron"))
            for number in (0, 1)
        ],
        "missing": {"writes": text},
        "notes": [text],
    }


class Parts(HTMLParser):
    """Elements with their attributes, and the text of scripts, styles and everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag if tag in ("script", "style", "title", "h1") else ""

    def handle_endtag(self, _tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self._open, []).append(data)


def parts(text: str) -> Parts:
    made = Parts()
    made.feed(text)
    made.close()
    return made


@pytest.mark.parametrize("text", ["a", EVIL, "x" * 5000], ids=["plain", "hostile", "long"])
def test_names_change_nothing_but_text(text: str) -> None:
    found, plain = parts(render_heads(sample(text))), parts(render_heads(sample()))
    assert found.tags == [
        (tag, {**attributes, "content": plain.tags[place][1]["content"]} if "content" in attributes else attributes)
        for place, (tag, attributes) in enumerate(found.tags)
    ]
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in plain.tags]
    assert found.text["style"] == plain.text["style"]
    data, script = found.text["script"]
    assert script == plain.text["script"][1]
    shown = json.loads(data)
    assert "<" not in data
    assert ">" not in data
    assert len(shown["model"]) <= 245
    assert shown["model"].isprintable()
    assert shown["heads"][0]["tokens"][0]["top"][0][0] == shown["model"]
    assert shown["heads"][0]["effects"] == [0.1, -0.2, 0.3]


def test_policy_allows_the_page_itself_and_nothing_else() -> None:
    found = parts(render_heads(sample(EVIL)))
    (policy,) = [each["content"] for tag, each in found.tags if each.get("http-equiv") == "Content-Security-Policy"]
    style, script = found.text["style"][0], found.text["script"][1]
    assert policy == rendering.policy(style, script)
    assert rendering._hash(script) in policy
    assert [each for tag, each in found.tags if tag == "script"] == [{"type": "application/json", "id": "data"}, {}]
    for _, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "style")]
        assert attributes.get("href", "#") is not None
        assert str(attributes.get("href", "#")).startswith(("#", "data:,"))
    assert "http://" not in re.sub(r"http://www\.w3\.org/2000/svg", "", script)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(|https://", script)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast(theme: int) -> None:
    """WCAG AA: 4.5 for text on coloured tokens, 3 for the cursor and the darkest cell."""
    own = dict(
        re.findall(r"--([\w-]+): (#\w+)", re.findall(r":root \{(.*?)\}", rendering.resource("heads.css"))[theme])
    )
    shared = themes()[("light", "dark")[theme]]
    for ground in ("plus", "minus"):
        assert contrast(shared["ink"], own[ground]) >= 4.5
    for mark in ("minus-line", "hot"):
        assert contrast(own[mark], shared["paper"]) >= 3.0
    assert contrast(own["hot"], own["cold"]) >= 3.0


def test_written_atomically_and_only_with_jinja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "heads.html"
    write_heads_page(sample(), path)
    assert path.read_text(encoding="utf-8") == render_heads(sample())
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(UsageError, match=r"pip install 'attnonly\[report\]'"):
        write_heads_page(sample(EVIL), path)
    assert [each.name for each in tmp_path.iterdir()] == ["heads.html"]

"""docs/playground.html: its coefficients are those of the table, and draw the activations in numpy and in a browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.playground import PAGE, POINTS, SHOWN, made
from tests.conftest import slow

TEXT = PAGE.read_text(encoding="utf-8")
SIGMOID = 1 / (1 + np.exp(-POINTS))
EXACT = {
    "silu": POINTS * SIGMOID,
    "gelu": np.asarray([y * (1 + math.erf(y / math.sqrt(2))) / 2 for y in POINTS]),
    "swiglu": POINTS * SIGMOID,
}


def written(program: dict[str, Any], y: Any, z: Any) -> Any:
    """The sum over the heads of weight times value, as the page computes it."""
    total = program["linear"] * z + program["constant"]
    for head in program["heads"]:
        own = head["alpha"] * y * y + head["beta"] * y + head["gamma"]
        logits = np.stack([own, *(slope * y + offset for slope, offset, _ in head["tokens"])])
        weights = np.exp(logits - logits.max(0))
        weights /= weights.sum(0)
        total = total + weights[0] * (head["c"] * z + head["d"])
        total = total + sum(w * value for w, (_, _, value) in zip(weights[1:], head["tokens"], strict=True))
    return total


def test_it_is_up_to_date() -> None:
    assert made(TEXT) == TEXT


@pytest.mark.parametrize(("name", "within"), [("silu", 1e-14), ("gelu", 1e-6), ("swiglu", 1e-6)])
def test_the_heads_draw_the_activation(name: str, within: float) -> None:
    match = re.search(r'<script id="programs" type="application/json">\n(.*?)</script>', TEXT, re.DOTALL)
    assert match is not None
    program = json.loads(match[1])[name]
    assert np.abs(np.asarray(program["exact"]) - EXACT[name]).max() < 1e-6
    source = -0.8 if program["gate"] else 1.0
    drawn = written(program, POINTS, np.full_like(POINTS, source) if program["gate"] else POINTS)
    assert np.abs(drawn - (source * EXACT[name] if program["gate"] else EXACT[name])).max() < within
    assert set(SHOWN) == set(json.loads(match[1]))


def test_it_fetches_nothing() -> None:
    assert re.findall(r'(?:src|href)="|url\(|fetch\(|import ', TEXT) == []
    assert set(re.findall(r"https?://[^\s\"']+", TEXT)) == {"http://www.w3.org/2000/svg"}


@slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_in_a_browser(tmp_path: Path) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path}"]
    page = f"file://{PAGE}?which=gelu&y=-1.5"
    done = subprocess.run(["chromium", *options, "--dump-dom", page], capture_output=True, text=True, check=True)
    match = re.search(r"GELU at y = -1\.50: 1 head writes (-?\d\.\d+)", done.stdout)
    assert match is not None
    assert float(match[1]) == pytest.approx(-1.5 * (1 + math.erf(-1.5 / math.sqrt(2))) / 2, abs=1e-6)
    assert done.stdout.count('class="other"') == 8

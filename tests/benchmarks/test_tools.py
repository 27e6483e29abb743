"""benchmarks/tools: the wrong models are wrong as they say, runs are reported, and the page is what the results say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common import RESULTS, ROOT
from benchmarks.tools import page
from benchmarks.tools.conduct import Tool, try_out
from benchmarks.tools.judges import JUDGES, Judge, Pair, ask
from benchmarks.tools.wrong import LONGEST_RIGHT, TOKEN, VARIANTS, write

ORIGINAL = ROOT / "models" / "silu-decoder.onnx"


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"same": ORIGINAL, **write(ORIGINAL, tmp_path_factory.mktemp("wrong"))}


def logits(path: Path, ids: np.ndarray) -> Any:
    import onnxruntime

    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    return onnxruntime.InferenceSession(path).run(["logits"], feeds)[0]


def test_they_are_wrong_as_they_say(variants: dict[str, Path]) -> None:
    ids = np.random.default_rng(0).integers(0, TOKEN, (1, 48))
    right = logits(ORIGINAL, ids)
    off = {name: np.abs(logits(path, ids) - right).max(-1)[0] for name, path in variants.items()}
    assert {name for name, each in off.items() if each.max() > 1e-4} == {"sign", "weight", "leak", "swapped", "long"}
    assert off["same"].max() == off["nan"].max() == 0
    assert off["sign"].max() > 0.1
    assert off["weight"].max() < 0.01
    assert off["long"][:LONGEST_RIGHT].max() == 0 < 1e-3 < off["long"][LONGEST_RIGHT:].min()
    assert np.abs(logits(variants["leak"], ids[:, :1]) - logits(ORIGINAL, ids[:, :1])).max() == 0
    changed = logits(variants["swapped"], ids)[..., [6, 5]]
    assert np.array_equal(changed, right[..., [5, 6]])
    ids[0, 7] = TOKEN
    assert np.flatnonzero(np.isnan(logits(variants["nan"], ids)).any(-1)[0]).tolist() == [7]


COPY = "import shutil, sys; shutil.copyfile(*sys.argv[1:])"


@pytest.mark.parametrize(
    ("situation", "file"), [("cleanly", "whole"), ("truncated", "broken"), ("taken", "whole"), ("full", "broken")]
)
def test_a_tool_that_copies(tmp_path: Path, situation: str, file: str) -> None:
    tool = Tool("copy", "here", lambda model, out, _: ["python", "-c", COPY, str(model), str(out)])
    row = try_out(tool, {"here": Path(sys.executable).parent}, ORIGINAL, situation, tmp_path)
    assert row["file"] == file
    assert row["traceback"] == (situation == "full")


def test_a_judge_is_asked(tmp_path: Path) -> None:
    here = {"here": Path(sys.executable).parent}
    pair = Pair(ORIGINAL, ORIGINAL, tmp_path)

    def judge(code: str, says: str = "") -> bool:
        made = Judge("judge", "here", "", "", lambda _: [["python", "-c", code]], says=says)
        caught: bool = ask(made, here, pair)["caught"]
        return caught

    assert judge("raise SystemExit(1)")
    assert not judge("")
    assert judge("print('they differ')", says="differ")
    with pytest.raises(RuntimeError, match="did not judge"):
        judge("1 / 0")


def test_the_page_is_up_to_date() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.made(text) == text
    assert page.made(text.replace("**missed**", "caught")) == text


def test_the_results_are_whole() -> None:
    text = (RESULTS / "tools.json").read_text(encoding="utf-8")
    results = json.loads(text)
    assert set(results["judges"]) == set(JUDGES)
    assert all(set(VARIANTS) <= set(row["said"]) for row in results["judges"].values())
    # No folder of the machine that made them.
    assert re.search(r"[\s'\"(]/\w", text) is None

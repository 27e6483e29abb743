"""The pass that CONTRIBUTING.md shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
import pytest

from rewriter import ExitStatus, rewrite
from tests.textmodels import FIRST, SILU, mlp

ROOT = Path(__file__).parents[1]


def test_the_example_of_a_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    model = tmp_path / re.findall(r'rewrite\("(.*?)"', code)[0]
    model.parent.mkdir()
    made = mlp(SILU, first=f"i = Identity(z) x = Neg(i) {FIRST}", inputs="float[batch, tokens, 4] z")
    made.graph.node[0].name = "copy"
    onnx.save(made, model)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)  # noqa: S102 - our own documentation
    report = names["report"]
    assert report.exit_status is ExitStatus.CONVERTED
    assert "Identity" not in {node.op_type for node in report.rewritten.graph.node}
    without: Any = rewrite(model).rewritten
    assert "Identity" in {node.op_type for node in without.graph.node}

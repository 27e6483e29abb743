"""The pass that CONTRIBUTING.md shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
import pytest

from rewriter import ExitStatus
from rewriter.pipeline import Unit
from tests.textmodels import mlp

ROOT = Path(__file__).parents[1]


def test_the_example_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)  # noqa: S102 - our own documentation
    report = names["report"]
    assert report.exit_status is ExitStatus.CONVERTED
    unit = Unit(mlp("i = Identity(y) h = Relu(i)"), onnx.numpy_helper.to_array)
    assert "Identity" not in {node.op_type for node in names["DropIdentities"]("none").run(unit).model.graph.node}

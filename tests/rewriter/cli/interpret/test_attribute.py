"""`rewrite attribute`: tables, JSON, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rewriter import attribute
from rewriter.cli import run
from tests.committed import FOLDER

MODEL = FOLDER / "silu-decoder.onnx"


def test_tables(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["attribute", str(MODEL), "--inputs", str(given), "--logit", "5", "--top", "3", "--patching"]) == 0
    text = capsys.readouterr().out
    wanted = attribute(MODEL, given, 5)
    lines = text.splitlines()
    assert lines[0] == f"logit {wanted.logit:.6g}"
    assert sum(line.startswith("  ") for line in lines) == 6
    rows = [line.split() for line in lines if line.startswith("  ")]
    sizes = [abs(float(value)) for value, _ in rows]
    assert sizes[:3] == sorted(sizes[:3], reverse=True)
    name, _, place = rows[0][1].rstrip("]").partition("[")
    assert float(rows[0][0]) == pytest.approx(float(wanted.direct[name].reshape(-1)[int(place or 0)]), abs=1e-6)
    assert "correlation with patching" in lines[-1]


def test_json(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["attribute", str(MODEL), "--inputs", str(given), "--logit", "5-6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(float(np.sum(part)) for part in found["paths"].values()) == pytest.approx(found["logit"], abs=1e-9)
    assert abs(found["residuals"]["direct"]) < 1e-9
    assert found["correlation"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--logit", "4000"], "there is no logit 4000"), ([], "Missing option '--logit'")],
)
def test_refusals(options: list[str], message: str, given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["attribute", str(MODEL), "--inputs", str(given), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1

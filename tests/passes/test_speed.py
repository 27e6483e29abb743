"""The figures that users are told are those that were measured, and only slow models are told of."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from passes.speed import MEASURED, Measured
from rewriter import rewrite
from tests.committed import FOLDER
from tests.textmodels import ERF_GELU, SILU, mlp

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "performance.json"


@pytest.mark.parametrize("measured", MEASURED.values(), ids=lambda measured: measured.model)
def test_figures_are_those_of_the_benchmark(measured: Measured) -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    own = [row for row in rows if row["model"] == measured.model and row["type"] == "float32"]
    mean = sum(row["rewritten"]["paired"] for row in own) / len(own)
    assert measured.ratio == round(mean, 2)


def test_slower_models_say_so() -> None:
    def told(model: onnx.ModelProto | Path, form: str = "local") -> str:
        notes = rewrite(model, dry_run=True, form=form).notes
        return "".join(note for note in notes if "slower" in note)

    geglu = mlp(f"u = MatMul(x, V1) {ERF_GELU.replace('h = ', 'g = ')} h = Mul(g, u)")
    assert told(geglu) == (
        "expect a slower model on CPU, by measurement (times the original): GEGLU at Gemma 2B's widths 1.16; "
        "see 'rewrite bench'"
    )
    assert not told(geglu, "masked")
    assert not told(FOLDER / "gelu-encoder.onnx")
    assert not told(mlp(SILU))

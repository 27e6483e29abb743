"""Bias tokens through exported networks of more architectures: fused projections, rotations and windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from passes.options import FormOptions, Options
from passes.plan import apply, make_plan
from rewriter import ExitStatus, rewrite
from rewriter.proof.inputs.cases import make_cases
from tests.conftest import Export
from tests.oracle import evaluate

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.exports, pytest.mark.filterwarnings("ignore")]

OPTIONS: dict[str, Any] = {"max_tokens": 64}
MODELS = (
    *((name, exporter) for name in ("phi3", "modernbert") for exporter in ("torchscript", "dynamo")),
    ("glm", "dynamo"),
)
ERROR = 1e-6
"""In float64, over the largest output: the programs' errors (GELU 8.1e-8) and the rounding of gates."""


@pytest.mark.parametrize(("name", "exporter"), MODELS)
def test_the_network_is_the_same_function(name: str, exporter: str, export: Export) -> None:
    """In float64 numpy that shares nothing with the proof, on generated inputs of several sizes."""
    model = onnx.load(export(name, exporter))
    plan = make_plan(model, Options(form="whole", forms=FormOptions(**OPTIONS)))
    assert len(plan.conversions) == 2, plan.left
    result = apply(plan)
    for case in make_cases(model, seed=3)[:4]:
        expected, found = (evaluate(each, case.feeds) for each in (model, result))
        for output, array in expected.items():
            assert found[output].shape == array.shape
            np.testing.assert_allclose(found[output], array, rtol=0.0, atol=ERROR * np.abs(array).max(initial=1.0))


@pytest.mark.parametrize(("name", "exporter"), MODELS)
def test_the_proof_passes(name: str, exporter: str, export: Export, tmp_path: Path) -> None:
    report: Any = rewrite(export(name, exporter), tmp_path / "out.onnx", form="whole", **OPTIONS)
    assert report.exit_status is ExitStatus.CONVERTED, report.validation and report.validation.failures
    assert len(report.converted) == 2
    assert report.validation.providers["cpu"].error_ratio <= 2.0


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_form_whole_refuses_a_cache(exporter: str, export: Export) -> None:
    plan = make_plan(onnx.load(export("gpt2-cache", exporter)), Options(form="whole", forms=FormOptions(max_tokens=64)))
    assert not plan.conversions
    assert all("it appends tokens; use form masked" in left.miss.reason for left in plan.left)

"""The quick proof: every block, and two cases end to end; the report says which proof it was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from rewriter import ExitStatus, Report, rewrite
from rewriter.api.rewriting import made
from rewriter.cli import run
from rewriter.proof.claims import Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.run.model import run_model
from rewriter.proof.run.whole import ModelRuns
from rewriter.report.html.page import render, verdict_of
from tests.committed import FOLDER
from tests.textmodels import SILU, mlp

MODEL = FOLDER / "silu-decoder.onnx"


@pytest.fixture(scope="module")
def reports() -> tuple[Report, Report]:
    return rewrite(MODEL), rewrite(MODEL, quick=True)


def test_every_block_but_few_cases(reports: tuple[Report, Report]) -> None:
    full, quick = (report.validation for report in reports)
    assert full is not None
    assert quick is not None
    assert quick.passed
    assert (full.quick, quick.quick) == (False, True)
    assert [block.name for block in quick.blocks] == [block.name for block in full.blocks]
    assert all(block.block_error is not None for block in quick.blocks)
    assert quick.cases == ("batch 3, sequence 17", "batch 1, sequence 1")
    assert set(quick.cases) < set(full.cases)
    assert quick.providers["cpu"].outputs.keys() == full.providers["cpu"].outputs.keys()


def test_the_report_says_so(reports: tuple[Report, Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full, quick = reports
    assert [each.to_json()["validation"]["quick"] for each in reports] == [False, True]
    assert ("quick proof" in verdict_of(quick).meaning, "quick" in verdict_of(full).meaning) == (True, False)
    assert ("Proved quickly" in render(quick), "Proved quickly" in render(full)) == (True, False)
    assert run([str(MODEL), "-o", str(tmp_path / "out.onnx"), "--quick"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "quick proof: every block was proved, but the model end to end on two inputs only" in out
    assert "proved on cpu by the quick proof, end to end on two inputs; written to" in out


def test_the_first_case_that_the_model_accepts(tmp_path: Path) -> None:
    inputs = {f"{name}/x": np.ones(shape, np.float32) for name, shape in {"a": (1, 2, 4), "b": (1, 3, 4)}.items()}
    np.savez(tmp_path / "inputs.npz", **inputs)  # type: ignore[arg-type]
    model = mlp(SILU)
    table = numpy_helper.from_array(np.zeros((1, 3, 4), np.float32), "only_three_tokens")
    model.graph.initializer.append(table)
    node = next(node for node in model.graph.node if "out" in node.output)
    node.output[0] = "before"
    model.graph.node.append(onnx.helper.make_node("Add", ["before", "only_three_tokens"], ["out"]))
    found = rewrite(model, inputs=tmp_path / "inputs.npz", quick=True).validation
    assert found is not None
    assert (found.passed, found.cases, len(found.skipped)) == (True, ("b",), 1)
    assert found.skipped[0].startswith("a: ")


def _key(model: onnx.ModelProto) -> None:
    tensor = next(each for each in model.graph.initializer if each.name.endswith("/heads/key"))
    tensor.CopyFrom(numpy_helper.from_array(np.array(1.001, np.float32), tensor.name))


def test_a_wrong_block_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*arguments: object) -> onnx.ModelProto:
        result = made(*arguments)  # type: ignore[arg-type]
        _key(result)
        return result

    monkeypatch.setattr(f"{rewrite.__module__}.made", planted)
    report = rewrite(mlp(SILU), quick=True)
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert report.validation is not None
    assert report.validation.quick


def test_few_cases_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[int] = []

    def counted(side: Side, given: Sequence[Case], *arguments: Any, **options: Any) -> ModelRuns:
        cases.append(len(given))
        return run_model(side, given, *arguments, **options)

    monkeypatch.setattr("rewriter.proof.validate.run_model", counted)
    rewrite(mlp(SILU), quick=True)
    assert set(cases) == {2}

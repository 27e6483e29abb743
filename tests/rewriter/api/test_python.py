"""What Python users meet: inputs as arrays, models in memory of any kind, results that can be tested and printed."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import NothingToConvertError, UsageError, ValidationError, diff, inspect, rewrite, validate
from rewriter.errors import ExitStatus, ModelError
from tests.cases import plant
from tests.changes import change_values, weight
from tests.textmodels import SILU, mlp

RNG = np.random.default_rng(3)


def tokens(*shape: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": RNG.normal(size=(*shape, 4)).astype(np.float32)}


@pytest.mark.parametrize("inputs", [tokens(2, 3), [tokens(2, 3), tokens(1, 7)]])
def test_inputs_as_arrays(inputs: Any) -> None:
    report = rewrite(mlp(SILU), inputs=inputs)
    cases = [inputs] if isinstance(inputs, dict) else inputs
    assert len(report.validation.cases) == len(cases)
    assert validate(mlp(SILU), report.rewritten, inputs=inputs)


def test_a_rank_that_only_the_given_inputs_tell() -> None:
    model = mlp(SILU)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(UsageError, match="no declared shape: commands with --inputs take its values"):
        rewrite(model)
    found = rewrite(model, inputs=tokens(2, 3)).validation.certificate
    assert found.certified
    assert found.tried_only == "'x' had one rank"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "inputs must be the path of an npz file, arrays by input name, or a list of those"),
        ({}, "inputs must be the path"),
        ([3], "inputs must be the path"),
        ({"y": np.zeros(3)}, "inputs: the model has no input 'y'; its inputs are 'x'"),
        ({"x": np.zeros((2, 3, 5), np.float32)}, r"inputs: input 'x' has shape \[2, 3, 5\]"),
        ({"x": [[["a"] * 4]]}, "inputs: input 'x' is of type <U1"),
        ([tokens(1, 2), {"y": np.zeros(3)}], "the model has no input 'y'"),
    ],
)
def test_inputs_that_do_not_fit(inputs: Any, message: str) -> None:
    for verb in (lambda: rewrite(mlp(SILU), inputs=inputs), lambda: validate(mlp(SILU), mlp(SILU), inputs=inputs)):
        with pytest.raises(UsageError, match=message):
            verb()


@pytest.mark.slow
def test_models_in_memory_of_every_kind(tmp_path: Path) -> None:
    onnx_ir = pytest.importorskip("onnx_ir")
    proto = mlp(SILU)
    expected = rewrite(proto).rewritten
    as_bytes = rewrite(proto.SerializeToString())
    assert as_bytes.rewritten == expected.SerializeToString()
    as_ir = rewrite(onnx_ir.from_proto(proto))
    assert isinstance(as_ir.rewritten, onnx_ir.Model)
    assert validate(as_ir.rewritten, expected.SerializeToString())
    assert inspect(as_bytes.rewritten).report.converted == inspect(expected).report.converted
    onnx.save(proto, tmp_path / "model.onnx")
    assert isinstance(rewrite(tmp_path / "model.onnx").rewritten, onnx.ModelProto)
    assert as_bytes.model == as_ir.model == "<memory>"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (b"no model", "the model in memory is "),
        (b"", "the model in memory is "),
        (3, "a model must be a path, bytes, an onnx.ModelProto or an onnx_ir.Model, not int"),
    ],
)
def test_models_in_memory_that_are_none(model: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        rewrite(model)


@pytest.mark.slow
def test_a_comparison_is_true_if_the_models_agree() -> None:
    other = mlp(SILU)
    change_values(other.graph.initializer[0], "v *= 1.5")
    same, different = validate(mlp(SILU), mlp(SILU)), diff(mlp(SILU), other)
    assert same
    assert not different
    assert same.raise_for_status() is same
    with pytest.raises(
        ValidationError, match=r"DIFFERENT  <memory> does not compute what <memory> does; output out is off by "
    ):
        different.raise_for_status()
    assert repr(same).startswith(
        "<Comparison: CERTIFIED  <memory> computes what <memory> does for every input, and on cpu, error "
    )


@pytest.mark.slow
def test_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    report = rewrite(mlp(SILU))
    assert report.raise_for_status() is report
    assert repr(report).startswith("<Report: PASSED  1 block, read as 8 attention heads, certified for every input, ")
    assert len(repr(report)) < 120
    planned = "<Report: PLANNED  1 block, read as 8 attention heads in <memory>; nothing was written>"
    assert repr(rewrite(mlp(SILU), dry_run=True)) == planned
    assert "NOT PROVED" in repr(rewrite(mlp(SILU), validate=False))
    nothing = rewrite(mlp(SILU), only="a.b")
    assert nothing.exit_status is ExitStatus.NOTHING_TO_CONVERT
    with pytest.raises(NothingToConvertError, match="NOTHING TO CONVERT  in <memory>"):
        nothing.raise_for_status()
    plant(monkeypatch, lambda model: change_values(weight(model, "W2"), "v *= 2"))
    failed = rewrite(mlp(SILU))
    with pytest.raises(ValidationError, match=r"FAILED  1 block, read as 8 attention heads.*; "):
        failed.raise_for_status()

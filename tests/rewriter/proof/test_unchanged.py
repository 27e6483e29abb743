"""What no block claims must be unchanged, bit for bit: differences that exact arithmetic would excuse are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from passes.plan import apply
from rewriter import ExitStatus, rewrite
from tests.textmodels import ERF_GELU, SILU, mlp

Spoil = Callable[[onnx.ModelProto], None]


def nudge(weight: str) -> Spoil:
    def spoil(model: onnx.ModelProto) -> None:
        (tensor,) = (each for each in model.graph.initializer if each.name == weight)
        values = numpy_helper.to_array(tensor).copy()
        values.reshape(-1)[0] += np.float32(1e-6)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    return spoil


def swap_operands(model: onnx.ModelProto) -> None:
    node = next(each for each in model.graph.node if "out" in each.output)
    operands = list(node.input)[::-1]
    node.input[:] = operands


def extra_node(model: onnx.ModelProto) -> None:
    node = next(each for each in model.graph.node if "out" in each.output)
    node.output[0] = "almost"
    model.graph.node.append(onnx.helper.make_node("Identity", ["almost"], ["out"]))


@pytest.mark.parametrize("activation", [SILU, ERF_GELU], ids=["silu", "gelu"])
@pytest.mark.parametrize(
    ("spoil", "failure"),
    [
        (nudge("W1"), "weight 'W1' is not the original's"),
        (nudge("W2"), "weight 'W2' is not the original's"),
        (nudge("b2"), "weight 'b2' is not the original's"),
        (swap_operands, "Add 'out' is not as in the original, and no block explains it"),
        (extra_node, "Identity 'out' is not as in the original, and no block explains it"),
    ],
    ids=["W1", "W2", "b2", "operands", "node"],
)
def test_planted_differences(activation: str, spoil: Spoil, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*arguments: onnx.ModelProto) -> onnx.ModelProto:
        result: onnx.ModelProto = apply(*arguments)
        spoil(result)
        return result

    monkeypatch.setattr(f"{rewrite.__module__}.apply", planted)
    report = rewrite(mlp(activation))
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert report.validation is not None
    assert failure in report.validation.failures


@pytest.mark.parametrize("activation", [SILU, ERF_GELU], ids=["silu", "gelu"])
def test_nothing_planted(activation: str) -> None:
    assert rewrite(mlp(activation)).exit_status is ExitStatus.CONVERTED


def test_weights_copied_to_another_directory_are_the_same(tmp_path: Path) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    source.mkdir()
    other.mkdir()
    model = source / "model.onnx"
    onnx.save(mlp(SILU), model, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert rewrite(model, other / "out.onnx").exit_status is ExitStatus.CONVERTED

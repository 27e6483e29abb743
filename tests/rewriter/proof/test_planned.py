"""The planned model: numpy in the place of an activation, in the main graph and in bodies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from rewriter.files.load import LoadedModel
from rewriter.proof.claims import Claim, Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.planned import planned_side, reached, shaken
from rewriter.proof.run.segmented import run_in_segments
from rewriter.proof.run.whole import Wanted, run_whole
from tests.plans import Silu

PLAIN = """
<ir_version: 8, opset_import: ["": 17]>
m (float[B, T, 4] x) => (float[B, T, 4] out) <float[4, 4] w = {{1,0,0,0, 0,2,0,0, 0,0,3,0, 0,0,0,4}}> {{
    y = MatMul(x, w)
    s = Sigmoid(y)
    h = Mul(y, s)
    out = MatMul(h, w)
}}
"""
BODY = """
<ir_version: 8, opset_import: ["": 17]>
m (float[T, 4] x, bool c) => (float[T, 4] out) {
    out = If(c) <
        then_branch = yes () => (float[T, 4] o) { s = Sigmoid(x)
          h = Mul(x, s)
          o = Neg(h) },
        else_branch = no () => (float[T, 4] p) { p = Identity(x) }>
}
"""


def _side(text: str) -> Side:
    model = onnx.parser.parse_model(text.replace("{{", "{").replace("}}", "}"))
    return Side.of(LoadedModel(model, None, Path(), (), 0))


def _claim(output: str = "h", gate: str = "y", **given: Any) -> Claim:
    return Claim("mlp", (gate,), output, ("x",), ("out",), 0.0, 0.0, TensorProto.FLOAT, Silu(), **given)


def _silu(y: Any) -> Any:
    return y / (1.0 + np.exp(-y))


@pytest.mark.parametrize("run", [run_whole, run_in_segments])
def test_the_plans_numbers_are_what_is_evaluated(run: Any) -> None:
    side = _side(PLAIN)
    claim = replace(_claim(), planned=Silu(factor=1.25, off=0.5))
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    planned = planned_side(side, [claim])
    (case,) = run(planned, [Case("one", {"x": x})], Wanted(wide=True), lambda *_: None).truth
    scale = np.asarray([1.0, 2.0, 3.0, 4.0])
    expected = (1.25 * _silu(x.astype(np.float64) * scale) + 0.5) * scale
    np.testing.assert_allclose(case["out"], expected, rtol=1e-13)
    assert reached(planned, [claim]) == {"mlp": pytest.approx(float(np.abs(x.astype(np.float64) * scale).max()))}


def test_the_activation_keeps_its_type() -> None:
    side = _side(PLAIN)
    ours, planned = (each.views[()].type_of("h") for each in (side, planned_side(side, [_claim()])))
    assert ours.elem_type == planned.elem_type == TensorProto.FLOAT
    assert ours.shape == planned.shape
    unknown = _side(PLAIN.replace("Mul(y, s)", "elsewhere.Mul(y, s)").replace("17]", '17, "elsewhere": 1]'))
    assert not unknown.views[()].type_of("h").elem_type
    assert not [value.name for value in planned_side(unknown, [_claim()]).model.proto.graph.value_info]


def test_the_original_stays_as_it_is() -> None:
    side = _side(PLAIN)
    before = side.model.proto.SerializeToString()
    planned_side(side, [_claim()])
    assert side.model.proto.SerializeToString() == before


def test_activations_in_bodies_are_planned_and_watched_too() -> None:
    side = _side(BODY)
    (path,) = (path for path, view in side.views.items() if "h" in view.producer)
    claim = _claim(gate="x", path=path)
    planned = planned_side(side, [claim])
    x = np.asarray([[1.0, -2.0, 3.0, -400.0]], np.float32)
    results = run_whole(planned, [Case("then", {"x": x, "c": np.asarray(True)})], Wanted(wide=True), lambda *_: None)
    assert results.truth is not None
    np.testing.assert_allclose(results.truth[0]["out"], -_silu(x.astype(np.float64)), rtol=1e-13)
    assert reached(planned, [claim]) == {"mlp": 400.0}


def test_shaken_moves_every_activation_by_its_rounding_in_both_directions() -> None:
    side = _side(PLAIN)
    planned = planned_side(side, [replace(_claim(), planned=Silu(rounding=1e-3))])
    case = Case("one", {"x": np.zeros((1, 50, 4), np.float32)})
    still, moved = (
        run_whole(each, [case], Wanted(wide=True), lambda *_: None).truth for each in (planned, shaken(planned))
    )
    assert still is not None
    assert moved is not None
    steps = (moved[0]["out"] - still[0]["out"]) / np.asarray([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(np.abs(steps), 1e-3, rtol=1e-6)
    assert {*np.sign(steps).ravel()} == {-1.0, 1.0}


def test_what_was_never_evaluated_has_reached_nothing() -> None:
    """The second block lies in a branch that no case took."""
    side = _side(BODY)
    (path,) = (path for path, view in side.views.items() if "h" in view.producer)
    claim = _claim(gate="x", path=path)
    planned = planned_side(side, [claim])
    assert reached(planned, [claim]) == {}
    x = np.ones((1, 4), np.float32)
    run_whole(planned, [Case("else", {"x": x, "c": np.asarray(False)})], Wanted(wide=True), lambda *_: None)
    assert reached(planned, [claim]) == {}

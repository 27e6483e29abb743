"""Boundaries, and parts tried alone, in groups."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from rewriter.compare import parts
from rewriter.compare.parts import Bisection, boundaries
from rewriter.files.load import load_model
from rewriter.graph.extract import upstream
from rewriter.proof.claims import Claim, Side
from rewriter.proof.inputs.cases import make_cases
from rewriter.proof.nudge import Point
from rewriter.proof.run import run_model
from tests.changes import change_values, changed, weight
from tests.textmodels import text_model

TWO_ADDS = "a = MatMul(x, W1) b = MatMul(a, W2) r = Add(x, b) c = MatMul(r, V1) d = Relu(c) e = MatMul(d, W2) "
RESIDUAL = f"{TWO_ADDS} s = Add(e, r) out = Relu(s)"

TWO = numpy_helper.from_array(np.asarray([3, 7], np.int64), "two")
STREAM = {"r": "r", "s": "s", "out": "output out"}


def sides(a: onnx.ModelProto, b: onnx.ModelProto) -> tuple[Side, Side]:
    return Side.of(load_model(a)), Side.of(load_model(b))


def bisection(a: onnx.ModelProto, b: onnx.ModelProto, marks: Mapping[str, str] = STREAM) -> Bisection:
    one, other = sides(a, b)
    return Bisection(one, other, marks, make_cases(a), "cpu")


def test_blocks_are_named_and_what_lies_inside_is_left_out() -> None:
    a, b = sides(text_model(RESIDUAL), text_model(RESIDUAL))
    block = Claim("mlp", ("c",), "d", ("r",), ("e",), 0.0, 1)
    assert list(boundaries(a.main, b.main, [block]).items()) == [
        ("r", "input of mlp"),
        ("c", "mlp, first linear operator"),
        ("d", "mlp, activation"),
        ("e", "mlp"),
        ("out", "output out"),
    ]


def test_tensors_of_one_model_only_are_no_boundaries() -> None:
    a, b = sides(text_model(RESIDUAL), text_model(RESIDUAL.replace("r", "q").replace("Relu", "Relu")))
    assert list(boundaries(a.main, b.main, ()).values())[-1] == "output out"
    assert "r" not in boundaries(a.main, b.main, ())


def test_without_blocks_and_stream_any_shared_tensor_serves() -> None:
    body = "a = Relu(x) b = Abs(a) out = Neg(b)"
    a, b = sides(text_model(body), text_model(body))
    assert boundaries(a.main, b.main, ()) == {"a": "a", "b": "b", "out": "output out"}


def test_what_quantisers_read_is_a_boundary() -> None:
    body = "a = Relu(x) q, s, z = DynamicQuantizeLinear(a) out = DequantizeLinear(q, s, z)"
    model, other = (text_model(text) for text in (body, body.replace("a = Relu(x)", "a = Abs(x)")))
    a, b = sides(model, other)
    assert boundaries(a.main, b.main, ()) == {"a": "a", "out": "output out"}
    named = boundaries(a.main, b.main, [Claim("mlp", ("x",), "a", ("x",), ("out",), 0.0, 1)])
    assert named["a"] == "mlp, activation"


def test_noise_tells_how_far_rounding_moves_a_tensor() -> None:
    """What B adds is a little more than noise of one unit in the last place, or much more."""
    body = "a = Relu(x) m = MatMul(a, W1) out = MatMul(m, W2)"
    a = Side.of(load_model(text_model(body)))
    for delta, holds in ((2.0**-22, True), (2.0**-12, False)):
        text = body.replace("a = Relu(x)", "r = Relu(x) a = Mul(r, near)")
        b = Side.of(load_model(text_model(text, constants={"near": np.asarray(1 + delta)})))
        cases = make_cases(a.model.proto)
        (found,) = Bisection(a, b, {"out": "out"}, cases, "cpu", (Point("a", (), 1),)).parts()
        assert (found.found.holds, found.found.rounding > 2.0**-24) == (holds, True)


@pytest.mark.parametrize(
    ("fits", "runs"),
    [(1, [("r",), ("r", "s"), ("out", "s")]), (2, [("r",), ("out", "r", "s")]), (9, [("r",), ("out", "r", "s")])],
)
def test_groups_that_fit_into_memory_measure_the_same(
    fits: int, runs: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many boundaries are run at a time follows from the size of those that were run first."""
    found = bisection(text_model(RESIDUAL), bent("W2"))
    made: list[tuple[str, ...]] = []
    monkeypatch.setattr(parts, "run_model", noting(found.a, made))
    whole = found.parts()
    assert made == [("out", "r", "s")]
    monkeypatch.setattr(parts, "_FIRST", 1)
    size = sum(case.feeds["x"].nbytes for case in found.cases)  # the stream is as wide as the input
    monkeypatch.setattr(parts, "GROUP_BYTES", fits * size)
    grouped = found.parts()
    assert made[1:] == runs
    assert grouped == whole
    assert [each.found.holds for each in whole] == [False, False, True]


def noting(a: Side, made: list[tuple[str, ...]]):  # type: ignore[no-untyped-def]
    def run_and_note(side, cases, ways, *, outputs):  # type: ignore[no-untyped-def]
        made.extend([tuple(outputs)] if side is a else [])
        return run_model(side, cases, ways, outputs=outputs)

    return run_and_note


def bent(name: str) -> onnx.ModelProto:
    return changed(text_model(RESIDUAL), lambda model: change_values(weight(model, name), "v[0, 0] += 0.01"))


def test_a_part_is_computed_from_stops_and_inputs_alone() -> None:
    view = sides(text_model(RESIDUAL), text_model(RESIDUAL))[0].main
    part = upstream(view, frozenset({"r", "s"}), ["s"])
    assert part.inputs == ("r",)
    assert [view.nodes[index].output[0] for index in part.nodes] == ["c", "d", "e", "s"]
    assert upstream(view, frozenset({"c"}), ["s"]).inputs == ("x", "c"), "the first half is computed again for r"


def test_a_shared_weight_makes_every_user_guilty_and_no_other() -> None:
    halves = bisection(text_model(RESIDUAL), bent("V1"))
    found = halves.parts()
    assert [each.found.name for each in found if not each.found.holds] == ["s"]
    innocent = [each for each in found if each.found.holds]
    assert {each.found.error for each in innocent} == {0.0}
    fault = halves.explained(next(each for each in found if not each.found.holds))
    assert (fault.found.name, fault.label) == ("s", "s")
    assert fault.causes == ("weight V1 differs in 1 element, by up to 0.01 at [0, 0]",)


def test_a_part_that_does_not_run_is_guilty_with_the_reason() -> None:
    other = text_model(RESIDUAL.replace("d = Relu(c)", "d = Reshape(c, two)"), constants={"two": TWO})
    halves = bisection(text_model(RESIDUAL), other)
    r, s, _ = halves.parts()
    assert r.found.holds
    assert (s.found.holds, s.found.reason) == (False, "does not run")
    assert "MatMul" in s.causes[0]
    assert halves.explained(s).causes == (*s.causes, "Relu 'd' became Reshape 'd'", "weight two is only in B")

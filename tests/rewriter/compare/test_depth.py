"""Boundaries, taps in groups, and parts tried alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from rewriter.compare import depth
from rewriter.compare.depth import Bench, Boundary, boundaries, compare_at, explained
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
STREAM = (Boundary("r", "r", "stream"), Boundary("s", "s", "stream"), Boundary("out", "output out", "output"))


def sides(a: onnx.ModelProto, b: onnx.ModelProto) -> tuple[Side, Side]:
    return Side.of(load_model(a)), Side.of(load_model(b))


def labels(marks: Sequence[Boundary]) -> list[tuple[str, str]]:
    return [(mark.label, mark.kind) for mark in marks]


def test_blocks_are_named_and_what_lies_inside_is_left_out() -> None:
    a, b = sides(text_model(RESIDUAL), text_model(RESIDUAL))
    block = Claim("mlp", ("c",), "d", ("r",), ("e",), 0.0, 1)
    assert labels(boundaries(a.main, b.main, [block])) == [
        ("input of mlp", "stream"),
        ("mlp, first linear operator", "stream"),
        ("mlp, activation", "stream"),
        ("mlp", "block"),
        ("output out", "output"),
    ]


def test_tensors_of_one_model_only_are_no_boundaries() -> None:
    a, b = sides(text_model(RESIDUAL), text_model(RESIDUAL.replace("r", "q").replace("Relu", "Relu")))
    assert labels(boundaries(a.main, b.main, ()))[-1] == ("output out", "output")
    assert "r" not in [mark.tensor for mark in boundaries(a.main, b.main, ())]


def test_without_blocks_and_stream_any_shared_tensor_serves() -> None:
    body = "a = Relu(x) b = Abs(a) out = Neg(b)"
    a, b = sides(text_model(body), text_model(body))
    assert labels(boundaries(a.main, b.main, ())) == [("a", "stream"), ("b", "stream"), ("output out", "output")]


def test_what_quantisers_read_is_a_boundary() -> None:
    body = "a = Relu(x) q, s, z = DynamicQuantizeLinear(a) out = DequantizeLinear(q, s, z)"
    model, other = (text_model(text) for text in (body, body.replace("a = Relu(x)", "a = Abs(x)")))
    a, b = sides(model, other)
    assert labels(boundaries(a.main, b.main, ())) == [("a", "stream"), ("output out", "output")]
    named = boundaries(a.main, b.main, [Claim("mlp", ("x",), "a", ("x",), ("out",), 0.0, 1)])
    assert labels(named)[0] == ("mlp, activation", "stream")


def test_noise_tells_how_far_rounding_moves_a_tensor() -> None:
    """What B adds is a little more than noise of one unit in the last place, or much more."""
    body = "a = Relu(x) m = MatMul(a, W1) out = MatMul(m, W2)"
    a = Side.of(load_model(text_model(body)))
    for delta, exceeds in ((2.0**-22, False), (2.0**-12, True)):
        text = body.replace("a = Relu(x)", "r = Relu(x) a = Mul(r, near)")
        b = Side.of(load_model(text_model(text, constants={"near": np.asarray(1 + delta)})))
        bench = Bench(a, b, make_cases(a.model.proto), "cpu", (Point("a", (), 1),))
        (found,) = compare_at(bench, [Boundary("out", "out", "output")])
        assert (found.exceeds, found.found.rounding > 2.0**-24) == (exceeds, True)


@pytest.mark.parametrize(("fits", "runs"), [(1, [1, 1, 1]), (2, [1, 2]), (9, [1, 2])])
def test_groups_that_fit_into_memory_measure_the_same(
    fits: int, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many boundaries are run at a time follows from the size of those that were run first."""
    a, b = sides(text_model(RESIDUAL), bent("W2"))
    cases = make_cases(a.model.proto)
    tapped: list[int] = []
    monkeypatch.setattr(depth, "run_model", counted(a, tapped))
    bench = Bench(a, b, cases, "cpu")
    whole = compare_at(bench, STREAM)
    assert tapped == [3]
    monkeypatch.setattr(depth, "_FIRST", 1)
    size = 2 * sum(case.feeds["x"].nbytes for case in cases)  # the stream is as wide as the input
    monkeypatch.setattr(depth, "GROUP_BYTES", fits * size)
    grouped = compare_at(bench, STREAM)
    assert tapped[1:] == runs
    assert [each.found.error for each in grouped] == [each.found.error for each in whole]
    assert all(each.exceeds for each in (*grouped, *whole))


def counted(a: Side, tapped: list[int]):  # type: ignore[no-untyped-def]
    def run_and_count(side, cases, ways, *, outputs):  # type: ignore[no-untyped-def]
        tapped.extend([len(outputs)] if side is a else [])
        return run_model(side, cases, ways, outputs=outputs)

    return run_and_count


def bent(name: str) -> onnx.ModelProto:
    """The model with one entry of a weight changed."""
    return changed(text_model(RESIDUAL), lambda model: change_values(weight(model, name), "v[0, 0] += 0.01"))


def test_a_part_is_computed_from_stops_and_inputs_alone() -> None:
    view = sides(text_model(RESIDUAL), text_model(RESIDUAL))[0].main
    part = upstream(view, frozenset({"r", "s"}), ["s"])
    assert part.inputs == ("r",)
    assert [view.nodes[index].output[0] for index in part.nodes] == ["c", "d", "e", "s"]
    assert upstream(view, frozenset({"c"}), ["s"]).inputs == ("x", "c"), "the first half is computed again for r"


def test_a_shared_weight_makes_every_user_guilty_and_no_other() -> None:
    a, b = sides(text_model(RESIDUAL), bent("V1"))
    bench = Bench(a, b, make_cases(a.model.proto), "cpu")
    found = compare_at(bench, STREAM, alone=True)
    assert [each.tensor for each in found if each.exceeds] == ["s"]
    innocent = [each for each in found if not each.exceeds]
    assert {each.found.error for each in innocent} == {0.0}
    fault = explained(bench, STREAM, next(each for each in found if each.exceeds))
    assert (fault.tensor, fault.part) == ("s", "s")
    assert fault.causes == ("weight V1 differs in 1 element, by up to 0.01 at [0, 0]",)


def test_a_part_that_does_not_run_is_guilty_with_the_reason() -> None:
    other = text_model(RESIDUAL.replace("d = Relu(c)", "d = Reshape(c, two)"), constants={"two": TWO})
    a, b = sides(text_model(RESIDUAL), other)
    found = {
        each.tensor: each for each in compare_at(Bench(a, b, make_cases(a.model.proto), "cpu"), STREAM, alone=True)
    }
    assert not found["r"].exceeds
    assert found["s"].exceeds
    assert "MatMul" in found["s"].obstacle

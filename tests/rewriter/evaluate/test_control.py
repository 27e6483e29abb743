from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import rewriter.evaluate.nodes
from rewriter.evaluate.arithmetic import Floats, Unsupported, content
from rewriter.evaluate.evaluator import Evaluator, Program
from rewriter.files.load import load_model
from tests.rewriter.evaluate.single import (
    assert_equal_in_both,
    assert_near,
    by_onnx,
    by_onnxruntime,
    in_field,
    in_floats,
    text_model,
)

X = np.array([[1, -2, 0.5], [3, 0.25, -1]], np.float32)


CONSTANTS = "zero = Constant <value_int = 0> () two = Constant <value_int = 2> () four = Constant <value_int = 4> () "
IF = (
    "y = If <then_branch = then () => (float[2, 3] a) { a = Add(x, x) },"
    " else_branch = other () => (float[2, 3] b) { b = Neg(x) }> (c)"
)
LOOP = (
    "v, y = Loop <body = body (int64 i, bool go, float[2, 3] s) => (bool more, float[2, 3] t, float[2, 3] u) {"
    " n = Cast <to = 1> (i) t = Add(s, n) u = Mul(t, x) more = Less(i, two) }> (four, , x)"
)
CARRIED = (
    "y = Loop <body = body (int64 i, bool go, float[2, 3] s) => (bool more, float[2, 3] t) {"
    " more = Identity(go) t = Add(s, x) }> (k, c, x)"
)
DECLARED = {"c": "bool c", "k": "int64 k"}


@pytest.mark.parametrize(
    ("nodes", "given"),
    [
        (IF, {"c": True}),
        (IF, {"c": False}),
        (f"{CONSTANTS} s = Size(x) c = Greater(s, four) {IF}", {}),
        (CONSTANTS + LOOP, {}),
        (CARRIED, {"k": 3, "c": True}),
        (CARRIED, {"k": 3, "c": False}),
        (CARRIED, {"k": 0, "c": True}),
    ],
    ids=["if", "else", "a-shape-decides", "loop-ends-by-its-condition", "loop-of-3", "loop-not-entered", "loop-of-0"],
)
def test_branches_and_loops(nodes: str, given: dict[str, Any]) -> None:
    model = text_model(nodes, ", ".join(["float[2, 3] x", *(DECLARED[name] for name in given)]))
    feeds = {"x": X, **{name: np.array(value) for name, value in given.items()}}
    made = in_floats(model, feeds)
    model.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    assert_near(made, by_onnxruntime(model, feeds), 1e-6, 1e-6)
    if LOOP not in nodes:  # onnx's evaluator takes a condition that is left out as false
        assert_near(made, by_onnx(model, feeds), 1e-6, 1e-6)
    assert_equal_in_both(model, feeds)


def test_a_loop_that_never_runs_yields_nothing() -> None:
    nodes = (CONSTANTS + LOOP).replace("(four, , x)", "(zero, , x)")
    assert in_field(text_model(nodes, "float[2, 3] x"), {"x": X})[0].shape == (0, 2, 3)
    nodes = nodes.replace("float[2, 3] u", "float[N, 3] u")
    with pytest.raises(Unsupported, match="unknown shape"):
        in_field(text_model(nodes, "float[2, 3] x"), {"x": X})


REFUSED = {
    "data decides a branch": IF.replace("> (c)", "> (x)"),
    "data decides how often a loop runs": "k = Cast <to = 7> (x) " + CARRIED.replace("k, c, x)", "k, , x)"),
    "data decides whether a loop runs": CARRIED.replace("k, c, x)", ", x, x)"),
    "data decides when a loop ends": CARRIED.replace("k, c, x)", ", , x)").replace("Identity(go)", "Identity(s)"),
    "more than 20 iterations": CARRIED.replace("k, c, x)", ", , x)"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_what_it_cannot_know(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriter.evaluate.nodes, "_MAX_ITERATIONS", 20)
    with pytest.raises(Unsupported, match=reason):
        in_field(text_model(REFUSED[reason], "float[1] x"), {"x": X[0, :1]})


def test_what_integer_inputs_decide_is_known_inside_and_outside() -> None:
    nodes = (
        "z = Cast <to = 1> (k) v = Loop <body = body (int64 i, bool go, float s) => (bool more, float t) {"
        " more = Identity(go) t = Neg(s) }> (two, , z) y = Mul(x, v)"
    )
    model = text_model(CONSTANTS + nodes, "float[2, 3] x, int64 k")
    evaluator = Evaluator(Program(load_model(model)), Floats(), {"x": X, "k": np.array(3)})
    evaluator.run()
    assert {"k", "z", "s", "t", "v", "y"} <= evaluator.decided
    assert "x" not in evaluator.decided


def test_long_texts_are_told_apart() -> None:
    kernels, node = rewriter.evaluate.nodes.Kernels({"": 17}, 8), helper.make_node("Identity", ["x"], ["y"])
    one, other = np.full(2000, "a", object), np.full(2000, "a", object)
    other[1000] = "b"
    assert [kernels.run(node, [each])[0][1000] for each in (one, other)] == ["a", "b"]


def test_digests_of_large_results_are_those_of_their_numbers() -> None:
    program, w = Program(load_model(text_model("y = Neg(x)", "float[n] x"))), np.arange(9e4).reshape(300, 300)
    turned, same, joined = (helper.make_node(each, ["s"], ["y"]) for each in ("Transpose", "Identity", "Concat"))
    given: list[Any] = [(turned, np.transpose, w), (same, np.copy, w), (joined, np.concatenate, [w])]
    given += [(joined, np.concatenate, [-w]), (joined, np.concatenate, [w.copy()])]
    made = [content(*program.kernels.run(node, [np.asarray(x)], of)) for node, of, x in given]
    assert [*map(made.index, made)] == [0, 1, 1, 3, 1]


def test_weights_that_both_models_have_are_one_array() -> None:
    w = np.arange(9e4, dtype=np.float32).reshape(300, 300)
    other = np.copy(w)
    other[-1, -1] += 1  # one bit in the last bytes
    models = [text_model("y = MatMul(x, W)", "float[n, 300] x") for _ in range(4)]
    for model, each in zip(models, (w, w, other, w.T), strict=True):
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(each), "W"))
    first = Program(load_model(models[0]))
    same, differing, turned = (Program(load_model(each), twin=first) for each in models[1:])
    mine = first.weights(first.graph)["W"]
    assert same.weights(same.graph)["W"] is mine
    for program, expected in ((differing, other), (turned, w.T)):
        found = program.weights(program.graph)
        assert np.array_equal(found["W"], expected)
        assert found.described("W")[-1] == content(expected) != content(mine)

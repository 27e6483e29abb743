"""Rows that move entries, which `test_defined_rows.py` evaluates too: on integers, in laws, and what they refuse."""

from typing import Any

import numpy as np
import pytest

from rewriter.evaluate.arithmetic import Unsupported
from tests.rewriter.evaluate.single import (
    assert_equal_in_both,
    assert_same_law,
    by_onnx,
    by_onnxruntime,
    drawn,
    in_field,
    in_floats,
    ints,
    name_of,
    settings,
    single,
    text_model,
)

INDEX = ints([0, -1, 1], [1, 0, -2])
ND = np.array([[[0, 1], [1, -1]], [[-1, 0], [0, 0]]])

MOVES: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("Identity", [(2, 3)], {}),
    ("Reshape", [(2, 3, 4), ints(0, -1)], {}),
    ("Reshape", [(0, 3), ints(0, 5)], {"allowzero": 1, "opset": 19}),
    ("Flatten", [(2, 3, 4)], {"axis": -1}),
    ("Flatten", [(0, 3)], {"axis": 1, "without": "onnx"}),
    *(("Transpose", [(2, 3, 4)], given) for given in ({}, {"perm": [1, 2, 0]})),
    ("Unsqueeze", [(2, 3), ints(-1, 0)], {}),
    ("Unsqueeze", [(2, 3)], {"axes": [0, 3], "opset": 11}),
    ("Squeeze", [(1, 2, 1), ints(-1)], {}),
    *(("Squeeze", [(1, 2, 1)], given) for given in ({}, {"axes": [0], "opset": 11})),
    ("Expand", [(2, 1), ints(3, 1, 4)], {}),
    ("Tile", [(2, 3), ints(2, 1)], {}),
    ("Slice", [(6, 5), ints(-5, 10), ints(2**62, -(2**62)), ints(0, -1), ints(2, -2)], {}),
    ("Slice", [(6, 5), ints(-10), ints(-9), ints(0), ints(-1)], {"without": "onnx"}),
    ("Slice", [(6, 5)], {"starts": [1, -3], "ends": [9, -1], "opset": 9}),
    ("Gather", [(3, 4), INDEX], {"axis": 1}),
    ("Gather", [(3, 4), np.array(-1)], {}),
    ("GatherElements", [(2, 5), INDEX], {"axis": -1, "without": "onnx"}),
    ("GatherElements", [(3, 3), INDEX], {"without": "onnx"}),
    ("GatherND", [(2, 3, 2), ND], {}),
    ("GatherND", [(2, 3, 2), ints([[1], [-1]], [[0], [2]])], {"batch_dims": 1}),
    ("Concat", [(2, 1), (2, 3)], {"axis": -1}),
    ("Split", [(7, 2)], {"num_outputs": 3, "outputs": 3}),
    ("Split", [(7, 2), ints(1, 0, 6)], {"outputs": 3}),
    ("Split", [(2, 6)], {"split": [2, 4], "axis": 1, "outputs": 2, "opset": 11}),
    ("Split", [(2, 6)], {"axis": -1, "outputs": 3, "opset": 11}),
    ("Pad", [(2, 3), ints(1, 0, 0, -2), np.array(0.5, np.float32)], {"constants": [2], "without": "onnx"}),
    ("Pad", [(2, 3), ints(2, 1), None, ints(-1)], {}),
    *(("Pad", [(3, 4), ints(1, 2, 2, 1)], {"mode": mode}) for mode in ("reflect", "edge", "wrap")),
    ("Pad", [(2, 3)], {"pads": [0, 1, 1, 0], "value": 1.5, "opset": 10, "without": "onnx"}),
    ("Where", [np.array([[True], [False]]), (2, 3), (3,)], {}),
    ("Trilu", [(2, 3, 4), np.array(-1)], {}),
    ("Trilu", [(3, 4), np.array(1)], {"upper": 0}),
    *(("OneHot", [ints(1, -1, 0), np.array(4), (2,)], given) for given in ({}, {"axis": 0})),
    ("Shape", [(2, 3, 4)], {"start": -2}),
    ("Size", [(2, 3, 4)], {}),
    ("Dropout", [(2, 3)], {"outputs": 2}),
    ("Dropout", [(2, 3), np.array(0.25, np.float32), np.array(False)], {"opset": 13, "outputs": 2}),
    ("ScatterElements", [(3, 3), INDEX, (2, 3)], {}),
    ("ScatterElements", [(2, 5), INDEX, (2, 3)], {"axis": 1}),
    ("ScatterND", [(2, 3, 2), ND, (2, 2, 2)], {"without": "onnx"}),
    ("ScatterND", [(4, 2), ints([1], [3]), (2, 2)], {}),
    ("ScatterElements", [(3, 3), ints([1, 1], [1, 1]), (2, 2)], {"reduction": "add", "opset": 18}),
    ("ScatterND", [(4, 2), ints([1], [1], [3]), (3, 2)], {"reduction": "add", "opset": 18}),
]  # fmt: skip


ON_INTEGERS = [each for each in MOVES if each[0] != "Dropout" and each[2].get("opset") != 10]


@pytest.mark.parametrize(("operator", "shapes", "attributes"), ON_INTEGERS, ids=name_of)
def test_rows_of_moves_on_integers(operator: str, shapes: list[Any], attributes: dict[str, Any]) -> None:
    """Plain arrays: the same numbers, and the same type, as the runtime computes."""
    given = settings(attributes)
    given.pop("without", None)
    shapes = [each.astype(np.int64) if getattr(each, "dtype", None) == np.float32 else each for each in shapes]
    operands = drawn(shapes, 5, np.int64)
    model, feeds = single(operator, operands, **given)
    try:
        right = by_onnxruntime(model, feeds)
    except Exception:  # noqa: BLE001 - not implemented for integers
        right = by_onnx(model, feeds)
    for one, other in zip(in_floats(model, feeds), right, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


SEQUENCES = {
    "at": "s = SplitToSequence <axis = 1> (x, two) t = SequenceAt(s, one) y = Identity(t)",
    "split": "s = SplitToSequence <axis = 1, keepdims = 0> (x) y = ConcatFromSequence <axis = -1, new_axis = 1> (s)",
    "sizes": "k = Constant <value_ints = [1, 3, 1]> () s = SplitToSequence <axis = 1> (x, k) t = SequenceAt(s, one)"
    " y = Neg(t)",
    "insert": "s = SequenceConstruct(x, x) z = Neg(x) t = SequenceInsert(s, z, one)"
    " y = ConcatFromSequence <axis = 0> (t)",
    "empty": "s = SequenceEmpty() t = SequenceInsert(s, x) u = SequenceInsert(t, x)"
    " y = ConcatFromSequence <axis = 1> (u)",
}
CONSTANTS = "one = Constant <value_int = 1> () two = Constant <value_int = 2> () "


@pytest.mark.parametrize("nodes", SEQUENCES.values(), ids=SEQUENCES)
def test_sequences(nodes: str) -> None:
    model = text_model(CONSTANTS + nodes, "float[3, 5] x")
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    np.testing.assert_array_equal(in_floats(model, {"x": x})[0], by_onnx(model, {"x": x})[0])
    assert_equal_in_both(model, {"x": x})


LAWS = {
    # Masks travel with entries: a softmax over what is masked has no weight there.
    "Concat": (
        "z = Sub(x, x) m = Concat <axis = 1> (z, low) r = Concat <axis = 1> (x, x) s = Add(r, m) y = Softmax(s)",
        "p = Softmax(x) z = Sub(x, x) y = Concat <axis = 1> (p, z)",
    ),
    "Where": (
        "c = Constant <value_ints = [0, 1, 1, 0]> () b = Cast <to = 9> (c) s = Where(b, x, low) y = Softmax(s)",
        "i = Constant <value_ints = [1, 2]> () g = Gather <axis = 1> (x, i) p = Softmax(g)"
        " k = Constant <value_ints = [0, 1, 0, 1]> () y = Pad(p, k)",
    ),
    "Pad": (
        "k = Constant <value_ints = [0, 1, 0, 2]> () f = Constant <value_float = -1e9> () r = Pad(x, k, f)"
        " y = Softmax(r)",
        "k = Constant <value_ints = [0, 1, 0, 2]> () p = Softmax(x) y = Pad(p, k)",
    ),
    "ScatterND": (
        "r = Concat <axis = 1> (x, x) t = Transpose(r) i = Constant <value_ints = [4, 5, 6, 7]> () one = Constant"
        " <value_ints = [1]> () j = Unsqueeze(i, one) u = Transpose(low) s = ScatterND(t, j, u)"
        " v = Transpose(s) y = Softmax(v)",
        "p = Softmax(x) z = Sub(x, x) y = Concat <axis = 1> (p, z)",
    ),
    "an entry that is rounded is whole": ("a = Floor(x) b = Cast <to = 7> (a) y = Cast <to = 1> (b)", "y = Floor(x)"),
    "CastLike": ("y = CastLike(x, x)", "y = Cast <to = 1> (x)"),
    "axes of size 1": ("a = Unsqueeze(x, zero) y = Reshape(a, shape)", "a = Unsqueeze(x, last) y = Reshape(a, shape)"),
}
GIVEN = (
    "low = Constant <value = float[2, 4] {-3e38, -3e38, -3e38, -3e38, -3e38, -3e38, -3e38, -3e38}> () zero = Constant"
    " <value_ints = [0]> () last = Constant <value_ints = [-1]> () shape = Constant <value_ints = [2, 2, 2]> () "
)


@pytest.mark.parametrize(("one", "other"), LAWS.values(), ids=LAWS)
def test_laws_of_moves(one: str, other: str) -> None:
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)}
    left, right = (text_model(GIVEN + each, "float[2, 4] x") for each in (one, other))
    assert_same_law(left, right, feeds)


@pytest.mark.parametrize(("kind", "right"), [(9, [True, False, True]), (7, [-2, 0, 1]), (11, [-2.75, 0, 1.5])])
def test_casts(kind: int, right: list[Any]) -> None:
    model, feeds = single("Cast", [np.array([-2.75, 0, 1.5], np.float32)], attributes={"to": kind})
    np.testing.assert_array_equal(in_floats(model, feeds)[0], right)
    assert in_field(model, feeds)[0].dtype == (bool if kind == 9 else np.int64)


UNDECIDED = {
    "a dropout that drops": "t = Constant <value = bool {1}> () r = Constant <value_float = 0.5> ()"
    " y = Dropout(x, r, t)",
    "a shape": "s = Cast <to = 7> (x) y = ConstantOfShape(s)",
    "an index": "i = Cast <to = 7> (x) y = Gather(x, i)",
    "which entries there are": "i = NonZero(x) y = Cast <to = 1> (i)",
    "a scattered product": 'i = Constant <value_ints = [0]> () y = ScatterElements <reduction = "mul"> (x, i, x)',
    "float8": "s = Cast <to = 17> (x) y = Cast <to = 1> (s)",
}


@pytest.mark.parametrize("nodes", UNDECIDED.values(), ids=UNDECIDED)
def test_refuses_what_data_decides(nodes: str) -> None:
    with pytest.raises(Unsupported):
        in_field(text_model(nodes, "float[2] x"), {"x": np.zeros(2, np.float32)})

"""The engine: what computes which operator, what is kept and fed, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, parser

from rewriter.proof.reference import operators
from rewriter.proof.reference.float64 import NoReference, open_reference

Array = NDArray[Any]

X = np.array([[0.5, -1.5], [2.0, 0.25]], np.float32)


def parse(body: str, opset: int = 17, signature: str = "(float[2, 2] x) => (float y)") -> onnx.ModelProto:
    versions = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1, "own": 1]>'
    model = parser.parse_model(f"{versions} g {signature} {{ {body} }}")
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return model


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds operators of the domain `own` to those in numpy."""

    def add(**forms: Any) -> None:
        for name, form in forms.items():
            monkeypatch.setitem(operators.OPERATORS, ("own", name), form)

    return add


erf = np.vectorize(math.erf, otypes=["d"])


def test_a_default_that_is_fed() -> None:
    model = parse("y = Add(x, b)")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 2), np.float32), "b"))
    model.graph.input.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [2, 2]))
    reference = open_reference(model)
    np.testing.assert_array_equal(reference.run({"x": X})["y"], X + 1)
    np.testing.assert_array_equal(reference.run({"x": X, "b": X})["y"], X + X)
    np.testing.assert_array_equal(reference.run({"x": X})["y"], X + 1)


def test_shapes_that_follow_from_values() -> None:
    model = parse("a = Exp(x) b = Floor(a) c = NonZero(b) d = Transpose(c) f = Shape(d) y = Cast<to = 1>(f)")
    reference = open_reference(model)
    assert reference.run({"x": X})["y"].tolist() == [3, 2]
    assert reference.run({"x": X * 0})["y"].tolist() == [4, 2]


def test_operands_left_out() -> None:
    """Outputs too: what they are called does not take the operand away."""
    model = parse("a = Erf(x) b, c = Dropout(a) y = Clip(b, , hi)")
    model.graph.node[1].output[1] = ""
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(0.25, np.float32), "hi"))
    expected = np.minimum(erf(X.astype(float)), 0.25)
    np.testing.assert_array_equal(open_reference(model).run({"x": X})["y"], expected)


def test_results_in_float32_are_refused(own: Callable[..., None]) -> None:
    own(Short=lambda _, x: x.astype(np.float32))
    model = parse("a = own.Short(x) y = Neg(a)")
    with pytest.raises(NoReference, match=r"^the evaluator computes 'a' in float32 only$"):
        open_reference(model).run({"x": X})


def _broken(_: Any, x: Array) -> Array:
    raise IndexError("out of\nbounds")


def test_an_operator_that_fails(own: Callable[..., None]) -> None:
    own(Thing=_broken)
    with pytest.raises(NoReference, match=r"^onnx's evaluator cannot run the model: out of bounds$"):
        open_reference(parse("y, z = own.Thing(x)")).run({"x": X})


def test_feeds_that_do_not_fit() -> None:
    model = parse("y = Gather(x, i)", signature="(float[2, 2] x, int64[1] i) => (float y)")
    with pytest.raises(NoReference, match=r"^onnx's evaluator cannot run the model: index 5 is out of bounds"):
        open_reference(model).run({"x": X, "i": np.array([5])})


def test_constants_of_every_kind() -> None:
    body = (
        "a = Constant<value_float = 0.1>() b = Constant<value_floats = [0.5, 0.25]>() c = Constant<value_int = 3>() "
        "d = Constant<value_ints = [4, 5]>() e = Constant<value = float[2] {0.1, 7}>() f = Cast<to = 1>(c) "
        "g = Cast<to = 1>(d) h = Add(a, b) i = Add(h, e) j = Add(i, f) k = Add(j, g) y = Add(k, x)"
    )
    tenth = float(np.float32(0.1))
    expected = X.astype(float) + (tenth + np.array([0.5, 0.25]) + np.array([tenth, 7]) + 3 + np.array([4, 5]))
    np.testing.assert_allclose(open_reference(parse(body)).run({"x": X})["y"], expected, rtol=1e-15)


def test_what_nobody_reads_is_not_computed() -> None:
    model = parse("a = Exp(x) b = own.Unknown(a) c = Softsign(x) y = Neg(x)")
    np.testing.assert_array_equal(open_reference(model).run({"x": X})["y"], -X)


def test_sparse_initializers_are_refused() -> None:
    model = parse("y = Add(x, w)")
    values = helper.make_tensor("w", TensorProto.FLOAT, [1], [3.0])
    indices = helper.make_tensor("i", TensorProto.INT64, [1], [2])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2, 2]))
    with pytest.raises(NoReference, match=r"^the model has sparse initializers$"):
        open_reference(model)

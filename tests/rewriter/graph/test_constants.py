"""Constant tensors: which ones count, what their values are, and which values are never computed."""

from typing import Any

import numpy as np
import onnx
import pytest

from rewriter.graph.constants import Constants
from rewriter.graph.view import all_views
from tests.textmodels import text_model

LARGE = 1024
"""Maximum number of elements of a constant that has a value."""


def constants_of(body: str, weights: str = "", *, inputs: str = "float[2] x") -> Constants:
    """Constants of a graph of these nodes, whose output is `x` passed through."""
    header = f'<ir_version: 8, opset_import: ["": 17, "custom": 1]> g ({inputs}) => (float[2] out)'
    model = onnx.parser.parse_model(f"{header} <{weights}> {{ {body} out = Identity(x) }}")
    return Constants(all_views(model)[0])


def same(value: Any, expected: Any) -> None:
    """Values, shape and element type are the expected ones."""
    np.testing.assert_array_equal(value, expected)
    assert (value.shape, value.dtype) == (np.shape(expected), np.asarray(expected).dtype)


@pytest.mark.parametrize(
    ("body", "constant"),
    [
        ("c = Neg(w)", True),
        ("c = Neg(x)", False),
        ("c = Add(w, x)", False),
        ("c = Add(w, w)", True),
        ("b = Exp(w) c = Transpose(b)", True),
        ("c = CastLike(w, x)", True),
        ("c = CastLike(x, w)", False),
        ("c = custom.CastLike(w, x)", False),
        ("c = custom.Source()", False),
        ("c = custom.Constant<value = float {1}>()", False),
        ("c = Constant<value = float {1}>()", True),
        ("c = RandomNormal<shape = [2]>()", False),
        ("c = RandomNormalLike(w)", False),
        ("c = Bernoulli(w)", False),
        ("r = RandomUniformLike(w) c = Neg(r)", False),
        ("c = Clip(w, , w)", True),
        (
            """c = If (yes) <then_branch = t () => (float[2] p) { p = Identity(x) },
            else_branch = e () => (float[2] q) { q = Identity(w) }>""",
            False,
        ),
    ],
)
def test_what_is_constant(body: str, constant: bool) -> None:
    known = constants_of(body, "float[2] w = {1, 2}, bool yes = {1}")
    assert ("c" in known) is constant
    assert "w" in known
    assert not any(name in known for name in ("x", "out", ""))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("c = Constant<value = float[2] {1, 2}>()", np.array([1, 2], np.float32)),
        ("c = Constant<value_float = 0.5>()", np.float32(0.5)),
        ("c = Constant<value_int = 7>()", np.int64(7)),
        ("c = Constant<value_floats = [0.5, 1.5]>()", np.array([0.5, 1.5], np.float32)),
        ("c = Constant<value_ints = [3, 4]>()", np.array([3, 4], np.int64)),
        ("c = Neg(w)", np.array([-1, -2, -3, -4], np.float32)),
        ("b = Neg(w) c = Abs(b)", np.array([1, 2, 3, 4], np.float32)),
        ("c = Cast<to = 11>(w)", np.array([1, 2, 3, 4], np.float64)),
        ("c = Cast<to = 7>(w)", np.array([1, 2, 3, 4], np.int64)),
        ("c = Cast<to = 1>(i)", np.array([2, 2], np.float32)),
        ("c = Reshape(w, i)", np.array([[1, 2], [3, 4]], np.float32)),
        ("r = Reshape(w, i) c = Transpose<perm = [0, 1]>(r)", np.array([[1, 2], [3, 4]], np.float32)),
        ("c = Expand(one, i)", np.array([[9, 9], [9, 9]], np.float32)),
        ("c = CastLike(i, x)", np.array([2, 2], np.float32)),
        ("c = Div(odd, i)", np.array([3, 3], np.int64)),
    ],
)
def test_values(body: str, expected: Any) -> None:
    numbers = "float[4] w = {1, 2, 3, 4}, int64[2] i = {2, 2}, int64[2] odd = {7, 7}, float[1] one = {9}"
    known = constants_of(body, numbers)
    same(known.value("c"), expected)
    scalar = known.scalar("c")
    assert scalar == (expected.item() if expected.size == 1 else None)
    assert scalar is None or type(scalar) is float


@pytest.mark.parametrize(
    "body",
    [
        "c = Add(w, x)",  # not constant
        "c = Cast<to = 8>(w)",  # to a type whose values are not read
        "c = Cast<to = 10>(big)",
        "c = MatMul(w, w)",  # not elementwise
        "t = Constant<value_floats = [1.0, 2.0, 3.0]>() c = Add(w, t)",  # shapes that do not go together
        "c = custom.Neg(w)",
        "c = custom.Reshape(w, i)",
        "c = Neg(big)",
        "c = Reshape(big, i)",
        "s = Constant<value_ints = [33, 32]>() c = Expand(one, s)",  # 1056 elements
        "c = CastLike(i, s)",  # to strings
        "c = Constant<value_string = 'text'>()",
        "c = Constant<value_strings = ['text']>()",
        "c = Identity(s)",
    ],
)
def test_values_that_are_not_computed(body: str) -> None:
    values = ", ".join(["1"] * (LARGE + 1))
    weights = (
        "float[2] w = {1, 2}, int64[2] i = {2, 2}, float[1] one = {9}, string[1] s = {'text'}, "
        f"float[{LARGE + 1}] big = {{{values}}}"
    )
    assert constants_of(body.replace("'", '"'), weights.replace("'", '"')).value("c") is None


@pytest.mark.parametrize(("count", "known"), [(LARGE, True), (LARGE + 1, False)])
@pytest.mark.parametrize("kind", ["value", "value_ints", "value_floats", "initializer", "expand"])
def test_only_small_constants_have_values(kind: str, count: int, known: bool) -> None:
    ones = ", ".join(["1"] * count)
    floats = ", ".join(["1.0"] * count)
    body, weights = {
        "value": (f"c = Constant<value = float[{count}] {{{ones}}}>()", ""),
        "value_ints": (f"c = Constant<value_ints = [{ones}]>()", ""),
        "value_floats": (f"c = Constant<value_floats = [{floats}]>()", ""),
        "initializer": ("", f"float[{count}] c = {{{ones}}}"),
        "expand": ("c = Expand(one, n)", f"float[1] one = {{1}}, int64[1] n = {{{count}}}"),
    }[kind]
    value = constants_of(body, weights).value("c")
    assert (value is not None) is known
    if value is not None:
        same(value, np.ones(count, np.int64 if kind == "value_ints" else np.float32))


def test_a_default_that_the_caller_may_replace_has_no_value() -> None:
    """If only some initializers are inputs too; where all of them are, the file is merely old."""
    weights = "float[2] v = {3, 4}, float[2] w = {1, 2}"
    some = constants_of("c = Neg(w) d = Neg(v)", weights, inputs="float[2] x, float[2] w")
    assert some.value("w") is some.value("c") is None
    same(some.value("d"), np.array([-3, -4], np.float32))
    every = constants_of("", weights, inputs="float[2] x, float[2] w, float[2] v")
    same(every.value("w"), np.array([1, 2], np.float32))


def test_external_data_is_not_read() -> None:
    model = text_model("out = Add(x, w)")
    stub = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[2])
    stub.data_location = onnx.TensorProto.EXTERNAL
    stub.external_data.add(key="location", value="nowhere")
    model.graph.initializer.append(stub)
    constants = Constants(all_views(model)[0])
    assert "w" in constants
    assert constants.value("w") is None
    assert constants.shape("w") == (2,)


def test_a_cycle_ends() -> None:
    """A tensor that two nodes write can depend on itself. Loading refuses that, but not every graph is of a file."""
    constants = constants_of("b = Neg(w) a = Neg(b) b = Neg(a)", "float[2] w = {1, 2}")
    assert "b" in constants
    assert constants.value("b") is None


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("w", (2, 3)),
        ("c", (2, 3)),
        ("big", (3, 1024)),
        ("turned", (1024, 3)),
        ("x", (2,)),
        ("free", None),
        ("no", None),
    ],
)
def test_shapes(tensor: str, shape: tuple[int, ...] | None) -> None:
    zeros = ", ".join(["0"] * 3072)
    known = constants_of(
        "c = Neg(w) turned = Transpose(big) l = Neg(free)",
        f"float[2, 3] w = {{1, 2, 3, 4, 5, 6}}, float[3, 1024] big = {{{zeros}}}",
        inputs="float[2] x, float[n, 2] free",
    )
    assert known.shape(tensor) == shape


HALF = "float16 two = {16384}, float16 third = {13653}"
"""The text format wants float16 numbers as bits: 2 and about 1/3."""


@pytest.mark.parametrize(
    ("body", "wide", "own"),
    [
        ("r = Sqrt(two)", 2.0**0.5, np.float16(2.0**0.5)),
        ("s = Sqrt(two) r = Reciprocal(s)", 0.5**0.5, np.float16(1.0 / np.float64(np.float16(2.0**0.5)))),
        ("d = Cast<to=1>(third) r = Sqrt(d)", 0.333251953125**0.5, np.float32(0.333251953125**0.5)),
        ("s = Sqrt(two) r = Cast<to=11>(s)", 2.0**0.5, np.float64(np.float16(2.0**0.5))),
        ("s = Sqrt(two) r = CastLike(s, x)", 2.0**0.5, np.float32(np.float16(2.0**0.5))),
        ("s = Sqrt(two) a = Constant<value_ints=[1]>() r = Reshape(s, a)", 2.0**0.5, [np.float16(2.0**0.5)]),
        ("s = Sqrt(two) r = Cast<to=7>(s)", 1.0, np.int64(1)),
    ],
)
def test_a_computed_scalar_is_exact_while_values_have_their_type(body: str, wide: float, own: Any) -> None:
    found = constants_of(body, HALF)
    same(found.value("r"), own)
    assert found.scalar("r") == pytest.approx(wide, rel=1e-15)

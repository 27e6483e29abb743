"""Linear layers as x W + b, however they are written, against onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from rewriter.proof.certificate.constants import Axes, before_casts, sizes
from rewriter.proof.certificate.graphs import Model, Tensor
from rewriter.proof.certificate.regions import Reader
from rewriter.proof.certificate.rows import extent, in_order, read_layer

from rewriter.files.load import load_model
from rewriter.ort.sessions import open_session
from tests.textmodels import text_model

ROWS = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
SPLIT = "s = Constant<value = int64[2] {3, 5}>() "
ENDS = (
    "from = Constant<value = int64[1] {2}>() to = Constant<value = int64[1] {7}>() on = Constant<value_ints = [-1]>() "
)
HALF = (
    "y = MatMul(x, W1) n = Shape(y) l = Constant<value_ints = [-1]>() i = Gather(n, l) t = Constant<value_ints = [2]>()"
    " w = Div(i, t) o = Constant<value_ints = [0]>() out = Slice(y, o, w, l)"
)

LAYERS = {
    "a product": "out = MatMul(x, W1)",
    "with a bias": "y = MatMul(x, W1) out = Add(y, b1)",
    "with a bias in front": "y = MatMul(x, W1) out = Add(b1, y)",
    "with one number as bias": "y = MatMul(x, W1) out = Add(y, $0.5)",
    "a product as Einsum": 'out = Einsum<equation = "btd,df->btf">(x, W1)',
    "Einsum, turned": 'out = Einsum<equation = "fd, ...d -> ...f">(W1t, x)',
    "transposed weights": "w = Transpose<perm = [1, 0]>(W1t) y = MatMul(x, w) out = Add(y, b1)",
    "weights side by side": "w = Concat<axis = 1>(A1, A1) y = MatMul(x, w) out = Identity(y)",
    "weights times a number": "w = Mul(W1, $0.1) out = MatMul(x, w)",
    "a part": f"{SPLIT} y = MatMul(x, W1) z = Add(y, b1) other, out = Split<axis = -1>(z, s)",
    "half": "y = MatMul(x, W1) other, out = Split<axis = -1>(y)",
    "a part of opset 12": "y = MatMul(x, W1) other, out = Split<axis = -1, split = [3, 5]>(y)",
    "a part whose size is computed": HALF,
    "a slice": f"{ENDS} y = MatMul(x, W1) z = Add(y, b1) out = Slice(z, from, to, on)",
}
NONE = {
    "two biases": "y = MatMul(x, W1) z = Add(y, b1) out = Add(z, c1)",
    "a bias with an axis more": "y = MatMul(x, W1) out = Add(y, wide)",
    "Einsum that turns its output": 'y = Einsum<equation = "btd,df->bft">(x, W1) out = Transpose<perm = [0, 2, 1]>(y)',
    "weights that are infinite": "out = MatMul(x, endless)",
    "weights that are computed": "w = Exp(W1) out = MatMul(x, w)",
    "a product from the left": "w = Transpose<perm = [0, 2, 1]>(x) out = MatMul(W1t, w)",
    "a part whose size is a difference": HALF.replace("Div", "Sub"),
    "a part of no size": HALF.replace("[2]", "[0]"),
    "a slice of tokens": "y = MatMul(x, W1) " + ENDS.replace("-1", "1") + "out = Slice(y, from, to, on)",
}


def tensor(body: str, name: str = "out") -> tuple[onnx.ModelProto, Tensor]:
    opset, given = 12 if "split =" in body else 17, {"wide": np.ones((1, 1, 8)), "pair": np.ones((1, 1))}
    given["endless"] = np.full((4, 8), np.inf)
    model = text_model(body, outputs="float[a, b, c] out", constants=given, opset=opset, domains={"own": 1})
    return model, Model(load_model(model)).main.find(name)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_weights(name: str) -> None:
    model, out = tensor(LAYERS[name])
    layer = read_layer(out)
    assert layer is not None
    assert layer.source.name == "x"
    made = open_session(model).run({"x": ROWS}, ["out"])["out"]
    np.testing.assert_allclose(ROWS.astype(float) @ layer.weight.astype(float) + layer.bias, made, atol=1e-5)
    assert extent(out).width == made.shape[-1]


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_layer_of_x(name: str) -> None:
    layer = read_layer(tensor(NONE[name])[1])
    assert layer is None or layer.source.name != "x"


@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm(transposed: int) -> None:
    weight = "W1t" if transposed else "W1"
    body = f"flat = Flatten<axis = 2>(x) out = Gemm<transB = {transposed}>(flat, {weight}, b1)"
    model, out = tensor(body)
    layer = read_layer(out)
    assert layer is not None
    assert in_order(layer.source).name == "x"
    made = open_session(model).run({"x": ROWS}, ["out"])["out"]
    np.testing.assert_allclose(ROWS.reshape(-1, 4) @ layer.weight + layer.bias, made, atol=1e-5)
    assert read_layer(tensor(body.replace("transB", "alpha = 2.0, transB"))[1]) is None


def test_axes_in_front() -> None:
    body = (
        "y = MatMul(x, W1) s = Sigmoid(y) h = Mul(y, s) n = Shape(x) i = Constant<value = int64 {0}>() "
        "b = Gather(n, i) o = Constant<value = int64[1] {0}>() one_axis = Unsqueeze(b, o) "
        "r = Constant<value = int64[2] {-1, 8}>() shape = Concat<axis = 0>(one_axis, r) "
        "flat = Reshape(h, shape) t = Transpose<perm = [1, 0, 2]>(h) k = Constant<value_ints = [0, 0, 0]>() "
        "same = Reshape(h, k) two = Add(h, W2t) one = Add(h, pair) e = Exp(x) out = Add(h, t) "
        "l = Constant<value_ints = [1]>() thin = Slice(W1, o, l, l) column = MatMul(x, thin) broad = Add(column, b1) "
        "w = Unsqueeze(W1, o) stack = MatMul(x, w)"
    )
    of = {
        "h": ("x", 8),
        "s": ("x", 8),
        "one": ("x", 8),
        "e": ("x", None),
        "broad": ("x", None),
        "column": ("x", 1),
        "flat": ("flat", 8),
    }
    for name in ("h", "s", "e", "flat", "same", "t", "one", "two", "column", "broad", "stack", "out"):
        model, told = tensor(body, name)
        # The original's word about its own sizes is taken, and no other model's.
        judged = Model(load_model(model), told.scope.model).main.find(name)
        front, width = of.get(name, (name, None))
        for each, size in ((judged, width), (told, {"e": 4, "column": 1}.get(name, 8))):
            found = extent(each)
            assert (found.front.tensor.name, found.width, *found.front[1:]) == (front, size, 0, -1), name
    _, shape = tensor(body, "shape")
    assert sizes(shape) == [Axes(shape.scope.find("x"), 0, 1), -1, 8]


def part(name: str, start: int, stop: int) -> str:
    """A slice of the shape of x."""
    ends = "".join(f"{name}{k} = Constant<value_ints = [{end}]>() " for k, end in enumerate((start, stop)))
    return f"{ends} {name} = Slice(n, {name}0, {name}1) "


SIZES: dict[str, list[tuple[int, int | None]] | None] = {
    part("p", 0, 1) + part("q", 1, 2): [(0, 2)],
    part("p", 0, -1) + part("q", -1, 2**31): [(0, None)],
    part("p", 1, 2) + part("q", 2, 2**31): [(1, None)],
    part("p", 0, 1) + part("q", 2, 3): [(0, 1), (2, 3)],
    part("p", 0, 2) + part("q", 2, 1): [(0, 2), (2, 1)],
    part("p", -2, -1) + part("q", -1, 2**31): [(-2, -1), (-1, None)],
    part("p", 0, 1) + "i = Constant<value_ints = [1]>() q = Gather(n, i)": [(0, 2)],
    part("p", 0, 1) + "i = Constant<value_ints = [-1]>() q = Gather(n, i)": [(0, 1), (-1, None)],
    part("p", 0, 1) + "i = Constant<value_ints = [-2]>() q = Gather(n, i)": None,
    part("p", 0, 1) + "i = Constant<value_ints = [1, 2]>() q = Gather(n, i)": None,
    part("p", 0, 1) + "q = Shape<start = 1>(x)": None,
    part("p", 0, 1) + "q = own.Shape(x)": None,
}


@pytest.mark.parametrize("body", SIZES)
def test_a_shape_is_put_together_from_axes(body: str) -> None:
    for axis in (0, -1):
        text = f"n = Shape(x) {body} shape = Concat<axis = {axis}>(p, q) out = Identity(x)"
        found = sizes(tensor(text, "shape")[1])
        ends = None if found is None else [(each.start, each.stop) for each in found if isinstance(each, Axes)]
        assert ends == SIZES[body]


CASTS = {
    "z = Cast<to = 11>(x) out = Cast<to = 1>(z)": ("x", "x", "x"),
    "z = Cast<to = 10>(x) out = Cast<to = 1>(z)": ("z", "x", "x"),
    "z = Cast<to = 7>(x) out = Cast<to = 1>(z)": ("out", "out", "z"),
}


@pytest.mark.parametrize("body", CASTS)
def test_casts_that_are_passed(body: str) -> None:
    out, inner = (tensor(body, name)[1] for name in ("out", "z"))
    assert (in_order(out).name, before_casts(out).name, in_order(inner).name) == CASTS[body]


def test_axes_are_found_once_per_tensor() -> None:
    """What reads a tensor twice, 60 times in a row, would be asked 2^60 times."""
    body = "r0 = MatMul(x, W1) " + " ".join(f"s{i} = Sigmoid(r{i}) r{i + 1} = Mul(r{i}, s{i})" for i in range(40))
    found = extent(tensor(f"{body} out = Identity(r40)", "r40")[1]).front
    assert found.tensor.name == "x"


def chain(start: str, step: str) -> str:
    """A step, 40 times: each makes {more_p} and {more_q} of {p} and {q}."""
    names = [{"p": f"p{k}", "q": f"q{k}", "more_p": f"p{k + 1}", "more_q": f"q{k + 1}"} for k in range(40)]
    return " ".join([start, *(step.format(**each) for each in names)])


def test_weights_are_computed_once() -> None:
    """Each of 40 sums is read twice by the next: it would be computed 2^40 times."""
    body = chain("p0 = Identity(W1) q0 = Mul(W1, $0.5)", "{more_p} = Add({p}, {q}) {more_q} = Mul({q}, $-1.0)")
    layer, plain = (read_layer(tensor(f"{each} y = MatMul(x, p40) out = Add(y, b1)")[1])
                    for each in (body, "p40 = Identity(W1)"))  # fmt: skip
    assert layer is not None
    assert plain is not None
    np.testing.assert_array_equal(layer.weight, plain.weight)
    sums = chain("p0 = Identity(b1) q0 = Identity(b1)", "{more_p} = Add({p}, {q}) {more_q} = Add({q}, {p})")
    assert read_layer(tensor(f"{sums} out = Identity(x)", "p40")[1]) is None


def test_numbers_that_keep_axes_are_found_once() -> None:
    start = "y = MatMul(x, W1) p0 = Exp($2.0) q0 = Exp(p0)"
    found = extent(tensor(chain(start, "{more_p} = Min({p}, {q}) {more_q} = Max({q}, {p})") + " out = Mul(y, p40)")[1])
    assert (found.front.tensor.name, found.width) == ("x", 8)


def test_shapes_are_put_together_once() -> None:
    """2^40 times no size: no size."""
    start = f"n = Shape(x) {part('none', 2, 2)} p0 = Identity(none) q0 = Identity(none)"
    body = chain(start, "{more_p} = Concat<axis = 0>({p}, {q}) {more_q} = Concat<axis = 0>({q}, {p})")
    _, shape = tensor(f"{body} out = Identity(x)", "p40")
    assert sizes(shape) == [Axes(shape.scope.find("x"), 2, 2)]


def test_numbers_do_not_grow_without_end() -> None:
    """Squares of squares, 40 times, would have 2^40 digits: from some on, each is a tensor of its own."""
    body = chain("p0 = Div($1.0, $3.0) q0 = Identity(p0)", "{more_p} = Mul({p}, {q}) {more_q} = Mul({p}, {q})")
    region = Reader().region(tensor(f"{body} out = Mul(x, p40)")[1])
    assert region is not None
    assert {each.name for each in region.leaves.values()} == {"x", "p17"}

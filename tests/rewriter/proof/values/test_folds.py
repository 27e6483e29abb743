"""Constants folded in float32 are found again, at most a few units in the last place off; nothing else is."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter.evaluate.arithmetic import Field
from rewriter.evaluate.evaluator import Program
from rewriter.files.load import load_model
from rewriter.ort import write_optimised
from rewriter.proof.values.folds import folded, products
from tests.textmodels import Array, tensor, text_model

RNG = np.random.default_rng(7)
W, SQUARE = RNG.normal(0, 1, (4, 8)).astype(np.float32), RNG.normal(0, 1, (4, 4)).astype(np.float32)
ROW, OTHER = (RNG.normal(0, 1, 8).astype(np.float32) for _ in range(2))
SCALE = np.float32(0.1234567)
NORM = {
    "K": RNG.normal(0, 1, (8, 4, 3)).astype(np.float32),
    "b": ROW,
    "g": OTHER,
    "beta": RNG.normal(0, 1, 8).astype(np.float32),
    "mean": RNG.normal(0, 1, 8).astype(np.float32),
    "var": RNG.uniform(0.1, 2, 8).astype(np.float32),
}


def program(body: str, elem: str = "float", **constants: Any) -> Program:
    return Program(load_model(text_model(body, constants=constants, elem=elem)))


def reading(y: Array, elem: str = "float") -> Program:
    """A model of which only the constant `folded` counts."""
    return program("out = Add(x, folded)", elem, folded=y)


def original(elem: str = "float") -> Program:
    body = """p = MatMul(x, W) s = Mul(p, scale) t = Mul(s, row) u = Div(t, other) v = Gemm<alpha = 1.7>(u, W, row)
    w = Mul(v, ones) z = Mul(w, four) out = Mul(z, half)"""
    numbers = {"ones": np.ones(8, np.float32), "four": np.float32(4), "half": np.float32(0.5)}
    return program(body, elem, W=W, scale=SCALE, row=ROW, other=OTHER, **numbers)


def off(y: Array, ulps: float) -> Array:
    """With one entry moved by units in the last place."""
    moved = y.copy()
    moved.flat[5] += ulps * np.spacing(np.abs(moved.flat[5]))
    return moved


@pytest.mark.parametrize(
    ("y", "spelling"),
    [
        (W * SCALE, "'W' times 'scale'"),
        (W / SCALE, "'W' divided by 'scale'"),
        ((W * SCALE).T.copy(), "transposed 'W' times 'scale'"),
        (W * ROW, "'W' times 'row'"),
        ((W / OTHER).T.copy(), "transposed 'W' divided by 'other'"),
        ((W * ROW)[:, None], "'W' times 'row'"),
        (W * np.float32(1.7), "'W' times alpha of Gemm 'v'"),
        (ROW * OTHER, "'row' times 'other'"),
        (off(W * SCALE, 3), "'W' times 'scale'"),
        (np.float32(SCALE * np.float32(1.7)).reshape(1), "'scale' times alpha of Gemm 'v'"),
    ],
)
def test_products_are_found(y: Array, spelling: str) -> None:
    """Each with the residues of the exact product, in the constant's shape."""
    found = folded(original(), reading(y), {})["folded"]
    assert found.spelling == spelling
    field = Field(2**31 - 1, b"key")
    assert found.residues(field).shape == y.shape
    exact = {
        "'W' times 'scale'": lambda: field.mul(field.lift(W).entries, field.lift(SCALE).entries),
        "'W' times 'row'": lambda: field.mul(field.lift(W).entries, field.lift(ROW).entries),
    }.get(spelling)
    if exact is not None:
        assert (found.residues(field).reshape(W.shape) == exact()).all()


@pytest.mark.parametrize(
    ("y", "why"),
    [
        (off(W * SCALE, 6), "too far off"),
        (W * np.float32(0.1234), "times a number that A lacks"),
        (W * ROW[::-1], "times a vector in another order"),
        ((W * SCALE)[::-1].copy(), "rows in another order"),
        (W, "it is a constant of A"),
        (off(W, 5), "a copy is not a product"),
        (off(W * np.float32(4), 1), "a product by a power of 2 does not round"),
        (W.T.copy(), "it is one, transposed"),
        (np.full(8, SCALE), "one number: snapped in the field"),
        (np.array([2], np.float32), "a short number: exact"),
    ],
)
def test_nothing_else_is(y: Array, why: str) -> None:
    assert folded(original(), reading(y), {}) == {}, why


@pytest.mark.parametrize(("name", "ulps", "found"), [("w", 4, True), ("w", 5, False), ("W", 1, False)])
def test_two_tools_computed_the_same(name: str, ulps: int, found: bool) -> None:
    """A weight that was only copied keeps its name, and all of its bits."""
    weights: dict[str, Any] = {name: off(W.T, ulps)}
    other = program(f"out = MatMul(x, {name})", **weights)
    result = {each: fold.spelling for each, fold in folded(original(), other, {}).items()}
    assert result == ({name: "transposed 'W' in other last places"} if found else {})


@pytest.mark.parametrize("elem", ["float16", "bfloat16", "double"])
def test_only_float32(elem: str) -> None:
    assert folded(original(elem), reading(W * SCALE, elem), {}) == {}


def test_a_nan_hides_no_other_entry() -> None:
    holed, y = W.copy(), W * SCALE
    holed[0, 0], y[3, 2] = np.nan, 0
    assert folded(program("p = MatMul(x, W) out = Mul(p, scale)", W=holed, scale=SCALE), reading(y), {}) == {}


def test_one_wrong_entry_in_a_large_weight() -> None:
    """The samples do not see it."""
    large = RNG.normal(0, 1, (300, 4000)).astype(np.float32)
    a = program("p = MatMul(x, W) out = Mul(p, scale)", W=large, scale=SCALE)
    right = large * SCALE
    wrong = right.copy()
    wrong[211, 1234] += 1e-3
    assert set(folded(a, reading(right), {})) == {"folded"}
    assert not folded(a, reading(wrong), {})


@pytest.mark.parametrize(("first", "other", "found"), [(1e-7, 0, True), (2e-6, 0, False), (0, 1e-7, False)])
def test_what_a_computes_of_constants(first: float, other: float, found: bool) -> None:
    """A sum of products in another order rounds by units of its terms: not of the largest entry of another row."""
    rows = SQUARE * np.array([[1], [1], [1], [1e-4]], np.float32)
    computed = rows @ SQUARE
    y = computed.copy()
    y[[0, 3], 0] += np.array([first, other], np.float32) * np.abs(computed).max()
    a = program("merged = MatMul(rows, square) out = MatMul(x, merged)", rows=rows, square=SQUARE)
    result = folded(a, reading(y), {"merged": computed})
    assert (set(result) == {"folded"}) == found
    if found:
        assert result["folded"].spelling == "'merged', computed"


NORMED = {
    "Conv": "c = Conv(x, K, b) out = BatchNormalization(c, g, beta, mean, var)",
    "Conv without bias": "c = Conv(x, K) out = BatchNormalization<epsilon = 0.01>(c, g, beta, mean, var)",
    "Conv, then Add": "p = Conv(x, K) c = Add(b, p) out = BatchNormalization(c, g, beta, mean, var)",
}


def normed(kind: str, **numbers: Array) -> onnx.ModelProto:
    ends: dict[str, Any] = {"inputs": "float[batch, 4, 9] x", "outputs": "float[batch, 8, 7] out"}
    return text_model(NORMED[kind], constants=NORM | numbers, **ends)


def by_hand(epsilon: float, bias: Array) -> tuple[Array, Array]:
    scale = NORM["g"] / np.sqrt(NORM["var"] + np.float32(epsilon))
    return NORM["K"] * scale[:, None, None], (bias - NORM["mean"]) * scale + NORM["beta"]


@pytest.mark.parametrize(
    ("kind", "epsilon", "bias"), [("Conv", 1e-5, 1), ("Conv without bias", 0.01, 0), ("Conv, then Add", 1e-5, 1)]
)
def test_batch_norms(kind: str, epsilon: float, bias: int) -> None:
    """Weight and bias as numpy folds them; and none with the epsilon of another."""
    a = Program(load_model(normed(kind)))
    weight, shift = by_hand(epsilon, bias * NORM["b"])
    text = "'b'" if bias else "no bias"
    assert folded(a, reading(weight), {})["folded"].spelling == "'K' times the scale of BatchNormalization 'out'"
    assert folded(a, reading(shift), {})["folded"].spelling == f"{text} through BatchNormalization 'out'"
    wrong = by_hand(1e-3, bias * NORM["b"])
    assert not any(folded(a, reading(y), {}) for y in wrong)


def test_a_bias_that_cancels() -> None:
    """(b - mean) scale + beta is near 0: its error is a rounding of the terms, not of the result."""
    scale = NORM["g"] / np.sqrt(NORM["var"] + np.float32(1e-5))
    beta = -(NORM["b"] - NORM["mean"]) * scale * np.float32(1 + 1e-5)
    a = Program(load_model(normed("Conv", beta=beta)))
    shift = (NORM["b"] - NORM["mean"]) * scale + beta
    assert "folded" in folded(a, reading(shift), {})
    terms = np.abs(beta)
    assert not folded(a, reading((shift + 40 * np.spacing(terms)).astype(np.float32)), {})


def test_what_onnxruntime_folds(tmp_path: Path) -> None:
    source = load_model(normed("Conv"))
    b = Program(load_model(write_optimised(source, "extended", tmp_path)))
    assert [node.op_type for node in b.graph.node] == ["Conv"]
    found = folded(Program(source), b, {})
    assert found.keys() == {each.name for each in b.graph.initializer}


def test_constants_of_nodes_and_many_equal_ones() -> None:
    """A Constant node is a constant; forty equal weights and a hundred equal factors are looked at once each."""
    names = [f"W{place}" for place in range(40)]
    body = "".join(f"s{name} = Mul(x, {name}) " for name in names) + "out = Mul(x, scale)"
    model = text_model(body, constants=dict.fromkeys(names, SQUARE) | {"scale": np.asarray(SCALE)})
    node = onnx.helper.make_node("Constant", [], ["folded"], value=tensor("", SQUARE * SCALE))
    other = text_model("out = Add(x, folded)")
    other.graph.node.insert(0, node)
    found = folded(Program(load_model(model)), Program(load_model(other)), {})
    assert found["folded"].spelling == "'W0' times 'scale'"


def test_scalars_that_a_tool_merges() -> None:
    """Products and quotients, but nothing that is one of the model's own numbers already."""
    scalars = {"a": 0.35355338, "b": 50.0, "c": 17.67767}  # c = a b
    text = "p = Mul(x, a) q = Div(p, b) out = Mul(q, c)"
    constants: dict[str, Any] = {name: np.array(each, np.float32) for name, each in scalars.items()}
    a = program(text, **constants)
    found = products(a)
    assert found == sorted(found, key=lambda each: each[0])
    assert "0.3535534 / 50" in {spelling for _, spelling, _ in found}
    values = np.array([value for value, _, _ in found])
    assert min(np.abs(values / each - 1).min() for each in scalars.values()) > 5e-7
    field, plain = Field(2**31 - 1, b"key", snaps=True, products=found), Field(2**31 - 1, b"key", snaps=True)
    merged = np.float32(np.float32(0.35355338) / np.float32(50))
    exact = plain.mul(plain.lift(np.float32(0.35355338)).entries, plain.inv(plain.lift(np.float32(50)).entries))
    assert field.lift(merged).entries == exact != plain.lift(merged).entries
    assert field.lift(-merged).entries == plain.neg(exact)
    for each in scalars.values():
        assert field.lift(np.float32(each)).entries == plain.lift(np.float32(each)).entries
    half = np.float16(merged)
    assert field.lift(half).entries == plain.lift(half).entries

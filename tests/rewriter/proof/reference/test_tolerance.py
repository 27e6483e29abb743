"""What rounding may amount to, kind by kind, against formulas worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper

from rewriter.proof.reference.engine import float64_ways, plan
from rewriter.proof.reference.scope import Node, Scope
from rewriter.proof.reference.tolerance import Operands, Trial, allowances

Array = NDArray[Any]

EPS = 2.0**-23
A = np.array([[1, -2, 3], [0.5, 0, -4]])
B = np.array([[1, -1], [2, 3], [-5, 0.25]])


def compute(node: Node, operands: Operands) -> list[Array]:
    made = plan(Scope((), node.gives, {}, (node,)), float64_ways({})).run({}, operands)
    return [made[name] for name in node.gives]


def allowed(
    op_type: str, *operands: Array, kernel: Any = None, eps: float = EPS, opset: int = 17, **attributes: Any
) -> Array:
    """What is allowed for the first output of an operator."""
    names = [f"x{index}" for index in range(len(operands))]
    given = {name: np.asarray(value, np.float64) for name, value in zip(names, operands, strict=True)}
    domain = attributes.pop("domain", "")
    node = Node(helper.make_node(op_type, names, ["y"], domain=domain, **attributes), opset, {})
    exact = compute(node, given)
    here: list[Operands] = []

    def run(changed: Operands) -> list[Array]:
        here.append(changed)
        return compute(node, changed) if kernel is None else kernel(changed)

    return allowances(Trial(node, given, exact, compute, run), eps)[0]


def close(found: Array, expected: Any) -> None:
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=1e-9)


@pytest.mark.parametrize("op_type", ["Relu", "Floor", "Greater", "Abs", "Sign"])
def test_exact(op_type: str) -> None:
    close(allowed(op_type, *([A, A] if op_type == "Greater" else [A])), 0)


def test_sums() -> None:
    sizes = np.abs(A) @ np.abs(B)
    close(allowed("MatMul", A, B), (3 + 8) * EPS * sizes + EPS * np.abs(A @ B))
    c = np.array([-1.0, 7])
    given: dict[str, Any] = {"alpha": -0.5, "beta": -2.0}
    made = np.abs(-0.5 * A @ B - 2 * c)
    close(allowed("Gemm", A, B, c, **given), (4 + 8) * EPS * (0.5 * sizes + 2 * np.abs(c)) + EPS * made)
    close(allowed("Sum", A, -A, 2 * A), (3 + 8) * EPS * 4 * np.abs(A) + EPS * np.abs(2 * A))
    fused = allowed("FusedMatMul", A, B, domain="com.microsoft", alpha=-3.0)
    close(fused, 11 * EPS * 3 * sizes + EPS * 3 * np.abs(A @ B))


def test_products_of_half_precision_are_summed_in_float32() -> None:
    half = 2.0**-10
    close(allowed("MatMul", A, B, eps=half), 11 * EPS * (np.abs(A) @ np.abs(B)) + half * np.abs(A @ B))
    double = 2.0**-52
    close(allowed("MatMul", A, B, eps=double), 11 * double * (np.abs(A) @ np.abs(B)) + double * np.abs(A @ B))


def test_means() -> None:
    made, size = A.mean(1), np.abs(A).mean(1)
    close(allowed("ReduceMean", A, axes=[1], keepdims=0), (3 + 8) * EPS * size + EPS * np.abs(made))
    whole = np.abs(A).mean()
    close(allowed("ReduceMean", A, keepdims=0), (6 + 8) * EPS * whole + EPS * np.abs(A.mean()))
    image = np.arange(-8, 8).reshape(1, 1, 4, 4) * 1.0
    windows = np.abs(image)[0, 0, :, :3] + np.abs(image)[0, 0, :, 1:]
    sums = image[0, 0, :, :3] + image[0, 0, :, 1:]
    found = allowed("AveragePool", image, kernel_shape=[1, 2])
    close(found[0, 0], (2 + 8) * EPS * windows / 2 + EPS * np.abs(sums) / 2)


def test_normalisation_by_given_statistics() -> None:
    """The mean is subtracted, so its size adds up; the variance is no summand."""
    x, s, b, m, v = np.array([[3.0, -2.0]]), *(np.array(p) for p in ([2.0, -1], [-1.0, 4], [-5.0, 6], [4.0, 0.25]))
    root = np.sqrt(v + float(np.float32(1e-5)))
    made = (x - m) / root * s + b
    size = (np.abs(x) + np.abs(m)) / root * np.abs(s) + np.abs(b)
    count = (2 + 8) / 2
    close(allowed("BatchNormalization", x, s, b, m, v, momentum=0.9), (count + 8) * EPS * size + EPS * np.abs(made))


@pytest.mark.parametrize("op_type", ["Add", "Mul", "Div", "Sub"])
def test_arithmetic(op_type: str) -> None:
    made = {"Add": np.add, "Mul": np.multiply, "Div": np.divide, "Sub": np.subtract}[op_type](A[:, :2], B[:2])
    close(allowed(op_type, A[:, :2], B[:2]), 2 * EPS * np.abs(made))


def test_elementwise() -> None:
    x = np.array([0.5, 3.0, -20.0])
    by = 8 * EPS
    changed = np.abs(np.exp(x * (1 + by)) - np.exp(x)) + np.abs(np.exp(x * (1 - by)) - np.exp(x))
    close(allowed("Exp", x), by * np.exp(x) + changed)
    changed = np.abs(np.tanh(x * (1 + by)) - np.tanh(x)) + np.abs(np.tanh(x * (1 - by)) - np.tanh(x))
    close(allowed("Tanh", x), by * (np.abs(np.tanh(x)) + 1) + changed)
    swish = [x * k * np.clip(x * k / 6 + 0.5, 0, 1) for k in (1, 1 + by, 1 - by)]
    changed = np.abs(swish[1] - swish[0]) + np.abs(swish[2] - swish[0])
    close(allowed("HardSwish", x), by * (np.abs(swish[0]) + np.abs(x)) + changed)
    y = np.array([2.0, 3.0, 1.0])
    x = np.abs(x)
    powers = [np.power(x * a, y * b) for a, b in ((1, 1), (1 + by, 1), (1 - by, 1), (1, 1 + by), (1, 1 - by))]
    close(allowed("Pow", x, y), by * powers[0] + sum(np.abs(power - powers[0]) for power in powers[1:]))


def test_an_operand_moved_out_of_the_domain_changes_nothing() -> None:
    found = allowed("Acos", np.array([1.0]))
    by = 8 * EPS
    close(found, by * (0 + 1) + np.arccos(1 - by))


def test_softmax() -> None:
    x = np.array([[0.0, -5, -900], [1, 1, 1]])
    shares = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    logs = np.log(np.maximum(shares, np.finfo(float).tiny))
    close(allowed("Softmax", x), EPS * (8 + np.sqrt(3)) * shares * (1 - logs))
    made = x - np.log(np.exp(x).sum(1, keepdims=True))
    close(allowed("LogSoftmax", x), EPS * (8 + np.sqrt(3)) * (1 + np.abs(made)))


def test_any_other_operator() -> None:
    x = np.array([[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0]])
    calls: list[Array] = []

    def kernel(operands: Operands) -> list[Array]:
        calls.append(operands["x0"])
        return [np.array([[5.0], [2.0 + 1e-3 * (len(calls) - 1)]])]

    found = allowed("ReduceL2", x, kernel=kernel, axes=[1])
    close(found, EPS * (8 + 2) * 5 + 8 * 2e-3)
    here, *moved = calls
    np.testing.assert_array_equal(here, x)
    assert len(moved) == 2
    for each in moved:
        np.testing.assert_allclose(np.abs(each - x), EPS * np.abs(x), rtol=1e-6)
    assert not np.array_equal(moved[0], moved[1])


def test_masks_are_not_moved() -> None:
    x, seen = np.array([[3.0, -3.4e38, -np.inf, 1e7]]), []

    def kernel(operands: Operands) -> list[Array]:
        seen.append(operands["x0"])
        return [np.array([[np.nan]])]

    allowed("ReduceLogSumExp", x, kernel=kernel, axes=[1])
    for each in seen[1:]:
        np.testing.assert_array_equal(each[0, 1:3], x[0, 1:3])
        assert (each[0, [0, 3]] != x[0, [0, 3]]).all()


def test_scales_are_not_moved() -> None:
    x, seen = np.arange(4.0).reshape(1, 1, 4), []

    def kernel(operands: Operands) -> list[Array]:
        seen.append(operands)
        return [np.zeros((1, 1, 8))]

    allowed("Resize", x, np.zeros(0), np.array([1.0, 1, 2]), kernel=kernel, mode="linear")
    for each in seen[1:]:
        assert (each["x0"][..., 1:] != x[..., 1:]).all()
        np.testing.assert_array_equal(each["x2"], [1, 1, 2])
    del seen[:]
    allowed("Upsample", x, np.array([1.0, 1, 2]), kernel=kernel, mode="linear", opset=9)
    for each in seen[1:]:
        assert (each["x0"][..., 1:] != x[..., 1:]).all()
        np.testing.assert_array_equal(each["x1"], [1, 1, 2])

"""Expressions: one object for equal ones, folded constants, and operators by their definitions."""

import math

import numpy as np
import onnx
import pytest
from flint import fmpq
from onnx.reference import ReferenceEvaluator

from rewriter.evaluate.table import MICROSOFT
from rewriter.proof.certificate.expressions import (
    HALF,
    ONE,
    VARIABLE,
    ZERO,
    Expression,
    NotAFunction,
    add,
    apply,
    constant,
    degree_in,
    div,
    leaf,
    listing,
    maximum,
    minimum,
    mul,
    neg,
    scalar_operator,
    softmax,
    sub,
    total,
    where,
)
from tests.rewriter.proof.certificate.evaluated import at, sigmoid

U, G = leaf(1), leaf(0)


UNARY = (
    "Exp", "Erf", "Softplus", "Sigmoid", "Tanh", "Neg", "Abs", "Reciprocal", "Relu", "LeakyRelu", "Elu", "Selu", "Celu",
    "HardSigmoid", "HardSwish", "Softsign", "Mish", "Gelu",
)  # fmt: skip


@pytest.mark.parametrize("kind", UNARY)
def test_an_operator_is_what_onnx_says(kind: str) -> None:
    text = f'<ir_version: 10, opset_import: ["": 20]> g (double[N] x) => (double[N] y) {{ y = {kind}(x) }}'
    x = np.array([-3.5, -1.0, -0.3, 0.4, 1.0, 2.5, 7.0])
    wanted = ReferenceEvaluator(onnx.parser.parse_model(text)).run(None, {"x": x})[0]
    made = scalar_operator(("", kind), {}, [VARIABLE])
    assert [float(at(made, each)) for each in x] == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_operators_of_onnxruntime() -> None:
    tanh = scalar_operator((MICROSOFT, "FastGelu"), {}, [VARIABLE])
    assert float(at(tanh, 2.0)) == pytest.approx(1.0 + math.tanh(math.sqrt(2 / math.pi) * (2 + 0.044715 * 8)))
    assert tanh is scalar_operator(("", "Gelu"), {"approximate": b"tanh"}, [VARIABLE])
    assert scalar_operator((MICROSOFT, "Gelu"), {}, [VARIABLE]) is scalar_operator(("", "Gelu"), {}, [VARIABLE])
    quick = scalar_operator((MICROSOFT, "QuickGelu"), {"alpha": 1.5}, [VARIABLE])
    assert quick is mul(VARIABLE, sigmoid(mul(VARIABLE, constant(1.5))))
    biased = scalar_operator((MICROSOFT, "FastGelu"), {}, [VARIABLE, U])
    assert biased is scalar_operator(("", "Gelu"), {"approximate": b"tanh"}, [add(VARIABLE, U)])
    assert scalar_operator(("", "PRelu"), {}, [G, U]) is where(G, G, mul(G, U))
    assert scalar_operator(("", "Div"), {}, [G, U]) is div(G, U)


def test_what_is_not_elementwise_is_not_guessed() -> None:
    with pytest.raises(NotAFunction):
        scalar_operator(("", "LayerNormalization"), {}, [VARIABLE])
    with pytest.raises(NotAFunction):
        scalar_operator(("ai.other", "Gelu"), {}, [VARIABLE])
    for kind in ("Floor", "Sin", "Less", "Log", "Sign", "IsInf"):
        with pytest.raises(NotAFunction):
            scalar_operator(("", kind), {}, [VARIABLE, U][: 1 + (kind == "Less")])
    for exponent in (np.array(0.3), U):
        with pytest.raises(NotAFunction):
            scalar_operator(("", "Pow"), {}, [VARIABLE, exponent])
    assert scalar_operator(("", "Pow"), {}, [VARIABLE, np.array(3.0)]) is mul(mul(VARIABLE, VARIABLE), VARIABLE)
    assert scalar_operator(("", "Pow"), {}, [VARIABLE, np.array(-0.5)]) is div(ONE, apply("sqrt", VARIABLE))


def test_the_last_number_of_a_type_is_no_bound() -> None:
    """Any other one is, though no value in the field is taken to be beyond it."""
    last, far = np.float32(np.finfo(np.float32).max), np.float32(2.0**60)
    clips = [
        scalar_operator(("", "Clip"), {}, [VARIABLE, np.array(-x), np.array(x)])
        for x in (last, np.float32(np.inf), far)
    ]
    assert clips[:2] == [VARIABLE, VARIABLE]
    assert clips[2] is minimum(maximum(VARIABLE, constant(-(2.0**60))), constant(2.0**60))
    assert scalar_operator(("", "Clip"), {"min": 0.0}, [VARIABLE, None, np.array(last)]) is maximum(VARIABLE, ZERO)


def test_defaults_are_float32_numbers() -> None:
    made = scalar_operator(("", "LeakyRelu"), {}, [VARIABLE])
    assert made is where(VARIABLE, VARIABLE, mul(VARIABLE, constant(float(np.float32(0.01)))))


def test_equal_expressions_are_one_object() -> None:
    assert add(mul(VARIABLE, U), ONE) is add(mul(VARIABLE, U), ONE)
    assert add(U, ONE) is not add(ONE, U)


def test_constants_fold_exactly() -> None:
    assert add(constant(0.1), constant(0.2)) is not constant(0.3)
    assert constant(0.5) is HALF
    assert sub(U, U) is ZERO
    assert mul(U, ZERO) is ZERO
    assert mul(ONE, U) is U
    assert add(ZERO, U) is U
    assert div(U, ONE) is U
    assert div(ONE, constant(2)) is HALF
    assert neg(HALF) is constant(-0.5)
    assert maximum(constant(2), constant(-3)) is constant(2)
    assert where(ZERO, U, G) is U
    assert where(constant(-1e-300), U, G) is G
    assert scalar_operator(("", "Pow"), {}, [constant(-2), np.array(5.0)]) is constant(-32)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_a_number_is_no_constant(number: float) -> None:
    with pytest.raises(NotAFunction):
        constant(number)


def test_a_division_by_zero() -> None:
    with pytest.raises(NotAFunction, match="division by 0"):
        div(VARIABLE, ZERO)


@pytest.mark.parametrize(
    ("expression", "degree"),
    [
        (mul(G, U), 1),
        (div(mul(G, U), apply("exp", G)), 1),
        (add(U, mul(G, U)), 1),
        (neg(U), 1),
        (where(G, U, ZERO), 1),
        (G, 0),
        (mul(U, U), None),
        (add(U, ONE), None),
        (add(U, G), None),
        (div(G, U), None),
        (div(U, U), None),
        (where(U, G, U), None),
        (apply("exp", U), None),
    ],
)
def test_the_degree_in_a_value(expression: Expression, degree: int | None) -> None:
    assert degree_in(expression, U) == degree


@pytest.mark.parametrize("further", [0, 40])
def test_a_softmax_is_a_distribution(further: int) -> None:
    weights = softmax([VARIABLE, constant(2), neg(VARIABLE), *[VARIABLE] * further])
    assert float(at(total(weights), 0.7)) == pytest.approx(1.0)
    whole = math.exp(2) + (1 + further) * math.exp(0.7) + math.exp(-0.7)
    assert float(at(weights[1], 0.7)) == pytest.approx(math.exp(2) / whole)


def test_listings_tell_constants_apart_and_share_parts() -> None:
    s = apply("erf", VARIABLE)
    assert listing(add(mul(s, s), HALF)) == ["t0 = erf(y)", "t1 = *(t0, t0)", "t2 = +(t1, 1/2)"]
    assert listing(mul(VARIABLE, constant(0.1))) != listing(mul(VARIABLE, constant(math.nextafter(0.1, 1))))
    assert listing(VARIABLE) == ["y"]


@pytest.mark.slow
def test_deep_expressions_are_no_problem() -> None:
    deep = G
    for k in range(50_000):
        deep = add(mul(deep, constant(fmpq(k + 2, k + 1))), ONE)
    assert degree_in(deep, U) == 0
    assert len(listing(deep)) == 100_000

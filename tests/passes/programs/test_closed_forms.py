"""Stated errors of closed forms and gates: proved by the certificate, and numbers that regressions hold."""

import math

import numpy as np
import pytest
from flint import arb, ctx

from passes.programs.activations import KINK, clipped, scaled_silu
from passes.programs.program import ARITHMETIC, Array, BiasToken, Head, Parameters, Program, fitted_programs
from rewriter import ExitStatus, certify, rewrite
from tests.cases import planned, proved
from tests.passes.programs.test_line import ENTRIES, made
from tests.textmodels import ERF_GELU, mlp, only_block

FLOAT, DOUBLE = 1, 11


OPERATORS = {
    "relu": "t = Relu(s)",
    "leaky_relu": "t = LeakyRelu<alpha = {a}>(s)",
    "sigmoid": "t = Sigmoid(s)",
    "tanh": "t = Tanh(s)",
    "elu": "t = Elu<alpha = {a}>(s)",
    "celu": "t = Celu<alpha = {a}>(s)",
    "selu": "t = Selu(s)",
    "hard_sigmoid": "t = HardSigmoid<alpha = {a}, beta = {b}>(s)",
    "clip": "t = Clip(s, $-{a}, ${b})",
    "silu": "i = Sigmoid(s) t = Mul(s, i)",
    "silu_clipped": "l = Clip(s, $-7.0, $7.0) i = Sigmoid(l) t = Mul(l, i)",
    "gelu_clipped": "l = Clip(s, , $7.0) t = Gelu(l)",
    "gelu": ERF_GELU.replace("y", "s").replace("h =", "t ="),
    "gelu_tanh": 't = Gelu<approximate = "tanh">(s)',
    "softplus": "t = Softplus(s)",
    "mish": "t = Mish(s)",
    "exp": "t = Exp(s)",
    "square": "t = Mul(s, s)",
    "relu_squared": "r = Relu(s) t = Mul(r, r)",
    "hard_swish": "t = HardSwish(s)",
}
"""`t` of `s`, which is the pre-activation times a number."""
LIMITED = {
    **dict.fromkeys(("mish", "hard_swish", "gelu_tanh"), (1.0, 1.0)),
    **dict.fromkeys(("gelu", "relu_squared", "celu", "elu", "selu"), (0.01, 100.0)),
    **dict.fromkeys(("silu_clipped", "gelu_clipped"), (0.1, 1.0)),
}
"""Where programs have a limited domain or form: the smallest and the largest number, positive."""
NO_GATES = {"exp", "square", "relu_squared", "hard_swish"}
ROWS = [(name, gated) for name in OPERATORS for gated in (False, True) if not gated or name not in NO_GATES]


@pytest.mark.sample(1)
@pytest.mark.parametrize("single", [True, False], ids=["float", "other"])
@pytest.mark.parametrize(("name", "gated"), ROWS)
def test_stated_errors_are_certified(name: str, gated: bool, single: bool) -> None:
    """f(k y) c for all numbers y, with constants drawn between 0.01 and 100; some gates in double too."""
    rng = np.random.default_rng([0, *name.encode()])
    elem = "float" if single else "double" if gated and name in ("relu", "tanh", "silu", "elu") else "float16"
    low, high = np.log10(LIMITED.get(name, (0.01, 100.0)))
    k = 10.0 ** rng.uniform(low, high) * (1.0 if name in LIMITED else rng.choice([-1.0, 1.0]))
    c = 10.0 ** rng.uniform(-2.0, 2.0) * rng.choice([-1.0, 1.0])
    a, b = (f"{number:.6f}" for number in 10.0 ** rng.uniform(-2.0, 2.0, 2))
    product = f"m = Mul(t, ${c:.9f}) u = MatMul(x, V1) h = Mul(m, u)" if gated else f"h = Mul(t, ${c:.9f})"
    operator = OPERATORS[name].format(a=a, b=b)
    model = mlp(f"s = Mul(y, ${k:.9f}) {operator} {product}", elem=elem, opset=20, ir=9)
    report = rewrite(model, validate=False, fit=False)
    if elem == "double" and report.exit_status is ExitStatus.NOTHING_TO_CONVERT:
        assert [row.reason for row in report.left] != [""]
        return
    assert report.exit_status is ExitStatus.CONVERTED, report.left
    assert certify(model, report.rewritten).problems == ()


@pytest.mark.parametrize("name", ["celu", "silu", "gelu", "tanh"])
def test_steep_functions_are_recognised(name: str) -> None:
    """At 1 they have reached their limits, so that their values there do not tell how steep they are."""
    text = f"s = Mul(y, $63.7) {OPERATORS[name].format(a='0.313', b='')} h = Mul(t, $-0.0745)"
    assert only_block(mlp(text, opset=20, ir=9)).identified.activation.name == name


@pytest.mark.slow
def test_the_error_of_a_gate_covers_sums_that_are_rounded() -> None:
    """Of 0.5 slope / small and the offset, for a slope that is the product of several numbers."""
    clip = "s = Mul(y, $-0.2254317) t = HardSigmoid<alpha = 0.52, beta = 0.163>(s) g = Mul(t, $-0.4295402)"
    assert rewrite(mlp(f"{clip} u = MatMul(x, V1) h = Mul(g, u)"), form="masked").problems == ()


@pytest.mark.parametrize("form", ["local", "compact"])
def test_claims_cover_sums_of_coefficients(form: str) -> None:
    """The slope on the right is the head's factor and the linear term in one number of the graph."""
    for inner, left, outer in np.random.default_rng(0).uniform(0.1, 2.0, (16, 3)):
        model = mlp(f"s = Mul(y, ${inner:.7f}) l = LeakyRelu<alpha = {left:.7f}>(s) h = Mul(l, ${outer:.7f})")
        (conversion,) = planned(model, form=form).conversions
        (slope, _), program = conversion.block.identified.parameters, conversion.program
        made = float(np.float32(program.heads[0].c + program.linear))
        assert abs(made / slope - 1.0) <= program.max_error + program.coefficient_error


def test_elu_without_a_kink_is_better_than_with_one() -> None:
    """Where the slopes agree, the error is e^-36, its rounding and the curvature."""
    assert made("celu", (1.0, 1.0, 1.0)).max_error < 1e-15
    assert made("celu", (1.0, 2.0, 1.0)).max_error > 0.9 * KINK / 2.0**40


# -- regressions: stated errors that were too small --------------------------------------------------------------


def measured(program: Program, name: str, parameters: Parameters, y: Array) -> float:
    """The largest error over max(1, |f|) at these points, in float64; for gates per unit of the value."""
    expected = ENTRIES[name].function(y, parameters)
    found = program.evaluate(y, np.ones_like(y)) if program.name.endswith("_gate") else program.evaluate(y)
    return float(np.max(np.abs(found - expected) / np.maximum(1.0, np.abs(expected))))


@pytest.mark.parametrize("elem_type", [FLOAT, DOUBLE])
@pytest.mark.parametrize("alpha", [1.0, 10.0, 100.0, 1000.0])
def test_gate_of_celu_keeps_its_rate(alpha: float, elem_type: int) -> None:
    """Keys with slopes -k and 1/alpha - k would lose the rate to rounding: an error of 1.6e-7 at alpha = 100."""
    parameters = (1.0, alpha, 1.0 / alpha)
    program = made("celu", parameters, elem_type, gated=True)
    assert program.max_error <= 1.1 * ARITHMETIC[elem_type].limit
    assert {1.0 / alpha} <= {token.slope for head in program.heads for token in head.bias_tokens}
    g = -np.logspace(-9.0, math.log10(program.domain), 500)
    rounding = 2.0**-53 / ARITHMETIC[elem_type].small
    assert measured(program, "celu", parameters, g) <= program.max_error + rounding


@pytest.mark.parametrize("beta", [1.0, 50.0, 1000.0])
def test_clipped_silu_has_its_kink_where_the_other_keys_weigh_as_much(beta: float) -> None:
    """At beta = 50 they have weight e^25 at 0.5; against one of them the kink is 25 / k away, an error of 1.9e-11."""
    parameters = (beta, 1.0, -1.0, 0.5)
    program = made("silu_clipped", parameters)
    assert program.max_error <= 2.6 * KINK / 2.0**40
    y = 0.5 + np.linspace(-60.0, 60.0, 2001) / 2.0**40
    assert measured(program, "silu_clipped", parameters, y) <= program.max_error + 1e-15


def test_a_gate_with_a_large_constant_states_what_the_limit_makes_of_its_line() -> None:
    """c g + d with d = 1000 near 0: the limit is that of c g, and its error is not in proportion to the sum."""
    parameters = (1.0, 1000.0, 0.0, math.inf)
    program = made("clip", parameters, gated=True)
    seen = measured(program, "clip", parameters, np.linspace(-2e3, 10.0, 20_001))
    assert 1e-6 < seen <= program.max_error <= 2.0 * seen


def test_what_is_stated_of_kinks() -> None:
    """Their errors over the reals, in proportion to the slope; rounding in float64 is for the certificate."""
    assert made("leaky_relu", (1.0, 0.1)).max_error < 2.6e-13
    for slope, offset, ends in ((1.0, 0.0, (-1.0, 2.0)), (0.3, 0.1, (-1.1, 2.3))):
        kinks = slope * 2.0 * KINK / 2.0**80
        assert made("clip", (slope, offset, *ends), DOUBLE).max_error == pytest.approx(kinks, rel=1e-9)


def test_exp_of_a_large_factor_stays_finite() -> None:
    program = made("exp", (1.0, 1e60), DOUBLE)
    y = np.array([-500.0, 0.0, 200.0])
    np.testing.assert_allclose(program.evaluate(y), 1e60 * np.exp(y), rtol=1e-12, atol=1e-12)
    assert program.domain > 500.0


def test_steepest_slope_of_gelu_programs() -> None:
    """`clipped` assumes that the slope of h is at most 1.25 c; checked by the derivative c p + cov(slopes, values)."""
    y = np.linspace(-16.0, 16.0, 32_001)
    for name, program in fitted_programs():
        if name == "gelu":
            (head,) = program.heads
            weights = head.weights(y)
            values = np.array([head.c * y + head.d, *(np.full_like(y, token.value) for token in head.bias_tokens)])
            slopes = np.array(head.logits)[:, :1]
            mean, centre = np.sum(weights * values, axis=0), np.sum(weights * slopes, axis=0)
            rise = head.c * weights[0] + np.sum(weights * (slopes - centre) * (values - mean), axis=0)
            assert np.max(np.abs(rise)) < 1.2 * head.c


def test_a_linear_term_cannot_be_clipped() -> None:
    with pytest.raises(ValueError, match="p has a linear term, which a bias token cannot stop"):
        clipped(Program("p", (Head(1.0),), linear=0.5), -1.0, 1.0, ARITHMETIC[FLOAT])


def test_kink() -> None:
    """max x / (1 + e^x) = W(1/e), rounded up."""
    with ctx.workprec(200):
        exact = (arb(1) / arb(1).exp()).lambertw()
    assert 0.0 < float(arb(KINK) - exact) < 1e-11


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_the_scaled_silu_is_the_nearest(activation: str) -> None:
    (head,) = scaled_silu(activation).heads
    assert (head.bias_tokens, head.gamma) == ((BiasToken(),), 0.0)
    y = np.linspace(-8.0, 8.0, 160_001)
    truth = ENTRIES[activation].function(y, ENTRIES[activation].usual)
    errors = {beta: np.abs(y / (1.0 + np.exp(-beta * y)) - truth).max() for beta in (head.beta, 1.702, 1.7725)}
    assert errors[head.beta] == min(errors.values())
    if activation == "gelu":
        assert [errors[1.702], errors[1.7725]] == pytest.approx([2.03e-2, 1.40e-2], abs=5e-5)
    for beta in (head.beta - 1e-3, head.beta + 1e-3):
        assert np.abs(y / (1.0 + np.exp(-beta * y)) - truth).max() > errors[head.beta]


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("form", "accuracy", "name"),
    [("local", 0.05, "scaled_silu"), ("masked", 0.0141, "scaled_silu"), ("local", 0.0139, "gelu_erf")],
)
def test_accuracy_decides_whether_gelu_is_a_scaled_silu(form: str, accuracy: float, name: str) -> None:
    report = proved(mlp(ERF_GELU), form=form, accuracy=accuracy)
    (row,) = report.converted
    assert (row.program or "").startswith(name)
    assert (row.max_error or 0.0) <= accuracy

"""Errors stated in the table of head programs, proved by the certificate that also judges rewritten models."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from flint import fmpq

from passes.programs.activations import ACTIVATIONS, scaled_silu
from passes.programs.program import Program, cheapest, fitted_programs
from rewriter.proof.certificate.bounds import Bound, bound
from rewriter.proof.certificate.expressions import VARIABLE, Expression, add, apply, constant, mul, softmax, total
from tests.rewriter.proof.certificate.evaluated import gelu

FUNCTIONS: dict[str, Callable[[], Expression]] = {
    "gelu": lambda: gelu(VARIABLE),
    "gelu_tanh": lambda: gelu(VARIABLE, approximate=True),
    "softplus": lambda: apply("softplus", VARIABLE),
}
TABLE = (
    *fitted_programs(), *fitted_programs("gate"), *fitted_programs("powers"), *fitted_programs("precise"),
    *((name, scaled_silu(name)) for name in ("gelu", "gelu_tanh")),
)  # fmt: skip
EACH = pytest.mark.parametrize(
    ("activation", "program"), [pytest.param(*each, id=f"{each[0]}-{each[1].name}") for each in TABLE]
)


def affine(slope: float, offset: float) -> Expression:
    return add(mul(constant(slope), VARIABLE), constant(offset))


def expression(program: Program) -> Expression:
    """The program as a function of y, from its coefficients alone."""
    terms = [affine(program.linear, program.constant)]
    for head in program.heads:
        values = [affine(head.c, head.d), *(constant(token.value) for token in head.bias_tokens)]
        weights = softmax([affine(*logit) for logit in head.logits])
        terms += [mul(weight, value) for weight, value in zip(weights, values, strict=True)]
    return total(terms)


def proof(activation: str, program: Program, limit: float) -> Bound:
    domain = None if np.isinf(program.domain) else program.domain
    return bound(FUNCTIONS[activation](), expression(program), limit=limit, top=fmpq(2) ** 128, domain=domain)


@pytest.mark.sample(2, turns=False)
@EACH
def test_stated_errors_are_proved(activation: str, program: Program) -> None:
    found = proof(activation, program, program.max_error)
    assert found.holds, found.reason


@pytest.mark.parametrize(("activation", "program"), fitted_programs("precise"))
def test_programs_for_float64(activation: str, program: Program) -> None:
    assert cheapest(activation, 1e-16) == cheapest(activation, 1e-16, gate=True) == program
    assert cheapest(activation, 1e-7).bias_tokens <= 10


@pytest.mark.parametrize("which", ["slope", "offset", "value"])
def test_a_wrong_coefficient_is_noticed(which: str) -> None:
    """One coefficient of the heaviest bias token at -0.5 is off by 1e-3 of its magnitude."""
    (program,) = [program for _, program in fitted_programs() if program.name == "gelu_erf_m6"]
    (head,) = program.heads
    heaviest = int(np.argmax(head.weights(np.array([-0.5]))[1:, 0]))
    tokens = list(head.bias_tokens)
    tokens[heaviest] = replace(tokens[heaviest], **{which: getattr(tokens[heaviest], which) * 1.001})
    found = proof("gelu", replace(program, heads=(replace(head, bias_tokens=tuple(tokens)),)), program.max_error)
    assert not found.holds
    assert found.at_least > program.max_error


@EACH
def test_stated_errors_are_neither_too_small_nor_exaggerated(activation: str, program: Program) -> None:
    """In float64, whose rounding of numbers up to 40 is below 1e-14."""
    y = np.concatenate([np.linspace(-12.0, 12.0, 40_001), np.linspace(-40.0, 40.0, 161)])
    y = y[np.abs(y) <= program.domain]
    (entry,) = [entry for entry in ACTIVATIONS if entry.name == activation]
    error = np.max(np.abs(program.evaluate(y) - entry.function(y, entry.usual)))
    assert 0.97 * program.max_error < error <= program.max_error + 1e-14

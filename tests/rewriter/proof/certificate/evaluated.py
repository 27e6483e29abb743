"""Expressions at one number, by mpmath: an evaluator that shares nothing with the tested ones."""

from collections.abc import Callable
from functools import partial

import mpmath
from flint import fmpq

from rewriter.proof.certificate.expressions import VARIABLE, Expression, ordered, scalar_operator

FUNCTIONS: dict[str, Callable[..., mpmath.mpf]] = {
    "+": lambda a, b: a + b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
    "where": lambda x, a, b: a if x >= 0 else b, "exp": mpmath.exp, "erf": mpmath.erf, "sqrt": mpmath.sqrt,
    "pi": lambda: +mpmath.pi, "softplus": lambda x: mpmath.log1p(mpmath.exp(-abs(x))) + max(x, 0),
}  # fmt: skip


def _unary(kind: str, y: Expression) -> Expression:
    return scalar_operator(("", kind), {}, [y])


sigmoid, tanh = partial(_unary, "Sigmoid"), partial(_unary, "Tanh")


def gelu(y: Expression, *, approximate: bool = False) -> Expression:
    return scalar_operator(("", "Gelu"), {"approximate": b"tanh" if approximate else b"none"}, [y])


def number(value: fmpq | float | mpmath.mpf) -> mpmath.mpf:
    return mpmath.mpf(int(value.p)) / int(value.q) if isinstance(value, fmpq) else mpmath.mpf(value)


def at(expression: Expression, y: fmpq | float | mpmath.mpf) -> mpmath.mpf:
    values = {VARIABLE: number(y)}
    for part in ordered(expression):
        if isinstance(part.value, fmpq):
            values[part] = number(part.value)
        elif part is not VARIABLE:
            values[part] = FUNCTIONS[part.operator](*(values[each] for each in part.operands))
    return values[expression]

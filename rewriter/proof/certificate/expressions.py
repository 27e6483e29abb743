"""Scalar functions as expressions over the rationals, and the elementwise operators of ONNX as such expressions.

An expression is a node of a shared graph: equal expressions are one object, and every pass visits each part once.
Constants are exact rationals: a float is the number that its bits say. The primitives are

    + * /  exp erf softplus sqrt  and  where(x, a, b) = a if x >= 0 else b;

everything else (Sub, Tanh, Gelu, ...) is reduced to these by its row in the table of operators, evaluated in `Symbols`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial, reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from flint import fmpq

from rewriter.arrays import Array
from rewriter.errors import RewriteError
from rewriter.evaluate import scalar as rows  # noqa: F401
from rewriter.evaluate.arithmetic import Exact, Value
from rewriter.evaluate.table import ELEMENTWISE, Call, row

_MOST_BITS = 2**17  # of numerator and denominator: products of products double them
FUNCTIONS = ("exp", "erf", "softplus", "sqrt")  # the transcendental and algebraic functions of one operand
_ABOVE_0 = ("exp", "softplus", "pi")

Line = tuple[fmpq, fmpq]  # a y + b, as (a, b)


class NotAFunction(RewriteError):  # noqa: N818 - says what the expression is
    """An expression that is undefined everywhere, such as a division by the constant 0, or that is not known."""


class Kink(Exception):  # noqa: N818 - not an error: a smaller piece has none
    """A condition changes its sign inside a piece, exactly at `at`."""

    def __init__(self, at: fmpq) -> None:
        self.at = at


@dataclass(frozen=True, eq=False, slots=True)
class Expression:
    """One node of the graph of expressions; made by the functions below, never directly."""

    operator: str  # "constant", "variable", "pi", "leaf", "line", "+", "*", "/", "where", or one of `FUNCTIONS`
    operands: "tuple[Expression, ...]" = ()
    value: fmpq | int | Line | None = None  # of a constant; the number of a leaf; a and b of a line a y + b
    total: bool = True  # whether it is known to be defined for all numbers
    positive: bool = False  # whether it is known to be above 0 wherever it is defined


@cache
def symbol(operator: str, operands: tuple[Expression, ...], value: fmpq | int | Line | None, /) -> Expression:
    """The one node with these contents; the functions below fold what they can before they ask for it."""
    total = all(each.total for each in operands) and (operator not in ("/", "sqrt") or operands[-1].positive)
    signs = [each.positive for each in operands[operator == "where" :]]
    positive = operator in _ABOVE_0 or (isinstance(value, fmpq) and value > 0)
    positive = positive or (operator in ("+", "*", "/", "where", "sqrt") and all(signs))
    return Expression(operator, operands, value, total, positive)


def rational(number: float | Fraction | fmpq) -> fmpq:
    """A number as the rational that it is. Raises NotAFunction where it is not finite."""
    if isinstance(number, fmpq):
        return number
    if isinstance(number, float) and not math.isfinite(number):
        raise NotAFunction(f"{number} is not a number that can be computed with")
    return fmpq(*number.as_integer_ratio())


def constant(number: float | Fraction | fmpq) -> Expression:
    """A rational constant. Raises NotAFunction where it is not finite, or products have made it far too long."""
    value = rational(number)
    if max(int(part).bit_length() for part in (value.p, value.q)) > _MOST_BITS:
        raise NotAFunction("a constant is too long to be computed with")
    return symbol("constant", (), value)


def leaf(number: int) -> Expression:
    """A tensor that the expression is a function of."""
    return symbol("leaf", (), number)


VARIABLE = symbol("variable", (), None)  # the pre-activation y
PI = symbol("pi", (), None)
ZERO, ONE, HALF = constant(0), constant(1), constant(fmpq(1, 2))


def _number(expression: Expression) -> fmpq | None:
    return expression.value if isinstance(expression.value, fmpq) else None


def add(a: Expression, b: Expression) -> Expression:
    x, y = _number(a), _number(b)
    if x is not None and y is not None:
        return constant(x + y)
    if a.total and b is neg(a):
        return ZERO
    return b if a is ZERO else a if b is ZERO else symbol("+", (a, b), None)


def sub(a: Expression, b: Expression) -> Expression:
    return add(a, neg(b))


def neg(a: Expression) -> Expression:
    return mul(constant(-1), a)


def mul(a: Expression, b: Expression) -> Expression:
    x, y = _number(a), _number(b)
    if x is not None and y is not None:
        return constant(x * y)
    if (a is ZERO and b.total) or (b is ZERO and a.total):
        return ZERO
    return b if a is ONE else a if b is ONE else symbol("*", (a, b), None)


def div(a: Expression, b: Expression) -> Expression:
    """a / b. Raises NotAFunction if b is the constant 0."""
    x, y = _number(a), _number(b)
    if y == 0:
        raise NotAFunction("a division by 0")
    if x is not None and y is not None:
        return constant(x / y)
    return a if b is ONE else symbol("/", (a, b), None)


def apply(function: str, a: Expression) -> Expression:
    """A member of `FUNCTIONS` of a."""
    return symbol(function, (a,), None)


def where(x: Expression, a: Expression, b: Expression) -> Expression:
    """a where x >= 0, b where x < 0."""
    number = _number(x)
    if (a is b and x.total) or (number is not None and number >= 0):
        return a
    return b if number is not None else symbol("where", (x, a, b), None)


def maximum(a: Expression, b: Expression) -> Expression:
    return where(sub(a, b), a, b)


def minimum(a: Expression, b: Expression) -> Expression:
    return where(sub(b, a), a, b)


def total(terms: Sequence[Expression]) -> Expression:
    """The sum of at least one term."""
    return reduce(add, terms)


def softmax(logits: Sequence[Expression]) -> list[Expression]:
    """The weights exp(l_i - max l) / sum_j exp(l_j - max l), which overflow nowhere."""
    most = reduce(maximum, logits)
    powers = [apply("exp", sub(logit, most)) for logit in logits]
    whole = total(powers)
    return [div(each, whole) for each in powers]


# -- passes over expressions ----------------------------------------------------------------------------------------


def ordered(*roots: Expression) -> list[Expression]:
    """Every part of the expressions once, operands before what they are used in."""
    found, stack = dict[Expression, None](), [*reversed(roots)]
    while stack:
        if missing := [operand for operand in reversed(stack[-1].operands) if operand not in found]:
            stack += missing
        else:
            found[stack.pop()] = None
    return list(found)


BUILDERS: Mapping[str, Callable[..., Expression]] = {"+": add, "*": mul, "/": div, "where": where}


def on_piece(*roots: Expression, low: fmpq, high: fmpq) -> tuple[list[Expression], set[fmpq]]:
    """Restrict functions to [low, high]: linear parts become lines, and conditions on lines are decided.

    Returned with them are the ends of the piece where a condition is 0. There `where` takes its first branch, which may
    not be the one that was taken: these points have to be looked at by themselves. Raises Kink where a condition on a
    line changes its sign inside.
    """
    made: dict[Expression, Expression] = {}
    zeros = set[fmpq]()
    for part in ordered(*roots):
        operands = tuple(made[each] for each in part.operands)
        line = _line(part, [each.value for each in operands if isinstance(each.value, tuple)])
        condition = operands[0].value if part.operator == "where" else None
        if line is not None:
            made[part] = symbol("line", (), line)
        elif isinstance(condition, tuple):
            first, last = (condition[0] * end + condition[1] for end in (low, high))
            if min(first, last) < 0 < max(first, last):
                raise Kink(-condition[1] / condition[0])
            zeros |= {end for end, number in ((low, first), (high, last)) if number == 0 != condition[0]}
            made[part] = operands[1 if min(first, last) >= 0 else 2]
        else:
            made[part] = symbol(part.operator, operands, None)
    return [made[root] for root in roots], zeros


def _line(part: Expression, operands: list[Line]) -> Line | None:
    """A part as a line, from those of its operands that are lines; None where it is something else."""
    operator = part.operator
    if isinstance(part.value, fmpq):
        return fmpq(0), part.value
    if operator == "variable":
        return fmpq(1), fmpq(0)
    if len(operands) != 2:
        return None
    (a, b), (c, d) = operands
    if operator == "+":
        return a + c, b + d
    if operator == "*" and (a == 0 or c == 0):
        return a * d + c * b, b * d
    if operator == "/" and c == 0 and d != 0:
        return a / d, b / d
    return None


def degree_in(expression: Expression, unknown: Expression) -> int | None:
    """0 where the expression is free of `unknown`, 1 where it is proportional to it, None for anything else."""
    degrees: dict[Expression, int | None] = {}
    for part in ordered(expression):
        degrees[part] = 1 if part is unknown else _degree(part, [degrees[each] for each in part.operands])
    return degrees[expression]


def _degree(part: Expression, degrees: list[int | None]) -> int | None:
    if all(degree == 0 for degree in degrees):
        return 0
    if part.operator in ("+", "where"):
        # 0 is proportional to everything.
        free = 1 if part.operator == "where" else 0
        terms = zip(part.operands[free:], degrees[free:], strict=True)
        fixed = all(degree == 0 for degree in degrees[:free])
        return 1 if fixed and all(d == 1 or e is ZERO for e, d in terms) else None
    if part.operator == "*":
        return 1 if set(degrees) == {0, 1} else None
    return 1 if part.operator == "/" and degrees == [1, 0] else None


def listing(expression: Expression) -> list[str]:
    """One line per part, the same for equal expressions in every process: what a certificate states, and its key."""
    names: dict[Expression, str] = {}
    lines: list[str] = []
    for part in ordered(expression):
        atoms = {"constant": str(part.value), "variable": "y", "leaf": f"x{part.value}"}
        names[part] = atoms.get(part.operator, f"t{len(lines)}")
        if part.operator not in atoms:
            lines.append(f"{names[part]} = {part.operator}({', '.join(names[each] for each in part.operands)})")
    return lines or [names[expression]]


# -- operators ------------------------------------------------------------------------------------------------------

NUMBERS: Mapping[float, Expression] = {
    0.044715: constant(fmpq(44715, 10**6)),
    math.sqrt(0.5): apply("sqrt", HALF),
    math.sqrt(2 / math.pi): apply("sqrt", div(constant(2), PI)),
}
"""What the float64 numbers in the definitions of operators are rounded from, those of GELU."""


def _logarithm(a: Expression) -> Expression:
    """The only one that is known, log(1 + exp(x))."""
    for one, other in (a.operands, a.operands[::-1]) if a.operator == "+" else ():
        if one is ONE and other.operator == "exp":
            return apply("softplus", other.operands[0])
    raise NotAFunction("its logarithm is not known")


def _function(name: str, a: Expression, *_: Expression) -> Expression:
    if name not in FUNCTIONS:
        raise NotAFunction(f"{name} is not known of expressions")
    return apply(name, a)


_METHODS: Mapping[str, Callable[..., Expression]] = {
    "add": add, "sub": sub, "mul": mul, "div": div, "neg": neg, "inv": partial(div, ONE),
    "rational": lambda number: number,
    "maximum": maximum, "minimum": minimum, "choose": where, "log": _logarithm,
    **{name: partial(apply, name) for name in FUNCTIONS}, **dict.fromkeys(("function", "odd", "even"), _function),
}  # fmt: skip


class Symbols(Exact):
    """Expressions, as arrays without axes: an arithmetic in which rows of the table say what operators are."""

    reads_masks, farthest = True, math.inf  # bounds of a Clip are left out where they are the last number of their type

    def __getattr__(self, name: str) -> Callable[..., Array]:
        if name not in _METHODS:
            raise NotAFunction(f"{name} is not known of expressions")

        def method(*operands: Any) -> Array:
            parts = (each.item() if isinstance(each, np.ndarray) else each for each in operands)
            made = _METHODS[name](*(x if isinstance(x, (Expression, str)) else constant(x) for x in parts))
            return np.asarray(made, object)

        return method

    def lift(self, x: Any, *, scalar: bool = True) -> Value:  # noqa: ARG002 - as in the field
        if isinstance(x, Value):
            return x
        known = NUMBERS.get(x.item()) if x.dtype == np.float64 else None
        return Value(np.asarray(known or constant(float(x.item())), object))


_SYMBOLS = SimpleNamespace(arithmetic=Symbols())


def scalar_operator(
    key: tuple[str, str], attributes: Mapping[str, object], operands: Sequence[Expression | Array | None]
) -> Expression:
    """What an operator computes; bounds and exponents that are constant are arrays.

    Raises NotAFunction where it is not elementwise, or divides by the constant 0.
    """
    found = row(*key) if key in ELEMENTWISE else None
    if found is None:
        raise NotAFunction(f"{key[1]} is not known to be elementwise")
    given = (Value(np.asarray(each, object)) if isinstance(each, Expression) else each for each in operands)
    made = found(Call(onnx.NodeProto(), key[1], attributes, _SYMBOLS), *given)
    if not isinstance(made, Value):
        raise NotAFunction(f"{key[1]} makes no number")
    function: Expression = made.entries.item()
    return function

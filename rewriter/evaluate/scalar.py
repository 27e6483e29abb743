"""Rows of operators that compute each entry from entries at the same place: arithmetic, activations, comparisons."""

import functools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from inspect import signature
from typing import Any

import numpy as np

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import FAR, FARTHEST, INFINITE, MANY, UNREACHED, Arithmetic, Field, Unsupported, Value
from rewriter.evaluate.moves import fully_masked, joint_masks, masks_of
from rewriter.evaluate.reductions import softmax
from rewriter.evaluate.table import MICROSOFT, Call, operator

elementwise = functools.partial(operator, elementwise=True)
_HALF = Fraction(1, 2)
_LEAST_FACTOR = 2.0**-20  # by which a mask that scores may exceed stays one


# -- arithmetic


@elementwise("Add", "Sub")
def add(call: Call, x: Any, y: Any) -> Any:
    """The sum, or the difference, of which masks are not known where one has fewer than none."""
    less, x, y = call.kind == "Sub", call.lift(x), call.lift(y)
    masks = joint_masks(np.subtract if less else np.add, x, y)
    if less and masks is not None and (masks < 0).any():
        masks = None
    if masks is not None:  # many small numbers are not one below every score
        masks = np.where(np.maximum(masks_of(x), masks_of(y)) < FAR, np.minimum(masks, FAR - 1), masks)
    made = (call.f.sub if less else call.f.add)(x.entries, y.entries)
    if less and masks is not None and y.origin == ("max", x):  # as in a softmax that is spelled out
        made = np.where((masks == 0) & fully_masked(masks_of(y)), 0, made)
    return Value(made, masks, whole=x.whole and y.whole)


@elementwise("Sum", "Mean", "Max", "Min")
def _combined(call: Call, x: Any, *others: Any) -> Any:
    combine = functools.partial(add if call.kind in ("Sum", "Mean") else _larger, call)
    made = functools.reduce(combine, map(call.lift, others), call.lift(x))
    if call.kind == "Mean":
        return Value(call.f.mul(made.entries, call.f.rational(Fraction(1, 1 + len(others)))))
    data, bounds = ([y for y in (x, *others) if isinstance(y, Value) is each] for each in (True, False))
    if call.kind in ("Max", "Min") and len(data) == len(bounds) == 1 and made.masks is None:
        known = data[0].origin or [""]
        if call.kind == "Max" and known[0] == "Min" and np.all(bounds[0] <= known[2]):  # then in the order of Clip
            return call.apply("Min", call.apply("Max", known[1], bounds[0]), known[2])
        made.origin = ("Min", data[0], bounds[0]) if call.kind == "Min" else None
    return made


@elementwise("Mul")
def mul(call: Call, x: Any, y: Any) -> Any:
    masks = None
    for one, factor in ((x, y), (y, x)):
        if isinstance(one, Value) and one.masks is not None and not isinstance(factor, Value):
            masks = _scaled(one.masks, factor.min(initial=1), np.broadcast_shapes(x.shape, y.shape))
    x, y = call.lift(x), call.lift(y)
    return Value(call.f.mul(x.entries, y.entries), masks, whole=x.whole and y.whole)


def _scaled(masks: Array, least: Any, shape: tuple[int, ...]) -> Array | None:
    """The masks of a multiple, `least` times or more: a small one of a number is none."""
    scaled = np.floor(masks * min(float(least), 1.0)).astype(np.int64)
    few = np.where(masks < MANY, masks if least >= _LEAST_FACTOR else 0, np.where(scaled < MANY, 0, scaled))
    return np.broadcast_to(np.where(masks < INFINITE, few, masks), shape) if least > 0 else None


@elementwise("Div")
def div(call: Call, x: Any, y: Any) -> Any:
    f, divisor, x, y = call.f, y, call.lift(x), call.lift(y)
    if x.origin and y.origin and x.origin[0] == "exp" and y.origin[0] == "sumexp" and x.origin[1] is y.origin[1]:
        _, base, axes, keepdims = y.origin
        if keepdims and len(axes) == 1:
            return softmax(call, base, axes[0])
    entries = f.div(x.entries, y.entries)
    if x.whole and y.whole:
        return call.typed(entries, x, y)
    if x.masks is None or isinstance(divisor, Value) or not (divisor > 0).all():
        return Value(entries)
    return Value(entries, _scaled(x.masks, 1.0 / divisor.max(initial=1), entries.shape))


@elementwise("Pow")
def _pow(call: Call, x: Any, exponent: Any) -> Any:
    f, x = call.f, call.lift(x)
    if not isinstance(exponent, Value) and exponent.size and (exponent == exponent.flat[0]).all():
        n, shape = float(exponent.flat[0]), np.broadcast_shapes(x.shape, exponent.shape)
        root = not n.is_integer()
        if abs(n) < 1024 and (2 * n).is_integer():
            base = f.sqrt(x.entries) if root else x.entries
            entries = f.power(base, int(abs(2 * n if root else n)))
            entries = np.broadcast_to(f.inv(entries) if n < 0 else entries, shape)
            return call.typed(entries, x) if root or n < 0 else Value(entries, whole=x.whole)
    return call.typed(f.function("pow", *np.broadcast_arrays(x.entries, call.entries(exponent))), x)


@elementwise("Exp")
def _exp(call: Call, x: Value) -> Any:
    entries = call.f.exp(x.entries)
    if x.masks is not None:  # what was subtracted before is not an entry of the row
        call.f.note_masked(x.entries, x.masks)
        entries = np.where(x.masks > 0, 0, entries)
    return Value(entries, origin=("exp", x))


@elementwise("Log")
def _log(call: Call, x: Value) -> Any:
    """The logarithm; of a softmax, and of a sum of exponentials, without computing it first."""
    if x.origin and x.origin[0] == "softmax":
        return call.move(softmax(call, *x.origin[1:], log=True), lambda t: t.reshape(x.shape))
    if x.origin and x.origin[0] == "sumexp":
        _, base, axes, keepdims = x.origin
        return call.apply("ReduceLogSumExp", base, axes=axes, keepdims=keepdims)
    return Value(call.f.log(x.entries))


INTEGERS: Mapping[str, Callable[..., Array]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Equal": np.equal, "Less": np.less, "Greater": np.greater,
    "LessOrEqual": np.less_equal, "GreaterOrEqual": np.greater_equal, "Neg": np.negative,
}  # fmt: skip
"""Exact on integers, which wrap around as in the runtime."""
STEPS = {"Floor", "Ceil", "Round", "Sign", "Mod", "DequantizeLinear"}  # whose results are often equal, as integers are
LOGIC: Mapping[str, Callable[..., Array]] = {"And": np.logical_and, "Or": np.logical_or, "Not": np.logical_not}
COMPARISONS = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")
EQUAL_ARE = {"Less": 1, "LessOrEqual": -1, "Greater": -1, "GreaterOrEqual": 1}
"""Whether the first operand, where it is equal to the second, is compared as a larger (1) or smaller (-1) one is."""
SIGNED = ("Relu", "LeakyRelu", "Abs", "Sign")  # operators that compare their operand with 0
CHOOSING = (*COMPARISONS, *SIGNED, "Max", "Min", "Clip")  # operators that compare numbers
OPPOSITE, OF_TWO = ("Abs", "Sign"), ("Max", "Min", "Relu")
"""Operators whose other result is the negative one, or the other of two."""
SMOOTH = {
    "Add", "Sub", "Sum", "Mean", "Neg", "Mul", "MatMul", "Gemm", "Einsum", "ReduceSum", "ReduceMean", "CumSum", "Xor",
    "DequantizeLinear", "Sin", "Cos",
}  # fmt: skip
"""Sums, products and waves: what is the same for some numbers is the same for others, unless it was built to differ."""


@elementwise(*LOGIC, always=True)
def _logic(call: Call, *operands: Any) -> Array:
    return LOGIC[call.kind](*(x.entries if isinstance(x, Value) else x for x in operands))


# -- functions of one operand


BROADCAST = ("Add", "Sub", "Mul", "Div", "Pow", "Where")  # operators whose operands broadcast

NONLINEAR = frozenset(
    [
        *("Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "ThresholdedRelu", "Clip", "Shrink"),
        *("Gelu", "QuickGelu", "FastGelu", "BiasGelu", "Erf", "Tanh", "Sigmoid", "HardSigmoid", "HardSwish"),
        *("Swish", "SwiGLU", "Mish", "Softplus", "Softsign", "Exp"),
    ]
)
"""Activation operators, and operators that occur almost only inside expanded activations."""


def _hard_sigmoid(f: Arithmetic, x: Array, alpha: Any = 0.2, beta: Any = 0.5) -> Array:
    line = f.add(f.mul(x, alpha), beta)
    return f.minimum(f.maximum(line, np.zeros_like(line)), np.ones_like(line))  # in the order of Clip


def _shrink(f: Arithmetic, x: Array, bias: Any = 0.0, lambd: Any = 0.5) -> Array:
    low, high = f.sign(f.add(x, lambd)) < 0, f.sign(f.sub(x, lambd)) > 0
    return np.where(low, f.add(x, bias), np.where(high, f.sub(x, bias), 0))


_UNARY: Mapping[str, Callable[..., Array]] = {
    "Neg": lambda f, x: f.neg(x),
    "Reciprocal": lambda f, x: f.inv(x),
    "Sqrt": lambda f, x: f.sqrt(x),
    "Sigmoid": lambda f, x: f.sigmoid(x),
    "Tanh": lambda f, x: f.tanh(x),
    "Softplus": lambda f, x: f.softplus(x),
    "Relu": lambda f, x: f.maximum(x, np.zeros_like(x)),
    "Abs": lambda f, x: f.choose(x, x, f.neg(x)),
    "Sign": lambda f, x: f.reduced(f.sign(x)),
    "Softsign": lambda f, x: f.div(x, f.add(f.rational(1), f.choose(x, x, f.neg(x)))),
    "Mish": lambda f, x: f.mul(x, f.tanh(f.softplus(x))),
    "Floor": lambda f, x: f.function("floor", x),
    "Ceil": lambda f, x: f.neg(f.function("floor", f.neg(x))),
    "LeakyRelu": lambda f, x, alpha=0.01: f.choose(x, x, f.mul(x, alpha)),
    "ThresholdedRelu": lambda f, x, alpha=1.0: np.where(f.sign(f.sub(x, alpha)) > 0, x, 0),
    "Elu": lambda f, x, alpha=1.0: f.choose(x, x, f.mul(alpha, f.expm1(x))),
    "Celu": lambda f, x, alpha=1.0: f.choose(x, x, f.mul(alpha, f.expm1(f.mul(x, f.inv(alpha))))),
    "Selu": lambda f, x, alpha=1.6732632, gamma=1.050701: f.mul(_UNARY["Elu"](f, x, alpha), gamma),
    "Shrink": _shrink,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda f, x: f.mul(x, _hard_sigmoid(f, x, f.rational(Fraction(1, 6)), f.rational(_HALF))),
    "Swish": lambda f, x, alpha=1.0: f.mul(x, f.sigmoid(f.mul(x, alpha))),
    "QuickGelu": lambda f, x, alpha=1.702: _UNARY["Swish"](f, x, alpha),
}
"""Operators of one operand, followed by attributes that are numbers, with their defaults."""
_NUMBERS = {name: [*signature(function).parameters.values()][2:] for name, function in _UNARY.items()}
_WHOLE, _ROUNDED = {"Neg", "Relu", "Abs", "Sign"}, {"Floor", "Ceil", "Round"}
_ODD = ("Erf", "Sin", "Tan", "Asin", "Atan", "Sinh", "Asinh", "Atanh", "Round")
_EVEN, _OTHER = ("Cos", "Cosh"), ("Acos", "Acosh")


@elementwise(*(_UNARY.keys() - {"QuickGelu"}), *_ODD, *_EVEN, *_OTHER)
@elementwise("QuickGelu", domain=MICROSOFT)
def _unary(call: Call, x: Value) -> Any:
    f, name = call.f, call.kind
    if name == "Relu" and x.origin and x.origin[0] == "Min":
        return call.apply("Max", x, np.float32(0))
    if name in _UNARY:
        numbers = (call.number(call.get(each.name, each.default)) for each in _NUMBERS[name])
        entries = _UNARY[name](f, x.entries, *numbers)
        if name == "Sign" and call.rounded:  # which may be 0
            twice = f.add(x.entries, x.entries)
            entries = f.mul(f.rational(_HALF), f.reduced(f.sign(f.add(twice, 1)) + f.sign(f.sub(twice, 1))))
    else:
        law = f.odd if name in _ODD else f.even if name in _EVEN else f.function
        entries = law(name.lower(), x.entries)
    return Value(entries, origin=("rounded",) if name in _ROUNDED else None, whole=x.whole and name in _WHOLE)


@elementwise("IsNaN", "IsInf")
def _is_special(call: Call, x: Value) -> Any:
    if call.kind == "IsNaN":  # a softmax is a number, where not all of its row is masked
        known = not isinstance(call.f, Field) or (x.origin and x.origin[0] == "softmax")
        return np.isnan(x.entries) if known else call.f.vanishes(call.f.function("nan", x.entries))
    below, above = (x.entries == -np.inf) | (masks_of(x) >= INFINITE), x.entries == np.inf
    return (below & bool(call.get("detect_negative", 1))) | (above & bool(call.get("detect_positive", 1)))


# -- activations


@elementwise("PRelu")
def _prelu(call: Call, x: Any, slope: Any) -> Any:
    return Value(_UNARY["LeakyRelu"](call.f, call.entries(x), call.lift(slope, scalar=False).entries))


@elementwise("Gelu")
@elementwise("Gelu", "BiasGelu", "FastGelu", domain=MICROSOFT)
def _gelu(call: Call, x: Any, bias: Any = None) -> Any:
    """x times the normal distribution function of x, or its approximation by tanh."""
    f, x = call.f, (call.lift(x) if bias is None else add(call, x, bias)).entries
    if call.kind == "FastGelu" or call.text("approximate") == "tanh":
        cubic = f.add(x, f.mul(call.entries(np.float64(0.044715)), f.power(x, 3)))
        bent = f.tanh(f.mul(cubic, call.entries(np.float64(math.sqrt(2 / math.pi)))))
    else:
        bent = f.odd("erf", f.mul(x, call.entries(np.float64(math.sqrt(0.5)))))
    return Value(f.mul(f.mul(x, f.rational(_HALF)), f.add(f.rational(1), bent)))


def activated(call: Call, x: Value) -> Value:
    """What a fused operator computes last, by its attribute `activation`."""
    name = call.text("activation")
    if not name:
        return x
    if name not in NONLINEAR:
        raise Unsupported(f"the activation {name}")
    made: Value = call.apply(name, x, **activation_numbers(name, call.attributes))
    return made


def activation_numbers(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the activation: FusedGemm has `activation_alpha`, FusedConv a list `activation_params`."""
    names = ("min", "max") if name == "Clip" else [each.name for each in _NUMBERS.get(name, ())]
    numbers = dict(zip(names, attributes.get("activation_params", ()), strict=False))
    return numbers | {each: attributes[f"activation_{each}"] for each in names if f"activation_{each}" in attributes}


# -- order


def _larger(call: Call, x: Value, y: Value) -> Value:
    """The larger entry, or the smaller; one with more masking constants is below any other."""
    f, largest = call.f, call.kind == "Max"
    entries = (f.maximum if largest else f.minimum)(x.entries, y.entries)
    if (more := joint_masks(np.subtract, x, y)) is not None:
        sign = f.masks_decide(more)
        entries = np.where(sign == 0, entries, np.where((sign > 0) == largest, x.entries, y.entries))
    masks = joint_masks(np.minimum if largest else np.maximum, x, y)
    return Value(entries, masks, whole=x.whole and y.whole)


@elementwise("Clip")
def _clip(call: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    made = call.lift(x)
    for name, bound, extreme in (("min", low, call.f.maximum), ("max", high, call.f.minimum)):
        stated = np.float32(call.get(name)) if bound is None and name in call.attributes else bound
        if stated is not None and not _unreached(call, stated, below=name == "min"):
            # Unlike for Max, a large negative number is not a mask here: it clips.
            entries, masks = extreme(made.entries, call.entries(stated)), made.masks
            if name == "min" and isinstance(stated, (np.ndarray, np.generic)) and masks is not None:
                lowest = np.asarray(stated, np.float64) > call.f.low
                entries = np.where(lowest & (masks >= INFINITE), call.entries(stated), entries)
                masks = np.where(lowest, 0, masks)  # an entry raised to a small number no longer masks
            on_grid = not isinstance(stated, Value) and not np.any(stated)  # as 0 is
            made = Value(entries, masks, whole=made.whole, grid=made.grid if on_grid else None)
    return made


def _unreached(call: Call, bound: Any, *, below: bool) -> bool:
    """Whether no number is beyond a bound: it is infinite, or the last of its type, or treated so (`FARTHEST`)."""
    if isinstance(bound, Value) or bound.dtype.kind != "f":
        return False
    number, last = float(np.asarray(bound).item()), np.finfo(bound.dtype).min if below else np.finfo(bound.dtype).max
    if (abs(number) >= min(abs(float(last)), call.f.farthest)) and (number < 0) == below:
        if isinstance(call.f, Field) and FARTHEST > abs(number) >= UNREACHED:
            call.f.snapped[number] = "a bound that no value reaches"
        return bool(call.f.reads_masks)
    return False


@elementwise(*COMPARISONS)
def _compared(call: Call, x: Any, y: Any) -> Any:
    x, y = call.lift(x), call.lift(y)
    difference = call.f.sub(x.entries, y.entries)
    equal = (x.whole and y.whole) or call.rounded  # which they often are: a > b where 2 (a - b) > 1
    if equal and call.kind != "Equal":
        half = 1 if call.kind in ("GreaterOrEqual", "Less") else -1
        difference = call.f.add(call.f.add(difference, difference), half)
    sign = ~call.f.vanishes(difference) if call.kind == "Equal" else call.f.sign(difference)
    sign = np.where(x.entries == y.entries, 0, sign)
    if (more := joint_masks(np.subtract, x, y)) is not None:
        masked = call.f.masks_decide(more)
        sign = np.where(masked == 0, sign, masked)
    return INTEGERS[call.kind](sign, 0)


@elementwise("Mod")
def _mod(call: Call, x: Any, y: Any) -> Any:
    x, y = call.lift(x), call.lift(y)
    operands = np.broadcast_arrays(x.entries, y.entries)
    return Value(call.f.function("fmod" if call.get("fmod", 0) else "mod", *operands), whole=x.whole)

"""The table of operators: what each computes, written once for every arithmetic.

An operator is a function of a `Call` and its operands, which are

- a `Value`: entries that depend on data, in the arithmetic of the evaluation;
- a numpy array: integers, Booleans and strings, and floats that are made of constants and shapes alone;
- a list: a sequence; None: an operand that is left out.

It returns one output, or a tuple of outputs. It is called only if an operand is a `Value` (or a list that has one), or
if it was registered with `always`; otherwise the runtime's own kernel computes the node, bit by bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import Arithmetic, Field, Value, integers

MICROSOFT, NCHWC = "com.microsoft", "com.microsoft.nchwc"
"""Domains of onnxruntime; in the second, channels of images are in blocks, and perhaps padded."""


@dataclass(frozen=True)
class Call:
    """One evaluation of a node."""

    node: onnx.NodeProto
    kind: str  # its operator, or the one that is applied as a part of it
    attributes: Mapping[str, Any]
    evaluator: Any  # `rewriter.evaluate.evaluator.Evaluator`, which imports the rows
    decided: bool = False  # an operand depends on the *values* of an integer input (token ids, positions, a mask)

    @property
    def f(self) -> Arithmetic:
        found: Arithmetic = self.evaluator.arithmetic
        return found

    @property
    def rounded(self) -> bool:
        """Whether it reads entries of a field that are often equal, as rounded numbers are."""
        return isinstance(self.f, Field) and not self.evaluator.stepped.isdisjoint(self.node.input)

    @property
    def opset(self) -> int:
        return int(self.evaluator.opsets.get("", 1))

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def integers(self, name: str, operand: Any, default: Any = None) -> Any:
        """Integers that are an operand, or in earlier opsets an attribute."""
        return self.get(name, default) if operand is None else integers(operand)

    def text(self, name: str, default: str = "") -> str:
        value = self.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def apply(self, name: str, *operands: Any, **attributes: Any) -> Any:
        """The first output of another operator, as a part of this one: `call.apply("Softmax", scores, axis=-1)`."""
        found = OPERATORS.get(("", name)) or OPERATORS[MICROSOFT, name]
        return tuple_of(found(Call(self.node, name, attributes, self.evaluator, self.decided), *operands))[0]

    def lift(self, x: Any, *, scalar: bool = True) -> Value:
        return self.f.lift(x, scalar=scalar)

    def entries(self, x: Any) -> Array:
        return self.f.lift(x).entries

    def number(self, value: float) -> Any:
        """A float attribute, which ONNX stores in float32, as an entry."""
        return self.f.lift(np.float32(value)).entries[()]

    def typed(self, entries: Array, *operands: Value) -> Value:
        """What an operator makes of operands whose type it keeps: of integers, the integers next to it towards 0."""
        whole = all(each.whole for each in operands)
        return Value(self.f.odd("truncated", entries) if whole else entries, whole=whole)

    def move(self, x: Any, function: Callable[[Array], Array]) -> Any:
        """Data movement: the same for entries, for what is known of each of them, and for plain arrays."""
        if not isinstance(x, Value):
            return function(x)
        masks = None if x.masks is None else function(x.masks)
        return Value(function(x.entries), masks, whole=x.whole, grid=x.grid)


Operator = Callable[..., Any]

OPERATORS: dict[tuple[str, str], Operator] = {}
"""By domain and name; an operator of onnxruntime without a row is looked up under ONNX's domain, and vice versa."""
MOVES: set[str] = set()  # operators that move data: each entry of the output is one of an operand's, or a constant
ALWAYS: set[str] = set()  # operators whose rows are used for plain arrays too, instead of the runtime's kernel
ELEMENTWISE: set[tuple[str, str]] = set()  # operators that compute an entry from entries at the same place
PRODUCTS: set[str] = set()  # operators that multiply by a weight
TABLES: set[str] = set()  # operators that may read a part of a table


def operator(
    *names: str, domain: str = "", moves: bool = False, always: bool = False, elementwise: bool = False,
    product: bool = False, table: bool = False,
) -> Callable[[Operator], Operator]:  # fmt: skip
    def put(function: Operator) -> Operator:
        OPERATORS.update({(domain, name): function for name in names})
        ELEMENTWISE.update((domain, name) for name in names if elementwise)
        for held, stated in ((MOVES, moves), (PRODUCTS, product), (TABLES, table), (ALWAYS, moves or always)):
            held.update(names if stated else ())
        return function

    return put


DOMAINS = ("", MICROSOFT, NCHWC)


def row(domain: str, name: str) -> Operator | None:
    """The row of an operator; a name means the same in all these domains, unless several have rows."""
    if domain not in DOMAINS:
        return None
    return next((OPERATORS[each, name] for each in (domain, *DOMAINS) if (each, name) in OPERATORS), None)


def is_random(name: str) -> bool:
    """Whether an operator draws random numbers, so that its outputs differ from run to run."""
    return any(each in name for each in ("Random", "Multinomial", "Bernoulli", "Sampling"))


def tuple_of(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)

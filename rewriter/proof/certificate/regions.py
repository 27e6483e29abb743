"""Regions: the expression that a tensor is of other tensors of the same shape, entry by entry.

From a tensor upwards, elementwise operators with scalar constants are read as one `Expression` of at most two *leaves*,
tensors that are not read any further. Attention is read as the function that it is
(`rewriter.proof.certificate.attention`). Everything is read from the nodes: nobody's word about what a block computes
is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx

from rewriter.graph.types import FLOATS
from rewriter.graph.view import attributes, key_of
from rewriter.proof.certificate.constants import clip_ends
from rewriter.proof.certificate.expressions import (
    ONE,
    OPERATORS,
    ZERO,
    Expression,
    NotAFunction,
    apply,
    clip,
    constant,
    leaf,
    ordered,
    rational,
    scalar_operator,
    sub,
    substitute,
    where,
)
from rewriter.proof.certificate.graphs import Scope, Tensor

MOST_LEAVES = 2
_MOST_CONDITIONS = 16
_MOST_NAMES = 100
_PLAIN_BROADCAST = 7
"""The operator set since which operands are broadcast as in numpy; before, an attribute named the axis."""
_COMPARISONS = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
FURTHER = ("Where", "Clip", "Cast", "Log", "Not", "And", "Or", "Heads", *_COMPARISONS)
"""What a region may have beside `OPERATORS`."""


@dataclass(frozen=True, eq=False)
class Region:
    """What a tensor is of its leaves.

    Attributes:
        expression: over the leaves.
        leaves: leaf to tensor: all that were met on the way and have a say in the shape, even where they cancel.
        inside: the tensors of the region that are no leaves, its own included.
        vectors: whether a constant of it has an axis.
        together: whether it holds only if all leaves have the same shape.
        added: the most that other rows than that of an entry add to it.
        tokens: the longest sequence for which it is there; None where it always is.
    """

    expression: Expression
    leaves: Mapping[Expression, Tensor]
    inside: frozenset[Tensor] = frozenset()
    vectors: bool = False
    together: bool = False
    added: float = 0.0
    tokens: int | None = None


class Reader:
    """Reads the regions of one model; what it read once, it knows.

    Args:
        stops: names of tensors that are leaves wherever they are met.
    """

    def __init__(self, stops: Collection[str] = ()) -> None:
        self._stops = stops
        self._known: dict[Tensor, Region | None] = {}
        self._leaves: dict[tuple[int, str], Region] = {}

    def region(self, tensor: Tensor) -> Region | None:
        """The largest region above a tensor that is made by an elementwise operator; None if it has too many leaves."""
        found = self._expression(tensor)
        if found is None or not 1 <= len(found.leaves) <= MOST_LEAVES:
            return None
        leaves = {part: found.leaves[part] for part in ordered(found.expression) if part in found.leaves}
        return replace(found, leaves=leaves) if len(leaves) == len(found.leaves) else None

    def names_above(self, tensor: Tensor) -> set[str]:
        """The names of the nearest tensors that elementwise operators make a tensor of, directly or not."""
        names: set[str] = set()
        pending = [tensor]
        while pending and len(names) < _MOST_NAMES:
            current = pending.pop(0)
            if current.node is None or (key_of(current.node) not in OPERATORS and current.node.op_type not in FURTHER):
                continue
            for name in current.node.input:
                found = current.scope.find(name) if name else None
                if found is not None and found.constant is None and found.name not in names:
                    names.add(found.name)
                    pending.append(found)
        return names

    def leaf(self, tensor: Tensor) -> Region:
        """The tensor as a leaf: the same one for all tensors of a graph that are computed alike."""
        key = id(tensor.scope), tensor.number
        if key not in self._leaves:
            found = leaf(len(self._leaves))
            self._leaves[key] = Region(found, {found: tensor})
        return self._leaves[key]

    def _operand(self, scope: Scope, name: str, *, integer: bool = False) -> Region | None:
        """An operand as an expression; None where the operator is not elementwise because of it."""
        tensor = scope.find(name)
        if tensor.values is not None:
            number = _number(tensor.values, integer=integer)
            return None if number is None else Region(number, {}, vectors=tensor.values.ndim > 0)
        if tensor.constant is not None:
            return None
        if tensor.name in self._stops:
            return self.leaf(tensor)
        found = self._expression(tensor)
        return self.leaf(tensor) if found is None or len(found.leaves) > MOST_LEAVES else found

    def _operands(self, scope: Scope, names: Sequence[str], integers: Collection[int] = ()) -> list[Region] | None:
        """Several operands; None where one of them is."""
        found = []
        for place, name in enumerate(names):
            operand = self._operand(scope, name, integer=place in integers)
            if operand is None:
                return None
            found.append(operand)
        return found

    def _expression(self, tensor: Tensor) -> Region | None:
        """What an elementwise operator makes; None for anything else."""
        if tensor not in self._known:
            found = None
            if tensor.node is not None and tensor.place == 0:
                try:
                    found = self._operator(tensor.scope, tensor.node)
                except NotAFunction:
                    found = None
            self._known[tensor] = None if found is None else replace(found, inside=found.inside | {tensor})
        return self._known[tensor]

    def _operator(self, scope: Scope, node: onnx.NodeProto) -> Region | None:
        key = key_of(node)
        if scope.model.opsets.get("", _PLAIN_BROADCAST) < _PLAIN_BROADCAST:
            return None
        if node.output[0] in scope.rows:
            return self._heads(scope, node)
        if key == ("", "Where"):
            return self._where(scope, node)
        if key == ("", "Clip"):
            return self._clip(scope, node)
        if key == ("", "Cast"):
            return self._cast(scope, node)
        if key == ("", "Log"):
            return _log(self._operand(scope, node.input[0]))
        if key not in OPERATORS or not all(node.input):
            return None
        operands = self._operands(scope, node.input, (1,) if key == ("", "Pow") else ())
        if operands is None:
            return None
        made = scalar_operator(key, attributes(node), [each.expression for each in operands])
        return None if made is None else _read(made, *operands)

    def _heads(self, scope: Scope, node: onnx.NodeProto) -> Region:
        """What attention computes of entries or rows."""
        rows = scope.rows[node.output[0]]
        leaves = [self.leaf(scope.find(name)) for name in node.input]
        expression = substitute(rows.expression, {a: b.expression for a, b in zip(rows.leaves, leaves, strict=True)})
        found = _read(expression, *leaves)
        return replace(
            found, inside=frozenset(rows.inside), together=len(leaves) > 1, added=rows.added, tokens=rows.tokens
        )

    def _cast(self, scope: Scope, node: onnx.NodeProto) -> Region | None:
        """The same number; of a condition, 1 where it holds and 0 where it does not."""
        if attributes(node).get("to") not in FLOATS:
            return None
        if scope.find(node.input[0]).elem_type == onnx.TensorProto.BOOL:
            return self._chosen(scope, node.input[0], Region(ONE, {}), Region(ZERO, {}), _MOST_CONDITIONS)
        return self._operand(scope, node.input[0], integer=True)

    def _clip(self, scope: Scope, node: onnx.NodeProto) -> Region | None:
        value, ends = self._operand(scope, node.input[0]), clip_ends(scope, node)
        return None if value is None or ends is None else _read(clip(value.expression, *ends), value)

    def _where(self, scope: Scope, node: onnx.NodeProto) -> Region | None:
        branches = self._operands(scope, node.input[1:])
        if branches is None:
            return None
        return self._chosen(scope, node.input[0], branches[0], branches[1], _MOST_CONDITIONS)

    def _chosen(self, scope: Scope, name: str, a: Region, b: Region, most: int) -> Region | None:
        """`a` where the condition holds, else `b`; None where the condition is no comparison of numbers."""
        tensor = scope.find(name)
        node = tensor.node
        if node is None or not most:
            return None
        key, scope = key_of(node), tensor.scope
        if key == ("", "Not"):
            return self._chosen(scope, node.input[0], b, a, most - 1)
        if key in (("", "And"), ("", "Or")):
            inner = self._chosen(scope, node.input[1], a, b, most - 1)
            if inner is None:
                return None
            first, second = (inner, b) if key[1] == "And" else (a, inner)
            return self._chosen(scope, node.input[0], first, second, most - 1)
        if key[1] not in _COMPARISONS or key[0]:
            return None
        operands = self._operands(scope, node.input)
        if operands is None:
            return None
        x, y = (each.expression for each in operands)
        return _read(_compared(key[1], x, y, a.expression, b.expression), *operands, a, b)


def _read(expression: Expression, *operands: Region) -> Region:
    """An expression, and what its operands have met. Raises NotAFunction where something is added to one of them."""
    if any(each.added and each.expression is not expression for each in operands):
        raise NotAFunction("what is made of what other rows add would have to be bounded")
    leaves = {leaf: tensor for each in operands for leaf, tensor in each.leaves.items()}
    return Region(
        expression,
        leaves,
        frozenset().union(*(each.inside for each in operands)),
        any(each.vectors for each in operands),
        any(each.together for each in operands),
        max((each.added for each in operands), default=0.0),
        min((each.tokens for each in operands if each.tokens), default=None),
    )


def _log(operand: Region | None) -> Region | None:
    """log(1 + exp(y)) is softplus; of other logarithms no bounds are known."""
    if operand is None or operand.expression.operator != "+":
        return None
    one, two = operand.expression.operands
    power = two if one is ONE else one if two is ONE else None
    return None if power is None or power.operator != "exp" else _read(apply("softplus", power.operands[0]), operand)


def _compared(operator: str, x: Expression, y: Expression, a: Expression, b: Expression) -> Expression:
    """`a` where the comparison holds, else `b`; ties go where the operator sends them."""
    if operator == "Equal":
        return where(sub(x, y), where(sub(y, x), a, b), b)
    if operator in ("GreaterOrEqual", "LessOrEqual"):
        return where(sub(x, y) if operator == "GreaterOrEqual" else sub(y, x), a, b)
    return where(sub(y, x) if operator == "Greater" else sub(x, y), b, a)


def _number(values: np.ndarray, *, integer: bool) -> Expression | None:
    """A constant with one element and at most one axis, more of which would change the shape of the result."""
    real = values.dtype.kind == "f" or values.dtype == ml_dtypes.bfloat16
    if values.size != 1 or values.ndim > 1 or not (real or (integer and values.dtype.kind in "iu")):
        return None
    number = values.ravel()[0]
    return constant(rational(float(number) if real else int(number)))

"""Regions: the expression that a tensor is of other tensors of the same shape, entry by entry.

From a tensor upwards, elementwise operators with scalar constants are read as one `Expression` of at most two *leaves*,
tensors that are not read any further. Attention is read as the function that it is
(`rewriter.proof.certificate.attention`). Everything is read from the nodes: nobody's word about what a block computes
is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx

from rewriter.graph.types import FLOATS
from rewriter.graph.view import attributes, integers_of, key_of
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
        axes: the most axes that a constant of it has.
        together: whether it holds only if all leaves have the same shape.
        added: the most that other rows than that of an entry add to it.
        tokens: the longest sequence for which it is there; None where it always is.
    """

    expression: Expression
    leaves: Mapping[Expression, Tensor]
    inside: frozenset[Tensor] = frozenset()
    axes: int = 0
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

    def _operand(self, scope: Scope, name: str, *, integer: bool = False) -> Region:
        """An operand as an expression. Raises NotAFunction for a constant that is not one number."""
        tensor = scope.find(name)
        if tensor.constant is not None or tensor.values is not None:
            return _number(tensor.values, integer=integer)
        if tensor.name in self._stops:
            return self.leaf(tensor)
        found = self._expression(tensor)
        return self.leaf(tensor) if found is None or len(found.leaves) > MOST_LEAVES else found

    def _expression(self, tensor: Tensor) -> Region | None:
        """What an elementwise operator makes; None for anything else."""
        if tensor not in self._known:
            self._known[tensor] = None
            if tensor.node is not None and tensor.place == 0:
                with suppress(NotAFunction):
                    found = self._operator(tensor.scope, tensor.node)
                    self._known[tensor] = replace(found, inside=found.inside | {tensor})
        return self._known[tensor]

    def _operator(self, scope: Scope, node: onnx.NodeProto) -> Region:
        """What a node makes of its operands. Raises NotAFunction where it is not elementwise."""
        key = key_of(node)
        if scope.model.opsets.get("", _PLAIN_BROADCAST) < _PLAIN_BROADCAST:
            raise NotAFunction("an attribute says how its operands are broadcast")
        if node.output[0] in scope.heads:
            return self._heads(scope.heads[node.output[0]])
        if key == ("", "Where"):
            first, second = (self._operand(scope, name) for name in node.input[1:])
            return self._chosen(scope, node.input[0], first, second)
        if key == ("", "Clip"):
            value = self._operand(scope, node.input[0])
            return _read(clip(value.expression, *clip_ends(scope, node)), value)
        if key == ("", "Cast"):
            return self._cast(scope, node)
        if key == ("", "Transpose"):
            return self._turned(scope, node)
        if key == ("", "Log"):
            value = self._operand(scope, node.input[0])
            return _read(_log(value.expression), value)
        if key not in OPERATORS or not all(node.input):
            raise NotAFunction("it is not elementwise")
        exponents = (1,) if key == ("", "Pow") else ()
        operands = [self._operand(scope, name, integer=at in exponents) for at, name in enumerate(node.input)]
        return _read(scalar_operator(key, attributes(node), [each.expression for each in operands]), *operands)

    def _heads(self, found: Region) -> Region:
        """What attention computes, with leaves of this reader."""
        leaves = {part: self.leaf(tensor) for part, tensor in found.leaves.items()}
        expression = substitute(found.expression, {part: each.expression for part, each in leaves.items()})
        return replace(found, expression=expression, leaves=_read(expression, *leaves.values()).leaves)

    def _turned(self, scope: Scope, node: onnx.NodeProto) -> Region:
        """An expression of tensors that were transposed, transposed back. Raises NotAFunction for any other one."""
        found, order = self._operand(scope, node.input[0]), integers_of(node, "perm") or []
        leaves: dict[Expression, Region] = {}
        for part, tensor in found.leaves.items():
            turned = tensor.node or onnx.NodeProto()
            before = integers_of(turned, "perm") or []
            back = {to: at for at, to in enumerate(before)}
            if (
                key_of(turned) != ("", "Transpose")
                or dict(enumerate(order)) != back
                or (not order and len(found.leaves) > 1)
            ):
                raise NotAFunction("it is transposed")
            leaves[part] = self.leaf(tensor.scope.find(turned.input[0]))
        expression = substitute(found.expression, {part: each.expression for part, each in leaves.items()})
        return replace(found, expression=expression, leaves=_read(expression, *leaves.values()).leaves)

    def _cast(self, scope: Scope, node: onnx.NodeProto) -> Region:
        """The same number; of a condition, 1 where it holds and 0 where it does not."""
        if attributes(node).get("to") not in FLOATS:
            raise NotAFunction("integers are not computed with")
        if scope.find(node.input[0]).elem_type == onnx.TensorProto.BOOL:
            return self._chosen(scope, node.input[0], Region(ONE, {}), Region(ZERO, {}))
        return self._operand(scope, node.input[0], integer=True)

    def _chosen(self, scope: Scope, name: str, a: Region, b: Region, most: int = _MOST_CONDITIONS) -> Region:
        """`a` where the condition holds, else `b`. Raises NotAFunction where that is no comparison of numbers."""
        tensor = scope.find(name)
        node, scope = tensor.node or onnx.NodeProto(), tensor.scope
        operator = "" if node.domain else node.op_type
        if operator == "Not":
            return self._chosen(scope, node.input[0], b, a, most - 1)
        if operator in ("And", "Or") and most > 0:
            inner = self._chosen(scope, node.input[1], a, b, most - 1)
            first, second = (inner, b) if operator == "And" else (a, inner)
            return self._chosen(scope, node.input[0], first, second, most - 1)
        if operator not in _COMPARISONS:
            raise NotAFunction("its condition is no comparison of numbers")
        operands = [self._operand(scope, each) for each in node.input]
        x, y = (each.expression for each in operands)
        return _read(_compared(operator, x, y, a.expression, b.expression), *operands, a, b)


def _read(expression: Expression, *operands: Region) -> Region:
    """An expression, and what its operands have met. Raises NotAFunction where something is added to one of them."""
    if any(each.added and each.expression is not expression for each in operands):
        raise NotAFunction("what is made of what other rows add would have to be bounded")
    leaves = {leaf: tensor for each in operands for leaf, tensor in each.leaves.items()}
    return Region(
        expression,
        leaves,
        frozenset().union(*(each.inside for each in operands)),
        max((each.axes for each in operands), default=0),
        any(each.together for each in operands),
        max((each.added for each in operands), default=0.0),
        min((each.tokens for each in operands if each.tokens), default=None),
    )


def _log(total: Expression) -> Expression:
    """log(1 + exp(y)) is softplus; of other logarithms no bounds are known."""
    one, power = sorted(total.operands, key=lambda each: each is not ONE) if total.operator == "+" else (total, total)
    if one is not ONE or power.operator != "exp":
        raise NotAFunction("a logarithm of anything but 1 + exp")
    return apply("softplus", power.operands[0])


def _compared(operator: str, x: Expression, y: Expression, a: Expression, b: Expression) -> Expression:
    """`a` where the comparison holds, else `b`; ties go where the operator sends them."""
    if not sub(x, y).total:
        raise NotAFunction("its condition may be undefined")
    if operator == "Equal":
        return where(sub(x, y), where(sub(y, x), a, b), b)
    if operator.startswith("Less"):
        x, y = y, x
    return where(sub(x, y), a, b) if operator.endswith("OrEqual") else where(sub(y, x), b, a)


def _number(values: np.ndarray | None, *, integer: bool) -> Region:
    """A constant with one element; where it has more axes than the leaves, it changes the shape of the result."""
    real = values is not None and (values.dtype.kind == "f" or values.dtype == ml_dtypes.bfloat16)
    if values is None or values.size != 1 or not (real or (integer and values.dtype.kind in "iu")):
        raise NotAFunction("a constant is not one number")
    number = values.ravel()[0]
    return Region(constant(float(number) if real else int(number)), {}, axes=values.ndim)

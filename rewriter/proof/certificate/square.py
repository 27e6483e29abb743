"""Heads over square patterns: what they compute of a token, as a function of that token's row alone.

Forms `masked` and `maskless` append rows of bias tokens to x [batch, tokens, width], let the queries of all rows attend
to the keys of all rows, and cut the bias tokens off again. Here such a block is read for two tokens i and j, which
stand for any two of a sequence of any length T, and for the bias tokens behind them: a tensor has entries for these
rows, whatever T is. All operators but two act on rows one by one, or on pairs of rows, and their entries are exact. The
two, softmax and the product of a pattern with values, add up over all rows: token i meets itself, the bias tokens, and
up to 2^63 others. Those are forbidden by a score of -inf, whose weight is 0, or by one that is omega below the token's
own, and then what they may add is bounded for all finite values. Where anything is not understood, the block is
refused, and where it is, the slice that cuts the bias tokens off is written anew: as linear layers of the rows of x,
and a function of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
from flint import fmpq

from rewriter.errors import RewriteError
from rewriter.graph.view import attributes, integer_of, integers_of, key_of
from rewriter.proof.certificate.constants import DEEPEST, TOPS, Axes, folded, sizes, widens
from rewriter.proof.certificate.expressions import (
    ZERO,
    Expression,
    NotAFunction,
    add,
    clip,
    constant,
    leaf,
    mul,
    ordered,
    scalar_operator,
    softmax,
    substitute,
    total,
)
from rewriter.proof.certificate.graphs import Model, Rows, Scope, Tensor
from rewriter.proof.certificate.rows import clip_ends, objects

NEGLIGIBLE = 1e-30
"""What all other tokens together may add to a token, relative to 1: far below the rounding of every type."""

_ROWS, _BATCH = "rows", "batch"
_MOST_ROWS = 63 * math.log(2)
"""The logarithm of the longest sequence: sizes are int64."""
_OWN, _OTHER, _BIAS = 0, 1, 2
"""Places of token i, token j, and the first bias token among the rows that are looked at."""
_DEPENDS = "compares positions, and what comes out depends on them"


class _Unread(RewriteError):  # noqa: N818 - says what the block is
    """A block of which something is not understood."""


class _Reason(ValueError):  # noqa: N818 - as numpy raises where axes do not fit together
    """Why an operator is not read."""


@dataclass(frozen=True)
class _Count:
    """The integer fixed + i * own + j * other + T * tokens, of positions i and j, 0 <= i, j < T, i != j."""

    fixed: int = 0
    own: int = 0
    other: int = 0
    tokens: int = 0

    def plus(self, more: _Count, sign: int = 1) -> _Count:
        """The sum, or with a sign of -1 the difference."""
        one, two = ((each.fixed, each.own, each.other, each.tokens) for each in (self, more))
        return _Count(*(a + sign * b for a, b in zip(one, two, strict=True)))

    def less(self, than: _Count) -> bool:
        """Whether it is smaller, for every i, j and T. Raises _Reason where that depends on them."""
        low, high = self.plus(than, -1).ends()
        if high >= 0 > low:
            raise _Reason(_DEPENDS)
        return high < 0

    def equal(self, other: _Count) -> bool:
        """Whether it is the same, for every i, j and T. Raises _Reason where that depends on them."""
        gap = self.plus(other, -1)
        low, high = gap.ends()
        two_tokens = gap == _Count(0, gap.own, -gap.own, 0)  # a multiple of i - j
        if not two_tokens and low <= 0 <= high and gap != _Count():
            raise _Reason(_DEPENDS)
        return gap == _Count()

    def ends(self) -> tuple[float, float]:
        """The smallest and the largest value, at one token or for ever more."""
        falls = self.tokens + min(self.own, 0) + min(self.other, 0) < 0
        rises = self.tokens + max(self.own, 0) + max(self.other, 0) > 0
        return (-math.inf if falls else self.fixed + self.tokens), (math.inf if rises else self.fixed + self.tokens)


@dataclass(frozen=True)
class _Others:
    """The weight of all other tokens together: at most exp(log) times that of the rest."""

    log: float


@dataclass(frozen=True, eq=False)
class _Stream:
    """[batch, rows, columns]: x, if it is there, and constant columns behind it.

    Attributes:
        x: the tokens.
        table: what the token at each position has behind x, [positions, further columns]; one row if all have the same.
        bias: the rows of bias tokens, [bias tokens, columns]; None while there are none.
        batch: the first axis, one for all sequences or the same for them.
        turned: whether it is transposed, [batch, columns, rows].
    """

    x: Tensor | None
    table: np.ndarray
    bias: np.ndarray | None = None
    batch: int | str = _BATCH
    turned: bool = False


@dataclass(frozen=True, eq=False)
class _Projected:
    """[batch, rows, heads * d]: x W + b of tokens, and the rows of bias tokens."""

    weight: np.ndarray
    token: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True, eq=False)
class _Entries:
    """A tensor for the rows i, j and those of bias tokens.

    Attributes:
        axes: its axes, "batch", "rows" or a size.
        values: what it holds, with as many axes: an Expression of leaves 2 k (row i) and 2 k + 1 (row j), minus
            infinity, a _Count, a bool, _Others, or None where that is not known. All sequences and heads hold the same.
    """

    axes: tuple[int | str, ...]
    values: np.ndarray


def unfold(model: Model) -> None:
    """Write the blocks that can be read as layers of rows and functions of them; others get the reason why not."""
    names = {name for scope in model.scopes.values() for name in (*scope.made, *scope.initializers, *scope.inputs)}
    for scope in model.scopes.values():
        for name, (node, _) in list(scope.made.items()):
            x = _cut_at(scope, node)
            if x is not None and not any(each.startswith(f"{name}/") for each in names):
                try:
                    _unfold(scope, name, node, x)
                except (_Unread, NotAFunction) as error:
                    scope.unread[name] = str(error)


def _cut_at(scope: Scope, node: onnx.NodeProto) -> Tensor | None:
    """The tensor x, if a Slice of the second axis ends at its number of tokens."""
    if key_of(node) != ("", "Slice") or len(node.input) != 4:
        return None
    start, end, axis = (sizes(scope.find(name)) for name in node.input[1:])
    tokens = end is not None and len(end) == 1 and isinstance(end[0], Axes) and end[0][1:] == (1, 2)
    return end[0].tensor if (start, axis) == ([0], [1]) and tokens and end and isinstance(end[0], Axes) else None


def _unfold(scope: Scope, name: str, node: onnx.NodeProto, x: Tensor) -> None:
    layers: list[tuple[onnx.NodeProto, str]] = []
    source = scope.find(node.input[0])
    reader = _Reader(x)
    while (after := _constant_operand(source)) is not None and source.node is not None:
        layers.insert(0, (source.node, after))
        source = scope.find(source.node.input[0])
    if not layers:
        raise _Unread(f"{source.label} is no linear layer")
    found = reader.entries(source)
    if found.axes[:2] != (_BATCH, _ROWS) or len(found.axes) != 3 or found.values.size != found.values.shape[1]:
        raise _Unread(f"{source.label} has other axes than [batch, rows, heads]")
    expression = found.values[0, _OWN, 0]
    if not isinstance(expression, Expression):
        raise _Unread(f"{source.label} is not known for tokens")
    leaves = {part: f"{name}/layer_{part.value}" for part in ordered(expression) if part.operator == "leaf"}
    leaks = [part for part in leaves if part in reader.leaks]
    if any(int(str(part.value)) % 2 for part in leaves if part not in leaks):
        raise _Unread(f"{source.label}: what a token gets depends on other tokens")
    added = reader.leaked(expression)
    if added > NEGLIGIBLE:
        raise _Unread(f"{source.label}: other tokens may add {added:.3g} to a token")
    expression = substitute(expression, dict.fromkeys(leaks, ZERO))
    used = [part for part in ordered(expression) if part.operator == "leaf"]
    for part in used:
        reader.define(scope, leaves[part], part)
    rows = f"{name}/rows"
    scope.rows[rows] = Rows(expression, tuple(used), added, reader.tokens, tuple(reader.inside))
    made = onnx.helper.make_node("Rows", [leaves[part] for part in used], [rows])
    scope.define(made, source.elem_type)
    for place, (layer, after) in enumerate(layers):
        last = place == len(layers) - 1
        made = onnx.helper.make_node(layer.op_type, [made.output[0], after], [name if last else f"{name}/{place}"])
        scope.define(made, source.elem_type)


def _constant_operand(tensor: Tensor) -> str | None:
    """The second operand of a linear layer's product or sum, if it is constant: a matrix or a vector."""
    node = tensor.node
    if node is None or key_of(node) not in (("", "MatMul"), ("", "Add")):
        return None
    value = folded(tensor.scope.find(node.input[1]))
    fits = value is not None and (value.ndim == 2 if node.op_type == "MatMul" else value.ndim == 1)
    return node.input[1] if fits else None


class _Reader:
    """Reads the tensors of one block on the tokens x.

    Attributes:
        inside: the tensors that were read.
        leaks: leaves that stand for what other tokens add, with the largest number that this may be.
        tokens: the number of positions, if the tokens have a table of these; a longer sequence does not run.
    """

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._top = TOPS.get(x.elem_type, fmpq(2) ** 1024)
        self._known: dict[Tensor, Any] = {}
        self._layers: list[tuple[np.ndarray, np.ndarray]] = []
        self._depth = 0
        self.inside: list[Tensor] = []
        self.leaks: dict[Expression, float] = {}
        self.tokens: int | None = None

    def define(self, scope: Scope, name: str, part: Expression) -> None:
        """Let a tensor be the layer of x that a leaf stands for."""
        weight, bias = self._layers[int(str(part.value)) // 2]
        scope.constant(f"{name}/W", weight)
        scope.constant(f"{name}/b", bias)
        elem_type = self._x.elem_type
        scope.define(onnx.helper.make_node("MatMul", [self._x.name, f"{name}/W"], [f"{name}/product"]), elem_type)
        scope.define(onnx.helper.make_node("Add", [f"{name}/product", f"{name}/b"], [name]), elem_type)

    def entries(self, tensor: Tensor) -> _Entries:
        """The entries of a tensor. Raises _Unread for one that has none."""
        found = self._value(tensor)
        if not isinstance(found, _Entries):
            raise _Unread(f"{tensor.label} is not read as rows of tokens and bias tokens")
        return found

    def leaked(self, expression: Expression) -> float:
        """The most that other tokens add; infinite where their part is not added."""
        if expression in self.leaks:
            return self.leaks[expression]
        if not self.leaks.keys() & ordered(expression):
            return 0.0
        if expression.operator == "+":
            return sum(map(self.leaked, expression.operands))
        if expression.operator != "*":
            return math.inf
        factor, part = sorted(expression.operands, key=lambda each: not each.constant)
        return abs(float(factor.value)) * self.leaked(part) if isinstance(factor.value, fmpq) else math.inf

    def _value(self, tensor: Tensor) -> Any:
        if tensor not in self._known:
            self._depth += 1
            self._known[tensor] = self._read(tensor)
            self._depth -= 1
            self.inside.append(tensor)
        return self._known[tensor]

    def _read(self, tensor: Tensor) -> Any:
        node = tensor.node
        try:
            if tensor.values is not None:
                return _constants(tensor.values)
            if node is None or tensor.place or self._depth > DEEPEST:
                raise _Unread(f"{tensor.label} is not made of the tokens and bias tokens of its block alone")
            read = _SPECIAL.get(key_of(node), _Reader.elementwise)
            found = self._counted(tensor, node) or read(self, tensor.scope, node)
        except (ValueError, NotAFunction) as error:
            raise _Unread(f"{tensor.label}: {error}") from error
        if found is None:
            raise _Unread(f"{tensor.label} is not known to act on rows one by one")
        return found

    def _counted(self, tensor: Tensor, node: onnx.NodeProto) -> _Entries | None:
        """The number of tokens, or of rows."""
        found = sizes(tensor) if node.op_type in ("Gather", "Slice") else None
        if not found or len(found) != 1 or not isinstance(found[0], Axes) or found[0][1:] != (1, 2):
            return None
        bias_tokens = 0
        if found[0].tensor is not self._x:
            stream = self._value(found[0].tensor)
            if not isinstance(stream, _Stream) or stream.bias is None or stream.turned:
                return None
            bias_tokens = len(stream.bias)
        count = objects([_Count(bias_tokens, tokens=1)])
        return _Entries((1,), count) if node.op_type == "Slice" else _Entries((), count.reshape(()))

    # -- streams -----------------------------------------------------------------------------------------------------

    def concat(self, scope: Scope, node: onnx.NodeProto) -> Any:
        """Columns beside the tokens, or bias tokens behind them."""
        if len(node.input) != 2:
            return None
        first, axis = scope.find(node.input[0]), integer_of(node, "axis", 0)
        stream = _Stream(self._x, np.zeros((1, 0))) if first is self._x else self._value(first)
        if not isinstance(stream, _Stream) or stream.bias is not None or stream.turned:
            return None
        further = self._expanded(scope.find(node.input[1]), behind=axis == 1)
        if further is None or axis not in (1, 2, -1):
            return None
        if axis == 1:
            return replace(stream, bias=further) if further.shape[1] >= stream.table.shape[1] else None
        if len(further) > 1:
            self.tokens = len(further)
        rows = max(len(stream.table), len(further))
        columns = [np.broadcast_to(each, (rows, each.shape[1])) for each in (stream.table, further)]
        return replace(stream, table=np.concatenate(columns, axis=1))

    def _expanded(self, tensor: Tensor, *, behind: bool) -> np.ndarray | None:
        """Constant rows for all sequences: the same for all tokens, those of a table of positions, or `behind` them."""
        node, scope, x = tensor.node, tensor.scope, self._x
        if node is None or key_of(node) != ("", "Expand"):
            return None
        self.inside.append(tensor)
        source, shape = scope.find(node.input[0]), sizes(scope.find(node.input[1]))
        whole = folded(source)
        # Axes of size 1 in front, and a last one, or two of them.
        if whole is not None and 0 < whole.ndim <= 3 and whole.size == np.prod(whole.shape[-1 - behind :]):
            rows = whole.reshape(-1, whole.shape[-1])
            if behind or shape == [Axes(x, 0, 2), len(rows[0])]:
                return rows if not behind or shape == [Axes(x, 0, 1), 1, 1] else None
        made = source.node
        if behind or made is None or key_of(made) != ("", "Slice") or shape != [Axes(x, 0, 1), 1, 1]:
            return None
        table, *ends = (
            folded(source.scope.find(made.input[0])),
            *(sizes(source.scope.find(each)) for each in made.input[1:]),
        )
        # For more tokens than it has rows nothing is computed: the Concat fails.
        known = ends == [[0], [Axes(x, 1, 2)], [0]] and table is not None and table.ndim == 2
        return table if known else None

    def slice(self, scope: Scope, node: onnx.NodeProto) -> Any:
        """Some columns of a stream, or its first sequence, where all are the same."""
        stream, ends = self._value(scope.find(node.input[0])), [sizes(scope.find(name)) for name in node.input[1:]]
        if not isinstance(stream, _Stream) or stream.bias is None or stream.turned or len(ends) != 3:
            return None
        if ends == [[0], [1], [0]] and stream.x is None:
            return replace(stream, batch=1)
        numbers = [each[0] for each in ends if each is not None and len(each) == 1 and isinstance(each[0], int)]
        columns = stream.bias.shape[1]
        if len(numbers) != 3 or numbers[2] != 2 or not 0 <= numbers[0] < numbers[1] <= columns:
            return None
        (start, stop), of_x = numbers[:2], columns - stream.table.shape[1]
        if (start and start < of_x) or start < of_x > stop:
            return None
        table = stream.table[:, max(start - of_x, 0) : stop - of_x]
        if (table == table[:1]).all():
            table = table[:1]
        return replace(stream, x=stream.x if start < of_x else None, table=table, bias=stream.bias[:, start:stop])

    def _projected(self, stream: _Stream, weight: np.ndarray) -> _Stream | _Projected | None:
        """A stream times a constant matrix."""
        if stream.bias is None or stream.turned or len(weight) != stream.bias.shape[1] or not np.isfinite(weight).all():
            return None
        table = _picked(stream.table, weight[len(weight) - stream.table.shape[1] :])
        bias = _picked(stream.bias, weight)
        if stream.x is None:
            return replace(stream, table=table, bias=bias)
        return _Projected(weight[: len(weight) - stream.table.shape[1]], table[0], bias) if len(table) == 1 else None

    # -- operators ---------------------------------------------------------------------------------------------------

    def matmul(self, scope: Scope, node: onnx.NodeProto) -> Any:
        """A projection, scores, or a pattern times values."""
        first, second = (scope.find(name) for name in node.input)
        weight, one = folded(second), self._value(first)
        if isinstance(one, _Stream) and weight is not None:
            return self._projected(one, weight) if weight.ndim == 2 else None
        two = self._value(second)
        if isinstance(one, _Stream) and isinstance(two, _Stream):
            return _between_positions(one, two)
        if not isinstance(one, _Entries) or not isinstance(two, _Entries) or min(len(one.axes), len(two.axes)) < 2:
            return None
        axes = (*_broadcast(one.axes[:-2], two.axes[:-2]), one.axes[-2], two.axes[-1])
        left, right = (np.squeeze(each.values, tuple(range(each.values.ndim - 2))) for each in (one, two))
        if one.axes[-2:] == (_ROWS, _ROWS) and two.axes[-2] == _ROWS:
            made = self._weighed(left, right)
        elif one.axes[-1] == two.axes[-2] == left.shape[1] == len(right):
            made = [total(list(map(_times, row, column))) for row in left for column in right.T]
        else:
            return None
        return _Entries(axes, objects(made).reshape(*[1] * (len(axes) - 2), len(left), right.shape[1]))

    def _weighed(self, pattern: np.ndarray, values: np.ndarray) -> list[Any]:
        """What the rows of a pattern make of values: known for token i."""
        made = np.full((len(pattern), values.shape[1]), None)
        for column in range(values.shape[1]):
            terms = []
            for place, (weight, value) in enumerate(zip(pattern[_OWN], values[:, column], strict=True)):
                if place == _OTHER and weight is not ZERO and not isinstance(weight, _Others):
                    raise _Reason("adds up over other tokens")
                if isinstance(weight, _Others):
                    most = max(map(self._largest, values[:, column]))
                    terms.append(leaf(-1 - len(self.leaks)))
                    log = weight.log + math.log(2) * (2 + int(most.p // most.q).bit_length())
                    self.leaks[terms[-1]] = math.exp(max(log, -700.0)) if log < 700 else math.inf
                else:
                    terms.append(_times(weight, value))
            made[_OWN, column] = total(terms)
        return list(made.ravel())

    def _largest(self, value: Any) -> fmpq:
        """A bound of the magnitude of a value, a polynomial of leaves."""
        if not isinstance(value, Expression):
            raise _Reason("weighs values that are not known for all rows")
        if isinstance(value.value, fmpq):
            return abs(value.value)
        if value.operator == "leaf":
            return self._top
        parts = [self._largest(each) for each in value.operands]
        if value.operator not in ("+", "*"):
            raise _Reason("weighs values that are not bounded")
        return parts[0] * parts[1] if value.operator == "*" else sum(parts, fmpq(0))

    def softmax(self, scope: Scope, node: onnx.NodeProto) -> _Entries | None:
        """The weights of token i: of itself and the bias tokens, and of all others together."""
        scores = self.entries(scope.find(node.input[0]))
        last = integer_of(node, "axis", None) in (3, -1) and len(scores.axes) == 4 and scores.axes[2:] == (_ROWS, _ROWS)
        if not last or scores.values.shape[:2] != (1, 1):
            return None
        row = list(scores.values[0, 0, _OWN])
        others = row[_OTHER]
        near = [place for place, each in enumerate(row) if place != _OTHER and each != -math.inf]
        weights = dict(zip(near, softmax([_real(row[place]) for place in near]), strict=True)) if near else {}
        made = np.full(scores.values.shape, None, dtype=object)
        for place in range(len(row)):
            made[0, 0, _OWN, place] = weights.get(place, ZERO)
        if others != -math.inf:
            if _OWN not in weights or (below := _distance(row[_OWN], others)) is None:
                raise _Reason("may give weight to other tokens")
            made[0, 0, _OWN, _OTHER] = _Others(_MOST_ROWS - below)
        return replace(scores, values=made) if weights else None

    def reshape(self, scope: Scope, node: onnx.NodeProto) -> _Entries | None:
        """Columns as heads, heads as columns, or positions as a column."""
        found, shape = self._value(scope.find(node.input[0])), sizes(scope.find(node.input[1]))
        if shape is None or integer_of(node, "allowzero", False):
            return None
        if isinstance(found, _Projected) and shape[:2] == [0, 0] and len(shape) == 4:
            return self._heads(found, shape[2], shape[3])
        if not isinstance(found, _Entries):
            return None
        if found.axes == (_ROWS,) and shape == [-1, 1]:
            return _Entries((_ROWS, 1), found.values[:, None])
        if found.axes[:2] == (_BATCH, _ROWS) and found.axes[2:] == (shape[-1], 1) and shape[:-1] == [0, 0]:
            return _Entries(found.axes[:3], found.values[..., 0])
        return None

    def _heads(self, found: _Projected, heads: int | Axes, size: int | Axes) -> _Entries | None:
        """[batch, rows, heads, size]: y of tokens i and j, and the bias tokens, which are the same in all heads."""
        if not isinstance(heads, int) or not isinstance(size, int) or heads * size != len(found.token) or heads < 1:
            return None
        columns: list[Any] = []
        for at in range(size):
            weight, token, bias = (each[..., at::size] for each in (found.weight, found.token, found.bias))
            if (bias != bias[:, :1]).any():
                raise _Reason("projects bias tokens otherwise for some heads")
            own: list[Any] = [self._leaf(weight, token, after) for after in (0, 1)]
            if not weight.any():
                if (token != token[0]).any():
                    raise _Reason("projects tokens otherwise for some heads")
                own = [constant(float(token[0]))] * 2
            columns += [*own, *(constant(float(each)) for each in bias[:, 0])]
        values = objects(columns).reshape(1, size, -1, 1).transpose(0, 2, 3, 1)
        return _Entries((_BATCH, _ROWS, heads, size), values)

    def _leaf(self, weight: np.ndarray, bias: np.ndarray, after: int) -> Expression:
        """The layer x W + b, or a known one and the number by which all of its biases are larger."""
        for number, known in enumerate(self._layers):
            if not np.array_equal(known[0], weight):
                continue
            more = {Fraction(float(one)) - Fraction(float(two)) for one, two in zip(bias, known[1], strict=True)}
            if len(more) == 1:
                return add(leaf(2 * number + after), constant(fmpq(*more.pop().as_integer_ratio())))
        self._layers.append((weight, bias))
        return leaf(2 * len(self._layers) - 2 + after)

    def transpose(self, scope: Scope, node: onnx.NodeProto) -> Any:
        found, order = self._value(scope.find(node.input[0])), integers_of(node, "perm")
        if isinstance(found, _Stream):
            return replace(found, turned=not found.turned) if order == [0, 2, 1] else None
        if not isinstance(found, _Entries) or not order or len(order) != len(found.axes):
            return None
        return _Entries(tuple(found.axes[each] for each in order), found.values.transpose(order))

    def unsqueeze(self, scope: Scope, node: onnx.NodeProto) -> _Entries | None:
        found = self.entries(scope.find(node.input[0]))
        axes = sizes(scope.find(node.input[1])) if len(node.input) > 1 else integers_of(node, "axes")
        if axes is None or len(axes) != 1 or not isinstance(axes[0], int) or not 0 <= axes[0] <= len(found.axes):
            return None
        at = axes[0]
        return _Entries((*found.axes[:at], 1, *found.axes[at:]), np.expand_dims(found.values, at))

    def range(self, scope: Scope, node: onnx.NodeProto) -> _Entries | None:
        """The positions of all rows."""
        first, end, step = (self.entries(scope.find(name)).values.ravel()[0] for name in node.input)
        if first != _Count() or step != _Count(1) or not isinstance(end, _Count) or end != _Count(end.fixed, tokens=1):
            return None
        behind = [_Count(place, tokens=1) for place in range(end.fixed)]
        return _Entries((_ROWS,), objects([_Count(own=1), _Count(other=1), *behind]))

    def cast(self, scope: Scope, node: onnx.NodeProto) -> _Entries | None:
        source = scope.find(node.input[0])
        return self.entries(source) if widens(source.elem_type, node) else None

    def elementwise(self, scope: Scope, node: onnx.NodeProto) -> _Entries | None:
        """An operator that is applied entry by entry."""
        found = [self.entries(scope.find(name)) for name in node.input if name]
        function = _function(scope, node)
        if function is None:
            return None
        if node.op_type == "Clip":
            found = found[:1]
        axes: tuple[int | str, ...] = ()
        for each in found:
            axes = _broadcast(axes, each.axes)
        apply = np.frompyfunc(lambda *x: None if any(each is None for each in x) else function(*x), len(found), 1)
        return _Entries(axes, np.asarray(apply(*(each.values for each in found)), dtype=object))


_SPECIAL = {
    ("", "Concat"): _Reader.concat,
    ("", "Slice"): _Reader.slice,
    ("", "MatMul"): _Reader.matmul,
    ("", "Softmax"): _Reader.softmax,
    ("", "Reshape"): _Reader.reshape,
    ("", "Transpose"): _Reader.transpose,
    ("", "Unsqueeze"): _Reader.unsqueeze,
    ("", "Range"): _Reader.range,
    ("", "Cast"): _Reader.cast,
}

_PLAIN: Mapping[tuple[str, type], Callable[..., Any]] = {
    ("Add", _Count): lambda a, b: a.plus(b),
    ("Less", _Count): lambda a, b: a.less(b),
    ("Equal", _Count): lambda a, b: a.equal(b),
    ("Not", bool): lambda a: not a,
    ("And", bool): lambda a, b: a and b,
    ("Or", bool): lambda a, b: a or b,
}
"""Operators on positions and conditions."""


def _function(scope: Scope, node: onnx.NodeProto) -> Callable[..., Any] | None:
    """What an elementwise operator makes of entries; None for an operator that is not one."""
    key, name = key_of(node), node.op_type
    if key == ("", "Where"):
        return _chosen
    if key == ("", "Clip"):
        ends = clip_ends(scope, node)
        return None if ends is None else lambda x: clip(_real(x), *ends)
    if node.domain:
        return None
    given = attributes(node)

    def apply(*operands: Any) -> Any:
        kinds = {type(each) for each in operands}
        plain = _PLAIN.get((name, kinds.pop())) if len(kinds) == 1 else None
        made = scalar_operator(key, given, list(map(_real, operands))) if plain is None else plain(*operands)
        if made is None:
            raise _Reason("is not known to act on rows one by one")
        return made

    return apply


def _chosen(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, bool):
        raise _Reason("has a condition that is not read")
    return a if condition else b


def _real(value: Any) -> Expression:
    if not isinstance(value, Expression):
        raise _Reason("has operands that are not finite numbers")
    return value


def _times(one: Any, two: Any) -> Any:
    """The product, of which 0 times anything finite is 0."""
    return mul(_real(one), _real(two))


def _distance(own: Any, other: Any) -> float | None:
    """How far a score is below another, where they are the same but for an addition."""
    (one, high), (two, low) = map(_split, map(_real, (own, other)))
    return float(high - low) * (1 - 1e-9) if one is two and high >= low else None


def _split(score: Expression) -> tuple[Expression, fmpq]:
    """A score as the sum of something and a constant."""
    above = fmpq(0)
    while score.operator == "+" and isinstance(last := score.operands[-1].value, fmpq):
        score, above = score.operands[0], above + last
    return (ZERO, above + score.value) if isinstance(score.value, fmpq) else (score, above)


def _constants(values: np.ndarray) -> _Entries:
    def entry(number: Any) -> Any:
        if values.dtype.kind == "b":
            return bool(number)
        if values.dtype.kind in "iu":
            return _Count(int(number))
        if values.dtype.kind not in "fV":
            raise _Reason("has a type that is not computed with")
        return -math.inf if number == -np.inf else constant(float(number))

    return _Entries(values.shape, objects([entry(each) for each in values.ravel()]).reshape(values.shape))


def _broadcast(one: tuple[int | str, ...], two: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The axes of two operands together. Raises _Reason where they differ, or may."""
    size = max(len(one), len(two))
    padded = [(1,) * (size - len(each)) + each for each in (one, two)]
    if any(a != b and 1 not in (a, b) for a, b in zip(*padded, strict=True)):
        raise _Reason(f"has operands with axes {one} and {two}")
    return tuple(b if a == 1 else a for a, b in zip(*padded, strict=True))


def _picked(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """The product of rows of zeros, of which one may be 1, and a matrix: it picks a row, exactly."""
    if ((rows != 0) & (rows != 1)).any() or (rows.sum(axis=1) > 1).any():
        raise _Reason("has rows that are not one column each")
    picks = rows.any(axis=1, keepdims=True)
    return np.where(picks, matrix[rows.argmax(axis=1)] if rows.shape[1] else 0.0, 0.0)


def _between_positions(queries: _Stream, keys: _Stream) -> _Entries | None:
    """Scores between positions, which must be the same for all tokens, all pairs of two tokens, and each bias token."""
    if queries.x or keys.x or queries.turned or not keys.turned or queries.bias is None or keys.bias is None:
        return None
    if queries.batch != keys.batch or len(queries.table) != len(keys.table):
        return None
    own, bias = queries.table.T, queries.bias.T
    tokens, on_bias = _picked(keys.table, own).T, _picked(keys.bias, own).T
    from_bias, within = _picked(keys.table, bias).T, _picked(keys.bias, bias).T
    count = len(tokens)
    diagonal = np.diagonal(tokens)
    beside = tokens[~np.eye(count, dtype=bool)] if count > 1 else diagonal
    alike = (diagonal == diagonal[0]).all() and (beside == beside[0]).all()
    if not alike or (on_bias != on_bias[:1]).any() or (from_bias != from_bias[:, :1]).any():
        raise _Reason("gives some positions other scores than others")
    first = np.array([[diagonal[0], beside[0]], [beside[0], diagonal[0]]])
    blocks = [[first, np.repeat(on_bias[:1], 2, axis=0)], [np.repeat(from_bias[:, :1], 2, axis=1), within]]
    numbers = np.block(blocks)
    scores = objects([constant(float(each)) for each in numbers.ravel()]).reshape(1, *numbers.shape)
    return _Entries((queries.batch, _ROWS, _ROWS), scores)

"""Attention: what heads compute of an entry or a token, as a function of that entry or token alone.

Form `compact`, and `local` with an operator Softmax, attend over a static axis of keys. Where the linear operators
stay, the entries of tensors are laid out along three axes, and what heads make of each is returned to the shape that
they had. Otherwise heads project a stream, x [batch, tokens, width] with a column of ones.

Forms `masked` and `maskless` append rows of bias tokens to the stream, let the queries of all rows attend to the keys
of all rows, and cut the bias tokens off again. Such a block is read for two tokens i and j, which stand for any two of
a sequence of any length T, and for the bias tokens behind them: a tensor has entries for these rows, whatever T is.
All operators but two act on rows one by one, or on pairs of rows, and their entries are exact. The two, softmax and the
product of a pattern with values, add up over all rows: token i meets itself, the bias tokens, and up to 2^63 others.
Those are forbidden by a score of -inf, whose weight is 0, or by one that is omega below the token's own, and then what
they may add is bounded for all finite values.

Where anything is not understood, the block is refused. Where all is, its end is written anew: a function of tensors of
the same shape, which are those that were laid out, or linear layers of the rows of x.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
from flint import fmpq

from rewriter.errors import RewriteError
from rewriter.graph.types import FLOATS
from rewriter.graph.view import attributes, integer_of, integers_of, key_of
from rewriter.proof.certificate.constants import (
    DEEPEST,
    TOPS,
    Axes,
    Sizes,
    before_casts,
    clip_ends,
    folded,
    rank,
    sizes,
    whole_shape,
    widens,
)
from rewriter.proof.certificate.expressions import (
    OPERATORS,
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
from rewriter.proof.certificate.graphs import Model, Scope, Tensor
from rewriter.proof.certificate.regions import Region
from rewriter.proof.certificate.rows import ALLOWS_ZERO, Layer, alike, cut_of, read_layer, runs

UNLIKE = "puts entries of two tensors side by side whose shapes are not known to be the same"
NEGLIGIBLE = 1e-30
"""What all other tokens together may add to a token, relative to 1: far below the rounding of every type."""

_BATCH, _TOKENS, _ROWS, _POSITIONS, _WIDTH = "batch", "tokens", "rows", "positions", "width"
"""Axes of x, of x with bias tokens behind it, and of a constant table with a row for the token at each position."""
_LAID_OUT = ("first", "second", "third")
"""Axes of entries that were laid out, in order. Those of another tensor may be other sizes; but what widened one of
them would make more entries than the shape at the end has room for, and does not run."""
_MOST_ROWS = 63 * math.log(2)
"""The logarithm of the longest sequence: sizes are int64."""
MOST_ENTRIES = 4096
"""Operators are not applied to more entries, which are Python objects."""
_OWN, _OTHER = 0, 1
"""Places of token i and token j among the rows that are looked at; those of bias tokens follow."""
_DEPENDS = "compares positions, and what comes out depends on them"

_Axis = int | str


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
        if low <= 0 <= high and gap not in (_Count(), _Count(own=gap.own, other=-gap.own)):  # a multiple of i - j
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
    batch: _Axis = _BATCH
    turned: bool = False


@dataclass(frozen=True, eq=False)
class _Projected:
    """[batch, rows, heads * d]: a layer of x, and the rows of bias tokens."""

    layer: Layer
    bias: np.ndarray


@dataclass(frozen=True, eq=False)
class _Entries:
    """A tensor for the rows i, j and those of bias tokens, or for one entry.

    Attributes:
        axes: its axes, of a known size, or named.
        values: what it holds, with as many axes, of size 1 where all are the same: a float, an Expression of leaves 2 k
            (of row i, or of an entry) and 2 k + 1 (of row j), a _Count, a bool, _Others, or None where that is not
            known. All sequences hold the same, and all heads.
    """

    axes: tuple[_Axis, ...]
    values: np.ndarray

    @property
    def fixed(self) -> bool:
        """Whether all entries are constants."""
        return all(isinstance(getattr(each, "value", each), float | fmpq) for each in self.values.ravel())

    def along(self, axis: int) -> np.ndarray:
        """The values, each entry of an axis of known size by itself. Raises _Reason for another axis."""
        size, shape = self.axes[axis], list(self.values.shape)
        if not isinstance(size, int) or (size > MOST_ENTRIES and size != shape[axis]):
            raise _Reason("works along another axis than that of keys, or too many of them")
        shape[axis] = size
        return np.broadcast_to(self.values, shape)


def unfold(model: Model) -> None:
    """Write the ends of blocks that can be read as functions of tensors; of others, note the reason why not."""
    names = {name for scope in model.scopes.values() for name in (*scope.made, *scope.initializers, *scope.inputs)}
    for scope in model.scopes.values():
        for name, (node, _) in list(scope.made.items()):
            reader = _reader_of(scope, node)
            if reader is not None:
                try:
                    _unfold(scope, name, node, reader, names)
                except (_Unread, NotAFunction) as error:
                    if reader.x is not None:
                        scope.unread[name] = str(error)


def _reader_of(scope: Scope, node: onnx.NodeProto) -> _Reader | None:
    """Reads what may be a block that ends at a node: where it is cut to the tokens of x, or returned to a shape."""
    if key_of(node) == ("", "Slice") and len(node.input) == 4:
        start, end, axis = (sizes(scope.find(name)) for name in node.input[1:])
        of = end[0] if end is not None and len(end) == 1 else 0
        return _Reader(of.tensor) if isinstance(of, Axes) and (start, axis, of[1:]) == ([0], [1], (1, 2)) else None
    if key_of(node) != ("", "Reshape"):
        return None
    shape = sizes(scope.find(node.input[1])) or [1]
    if len(shape) == 3 and shape[:2] == [0, 0] and not integer_of(node, "allowzero", False):
        return _Reader()
    measured = whole_shape(sizes(scope.find(node.input[1])))
    zeros = bool(integer_of(node, "allowzero", False)) or scope.model.opsets.get("", 0) < ALLOWS_ZERO
    return None if measured is None else _Reader(shaped=before_casts(measured), zeros=zeros)


def _unfold(scope: Scope, name: str, node: onnx.NodeProto, reader: _Reader, names: set[str]) -> None:
    source = scope.find(node.input[0])
    layer = read_layer(source) if node.op_type == "Slice" else None
    if node.op_type == "Slice" and layer is None:
        raise _Unread(f"{source.label} is no linear layer")
    function, added = reader.function(layer.source if layer else source if reader.shaped else scope.find(name))
    if reader.shaped is None and any(each.startswith(f"{name}/") for each in names):
        raise _Unread(f"{name} has a name like those of tensors inside")
    used = [part for part in ordered(function) if part.operator == "leaf"]
    leaves = {part: reader.define(scope, f"{name}/layer_{part.value}", part) for part in used}
    heads = f"{name}/rows" if layer else name
    if len(used) > 1 and not alike(tuple(leaves.values())):
        raise _Unread(UNLIKE)
    scope.heads[heads] = Region(function, leaves, frozenset(reader.inside), added=added, tokens=reader.tokens)
    made = onnx.helper.make_node("Heads", [tensor.name for tensor in leaves.values()], [heads])
    scope.define(made, source.elem_type)
    if layer:
        _define(scope, name, replace(layer, source=scope.find(heads)), source.elem_type)


def _define(scope: Scope, name: str, layer: Layer, elem_type: int) -> None:
    """Let nodes make a layer."""
    scope.constant(f"{name}/W", layer.weight)
    scope.constant(f"{name}/b", layer.bias)
    product = onnx.helper.make_node("MatMul", [layer.source.name, f"{name}/W"], [f"{name}/product"])
    scope.define(product, elem_type)
    scope.define(onnx.helper.make_node("Add", [f"{name}/product", f"{name}/b"], [name]), elem_type)


class _Reader:
    """Reads the tensors of one block.

    Attributes:
        x: the tokens; None while they are not known, and where entries are laid out.
        shaped: the tensor to whose shape what was laid out returns.
        inside: the tensors that were read.
        leaks: leaves that stand for what other tokens add, with the largest number that this may be.
        tokens: the number of positions, if the tokens have a table of these; a longer sequence does not run.
    """

    def __init__(self, x: Tensor | None = None, shaped: Tensor | None = None, *, zeros: bool = True) -> None:
        self.x, self.shaped, self._zeros = x, shaped, zeros
        self._cut = x is not None
        self._known: dict[Tensor, Any] = {}
        self._sources: list[Tensor | Layer] = []
        self._layout: Sequence[object] = ()
        self._depth = 0
        self.inside: list[Tensor] = []
        self.leaks: dict[Expression, float] = {}
        self.tokens: int | None = None

    def define(self, scope: Scope, name: str, part: Expression) -> Tensor:
        """The tensor that a leaf stands for: one that was laid out, or a layer of x, which is added."""
        source = self._sources[int(str(part.value)) // 2]
        if isinstance(source, Tensor):
            return source
        _define(scope, name, source, source.source.elem_type)
        return scope.find(name)

    def entries(self, tensor: Tensor) -> _Entries:
        """The entries of a tensor. Raises _Unread for one that has none."""
        found = self._value(tensor)
        if not isinstance(found, _Entries):
            raise _Unread(f"{tensor.label} is not read as rows of tokens and bias tokens")
        return found

    def function(self, tensor: Tensor) -> tuple[Expression, float]:
        """What each entry of a tensor is of those of the leaves, and the most that other tokens add. Raises _Unread."""
        found = self.entries(tensor)
        if self.shaped is None:
            rows = (_TOKENS, _ROWS) if self._cut else (_TOKENS,)
            fits = len(found.axes) == 3 and found.axes[0] == _BATCH and found.axes[1] in rows
            fits = fits and found.values.size == found.values.shape[1]
        else:
            fits = tuple(axis for axis in found.axes if axis != 1) == _LAID_OUT and found.values.size == 1
        if not fits:
            raise _Unread(f"{tensor.label} has other axes than [batch, rows, heads]")
        expression = found.values.ravel()[_OWN]
        if not isinstance(expression, Expression):
            raise _Unread(f"{tensor.label} is not known for tokens")
        used = {part for part in ordered(expression) if part.operator == "leaf"}
        if any(int(str(part.value)) % 2 for part in used - self.leaks.keys()):
            raise _Unread(f"{tensor.label}: what a token gets depends on other tokens")
        added = self.leaked(expression)
        if added > NEGLIGIBLE:
            raise _Unread(f"{tensor.label}: other tokens may add {added:.3g} to a token")
        if self.shaped is not None:
            # Every tensor whose entries were laid out must have its say: none may have cancelled.
            back = self._leaf(self.shaped)
            if back not in used or len(used) < len(self._sources):
                raise _Unread(f"{tensor.label} is returned to another shape")
        return substitute(expression, dict.fromkeys(self.leaks, ZERO)), added

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
        # Sums and products of constants are computed exactly, as all others are.
        value = None if node is not None and key_of(node) in OPERATORS else folded(tensor)
        try:
            if value is not None:
                return _constants(value)
            if node is None or self._depth > DEEPEST or (tensor.place and node.op_type != "Split"):
                raise _Unread(f"{tensor.label} is not made of the tokens and bias tokens of its block alone")
            if key_of(node) == ("", "Split"):
                found = self._part(tensor)
            else:
                read = _SPECIAL.get(key_of(node), _Reader.elementwise)
                found = self._counted(tensor, node) or read(self, tensor.scope, node)
        except (ValueError, IndexError, NotAFunction) as error:
            raise _Unread(f"{tensor.label}: {error}") from error
        if found is None:
            raise _Unread(f"{tensor.label} is not known to act on rows one by one")
        return found

    # -- shapes ------------------------------------------------------------------------------------------------------

    def _counted(self, tensor: Tensor, node: onnx.NodeProto) -> _Entries | None:
        """The number of tokens, or of rows."""
        found = sizes(tensor) if node.op_type in ("Gather", "Slice") else None
        if not found or len(found) != 1 or not isinstance(found[0], Axes) or found[0][1:] != (1, 2):
            return None
        bias_tokens = 0
        if found[0].tensor is not self.x:
            stream = self._value(found[0].tensor)
            if not isinstance(stream, _Stream) or stream.bias is None or stream.turned:
                return None
            bias_tokens = len(stream.bias)
        count = _objects([_Count(bias_tokens, tokens=1)])
        return _Entries((1,), count) if node.op_type == "Slice" else _Entries((), count.reshape(()))

    def _axes(self, shape: Sizes | None) -> tuple[_Axis, ...] | None:
        """The axes of tensors that a shape is put together from; the first of a block without `shaped` is x."""
        made: list[_Axis] = []
        for each in shape or ():
            if isinstance(each, int):
                made.append(each)
                continue
            if self.x is None and self.shaped is None and each.stop is not None:
                self.x = each.tensor
            axes = (_BATCH, _TOKENS, _WIDTH) if each.tensor is self.x else self.entries(each.tensor).axes
            made += axes[each.start : each.stop]
        return None if shape is None else tuple(made)

    def expand(self, scope: Scope, node: onnx.NodeProto) -> _Entries | None:
        found = self.entries(scope.find(node.input[0]))
        axes = self._axes(sizes(scope.find(node.input[1])))
        if axes is None:
            return None
        axes = _broadcast(found.axes, axes)
        return _Entries(axes, found.values.reshape([1] * (len(axes) - found.values.ndim) + [*found.values.shape]))

    # -- streams -----------------------------------------------------------------------------------------------------

    def concat(self, scope: Scope, node: onnx.NodeProto) -> Any:
        """Columns beside the tokens, bias tokens behind them, or keys."""
        axis, tensors = integer_of(node, "axis", 0), [scope.find(name) for name in node.input]
        further = self._value(tensors[-1])  # whose shape may say which tensor is x
        first = _Stream(self.x, np.zeros((1, 0))) if tensors[0] is self.x else self._value(tensors[0])
        if isinstance(first, _Entries):
            return _beside([self.entries(each) for each in tensors], axis)
        if not isinstance(first, _Stream) or first.bias is not None or first.turned or len(tensors) != 2:
            return None
        if not isinstance(further, _Entries) or further.values.dtype != np.float64 or len(further.axes) != 3:
            return None
        rows = further.along(-1)[0]
        if axis == 1 and self._cut and further.axes[:2] == (_BATCH, len(rows)) and rows.size:
            return replace(first, bias=rows) if rows.shape[1] >= first.table.shape[1] else None
        if axis not in (2, -1) or further.axes[:2] not in ((_BATCH, _TOKENS), (_BATCH, _POSITIONS)):
            return None
        if further.axes[1] == _POSITIONS:
            self.tokens = len(rows)
        count = max(len(first.table), len(rows))
        columns = [np.broadcast_to(each, (count, each.shape[1])) for each in (first.table, rows)]
        return replace(first, table=np.concatenate(columns, axis=1))

    def slice(self, scope: Scope, node: onnx.NodeProto) -> Any:
        """Some columns of a stream; its first sequence, where all are the same; as many rows of a table as tokens."""
        found, ends = self._value(scope.find(node.input[0])), [sizes(scope.find(name)) for name in node.input[1:]]
        if isinstance(found, _Entries) and found.values.dtype == np.float64 and len(found.axes) == 2:
            # For more tokens than the table has rows nothing is computed: the Concat fails.
            known = self.x is not None and ends == [[0], [Axes(self.x, 1, 2)], [0]]
            return replace(found, axes=(_POSITIONS, found.axes[1])) if known else None
        if not isinstance(found, _Stream) or found.bias is None or found.turned or len(ends) != 3:
            return None
        if ends == [[0], [1], [0]] and found.x is None:
            return replace(found, batch=1)
        numbers = [each[0] for each in ends if each is not None and len(each) == 1 and isinstance(each[0], int)]
        columns = found.bias.shape[1]
        if len(numbers) != 3 or numbers[2] != 2 or not 0 <= numbers[0] < numbers[1] <= columns:
            return None
        (start, stop), of_x = numbers[:2], columns - found.table.shape[1]
        if (start and start < of_x) or start < of_x > stop:
            return None
        table = found.table[:, max(start - of_x, 0) : stop - of_x]
        if (table == table[:1]).all():
            table = table[:1]
        return replace(found, x=found.x if start < of_x else None, table=table, bias=found.bias[:, start:stop])

    def _projected(self, stream: _Stream, weight: np.ndarray) -> _Stream | _Projected | None:
        """A stream times a constant matrix."""
        of_x = len(weight) - stream.table.shape[1]
        fits = of_x >= 0 if stream.bias is None else len(weight) == stream.bias.shape[1]
        if not fits or stream.turned or not np.isfinite(weight).all():
            return None
        table = _picked(stream.table, weight[of_x:])
        bias = None if stream.bias is None else _picked(stream.bias, weight)
        if stream.x is None:
            return replace(stream, table=table, bias=bias)
        rows = np.zeros((0, len(table[0]))) if bias is None else bias
        return _Projected(Layer(stream.x, weight[:of_x], table[0]), rows) if len(table) == 1 else None

    # -- operators ---------------------------------------------------------------------------------------------------

    def matmul(self, scope: Scope, node: onnx.NodeProto) -> Any:
        """A projection, scores, or a pattern times values."""
        first, second = (scope.find(name) for name in node.input)
        one = self._value(first)  # before weights, which are large, are read
        weight = folded(second) if isinstance(one, _Stream) else None
        if isinstance(one, _Stream) and weight is not None:
            return self._projected(one, weight) if weight.ndim == 2 else None
        two = self._value(second)
        if isinstance(one, _Stream) and isinstance(two, _Stream):
            return _between_positions(one, two)
        if not isinstance(one, _Entries) or not isinstance(two, _Entries) or min(len(one.axes), len(two.axes)) < 2:
            return None
        axes = (*_broadcast(one.axes[:-2], two.axes[:-2]), one.axes[-2], two.axes[-1])
        if one.axes[-2:] == (_ROWS, _ROWS) and two.axes[-2] == _ROWS:
            left, right = (np.squeeze(each.values, tuple(range(each.values.ndim - 2))) for each in (one, two))
            made = _objects(self._weighed(left, right))
            return _Entries(axes, made.reshape(*[1] * (len(axes) - 2), len(left), right.shape[1]))
        if one.axes[-1] != two.axes[-2] or max(one.values.size, two.values.size) > MOST_ENTRIES:
            return None
        terms = np.frompyfunc(_times, 2, 1)(one.along(-1)[..., None], two.along(-2)[..., None, :, :])
        return _Entries(axes, np.asarray(np.frompyfunc(add, 2, 1).reduce(terms, axis=-2)))

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
        value = _real(value)
        if isinstance(value.value, fmpq):
            return abs(value.value)
        if value.operator == "leaf":
            return TOPS.get(self.x.elem_type if self.x else 0, fmpq(2) ** 1024)
        parts = [self._largest(each) for each in value.operands]
        if value.operator not in ("+", "*"):
            raise _Reason("weighs values that are not bounded")
        return parts[0] * parts[1] if value.operator == "*" else sum(parts, fmpq(0))

    def softmax(self, scope: Scope, node: onnx.NodeProto) -> _Entries | None:
        """The weights of keys; or those of token i: of itself and the bias tokens, and of all others together."""
        scores = self.entries(scope.find(node.input[0]))
        # Without an attribute the axis depends on the opset. Of the last axis, all versions say the same.
        if integer_of(node, "axis", None) not in (len(scores.axes) - 1, -1):
            return None
        if scores.axes[2:] != (_ROWS, _ROWS):
            rows = scores.along(-1)
            each = [weight for row in rows.reshape(-1, rows.shape[-1]) for weight in softmax(list(map(_real, row)))]
            return replace(scores, values=_objects(each).reshape(rows.shape))
        if scores.values.shape[:2] != (1, 1):
            return None
        row = list(scores.values[0, 0, _OWN])
        others = -math.inf if self.tokens == 1 else row[_OTHER]
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

    def _part(self, tensor: Tensor) -> _Entries | None:
        """Some of the keys."""
        found = cut_of(tensor)
        entries = None if found is None else self.entries(found[0])
        if found is None or entries is None or found[1] not in (len(entries.axes) - 1, -1):
            return None
        values = entries.along(-1)[..., found[2]]
        return _Entries((*entries.axes[:-1], values.shape[-1]), values)

    def reshape(self, scope: Scope, node: onnx.NodeProto) -> _Entries | None:
        """Entries in order, in three axes; columns as heads, heads as columns, or positions as a column."""
        source, shape = scope.find(node.input[0]), sizes(scope.find(node.input[1]))
        if shape is None or integer_of(node, "allowzero", False):
            return None
        if self.shaped is not None:
            of = before_casts(source, self.inside)
            own = [each if isinstance(each, int) or before_casts(each.tensor) is not of else each[1:] for each in shape]
            if (self._layout or own) != own:
                raise _Reason("is laid out in another way than other tensors")
            if not runs(scope.find(node.output[0])) or not (self._zeros or own[0] == 0):
                raise _Reason("does not run at all sizes")
            self._layout = own
            entry = _objects([self._leaf(of)])
            return _Entries(_LAID_OUT, entry.reshape(1, 1, 1)) if rank(shape) == 3 else None
        found = self._value(source)
        if isinstance(found, _Projected) and shape[:2] == [0, 0] and len(shape) == 4:
            return self._heads(found, shape[2], shape[3])
        if not isinstance(found, _Entries):
            return None
        if found.axes == (_ROWS,) and shape == [-1, 1]:
            return _Entries((_ROWS, 1), found.values[:, None])
        if found.axes[:1] == (_BATCH,) and found.axes[2:] == (shape[-1], 1) and shape[:-1] == [0, 0]:
            return _Entries(found.axes[:3], found.values[..., 0])
        return None

    def _heads(self, found: _Projected, heads: int | Axes, size: int | Axes) -> _Entries | None:
        """[batch, rows, heads, size]: y of tokens i and j, and the bias tokens, which are the same in all heads."""
        columns: list[Any] = []
        if not isinstance(heads, int) or not isinstance(size, int) or heads < 1 or heads * size != found.bias.shape[1]:
            return None
        for at in range(size):
            weight, token, bias = (each[..., at::size] for each in (found.layer.weight, found.layer.bias, found.bias))
            if (bias != bias[:, :1]).any():
                raise _Reason("projects bias tokens otherwise for some heads")
            if weight.any():
                columns += [self._leaf(Layer(found.layer.source, weight, token), after) for after in (0, 1)]
            elif (token != token[0]).any():
                raise _Reason("projects tokens otherwise for some heads")
            else:
                columns += [float(token[0])] * 2
            columns += [float(each) for each in bias[:, 0]]
        values = _objects(columns).reshape(1, size, -1, 1).transpose(0, 2, 3, 1)
        return _Entries((_BATCH, _ROWS if len(found.bias) else _TOKENS, heads, size), values)

    def _leaf(self, source: Tensor | Layer, after: int = 0) -> Expression:
        """A tensor or layer: a new one, or a known one and the number by which all of its biases are larger."""
        for number, known in enumerate(self._sources):
            more = _more(source, known)
            if more is not None:
                return add(leaf(2 * number + after), constant(more))
        self._sources.append(source)
        return leaf(2 * len(self._sources) - 2 + after)

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
        if axes is None or len(axes) != 1 or not isinstance(axes[0], int):
            return None
        at = range(len(found.axes) + 1)[axes[0]]
        return _Entries((*found.axes[:at], 1, *found.axes[at:]), np.expand_dims(found.values, at))

    def range(self, scope: Scope, node: onnx.NodeProto) -> _Entries | None:
        """The positions of all rows."""
        first, end, step = (self.entries(scope.find(name)).values.ravel()[0] for name in node.input)
        if first != _Count() or step != _Count(1) or not isinstance(end, _Count) or end != _Count(end.fixed, tokens=1):
            return None
        behind = [_Count(place, tokens=1) for place in range(end.fixed)]
        return _Entries((_ROWS,), _objects([_Count(own=1), _Count(other=1), *behind]))

    def cast(self, scope: Scope, node: onnx.NodeProto) -> Any:
        """The same numbers; what a narrower type would lose of those that are computed is for the caller to refuse."""
        source = scope.find(node.input[0])
        found, floats = self._value(source), source.elem_type in FLOATS and integer_of(node, "to", 0) in FLOATS
        computed = isinstance(found, _Entries) and floats and not found.fixed
        return found if computed or widens(source.elem_type, node) else None

    def elementwise(self, scope: Scope, node: onnx.NodeProto) -> _Entries | None:
        """An operator that is applied entry by entry."""
        function = _function(scope, node)  # before weights, which are large, are read
        found = [] if function is None else [self.entries(scope.find(name)) for name in node.input if name]
        if function is None or max(each.values.size for each in found) > MOST_ENTRIES:
            return None
        if node.op_type == "Clip":
            found = found[:1]
        axes: tuple[_Axis, ...] = ()
        for each in found:
            axes = _broadcast(axes, each.axes)
        apply = np.frompyfunc(lambda *x: None if any(each is None for each in x) else function(*x), len(found), 1)
        return _Entries(axes, np.asarray(apply(*(each.values for each in found)), dtype=object))


_SPECIAL = {
    ("", "Cast"): _Reader.cast,
    ("", "Concat"): _Reader.concat,
    ("", "Expand"): _Reader.expand,
    ("", "MatMul"): _Reader.matmul,
    ("", "Range"): _Reader.range,
    ("", "Reshape"): _Reader.reshape,
    ("", "Slice"): _Reader.slice,
    ("", "Softmax"): _Reader.softmax,
    ("", "Transpose"): _Reader.transpose,
    ("", "Unsqueeze"): _Reader.unsqueeze,
}

_PLAIN: Mapping[tuple[str, str], tuple[type, Callable[..., Any]]] = {
    ("", "Add"): (_Count, _Count.plus),
    ("", "Less"): (_Count, _Count.less),
    ("", "Equal"): (_Count, _Count.equal),
    ("", "Not"): (bool, operator.not_),
    ("", "And"): (bool, operator.and_),
    ("", "Or"): (bool, operator.or_),
}
"""Operators on positions and conditions."""


def _function(scope: Scope, node: onnx.NodeProto) -> Callable[..., Any] | None:
    """What an elementwise operator makes of entries; None for an operator that is not one."""
    key, given = key_of(node), attributes(node)
    if key == ("", "Where"):
        return _chosen
    if key == ("", "Clip"):
        ends = clip_ends(scope, node)
        return lambda x: clip(_real(x), *ends)
    kind, plain = _PLAIN.get(key, (object, None))
    if key not in OPERATORS and plain is None:
        return None

    def apply(*operands: Any) -> Any:
        if plain is not None and all(isinstance(each, kind) for each in operands):
            return plain(*operands)
        return scalar_operator(key, given, list(map(_real, operands)))

    return apply


def _chosen(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, bool):
        raise _Reason("has a condition that is not read")
    return a if condition else b


def _real(value: Any) -> Expression:
    if isinstance(value, float) and math.isfinite(value):
        return constant(value)
    if not isinstance(value, Expression):
        raise _Reason("has operands that are not finite numbers")
    return value


def _times(one: Any, two: Any) -> Any:
    """The product, of which 0 times anything finite is 0."""
    return mul(_real(one), _real(two))


def _objects(values: Sequence[Any]) -> np.ndarray:
    """A vector of Python objects."""
    return np.array([*values, None], dtype=object)[:-1]


def _more(one: Tensor | Layer, two: Tensor | Layer) -> Fraction | None:
    """The number that makes one of the other when it is added; None where there is none."""
    if isinstance(one, Layer) and isinstance(two, Layer) and np.array_equal(one.weight, two.weight):
        gaps = {Fraction(float(a)) - Fraction(float(b)) for a, b in zip(one.bias, two.bias, strict=True)}
        return gaps.pop() if len(gaps) == 1 else None
    if isinstance(one, Tensor) and isinstance(two, Tensor) and one.scope is two.scope and one.number == two.number:
        return Fraction(0)
    return None


def _beside(parts: Sequence[_Entries], axis: int) -> _Entries:
    """The parts along one axis of keys. Raises _Reason where the others differ."""
    at = range(len(parts[0].axes))[axis]
    rest = [(*each.axes[:at], 1, *each.axes[at + 1 :]) for each in parts]
    if any(each != rest[0] for each in rest):
        raise _Reason("has parts with other axes")
    rows = [row for each in parts for row in np.moveaxis(each.along(at), at, 0)]
    return _Entries((*rest[0][:at], len(rows), *rest[0][at + 1 :]), np.stack(np.broadcast_arrays(*rows), axis=at))


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
    if values.dtype.kind in "fV":
        return _Entries(values.shape, values.astype(np.float64))
    if values.dtype.kind not in "biu" or values.size > MOST_ENTRIES:
        raise _Reason("has a type that is not computed with")
    kind = bool if values.dtype.kind == "b" else lambda number: _Count(int(number))
    return _Entries(values.shape, _objects([kind(each) for each in values.ravel()]).reshape(values.shape))


def _broadcast(one: tuple[_Axis, ...], two: tuple[_Axis, ...]) -> tuple[_Axis, ...]:
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
    if (queries.batch, len(queries.table), len(queries.bias)) != (keys.batch, len(keys.table), len(keys.bias)):
        return None
    pairs = _picked(np.concatenate([keys.table, keys.bias]), np.concatenate([queries.table, queries.bias]).T).T
    count, bias_tokens = len(queries.table), len(queries.bias)
    rows = [0, min(1, count - 1), *range(count, len(pairs))]  # token i, token j, and the bias tokens
    numbers = pairs[np.ix_(rows, rows)]
    of_all = [_OWN] * count + [*range(2, 2 + bias_tokens)]
    alike = numbers[np.ix_(of_all, of_all)]
    alike[:count, :count] = np.where(np.eye(count), numbers[_OWN, _OWN], numbers[_OWN, _OTHER])
    if (pairs != alike).any():
        raise _Reason("gives some positions other scores than others")
    scores = _objects([constant(float(each)) for each in numbers.ravel()]).reshape(1, *numbers.shape)
    return _Entries((queries.batch, _ROWS, _ROWS), scores)

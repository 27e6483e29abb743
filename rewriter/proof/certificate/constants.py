"""Constants, tensors that are only laid out in another way, and shapes put together from the axes of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import onnx
from flint import fmpq

from rewriter.graph.constants import computed
from rewriter.graph.types import FLOATS
from rewriter.graph.view import attributes, integer_of, key_of
from rewriter.proof.certificate.expressions import Expression, NotAFunction, constant
from rewriter.proof.certificate.graphs import Scope, Tensor

_MOST_AXES = 64
"""A longer shape is not followed."""
DEEPEST = 100
"""How many operators are followed upwards."""
_MOST_ENTRIES = 2**28
"""A constant that is expanded or joined further is not read."""
WIDTHS: dict[int, int] = {
    onnx.TensorProto.FLOAT16: 1,
    onnx.TensorProto.BFLOAT16: 1,
    onnx.TensorProto.FLOAT: 2,
    onnx.TensorProto.DOUBLE: 3,
}
"""Floating-point types from the narrowest to the widest."""


TOPS: Mapping[int, fmpq] = {
    onnx.TensorProto.FLOAT: fmpq(2) ** 128,
    onnx.TensorProto.FLOAT16: fmpq(65504),
    onnx.TensorProto.BFLOAT16: fmpq(2) ** 128,
    onnx.TensorProto.DOUBLE: fmpq(2) ** 1024,
}
"""No finite number of the type is larger."""


def holds(kind: int, other: int) -> bool:
    """Whether a floating-point type has all numbers of another; of the two of 16 bits neither has the other's."""
    return other in WIDTHS and (kind == other or WIDTHS.get(kind, 0) > WIDTHS[other])


def widens(source: int, node: onnx.NodeProto) -> bool:
    """Whether a Cast gives a floating-point type that holds all numbers of the type `source`."""
    return holds(integer_of(node, "to", 0), source)


Found = TypeVar("Found")


def remembered(function: Callable[[Tensor, int], Found]) -> Callable[..., Found]:
    """A function of a tensor that is asked once about each: operators may read what they follow many times over."""

    def known(tensor: Tensor, depth: int = 0) -> Found:
        found, key = tensor.scope.found, (function, tensor)
        if key not in found:
            found[key] = function(tensor, depth)
        return found[key]  # type: ignore[no-any-return]

    return known


_CHOSEN = {"Equal", "Less", "Or", "Where"}
_COMPARED = {"Equal", "Less"}
_CALCULATED = {"Add", "Mul"}
"""Functions of real numbers, which float64 holds exactly or which are not read; comparisons may see what they round."""
_LAID_OUT = {"Cast", "Concat", "Expand", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}


def folded(tensor: Tensor) -> np.ndarray | None:
    """The values of a constant, or of constants that are only laid out in another way; None for anything else."""
    return _folded(tensor, {}, 0)


def _folded(tensor: Tensor, known: dict[Tensor, np.ndarray | None], depth: int) -> np.ndarray | None:
    """The same; weights are large, and known no longer than until it is found."""
    if tensor not in known:
        known[tensor] = _computed(tensor, known, depth)
    return known[tensor]


def _computed(tensor: Tensor, known: dict[Tensor, np.ndarray | None], depth: int) -> np.ndarray | None:
    if tensor.constant is not None:
        return tensor.scope.model.read(tensor.constant)
    node, versions = tensor.node, tensor.scope.model.opsets
    if node is None or node.domain or depth > DEEPEST or node.op_type not in _LAID_OUT | _CHOSEN | _CALCULATED:
        return None
    values: dict[str, np.ndarray] = {}
    for name in node.input:
        value = _folded(tensor.scope.find(name), known, depth + 1) if name else None
        if value is None:
            return None
        values[name] = value
    first = values[node.input[0]]
    if (
        node.op_type == "Cast"
        and first.dtype != np.bool_
        and not widens(onnx.helper.np_dtype_to_tensor_dtype(first.dtype), node)
    ):
        return None
    if node.op_type in _COMPARED and any(_kind(value) != tensor.scope.find(n).elem_type for n, value in values.items()):
        return None
    if node.op_type in _CALCULATED:
        if any(value.dtype not in (np.float32, np.float64) for value in values.values()):
            return None
        values = {name: value.astype(np.float64) for name, value in values.items()}
    expands, joined = node.op_type == "Expand", sum(values[name].size for name in node.input)
    entries = np.prod(values[node.input[1]], dtype=float) if expands else joined if node.op_type == "Concat" else 0
    if entries > _MOST_ENTRIES:
        return None
    try:
        made = np.asarray(computed([node], values, node.output, versions)[tensor.place])
    except Exception:  # noqa: BLE001 - whatever does not run is no constant
        return None
    exact = node.op_type not in _CALCULATED or _exact(node.op_type, [values[name] for name in node.input], made)
    return made if exact else None


def _kind(values: np.ndarray) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(values.dtype))


def _exact(operator: str, operands: Sequence[np.ndarray], made: np.ndarray) -> bool:
    """Whether a sum or product in float64 is that of the reals (Knuth's two-sum, Dekker's product)."""
    a, b = operands
    with np.errstate(all="ignore"):
        if operator == "Add":
            more = made - a
            lost = (a - (made - more)) + (b - more)
        else:
            (a, c), (b, d) = map(_halves, (a, b))
            lost = ((a * b - made) + a * d + c * b) + c * d
        return bool((lost == 0).all())


def _halves(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two numbers of 26 bits each, whose sum it is."""
    wide = (2.0**27 + 1) * values
    high = wide - (wide - values)
    return high, values - high


def before_casts(tensor: Tensor, passed: list[Tensor] | None = None) -> Tensor:
    """The tensor that casts between floating-point types make this one of; these are added to `passed`."""
    while tensor.node is not None and key_of(tensor.node) == ("", "Cast") and tensor.elem_type in FLOATS:
        source = tensor.scope.find(tensor.node.input[0])
        if source.elem_type not in FLOATS:
            break
        if passed is not None:
            passed.append(tensor)
        tensor = source
    return tensor


def clip_ends(scope: Scope, node: onnx.NodeProto) -> tuple[Expression | None, Expression | None]:
    """Both ends of a Clip, None for an infinite one. Raises NotAFunction for a Clip that is not read."""
    ends: list[Expression | None] = []
    for place, (name, nowhere) in enumerate((("min", -np.inf), ("max", np.inf)), 1):
        given = node.input[place] if len(node.input) > place else ""
        numbers = scope.find(given).values if given else np.array(attributes(node).get(name, nowhere))
        if numbers is None or numbers.size != 1 or np.isnan(end := float(numbers.ravel()[0])) or end == -nowhere:
            raise NotAFunction("the ends of a Clip are not two numbers")
        ends.append(None if np.isinf(end) else constant(end))
    return ends[0], ends[1]


# -- shapes ----------------------------------------------------------------------------------------------------------


class Axes(NamedTuple):
    """The sizes of consecutive axes of a tensor, shape[start:stop]; its rank may be unknown."""

    tensor: Tensor
    start: int = 0
    stop: int | None = None


Sizes = list[int | Axes]
"""A shape: numbers, and axes of tensors."""


@remembered
def sizes(shape: Tensor, depth: int) -> Sizes | None:
    """What a shape is put together from; None where that is anything else."""
    if shape.values is not None:
        return [int(size) for size in shape.values.ravel()] if shape.values.dtype.kind == "i" else None
    node, scope = shape.node, shape.scope
    if node is None or node.domain or depth > DEEPEST:
        return None
    if node.op_type == "Shape":
        return [Axes(scope.find(node.input[0]))] if attributes(node) in ({}, {"start": 0}) else None
    if node.op_type == "Concat" and integer_of(node, "axis", 0) in (0, -1):
        parts = [sizes(scope.find(name), depth + 1) for name in node.input]
        most = None in parts or sum(len(part or ()) for part in parts) > _MOST_AXES
        return None if most else _joined(each for part in parts for each in part or ())
    if node.op_type not in ("Gather", "Slice", "Unsqueeze"):
        return None
    whole = sizes(scope.find(node.input[0]), depth + 1)
    if node.op_type == "Unsqueeze":  # of the size of one axis
        made = scope.find(node.input[0]).node
        return whole if made is not None and key_of(made) == ("", "Gather") else None
    measured = whole_shape(whole)
    if measured is None:
        return None
    if node.op_type == "Slice":
        ends = slice_of(scope, node)
        return None if ends is None else [Axes(measured, *ends)]
    index = scope.find(node.input[1]).values
    plain = index is not None and index.size == 1 and not integer_of(node, "axis", False)
    start = int(index.ravel()[0]) if plain and index is not None else -2
    return [Axes(measured, start, start + 1 or None)] if start >= -1 else None


def _joined(parts: Iterable[int | Axes]) -> Sizes:
    joined: Sizes = []
    for each in parts:
        joined[-1:] = _beside(joined[-1], each) if joined else [each]
    return joined


def _beside(one: int | Axes, two: int | Axes) -> Sizes:
    """Two parts of a shape: joined where the second begins at the axis at which the first ends, whatever the rank."""
    if isinstance(one, int) or isinstance(two, int) or (one.tensor, one.stop) != (two.tensor, two.start):
        return [one, two]
    rising = one.start == 0 or 0 <= one.start <= two.start
    return [one._replace(stop=two.stop)] if rising and (two.stop is None or 0 <= two.start <= two.stop) else [one, two]


def rank(shape: Sizes | None) -> int | None:
    """How many axes a shape has."""
    total = 0
    for each in shape or ():
        start, stop = (0, 1) if isinstance(each, int) else (each.start, each.stop)
        if start < 0 and stop is None:
            stop = 0
        if stop is None or (start < 0) != (stop <= 0) or start > stop:
            return None
        total += stop - start
    return None if shape is None else total


def whole_shape(shape: Sizes | None) -> Tensor | None:
    """The tensor whose whole shape this is."""
    each = shape[0] if shape is not None and len(shape) == 1 else 0
    return each.tensor if isinstance(each, Axes) and each[1:] == (0, None) else None


def slice_of(scope: Scope, node: onnx.NodeProto) -> tuple[int, int | None] | None:
    """Start and end of a Slice of a vector; None for an end beyond every vector."""
    if len(node.input) not in (3, 4):
        return None
    ends = [scope.find(name).values for name in node.input[1:]]
    if any(end is None or end.size != 1 for end in ends):
        return None
    start, stop, *axes = (int(end.ravel()[0]) for end in ends if end is not None)
    return None if any(axes) else (start, None if stop > 2**30 else stop)

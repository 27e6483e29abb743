"""Linear layers with constant weights: x W + b for every row of x, however it is written.

A layer is a MatMul or Gemm, with or without an addition, of x or of x beside a column of ones, whose row of the weights
is then the bias. Its rows are compared without the axes in front of them; `front` says which those are. Form `compact`
projects with its heads so, and lays the results out as rows of keys (`rewriter.proof.certificate.keys`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx

from rewriter.graph.types import FLOATS
from rewriter.graph.view import attributes, integer_of, integers_of, key_of
from rewriter.proof.certificate.expressions import OPERATORS
from rewriter.proof.certificate.graphs import Scope, Tensor

_DEEPEST = 100
_LAYOUT = {"Reshape", "Unsqueeze", "Squeeze", "Flatten"}
"""Operators that keep the entries of their first operand in order."""
_MOST_ENTRIES = 2**31
"""A constant that is expanded further is not read."""
WIDTHS: dict[int, int] = {
    onnx.TensorProto.FLOAT16: 1,
    onnx.TensorProto.BFLOAT16: 1,
    onnx.TensorProto.FLOAT: 2,
    onnx.TensorProto.DOUBLE: 3,
}
"""Floating-point types from the narrowest to the widest."""


@dataclass(frozen=True, eq=False)
class Layer:
    """What a tensor is of the rows of another.

    Attributes:
        source: the tensor x; its entries in order, cut into rows of `len(weight)`.
        weight: W [in, out].
        bias: b [out].
    """

    source: Tensor
    weight: np.ndarray
    bias: np.ndarray

    def equals(self, other: Layer) -> bool:
        """Whether weights and bias are the same real numbers."""
        return np.array_equal(self.weight, other.weight) and np.array_equal(self.bias, other.bias)


@dataclass(frozen=True, eq=False)
class Front:
    """The axes in front of the last one, those of a tensor.

    Attributes:
        tensor: the tensor.
        axes: how many of its axes; None for all but its last.
    """

    tensor: Tensor
    axes: int | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Front) and (self.tensor.key, self.axes) == (other.tensor.key, other.axes)

    def __hash__(self) -> int:
        return hash((self.tensor.key, self.axes))


def in_order(tensor: Tensor, width: int) -> Tensor:
    """The first tensor with the same entries in the same order, past types that are at least as wide as `width`."""
    while tensor.node is not None and tensor.place == 0:
        node = tensor.node
        cast = key_of(node) == ("", "Cast") and WIDTHS.get(integer_of(node, "to", 0) or 0, 0) >= width > 0
        source = tensor.scope.find(node.input[0]) if cast or (not node.domain and node.op_type in _LAYOUT) else None
        if source is None or (cast and source.elem_type not in FLOATS):
            break
        tensor = source
    return tensor


def read_layer(tensor: Tensor) -> Layer | None:
    """The tensor as x W + b; None for anything else, and where a weight is not constant."""
    node, scope = tensor.node, tensor.scope
    if node is None or node.domain:
        return None
    part = part_of(tensor)
    if part is not None:
        whole = read_layer(part[0])
        return None if whole is None else Layer(whole.source, whole.weight[:, part[1]], whole.bias[part[1]])
    if tensor.place:
        return None
    if node.op_type == "MatMul":
        return _product(scope, node.input[0], folded(scope.find(node.input[1])))
    if node.op_type == "Gemm":
        return _gemm(scope, node)
    if node.op_type != "Add" or scope.model.opsets.get("", 0) < 7:
        return None
    for name, other in (node.input, node.input[::-1]):
        bias = folded(scope.find(other))
        layer = None if bias is None else read_layer(scope.find(name))
        if bias is not None and layer is not None:
            return _biased(layer, bias)
    return None


def part_of(tensor: Tensor) -> tuple[Tensor, slice] | None:
    """The tensor whose last axis is cut by a Split or Slice, and where; None for any other cut."""
    node, scope = tensor.node, tensor.scope
    if node is None or node.domain or node.op_type not in ("Split", "Slice"):
        return None
    source = scope.find(node.input[0])
    given = [_integers(scope.find(name)) for name in node.input[1:] if name]
    if any(each is None for each in given):
        return None
    numbers = [each for each in given if each is not None]
    axis: int | None
    if node.op_type == "Split":
        axis, total = integer_of(node, "axis", 0), width(source)
        sizes = numbers[0] if numbers else integers_of(node, "split") or []
        if not sizes and total is not None and total % len(node.output) == 0:
            sizes = [total // len(node.output)] * len(node.output)
        cut = slice(sum(sizes[: tensor.place]), sum(sizes[: tensor.place + 1])) if sizes else None
    else:
        plain = len(numbers) in (3, 4) and all(len(each) == 1 for each in numbers) and numbers[3:] in ([], [[1]])
        axis = numbers[2][0] if plain else None
        cut = slice(numbers[0][0], numbers[1][0]) if plain else None
    types = scope.types.get(source.name)
    rank = types.rank if types is not None and scope.model.original else None
    last = axis is not None and (axis == -1 or (rank is not None and axis == rank - 1))
    return (source, cut) if last and cut is not None else None


def _integers(tensor: Tensor, depth: int = 0) -> list[int] | None:
    """Constant integers, or what arithmetic makes of the size of a last axis."""
    if tensor.values is not None:
        return [int(each) for each in tensor.values.ravel()]
    node, scope = tensor.node, tensor.scope
    if node is None or node.domain or depth > _DEEPEST:
        return None
    if node.op_type == "Gather":
        measured, index = shaped(scope.find(node.input[0])), scope.find(node.input[1]).values
        known = measured is not None and index is not None and index.size == 1 and int(index.ravel()[0]) == -1
        size = width(measured) if known and measured is not None else None
        return None if size is None else [size]
    if node.op_type not in _ARITHMETIC:
        return None
    one, two = (_integers(scope.find(name), depth + 1) for name in node.input)
    if one is None or two is None or len(one) != 1 or len(two) != 1 or min(*one, *two) < 0 or two == [0]:
        return None
    return [_ARITHMETIC[node.op_type](one[0], two[0])]


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {"Add": operator.add, "Mul": operator.mul, "Div": operator.floordiv}


def _gemm(scope: Scope, node: onnx.NodeProto) -> Layer | None:
    given = attributes(node)
    weight = folded(scope.find(node.input[1]))
    if weight is None or given.get("transA", 0) or given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
        return None
    layer = _product(scope, node.input[0], weight.T if given.get("transB", 0) else weight)
    if layer is None or len(node.input) < 3 or not node.input[2]:
        return layer
    bias = folded(scope.find(node.input[2]))
    return None if bias is None else _biased(layer, bias)


def _product(scope: Scope, name: str, weight: np.ndarray | None) -> Layer | None:
    if weight is None or weight.ndim != 2 or not _real(weight):
        return None
    source = scope.find(name)
    ones = _beside_ones(source)
    if ones is None:
        return Layer(source, weight, np.zeros(weight.shape[1]))
    return Layer(ones, weight[:-1], weight[-1].astype(np.float64))


def _biased(layer: Layer, bias: np.ndarray) -> Layer | None:
    """The layer with a bias of its own; a second one is not added up, since the sum could round."""
    plain = bias.ndim <= 1 and bias.size in (1, len(layer.bias)) and _real(bias)
    if not plain or layer.bias.any():
        return None
    return Layer(layer.source, layer.weight, np.broadcast_to(bias.astype(np.float64), layer.bias.shape))


def _real(values: np.ndarray) -> bool:
    kind = values.dtype.kind == "f" or values.dtype == ml_dtypes.bfloat16
    return kind and bool(np.isfinite(values.astype(np.float32) if values.dtype != np.float64 else values).all())


def _beside_ones(tensor: Tensor) -> Tensor | None:
    """x of [batch, tokens, width] with one column of ones behind its last axis; None for any other tensor."""
    node, scope = tensor.node, tensor.scope
    while node is not None and key_of(node) == ("", "Cast") and _widens(scope, node):
        tensor = scope.find(node.input[0])
        node, scope = tensor.node, tensor.scope
    if node is None or key_of(node) != ("", "Concat") or len(node.input) != 2:
        return None
    column = scope.find(node.input[1])
    if column.node is None or key_of(column.node) != ("", "Expand") or integer_of(node, "axis", 0) not in (2, -1):
        return None
    one, shape = (column.scope.find(name) for name in column.node.input)
    value, sizes = one.values, dims(shape)
    # Three axes and a last one of size 1: what stands beside it has three axes as well.
    single = value is not None and value.size == 1 and value.ndim <= 3 and float(value.ravel()[0]) == 1.0
    return scope.find(node.input[0]) if single and sizes is not None and len(sizes) == 3 and sizes[2] == 1 else None


def _widens(scope: Scope, node: onnx.NodeProto) -> bool:
    """Whether a Cast gives a floating-point type that holds all numbers of its operand's."""
    source = scope.find(node.input[0]).elem_type
    return 0 < WIDTHS.get(source, 0) <= WIDTHS.get(integer_of(node, "to", 0) or 0, 0)


# -- constants that are laid out -------------------------------------------------------------------------------------


def folded(tensor: Tensor, depth: int = 0) -> np.ndarray | None:
    """The values of a constant, or of constants that are only laid out in another way; None for anything else."""
    if tensor.constant is not None:
        return tensor.scope.model.read(tensor.constant)
    node = tensor.node
    if node is None or node.domain or depth > _DEEPEST or node.op_type not in _FOLDS:
        return None
    values = []
    for name in node.input:
        value = folded(tensor.scope.find(name), depth + 1) if name else None
        if value is None:
            return None
        values.append(value)
    try:
        return _FOLDS[node.op_type](node, values, tensor.place)
    except (ValueError, IndexError, TypeError, StopIteration):
        return None


def _axes(node: onnx.NodeProto, values: list[np.ndarray]) -> tuple[int, ...]:
    given = values[1].ravel().tolist() if len(values) > 1 else integers_of(node, "axes") or []
    return tuple(int(axis) for axis in given)


def _reshaped(node: onnx.NodeProto, values: list[np.ndarray], _place: int) -> np.ndarray | None:
    value, shape = values[0], [int(size) for size in values[1]]
    if integer_of(node, "allowzero", False):
        return None
    return value.reshape([value.shape[axis] if size == 0 else size for axis, size in enumerate(shape)])


def _expanded(_node: onnx.NodeProto, values: list[np.ndarray], _place: int) -> np.ndarray | None:
    shape = np.broadcast_shapes(values[0].shape, tuple(int(size) for size in values[1]))
    return np.broadcast_to(values[0], shape) if np.prod(shape, dtype=float) <= _MOST_ENTRIES else None


def _concatenated(node: onnx.NodeProto, values: list[np.ndarray], _place: int) -> np.ndarray:
    return np.concatenate(values, axis=integer_of(node, "axis", 0) or 0)


def _transposed(node: onnx.NodeProto, values: list[np.ndarray], _place: int) -> np.ndarray:
    return values[0].transpose(integers_of(node, "perm") or None)


def _cast(node: onnx.NodeProto, values: list[np.ndarray], _place: int) -> np.ndarray | None:
    target = integer_of(node, "to", 0) or 0
    source = onnx.helper.np_dtype_to_tensor_dtype(values[0].dtype)
    wider = 0 < WIDTHS.get(source, 0) <= WIDTHS.get(target, 0)
    return values[0].astype(onnx.helper.tensor_dtype_to_np_dtype(target)) if wider else None


def _sliced(_node: onnx.NodeProto, values: list[np.ndarray], _place: int) -> np.ndarray | None:
    starts, stops, *rest = (each.ravel().tolist() for each in values[1:])
    axes = rest[0] if rest else list(range(len(starts)))
    if rest[1:] not in ([], [[1] * len(starts)]) or min([*starts, *stops, 0]) < -1:
        return None
    cuts = [slice(None)] * values[0].ndim
    for start, stop, axis in zip(starts, stops, axes, strict=True):
        cuts[axis] = slice(start, None if stop >= values[0].shape[axis] else stop)
    return values[0][tuple(cuts)]


def _split(node: onnx.NodeProto, values: list[np.ndarray], place: int) -> np.ndarray:
    axis = integer_of(node, "axis", 0) or 0
    sizes = values[1].ravel().tolist() if len(values) > 1 else integers_of(node, "split")
    ends = np.cumsum(sizes)[:-1] if sizes else len(node.output)
    return np.split(values[0], ends, axis)[place]


def _arithmetic(node: onnx.NodeProto, values: list[np.ndarray], _place: int) -> np.ndarray | None:
    """A product or sum in the type of its operands, as a runtime rounds it."""
    if any(value.dtype not in (np.float32, np.float64) for value in values):
        return None
    with np.errstate(all="ignore"):
        return np.asarray({"Add": np.add, "Mul": np.multiply}[node.op_type](*values))


_FOLDS: dict[str, Callable[[onnx.NodeProto, list[np.ndarray], int], np.ndarray | None]] = {
    "Add": _arithmetic,
    "Cast": _cast,
    "Concat": _concatenated,
    "Expand": _expanded,
    "Mul": _arithmetic,
    "Reshape": _reshaped,
    "Slice": _sliced,
    "Split": _split,
    "Squeeze": lambda node, values, _: values[0].squeeze(_axes(node, values) or None),
    "Transpose": _transposed,
    "Unsqueeze": lambda node, values, _: np.expand_dims(values[0], _axes(node, values)),
}


# -- shapes ----------------------------------------------------------------------------------------------------------

Dim = int | tuple[tuple[int, str], int]
"""A number, or an axis of a tensor by its key."""


def dims(shape: Tensor, depth: int = 0) -> list[Dim] | None:
    """A shape that is put together from numbers and axes of other tensors."""
    if shape.values is not None:
        return [int(size) for size in shape.values.ravel()]
    node, scope = shape.node, shape.scope
    if node is None or node.domain or depth > _DEEPEST:
        return None
    if node.op_type == "Concat":
        parts = [dims(scope.find(name), depth + 1) for name in node.input]
        return None if None in parts else [dim for part in parts for dim in part or ()]
    if node.op_type in ("Unsqueeze", "Gather"):
        whole, index = scope.find(node.input[0]), scope.find(node.input[1]).values if len(node.input) > 1 else None
        if node.op_type == "Unsqueeze":
            return dims(whole, depth + 1) if whole.node is not None and key_of(whole.node) == ("", "Gather") else None
        known = index is not None and index.ndim == 0 and int(index) >= 0 and not integer_of(node, "axis", 0)
        measured = shaped(whole)
        return None if not known or index is None or measured is None else [(measured.key, int(index))]
    if node.op_type != "Slice":
        return None
    ends, measured = slice_of(scope, node), shaped(scope.find(node.input[0]))
    if ends is None or measured is None or not 0 <= ends[0] < ends[1] < 64:
        return None
    return [(measured.key, axis) for axis in range(*ends)]


def shaped(shape: Tensor) -> Tensor | None:
    """The tensor whose whole shape this is."""
    node = shape.node
    known = node is not None and key_of(node) == ("", "Shape") and not node.attribute
    return shape.scope.find(node.input[0]) if known and node is not None else None


def slice_of(scope: Scope, node: onnx.NodeProto) -> tuple[int, int] | None:
    """Start and end of a Slice of a vector."""
    if len(node.input) not in (3, 4):
        return None
    ends = [scope.find(name).values for name in node.input[1:]]
    if any(end is None or end.size != 1 for end in ends):
        return None
    start, stop, *axes = (int(end.ravel()[0]) for end in ends if end is not None)
    return None if any(axes) else (start, stop)


def leading_and(shape: Tensor) -> tuple[Tensor, int] | None:
    """A shape of all axes of a tensor but the last, and a number: the tensor, and the number."""
    node, scope = shape.node, shape.scope
    if node is None or key_of(node) != ("", "Concat") or len(node.input) != 2:
        return None
    leading, size = scope.find(node.input[0]), scope.find(node.input[1]).values
    if size is None or size.size != 1 or leading.node is None or key_of(leading.node) != ("", "Slice"):
        return None
    measured = shaped(leading.scope.find(leading.node.input[0]))
    whole = slice_of(leading.scope, leading.node) == (0, -1)
    return (measured, int(size.ravel()[0])) if whole and measured is not None else None


def width(tensor: Tensor, depth: int = 0) -> int | None:
    """The size of the last axis, as far as operators here say so."""
    part = part_of(tensor)
    if part is not None and depth <= _DEEPEST:
        whole = width(part[0], depth + 1)
        return None if whole is None else len(range(*part[1].indices(whole)))
    node, scope = tensor.node, tensor.scope
    if node is None or node.domain or tensor.place or depth > _DEEPEST:
        return None
    if node.op_type == "Reshape":
        sizes = dims(scope.find(node.input[1]))
        return sizes[-1] if sizes and isinstance(sizes[-1], int) and sizes[-1] > 0 else None
    if node.op_type in ("MatMul", "Gemm"):
        weight = folded(scope.find(node.input[1]))
        known = weight is not None and weight.ndim == 2
        return int(weight.shape[0 if attributes(node).get("transB") else 1]) if known and weight is not None else None
    if key_of(node) not in OPERATORS and node.op_type not in ("Cast", "Clip"):
        return None
    found = set()
    for each in (scope.find(name) for name in node.input if name):
        value = folded(each)
        if value is None or value.ndim > 1:
            found.add(width(each, depth + 1))
        elif value.size != 1:
            found.add(value.size)
    return found.pop() if len(found) == 1 else None


def front(tensor: Tensor, depth: int = 0) -> Front | None:
    """The axes in front of the last: those of the first tensor upwards that an operator here does not explain.

    Of heads [batch, tokens, heads, ...] they are the first two.
    """
    known: dict[str, Front | None] = tensor.scope.fronts
    if tensor.name not in known:
        known[tensor.name] = None  # what depends on itself has none
        known[tensor.name] = _front(tensor, depth)
    return known[tensor.name]


def _front(tensor: Tensor, depth: int) -> Front | None:
    node, scope = tensor.node, tensor.scope
    if depth > _DEEPEST:
        return None
    part = part_of(tensor)
    if part is not None:
        return front(part[0], depth + 1)
    if node is None or tensor.place or node.domain:
        return Front(tensor)
    if node.op_type == "Reshape":
        return _of_reshape(tensor, node, depth)
    if node.op_type == "Concat":
        source = _beside_ones(tensor)
        return Front(tensor) if source is None else front(source, depth + 1)
    if node.op_type in ("MatMul", "Gemm"):
        constant = folded(scope.find(node.input[1]))
        known = constant is not None and constant.ndim == 2 and not integer_of(node, "transA", 0)
        return front(scope.find(node.input[0]), depth + 1) if known else Front(tensor)
    if key_of(node) not in OPERATORS and node.op_type not in ("Cast", "Clip"):
        return Front(tensor)
    found = [front(each, depth + 1) for each in (scope.find(name) for name in node.input if name) if not _small(each)]
    return found[0] if found and all(each == found[0] for each in found) else Front(tensor)


def _small(tensor: Tensor) -> bool:
    value = folded(tensor)
    return value is not None and value.ndim <= 1


def _of_reshape(tensor: Tensor, node: onnx.NodeProto, depth: int) -> Front | None:
    data, sizes = tensor.scope.find(node.input[0]), dims(tensor.scope.find(node.input[1]))
    if sizes is None or integer_of(node, "allowzero", False):
        return Front(tensor)
    if len(sizes) == 3 and sizes[:2] == [0, 0]:
        return heads_front(data, depth + 1)
    axes = [dim[1] for dim in sizes[:-1] if not isinstance(dim, int)]
    keys = {dim[0] for dim in sizes[:-1] if not isinstance(dim, int)}
    if len(sizes) > 2 and isinstance(sizes[-1], int) and len(keys) == 1 and axes == list(range(len(sizes) - 1)):
        return Front(_of(tensor.scope, next(iter(keys))), len(axes))
    return Front(tensor)


def heads_front(tensor: Tensor, depth: int = 0) -> Front | None:
    """The first two of the four axes of heads; None where they are not those of one tensor, or unknown."""
    if _small(tensor):
        return None
    node, scope = tensor.node, tensor.scope
    if node is None or node.domain or depth > _DEEPEST:
        return None
    sources = [scope.find(name) for name in node.input if name]
    if node.op_type == "Reshape":
        sizes = dims(sources[1])
        laid_out = sizes is not None and len(sizes) == 4 and sizes[:2] == [0, 0] and 0 not in sizes[2:]
        made = sources[0].node
        projects = made is not None and key_of(made) == ("", "MatMul")
        stream = _beside_ones(scope.find(made.input[0])) if projects and made is not None else None
        return front(sources[0], depth + 1) if laid_out and stream is not None else None
    if node.op_type == "Expand":
        shape = sources[1]
        if shape.node is not None and key_of(shape.node) == ("", "Shape") and not shape.node.attribute:
            return heads_front(shape.scope.find(shape.node.input[0]), depth + 1)
        sizes = dims(shape)
        if sizes is None or len(sizes) != 4 or isinstance(sizes[0], int) or isinstance(sizes[1], int):
            return None
        (key, first), (other, second) = sizes[:2]  # type: ignore[misc]
        # The axes of the tensor that the heads' stream begins with, which has three.
        return front(_of(scope, key), depth + 1) if key == other and (first, second) == (0, 1) else None
    if node.op_type in ("Split", "ReduceSum", "Softmax", "Clip", "Transpose", "Cast"):
        kept = node.op_type != "Transpose" or integers_of(node, "perm") == [0, 1, 3, 2]
        return heads_front(sources[0], depth + 1) if kept else None
    if node.op_type == "Concat" and integer_of(node, "axis", 0) not in (2, 3, -1, -2):
        return None
    if node.op_type not in ("Concat", "MatMul") and key_of(node) not in OPERATORS:
        return None
    numbers = [each for each in sources if each.constant is None]
    if any(len(each.constant.dims) > 2 for each in sources if each.constant is not None):
        return None
    found = [heads_front(each, depth + 1) for each in numbers]
    return found[0] if found and None not in found and all(each == found[0] for each in found) else None


def _of(scope: Scope, key: tuple[int, str]) -> Tensor:
    return scope.find(key[1])

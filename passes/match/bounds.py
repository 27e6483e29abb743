"""Proven bounds on pre-activations, from the normalisation or embedding table before a projection.

The bounds are an interval per neuron that holds for every input. For normalised data x = g * n + c (g, c the
normalisation's scale and bias) with D channels,

    y = w.x + b = (g * w).n + c.w + b,    |n| <= sqrt(D),

because the mean of n^2 is var / (var + epsilon) <= 1; the bound on y follows by Cauchy-Schwarz. LayerNormalization also
makes the sum of n zero, so g * w may be replaced by its difference from its mean. For rows of an embedding table,
|w.x| <= |w| max |row|.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import TypeVar

import numpy as np
import onnx

from passes.match.blocks import Block
from passes.match.linear import MICROSOFT, Miss
from passes.match.projections import Projection, leaf_of
from passes.programs.head import Array
from rewriter.graph.constants import AnyArray, Constants, Read
from rewriter.graph.types import FLOATS, elem_name
from rewriter.graph.view import GraphView, integer_of, integers_of, key_of, label, tensor_of


@dataclass(frozen=True)
class _Norm:
    """The input positions of a normalisation's scale and bias, and whether it subtracts the mean."""

    scale: int
    bias: int | None
    centred: bool


NORMS: dict[tuple[str, str], _Norm] = {
    ("", "LayerNormalization"): _Norm(1, 2, centred=True),
    ("", "RMSNormalization"): _Norm(1, None, centred=False),
    ("", "SimplifiedLayerNormalization"): _Norm(1, None, centred=False),
    (MICROSOFT, "SkipLayerNormalization"): _Norm(2, 3, centred=True),
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _Norm(2, None, centred=False),
}
"""Operators whose first output is normalised along the last axis."""


def preactivation_bounds(view: GraphView, projection: PreActivation, read: Read) -> tuple[Array, Array] | None:
    """Smallest and largest value that each neuron's pre-activation can take, rounding included.

    Returns:
        Two arrays of shape [d_ff], or None where the projection's data are neither normalised by a known operator nor
        rows of a table.
    """
    found = _scale_and_bias(view, projection.data, read) or _written_out(view, projection.data, read)
    if found is None:
        return _of_rows(view, projection, read)
    norm, scale, shift = found
    weight = projection.weight.per_neuron.astype(np.float64)
    if scale.shape[-1:] != weight.shape[1:] or (shift is not None and shift.shape != scale.shape):
        return None
    bias = sum((_spread(operand.array, len(weight)) for operand in projection.biases), np.zeros(len(weight)))
    steered = weight * scale
    if norm.centred:
        # n sums to zero, so a constant may be subtracted from every weight; the mean makes the norm smallest.
        steered -= steered.mean(axis=1, keepdims=True)
    reach = np.sqrt((steered**2).sum(axis=1)) * sqrt(weight.shape[1])
    middle = bias if shift is None else weight @ shift + bias
    # The bound holds for exact arithmetic; the model computes y with rounding, in proportion to the terms of the sum.
    size = reach + np.abs(bias) + (0.0 if shift is None else np.abs(weight) @ np.abs(shift))
    slack = _rounding(projection.weight.array.dtype, weight.shape[1]) * size
    return middle - reach - slack, middle + reach + slack


def reach(view: GraphView, block: Block, read: Read) -> float | None:
    """The largest |pre-activation| of a block over all inputs; None where its weights do not bound it."""
    try:
        found = preactivation_bounds(view, read_preactivation(view, Constants(view), block, block.gate, read), read)
    except NotPlainError:
        return None
    return None if found is None else float(np.max(np.abs(found)))


def _of_rows(view: GraphView, projection: PreActivation, read: Read) -> tuple[Array, Array] | None:
    """The bounds where the data are sums of rows of constant tables."""
    longest = _longest_row(view, projection.data, read)
    if longest is None:
        return None
    weight = projection.weight.per_neuron.astype(np.float64)
    bias = sum((_spread(operand.array, len(weight)) for operand in projection.biases), np.zeros(len(weight)))
    # |w.x| <= |w| |x|, with nothing known about the direction of a row.
    far = np.sqrt((weight**2).sum(axis=1)) * longest
    slack = _rounding(projection.weight.array.dtype, weight.shape[1]) * (far + np.abs(bias))
    return bias - far - slack, bias + far + slack


def _longest_row(view: GraphView, tensor: str, read: Read) -> float | None:
    """A bound on the norm of any row of `tensor`, a sum of table rows; None where it is something else."""
    node = view.made_by(tensor)
    if node is None or not view.is_onnx(node):
        return None
    if node.op_type == "Add":  # word, position and segment embeddings: norms add up at most
        parts = [_longest_row(view, name, read) for name in node.input]
        return None if None in parts else sum(part for part in parts if part is not None)
    if node.op_type != "Gather" or integer_of(node, "axis", 0) != 0:
        return None
    try:
        table = constant_operand(view, view.producer[tensor], 0, read).array
    except NotPlainError:
        return None
    return float(np.sqrt(np.max(np.sum(table.astype(np.float64) ** 2, axis=-1))))


def _written_out(view: GraphView, tensor: str, read: Read) -> tuple[_Norm, Array, Array | None] | None:
    """Scale and bias of a normalisation in plain operators: g x / sqrt(mean(x^2) + epsilon) + c."""
    # Exporters decompose RMSNorm in this way, with casts to float32 around it. A LayerNorm in plain operators matches
    # too, with x less its mean; that its n sums to zero is not used then.
    tensor, shift = _past_constant(view, tensor, "Add", read)
    tensor, scale = _past_constant(view, tensor, "Mul", read)
    if scale is None or not _divides_by_root(view, _past_casts(view, tensor)):
        return None
    return _Norm(0, None, centred=False), scale, shift


def _past_constant(view: GraphView, tensor: str, operator: str, read: Read) -> tuple[str, Array | None]:
    """The data operand and the constant of an Add or Mul; the tensor itself and None for anything else."""
    tensor = _past_casts(view, tensor)
    index = view.producer.get(tensor)
    if index is None or view.nodes[index].op_type != operator:
        return tensor, None
    for slot in (0, 1):
        try:
            constant = constant_operand(view, index, slot, read).array.astype(np.float64)
        except NotPlainError:
            continue
        return view.nodes[index].input[1 - slot], constant.reshape(constant.shape[-1:])
    return tensor, None


def _past_casts(view: GraphView, tensor: str) -> str:
    while (node := view.made_by(tensor)) is not None and view.is_onnx(node) and node.op_type in ("Cast", "Identity"):
        tensor = node.input[0]
    return tensor


def _divides_by_root(view: GraphView, tensor: str) -> bool:
    """Whether a tensor is x / sqrt(mean of x^2 along the last axis + epsilon), for some x and epsilon >= 0."""
    node = view.made_by(tensor)
    if node is None or node.op_type not in ("Mul", "Div"):
        return False
    # x / sqrt(...) or x * (1 / sqrt(...)), and a product has its factors in either order.
    pairs = [tuple(node.input), tuple(node.input)[::-1]] if node.op_type == "Mul" else [tuple(node.input)]
    return any(_is_root(view, root, data, inverse=node.op_type == "Mul") for data, root in pairs)


def _is_root(view: GraphView, tensor: str, data: str, *, inverse: bool) -> bool:
    node = view.made_by(_past_casts(view, tensor))
    if inverse and node is not None and node.op_type in ("Reciprocal", "Div"):
        top = None if node.op_type == "Reciprocal" else Constants(view).scalar(node.input[0])
        if top not in (None, 1.0):
            return False
        node = view.made_by(node.input[-1])
    elif inverse:
        return False
    if node is None or node.op_type != "Sqrt":
        return False
    added = view.made_by(node.input[0])
    if added is None or added.op_type != "Add":
        return False
    for mean, epsilon in (tuple(added.input), tuple(added.input)[::-1]):
        value = Constants(view).scalar(epsilon)
        if value is not None and value >= 0.0:
            return _is_mean_of_squares(view, mean, data)
    return False


def _is_mean_of_squares(view: GraphView, tensor: str, data: str) -> bool:
    node = view.made_by(tensor)
    if node is None or node.op_type != "ReduceMean" or _axes(view, node) != [-1]:
        return False
    square = view.made_by(node.input[0])
    if square is None:
        return False
    # The squares may be of a cast of the data, as where the norm is computed in float32.
    same = {_past_casts(view, name) for name in square.input[:1]} == {_past_casts(view, data)}
    if square.op_type == "Pow":
        return same and Constants(view).scalar(square.input[1]) == 2.0
    return same and square.op_type == "Mul" and square.input[0] == square.input[1]


def _axes(view: GraphView, node: onnx.NodeProto) -> list[int]:
    stated = integers_of(node, "axes")
    if stated is None and len(node.input) > 1:
        value = Constants(view).value(node.input[1])
        stated = None if value is None else [int(entry) for entry in np.ravel(value)]
    rank = view.type_of(node.input[0]).rank
    return [axis - rank if rank is not None and axis >= 0 else axis for axis in stated or []]


def _scale_and_bias(view: GraphView, tensor: str, read: Read) -> tuple[_Norm, Array, Array | None] | None:
    index = view.producer.get(tensor)
    if index is None:
        return None
    node = view.nodes[index]
    norm = NORMS.get(key_of(node))
    if norm is None or node.output[0] != tensor or not _usual(view, index):
        return None
    try:
        scale = constant_operand(view, index, norm.scale, read).array.astype(np.float64)
        biased = norm.bias is not None and len(node.input) > norm.bias and node.input[norm.bias]
        shift = constant_operand(view, index, norm.bias or 0, read).array.astype(np.float64) if biased else None
    except NotPlainError:
        return None
    return norm, scale, shift


def _usual(view: GraphView, index: int) -> bool:
    """Whether it normalises along the last axis only, with epsilon >= 0: |n| <= sqrt(D) needs both."""
    node = view.nodes[index]
    given = {attribute.name: attribute for attribute in node.attribute}
    rank = view.type_of(node.input[0]).rank
    last = "axis" not in given or given["axis"].i == -1 or (rank is not None and given["axis"].i == rank - 1)
    return last and ("epsilon" not in given or given["epsilon"].f >= 0.0)


def _spread(bias: AnyArray, count: int) -> Array:
    return np.broadcast_to(bias.astype(np.float64).ravel(), (count,))


def _rounding(dtype: np.dtype[np.generic], terms: int) -> float:
    """A generous bound on the rounding of a sum of `terms` products, relative to the sum of their magnitudes."""
    digits = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}.get(dtype.name, 7)
    return 4.0 * (terms + 8) * 2.0**-digits


T = TypeVar("T")

NO_AXIS = -1


# -- the weight and the biases of one pre-activation, as arrays -----------------------------------------------------


class NotPlainError(Exception):
    """A block whose operands cannot be split by neuron; the message is the reason."""


@dataclass(frozen=True)
class Operand:
    """A constant input of a node.

    Attributes:
        node: index of the node in its view.
        slot: which input of the node it is.
        name: name of the tensor.
        array: its values as the node reads them.
        elem_type: TensorProto element type.
        axis: the axis with one entry per neuron; `NO_AXIS` where there is none (one value for all).
    """

    node: int
    slot: int
    name: str
    array: AnyArray
    elem_type: int
    axis: int

    @property
    def per_neuron(self) -> AnyArray:
        """The values with the neurons along the first axis, as a matrix."""
        moved = np.moveaxis(self.array, self.axis, 0)
        return moved.reshape(moved.shape[0], -1)


@dataclass(frozen=True)
class PreActivation:
    """The operands of one pre-activation: weight and biases (inside a Gemm, and of the Adds after it).

    Attributes:
        leaf: the tensor.
        data: what the weight is applied to.
        weight: the weight.
        biases: added one after the other.
        nodes: the linear operator and the Adds, as indices.
    """

    leaf: str
    data: str
    weight: Operand
    biases: tuple[Operand, ...]
    nodes: tuple[int, ...]


def constant_operand(view: GraphView, node: int, slot: int, read: Read) -> Operand:
    """A constant input of a node, followed through Identity and matrix transposition; its neuron axis is not set.

    Raises:
        NotPlainError: it is computed in another way, a caller may override it, or its type is not floating-point.
    """
    name = wanted = view.nodes[node].input[slot]
    transposed = False
    while name not in view.initializers or name in view.overridable:
        if name in view.overridable:
            raise NotPlainError(f"its weight '{name}' is also a graph input, which a caller may override")
        maker = view.made_by(name)
        if maker is None or not view.is_onnx(maker) or maker.op_type not in ("Constant", "Identity", "Transpose"):
            raise NotPlainError(
                f"its weight is computed by {label(maker)}" if maker is not None else "it has no weight"
            )
        if maker.op_type == "Constant":
            tensor = tensor_of(maker)
            if tensor is None:
                raise NotPlainError(f"its weight {label(maker)} is not a tensor")
            break
        transposed ^= maker.op_type == "Transpose" and _turns_matrix(maker)
        name = maker.input[0]
    else:
        tensor = view.initializers[name]
    if tensor.data_type not in FLOATS:
        kind = elem_name(tensor.data_type)
        raise NotPlainError(f"its weight '{wanted}' holds {kind}, not floating-point numbers")
    array = read(tensor)
    return Operand(node, slot, wanted, array.T if transposed else array, tensor.data_type, NO_AXIS)


def _turns_matrix(node: onnx.NodeProto) -> bool:
    order = integers_of(node, "perm") or [1, 0]
    if order not in ([1, 0], [0, 1]):
        raise NotPlainError(f"its weight is computed by {label(node)}")
    return order == [1, 0]


def read_preactivation(view: GraphView, constants: Constants, block: Block, leaf: str, read: Read) -> PreActivation:
    """The weight and the biases of one pre-activation.

    Raises:
        NotPlainError: it is not a constant matrix times data plus biases.
    """
    found = _plain(leaf_of(view, constants, block, leaf))
    # Layout nodes and parts of stacked projections hold sizes, which would have to change with the number of neurons.
    for index in found.nodes[1:]:
        if view.nodes[index].op_type != "Add":
            raise NotPlainError(f"{label(view.nodes[index])} stands between a linear operator and the activation")
    weight = _weight(view, found, read)
    biases = tuple(
        _along_channels(constant_operand(view, vector.node, vector.slot, read), weight) for vector in found.biases
    )
    return PreActivation(leaf, found.data, weight, biases, found.nodes)


def _plain(found: T | Miss) -> T:
    if isinstance(found, Miss):
        raise NotPlainError(found.reason)
    return found


def _weight(view: GraphView, projection: Projection, read: Read) -> Operand:
    """The weight of a first operator, whose neurons are its columns."""
    node = projection.nodes[0]
    slot = list(view.nodes[node].input).index(projection.weight)
    weight = constant_operand(view, node, slot, read)
    return replace(weight, axis=int(not projection.transposed))  # [in, out], or [out, in] if transposed


def _along_channels(bias: Operand, weight: Operand) -> Operand:
    """A bias with its neuron axis: the last one, or none where all neurons share one value."""
    neurons = weight.array.shape[weight.axis]
    if bias.array.size == 1:
        return bias
    if bias.array.size != neurons or bias.array.shape[-1] != neurons:
        raise NotPlainError(f"its bias '{bias.name}' has shape {list(bias.array.shape)}, not one value per neuron")
    axis = bias.array.ndim - 1
    return Operand(bias.node, bias.slot, bias.name, bias.array, bias.elem_type, axis)

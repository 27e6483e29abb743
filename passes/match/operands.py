"""The constant operands of a block's linear operators, as arrays with a neuron axis.

A `Layer` holds every operand with an entry per neuron, and the biases of the second operators, to which constants can
be added. It exists for blocks whose linear operators are plain MatMul or Gemm nodes with biases; others raise
`NotPlainError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray

from passes.match.blocks import Block
from passes.match.linear import LinearOperator, Miss
from passes.match.projections import Projection, leaf_of, output_of
from rewriter.graph.constants import Constants
from rewriter.graph.types import FLOATS, elem_name
from rewriter.graph.view import GraphView, integers_of, label, tensor_of

AnyArray = NDArray[Any]
Read = Callable[[onnx.TensorProto], AnyArray]
"""Gives the values of a tensor, inline or external, in its own element type."""

T = TypeVar("T")

NO_AXIS = -1


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


@dataclass(frozen=True)
class Output:
    """A second operator with its bias.

    Attributes:
        operator: the operator.
        weight: its weight.
        bias: the bias inside a Gemm, or of an Add that is the only consumer of the operator's output; None where a
            constant needs an Add of its own.
        biased: the tensor after the bias.
    """

    operator: LinearOperator
    weight: Operand
    bias: Operand | None
    biased: str


@dataclass(frozen=True)
class Layer:
    """A block as arrays.

    Attributes:
        gate: the projection that the activation reads.
        value: the other projection of a gated block; None in a plain block.
        outputs: the second operators.
        hidden: the tensors with a channel per neuron.
    """

    gate: PreActivation
    value: PreActivation | None
    outputs: tuple[Output, ...]
    hidden: tuple[str, ...]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """All operands with a neuron axis."""
        first = [self.gate] + ([self.value] if self.value is not None else [])
        found = [operand for projection in first for operand in (projection.weight, *projection.biases)]
        return (*(operand for operand in found if operand.axis != NO_AXIS), *(out.weight for out in self.outputs))


def read_layer(view: GraphView, block: Block, read: Read) -> Layer:
    """The operands of `block`.

    Raises:
        NotPlainError: its operands cannot be split by neuron, or its neurons cannot be removed.
    """
    if not block.second:
        raise NotPlainError("no linear operator reads its neurons")
    constants = Constants(view)
    gate = read_preactivation(view, constants, block, block.gate, read)
    gated = block.value != block.gate
    value = read_preactivation(view, constants, block, block.value, read) if gated else None
    outputs = tuple(_output(view, constants, operator, read) for operator in block.second)
    layer = Layer(gate, value, outputs, _hidden(view, block, gate, value))
    sizes = {operand.array.shape[operand.axis] for operand in layer.operands}
    if len(sizes) != 1:
        raise NotPlainError(f"its weights disagree about the number of neurons: {sorted(sizes)}")
    # Neurons are compared bit for bit, and rows added, in one type.
    if len({operand.elem_type for operand in layer.operands}) != 1:
        raise NotPlainError("its weights have different element types")
    return layer


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
    weight = _weight(view, found, read, neurons_last=True)
    biases = tuple(
        _along_channels(constant_operand(view, vector.node, vector.slot, read), weight) for vector in found.biases
    )
    return PreActivation(leaf, found.data, weight, biases, found.nodes)


def _plain(found: T | Miss) -> T:
    if isinstance(found, Miss):
        raise NotPlainError(found.reason)
    return found


def _weight(view: GraphView, projection: Projection, read: Read, *, neurons_last: bool) -> Operand:
    """The weight of a linear operator; neurons are the columns of W1 and the rows of W2."""
    node = projection.nodes[0]
    slot = list(view.nodes[node].input).index(projection.weight)
    weight = constant_operand(view, node, slot, read)
    # [in, out], or [out, in] if transposed: the neurons are outputs of W1 and inputs of W2.
    return replace(weight, axis=int(neurons_last != projection.transposed))


def _along_channels(bias: Operand, weight: Operand) -> Operand:
    """A bias with its neuron axis: the last one, or none where all neurons share one value."""
    neurons = weight.array.shape[weight.axis]
    if bias.array.size == 1:
        return bias
    if bias.array.size != neurons or bias.array.shape[-1] != neurons:
        raise NotPlainError(f"its bias '{bias.name}' has shape {list(bias.array.shape)}, not one value per neuron")
    axis = bias.array.ndim - 1
    return Operand(bias.node, bias.slot, bias.name, bias.array, bias.elem_type, axis)


def _output(view: GraphView, constants: Constants, operator: LinearOperator, read: Read) -> Output:
    after, found = _plain(output_of(view, constants, operator))
    weight = _weight(view, found, read, neurons_last=False)
    # A bias that is one number for all channels cannot take up one constant per channel.
    bias = next((vector for vector in found.biases if vector.size == found.out_features), None)
    if bias is None:
        return Output(operator, weight, None, operator.output)
    added = constant_operand(view, bias.node, bias.slot, read)
    return Output(operator, weight, added, operator.output if bias.node == operator.node else after)


def _hidden(view: GraphView, block: Block, gate: PreActivation, value: PreActivation | None) -> tuple[str, ...]:
    """The tensors with a channel per neuron, which nothing but the block itself may read."""
    projections = (gate,) if value is None else (gate, value)
    inside = {*block.region.nodes, *(index for projection in projections for index in projection.nodes)}
    readers = {operator.node for operator in block.second}
    names = [name for index in sorted(inside) for name in view.nodes[index].output if name]
    # A consumer outside the block would read fewer channels than before.
    for name in names:
        if name in view.outputs:
            raise NotPlainError(f"its hidden tensor '{name}' is an output of the graph")
        for reader in view.consumers.get(name, ()):
            if reader not in inside and reader not in readers:
                raise NotPlainError(f"its hidden tensor '{name}' is read by {label(view.nodes[reader])} too")
    return tuple(names)

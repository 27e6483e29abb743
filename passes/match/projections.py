"""A block's linear operators as plain matrices, y = x W1 + b1 and W2, by the names of their constants.

Forms that replace whole blocks express W_Q, W_V and W_O in these names, so weights are neither read nor stored twice.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx

from passes.match.blocks import Block
from passes.match.linear import LinearOperator
from rewriter.graph.constants import COMPUTED, UNFIT, Constants, outputs
from rewriter.graph.view import REARRANGED, SAME_ENTRIES, GraphView, LostError, attributes, key_of, label, operands_of

_PLAIN = ("MatMul", "Gemm", "Einsum", "FusedMatMul", "TransposeMatMul")
_PARTS = ("Split", "Slice")  # operators that take some of the channels
_MAX_RANK = 8
_TOKENS = 1000003  # a placeholder for a size that is not known: no dimension of a model is a multiple of it
_REST = 2**31 - 1  # the smallest number that exporters write for the end of an axis


@dataclass(frozen=True)
class Vector:
    """A constant with one value per channel, or one for all; only channels `start:stop` are used."""

    name: str
    size: int
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Projection:
    """`output = data @ weight[:, start:stop] + sum of biases`; if `transposed`, the weight is stored as [out, in]."""

    data: str
    weight: str
    transposed: bool
    in_features: int
    out_features: int
    biases: tuple[Vector, ...] = ()
    start: int = 0
    stop: int | None = None

    def part(self, start: int, stop: int) -> "Projection":
        wide = [replace(bias, start=bias.start + start, stop=bias.start + stop) for bias in self.biases]
        biases = tuple(old if old.size == 1 else new for old, new in zip(self.biases, wide, strict=True))
        return replace(self, biases=biases, out_features=stop - start, start=self.start + start, stop=self.start + stop)


@dataclass(frozen=True)
class Projections:
    """A whole MLP block in plain matrices."""

    query: Projection
    value: Projection
    output: Projection  # W2, with the bias that its operator adds
    result: str  # output of the second operator, after its bias
    rank: int
    result_rank: int  # as many axes as the input's, or 2 where batch and tokens are one axis
    shapes: tuple[str, ...] = ()  # outputs of Shape nodes of tensors that go, computed from the input instead

    @property
    def gated(self) -> bool:
        return self.value != self.query


def matrix_of(view: GraphView, constants: Constants, operator: LinearOperator, *, biased: bool = False) -> Projection:
    """A linear operator as a matrix with its bias; if `biased`, also one in a separate Add. Raises LostError."""
    reader = ProjectionReader(view, constants, packed=True)
    found = reader.matrix(operator)
    return reader.with_bias(operator.output, found)[1] if biased else found


class ProjectionReader:
    """Reads linear operators as plain matrices; `packed` ones also as MatMulNBits, or computed. Raises LostError."""

    def __init__(self, view: GraphView, constants: Constants | None = None, *, packed: bool = False) -> None:
        self._view, self._packed = view, packed
        self._constants = constants or Constants(view, sizes=self._sizes_of)

    def read(self, block: Block) -> Projections:
        # W_O of the sublayer is one matrix, and the activation itself no longer exists for other consumers.
        if len(block.second) != 1:
            reason = "several linear operators read" if block.second else "no linear operator reads"
            raise LostError(f"{reason} the activation's output", block.output)
        query, value = self.leaf(block, block.gate), self.leaf(block, block.value)
        output = self.matrix(block.second[0])
        # Square patterns are per sequence, so the stream is the tensor before any Reshape that merges batch and tokens.
        data = self._unflattened(query.data)
        rank, result_rank = self._view.type_of(data).rank, self._view.type_of(output.data).rank
        # Leading axes that are known to be those of the block's input can be read there.
        ends = [name for name in (block.output, block.gate, block.value) if self._view.type_of(name).rank == rank]
        shapes = {at for name in ends if rank is not None for at in self._shape_nodes(name)}
        self._check_way_out(block, shapes)
        if value.data != query.data:
            raise LostError("the gate and the value are projections of different tensors", block.value)
        if query.out_features != value.out_features or output.in_features != query.out_features:
            raise LostError("the weights' shapes do not fit each other", block.output)
        names = (query.data, query.weight, value.weight, output.weight, output.data)
        types = block.types.union(known for name in names if (known := self._view.type_of(name).elem_type))
        if len(types - ({onnx.TensorProto.UINT8} if self._packed else set())) != 1:
            raise LostError("its tensors have different element types", block.output)
        if rank is None or result_rank is None or rank < 2 or result_rank not in (2, rank):
            raise LostError("the number of axes of its input or output is not known, or changes", block.output)
        result, output = self.with_bias(block.second[0].output, output)
        query, value = replace(query, data=data), replace(value, data=data)
        of_shapes = tuple(self._view.nodes[index].output[0] for index in sorted(shapes))
        return Projections(query, value, output, result, rank, result_rank, of_shapes)

    def leaf(self, block: Block, leaf: str) -> Projection:
        chain, tensor = list[tuple[onnx.NodeProto, str]](), leaf
        made = {operator.output: operator for operator in block.first}
        while tensor not in made:
            node = self._view.made_by(tensor)
            alone = node is not None and node.op_type in (*SAME_ENTRIES, *_PARTS)
            names = () if node is None else node.input[:1] if alone else node.input
            data = [name for name in names if name and name not in self._constants]
            if node is None or len(data) != 1:
                raise LostError("a projection is not a single linear operator", leaf)
            chain.append((node, tensor))
            tensor = data[0]
        projection = self.matrix(made[tensor])
        for node, output in reversed(chain):
            projection = self._step(projection, node, output)
        return projection

    def _step(self, projection: Projection, node: onnx.NodeProto, output: str) -> Projection:
        if node.op_type in ("Add", "Sum"):
            constants = (name for name in node.input if name in self._constants)
            if None not in (biases := [self._vector(name, projection.out_features) for name in constants]):
                return replace(projection, biases=(*projection.biases, *filter(None, biases)))
        elif node.op_type in SAME_ENTRIES:
            if self._width(output) in (None, projection.out_features):  # else it splits or merges channels
                return projection
        elif node.op_type in _PARTS and (bounds := self._taken(node, output, projection.out_features)) is not None:
            return projection.part(*bounds)
        raise LostError(f"{label(node)} stands between a linear operator and the activation", label(node))

    def _sizes_of(self, tensor: str) -> list[int] | None:
        sizes = self._view.sizes_of(tensor)
        return None if sizes is None else [_TOKENS if size is None else size for size in sizes]

    def _width(self, tensor: str) -> int | None:
        return (self._view.sizes_of(tensor) or (None,))[-1]

    def _vector(self, name: str, channels: int) -> Vector | None:
        shape = self._constants.shape(name)
        if shape is None or prod(shape) not in (1, channels) or any(size != 1 for size in shape[:-1]):
            return None
        return Vector(name, prod(shape))

    def _taken(self, node: onnx.NodeProto, output: str, channels: int) -> tuple[int, int] | None:
        """The channels that a Split or Slice takes, by its row in the table of operators; None if they are apart."""
        given = [self._constants.numbers(name) or [_TOKENS] if name else None for name in node.input[1:]]
        rank = self._view.type_of(node.input[0]).rank or _MAX_RANK  # only -1 is then the last axis
        entries = np.broadcast_to(np.arange(channels), (*[2] * (rank - 1), channels))
        if any(_TOKENS <= abs(number) < _REST for each in given for number in each or ()):  # not known, or of tokens
            return None
        bounds = (None if each is None else np.array(each) for each in given)
        try:
            taken = outputs(node, [entries, *bounds])[list(node.output).index(output)]
        except UNFIT:
            return None
        if taken.shape[:-1] != entries.shape[:-1] or not taken.size:
            return None
        start, stop = int(taken.flat[0]), int(taken.flat[-1]) + 1
        return (start, stop) if stop - start == taken.shape[-1] else None

    def matrix(self, operator: LinearOperator) -> Projection:
        node, where = self._view.nodes[operator.node], label(self._view.nodes[operator.node])
        if self._packed and operator.kind == "MatMulNBits" and operator.in_features and operator.out_features:
            sizes = operator.in_features, operator.out_features
            own = tuple(Vector(name, operator.out_features) for name in node.input[5:] if name)
            return Projection(operator.data, operator.weight, True, *sizes, own)
        if operator.kind not in _PLAIN or operator.axis != -1:
            raise LostError(f"its {operator.kind} does not hold a plain matrix", where)
        if operator.added:
            raise LostError(f"{where} adds data to its product", where)
        shape = self._constants.shape(operator.weight)
        if shape is None or len(shape) != 2 or operator.in_features is None or operator.out_features is None:
            raise LostError("the shape of its weight is not known", where)
        stated = attributes(node)
        if stated.get("alpha", 1.0) != 1.0 or stated.get("beta", 1.0) != 1.0:
            raise LostError(f"{where} scales its operands", where)
        # Weights are folded when the model is loaded; folding a DequantizeLinear would undo the quantisation.
        ends = self._view.back(operator.weight, COMPUTED if self._packed else REARRANGED)
        makers = (self._view.made_by(name) for name in ends)
        maker = next((each for each in makers if each is not None and each.op_type != "Constant"), None)
        if maker is not None:  # it computes the weight by more than layout or type; if `packed`, it is any unknown one
            quantised = maker.op_type == "DequantizeLinear"
            raise LostError(f"its weight is {'quantised' if quantised else f'computed by {label(maker)}'}", where)
        biases = [self._vector(name, operator.out_features) for name in node.input[2:] if name]  # of a Gemm
        if None in biases:
            raise LostError(f"{where} has a bias that is not one value per channel", where)
        sizes = operator.in_features, operator.out_features
        return Projection(operator.data, operator.weight, operator.transposed, *sizes, tuple(filter(None, biases)))

    def with_bias(self, result: str, output: Projection) -> tuple[str, Projection]:
        readers = [self._view.nodes[at] for at in self._view.consumers.get(result, ())]
        if [key_of(each) for each in readers] == [("", "Add")] and result not in self._view.outputs:
            with suppress(LostError):
                step = self._step(output, readers[0], readers[0].output[0])
                return (result if step == output else readers[0].output[0]), step
        return result, output

    def _shape_nodes(self, tensor: str) -> set[int]:
        """The Shape nodes that read all sizes; onnxruntime writes out that they start at 0."""
        readers = ((at, self._view.nodes[at]) for at in self._view.consumers.get(tensor, ()))
        shapes = ((at, node.attribute) for at, node in readers if node.op_type == "Shape")
        return {at for at, given in shapes if all(each.name == "start" and each.i == 0 for each in given)}

    def _unflattened(self, data: str) -> str:
        """The tensor before a Reshape that merges batch and tokens for a Gemm, else `data`."""
        node = self._view.made_by(data)
        if node is None or node.op_type not in ("Reshape", "Flatten"):
            return data
        widths = {self._width(name) for name in (data, node.input[0])}
        deeper = (self._view.type_of(node.input[0]).rank or 0) > 2
        return node.input[0] if deeper and len(widths) == 1 and None not in widths else data

    def _check_way_out(self, block: Block, shapes: set[int]) -> None:
        tensor = block.second[0].data
        while True:
            readers = set(self._view.consumers.get(tensor, ())) - shapes
            if self._packed:  # nothing is replaced: a CastLike that reads its type alone may stay
                readers = {at for at in readers if tensor in operands_of(self._view.nodes[at])}
            if len(readers) != 1 or tensor in self._view.outputs:
                raise LostError("something else reads the activation's output", tensor)
            if tensor == block.output:
                return
            node = self._view.made_by(tensor)
            if node is None or node.op_type not in SAME_ENTRIES or self._view.has_further_readers(node):
                raise LostError("another operator stands between the activation and the second operator", tensor)
            tensor = node.input[0]

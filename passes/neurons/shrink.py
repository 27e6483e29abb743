"""Putting smaller weights into a copy of a model.

They are new initializers, named after the old ones. An old weight is removed once it has no consumers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx

from passes.match.operands import AnyArray, Layer, NotPlainError, Operand, Output
from passes.neurons.reduce import Reduction
from passes.programs.softmax import Array
from rewriter.graph.edit import LOOSE_INITIALIZERS, drop_dead_constants
from rewriter.graph.view import GraphView, Path, all_graphs, graph_at

_MOST_BYTES = 2**31 - 2**26
"""Protobuf's limit of 2 GB, less some room for the rest: new weights are stored inside the model file."""


class Shrinker:
    """Edits a copy of a model. Node indices stay valid until `finish`, which inserts the new nodes.

    Attributes:
        ends: maps a second operator's output to the tensor that restores its original value, after a constant is added.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.ends: dict[str, str] = {}
        self._original = model
        self._copy: onnx.ModelProto | None = None
        self._names: set[str] = set()
        self._known: dict[tuple[Path, int, tuple[int, ...], bytes], str] = {}
        self._added: dict[Path, dict[int, onnx.NodeProto]] = {}
        self._retired: dict[Path, set[str]] = {}
        self._bytes: int | None = None

    def require_room(self, size: int = 0) -> None:
        """Check that the model can take new initializers of `size` bytes.

        Raises:
            NotPlainError: it cannot, because of its IR version or protobuf's size limit.
        """
        if self._original.ir_version < LOOSE_INITIALIZERS:
            raise NotPlainError(
                f"in IR version {self._original.ir_version} every weight is a graph input; convert the model to IR "
                f"version {LOOSE_INITIALIZERS} or newer first"
            )
        if size and self._size() + size > _MOST_BYTES:
            raise NotPlainError("its smaller weights would make the model file larger than protobuf's limit of 2 GB")

    def _size(self) -> int:
        """Bytes of initializers inside the model file so far, including weights that `finish` will remove."""
        if self._bytes is None:
            self._bytes = sum(tensor.ByteSize() for tensor in self._original.graph.initializer)
        return self._bytes

    def replace(self, view: GraphView, layer: Layer, reduction: Reduction) -> None:
        """Replace a block's weights by smaller ones.

        Raises:
            NotPlainError: they exceed the size limit, or a bias would become infinite; the copy is then unchanged.
        """
        # All that can fail comes before the first edit.
        size = sum(operand.array.nbytes for operand in layer.operands)
        self.require_room(size)
        shifted = [
            None if shift is None else _shifted(output, shift)
            for output, shift in zip(layer.outputs, reduction.shifts, strict=True)
        ]
        self._bytes = self._size() + size
        graph = graph_at(self._opened(view.path), view.path)
        changed = {out.weight.node: rows for out, rows in zip(layer.outputs, reduction.rows, strict=True)}
        for operand in layer.operands:
            is_output = any(operand is output.weight for output in layer.outputs)
            self._rebind(graph, view, operand, _smaller(operand, reduction, changed[operand.node] if is_output else {}))
        for output, values in zip(layer.outputs, shifted, strict=True):
            if values is not None:
                self._shift(graph, view, output, values)
        _narrow(graph, frozenset(layer.hidden), len(reduction.kept))

    def finish(self) -> onnx.ModelProto:
        """The edited copy, or the original object where nothing changed."""
        if self._copy is None:
            return self._original
        for path, added in self._added.items():
            graph = graph_at(self._copy, path)
            nodes = list(_with(graph.node, added))
            del graph.node[:]
            graph.node.extend(nodes)
        # Only now is it known which old weights nothing reads: blocks may share them, and each block is edited alone.
        for path, names in self._retired.items():
            for depth in range(len(path), -1, -1):  # a body may read weights of the graphs around it
                drop_dead_constants(graph_at(self._copy, path[:depth]), frozenset(names))
        return self._copy

    def _opened(self, path: Path) -> onnx.ModelProto:
        if self._copy is None:
            self._copy = onnx.ModelProto()
            self._copy.CopyFrom(self._original)
            self._names = set(_all_names(self._copy.graph))
        self._retired.setdefault(path, set())
        return self._copy

    def _rebind(self, graph: onnx.GraphProto, view: GraphView, operand: Operand, values: AnyArray) -> None:
        """Replace a constant input of a node, and leave the old one to `finish`: other nodes may read it."""
        name = self._initializer(graph, view.path, f"{operand.name}_merged", values)
        graph.node[operand.node].input[operand.slot] = name
        self._retired[view.path].add(operand.name)

    def _initializer(self, graph: onnx.GraphProto, path: Path, wanted: str, values: AnyArray) -> str:
        """The name of a new initializer; blocks that share a weight and lose the same neurons still share one."""
        # Keyed by the contents: equal weights of two blocks stay one tensor, as they were.
        tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(values))
        key = (path, tensor.data_type, tuple(tensor.dims), tensor.raw_data)
        if key not in self._known:
            tensor.name = self._known[key] = self._unique(wanted)
            graph.initializer.append(tensor)
        return self._known[key]

    def _shift(self, graph: onnx.GraphProto, view: GraphView, output: Output, values: AnyArray) -> None:
        """Add a constant to the output of a second operator: in its bias, or by an Add of its own."""
        if output.bias is not None:
            self._rebind(graph, view, output.bias, values)
            # The bias is in a separate Add: between the two the output lacks the constant that the neurons gave.
            if output.biased != output.operator.output:
                self.ends[output.operator.output] = output.biased
            return
        # The Add takes over the output's name, so that consumers and graph outputs need no edit.
        node = graph.node[output.operator.node]
        after = node.output[0]
        before = node.output[0] = self._unique(f"{after}_unshifted")
        constant = self._initializer(graph, view.path, f"{output.weight.name}_merged_bias", values)
        addition = onnx.helper.make_node("Add", [before, constant], [after], f"{node.name or after}_merged_bias")
        addition.metadata_props.extend(node.metadata_props)
        self._added.setdefault(view.path, {})[output.operator.node] = addition
        self.ends[before] = after

    def _unique(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self._names:
            number += 1
            name = f"{wanted}_{number}"
        self._names.add(name)
        return name


def _smaller(operand: Operand, reduction: Reduction, rows: Mapping[int, Array]) -> AnyArray:
    """The operand restricted to the kept neurons, with the changed rows of a second operator in place."""
    result = np.take(operand.array, reduction.kept, axis=operand.axis)
    by_neuron = np.moveaxis(result, operand.axis, 0)  # a view of it
    for position in np.flatnonzero(np.isin(reduction.kept, list(rows))):
        by_neuron[position] = rows[int(reduction.kept[position])].astype(result.dtype)
    return result


def _shifted(output: Output, shift: Array) -> AnyArray:
    """The bias of a second operator plus the constant, rounded once.

    Raises:
        NotPlainError: the sum is not finite in the output's type.
    """
    old = np.zeros_like(shift) if output.bias is None else output.bias.array.astype(np.float64)
    with np.errstate(all="ignore"):
        values = (old + shift).astype(output.weight.array.dtype)
    if not np.isfinite(values).all():
        raise NotPlainError("the sum of its constant neurons is too large for the output's bias")
    return values


def _with(nodes: Iterable[onnx.NodeProto], added: Mapping[int, onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Copies of the nodes, each followed by the node to insert after it."""
    for index, node in enumerate(nodes):
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        yield copy
        if index in added:
            yield added[index]


def _narrow(graph: onnx.GraphProto, tensors: frozenset[str], width: int) -> None:
    """Correct the declared width of the hidden tensors, where one is declared."""
    for value in graph.value_info:
        if value.name in tensors and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[-1].Clear()
            value.type.tensor_type.shape.dim[-1].dim_value = width


def _all_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Names of all tensors of a graph and its all_graphs."""
    for current in all_graphs(graph):
        yield from (value.name for value in (*current.input, *current.output, *current.initializer))
        for node in current.node:
            yield from (*node.input, *node.output)

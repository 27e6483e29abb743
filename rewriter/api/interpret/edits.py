"""Change what the readers of a tensor get, in a model that stays in one piece.

The node that computes tensor T then computes `T/computed`, and marked nodes make T from that: readers, names and
outputs stay. So a changed model can be changed again, and `unedited` gives back the model as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import ModelError, UsageError
from rewriter.files.external import read_external
from rewriter.files.load import MAX_FILE, LoadedModel
from rewriter.files.walk import is_external, iter_tensors
from rewriter.text import quoted

MARK = "attnonly.intervention"
"""Metadata key of the nodes made here; the value is the tensor that they change."""

_COMPUTED = "computed"


class Replacement(Protocol):
    """What takes a tensor's place."""

    def emit(self, nodes: Nodes) -> str:
        """Add nodes, and return the tensor that they make; it must broadcast to the one that it replaces."""


@dataclass(frozen=True, eq=False)
class Edit:
    """One change.

    Attributes:
        tensor: the tensor.
        replacement: what takes its place.
        where: which entries are replaced, a boolean array that broadcasts; None for all.
    """

    tensor: str
    replacement: Replacement
    where: Array | None


@dataclass(frozen=True, eq=False)
class Constant:
    """Stored values."""

    values: Array

    def emit(self, nodes: Nodes) -> str:
        """One constant."""
        return nodes.constant("values", self.values)


@dataclass(frozen=True, eq=False)
class Frozen:
    """`source * factor + offset`, entry by entry.

    Attributes:
        source: a tensor of the graph.
        factor: broadcasts with it.
        offset: likewise.
    """

    source: str
    factor: Array
    offset: Array

    def emit(self, nodes: Nodes) -> str:
        """In the shape of what is replaced."""
        product = nodes.node("Mul", [self.source, nodes.constant("factor", self.factor)])
        total = nodes.node("Add", [product, nodes.constant("offset", self.offset)])
        return nodes.node("Reshape", [total, nodes.shape()])


@dataclass(frozen=True, eq=False)
class Normalised:
    """`(source - mean) * factors * scale + bias`, a normalisation with given factors.

    Attributes:
        source: a tensor of the graph, [..., channels].
        factors: [..., 1], one over the denominators.
        scale: [channels].
        bias: [channels].
        centred: whether the mean is subtracted.
    """

    source: str
    factors: Array
    scale: Array
    bias: Array
    centred: bool

    def emit(self, nodes: Nodes) -> str:
        """In the shape of what is replaced. The mean is a product, since ReduceMean differs from opset to opset."""
        data, width = self.source, len(self.scale)
        if self.centred:
            average = nodes.constant("average", np.full((width, 1), 1.0 / width, self.scale.dtype))
            data = nodes.node("Sub", [data, nodes.node("MatMul", [data, average])])
        data = nodes.node("Mul", [data, nodes.constant("factors", self.factors)])
        data = nodes.node("Mul", [data, nodes.constant("scale", self.scale)])
        data = nodes.node("Add", [data, nodes.constant("bias", self.bias)])
        return nodes.node("Reshape", [data, nodes.shape()])


@dataclass
class Nodes:
    """The marked nodes of one edit.

    Attributes:
        tensor: the tensor that they change.
        computed: what the model computes there.
        made: the nodes so far.
    """

    tensor: str
    computed: str
    made: list[onnx.NodeProto] = field(default_factory=list)

    def constant(self, name: str, values: Array) -> str:
        """A Constant node: in old IR versions an initializer would change the model's signature."""
        output = f"{self.computed}/{name}"
        tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), output)
        self.made.append(onnx.helper.make_node("Constant", [], [output], output, value=tensor))
        return output

    def shape(self) -> str:
        """The shape of what is replaced."""
        return self.node("Shape", [self.computed])

    def node(self, op_type: str, inputs: Sequence[str], output: str = "") -> str:
        """One node."""
        name = output or f"{self.computed}/{op_type}_{len(self.made)}"
        self.made.append(onnx.helper.make_node(op_type, inputs, [name], f"{self.computed}/{op_type}_{len(self.made)}"))
        return name

    def marked(self) -> list[onnx.NodeProto]:
        """The nodes, with their mark."""
        for node in self.made:
            node.metadata_props.add(key=MARK, value=self.tensor)
        return self.made


def edit(model: onnx.ModelProto, edits: Sequence[Edit]) -> None:
    """Apply edits to the main graph of a model, in place."""
    for each in edits:
        names = {name for node in model.graph.node for name in node.output}
        computed = f"{each.tensor}/{_COMPUTED}"
        while computed in names:
            computed += "'"
        place = rename(model.graph, each.tensor, computed)
        nodes = Nodes(each.tensor, computed)
        made = each.replacement.emit(nodes)
        if each.where is not None:
            made = nodes.node("Where", [nodes.constant("where", each.where), made, computed])
        # A replacement of other sizes must not broadcast the model to these: Reshape then fails.
        nodes.node("Reshape", [made, nodes.shape()], each.tensor)
        for offset, node in enumerate(nodes.marked(), start=1):
            model.graph.node.insert(place + offset, node)


def rename(graph: onnx.GraphProto, tensor: str, name: str) -> int:
    """Let the node that makes `tensor` make `name` instead; its readers are left. Returns the node's index.

    Raises:
        KeyError: no node makes it.
    """
    for index, node in enumerate(graph.node):
        for place, output in enumerate(node.output):
            if output == tensor:
                node.output[place] = name
                return index
    raise KeyError(tensor)


def is_edited(model: onnx.ModelProto) -> bool:
    """Whether a model has marked nodes."""
    return any(_mark(node) for node in model.graph.node)


def unedited(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without the changes that were made here.

    Raises:
        ModelError: the marks do not fit the graph, as where another tool changed it.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    changed = {tensor for node in result.graph.node if (tensor := _mark(node))}
    for position in reversed(range(len(result.graph.node))):
        if _mark(result.graph.node[position]):
            del result.graph.node[position]
    for tensor in sorted(changed):
        try:
            rename(result.graph, f"{tensor}/{_COMPUTED}", tensor)
        except KeyError:
            what = "the model has nodes that are marked as interventions at"
            raise ModelError(f"{what} {quoted(tensor)}, which they do not fit; use the model before them") from None
    return result


def _mark(node: onnx.NodeProto) -> str:
    return next((str(entry.value) for entry in node.metadata_props if entry.key == MARK), "")


def self_contained(source: LoadedModel) -> onnx.ModelProto:
    """A copy of a model with all weights inline.

    Raises:
        UsageError: the model has 2 GiB or more, which no model in memory can have.
        ModelError: weights cannot be read.
    """
    if source.size > MAX_FILE:
        raise UsageError(f"the model has {source.size / 2**30:.1f} GiB; a model in memory can have less than 2")
    result = onnx.ModelProto()
    result.CopyFrom(source.proto)
    for tensor in iter_tensors(result):
        if is_external(tensor) and source.base_dir is not None:
            raw = read_external(tensor, source.base_dir).tobytes()
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = raw
    return result

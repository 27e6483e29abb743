"""The heads of earlier runs: what the plan in a file says of them, checked against the file's own nodes.

Nothing in a plan is believed. A block counts as heads if the tensors that it names exist, if the nodes between them
are those of heads and nothing else (`not_heads`), and if they compute what the plan says, to within its
bound and the rounding of the type: the activation, or the whole block with the weights that the plan names
(`passes.recompute`). Otherwise it is ignored with a note, and its nodes are nodes like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray

from passes.forms.whole import ROWS
from passes.match.projections import Projection
from passes.programs.activations import ACTIVATIONS, Activation
from passes.programs.program import Program
from passes.record import BlockRecord, BlockWeights, Stream, UnreadableError, read_record
from passes.values import UNFIT, LostError, Values
from rewriter.graph.constants import Read
from rewriter.graph.edit import inlined
from rewriter.graph.extract import Cut, extract, upstream
from rewriter.graph.types import FLOATS
from rewriter.graph.view import ONNX_DOMAINS, GraphView, Path, all_views, label, subgraphs, tensor_of

if TYPE_CHECKING:  # onnx's reference takes long to import, and only models with a plan need it
    from passes.recompute import Affine, Function, Part

_SMALL = 2**12
"""Elements of a constant that may be a bound of a Clip, or coefficients of heads."""

_TOKENS = (5, 1)
"""Sequence lengths that are tried where the model leaves them open."""


def inline_values(tensor: onnx.TensorProto) -> np.ndarray:
    """The values of a tensor that stand in the model itself. Raises ValueError if they are elsewhere."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise ValueError("its values are in another file")
    return onnx.numpy_helper.to_array(tensor)


class UntrueError(Exception):
    """The file is not what its plan says; the message says in what."""


@dataclass(frozen=True)
class Made:
    """A block that is heads already.

    Attributes:
        record: what the plan says of it, which is true.
        activation: its activation; None where only the fitted heads are known.
        nodes: outputs of the nodes of the heads.
    """

    record: BlockRecord
    activation: Activation | None
    nodes: frozenset[str]

    @property
    def label(self) -> str:
        """The activation, as reports print it."""
        named = self.record.activation if self.activation is None else self.activation.label(self.record.parameters)
        return f"{named}(gate) * value" if self.record.value else named


@dataclass(frozen=True)
class Recognised:
    """The heads of earlier runs in a model.

    Attributes:
        blocks: the blocks that are heads, in the order of the plan.
        functions: the local functions that they call, (domain, name).
        notes: what was ignored, and why.
    """

    blocks: tuple[Made, ...] = ()
    functions: frozenset[tuple[str, str]] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams of form `whole` that the blocks read; empty for a file of any other form."""
        found = (each.record.stream for each in self.blocks)
        return tuple(each for each in found if each is not None and each.tensor)

    @property
    def positions(self) -> int:
        """Columns of positions that the queries of the network's own heads have in form `whole`; otherwise 0."""
        return next((each.bias_tokens + each.max_tokens for each in self.streams), 0)

    def nodes(self, view: GraphView) -> frozenset[int]:
        """The nodes of heads in a graph of the model, or of its lowered form."""
        names = (name for each in self.blocks if each.record.path == view.path for name in each.nodes)
        return frozenset(view.producer[name] for name in names if name in view.producer)


def recognise(model: onnx.ModelProto, read: Read) -> Recognised:
    """The blocks of a model that are heads, by its plan and its nodes; `read` gives the values of a tensor."""
    try:
        record = read_record(model)
    except UnreadableError as error:
        return Recognised(notes=(f"the plan in the file's metadata is ignored: {error}",))
    if record is None:
        return Recognised()
    views = {view.path: view for view in all_views(model)}
    made: list[Made] = []
    notes: list[str] = []
    for block in record.blocks:
        try:
            made.append(_checked(model, views, block, read))
        except UntrueError as error:
            notes.append(f"the plan in the file's metadata is ignored for block {block.name}: {error}")
    return Recognised(tuple(made), frozenset(_called(model, views, made)), tuple(notes))


def _checked(model: onnx.ModelProto, views: Mapping[Path, GraphView], block: BlockRecord, read: Read) -> Made:
    if block.path not in views:
        raise UntrueError("the graph that should contain it does not exist")
    return _Check(model, views[block.path], block, read).made()


def _called(model: onnx.ModelProto, views: Mapping[Path, GraphView], made: Sequence[Made]) -> Iterator[tuple[str, str]]:
    known = {(function.domain, function.name) for function in model.functions}
    for each in made:
        view = views[each.record.path]
        for name in each.nodes:
            node = view.nodes[view.producer[name]]
            if (node.domain, node.op_type) in known:
                yield node.domain, node.op_type


@dataclass(frozen=True, eq=False)
class _Check:
    """The claims about one block, and the graph in which they should hold."""

    model: onnx.ModelProto
    view: GraphView
    block: BlockRecord
    read: Read

    def made(self) -> Made:
        """The block. Raises UntrueError."""
        block, weights = self.block, self.block.weights
        starts = (block.y, block.value) if weights is None else (weights.query.data,)
        part = self._part([name for name in starts if name], block.output if weights is None else weights.result)
        alone = self._alone(part)
        data = [name for name in (*starts, "" if block.stream is None else block.stream.tensor) if name]
        stray = not_heads(alone.graph, data)
        if stray is not None:
            raise UntrueError(stray)
        activation = self._activation()
        error = self._error(alone, self._function(activation))
        if error > block.bound + block.rounding:
            what = f"{block.activation} within {block.bound + block.rounding:.2g}"
            raise UntrueError(f"its nodes do not compute {what}: they are off by {error:.2g}")
        constant = self.view.constants
        nodes = (name for index in part.nodes for name in self.view.nodes[index].output if name not in constant)
        return Made(block, activation, frozenset(filter(None, nodes)))

    # -- what is claimed -------------------------------------------------------------------------------------------

    def _activation(self) -> Activation | None:
        if self.block.heads:
            return None
        found = next((each for each in ACTIVATIONS if each.name == self.block.activation), None)
        if found is None or len(found.parameters) != len(self.block.parameters):
            raise UntrueError(f"the table has no activation '{self.block.activation}' with so many parameters")
        return found

    def _function(self, activation: Activation | None) -> Function:
        if activation is None:
            return Program(self.block.program, self.block.heads).evaluate
        return lambda y: activation.function(y, self.block.parameters)

    def _affine(self, matrix: Projection) -> Affine:
        from passes.recompute import Affine

        values = Values(self.view, self.read, lambda _: None)
        try:
            weight = values.of(matrix.weight).astype(np.float64)
            weight = (weight.T if matrix.transposed else weight)[:, matrix.start : matrix.stop]
            biases = [values.of(each.name).astype(np.float64).reshape(-1) for each in matrix.biases]
            parts = [bias[each.start : each.stop] for bias, each in zip(biases, matrix.biases, strict=True)]
            bias = np.asarray(sum(parts, np.zeros(1)))
        except (LostError, *UNFIT) as error:
            raise UntrueError(f"'{matrix.weight}' and its biases are no constants of a linear operator") from error
        if weight.shape != (matrix.in_features, matrix.out_features) or bias.shape not in ((1,), weight.shape[1:]):
            raise UntrueError(f"'{matrix.weight}' and its biases have other shapes than the plan says")
        return Affine(weight, bias)

    # -- the part of the graph -------------------------------------------------------------------------------------

    def _part(self, starts: Sequence[str], end: str) -> Cut:
        for name in (*starts, end):
            if name not in self.view.producer and name not in self.view.inputs:
                raise UntrueError(f"there is no tensor '{name}'")
            if self.view.type_of(name).elem_type not in (0, *FLOATS):
                raise UntrueError(f"'{name}' is not of a floating-point type")
        stream = self.block.stream
        further = set() if stream is None else {ROWS, stream.tensor}
        part = upstream(self.view, frozenset((*starts, *further)), [end])
        stray = next((name for name in part.inputs if name not in starts and name not in further), None)
        if stray is not None:
            raise UntrueError(f"'{end}' also depends on '{stray}'")
        missing = next((name for name in starts if name not in part.inputs), None)
        if missing is not None:
            raise UntrueError(f"'{end}' does not depend on '{missing}'")
        if stream is not None and stream.tensor not in part.inputs:
            raise UntrueError(f"'{end}' reads no stream of the network's")
        return part

    def _alone(self, part: Cut) -> onnx.ModelProto:
        """The part as a model without functions, whose large constants are inputs."""
        alone = extract(self.model, self.view, part, self._held)
        large = [tensor for tensor in alone.graph.initializer if not tensor.data_type]
        for tensor in large:
            alone.graph.input.add(name=tensor.name)
            alone.graph.initializer.remove(tensor)
        try:
            return inlined(alone) if alone.functions else alone
        except RuntimeError as error:
            raise UntrueError("its functions cannot be inlined") from error

    def _held(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """The tensor with its values if it is small; its name alone otherwise."""
        if tensor.name in self.view.overridable:
            raise UntrueError(f"a caller may override '{tensor.name}'")
        if int(np.prod(tensor.dims, dtype=np.float64)) > _SMALL:
            return onnx.TensorProto(name=tensor.name)
        return onnx.numpy_helper.from_array(self._values(tensor), tensor.name)

    def _values(self, tensor: onnx.TensorProto) -> np.ndarray:
        try:
            return self.read(tensor)
        except Exception as error:  # whatever is wrong with it, the plan cannot be checked
            raise UntrueError(f"'{tensor.name}' cannot be read") from error

    # -- what the nodes compute ------------------------------------------------------------------------------------

    def _error(self, alone: onnx.ModelProto, function: Function) -> float:
        from passes.recompute import NotRunError, Part

        weights, large = self.block.weights, {value.name for value in alone.graph.input} & set(self.view.initializers)
        values = {name: self._values(self.view.initializers[name]) for name in large}
        part = Part(alone, values, self.view.type_of)
        reason = ""
        for tokens in _TOKENS:
            try:
                return (
                    self._activation_error(part, function, tokens)
                    if weights is None
                    else self._block_error(part, function, weights, tokens)
                )
            except NotRunError as error:
                reason = str(error)
        raise UntrueError(f"its nodes cannot be run: {reason}")

    def _activation_error(self, part: Part, function: Function, tokens: int) -> float:
        from passes.recompute import activation_error

        names = self.block.y, self.block.value, self.block.output
        return activation_error(part, function, names, self.block.domain, tokens)

    def _block_error(self, part: Part, function: Function, weights: BlockWeights, tokens: int) -> float:
        from passes.recompute import block_error

        matrices = weights.value, weights.query, weights.output
        used = {name for node in part.model.graph.node for name in (*node.input, *node.output)}
        named = (name for each in matrices for name in (each.weight, *(bias.name for bias in each.biases)))
        unread = next((name for name in named if name not in used), None)
        if unread is not None:
            raise UntrueError(f"its nodes do not read '{unread}'")
        first, gate, second = (self._affine(each) for each in matrices)
        if first.weight.shape != gate.weight.shape or second.weight.shape[0] != first.weight.shape[1]:
            raise UntrueError("the shapes of its weights do not fit together")
        affine = first, gate if self.block.value else None, second
        names = weights.query.data, weights.result
        return block_error(part, function, affine, names, self.block.stream, tokens)


# -- nothing but heads ------------------------------------------------------------------------------------------------
#
# What depends on the inputs is followed in graph order. Operators that choose between numbers (Max, Clip, Where, a
# comparison) make up most activations; heads apply them to logits and to masks alone. So what they choose may reach an
# output only through an exponential or a softmax, and there must be one.

_PLAIN = {
    *("Add", "Cast", "Concat", "Constant", "Div", "Exp", "Expand", "Gather", "Identity", "MatMul", "Mul", "Neg", "Pad"),
    *("Range", "Reciprocal", "Reshape", "Shape", "Slice", "Split", "Squeeze", "Sub", "Transpose", "Unsqueeze"),
    *("And", "Attention", "Not", "Or", "Softmax"),
}
_CHOOSING = {"Clip", "Equal", "Less", "Max", "Min", "Where"}
_BOUNDING = ("Clip", "Max", "Min")

_FINITE = 2.0**40
"""A bound of this size or more changes no number that a network has; it keeps one finite."""

_VALUES = 2
"""The input of the operator Attention that takes the values."""


def not_heads(graph: onnx.GraphProto, data: Collection[str]) -> str | None:
    """Why a graph, its functions inlined, is more than attention heads on the tensors `data`; None if it is not."""
    walk = _Walk(set(data))
    walk.constants.update({tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer})
    stray = walk.follow(graph)
    if stray is not None:
        return stray
    if not walk.softmax:
        return "there is no softmax in it"
    chosen = next((value.name for value in graph.output if value.name in walk.chosen), None)
    return None if chosen is None else f"'{chosen}' is chosen between numbers outside of a softmax"


@dataclass
class _Walk:
    """What is known of tensors: which depend on the inputs, and which of them are a choice between numbers."""

    depends: set[str]
    chosen: set[str] = field(default_factory=set)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    softmax: bool = False

    def follow(self, graph: onnx.GraphProto) -> str | None:
        """Go through the nodes; the first that no head has, if there is one."""
        for node in graph.node:
            if node.op_type not in _PLAIN | _CHOOSING or node.domain not in ONNX_DOMAINS:
                return f"{label(node)} is no operator of heads"
            if node.op_type == "Constant" and (tensor := tensor_of(node)) is not None:
                self.constants[node.output[0]] = onnx.numpy_helper.to_array(tensor)
            stray = self._step(node)
            if stray is not None:
                return stray
        return None

    def _step(self, node: onnx.NodeProto) -> str | None:
        if any(True for _ in subgraphs(node)):
            return f"{label(node)} is no operator of heads"
        read = [name for name in node.input if name]
        depends = node.op_type != "Shape" and any(name in self.depends for name in read)
        if not depends:
            return None
        self.depends.update(node.output)
        if node.op_type in ("Exp", "Softmax", "Attention"):
            self.softmax = True
            chosen = node.op_type == "Attention" and node.input[_VALUES] in self.chosen
        else:
            chosen = self._chooses(node, read) or any(name in self.chosen for name in read)
        self.chosen.update(node.output if chosen else ())
        return None

    def _chooses(self, node: onnx.NodeProto, read: Sequence[str]) -> bool:
        """Whether what a node chooses depends on data; a mask does not."""
        if node.op_type == "Where":
            return node.input[0] in self.depends
        return node.op_type in _CHOOSING and not (node.op_type in _BOUNDING and self._bounds(node, read))

    def _bounds(self, node: onnx.NodeProto, read: Sequence[str]) -> bool:
        """Whether a node only keeps numbers finite."""
        limits = [np.asarray(entry.f) for entry in node.attribute]
        for name in read:
            if name not in self.depends:
                if name not in self.constants:
                    return False
                limits.append(self.constants[name])
        return bool(limits) and all(bool(np.all(np.abs(each.astype(np.float64)) >= _FINITE)) for each in limits)

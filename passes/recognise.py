"""The heads of earlier runs: the plan in a file, checked against the file's own nodes.

No plan is trusted. A block counts as heads if its program computes the activation that the plan names, and if the file
has exactly the nodes and constants that the form emits for that program. Otherwise the plan is ignored with a note, and
its nodes are treated like any others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.fit.unnamed import NAME
from passes.forms import FORMS
from passes.match.blocks import Block, Dataflow
from passes.match.identify import Identified, Region
from passes.match.linear import LinearOperator
from passes.programs.activations import ACTIVATIONS, LINEAR, Activation
from passes.programs.program import grid
from passes.record import BlockRecord, UnreadableError, read_record
from rewriter.graph.constants import UNFIT, Constants, Read
from rewriter.graph.edit import Replacement
from rewriter.graph.view import SAME_NUMBERS, GraphView, all_views

_LARGEST_POINT = 1e3  # the largest
_ROUNDING = 1e-7  # of that comparison in float64, where gates are differences of large terms


def inline_values(tensor: onnx.TensorProto) -> np.ndarray:
    """The values of a tensor in the model itself. Raises ValueError if they are elsewhere."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise ValueError("its values are in another file")
    return onnx.numpy_helper.to_array(tensor)


class MetadataMismatchError(Exception):
    """The file contradicts its plan."""


@dataclass(frozen=True)
class Made:
    """A block that was converted earlier; its heads call `functions`, (domain, name).

    The activation is None where only the fitted heads are known.
    """

    record: BlockRecord
    activation: Activation | None
    nodes: frozenset[str]
    functions: frozenset[tuple[str, str]]

    @property
    def label(self) -> str:
        named = self.record.activation if self.activation is None else self.activation.label(self.record.parameters)
        return f"{named}(gate) * value" if self.record.value else named


@dataclass(frozen=True)
class Recognised:
    """The heads of earlier runs in a model; the notes say what was ignored, and why."""

    blocks: tuple[Made, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def functions(self) -> frozenset[tuple[str, str]]:
        return frozenset[tuple[str, str]]().union(*(each.functions for each in self.blocks))

    @property
    def positions(self) -> int:
        """Columns of positions that the queries of the network's own heads have in form `whole`; otherwise 0."""
        records = (each.record for each in self.blocks if each.record.carried)
        return next((each.carried + each.options.positions for each in records), 0)

    def nodes(self, view: GraphView) -> frozenset[int]:
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
    graphs = {view.path: _Graph(model, view, read) for view in all_views(model)}
    made: list[Made] = []
    notes: list[str] = []
    for block in record.blocks:
        try:
            made.append(graphs[block.path].made(block))
        except (KeyError, MetadataMismatchError) as error:
            reason = "the graph that should contain it does not exist" if isinstance(error, KeyError) else error
            notes.append(f"the plan in the file's metadata is ignored for block {block.name}: {reason}")
    return Recognised(tuple(made), tuple(notes))


@dataclass(frozen=True, eq=False)
class _Graph:
    model: onnx.ModelProto
    view: GraphView
    read: Read

    @cached_property
    def _flow(self) -> Dataflow:
        return Dataflow(self.view, Constants(self.view))

    def made(self, record: BlockRecord) -> Made:
        activation = _activation(record)
        self._check_weights(record)
        block = block_of(self.view, self._flow, record, activation)
        conversion = Conversion(block=block, **record.keywords)
        try:
            with np.errstate(all="ignore"):
                written = FORMS[record.form].emit(self.view, conversion)
        except (ArithmeticError, *UNFIT) as error:
            raise MetadataMismatchError(f"no heads can be written for {record.program.name}") from error
        parts = (written, *written.further)
        nodes = [name for part in parts for name in self._same_nodes(part)]
        nodes += [name for part in parts for name in self._same_constants(part)]
        for function in written.functions:
            if function not in self.model.functions:
                raise MetadataMismatchError(f"its function '{function.name}' is another one")
        functions = frozenset((each.domain, each.name) for each in written.functions)
        return Made(record, activation, frozenset(nodes), functions)

    def _same_nodes(self, part: Replacement) -> Iterator[str]:
        """The outputs of the nodes. Raises MetadataMismatchError if the graph has others."""
        for node in part.nodes:
            found = self.view.made_by(node.output[0])
            if found is None or _described(found) != _described(node):
                raise MetadataMismatchError(f"'{node.output[0]}' is not what the heads of the plan would be")
            yield from node.output

    def _same_constants(self, part: Replacement) -> Iterator[str]:
        """The outputs of Constant nodes, as in old models. Raises MetadataMismatchError if the graph has others."""
        values = Constants(self.view, self.read, lambda _: None)
        for tensor in part.initializers:
            wanted = onnx.numpy_helper.to_array(tensor)
            try:
                found = values.of(tensor.name)
            except Exception as error:  # without the values the plan cannot be checked
                raise MetadataMismatchError(f"'{tensor.name}' cannot be read") from error
            if found.dtype != wanted.dtype or not np.array_equal(found, wanted):
                raise MetadataMismatchError(f"'{tensor.name}' has other values than the heads of the plan")
            if tensor.name in self.view.producer:
                yield tensor.name

    def _check_weights(self, record: BlockRecord) -> None:
        whole, constants = record.projections, Constants(self.view)
        for each in () if whole is None else (whole.query, whole.value, whole.output):
            shape = constants.shape(each.weight) if each.weight in constants else None
            rows, columns = (shape[::-1] if each.transposed else shape) if shape and len(shape) == 2 else (0, 0)
            stop = columns if each.stop is None else each.stop
            if not rows or (rows, stop - each.start) != (each.in_features, each.out_features) or stop > columns:
                raise MetadataMismatchError(f"'{each.weight}' has another shape than in the plan, or is not constant")
            for bias in each.biases:
                if bias.name not in constants:
                    raise MetadataMismatchError(f"'{bias.name}' is not constant")


def _described(node: onnx.NodeProto) -> tuple[object, ...]:
    return node.op_type, node.domain, list(node.input), list(node.output), list(node.attribute)


def _activation(record: BlockRecord) -> Activation | None:
    """The activation that the program computes; None if unnamed. Raises MetadataMismatchError."""
    if record.activation == NAME:
        return None
    found = next((each for each in (*ACTIVATIONS, LINEAR) if each.name == record.activation), None)
    if found is None or len(found.parameters) != len(record.parameters):
        raise MetadataMismatchError(f"the table has no activation '{record.activation}' with so many parameters")
    program = record.program
    with np.errstate(all="ignore"):
        try:
            y = grid(min(program.domain, _LARGEST_POINT), program)
            f = found.function(y, record.parameters)
            made = program.evaluate(y, np.ones_like(y) if record.value else y)
            error = float(np.max(np.abs(made - f) / np.maximum(1.0, np.abs(f))))
        except (ArithmeticError, *UNFIT) as reason:
            raise MetadataMismatchError(f"{program.name} cannot be evaluated") from reason
    if not error <= record.bound + _ROUNDING:
        raise MetadataMismatchError(
            f"{program.name} is off by {error:.2g} from {record.activation}, more than the plan says"
        )
    return found


def block_of(view: GraphView, flow: Dataflow, record: BlockRecord, activation: Activation | None) -> Block:
    """The block of a record; without linear operators where these were replaced too."""
    gate, value, whole = record.y, record.value or record.y, record.projections is not None
    named = (LINEAR, LINEAR.usual) if activation is None else (activation, record.parameters)
    leaves = () if whole else dict.fromkeys((gate, value))
    return Block(
        name=record.name,
        where=view.where,
        path=view.path,
        region=Region(record.output, tuple(dict.fromkeys((gate, value))), ()),
        gate=gate,
        value=value,
        first=tuple(operator for leaf in leaves for operator in flow.leaf(leaf).operators),
        second=() if whole else tuple(_readers(view, flow, record.output)),
        identified=Identified(*named, 0.0, (0, 1) if record.value else None),
        elem_type=record.types[0],
        gate_type=record.types[1],
        value_type=record.types[2],
    )


def _readers(view: GraphView, flow: Dataflow, tensor: str) -> Iterator[LinearOperator]:
    for index in view.consumers.get(tensor, ()):
        operator = flow.operators.get(index)
        node = view.nodes[index]
        if operator is not None:
            yield operator
        elif node.op_type in SAME_NUMBERS and node.input[0] == tensor:
            yield from _readers(view, flow, node.output[0])

"""The heads that an MLP block is: one per neuron and head of its program, in terms of the model's own weights.

A file that an earlier run rewrote gives the same heads as its original: its marks name the block and the activation,
and the weights are still in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from passes.forms import choose
from passes.match.blocks import Block
from passes.match.dataflow import Dataflow, analyse
from passes.match.identify import Identified, Region
from passes.match.linear import LinearOperator, Miss
from passes.match.marks import DOMAIN, made_for
from passes.match.projections import Projection, Projections, Vector, projections_of
from passes.network.names import PREFIX
from passes.options import Accuracy
from passes.plan import Plan
from passes.programs.activations import ACTIVATIONS
from passes.programs.groups import Group, groups_of
from passes.programs.program import Program
from rewriter.graph.constants import Constants
from rewriter.graph.types import FLOATS
from rewriter.graph.view import GraphView

PROGRAMS = {"fewest": "masked", "fast": "local"}
"""Which form's program the neurons' heads are: that with the fewest heads, or that with the fewest operations."""

_PARAMETERS = re.compile(r"(\w+)=([-+0-9.e]+)")


@dataclass(frozen=True, eq=False)
class NeuronHeads:
    """The heads of one block; head `g * neurons + n` is head g of the program, for neuron n.

    Attributes:
        name: the block's name.
        node: index of the node by which blocks are ordered.
        data: the block's input.
        query: W1 of the pre-activation y.
        value: W1 of what the values read: the same, or the other projection of a gated block.
        output: W2.
        result: the block's output.
        activation: the activation.
        program: the program as plain heads.
        gate: the tensor y; empty in a file where it is no tensor.
        own: the tensor that the values read; empty where `gate` is.
    """

    name: str
    node: int
    data: str
    query: Projection
    value: Projection
    output: Projection
    result: str
    activation: str
    program: Program
    gate: str
    own: str

    @property
    def groups(self) -> tuple[Group, ...]:
        """The heads of one neuron."""
        return groups_of(self.program)

    @property
    def neurons(self) -> int:
        """The number of neurons."""
        return self.query.out_features

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.neurons * len(self.groups)

    @property
    def bias_tokens(self) -> int:
        """m: bias tokens of the head with the most of them."""
        return max(group.bias_tokens for group in self.groups)

    @property
    def dimension(self) -> int:
        """d_head of queries and keys: 1, or 2 for (y, 1), where logits have offsets or heads lack bias tokens."""
        lacking = len({group.bias_tokens for group in self.groups}) > 1
        return 2 if lacking else max(group.dimension for group in self.groups)


def find_neurons(plan: Plan, program: str) -> tuple[tuple[NeuronHeads, ...], tuple[Miss, ...]]:
    """The neuron heads of the main graph in order, and the blocks that have none; `program` is a key of `PROGRAMS`."""
    view = plan.views[0]
    left = [each for each in plan.left if each.miss.reason != "it is attention heads already"]
    missed = [Miss(f"block {each.name}: {each.miss.reason}", each.miss.node) for each in left]
    made: list[NeuronHeads | Miss] = []
    for block in (conversion.block for conversion in plan.conversions):
        if block.path:
            made.append(Miss(f"block {block.name}: it is in the body {block.where}", block.output))
        else:
            made.append(_heads(view, block, projections_of(view, block), program))
    made += _rewritten(view, program)
    found = [each for each in made if isinstance(each, NeuronHeads)]
    missed += [each for each in made if isinstance(each, Miss)]
    return tuple(sorted(found, key=lambda each: each.node)), tuple(missed)


def _heads(
    view: GraphView, block: Block, projections: Projections | Miss, program: str, *, whole: bool = False
) -> NeuronHeads | Miss:
    if isinstance(projections, Miss):
        return Miss(f"block {block.name}: {projections.reason}", projections.node)
    chosen = choose(view, block, PROGRAMS[program], Accuracy(), inline=True)
    if isinstance(chosen, Miss):
        return Miss(f"block {block.name}: {chosen.reason}", chosen.node)
    return NeuronHeads(
        name=block.name,
        node=view.producer[block.output],
        data=projections.query.data,
        query=projections.query,
        value=projections.value,
        output=projections.output,
        result=projections.result,
        activation=block.identified.label,
        program=chosen.program.as_heads,
        gate="" if whole else block.gate,
        own="" if whole else block.value,
    )


# -- blocks that are heads already -------------------------------------------------------------------------------


def _rewritten(view: GraphView, program: str) -> Iterator[NeuronHeads | Miss]:
    blocks: dict[str, list[int]] = {}
    for index, node in enumerate(view.nodes):
        name = made_for(node)
        if name is not None:
            blocks.setdefault(name, []).append(index)
    if not blocks:
        return
    constants = Constants(view)
    flow = analyse(view, constants)
    for name, nodes in blocks.items():
        marked = _Marked(view, constants, flow, name, tuple(nodes))
        made = marked.heads(program)
        yield (
            made
            if not isinstance(made, Miss)
            else Miss(f"block {name} is attention heads already, and {made.reason}; index the original", made.node)
        )


@dataclass(frozen=True, eq=False)
class _Marked:
    """The nodes that an earlier run made for a block."""

    view: GraphView
    constants: Constants
    flow: Dataflow
    name: str
    nodes: tuple[int, ...]

    def heads(self, program: str) -> NeuronHeads | Miss:
        identified = _activation(self._prop("activation"))
        if identified is None:
            return Miss(f"its activation '{self._prop('activation')}' is not in the table", self.name)
        made = {name for index in self.nodes for name in self.view.nodes[index].output}
        read = dict.fromkeys(name for index in self.nodes for name in self.view.nodes[index].input if name)
        data = [name for name in read if name not in made and name not in self.constants]
        data = [name for name in data if self.view.type_of(name).elem_type in (0, *FLOATS)]
        # Sizes that other nodes read are computed again by the marked nodes, so results are the floats among the ends.
        # Three sublayers on the network's stream have two more, under names of the network's.
        made = {name for name in made if not name.startswith(f"{PREFIX}/")}
        ends = [name for name in made if self._leaves(name) and self.view.type_of(name).elem_type in (0, *FLOATS)]
        if len(ends) != 1 or not data:
            return Miss("its nodes do not have one result", self.name)
        if self._prop("projections"):
            return self._whole(identified, data[0], ends[0], program)
        return self._activation_only(identified, data, ends[0], program)

    def _leaves(self, name: str) -> bool:
        """Whether anything but the marked nodes reads a tensor."""
        readers = self.view.consumers.get(name, ())
        outside = name in self.view.outputs or any(reader not in self.nodes for reader in readers)
        return outside and name not in self.constants

    def _prop(self, key: str) -> str:
        return next(
            (
                str(entry.value)
                for index in self.nodes
                for entry in self.view.nodes[index].metadata_props
                if entry.key == f"{DOMAIN}.{key}"
            ),
            "",
        )

    def _activation_only(self, identified: Identified, data: list[str], end: str, program: str) -> NeuronHeads | Miss:
        """The linear operators are still there, as they were."""
        value = data[0]
        if identified.gated is not None:
            last = self.view.made_by(end)
            while last is not None and last.op_type == "Cast":
                last = self.view.made_by(last.input[0])
            read = [] if last is None else [self._through_casts(name) for name in last.input]
            value = next((name for name in data if name in read), "")
            if len(data) != 2 or not value:
                return Miss("gate and value cannot be told apart", self.name)
        gate = next((name for name in data if name != value), value)
        block = self._block(identified, gate, value, end, tuple(self._sources(gate, value)), tuple(self._readers(end)))
        return _heads(self.view, block, projections_of(self.view, block), program)

    def _through_casts(self, name: str) -> str:
        node = self.view.made_by(name)
        return name if node is None or node.op_type != "Cast" else node.input[0]

    def _sources(self, *leaves: str) -> Iterator[LinearOperator]:
        for leaf in dict.fromkeys(leaves):
            source = self.flow.source_of(leaf)
            yield from () if source is None else source.operators

    def _readers(self, tensor: str) -> Iterator[LinearOperator]:
        """The linear operators that read a tensor, through whatever keeps its entries in order."""
        for index in self.view.consumers.get(tensor, ()):
            operator = self.flow.operators.get(index)
            node = self.view.nodes[index]
            if operator is not None:
                yield operator
            elif node.op_type in ("Reshape", "Identity", "Cast", "Flatten") and node.input[0] == tensor:
                yield from self._readers(node.output[0])

    def _whole(self, identified: Identified, data: str, end: str, program: str) -> NeuronHeads | Miss:
        """The linear operators are weights of the sublayer."""
        gated = identified.gated is not None
        whole = self._prop("form") == "whole"
        staged = self._prop("form") == "staged" or (whole and bool(self._made("linear_1_reads")))
        # The first of three sublayers has the gate's weights in front of the value's.
        linear = "W_V_linear_1_0" if gated else "W_V_linear_1"
        first = linear if staged else "W_Q_first" if self._made("W_Q_first_columns") else "W_Q"
        if whole:
            # The marked nodes read the model's columns and the stream's further ones; the block's input is the former.
            names = ("in_batches", "input_wide" if staged else "stream", "linear_1_reads")
            data = next((made for name in names if (made := self._made(name))), data)
            first = first if staged else "W_Q_y"
        query = self._functional(data, first)
        second = "W_V_linear_1_1" if staged else "W_V_z" if whole else "W_V"
        value = self._functional(data, second) if gated else query
        rows = self._made("W_V_linear_2_columns" if staged else "W_O")
        if isinstance(query, Miss) or isinstance(value, Miss) or not rows:
            return Miss("its weights are not where this version writes them", self.name)
        shape = self.constants.shape(rows) or (0, 0)
        width = shape[0] if staged else shape[1]
        biases = self._biases("W_V_linear_2" if staged else "b_O")
        output = Projection(self._qualified("z"), rows, staged, query.out_features, width, biases)
        block = self._block(identified, data, data, end, (), ())
        rank = self.view.type_of(data).rank or 0
        return _heads(self.view, block, Projections(query, value, output, end, rank, rank), program, whole=True)

    def _qualified(self, name: str) -> str:
        return f"{self.name}/heads/{name}"

    def _made(self, name: str) -> str:
        """What the node that makes a tensor of the block reads first; empty where there is no such tensor."""
        node = self.view.made_by(self._qualified(name))
        return "" if node is None else node.input[0]

    def _functional(self, data: str, name: str) -> Projection | Miss:
        matrix = self._made(f"{name}_columns")
        shape = self.constants.shape(self._qualified(f"{name}_columns"))
        if not matrix or shape is None:
            return Miss("its weights are not where this version writes them", self.name)
        return Projection(data, matrix, True, shape[1], shape[0], self._biases(name))

    def _biases(self, name: str) -> tuple[Vector, ...]:
        numbered = [f"{name}_bias_{number}" for number in range(len(self.nodes))]
        found = [self._qualified(each) for each in numbered if self._made(each)]
        return tuple(Vector(each, (self.constants.shape(each) or (0,))[0]) for each in found)

    def _block(
        self,
        identified: Identified,
        gate: str,
        value: str,
        output: str,
        first: tuple[LinearOperator, ...],
        second: tuple[LinearOperator, ...],
    ) -> Block:
        types = [self.view.type_of(name).elem_type for name in (gate, value)]
        elem_type = self.view.type_of(output).elem_type or types[0]
        region = Region(output, tuple(dict.fromkeys((gate, value))), self.nodes)
        name, where, path = self.name, self.view.where, self.view.path
        return Block(name, where, path, region, gate, value, first, second, identified, elem_type, types[0], types[1])


def _activation(label: str) -> Identified | None:
    """The activation that a mark names; None if the table does not have it."""
    named = label.removesuffix("(gate) * value")
    gated = None if named == label else (0, 1)
    name, _, rest = named.partition("(")
    if name == "quick_gelu":
        name, rest = "silu", "beta=1.702, scale=1"
    activation = next((each for each in ACTIVATIONS if each.name == name and each.program is not None), None)
    if activation is None:
        return None
    stated = tuple(float(number) for _, number in _PARAMETERS.findall(rest))
    parameters = stated or activation.usual
    if len(parameters) != len(activation.parameters):
        return None
    return Identified(activation, parameters, 0.0, gated)

"""Finding the MLP blocks of one graph: linear operator, activation, linear operator.

The ends of a block are structural (`passes.match.dataflow`), its middle is semantic (`passes.match.identify`). Every
rejected candidate is reported with its reason. The graph is not changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx

from passes.fit.unnamed import unnamed
from passes.match.dataflow import Dataflow, analyse
from passes.match.identify import Identified, Identifier, Region, Unknown
from passes.match.linear import LinearOperator, Miss
from passes.match.names import Namer
from rewriter.graph.constants import Constants
from rewriter.graph.types import FLOATS
from rewriter.graph.view import GraphView, Path, label

_BFLOAT16, _FLOAT16, _FLOAT = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT


@dataclass(frozen=True)
class Block:
    """One MLP block.

    Attributes:
        name: unique in the model; the module path where the exporter recorded one.
        where: the scope, empty for the main graph.
        path: the path from the main graph to the graph that contains it.
        region: the nodes between the pre-activation and the second operator's input.
        gate: the pre-activation y (of the gate, in a gated block).
        value: the factor of the activation in a gated block; the gate itself otherwise.
        first: the linear operators that produce the pre-activations.
        second: the linear operators that consume the activation's output.
        identified: the activation.
        elem_type: TensorProto element type of the activation's output, 0 when unknown.
        gate_type: that of the gate, which differs where the region contains casts.
        value_type: that of the value.
        channels: size of the last axis of the output, None where unknown.
        product: whether only h(gate) of a gated block is replaced, and its product with the value stays in the graph.
    """

    name: str
    where: str
    path: Path
    region: Region
    gate: str
    value: str
    first: tuple[LinearOperator, ...]
    second: tuple[LinearOperator, ...]
    identified: Identified
    elem_type: int
    gate_type: int
    value_type: int
    channels: int | None = None
    product: bool = False

    @property
    def output(self) -> str:
        """The output of the block's activation region."""
        return self.region.output

    @property
    def coarsest(self) -> int:
        """The least precise of the three types, by which the block's accuracy is judged."""
        # bfloat16 has fewer digits than float16 and comes first.
        order = (_BFLOAT16, _FLOAT16, _FLOAT)
        types = (self.elem_type, self.gate_type, self.value_type)
        return next((elem_type for elem_type in order if elem_type in types), self.elem_type)

    @property
    def neurons(self) -> int | None:
        """d_ff: channels of the activation, None where the weights' shapes do not say."""
        # W1 last: one that holds gate and value side by side has 2 d_ff columns.
        known = [*(op.in_features for op in self.second), self.channels, *(op.out_features for op in self.first)]
        return next((size for size in known if size), None)


@dataclass(frozen=True)
class Left:
    """A rejected candidate, or a block that is not converted, and why."""

    name: str
    where: str
    activation: str
    first: str
    second: str
    miss: Miss
    block: Block | None = None


@dataclass(frozen=True)
class Findings:
    """The blocks and rejected candidates of one graph, in graph order."""

    blocks: tuple[Block, ...]
    left: tuple[Left, ...]


OPAQUE = {
    **dict.fromkeys(
        ("MoE", "QMoE", "MoEPacked"),
        "its experts are inside one operator; export them as plain operators to have them converted",
    ),
    **dict.fromkeys(
        ("MatMulNBitsMlp", "FusedMatMulActivation", "BiasSplitGelu", "GatedRMSNorm"),
        "its activation is inside one operator; write the model without this fusion to have it converted",
    ),
}
"""Operators with MLPs or activations inside, which this pass cannot take apart."""


def find(
    view: GraphView,
    namer: Namer,
    *,
    scope: str = "mlp",
    gate: str = "heads",
    fit: bool = False,
    made: frozenset[int] = frozenset(),
) -> Findings:
    """Find all MLP blocks and near misses, in time linear in the number of nodes.

    Args:
        view: the graph.
        namer: names the blocks.
        scope: a member of `passes.options.SCOPES`.
        gate: a member of `passes.options.GATES`.
        fit: whether functions without a table entry count as activations.
        made: nodes of heads that an earlier run made.
    """
    constants = Constants(view)
    flow = analyse(view, constants)
    return _Finder(
        view, flow, Identifier(view, constants), namer, _Choices(scope == "all", gate == "product", fit, made)
    ).run()


@dataclass(frozen=True)
class _Choices:
    every: bool
    product: bool
    fit: bool
    made: frozenset[int]


class _Finder:
    def __init__(
        self, view: GraphView, flow: Dataflow, identifier: Identifier, namer: Namer, choices: _Choices
    ) -> None:
        self._choices = choices
        self._view = view
        self._flow = flow
        self._identifier = identifier
        self._namer = namer

    def run(self) -> Findings:
        blocks: list[Block] = []
        left: list[Left] = []
        for output, fact in self._flow.facts.items():
            if not fact.nonlinear:
                continue
            sinks = self._flow.sinks.get(output, [])
            # Part of a larger activation, unless a linear operator reads it as well. With scope `all` there need not be
            # a second operator, so any consumer other than the larger activation makes it a candidate.
            inner = output in self._flow.extended and not (self._choices.every and self._flow.blocked.get(output))
            if not sinks and inner:
                continue
            region = self._region(output, fact.leaves)
            # Heads of an earlier run look like an activation between linear operators.
            if self._choices.made.intersection(region.nodes):
                continue
            found = self._candidate(region, sinks)
            if isinstance(found, Block):
                blocks.append(found)
            else:
                left.append(found)
        # Near misses have no region: the data flow stopped at the node that is not elementwise.
        readers = self._view.consumers
        for leaf, miss in self._flow.near_misses.items():
            if not self._choices.made.intersection(readers.get(leaf, ())):
                left.append(self._near_miss(leaf, miss))
        made = self._choices.made
        left += [self._stray(*each) for each in self._flow.reached.items() if each[0] not in made]
        left += [self._refused(index) for index, node in enumerate(self._view.nodes) if node.op_type in OPAQUE]
        # What is an activation only since it is the value of a gate goes with the gate.
        values = {block.value for block in blocks}
        alone = [block for block in blocks if block.output in self._flow.values and block.output not in values]
        reason = "the gate that it is the value of is not converted"
        left += [self._refusal(block, Miss(reason, block.output)) for block in alone if not block.second]
        blocks = [block for block in blocks if block not in alone or block.second]
        return Findings(tuple(blocks), tuple(left))

    def _candidate(self, region: Region, sinks: list[LinearOperator]) -> Block | Left:
        output, leaves = region.output, region.leaves
        first = tuple(operator for leaf in leaves for operator in self._operators(leaf))
        identified = self._named(region)
        name = self._namer.name(self._view, first, tuple(sinks), region.nodes)
        miss = self._leaf_miss(leaves) or self._obstacle(output, first, sinks, identified)
        if miss is None and isinstance(identified, Identified):
            slots = identified.gated or (0, 0)
            gate, value = (self._leaf_type(leaves[slot]) for slot in slots)
            block = Block(
                name=name,
                where=self._view.where,
                path=self._view.path,
                region=region,
                gate=leaves[slots[0]],
                value=leaves[slots[1]],
                first=first,
                # A convolution that reads the same activation is not part of the MLP; it keeps its input.
                second=tuple(sink for sink in sinks if sink.rowwise or self._choices.every),
                identified=identified,
                # Unless the region contains casts, the activation has the type of the gate.
                elem_type=self._view.type_of(output).elem_type or gate,
                gate_type=gate,
                value_type=value,
                channels=self._channels(output) if output in self._flow.values else None,
            )
            return self._without_product(block) if self._choices.product and identified.gated else block
        return Left(
            name=name,
            where=self._view.where,
            activation=identified.label if isinstance(identified, Identified) else "",
            first=kinds(first),
            second=kinds(tuple(sinks)),
            miss=miss or Miss("no reason", output),
        )

    def _named(self, region: Region) -> Identified | Unknown:
        identified = self._identifier.identify(region)
        if self._choices.fit and isinstance(identified, Unknown):
            return unnamed(identified) or identified
        return identified

    def _without_product(self, block: Block) -> Block | Left:
        """The activation of a gated block alone: the part of its region that depends on the gate only."""
        # Nodes of a region are in topological order, so one sweep finds everything that is computed from the gate only.
        alone: set[str] = {block.gate}
        for index in block.region.nodes:
            node = self._view.nodes[index]
            moving = [name for name in node.input if name in self._flow.facts]
            if moving and all(name in alone for name in moving):
                alone.add(node.output[0])
        outside = [
            self._view.nodes[index] for index in block.region.nodes if self._view.nodes[index].output[0] not in alone
        ]
        # The activation is the only tensor that crosses from that part into the product. The gate may cross as well: in
        # g (sigmoid(g) u) it is one more factor, and stays.
        ends = {name for node in outside for name in node.input if name in alone} - {block.gate}
        if len(ends) != 1:
            reason = "the graph does not compute its activation apart from the product; use --gate heads"
            return self._refusal(block, Miss(reason, block.output))
        region = self._region(ends.pop(), (block.gate,))
        identified = self._named(region)
        if isinstance(identified, Unknown):
            return self._refusal(block, Miss(identified.reason, region.output))
        return replace(
            block,
            region=region,
            value=block.gate,
            first=self._operators(block.gate),
            second=(),
            identified=identified,
            elem_type=self._view.type_of(region.output).elem_type or block.gate_type,
            value_type=block.gate_type,
            product=True,
        )

    @staticmethod
    def _refusal(block: Block, miss: Miss) -> Left:
        label = block.identified.label
        return Left(block.name, block.where, label, kinds(block.first), kinds(block.second), miss, block)

    def _obstacle(
        self,
        output: str,
        first: tuple[LinearOperator, ...],
        sinks: list[LinearOperator],
        identified: Identified | Unknown,
    ) -> Miss | None:
        producer = self._view.made_by(output)
        node = label(producer) if producer is not None else output
        if isinstance(identified, Unknown):
            return Miss(identified.reason, node)
        if self._choices.every:
            return None  # Theorem 8 needs an activation, but no second operator
        if not sinks and output not in self._flow.values:
            if self._flow.blocked.get(output):
                return self._flow.blocked[output][0]
            if output in self._view.outputs:
                return Miss("its output is an output of the graph, and no linear operator reads it", node)
            return Miss("no linear operator reads its output", node)
        # A convolution with a larger kernel is linear too, but its neurons would read several positions: not an MLP.
        spatial = next((operator for operator in first if not operator.rowwise), None)
        if spatial is not None:
            return Miss(
                f"the first operator is a {spatial.kind}, which mixes positions", label(self._view.nodes[spatial.node])
            )
        if sinks and not any(sink.rowwise for sink in sinks):
            return Miss(
                f"the second operator is a {sinks[0].kind}, which mixes positions",
                label(self._view.nodes[sinks[0].node]),
            )
        return None

    def _leaf_miss(self, leaves: tuple[str, ...]) -> Miss | None:
        sources = [self._flow.source_of(leaf) for leaf in leaves]
        return next((source.miss for source in sources if source is not None and source.miss is not None), None)

    def _near_miss(self, leaf: str, miss: Miss) -> Left:
        operators = self._operators(leaf)
        name = self._namer.name(self._view, operators, (), ())
        return Left(name, self._view.where, "", kinds(operators), "", miss)

    def _refused(self, index: int) -> Left:
        node = self._view.nodes[index]
        name = self._namer.name(self._view, (), (), (index,))
        return Left(name, self._view.where, "", "", "", Miss(f"{label(node)}: {OPAQUE[node.op_type]}", label(node)))

    def _stray(self, index: int, second: str) -> Left:
        """An activation operator on the way to a linear one, that is applied to something else than a projection."""
        node = self._view.nodes[index]
        maker = self._view.made_by(node.input[0])
        origin = f"'{node.input[0]}', which {'is an input' if maker is None else f'{label(maker)} makes'},"
        name = self._namer.name(self._view, (), (), (index,))
        miss = Miss(f"{origin} is not the output of a linear operator with constant weights", label(node))
        return Left(name, self._view.where, "", "", second, miss)

    def _operators(self, leaf: str) -> tuple[LinearOperator, ...]:
        source = self._flow.source_of(leaf)
        return () if source is None else source.operators

    def _region(self, output: str, leaves: tuple[str, ...]) -> Region:
        return Region(output, leaves, self._flow.between(self._view, leaves, output))

    def _channels(self, output: str) -> int | None:
        last = (self._view.type_of(output).shape or (None,))[-1]
        return last if isinstance(last, int) else None

    def _leaf_type(self, leaf: str) -> int:
        """The element type of a leaf.

        Shape inference stops at operators that it does not know (MatMulNBits). Then the type is that of the nearest
        floating-point operand: a bias, a scale or the data.
        """
        known = self._view.type_of(leaf).elem_type
        source = self._flow.source_of(leaf)
        if known or source is None:
            return known
        steps = (*(operator.node for operator in source.operators), *source.trailing)
        for index in reversed(steps):
            node = self._view.nodes[index]
            for name in (*node.output, *node.input):
                if (elem_type := self._view.type_of(name).elem_type) in FLOATS:
                    return elem_type
        return 0


def kinds(operators: tuple[LinearOperator, ...]) -> str:
    """The operators as reports print them."""
    return " + ".join(dict.fromkeys(operator.shown for operator in operators))

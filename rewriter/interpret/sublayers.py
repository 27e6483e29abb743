"""MLP blocks as heads, one per neuron and head of the program, and the names of all sublayers.

A rewritten file has the heads of its original: its plan names the activation and the weights, which are still there.
Names are those of TransformerLens: `blocks.3.attn`, `blocks.3.mlp_heads`. The number of a layer is the first number in
the module path that the exporter left. A model with an encoder and a decoder has `encoder.3.attn` and
`decoder.3.cross_attn`.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

import numpy as np
from numpy.typing import NDArray

from passes.conversion import decide
from passes.match.blocks import Block, Dataflow, Namer
from passes.match.projections import Projection, Projections, projections_of
from passes.options import ALREADY, Options
from passes.plan import Plan, with_operators
from passes.programs.program import Group, Program, groups_of
from rewriter.arrays import Array
from rewriter.graph.view import GraphView, LostError, Miss
from rewriter.interpret.original import Attention, Named
from rewriter.interpret.trace import noting

PROGRAMS = {"fewest": "masked", "fast": "local"}  # heads, or operations, to the form with such programs


@dataclass(frozen=True, eq=False)
class NeuronHeads(Named):
    """The heads of one block; head `g * neurons + n` is head g of the program, for neuron n."""

    node: int
    query: Projection  # W1 of the pre-activation y; its data is the block's input
    value: Projection  # W1 of the values: the same, or the other projection of a gated block
    output: Projection
    result: str
    activation: str
    program: Program
    gate: str  # the tensor y; empty where the file has none
    own: str  # the tensor that values read; empty where `gate` is
    bound: float  # of the heads' distance from the activation, over max(1, |f|)
    function: Callable[[Array], Array]  # the activation in float64; of h(g) u the h
    gated: bool

    @property
    def groups(self) -> tuple[Group, ...]:
        return groups_of(self.program)

    @property
    def data(self) -> str:
        return self.query.data

    @property
    def neurons(self) -> int:
        return self.query.out_features

    count = neurons

    @property
    def channels(self) -> NDArray[np.int64]:
        """[neurons, 1], rows of W2."""
        return np.arange(self.neurons)[:, None]

    @property
    def heads(self) -> int:
        return self.neurons * len(self.groups)

    @property
    def bias_tokens(self) -> int:
        """m, the largest number per head."""
        return max(group.bias_tokens for group in self.groups)

    @property
    def dimension(self) -> int:
        """d_head of queries and keys: 1, or 2 for (y, 1), where logits have offsets or heads lack bias tokens."""
        lacking = len({group.bias_tokens for group in self.groups}) > 1
        return 2 if lacking else max(group.dimension for group in self.groups)


def find_neurons(plan: Plan, program: str) -> tuple[tuple[NeuronHeads, ...], tuple[Miss, ...]]:
    """The neuron heads of the main graph in order, and blocks without heads; `program` is a key of `PROGRAMS`."""
    view = plan.views[0]
    missed: list[Miss] = []
    for each in plan.left:
        done = each.miss.reason == ALREADY
        if not done or each.where:
            reason = f"it is in the body {each.where}" if done else each.miss.reason
            missed.append(Miss(f"block {each.name}: {reason}", each.miss.node))
    found: list[NeuronHeads] = []
    for block in (conversion.block for conversion in plan.conversions):
        if block.path:
            missed.append(Miss(f"block {block.name}: it is in the body {block.where}", block.output))
            continue
        with noting(missed, f"block {block.name}", block.output):
            found.append(_heads(view, block, projections_of(view, block, packed=True), program, whole=False))
    known = [each for each in plan.recognised.blocks if not each.block.path]
    for made, flow in product(known, [Dataflow(view)] if known else ()):
        with noting(missed, f"block {made.block.name} is attention heads already", made.block.output):
            block, given = with_operators(view, flow, made), made.projections
            if block.identified.activation.program is None:
                raise LostError(f"its activation '{block.identified.activation.name}' is not in the table", block.name)
            if given is not None:
                z = f"{block.name}/heads/z"
                given = replace(given, output=replace(given.output, data=z if z in view.producer else ""))
            read = given or projections_of(view, block, packed=True)
            heads = _heads(view, block, read, program, whole=given is not None)
            # The plan states the error of the file's own heads.
            found.append(replace(heads, bound=max(heads.bound, made.max_error)))
    return tuple(sorted(found, key=lambda each: each.node)), tuple(missed)


def _heads(view: GraphView, block: Block, projections: Projections, program: str, *, whole: bool) -> NeuronHeads:
    chosen = decide(view, block, Options(form=PROGRAMS[program]))
    return NeuronHeads(
        module=block.name,
        node=view.producer[projections.result if whole else block.output],
        query=projections.query,
        value=projections.value,
        output=projections.output,
        result=projections.result,
        activation=block.identified.label,
        program=chosen.program.as_heads,
        gate="" if whole else block.gate,
        own="" if whole else block.value,
        bound=chosen.program.max_error + chosen.program.coefficient_error,
        function=lambda y: block.identified.activation.function(y, block.identified.parameters),
        gated=block.identified.gated is not None,
    )


Sublayer = Attention | NeuronHeads


def named_sublayers(
    view: GraphView, attention: Sequence[Attention], neurons: Sequence[NeuronHeads]
) -> tuple[Sublayer, ...]:
    """All sublayers in the order of the graph, with unique names."""
    namer = Namer()
    modules: list[Sublayer] = [*neurons]
    for each in attention:
        first = {side.operator.node: side.operator for side in (each.query, each.key, each.value)}
        modules.append(replace(each, module=namer.name(view, tuple(first.values()), (each.output,), ())))
    modules.sort(key=lambda each: each.node)
    paths = [re.match(r"(?:(.*?)\.)?(\d+)(?:\.|$)", each.module) for each in modules]
    numbered = [(path[1] or "", path[2]) for path in paths if path]
    layers = {stack: [*dict.fromkeys(number for each, number in numbered if each == stack)] for stack, _ in numbered}
    places = [(stack, layers[stack].index(number)) for stack, number in numbered]
    if not all(paths):  # every self-attention begins a layer
        begun = accumulate(isinstance(each, Attention) and not each.cross for each in modules)
        places = [("", max(layer - 1, 0)) for layer in begun]
    stacks, copies, found = list(dict.fromkeys(stack for stack, _ in places)), Counter[str](), list[Sublayer]()
    for sublayer, (stack, number) in zip(modules, places, strict=True):
        # The distinguishing part of a stack's path: `encoder`, `decoder`.
        others = {part for other in stacks if other != stack for part in other.split(".")}
        short = next((part for part in stack.split(".") if part not in others), stack or "blocks")
        layer = f"{short if len(stacks) > 1 else 'blocks'}.{number}"
        kind = "mlp_heads" if isinstance(sublayer, NeuronHeads) else "cross_attn" if sublayer.cross else "attn"
        name = f"{layer}.{kind}"
        copies[name] += 1
        found.append(replace(sublayer, name=name if copies[name] == 1 else f"{name}_{copies[name]}", layer=layer))
    return tuple(found)

"""Which part of B is wrong by itself, where two models differ.

B is cut at boundaries, tensors that both models have: inputs, pre-activations, activations and ends of blocks, the
residual stream, the outputs. Every part in between runs alone, on the values that A computes, so that errors do not
propagate and a part is guilty only of its own. `rewriter.proof.rule` judges it; what rounding amounts to is measured on
the same part of A (`rewriter.proof.nudge.rounded`). Weights stay where they are, and A runs once for a group of
boundaries whose values fit into memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rewriter.compare.graphs import difference
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.constants import Constants
from rewriter.graph.extract import Cut, upstream
from rewriter.graph.types import FLOATS
from rewriter.graph.view import GraphView
from rewriter.proof.claims import Claim, Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.nudge import Point, rounded
from rewriter.proof.rule import Judgement, Results, compared
from rewriter.proof.run import Progress, Way, fed, run_model

GROUP_BYTES = 512 * 2**20
"""Bytes of A's values that are to be in memory, over all cases; a single boundary may exceed it."""

_FIRST = 8
"""Number of boundaries that A is run for first, before it is known how large they are."""

_FLOATS = {*FLOATS, 0}
"""Element types that are compared; 0 stands for a type that inference does not know."""

_QUANTISERS = {"QuantizeLinear", "DynamicQuantizeLinear"}
_SUMS = {"Add", "Sum", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
_MANY = 64
"""Number of evenly spaced boundaries if nothing else is found."""

_MOST_CAUSES = 6


@dataclass(frozen=True)
class Part:
    """A part of B by itself, fed with what A computes.

    Attributes:
        label: its end: `h.3.mlp`, `h.3.mlp, activation`, `input of h.3.mlp`, or the tensor's name.
        found: the rule applied to the tensor there; errors are shares of the norm of A's values.
        causes: what is wrong: why it does not run, and for a fault the differences between the files in this part.
    """

    label: str
    found: Judgement
    causes: tuple[str, ...] = ()


# -- boundaries ------------------------------------------------------------------------------------------------------


def boundaries(a: GraphView, b: GraphView, blocks: Sequence[Claim]) -> dict[str, str]:
    """The boundaries of two models in A's order, each with its label: those of blocks, sums that several read, outputs.

    What quantisers of both models read is one too: nothing is quantised between one and the next, so the result of a
    part does not depend on the side of a quantisation step on which a value happens to fall.
    """
    # Only what nodes of both models compute: a graph input is not, and B may have replaced a tensor.
    constants = Constants(a)
    made = [name for node in a.nodes for name in node.output if name in b.producer and name not in constants]
    shared = [name for name in made if a.type_of(name).elem_type in _FLOATS]
    found: dict[str, str] = {}
    inside: set[str] = set()
    for block in blocks:
        for output in block.block_outputs:
            found[_with_bias(a, output)] = f"{block.name} ({output})" if len(block.block_outputs) > 1 else block.name
        for name in (block.output, *block.inputs):
            what = "activation" if name == block.output else "first linear operator"
            found.setdefault(name, f"{block.name}, {what}")
        ends = [name for name in block.block_outputs if name in a.producer]
        part = upstream(a, frozenset(block.block_inputs), ends)
        inside |= {name for index in part.nodes for name in a.nodes[index].output}.difference(ends)
    reads = ({name for node in view.nodes if node.op_type in _QUANTISERS for name in node.input} for view in (a, b))
    quantised = next(reads) & next(reads)
    labels = {name: f"input of {block.name}" for block in reversed(blocks) for name in block.block_inputs}
    summed = (name for node in a.nodes if node.op_type in _SUMS for name in node.output if name not in inside)
    stream = (name for name in summed if len(a.consumers.get(name, ())) > 1)
    for name in (*labels, *quantised, *stream):
        found.setdefault(name, labels.get(name, name))
    found = {name: found[name] for name in shared if name in found}
    if not found:
        spaced = [name for name in shared if name not in a.outputs]
        step = max(len(spaced) // _MANY, 1)
        found = {name: name for name in spaced[step - 1 :: step]}
    for name in a.outputs:
        if name in a.producer and name in b.producer:
            found.setdefault(name, f"output {name}")
    return {name: found[name] for name in sorted(found, key=a.producer.__getitem__)}


def _with_bias(view: GraphView, tensor: str) -> str:
    """The tensor after its bias was added, if it is read by that addition alone: B may have fused the two."""
    readers = view.consumers.get(tensor, ())
    if len(readers) != 1 or tensor in view.outputs or view.nodes[readers[0]].op_type != "Add":
        return tensor
    node = view.nodes[readers[0]]
    others = [name for name in node.input if name != tensor]
    return node.output[0] if others and all(name in view.initializers for name in others) else tensor


# -- parts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bisection:
    """Two models with their boundaries, and how to run the parts: A without graph optimisation, B with it.

    Attributes:
        marks: tensor to label, in A's order, as of `boundaries`.
        cases: inputs that A accepts.
        points: where A gets noise, with the bounds that are certified there.
    """

    a: Side
    b: Side
    marks: Mapping[str, str]
    cases: Sequence[Case]
    provider: str
    points: Sequence[Point] = ()
    progress: Progress = lambda _what, _done, _total: None

    def parts(self) -> tuple[Part, ...]:
        """Run every part of B alone on A's values, in order; ValidationError where A cannot have further outputs."""
        found: list[Part] = []
        count, tensors = _FIRST, list(self.marks)
        while len(found) < len(tensors):
            group = {tensor: self._cuts(tensor) for tensor in tensors[len(found) : len(found) + count]}
            read = {name for pair in group.values() for part in pair for name in part.inputs}
            # One run of A serves all parts of the group, then its values are dropped.
            values = self._ran(self.a, self.cases, sorted((read | {*group}) & {*self.a.main.producer}), optimise=False)
            seen = [Case(each.name, {**each.feeds, **own}) for each, own in zip(self.cases, values, strict=True)]
            for tensor, cuts in group.items():
                self.progress(f"comparing {self.marks[tensor]}", len(found), len(tensors))
                found.append(self._part(tensor, cuts, seen))
            # As many of the next as fit into memory if they are as large as these.
            held = sum(array.nbytes for case in values for array in case.values())
            count = max(int(len(group) * GROUP_BYTES // max(held, 1)), 1)
        return tuple(found)

    def _part(self, tensor: str, cuts: tuple[Cut, Cut], seen: Sequence[Case]) -> Part:
        """The part that ends in a tensor; `seen` is what A computes there, and what both parts read."""
        a, b = self._extracted(cuts)
        own, others = ([Case(case.name, fed(part, case.feeds)) for case in seen] for part in (a, b))
        try:
            new = self._ran(Side.of(b), others, [tensor], optimise=True)
        except ValidationError as error:  # because shapes or types inside it differ: then the part is guilty as well
            none = Judgement(tensor, math.inf, 0.0, 0.0, "does not run")
            return Part(self.marks[tensor], none, (str(error),))
        old = [{tensor: case.feeds[tensor]} for case in seen]
        variants = rounded(a, own, old, self.provider, self.points)
        return Part(self.marks[tensor], compared(tensor, old, variants, new))

    def explained(self, part: Part) -> Part:
        """A guilty part, with the differences between the files in it: first what changed, then what one side lacks."""
        changes = difference(*self._extracted(self._cuts(part.found.name)))
        told = [*changes.tensors, *(each for each in changes.fields if each.what == "function"), *changes.regions]
        causes = [*part.causes, *(each.text for each in sorted(told, key=lambda each: None in (each.a, each.b)))]
        if not math.isfinite(part.found.error) and not part.causes:
            causes = [f"{part.found.name} {part.found.reason}", *causes]
        return replace(part, causes=tuple(causes[:_MOST_CAUSES]))

    def _cuts(self, tensor: str) -> tuple[Cut, Cut]:
        a, b = (upstream(side.main, frozenset(self.marks), [tensor]) for side in (self.a, self.b))
        return a, b

    def _extracted(self, cuts: tuple[Cut, Cut]) -> tuple[LoadedModel, LoadedModel]:
        return self.a.extracted(cuts[0]), self.b.extracted(cuts[1])

    def _ran(self, side: Side, cases: Sequence[Case], names: Sequence[str], *, optimise: bool) -> Results:
        way = Way(self.provider, optimise)
        return run_model(side, cases, [way], outputs=names).ways[way].results

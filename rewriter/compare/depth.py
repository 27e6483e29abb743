"""Where two models differ: how their difference grows through depth, and which part of B is wrong by itself.

Both are compared at boundaries, tensors that both models have: inputs, pre-activations, activations and ends of blocks,
the residual stream, the outputs. They run as a whole; or alone, every part of B between boundaries on the values that A
computes, so that errors do not propagate and a part is guilty only of its own. All are judged by `rewriter.proof.rule`;
what rounding amounts to is measured on A (`rewriter.proof.nudge.rounded`). Weights stay where they are, and boundaries
are run in groups whose values fit into memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from rewriter.arrays import Array
from rewriter.compare.graphs import difference
from rewriter.errors import ValidationError
from rewriter.graph.constants import Constants
from rewriter.graph.extract import Cut, upstream
from rewriter.graph.types import FLOATS
from rewriter.graph.view import GraphView
from rewriter.proof.claims import Claim, Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.nudge import Point, rounded
from rewriter.proof.rule import Judgement, Results, compared, magnitude
from rewriter.proof.run import Progress, Way, fed, run_model, tapped

GROUP_BYTES = 512 * 2**20
"""Bytes of the values of both models that are to be in memory, over all cases; a single boundary may exceed it."""

_FIRST = 8
"""Number of boundaries that are run first, before it is known how large they are."""

_FLOATS = {*FLOATS, 0}
"""Element types that are compared; 0 stands for a type that inference does not know."""

_QUANTISERS = {"QuantizeLinear", "DynamicQuantizeLinear"}
_SUMS = {"Add", "Sum", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
_MANY = 64
"""Number of evenly spaced boundaries if nothing else is found."""

_MOST_CAUSES = 6


Kind = Literal["block", "stream", "output"]


class Boundary(NamedTuple):
    """One tensor that both models have."""

    tensor: str
    label: str
    kind: Kind


@dataclass(frozen=True)
class Measured:
    """B against A at one boundary.

    Attributes:
        label: its name in reports: `h.3.mlp`, `h.3.mlp, activation`, `input of h.3.mlp`, or the tensor's name.
        tensor: the tensor.
        kind: `block` (the end of a block), `stream` or `output`.
        magnitude: largest finite |value| of A.
        found: the rule applied there; errors are shares of the norm of A's values.
        obstacle: why B's part did not run; empty if it did.
    """

    label: str
    tensor: str
    kind: Kind
    magnitude: float
    found: Judgement
    obstacle: str = ""
    also: ClassVar = ("exceeds",)

    @property
    def exceeds(self) -> bool:
        """Whether the rule does not hold."""
        return not self.found.holds


@dataclass(frozen=True)
class Fault:
    """A part of B that is wrong by itself.

    Attributes:
        part: the part that ends at a boundary, by the label of that.
        tensor: the tensor that the part computes.
        error: the part's error on A's values, as a share of the norm.
        allowed: the largest error that would have been allowed.
        causes: the differences between the files in this part.
    """

    part: str
    tensor: str
    error: float
    allowed: float
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """The two models, and how to run them: A without graph optimisation, B with it.

    Attributes:
        a: the original.
        b: the other model.
        cases: inputs that A accepts.
        provider: execution provider.
        points: where A gets noise, with the bounds that are certified there.
        carried: where B's residual stream has rows that A's has not, behind those of the tokens: the tensors of B that
            hold the number of tokens and of all rows of a sequence.
        progress: called with a description of the step, the number of steps done, and the number of all steps.
    """

    a: Side
    b: Side
    cases: Sequence[Case]
    provider: str
    points: Sequence[Point] = ()
    carried: tuple[str, ...] = ()
    progress: Progress = lambda _what, _done, _total: None


# -- boundaries ------------------------------------------------------------------------------------------------------


def boundaries(a: GraphView, b: GraphView, blocks: Sequence[Claim]) -> tuple[Boundary, ...]:
    """The boundaries of two models in A's order: those of blocks, sums that several read, graph outputs.

    What quantisers of both models read is one too: nothing is quantised between one and the next, so the result of a
    part does not depend on the side of a quantisation step on which a value happens to fall.
    """
    # Only what nodes of both models compute: a graph input is not, and B may have replaced a tensor.
    constants = Constants(a)
    made = [name for node in a.nodes for name in node.output if name in b.producer and name not in constants]
    shared = [name for name in made if a.type_of(name).elem_type in _FLOATS]
    found: dict[str, Boundary] = {}
    inside: set[str] = set()
    for block in blocks:
        for output in block.block_outputs:
            label = f"{block.name} ({output})" if len(block.block_outputs) > 1 else block.name
            name = _with_bias(a, output)
            found[name] = Boundary(name, label, "block")
        for name in (block.output, *block.inputs):
            label = f"{block.name}, {'activation' if name == block.output else 'first linear operator'}"
            found.setdefault(name, Boundary(name, label, "stream"))
        ends = [name for name in block.block_outputs if name in a.producer]
        part = upstream(a, frozenset(block.block_inputs), ends)
        inside |= {name for index in part.nodes for name in a.nodes[index].output}.difference(ends)
    reads = ({name for node in view.nodes if node.op_type in _QUANTISERS for name in node.input} for view in (a, b))
    quantised = next(reads) & next(reads)
    labels = {name: f"input of {block.name}" for block in reversed(blocks) for name in block.block_inputs}
    summed = (name for node in a.nodes if node.op_type in _SUMS for name in node.output if name not in inside)
    stream = (name for name in summed if len(a.consumers.get(name, ())) > 1)
    for name in (*labels, *quantised, *stream):
        found.setdefault(name, Boundary(name, labels.get(name, name), "stream"))
    found = {name: found[name] for name in shared if name in found}
    if not found:
        spaced = [name for name in shared if name not in a.outputs]
        step = max(len(spaced) // _MANY, 1)
        found = {name: Boundary(name, name, "stream") for name in spaced[step - 1 :: step]}
    for name in a.outputs:
        if name in a.producer and name in b.producer:
            found.setdefault(name, Boundary(name, f"output {name}", "output"))
    return tuple(sorted(found.values(), key=lambda boundary: a.producer[boundary.tensor]))


def _with_bias(view: GraphView, tensor: str) -> str:
    """The tensor after its bias was added, if it is read by that addition alone: B may have fused the two."""
    readers = view.consumers.get(tensor, ())
    if len(readers) != 1 or tensor in view.outputs or view.nodes[readers[0]].op_type != "Add":
        return tensor
    node = view.nodes[readers[0]]
    others = [name for name in node.input if name != tensor]
    return node.output[0] if others and all(name in view.initializers for name in others) else tensor


# -- what is compared there --------------------------------------------------------------------------------------------


def compare_at(bench: Bench, marks: Sequence[Boundary], *, alone: bool = False) -> tuple[Measured, ...]:
    """Compare two models at every boundary: both run as a whole, or every part of B alone on the values of A.

    Raises:
        ValidationError: a model cannot be loaded with additional outputs, or does not run as a whole.
    """
    found: list[Measured] = []
    count = _FIRST
    while len(found) < len(marks):
        group = marks[len(found) : len(found) + count]
        cuts = {mark.tensor: _cuts(bench, marks, mark.tensor) for mark in group} if alone else {}
        needed = {name for pair in cuts.values() for part in pair for name in part.inputs}
        wanted = sorted((needed | {mark.tensor for mark in group}) & set(bench.a.main.producer))
        # One run of A serves all parts of the group, then its values are dropped.
        values = _ran(bench.a, bench.cases, wanted, bench.provider, optimise=False)
        seen = [Case(each.name, {**each.feeds, **own}) for each, own in zip(bench.cases, values, strict=True)]
        for some in [[mark] for mark in group] if alone else [group]:
            bench.progress(f"comparing {some[0].label}", len(found), len(marks))
            found += _measured(bench, some, seen, cuts.get(some[0].tensor))
        # As many of the next as fit into memory if they are as large as these, those of both models.
        held = 2 * sum(array.nbytes for case in values for array in case.values())
        count = max(int(len(group) * GROUP_BYTES // max(held, 1)), 1)
    return tuple(found)


def _cuts(bench: Bench, marks: Sequence[Boundary], tensor: str) -> tuple[Cut, Cut]:
    """The part of A that ends in a tensor, and that of B."""
    stops = frozenset(mark.tensor for mark in marks)
    return upstream(bench.a.main, stops, [tensor]), upstream(bench.b.main, stops, [tensor])


def _ran(side: Side, cases: Sequence[Case], names: Sequence[str], provider: str, *, optimise: bool) -> Results:
    way = Way(provider, optimise)
    return run_model(side, cases, [way], outputs=names).ways[way].results


def _measured(
    bench: Bench, marks: Sequence[Boundary], seen: Sequence[Case], cuts: tuple[Cut, Cut] | None
) -> list[Measured]:
    """Both models at boundaries, or the parts that end at one; `seen` is what A computes there, and what these read."""
    names = [mark.tensor for mark in marks]
    old = [{name: case.feeds[name] for name in names} for case in seen]
    if cuts is None:
        a, given = tapped(bench.a, names), bench.cases
        new = _ran(bench.b, given, (*names, *bench.carried), bench.provider, optimise=True)
        if bench.carried:
            new = [_tokens(ours, theirs, bench.carried) for ours, theirs in zip(old, new, strict=True)]
    else:
        a, b = (side.extracted(part) for side, part in zip((bench.a, bench.b), cuts, strict=True))
        given, others = ([Case(case.name, fed(part, case.feeds)) for case in seen] for part in (a, b))
        try:
            new = _ran(Side.of(b), others, names, bench.provider, optimise=True)
        except ValidationError as error:  # because shapes or types inside it differ: then the part is guilty as well
            none = Judgement(names[0], math.inf, 0.0, 0.0, "does not run")
            return [Measured(marks[0].label, names[0], marks[0].kind, 0.0, none, str(error))]
    variants = rounded(a, given, old, bench.provider, bench.points)
    result = []
    for mark in marks:
        size = max(magnitude(case[mark.tensor]) for case in old)
        result.append(Measured(mark.label, mark.tensor, mark.kind, size, compared(mark.tensor, old, variants, new)))
    return result


def _tokens(ours: Mapping[str, Array], theirs: Mapping[str, Array], carried: Sequence[str]) -> dict[str, Array]:
    """B's values with the rows of the tokens alone, where that makes their shape that of A's."""
    count, rows = (int(theirs[name].reshape(-1)[0]) for name in carried)
    found = dict(theirs)
    for name, own in ours.items():
        value, width = theirs[name], own.shape[-1] if own.ndim else 0
        if value.shape == own.shape or value.ndim < 2 or value.shape[-1] != width or not value.size:
            continue
        kept = value.reshape(-1, rows, width)[:, :count] if value.size % (rows * width) == 0 else value
        found[name] = kept.reshape(own.shape) if kept.size == own.size else value
    return found


def explained(bench: Bench, marks: Sequence[Boundary], found: Measured) -> Fault:
    """A guilty part, with the differences between the files in it: first what changed, then what one side lacks."""
    cuts = _cuts(bench, marks, found.tensor)
    changes = difference(*(side.extracted(part) for side, part in zip((bench.a, bench.b), cuts, strict=True)))
    told = [*changes.tensors, *(each for each in changes.fields if each.what == "function"), *changes.regions]
    causes = [each.text for each in sorted(told, key=lambda each: None in (each.a, each.b))]
    error, allowed = found.found.error, found.found.allowed
    if not math.isfinite(error):
        causes = [found.obstacle or f"{found.tensor} {found.found.reason}", *causes]
    return Fault(found.label, found.tensor, error, allowed, tuple(causes[:_MOST_CAUSES]))

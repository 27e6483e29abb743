"""Where two models differ: how their difference grows through depth, and which part of B is wrong by itself.

Both are compared at boundaries, tensors that both models have: ends and inputs of blocks, the residual stream, the
outputs. `tap` runs the models as a whole. `isolate` runs every part of B between boundaries on the values that A
computes, so that errors do not propagate and a part is guilty only of its own; `narrow` follows a guilty part down as
far as both models have tensors of the same name. All are judged by `rewriter.proof.rule`; what rounding amounts to is
measured on A with optimisation, with noise, and against its float64 evaluation. Weights stay where they are, and
boundaries are run in groups whose values fit into bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import ml_dtypes
import numpy as np
import onnx

from rewriter.arrays import Array, magnitude
from rewriter.compare.graphs import GraphDifference, difference
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.constants import Constants
from rewriter.graph.extract import Cut, upstream, with_outputs
from rewriter.graph.types import FLOATS
from rewriter.graph.view import GraphView
from rewriter.ort.sessions import open_session
from rewriter.proof.claims import Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.nudge import DRAWS, Point, feeds, nudged
from rewriter.proof.reference.float64 import NoReference, open_reference
from rewriter.proof.rule import Judgement, Results, compared
from rewriter.proof.run import open_tapped

GROUP_BYTES = 256 * 2**20
"""Maximum size in bytes of the values of one model in memory, over all cases; a single boundary may exceed it."""

_FLOATS = {*FLOATS, 0}
"""Element types that are compared; 0 stands for a type that inference does not know."""

_QUANTISERS = {"QuantizeLinear", "DynamicQuantizeLinear"}
_SUMS = {"Add", "Sum", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
_MANY = 64
"""Number of evenly spaced boundaries if nothing else is found."""

_MOST_INNER = 48
"""Maximum number of tensors inside a guilty part that are examined in one step."""

_MOST_CAUSES = 6

Variants = tuple[list[Results], Results | None]
"""Results of A that differ by rounding alone, and its float64 evaluation if there is one."""

_MATRIX = 2
"""The fewest axes of a tensor of the residual stream: tokens and channels."""


@dataclass(frozen=True)
class Landmark:
    """A block of A, with its own ends and those of its activation.

    Attributes:
        name: the block.
        inputs: its inputs.
        outputs: its outputs.
        starts: the pre-activations, where the first linear operators end.
        end: the activation's output, where the second linear operators begin.
        program: the head program that computes the activation in B; None if none does.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    starts: tuple[str, ...]
    end: str
    program: str | None = None


@dataclass(frozen=True)
class Boundary:
    """One tensor that both models have.

    Attributes:
        tensor: its name.
        label: its name in reports: `h.3.mlp`, `input of h.3.mlp`, or the tensor's name.
        kind: `block` (the end of a block), `stream` or `output`.
        block: the block that ends there.
    """

    tensor: str
    label: str
    kind: Literal["block", "stream", "output"]
    block: Landmark | None = None


@dataclass(frozen=True)
class Measured:
    """B against A at one boundary.

    Attributes:
        boundary: the boundary.
        magnitude: largest finite |value| of A.
        found: the rule applied there; errors are shares of the norm of A's values.
        obstacle: why B's part did not run; empty if it did.
    """

    boundary: Boundary
    magnitude: float
    found: Judgement
    obstacle: str = ""

    @property
    def exceeds(self) -> bool:
        """Whether the rule does not hold."""
        return not self.found.holds


@dataclass(frozen=True)
class Fault:
    """A part of B that is wrong by itself.

    Attributes:
        block: the part between two boundaries: a block's name, or the tensor it ends in.
        part: the faulty part of a block: `the heads`, `the activation`, `the first linear operator` or `the second
            linear operator`; None outside of blocks.
        program: the head program, if the heads are at fault.
        tensor: the first tensor inside the part at which the error appears.
        error: the part's error on A's values, as a share of the norm.
        allowed: the largest error that would have been allowed.
        causes: the differences between the files in this part.
    """

    block: str
    part: str | None
    program: str | None
    tensor: str
    error: float
    allowed: float
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """The two models, and how to run them.

    Attributes:
        a: the original.
        b: the other model.
        cases: inputs that A accepts.
        provider: execution provider.
        points: where A gets noise, with the bounds that are certified there.
        optimise: whether B is run with graph optimisation; A's values always come from a run without.
        group_bytes: maximum size in bytes of the values of one model in memory.
        carried: where B's residual stream has rows that A's has not, behind those of the tokens: the tensors of B that
            hold the number of tokens and of all rows of a sequence.
        progress: called with a description of the step, the number of steps done, and the number of all steps.
    """

    a: Side
    b: Side
    cases: Sequence[Case]
    provider: str
    points: Sequence[Point] = ()
    optimise: bool = False
    group_bytes: int = GROUP_BYTES
    carried: tuple[str, str] | None = None
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None


# -- boundaries ------------------------------------------------------------------------------------------------------


def boundaries(a: GraphView, b: GraphView, landmarks: Sequence[Landmark]) -> tuple[Boundary, ...]:
    """The boundaries of two models in A's order: ends and inputs of blocks, sums that several read, graph outputs.

    What quantisers of both models read is one too: nothing is quantised between one and the next, so the result of a
    part does not depend on the side of a quantisation step on which a value happens to fall.
    """
    shared = frozenset(common(a, b))
    found: dict[str, Boundary] = {}
    for mark in landmarks:
        for output in mark.outputs:
            name = _with_bias(a, output)
            label = mark.name if len(mark.outputs) == 1 else f"{mark.name} ({output})"
            found[name] = Boundary(name, label, "block", mark)
    for mark in landmarks:
        for name in mark.inputs:
            found.setdefault(name, Boundary(name, f"input of {mark.name}", "stream"))
    read = [{name for node in view.nodes if node.op_type in _QUANTISERS for name in node.input} for view in (a, b)]
    ends = {mark.end: mark for mark in landmarks}
    for name in read[0] & read[1]:
        label = f"{ends[name].name}, activation" if name in ends else name
        found.setdefault(name, Boundary(name, label, "stream", ends.get(name)))
    inside = {name for mark in landmarks for name in _inside(a, mark)}
    for node in a.nodes:
        for name in node.output if node.op_type in _SUMS else ():
            if name not in inside and len(a.consumers.get(name, ())) > 1:
                found.setdefault(name, Boundary(name, name, "stream"))  # the residual stream
    # Only what nodes of both models compute: a graph input is not, and B may have replaced a tensor.
    found = {name: boundary for name, boundary in found.items() if name in shared}
    if not found:
        spaced = sorted(shared.difference(a.outputs), key=a.producer.__getitem__)
        step = max(len(spaced) // _MANY, 1)
        found = {name: Boundary(name, name, "stream") for name in spaced[step - 1 :: step]}
    for name in a.outputs:
        if name in a.producer and name in b.producer:
            found.setdefault(name, Boundary(name, f"output {name}", "output"))
    return tuple(sorted(found.values(), key=lambda boundary: a.producer[boundary.tensor]))


def _inside(view: GraphView, mark: Landmark) -> set[str]:
    """The tensors of a block between its ends."""
    part = upstream(view, frozenset(mark.inputs), [name for name in mark.outputs if name in view.producer])
    return {name for index in part.nodes for name in view.nodes[index].output}.difference(mark.outputs)


def common(a: GraphView, b: GraphView, within: Sequence[int] | None = None) -> Iterator[str]:
    """The float tensors that nodes of both graphs compute under the same name, without constants.

    `within` restricts them to outputs of these nodes of A.
    """
    constants = Constants(a)
    for index in range(len(a.nodes)) if within is None else within:
        for name in a.nodes[index].output:
            if name in b.producer and name not in constants and a.type_of(name).elem_type in _FLOATS:
                yield name


def _with_bias(view: GraphView, tensor: str) -> str:
    """The tensor after its bias was added, if it is read by that addition alone: B may have fused the two."""
    readers = view.consumers.get(tensor, ())
    if len(readers) != 1 or tensor in view.outputs or view.nodes[readers[0]].op_type != "Add":
        return tensor
    node = view.nodes[readers[0]]
    others = [name for name in node.input if name != tensor]
    return node.output[0] if others and all(name in view.initializers for name in others) else tensor


# -- through depth ---------------------------------------------------------------------------------------------------


def tap(bench: Bench, marks: Sequence[Boundary]) -> tuple[Measured, ...]:
    """Compare two models at every boundary.

    Raises:
        ValidationError: a model cannot be loaded with additional outputs, or does not run.
    """
    by_name = {mark.tensor: mark for mark in marks}
    found: dict[str, Measured] = {}
    for names in groups(bench.a.main, list(by_name), bench.cases, bench.group_bytes // max(len(bench.cases), 1)):
        # One session at a time: two may not fit into memory.
        old = _ran(bench, bench.a, names, optimise=False)
        new = _ran(bench, bench.b, (*names, *(bench.carried or ())), optimise=bench.optimise)
        if bench.carried is not None:
            new = [_tokens(ours, theirs, bench.carried) for ours, theirs in zip(old, new, strict=True)]
        rounded = _variants(bench.a.model, bench.cases, names, bench.provider, bench.points, bench.a.main)
        found.update({name: _measured(by_name[name], old, new, rounded) for name in names})
    return tuple(found[mark.tensor] for mark in marks)


def _ran(bench: Bench, side: Side, names: Sequence[str], *, optimise: bool) -> list[dict[str, Array]]:
    session = open_tapped(side, names, bench.provider, optimise=optimise)
    return [session.run(case.feeds, names) for case in bench.cases]


def _variants(
    model: LoadedModel,
    cases: Sequence[Case],
    names: Sequence[str],
    provider: str,
    points: Sequence[Point],
    view: GraphView | None = None,
) -> Variants:
    """Results of A, or of a part of it, that differ by rounding alone.

    Args:
        model: A, or the part.
        cases: its inputs.
        names: the tensors.
        provider: execution provider.
        points: where noise is added.
        view: index of the model; None for a part, whose outputs are the tensors.

    Returns:
        Runs with graph optimisation, as far as the additional outputs leave room for it, and with noise at the
        activations, draw by draw; and the float64 evaluation, None if there is none.
    """

    def tapped(proto: onnx.ModelProto) -> onnx.ModelProto:
        return proto if view is None else with_outputs(proto, view, names)

    def runs(proto: onnx.ModelProto, further: Mapping[str, Array], *, optimise: bool) -> list[Results]:
        # Cut out, a part may not run in this way: then this way says nothing.
        with suppress(ValidationError):
            session = open_session(tapped(proto), provider, optimise=optimise, base_dir=model.base_dir)
            return [[session.run({**case.feeds, **further}, list(names)) for case in cases]]
        return []

    found = runs(model.proto, {}, optimise=True)
    graph = model.proto.graph
    there = {each.name for each in graph.input} | {name for node in graph.node for name in node.output}
    # A part may begin behind the argument of an activation, or behind the value of a gate.
    nearer = [
        replace(point, argument=point.argument if point.argument in there else "")
        for point in points
        if not point.value or point.value in there
    ]
    noisy, prefix = nudged(model.proto, nearer)
    for draw in DRAWS if prefix else ():
        found += runs(noisy, feeds(noisy, prefix, draw), optimise=False)
    with suppress(NoReference):
        reference = open_reference(tapped(model.proto), model.base_dir)
        return found, [reference.run(case.feeds) for case in cases]
    return found, None


def _measured(mark: Boundary, old: Results, new: Results, variants: Variants) -> Measured:
    name, (rounded, exact) = mark.tensor, variants
    if exact is not None and name in exact[0] and is_float(old[0][name].dtype):
        dtype = old[0][name].dtype
        moved = compared(name, old, [], [{name: each[name].astype(dtype)} for each in exact])
        # An operator that decides something by rounding makes another function in float64: that is no rounding.
        rounded = [*rounded, exact] if moved.error < math.sqrt(float(ml_dtypes.finfo(dtype).eps)) else rounded
    found = compared(name, old, rounded, new)
    return Measured(mark, max(magnitude(case[name]) for case in old), found)


def _tokens(ours: Mapping[str, Array], theirs: Mapping[str, Array], carried: tuple[str, str]) -> dict[str, Array]:
    """B's values with the rows of the tokens alone, where that makes their shape that of A's."""
    count, rows = (int(theirs[name].reshape(-1)[0]) for name in carried)
    found = {}
    for name, value in theirs.items():
        found[name] = value
        if name not in ours or value.shape == ours[name].shape or value.ndim < _MATRIX:
            continue
        width = value.shape[-1]
        if value.size == 0 or value.size % (rows * width):
            continue
        kept = value.reshape(-1, rows, width)[:, :count]
        if kept.size == ours[name].size and ours[name].shape[-1] == width:
            found[name] = kept.reshape(ours[name].shape)
    return found


def groups(view: GraphView, names: Sequence[str], cases: Sequence[Case], limit: int) -> Iterator[list[str]]:
    """Divide tensors into groups whose values stay below `limit` bytes, estimated from inferred shapes."""
    # A symbolic dimension counts as its largest size in the cases; what is unknown as the largest input.
    sizes: dict[str, int] = {}
    largest = 1
    for case in cases:
        for name, array in case.feeds.items():
            largest = max(largest, array.size)
            for dim, size in zip(view.type_of(name).shape or (), array.shape, strict=False):
                if isinstance(dim, str):
                    sizes[dim] = max(sizes.get(dim, 1), size)
    group: list[str] = []
    held = 0
    for name in names:
        kind = view.type_of(name)
        dims = kind.shape if kind.shape is not None else (None,)
        known = [size for dim in dims if (size := dim if isinstance(dim, int) else sizes.get(dim or "", 0)) > 0]
        width = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize if kind.elem_type else 4
        size = math.prod(known) * (largest if len(known) < len(dims) else 1) * width
        if group and held + size > limit:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group


# -- part by part ----------------------------------------------------------------------------------------------------


def isolate(bench: Bench, marks: Sequence[Boundary]) -> tuple[Measured, ...]:
    """Run every part between boundaries in isolation.

    Raises:
        ValidationError: A cannot be loaded with additional outputs.
    """
    return tuple(_examine(bench, frozenset(mark.tensor for mark in marks), marks))


def narrow(bench: Bench, marks: Sequence[Boundary], found: Measured) -> Fault:
    """Follow a guilty part down to the first tensor inside at which the error appears."""
    # Every round cuts the guilty part at its inner tensors and keeps the first guilty piece, in A's order. Later pieces
    # may be guilty too, but the first one is the cause that the user can act on.
    stops = frozenset(mark.tensor for mark in marks)
    guilty = found
    while inner := _inner(bench, stops, guilty.boundary.tensor):
        stops = stops.union(inner)
        targets = [replace(guilty.boundary, tensor=name) for name in (*inner, guilty.boundary.tensor)]
        first = next((each for each in _examine(bench, stops, targets) if each.exceeds), None)
        if first is None:
            break  # no piece alone exceeds its allowance: small errors add up over the part
        guilty = first
    tensor, block = guilty.boundary.tensor, found.boundary.block
    ours, theirs = (side.piece(upstream(side.main, stops, [tensor])) for side in (bench.a, bench.b))
    causes = _causes(difference(ours, theirs))
    if not math.isfinite(found.found.error):
        causes = [found.obstacle or f"{tensor} {found.found.reason}", *causes]
    part = None if block is None else _part(bench.a.main, block, tensor)
    return Fault(
        block=found.boundary.label,
        part=part,
        program=block.program if block is not None and part == "the heads" else None,
        tensor=tensor,
        error=found.found.error,
        allowed=found.found.allowed,
        causes=tuple(causes[:_MOST_CAUSES]),
    )


def _inner(bench: Bench, stops: frozenset[str], tensor: str) -> list[str]:
    """Tensors that both models compute inside the part that ends in `tensor`; an even selection of very many."""
    a, b = (upstream(side.main, stops, [tensor]) for side in (bench.a, bench.b))
    theirs = {name for index in b.nodes for name in bench.b.main.nodes[index].output}
    names = [name for name in common(bench.a.main, bench.b.main, a.nodes) if name in theirs and name != tensor]
    return names[:: max(len(names) // _MOST_INNER, 1)]


def _part(a: GraphView, block: Landmark, tensor: str) -> str:
    """By position in A's graph order: up to the last pre-activation, up to the activation's output, behind it."""
    place = a.producer[tensor]
    if tensor != block.end and place <= max(a.producer.get(name, -1) for name in block.starts):
        return "the first linear operator"
    if place <= a.producer.get(block.end, -1):
        return "the activation" if block.program is None else "the heads"
    return "the second linear operator"


def _examine(bench: Bench, stops: frozenset[str], targets: Sequence[Boundary]) -> Iterator[Measured]:
    by_name = {target.tensor: target for target in targets}
    # Half of the memory is for the values that the parts read, half for those that they are compared with.
    limit = bench.group_bytes // max(2 * len(bench.cases), 1)
    done = 0
    for group in groups(bench.a.main, list(by_name), bench.cases, limit):
        cuts = {name: tuple(upstream(side.main, stops, [name]) for side in (bench.a, bench.b)) for name in group}
        needed = {name for pair in cuts.values() for part in pair for name in part.inputs}
        wanted = sorted((needed | set(group)) & set(bench.a.main.producer))
        # One run of A serves all parts of the group, then its values are dropped.
        session = open_tapped(bench.a, wanted, bench.provider)
        seen = [Case(case.name, {**case.feeds, **session.run(case.feeds, wanted)}) for case in bench.cases]
        for name in group:
            bench.progress(f"trying {by_name[name].label} alone", done, len(by_name))
            yield _try(bench, by_name[name], cuts[name], seen)
            done += 1


def _try(bench: Bench, target: Boundary, cuts: tuple[Cut, ...], seen: Sequence[Case]) -> Measured:
    name = target.tensor
    a, b = (side.piece(part) for side, part in zip((bench.a, bench.b), cuts, strict=True))
    old = [{name: case.feeds[name]} for case in seen]
    # A part that does not run on A's values, because shapes or types inside it differ, is guilty as well.
    try:
        session = open_session(b.proto, bench.provider, optimise=bench.optimise, base_dir=b.base_dir)
        new = [session.run(case.feeds, [name]) for case in _fed(b, seen)]
    except ValidationError as error:
        return Measured(target, 0.0, Judgement(name, math.inf, 0.0, 0.0, "does not run"), str(error))
    return _measured(target, old, new, _variants(a, _fed(a, seen), [name], bench.provider, bench.points))


def _fed(piece: LoadedModel, seen: Sequence[Case]) -> list[Case]:
    """The values that a part reads, cast to its declared element types; open types are declared here.

    A model may compute in another precision than A: its parts are fed A's values, rounded to its own types.
    """
    cases = []
    for case in seen:
        given = {}
        for declared in piece.proto.graph.input:
            array = case.feeds[declared.name]
            kind = declared.type.tensor_type.elem_type
            if not kind or not is_float(array.dtype):
                kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
                declared.type.tensor_type.elem_type = kind
            given[declared.name] = np.asarray(array.astype(onnx.helper.tensor_dtype_to_np_dtype(kind), copy=False))
        cases.append(Case(case.name, given))
    return cases


def _causes(found: GraphDifference) -> list[str]:
    """The differences in words: first what changed, then what only one side has."""
    functions = [each for each in found.fields if each.what == "function"]
    changes = [*found.tensors, *functions, *found.regions]
    return [each.text for each in sorted(changes, key=lambda each: None in (each.a, each.b))]

"""Find the faulty part of B by running every part in isolation on A's values.

Each part of B reads the values that A computes, so errors do not propagate and a part is guilty only of its own. A
guilty part is narrowed down as far as both models have tensors of the same name. Parts are cut out one at a time, and
external weights stay external.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.compare.boundaries import Boundary, Landmark, common
from rewriter.compare.outputs import open_model
from rewriter.compare.taps import GROUP_BYTES, groups, open_tapped
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import Cut, upstream
from rewriter.proof.claims import Claim, Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.judging import Values, judge
from rewriter.proof.noise import QUANTISERS
from rewriter.proof.reference.float64 import NoReference, open_reference
from rewriter.proof.reference.operators.table import Operator
from rewriter.proof.sensitivity import Sensitivity, sensitivity

_MOST_INNER = 48
"""Maximum number of tensors inside a guilty part that are examined in one step."""

Feeds = Mapping[str, Array]
Own = Mapping[tuple[str, str], Operator]


@dataclass(frozen=True)
class Isolated:
    """One part of B on A's values; errors as in `rewriter.compare.taps.Tap`.

    Attributes:
        boundary: where the part ends.
        error_a: error of A's part against float64 on the same values; None without a reference.
        error_b: error of B's part; infinite if no tolerance would help.
        allowed: the allowance for `error_b`.
        error_ratio: error of B over that of A.
        obstacle: why B's part did not run.
        reason: why the part is guilty; None if it is not.
    """

    boundary: Boundary
    error_a: float | None
    error_b: float
    allowed: float
    error_ratio: float | None
    obstacle: str | None = None
    reason: str | None = None

    @property
    def guilty(self) -> bool:
        """Whether the part's error exceeds its allowance."""
        return self.reason is not None


@dataclass(frozen=True)
class Fault:
    """A guilty part.

    Attributes:
        isolated: the part between boundaries.
        part: `the heads`, `the activation`, `the first linear operator` or `the second linear operator`; None outside
            blocks.
        program: the head program, if the heads are at fault.
        tensor: the first tensor inside at which the error appears.
        pieces: the nodes of A and of B that compute that tensor, as models.
    """

    isolated: Isolated
    part: str | None
    program: str | None
    tensor: str
    pieces: tuple[LoadedModel, LoadedModel] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Bench:
    """The two models, and how parts of them are run.

    Attributes:
        a: the original.
        b: the other model.
        cases: inputs that A accepts.
        provider: execution provider.
        coarse: see `rewriter.proof.judging.judge`.
        planned: returns A with certified head programs, in float64; called only if B exceeds its allowance without.
        claims: claims about A's activations.
        optimise: whether to run the parts with graph optimisation; A's values always come from a run without.
        progress: called with a description of the step, the number of steps done, and the number of all steps.
    """

    a: Side
    b: Side
    cases: Sequence[Case]
    provider: str
    coarse: float
    planned: Callable[[], Sequence[Side]] = lambda: ()
    claims: Sequence[Claim] = ()
    optimise: bool = False
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None


def isolate(bench: Bench, marks: Sequence[Boundary], group_bytes: int = GROUP_BYTES) -> tuple[Isolated, ...]:
    """Run every part between boundaries in isolation.

    Raises:
        ValidationError: A cannot be loaded with additional outputs.
    """
    stops = frozenset(mark.tensor for mark in marks)
    return tuple(_examine(bench, stops, marks, group_bytes))


def narrow(bench: Bench, marks: Sequence[Boundary], found: Isolated) -> Fault:
    """Follow a guilty part down to the first tensor inside at which the error appears."""
    # Every round cuts the guilty part at its inner tensors and keeps the first guilty piece, in A's order. Later pieces
    # may be guilty too, but the first one is the cause that the user can act on.
    stops = frozenset(mark.tensor for mark in marks)
    guilty = found
    while True:
        inner = _inner(bench, stops, guilty.boundary.tensor)
        if not inner:
            break
        stops = stops.union(inner)
        targets = [replace(guilty.boundary, tensor=name) for name in (*inner, guilty.boundary.tensor)]
        first = next((each for each in _examine(bench, stops, targets, GROUP_BYTES) if each.guilty), None)
        if first is None:
            break  # no piece alone exceeds its allowance: small errors add up over the part
        guilty = first
    tensor = guilty.boundary.tensor
    pieces = tuple(side.piece(upstream(side.main, stops, [tensor])) for side in (bench.a, bench.b))
    part = _part(bench, found.boundary.block, tensor)
    program = found.boundary.block.program if found.boundary.block and part == "the heads" else None
    return Fault(found, part, program, tensor, (pieces[0], pieces[1]))


def _inner(bench: Bench, stops: frozenset[str], tensor: str) -> list[str]:
    """Tensors that both models compute inside the part that ends in `tensor`; an even selection of very many."""
    a, b = (upstream(side.main, stops, [tensor]) for side in (bench.a, bench.b))
    theirs = {name for index in b.nodes for name in bench.b.main.nodes[index].output}
    names = [name for name in common(bench.a.main, bench.b.main, a.nodes) if name in theirs and name != tensor]
    step = max(len(names) // _MOST_INNER, 1)
    return names[::step]


def _part(bench: Bench, block: Landmark | None, tensor: str) -> str | None:
    if block is None:
        return None
    if tensor == block.end:
        return "the activation" if block.program is None else "the heads"
    # By position in A's graph order: up to the last pre-activation, up to the activation's output, behind it.
    place = bench.a.main.producer[tensor]
    if place <= max(bench.a.main.producer.get(name, -1) for name in block.starts):
        return "the first linear operator"
    if place <= bench.a.main.producer.get(block.end, -1):
        return "the activation" if block.program is None else "the heads"
    return "the second linear operator"


def _examine(bench: Bench, stops: frozenset[str], targets: Sequence[Boundary], group_bytes: int) -> Iterator[Isolated]:
    by_name = {target.tensor: target for target in targets}
    # Half of the memory is for the values that the parts read, half for those that they are compared with.
    limit = group_bytes // max(2 * len(bench.cases), 1)
    done = 0
    for group in groups(bench.a.main, list(by_name), bench.cases, limit):
        cuts = {name: tuple(upstream(side.main, stops, [name]) for side in (bench.a, bench.b)) for name in group}
        needed = {name for pair in cuts.values() for part in pair for name in part.inputs}
        wanted = sorted((needed | set(group)) & set(bench.a.main.producer))
        # One run of A serves all parts of the group, then its values are dropped.
        session = open_tapped(bench.a, wanted, bench.provider)
        seen = [{**case.feeds, **session.run(case.feeds, wanted)} for case in bench.cases]
        for name in group:
            bench.progress(f"trying {by_name[name].label} alone", done, len(by_name))
            yield _try(bench, by_name[name], cuts[name], seen)
            done += 1


def _try(bench: Bench, target: Boundary, cuts: tuple[Cut, ...], seen: Sequence[Feeds]) -> Isolated:
    name = target.tensor
    a, b = (side.piece(part) for side, part in zip((bench.a, bench.b), cuts, strict=True))
    plain = [values[name] for values in seen]
    # A part that does not run on A's values, because shapes or types inside it differ, is guilty as well.
    old = plain
    if bench.optimise:
        with suppress(ValidationError):  # cut out, A's part may not run optimised: its values are known all the same
            old = _run(bench, a, name, seen)
    try:
        new = _run(bench, b, name, seen)
    except ValidationError as error:
        return Isolated(target, None, float("inf"), 0.0, None, str(error), "does not run")
    judged = judge(
        Values(plain, old, new, _exact(a, name, seen)),
        bench.coarse,
        lambda channels: _moved(bench, a, name, seen).errors(name, channels),
        lambda: _planned(bench, cuts[0], name, seen),
    )
    return Isolated(target, judged.error_a, judged.error_b, judged.allowed, judged.ratio, None, judged.reason)


def _run(bench: Bench, piece: LoadedModel, name: str, seen: Sequence[Feeds]) -> list[Array]:
    feeds = [_feeds(piece, values) for values in seen]
    session = open_model(piece, bench.provider, optimise=bench.optimise)
    return [session.run(given, [name])[name] for given in feeds]


def _moved(bench: Bench, piece: LoadedModel, name: str, seen: Sequence[Feeds]) -> Sensitivity:
    """How far rounding moves the end of A's part.

    The end itself receives noise, since B's part may compute it by another formula. What a quantiser reads from outside
    receives none, since both parts are fed the same values.
    """
    cases = [Case("", _feeds(piece, values)) for values in seen]
    quantised = {read for node in piece.proto.graph.node if node.op_type in QUANTISERS for read in node.input}
    plain = [{name: values[name]} for values in seen]
    return sensitivity(piece, cases, plain, bench.provider, claims=bench.claims, ends=[name], still=quantised)


def _exact(piece: LoadedModel, name: str, seen: Sequence[Feeds], own: Own | None = None) -> list[Array] | None:
    try:
        feeds = [_feeds(piece, values) for values in seen]
        exact = open_reference(piece.proto, piece.base_dir, own)
        return [exact.run(given)[name] for given in feeds]
    except NoReference:
        return None


def _planned(bench: Bench, part: Cut, name: str, seen: Sequence[Feeds]) -> list[list[Array]]:
    """The end of A's part with certified programs, in float64."""
    found = [
        _exact(side.piece(upstream(side.main, frozenset(part.inputs), [name])), name, seen, side.own)
        for side in bench.planned()
        if name in side.main.producer
    ]
    return [values for values in found if values is not None]


def _feeds(piece: LoadedModel, values: Feeds) -> dict[str, Array]:
    """The values that a part reads, cast to its declared element types; open types are declared here.

    A model may compute in another precision than A: its parts are fed A's values, rounded to its own types.
    """
    feeds = {}
    for declared in piece.proto.graph.input:
        array = values[declared.name]
        kind = declared.type.tensor_type.elem_type
        if not kind or not is_float(array.dtype):
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            declared.type.tensor_type.elem_type = kind
        feeds[declared.name] = np.asarray(array.astype(onnx.helper.tensor_dtype_to_np_dtype(kind), copy=False))
    return feeds

"""Which part of B is wrong: every part by itself, fed with what A really computes.

Comes in: two models and their boundaries. Goes out: `Isolated` for each part between boundaries, and a `Fault` for each
guilty one, narrowed down as far as both models name tensors alike. Used by `--bisect`.

Errors do not travel from one part to the next here: each part of B reads A's own values, so a part is guilty by what
it does itself. Parts are cut out one at a time; external weights stay external.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import onnx

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import Cut, upstream
from rewriter.proof.boundaries import Boundary, Landmark, common
from rewriter.proof.cases import Case
from rewriter.proof.claims import Side
from rewriter.proof.distance import FACTOR, Array, magnitude
from rewriter.proof.float64 import NoReference, open_reference
from rewriter.proof.pairs import open_model
from rewriter.proof.roles import is_float
from rewriter.proof.taps import GROUP_BYTES, groups, open_tapped
from rewriter.proof.verdicts import believable, distance, ratio_of

_MOST_INNER = 48
"""Tensors inside a guilty part that are looked at in one step."""

Feeds = Mapping[str, Array]


@dataclass(frozen=True)
class Isolated:
    """One part of B on A's values; errors as in `rewriter.proof.taps.Tap`.

    Attributes:
        boundary: where the part ends.
        error_a: error of A's part against float64 on the same values; None without a reference.
        error_b: error of B's part.
        allowed: what that could be.
        error_ratio: error of B over that of A.
        obstacle: why B's part did not run.
    """

    boundary: Boundary
    error_a: float | None
    error_b: float
    allowed: float
    error_ratio: float | None
    obstacle: str | None = None

    @property
    def guilty(self) -> bool:
        """Whether the part is further off than it may be."""
        return not self.error_b <= self.allowed


@dataclass(frozen=True)
class Fault:
    """A guilty part.

    Attributes:
        isolated: the part between boundaries.
        part: `the heads`, `the activation`, `the first linear operator`, `the second linear operator`; None outside of
            blocks.
        program: the head program, where the heads are at fault.
        tensor: the first tensor inside at which the error appears.
        pieces: the nodes of A and of B that make that tensor, as models.
    """

    isolated: Isolated
    part: str | None
    program: str | None
    tensor: str
    pieces: tuple[LoadedModel, LoadedModel] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Bench:
    """What parts are tried on.

    Attributes:
        a: the original.
        b: the other model.
        cases: inputs that A accepts.
        provider: execution provider.
        coarse: the share of the largest value that is allowed without a float64 reference.
        certified: gives a model with A's weights and certified head programs, None where there are none.
        optimise: whether the parts are run with graph optimisation; A's values are always taken without.
        progress: called with what is being done, steps done, steps in all.
    """

    a: Side
    b: Side
    cases: Sequence[Case]
    provider: str
    coarse: float
    certified: Callable[[], Side | None] = lambda: None
    optimise: bool = False
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None


def isolate(bench: Bench, marks: Sequence[Boundary], group_bytes: int = GROUP_BYTES) -> tuple[Isolated, ...]:
    """Try every part between boundaries.

    Raises:
        ValidationError: A cannot be loaded with further outputs.
    """
    stops = frozenset(mark.tensor for mark in marks)
    return tuple(_examine(bench, stops, marks, group_bytes))


def narrow(bench: Bench, marks: Sequence[Boundary], found: Isolated) -> Fault:
    """Follow a guilty part down to the first tensor inside at which the error appears."""
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
            break  # no step alone is over its share: the part as a whole is
        guilty = first
    tensor = guilty.boundary.tensor
    pieces = tuple(side.piece(upstream(side.main, stops, [tensor])) for side in (bench.a, bench.b))
    part = _part(bench, found.boundary.block, tensor)
    program = found.boundary.block.program if found.boundary.block and part == "the heads" else None
    return Fault(found, part, program, tensor, (pieces[0], pieces[1]))


def _inner(bench: Bench, stops: frozenset[str], tensor: str) -> list[str]:
    """Tensors that both models make inside the part that ends in `tensor`; of very many an even selection."""
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
    place = bench.a.main.producer[tensor]
    if place <= max(bench.a.main.producer.get(name, -1) for name in block.starts):
        return "the first linear operator"
    if place <= bench.a.main.producer.get(block.end, -1):
        return "the activation" if block.program is None else "the heads"
    return "the second linear operator"


def _examine(bench: Bench, stops: frozenset[str], targets: Sequence[Boundary], group_bytes: int) -> Iterator[Isolated]:
    by_name = {target.tensor: target for target in targets}
    limit = group_bytes // max(2 * len(bench.cases), 1)
    done = 0
    for group in groups(bench.a.main, list(by_name), bench.cases, limit):
        cuts = {name: tuple(upstream(side.main, stops, [name]) for side in (bench.a, bench.b)) for name in group}
        needed = {name for pair in cuts.values() for part in pair for name in part.inputs}
        wanted = sorted((needed | set(group)) & set(bench.a.main.producer))
        session = open_tapped(bench.a, wanted, bench.provider)
        seen = [{**case.feeds, **session.run(case.feeds, wanted)} for case in bench.cases]
        for name in group:
            bench.progress(f"trying {by_name[name].label} alone", done, len(by_name))
            yield _try(bench, by_name[name], cuts[name], seen)
            done += 1


def _try(bench: Bench, target: Boundary, cuts: tuple[Cut, ...], seen: Sequence[Feeds]) -> Isolated:
    name = target.tensor
    a, b = (side.piece(part) for side, part in zip((bench.a, bench.b), cuts, strict=True))
    ours = [values[name] for values in seen]
    right = _truth(a, name, seen)
    try:
        theirs = _run(bench, b, name, seen)
        ours = _run(bench, a, name, seen) if bench.optimise else ours
    except ValidationError as error:
        return Isolated(target, None, float("inf"), 0.0, None, str(error))
    exact = ours if right is None else right
    top = max(magnitude(values) for values in exact)
    if not believable(distance(ours, exact), top, bench.coarse):
        right, exact = None, ours
    error_a, error_b = distance(ours, exact), distance(theirs, exact)
    if right is None:
        allowed, ratio = bench.coarse * top, None
    else:
        floor = (float(ml_dtypes.finfo(ours[0].dtype).eps) if is_float(ours[0].dtype) else 0.0) * top
        allowed, ratio = FACTOR * max(error_a, floor), ratio_of(error_b, error_a, floor)
    if not error_b <= allowed and right is not None:
        allowed += _certified(bench, target, cuts[0], seen, right)
    return Isolated(target, None if right is None else error_a, error_b, allowed, ratio)


def _run(bench: Bench, piece: LoadedModel, name: str, seen: Sequence[Feeds]) -> list[Array]:
    feeds = [_feeds(piece, values) for values in seen]
    session = open_model(piece, bench.provider, optimise=bench.optimise)
    return [session.run(given, [name])[name] for given in feeds]


def _truth(piece: LoadedModel, name: str, seen: Sequence[Feeds]) -> list[Array] | None:
    try:
        feeds = [_feeds(piece, values) for values in seen]
        exact = open_reference(piece.proto, piece.base_dir)
        return [exact.run(given)[name] for given in feeds]
    except NoReference:
        return None


def _certified(bench: Bench, target: Boundary, part: Cut, seen: Sequence[Feeds], right: Sequence[Array]) -> float:
    """How far certified programs may move the end of this part."""
    side = bench.certified()
    if side is None or target.tensor not in side.main.producer:
        return 0.0
    rebuilt = _truth(side.piece(upstream(side.main, frozenset(part.inputs), [target.tensor])), target.tensor, seen)
    return 0.0 if rebuilt is None else distance(rebuilt, right)


def _feeds(piece: LoadedModel, values: Feeds) -> dict[str, Array]:
    """The values that a part reads, in the element types that it declares; what it leaves open is declared here."""
    feeds = {}
    for declared in piece.proto.graph.input:
        array = values[declared.name]
        kind = declared.type.tensor_type.elem_type
        if not kind or not is_float(array.dtype):
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            declared.type.tensor_type.elem_type = kind
        feeds[declared.name] = np.asarray(array.astype(onnx.helper.tensor_dtype_to_np_dtype(kind), copy=False))
    return feeds

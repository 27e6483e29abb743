"""Error growth through depth: two models compared at every boundary.

Comes in: two models, boundaries, cases. Goes out: a `Tap` for each boundary. Used by `--taps blocks`;
`rewriter.proof.isolate` taps in the same groups.

Boundaries become outputs of the models, a group of them at a time: a group's values stay below a bound in memory, and
each group is a run of its own. Models with external data keep it external, so their size does not matter here.
By default nothing is optimised, so that the arithmetic is that of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import ml_dtypes
import onnx

from rewriter.graph.extract import with_outputs
from rewriter.graph.view import GraphView
from rewriter.proof.boundaries import Boundary
from rewriter.proof.cases import Case
from rewriter.proof.claims import Side
from rewriter.proof.distance import FACTOR, Array, gap, largest, magnitude
from rewriter.proof.float64 import open_reference
from rewriter.proof.roles import is_float
from rewriter.proof.sessions import Session, open_session
from rewriter.proof.verdicts import believable, ratio_of

Values = dict[str, Array]

GROUP_BYTES = 256 * 2**20
"""Bytes of the values of one model that are held at once, over all cases, unless one boundary alone has more."""


@dataclass(frozen=True)
class Tap:
    """What was measured at one boundary; errors are the largest over cases, in units of the tensor.

    Attributes:
        boundary: where.
        magnitude: largest finite |value| of A.
        difference: largest |B - A|.
        error_a: error of A against float64; None without a reference.
        error_b: error of B; against A where there is no reference.
        allowed: its share: four times the error of A, or of rounding the largest value, and what certified programs
            amount to.
        error_ratio: error of B over that of A; None without a reference.
    """

    boundary: Boundary
    magnitude: float
    difference: float
    error_a: float | None
    error_b: float
    allowed: float
    error_ratio: float | None

    @property
    def exceeds(self) -> bool:
        """Whether B is further off than its share."""
        return not self.error_b <= self.allowed

    @property
    def relative(self) -> float:
        """The error of B over the largest value."""
        return self.error_b / self.magnitude if self.magnitude else (0.0 if not self.error_b else float("inf"))


def tap(
    a: Side,
    b: Side,
    marks: Sequence[Boundary],
    cases: Sequence[Case],
    provider: str,
    *,
    truth: bool,
    coarse: float,
    optimise: bool = False,
    certified: Callable[[], Side | None] = lambda: None,
    group_bytes: int = GROUP_BYTES,
) -> tuple[Tap, ...]:
    """Compare two models at every boundary.

    Args:
        a: the original.
        b: the other model.
        marks: the boundaries.
        cases: inputs that both accept.
        provider: execution provider.
        truth: whether A has a float64 evaluation.
        coarse: the share of the largest value that is allowed without one.
        optimise: run with graph optimisation, as far as it works around the boundaries.
        certified: gives a model with A's weights and certified head programs; asked only where B is over its share.
        group_bytes: how much of the values of one model may be held at once.

    Raises:
        NoReference: the float64 evaluation does not give these tensors; call again without.
        ValidationError: a model cannot be loaded with further outputs, or does not run.
    """
    tallies = {mark.tensor: _Tally(coarse) for mark in marks}
    names = [mark.tensor for mark in marks]
    for group in groups(a.main, names, cases, group_bytes // max(len(cases), 1)):
        # One session at a time: two may not fit into memory.
        ours, theirs = (_run(side, group, cases, provider, optimise=optimise) for side in (a, b))
        right = _exact(a, group, cases) if truth else ours
        for name in group:
            for each in zip(ours, theirs, right, strict=True):
                tallies[name].add(*(values[name] for values in each))
        if truth and any(not tallies[name].holds for name in group):
            _add_certified(certified(), group, cases, right, tallies)
    return tuple(tallies[mark.tensor].result(mark, truth=truth) for mark in marks)


def _run(side: Side, names: Sequence[str], cases: Sequence[Case], provider: str, *, optimise: bool) -> list[Values]:
    session = open_tapped(side, names, provider, optimise=optimise)
    return [session.run(case.feeds, names) for case in cases]


def _exact(side: Side, names: Sequence[str], cases: Sequence[Case]) -> list[Values]:
    reference = open_reference(with_outputs(side.model.proto, side.main, names), side.model.base_dir)
    return [{name: found[name] for name in names} for found in (reference.run(case.feeds) for case in cases)]


def _add_certified(
    side: Side | None,
    group: Sequence[str],
    cases: Sequence[Case],
    right: Sequence[Values],
    tallies: Mapping[str, _Tally],
) -> None:
    """Allow for what certified programs move at each boundary, in exact arithmetic."""
    if side is None:
        return
    names = [name for name in group if name in side.main.producer]
    for exact, moved in zip(right, _exact(side, names, cases), strict=True):
        for name in names:
            tallies[name].moved = max(tallies[name].moved, largest(gap(moved[name], exact[name])))


def open_tapped(side: Side, names: Sequence[str], provider: str, *, optimise: bool = False) -> Session:
    """A session that gives tensors inside a model."""
    proto = with_outputs(side.model.proto, side.main, names)
    return open_session(proto, provider, optimise=optimise, base_dir=side.model.base_dir)


def groups(view: GraphView, names: Sequence[str], cases: Sequence[Case], limit: int) -> Iterator[list[str]]:
    """Tensors in groups whose values stay below `limit` bytes, by their inferred shapes."""
    sizes = _dimensions(view, cases)
    group: list[str] = []
    held = 0
    for name in names:
        size = _bytes(view, name, sizes)
        if group and held + size > limit:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group


def _dimensions(view: GraphView, cases: Sequence[Case]) -> dict[str, int]:
    """Symbolic dimension to its largest size in the cases; the largest of all under the empty string."""
    sizes: dict[str, int] = {"": 1}
    for case in cases:
        for name, array in case.feeds.items():
            for dim, size in zip(view.type_of(name).shape or (), array.shape, strict=False):
                if isinstance(dim, str):
                    sizes[dim] = max(sizes.get(dim, 1), size)
                    sizes[""] = max(sizes[""], size)
    return sizes


def _bytes(view: GraphView, name: str, sizes: Mapping[str, int]) -> int:
    """Bytes of a tensor; an unknown dimension counts as the largest known one, an unknown rank as three of them."""
    kind = view.type_of(name)
    dims = kind.shape if kind.shape is not None else (None, None, None)
    count = prod(dim if isinstance(dim, int) else sizes.get(dim or "", sizes[""]) for dim in dims)
    return count * (onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize if kind.elem_type else 4)


@dataclass
class _Tally:
    """The largest distances at one boundary so far."""

    coarse: float
    magnitude: float = 0.0
    difference: float = 0.0
    error_a: float = 0.0
    error_b: float = 0.0
    epsilon: float = 0.0
    moved: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the error is within four times that of A, or of rounding the largest value."""
        return self.error_b <= FACTOR * max(self.error_a, self.epsilon * self.magnitude)

    def add(self, ours: Array, theirs: Array, right: Array) -> None:
        if ours.shape != theirs.shape:
            self.difference = self.error_b = float("inf")
            return
        if is_float(ours.dtype):
            self.epsilon = float(ml_dtypes.finfo(ours.dtype).eps)
        self.magnitude = max(self.magnitude, magnitude(ours))
        self.difference = max(self.difference, largest(gap(theirs, ours)))
        if right.shape != ours.shape:
            right = ours
        self.error_a = max(self.error_a, largest(gap(ours, right)))
        self.error_b = max(self.error_b, largest(gap(theirs, right)))

    def result(self, mark: Boundary, *, truth: bool) -> Tap:
        if not truth or not believable(self.error_a, self.magnitude, self.coarse):
            allowed = self.coarse * self.magnitude + self.moved
            return Tap(mark, self.magnitude, self.difference, None, self.difference, allowed, None)
        floor = self.epsilon * self.magnitude
        allowed = FACTOR * max(self.error_a, floor) + self.moved
        ratio = ratio_of(self.error_b, self.error_a, floor)
        return Tap(mark, self.magnitude, self.difference, self.error_a, self.error_b, allowed, ratio)

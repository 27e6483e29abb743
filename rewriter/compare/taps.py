"""Measure how errors grow through depth: compare two models at every boundary.

Boundaries become outputs of the models, in groups whose values fit into bounded memory; each group is a separate run.
External data stays external, so the size of the models does not matter. By default nothing is optimised, so that the
arithmetic is that of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.compare.boundaries import Boundary
from rewriter.graph.extract import with_outputs
from rewriter.graph.view import GraphView
from rewriter.ort.sessions import Session, open_session
from rewriter.proof.claims import Claim, Side
from rewriter.proof.distance import gap, largest, magnitude
from rewriter.proof.inputs.cases import Case
from rewriter.proof.judging import Values, judge
from rewriter.proof.reference.float64 import open_reference
from rewriter.proof.sensitivity import Sensitivity, sensitivity

Results = list[dict[str, Array]]

GROUP_BYTES = 256 * 2**20
"""Maximum size in bytes of the values of one model in memory, over all cases; a single boundary may exceed it."""


@dataclass(frozen=True)
class Tap:
    """Measurements at one boundary. Errors are those of the channel with the least room, in the tensor's units.

    Attributes:
        boundary: the boundary.
        magnitude: largest finite |value| of A.
        difference: largest |B - A|; infinite if shapes differ.
        error_a: error of A against float64; None without a reference.
        error_b: error of B, against A if there is no reference; infinite if no tolerance would help.
        allowed: the allowance for `error_b`.
        error_ratio: largest error of B over that of A; None without a reference.
        reason: why B fails; None if it passes.
        finite: number of finite values of A; if there are none, nothing was compared.
    """

    boundary: Boundary
    magnitude: float
    difference: float
    error_a: float | None
    error_b: float
    allowed: float
    error_ratio: float | None
    reason: str | None = None
    finite: int = 0

    @property
    def exceeds(self) -> bool:
        """Whether B's error exceeds its allowance."""
        return self.reason is not None

    @property
    def relative(self) -> float:
        """The error of B relative to the largest value."""
        return self.error_b / self.magnitude if self.magnitude else (0.0 if not self.error_b else float("inf"))


@dataclass(frozen=True)
class Tapping:
    """The two models, and how to compare them at boundaries.

    Attributes:
        a: the original.
        b: the other model.
        cases: inputs that both accept.
        provider: execution provider.
        truth: whether A has a float64 evaluation.
        coarse: see `rewriter.proof.judging.judge`.
        planned: returns A with certified head programs, in float64; called only if B exceeds its allowance without.
        claims: claims about A's activations.
        optimise: whether to run with graph optimisation, as far as the additional outputs leave room for it.
        group_bytes: maximum size in bytes of the values of one model in memory.
        carried: where B's residual stream has rows that A's has not, behind those of the tokens: the tensors of B that
            hold the number of tokens and of all rows of a sequence.
    """

    a: Side
    b: Side
    cases: Sequence[Case]
    provider: str
    truth: bool
    coarse: float
    planned: Callable[[], Sequence[Side]] = lambda: ()
    claims: Sequence[Claim] = ()
    optimise: bool = False
    group_bytes: int = GROUP_BYTES
    carried: tuple[str, str] | None = None


def tap(tapping: Tapping, marks: Sequence[Boundary]) -> tuple[Tap, ...]:
    """Compare two models at every boundary.

    Raises:
        NoReference: the float64 evaluation does not yield these tensors; call again with `truth` unset.
        ValidationError: a model cannot be loaded with additional outputs, or does not run.
    """
    by_name = {mark.tensor: mark for mark in marks}
    limit = tapping.group_bytes // max(len(tapping.cases), 1)
    found = {}
    for names in groups(tapping.a.main, list(by_name), tapping.cases, limit):
        # One session at a time: two may not fit into memory.
        old = _run(tapping, tapping.a, names)
        new = _run(tapping, tapping.b, (*names, *(tapping.carried or ())))
        if tapping.carried is not None:
            new = [_tokens(ours, theirs, tapping.carried) for ours, theirs in zip(old, new, strict=True)]
        group = _Group(tapping, tuple(names), old, new)
        found.update({name: group.tap(by_name[name]) for name in names})
    return tuple(found[mark.tensor] for mark in marks)


@dataclass(frozen=True)
class _Group:
    """Boundaries that are measured together, with the values of both models there."""

    tapping: Tapping
    names: tuple[str, ...]
    old: Results
    new: Results

    def tap(self, mark: Boundary) -> Tap:
        name = mark.tensor
        old, new = ([case[name] for case in results] for results in (self.old, self.new))
        right = [case[name] for case in self._right] if self.tapping.truth else None
        judged = judge(
            Values(old, old, new, right),
            self.tapping.coarse,
            lambda channels: self._sensitivity.errors(name, channels),
            lambda: [[case[name] for case in planned] for planned in self._planned],
        )
        return Tap(
            mark,
            max(map(magnitude, old)),
            max(largest(gap(b, a)) if a.shape == b.shape else np.inf for a, b in zip(old, new, strict=True)),
            judged.error_a,
            judged.error_b,
            judged.allowed,
            judged.ratio,
            judged.reason,
            sum(int(np.isfinite(values.astype(np.float64)).sum()) for values in old),
        )

    @cached_property
    def _right(self) -> Results:
        return _exact(self.tapping.a, self.names, self.tapping.cases)

    @cached_property
    def _planned(self) -> list[Results]:
        # The planned model has every tensor of A except those inside the activations that it replaces.
        sides = self.tapping.planned()
        kept = [[name for name in self.names if name in side.main.producer] for side in sides]
        found = [_exact(side, names, self.tapping.cases) for side, names in zip(sides, kept, strict=True)]
        return [[{**ours, **moved} for ours, moved in zip(self._right, each, strict=True)] for each in found]

    @cached_property
    def _sensitivity(self) -> Sensitivity:
        a = self.tapping.a
        model = replace(a.model, proto=with_outputs(a.model.proto, a.main, self.names), path=None)
        plain = [{name: case[name] for name in self.names} for case in self.old]
        return sensitivity(model, self.tapping.cases, plain, self.tapping.provider, claims=self.tapping.claims)


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


_MATRIX = 2
"""The fewest axes of a tensor of the residual stream: tokens and channels."""


def _run(tapping: Tapping, side: Side, names: Sequence[str]) -> Results:
    session = open_tapped(side, names, tapping.provider, optimise=tapping.optimise)
    return [session.run(case.feeds, names) for case in tapping.cases]


def _exact(side: Side, names: Sequence[str], cases: Sequence[Case]) -> Results:
    proto = with_outputs(side.model.proto, side.main, names)
    reference = open_reference(proto, side.model.base_dir, side.own)
    return [{name: found[name] for name in names} for found in (reference.run(case.feeds) for case in cases)]


def open_tapped(side: Side, names: Sequence[str], provider: str, *, optimise: bool = False) -> Session:
    """Open a session that also outputs tensors inside a model."""
    proto = with_outputs(side.model.proto, side.main, names)
    return open_session(proto, provider, optimise=optimise, base_dir=side.model.base_dir)


def groups(view: GraphView, names: Sequence[str], cases: Sequence[Case], limit: int) -> Iterator[list[str]]:
    """Divide tensors into groups whose values stay below `limit` bytes, estimated from inferred shapes."""
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


def _dimensions(view: GraphView, cases: Sequence[Case]) -> dict[str | None, int]:
    """Maps a symbolic dimension to its largest size in the cases, and None to the largest size of any input."""
    sizes: dict[str | None, int] = {None: 1}
    for case in cases:
        for name, array in case.feeds.items():
            sizes[None] = max(sizes[None], array.size)
            for dim, size in zip(view.type_of(name).shape or (), array.shape, strict=False):
                if isinstance(dim, str):
                    sizes[dim] = max(sizes.get(dim, 1), size)
    return sizes


def _bytes(view: GraphView, name: str, sizes: Mapping[str | None, int]) -> int:
    """Estimated size of a tensor in bytes; its unknown dimensions together count as the largest input."""
    kind = view.type_of(name)
    dims = kind.shape if kind.shape is not None else (None,)
    sized = [dim if isinstance(dim, int) else sizes.get(dim, 0) if dim else 0 for dim in dims]
    known = [size for size in sized if size > 0]
    unknown = sizes[None] if len(known) < len(dims) else 1
    width = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize if kind.elem_type else 4
    return prod(known) * unknown * width

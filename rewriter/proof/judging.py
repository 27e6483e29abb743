"""Apply the pass rule to one tensor of any two models A and B: an output, a boundary, the end of a part.

A credible float64 evaluation of A is the truth (`rewriter.proof.pass_rule`). Without one A itself stands in, and B may
differ from it by as much as A moves when it rounds differently (`rewriter.proof.sensitivity`). Shapes, types, NaN and
infinities must agree in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from rewriter.arrays import Array
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.pass_rule import CAP, FACTOR, Channels, Wide, against_rounding, worst
from rewriter.proof.sensitivity import rounding
from rewriter.proof.statistics import STRINGS, compare

Moved = Callable[[Channels], Wide]
"""[channels] How far A moves under rounding. Expensive: called only where A stands in and B fails without it."""

Planned = Callable[[], Sequence[Sequence[Array]]]
"""Float64 evaluations of A with certified programs, each case by case: as planned, then shaken by the rounding of those
that are unstable (`rewriter.proof.planned`). Called only where B fails without them."""

Rule = Literal["float64", "original", "tolerance", "equal", "nothing"]
"""What judges a tensor; the last but one for values that are not floating-point."""

_SUSPECT = 8.0
"""A distance from float64 beyond this many times the coarsest rounding in the model is not explained by rounding."""


@dataclass(frozen=True, eq=False)
class Values:
    """Values of one tensor, case by case.

    Attributes:
        plain: of A, without graph optimisation.
        old: of A, run in the same way as B.
        new: of B.
        right: of A in float64; None if there is no such evaluation.
    """

    plain: Sequence[Array]
    old: Sequence[Array]
    new: Sequence[Array]
    right: Sequence[Array] | None

    @property
    def eps(self) -> float:
        """Spacing of floats in the tensor's type."""
        return float(ml_dtypes.finfo(self.old[0].dtype).eps)


@dataclass(frozen=True)
class Judged:
    """The verdict on one tensor. Errors are those of the channel with the least room, in output units.

    Attributes:
        rule: `float64`, `original` (A stands in), or `equal` (values that are not floating-point).
        channel: that channel.
        error_a: error of A against float64; None where A stands in.
        error_b: error of B; infinite if no tolerance would help.
        allowed: the allowance for `error_b`; 0 if no tolerance would help.
        ratio: largest error of B over that of A, over all channels; None where A stands in.
        reason: why B fails; None if it passes.
        share: where A stands in, the largest allowance for rounding, as a share of its channel's scale.
    """

    rule: Rule
    channel: tuple[int, ...]
    error_a: float | None
    error_b: float
    allowed: float
    ratio: float | None
    reason: str | None
    share: float = 0.0


def judge(values: Values, coarse: float, moved: Moved, planned: Planned, own: Moved | None = None) -> Judged:
    """Apply the rule to one tensor.

    Args:
        values: its values in both models.
        coarse: rounding of the coarsest arithmetic in A, as a share of the scale; a float64 evaluation that is much
            further away is not credible.
        moved: how far A moves under rounding.
        planned: A with certified programs.
        own: how far noise of the size of rounding moves A, where one run may show too little of it: at the outputs of
            whole models.
    """
    if not is_float(values.old[0].dtype):
        return _equal(values)
    # Parity is judged on the provider's results even if there is a float64 evaluation: A may overflow where that does
    # not, and B must do the same.
    exact = values.right is not None and believed(values.plain, values.right, coarse)
    apart = disparity(values.old, values.new)
    if apart is not None:
        return Judged("float64" if exact else "original", (), None, float("inf"), 0.0, None, apart)
    return _three_way(values, coarse, planned, own) if exact else _stand_in(values, moved)


def believed(plain: Sequence[Array], right: Sequence[Array], coarse: float) -> bool:
    """Whether a float64 evaluation is credible: A differs from it by rounding only, and is finite only where it is."""
    channels = Channels.of(right)
    known = zip(plain, right, strict=True)
    return channels.share(channels.errors(plain, right, plain)) <= _SUSPECT * coarse and all(
        value.shape == exact.shape and not np.any(_finite(value) & ~_finite(exact)) for value, exact in known
    )


def disparity(old: Sequence[Array], new: Sequence[Array]) -> str | None:
    """What no tolerance can excuse: differences in shape, type, NaN and infinities. None if there are none."""
    for ours, theirs in zip(old, new, strict=True):
        if ours.shape != theirs.shape:
            return f"has shape {list(theirs.shape)} instead of {list(ours.shape)}"
        if ours.dtype != theirs.dtype and not {ours.dtype.kind, theirs.dtype.kind} <= STRINGS:
            return f"is of type {theirs.dtype} instead of {ours.dtype}"
        if is_float(ours.dtype):
            a, b = (each.astype(np.float64) for each in (ours, theirs))
            if not np.array_equal(np.isnan(a), np.isnan(b)):
                return "is NaN in other places"
            if not np.array_equal(np.where(np.isinf(a), a, 0), np.where(np.isinf(b), b, 0)):
                return "is infinite in other places"
    return None


def ratio_of(error_b: float, error_a: float, floor: float) -> float:
    """Error of B over error of A, either counted as at least half of `floor`; 1 if both are below that."""
    least = max(0.5 * floor, float(np.finfo(np.float64).tiny))
    return max(error_b, least) / max(error_a, least)


def _equal(values: Values) -> Judged:
    apart = disparity(values.old, values.new)
    pairs = zip(values.old, values.new, strict=True)
    error = float("inf") if apart else max(compare("", old, new).max_abs for old, new in pairs)
    reason = apart or (None if error == 0.0 else "holds values that are not floating-point, and they differ")
    return Judged("equal", (), None, error, 0.0, None, reason)


def _stand_in(values: Values, moved: Moved) -> Judged:
    channels = Channels.of(values.old)
    errors, told = channels.errors(values.new, values.old), channels.errors(values.plain, values.old)
    noise = rounding(channels, told, values.eps)
    excess = worst(errors, noise)
    # What optimisation changes in A often suffices, and costs nothing; noisy runs of A do cost.
    if not excess.holds:
        noise = rounding(channels, np.maximum(told, moved(channels)), values.eps)
        excess = worst(errors, noise)
    return Judged(
        rule="original",
        channel=excess.channel,
        error_a=None,
        error_b=excess.error,
        allowed=excess.allowed,
        ratio=None,
        reason=None if excess.holds else excess.text,
        share=channels.share(FACTOR * noise),
    )


def _three_way(values: Values, coarse: float, planned: Planned, own: Moved | None) -> Judged:
    right = values.right or ()
    channels = Channels.of(right)
    errors_a, errors_b = (channels.errors(given, right, values.old) for given in (values.old, values.new))
    excess = worst(errors_b, channels.rounding(errors_a, values.eps))
    # Rounding alone explains most results; only the others need another float64 evaluation of A.
    if not excess.holds:
        carried = _carried(channels, right, planned())
        excess = against_rounding(
            channels,
            errors_a,
            values.eps,
            lambda rounding: worst(errors_b, rounding, carried),
            lambda: None if own is None else own(channels),
            coarse,
        )
    top_a, top_b, floor = (float(np.max(each, initial=0.0)) for each in (errors_a, errors_b, channels.scale))
    return Judged(
        rule="float64",
        channel=excess.channel,
        error_a=float(errors_a[excess.channel]) if errors_a.size else 0.0,
        error_b=excess.error,
        allowed=excess.allowed,
        ratio=ratio_of(top_b, top_a, values.eps * floor),
        reason=None if excess.holds else excess.text,
    )


def _carried(channels: Channels, right: Sequence[Array], programs: Sequence[Sequence[Array]]) -> Wide:
    """[channels] The effect of certified errors, and of what their programs' rounding adds to it; capped."""
    carried: Wide = np.zeros(channels.scale.shape)
    for number, results in enumerate(programs):
        if number == 0:
            carried = channels.errors(results, right)
        else:
            carried = carried + channels.not_by_luck(channels.errors(results, programs[0]))
    return np.minimum(carried, CAP * channels.scale)


def _finite(values: Array) -> Array:
    return np.isfinite(values.astype(np.float64))

"""The pass rule: how far a tensor may be from the truth.

With e(model) the largest distance of a model's output from a float64 evaluation, per channel,

    e(rewritten) <= 4 max(e(original), 2 median e(original), eps) + certified,

where every term is in units of its channel's scale. The first term is rounding: the original's own; the typical value
over all channels, for a channel that was lucky; and the spacing of floats, for an original that happens to be exact.
`certified` is the effect of certified program errors at that output; it is never measured on the model under test
(`rewriter.proof.planned`). Allowances are per channel, so a logit of -1e9 loosens no other channel. See
docs/decisions/0004-pass-rule.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.arrays import Array
from rewriter.files.walk import iter_nodes
from rewriter.proof.distance import FACTOR, gap

__all__ = [
    "CAP",
    "FACTOR",
    "Channels",
    "Excess",
    "Wide",
    "against_rounding",
    "coarsest_allowance",
    "exact_rounding",
    "worst",
]

Wide = NDArray[np.float64]

LUCK = 2.0
"""A channel's rounding counts as at least this many times that of the median channel, since it may have been lucky."""

SLACK = 16.0
"""How far float64 evaluations may differ, in units of the original's rounding scaled down to float64."""

CAP = 1e-3
"""Maximum effect of certified errors at an output, as a share of its channel's scale."""


@dataclass(frozen=True, eq=False)
class Channels:
    """The division of an output's elements into channels.

    The first axis, and every axis whose size differs between cases, counts samples (batch, tokens); the remaining axes
    count channels.

    Attributes:
        samples: the axes that count samples; None if the ranks of the cases differ, so that all is one channel.
        scale: [channels] Largest finite |truth| of each channel, at least the median over channels that are not zero.
    """

    samples: tuple[int, ...] | None
    scale: Wide

    @classmethod
    def of(cls, truth: Sequence[Array], channel_axis: int | None = None) -> Channels:
        """The channels of an output, from its true values case by case.

        A single case does not tell samples from channels: `channel_axis`, counted from the end, does.
        """
        samples = _sample_axes([value.shape for value in truth])
        if channel_axis is not None and samples is not None:
            rank = truth[0].ndim
            samples = tuple(axis for axis in range(rank) if axis != rank + channel_axis)
        top = _largest([_finite_magnitude(value) for value in truth], samples)
        # A channel that is nearly zero on these inputs would otherwise allow nothing but exact results.
        used = np.sort(top[top > 0.0], axis=None)
        middle = used[(used.size - 1) // 2] if used.size else 0.0
        return cls(samples, np.maximum(top, middle))

    def errors(self, values: Sequence[Array], truth: Sequence[Array], known: Sequence[Array] | None = None) -> Wide:
        """[channels] Largest distance over the cases, in output units.

        Elements where the truth or `known` is not finite are left out, since parity judges them. A wrong shape is an
        infinite distance.
        """
        if any(value.shape != right.shape for value, right in zip(values, truth, strict=True)):
            return np.full(self.scale.shape, np.inf)
        gaps = [gap(value, right) for value, right in zip(values, truth, strict=True)]
        if known is not None:
            gaps = [np.where(np.isfinite(k.astype(np.float64)), g, 0.0) for g, k in zip(gaps, known, strict=True)]
        return _largest(gaps, self.samples)

    def rounding(self, errors: Wide, eps: float) -> Wide:
        """[channels] The rounding attributed to the original, given its errors; see the rule above."""
        relative = self._relative(errors)
        typical = LUCK * float(np.median(relative)) if relative.size else 0.0
        return self.scale * np.maximum(np.maximum(relative, typical), eps)

    def not_by_luck(self, errors: Wide) -> Wide:
        """[channels] Errors of one sample of noise, each at least the (lower) median share of its channel's scale.

        A single case makes every token a channel, and noise of random signs cancels in some of them.
        """
        relative = self._relative(errors)
        if not relative.size:
            return errors
        return np.maximum(errors, self.scale * float(np.quantile(relative, 0.5, method="lower")))

    def share(self, errors: Wide) -> float:
        """The largest error as a share of its channel's scale."""
        relative = self._relative(errors)
        return float(relative.max()) if relative.size else 0.0

    def _relative(self, errors: Wide) -> Wide:
        with np.errstate(all="ignore"):
            return np.where(errors == 0.0, 0.0, errors / self.scale)


@dataclass(frozen=True)
class Excess:
    """The channel of an output with the least room.

    Attributes:
        channel: its index.
        error: its largest error, in output units.
        allowed: the allowance for that error.
        rounding: the original's own rounding in that allowance, before the factor.
    """

    channel: tuple[int, ...]
    error: float
    allowed: float
    rounding: float

    @property
    def holds(self) -> bool:
        """Whether the rule holds in this channel, and so in all."""
        return self.error <= self.allowed

    @property
    def text(self) -> str:
        """The failure in words, with the terms of the allowance."""
        place = f" in channel {', '.join(map(str, self.channel))}" if self.channel else ""
        parts = f"{FACTOR:g} x {self.rounding:.3g} (the original's rounding)"
        further = self.allowed - FACTOR * self.rounding
        if further > 0.005 * self.allowed:
            parts += f" + {further:.3g} (certified)"
        return f"error {self.error:.3g}{place} exceeds the allowed {self.allowed:.3g} = {parts}"


def worst(errors: Wide, rounding: Wide, certified: Wide | float = 0.0) -> Excess:
    """Apply the rule to every channel and return the one with the least room."""
    allowed = FACTOR * rounding + certified
    if not errors.size:
        return Excess((), 0.0, 0.0, 0.0)
    # The share of the allowance that is used. Where the allowance is 0, NaN or exceeded, quotients are made comparable:
    # any excess ranks above any channel that holds.
    with np.errstate(all="ignore"):
        use = np.where(errors <= allowed, np.where(allowed > 0.0, errors / allowed, 0.0), np.inf)
        use = np.where(np.isinf(use), np.maximum(2.0, np.nan_to_num(errors / allowed, nan=np.inf, posinf=1e300)), use)
    place = np.unravel_index(int(np.argmax(use)), errors.shape)
    channel = tuple(int(index) for index in place)
    return Excess(
        channel, float(errors[place]), float(allowed[place]), float(np.broadcast_to(rounding, errors.shape)[place])
    )


def against_rounding(
    channels: Channels,
    errors: Wide,
    eps: float,
    rule: Callable[[Wide], Excess],
    moved: Callable[[], Wide | None],
    coarse: float,
) -> Excess:
    """Apply a rule with the rounding that the original showed, and if that fails, with what noise adds to it.

    One run may show less rounding than the next: a float64 model is its own truth, so it shows none at all, and a
    channel of a few values may be lucky in all of them.

    Args:
        channels: of the output.
        errors: [channels] errors of the original against float64.
        eps: spacing of floats in the output's type.
        rule: from [channels] rounding of the original to the channel with the least room.
        moved: [channels] how far noise of the size of rounding moves the original; None if that is unknown. Expensive:
            called only if the rule fails.
        coarse: rounding of the coarsest arithmetic in the model, as a share of the scale; more is no rounding.
    """
    found = rule(channels.rounding(errors, eps))
    noise = None if found.holds else moved()
    if noise is None:
        return found
    return rule(channels.rounding(np.maximum(errors, np.minimum(noise, coarse * channels.scale)), eps))


def exact_rounding(rounding: Wide, eps: float) -> Wide:
    """[channels] The allowance where both sides are float64: rounding shrinks with the spacing of floats.

    `SLACK` leaves room for operations that the two sides evaluate in a different order.
    """
    return rounding * (SLACK * float(np.finfo(np.float64).eps) / eps)


def _sample_axes(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    ranks = {len(shape) for shape in shapes}
    if len(ranks) != 1:
        return None
    (rank,) = ranks
    return tuple(axis for axis in range(rank) if axis == 0 or len({shape[axis] for shape in shapes}) > 1)


def _largest(values: Sequence[Array], samples: tuple[int, ...] | None) -> Wide:
    if samples is None:
        return np.asarray(max((float(value.max()) for value in values if value.size), default=0.0))
    reduced = [np.max(value, axis=samples, initial=0.0) for value in values]
    return np.asarray(np.max(reduced, axis=0), dtype=np.float64)


def _finite_magnitude(values: Array) -> Wide:
    wide = np.abs(values.astype(np.float64))
    return np.where(np.isfinite(wide), wide, 0.0)


# By element type, what rounding may amount to at the outputs of a whole model, as a share of their scale. Half
# precision gets fewer eps, because 256 eps of float16 would be a quarter of the scale.
_ALLOWANCES = {
    onnx.TensorProto.DOUBLE: 256 * 2.0**-52,
    onnx.TensorProto.FLOAT: 256 * 2.0**-23,
    onnx.TensorProto.FLOAT16: 8 * 2.0**-10,
    onnx.TensorProto.BFLOAT16: 8 * 2.0**-7,
}
_QUANTISED_ALLOWANCE = 4 * 2.0**-8
"""For activations quantised to 8 bits: a difference in the last place may move a value by a whole step."""

_QUANTISERS = {"QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm"}


def coarsest_allowance(model: onnx.ModelProto) -> float:
    """Rounding of the coarsest arithmetic in the model, by the types of its weights, its casts and its quantisers."""
    types = {tensor.data_type for tensor in model.graph.initializer}
    types |= {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    found: list[float] = []
    for node in iter_nodes(model.graph.node):
        types.update(attribute.i for attribute in node.attribute if node.op_type == "Cast" and attribute.name == "to")
        if node.op_type in _QUANTISERS:
            found.append(_QUANTISED_ALLOWANCE)
    known = [_ALLOWANCES[kind] for kind in types if kind in _ALLOWANCES]
    return max(found + known, default=_ALLOWANCES[onnx.TensorProto.FLOAT])

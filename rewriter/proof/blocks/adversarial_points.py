"""Adversarial points: the pre-activations on which a replaced region is evaluated.

They include zeros of both signs, subnormal numbers, the neighbourhood of every step of a softmax, every order of
magnitude of both signs up to the largest finite number, and NaN. They are laid out over batch, tokens and channels so
that no two rows hold the same values.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.proof.inputs.roles import is_float


def numpy_dtype(elem_type: int) -> np.dtype[Any]:
    """The numpy type of a TensorProto element type (ml_dtypes for bfloat16)."""
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem_type))


def machine_epsilon(elem_type: int) -> float:
    """Distance from 1 to the next larger number; 0 for types that are not floating-point."""
    dtype = numpy_dtype(elem_type)
    return float(ml_dtypes.finfo(dtype).eps) if is_float(dtype) else 0.0


def largest_finite(elem_type: int) -> float:
    """The largest finite number of the type."""
    return float(ml_dtypes.finfo(numpy_dtype(elem_type)).max)


def adversarial(elem_type: int, crossings: NDArray[Any] | None = None) -> NDArray[Any]:
    """About 50,000 points of the type, 1-D, ascending, with special values at the end.

    The step is 1/1024 around 0, so that no misplaced kink falls between two points; there are 40 points per decade from
    1e-12 to 1e4, and 20 from there to the largest finite number.

    Args:
        elem_type: TensorProto element type.
        crossings: where a program changes quickly; a kink that is misplaced by one part in 10^7 shows only there.
    """
    dtype = numpy_dtype(elem_type)
    limits = ml_dtypes.finfo(dtype)
    reach = min(float(np.log10(float(limits.max))), 300.0)
    tails = np.concatenate([np.logspace(-12, 4, 641), np.logspace(4, reach, int(20 * max(reach - 4, 0)) + 2)[1:-1]])
    near = _around(np.zeros(0) if crossings is None else crossings, float(limits.max))
    spread = np.concatenate([np.linspace(-24.0, 24.0, 49153), tails, -tails, near])
    tiny = float(limits.smallest_subnormal)
    specials = [0.0, -0.0, tiny, -tiny, float(limits.tiny), -float(limits.tiny), 1e4, -1e4]
    edge = float(limits.max)
    # Around the square root of the largest number squares overflow, and the self logit of a head may be quadratic.
    specials += [edge, -edge, edge / 2, -edge / 2, np.sqrt(edge), -np.sqrt(edge)]
    return np.concatenate(
        [np.unique(spread.astype(dtype)), np.asarray([*specials, np.nan], dtype=np.float64).astype(dtype)]
    )


def _around(crossings: NDArray[Any], largest: float) -> NDArray[Any]:
    """Points beside each crossing, at relative distances from 1e-8 to 0.1; absolute ones for a crossing at 0."""
    places = crossings[np.abs(crossings) <= largest][:_MOST_CROSSINGS]
    steps = np.logspace(-8, -1, 57)
    steps = np.concatenate([-steps, [0.0], steps])
    return np.ravel(places[:, None] + np.where(places == 0.0, 1.0, np.abs(places))[:, None] * steps)


_MOST_CROSSINGS = 64  # each adds 115 points

BATCH, TOKENS = 2, 23
"""Layout of adversarial points: more than one batch, and an odd number of tokens."""


def laid_out(points: NDArray[Any], rank: int, axis: int, longest: int | None = None) -> NDArray[Any]:
    """Lay the points out over batch, tokens and channels, shuffled so that neighbours in any direction differ.

    Args:
        points: the points, 1-D.
        rank: rank of the result; a vector has channels only.
        axis: axis of the channels, counted from the end.
        longest: maximum number of tokens; None for no limit.
    """
    # Where inference knows too small a rank for the claim's axis, the channels go last.
    axis = axis if -rank <= axis < 0 else -1
    shape = [1] * rank
    others = [place for place in range(rank) if place != axis % rank]
    tokens = TOKENS if longest is None else max(min(TOKENS, longest), 1)
    if others:
        shape[others[-1]] = tokens
    if len(others) > 1:
        shape[others[0]] = BATCH
    rows = int(np.prod(shape))
    channels = -(-points.size // rows)  # rounded up; `resize` below repeats points to fill the last row
    shape[axis % rank] = channels
    order = np.random.default_rng(0).permutation(rows * channels)
    return np.resize(points, rows * channels)[order].reshape(shape)

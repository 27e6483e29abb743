"""Adversarial points: the pre-activations that a replaced region is tried on.

Comes in: an element type. Goes out: an array of that type. Zeros of both signs, denormals, the step where a softmax
changes, large values of both signs up to the largest finite one, and NaN.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.proof.roles import is_float


def numpy_dtype(elem_type: int) -> np.dtype[Any]:
    """The numpy type of a TensorProto element type (ml_dtypes for bfloat16)."""
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem_type))


def machine_epsilon(elem_type: int) -> float:
    """Distance from 1 to the next number; 0 for types that are not floating-point."""
    dtype = numpy_dtype(elem_type)
    return float(ml_dtypes.finfo(dtype).eps) if is_float(dtype) else 0.0


def largest_finite(elem_type: int) -> float:
    """The largest finite number of the type."""
    return float(ml_dtypes.finfo(numpy_dtype(elem_type)).max)


def adversarial(elem_type: int) -> NDArray[Any]:
    """About 50,000 points of the type, 1-D, in ascending order but for the specials at the end.

    A step of 1/1024 around 0, so that a kink in another place than the original's is not stepped over.
    """
    dtype = numpy_dtype(elem_type)
    limits = ml_dtypes.finfo(dtype)
    tails = np.logspace(-12, 4, 641)
    spread = np.concatenate([np.linspace(-24.0, 24.0, 49153), tails, -tails])
    tiny = float(limits.smallest_subnormal)
    specials = [0.0, -0.0, tiny, -tiny, float(limits.tiny), -float(limits.tiny), 1e4, -1e4]
    edge = float(limits.max)
    specials += [edge, -edge, edge / 2, -edge / 2, np.sqrt(edge), -np.sqrt(edge)]
    return np.concatenate(
        [np.unique(spread.astype(dtype)), np.asarray([*specials, np.nan], dtype=np.float64).astype(dtype)]
    )

"""The errors of one model at some pre-activations: the largest, where they are, how they are spread, a digest."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.floats.subjects import Doubles

Floats = NDArray[Any]

REFERENCE = 2.0**-46
"""Error of the float64 values over max(1, |f|): some ten well conditioned operations, a factor of ten to spare."""

_LEAST = -60
"""All smaller powers of two are counted as this one."""

_BIAS, _MANTISSA = 1023, 52


@dataclass(frozen=True)
class Kind:
    """A floating point type.

    Attributes:
        dtype: in numpy.
        elem_type: in ONNX (TensorProto.DataType).
        digits: bits of the mantissa after the leading one.
        least: exponent of the smallest normal number.
        blocks: the numbers of the type, in the order of their bits, are measured in so many equal parts.
    """

    dtype: np.dtype[Any]
    elem_type: int
    digits: int
    least: int
    blocks: int

    @property
    def limit(self) -> float:
        """The smallest number that rounds to infinity."""
        return (2.0 - 2.0 ** (-self.digits - 1)) * 2.0 ** (1 - self.least)

    @property
    def block(self) -> int:
        """Numbers per block."""
        return (1 << 8 * self.dtype.itemsize) // self.blocks

    def numbers(self, start: int, stop: int) -> Floats:
        """The numbers whose bits are the integers from start to below stop."""
        bits = np.arange(start, stop, dtype=np.uint32 if self.dtype.itemsize == 4 else np.uint16)
        return bits.view(self.dtype)


KINDS = {
    "float16": Kind(np.dtype(np.float16), onnx.TensorProto.FLOAT16, 10, -14, 16),
    "bfloat16": Kind(np.dtype(ml_dtypes.bfloat16), onnx.TensorProto.BFLOAT16, 7, -126, 16),
    "float32": Kind(np.dtype(np.float32), onnx.TensorProto.FLOAT, 23, -126, 1024),
}
"""By name. A block of float32 is half a binade."""


@dataclass(frozen=True, eq=False)
class Points:
    """Finite numbers of a type, the activation there in float64, and the units of its errors.

    Attributes:
        y: pre-activations [n].
        f: the activation [n], in float64.
        whole: 1 / max(1, |f|).
        places: one over the unit in the last place of the type at f: the spacing of its numbers around f.
        representable: whether f does not round to infinity; None if none does.
    """

    kind: Kind
    y: Floats
    f: Doubles
    whole: Doubles
    places: Doubles
    representable: NDArray[np.bool_] | None

    @classmethod
    def of(cls, kind: Kind, y: Floats, f: Doubles) -> "Points":
        """The points y [n] with the values f [n]."""
        size = np.abs(f)
        representable = None if size.max() < kind.limit else size < kind.limit
        exponents = np.maximum(size.view(np.int64) >> _MANTISSA, kind.least + _BIAS)
        places = ((2 * _BIAS + kind.digits - exponents) << _MANTISSA).view(np.float64)
        return cls(kind, y, f, 1.0 / np.maximum(size, 1.0, out=size), places, representable)

    def where(self, chosen: NDArray[np.bool_]) -> "Points":
        """Some of the points."""
        representable = None if self.representable is None else self.representable[chosen]
        return Points(self.kind, self.y[chosen], self.f[chosen], self.whole[chosen], self.places[chosen], representable)


@dataclass
class Errors:
    """The errors of one model over the numbers so far, where f does not round to infinity.

    Attributes:
        relative: largest error over max(1, |f|); `relative_at` is its pre-activation, in hexadecimal.
        ulp: largest error in units in the last place of the type at f; `ulp_at` is where.
        exact: how many values are f itself, as far as float64 can tell.
        powers: how many other errors over max(1, |f|) are in [2^k, 2^(k+1)), by k; k = -60 for all below 2^-59.
        infinite: how many are NaN or infinite, of which nothing else is counted.
        digest: sha256, from block to block, of the last digest and the bits of the outputs.
    """

    relative: float = 0.0
    relative_at: str = ""
    ulp: float = 0.0
    ulp_at: str = ""
    exact: int = 0
    powers: dict[str, int] = field(default_factory=dict)
    infinite: int = 0
    digest: str = ""

    def add(self, points: Points, found: Floats) -> None:
        """What the model gives at the points [n]."""
        values = found.astype(np.float64)
        error = np.abs(np.subtract(values, points.f, out=values), out=values)
        if points.representable is not None or not np.isfinite(error.max()):
            inside = np.ones(len(error), bool) if points.representable is None else points.representable
            finite = inside & np.isfinite(error)
            self.infinite += int((inside & ~finite).sum())
            points, error = points.where(finite), error[finite]
        if not error.any():
            self.exact += len(error)
            return
        relative, places = error * points.whole, error * points.places
        worst, last = int(np.argmax(relative)), int(np.argmax(places))
        if relative[worst] > self.relative:
            self.relative, self.relative_at = float(relative[worst]), float(points.y[worst]).hex()
        if places[last] > self.ulp:
            self.ulp, self.ulp_at = float(places[last]), float(points.y[last]).hex()
        self._count(relative)

    def _count(self, relative: Doubles) -> None:
        zero = int(np.count_nonzero(relative == 0.0))
        self.exact += zero
        exponents = np.maximum(relative.view(np.int64) >> _MANTISSA, _LEAST + _BIAS)
        counts = np.bincount(exponents)
        counts[_LEAST + _BIAS] -= zero
        for place in np.flatnonzero(counts):
            power = str(int(place) - _BIAS)
            self.powers[power] = self.powers.get(power, 0) + int(counts[place])

    def sign(self, outputs: list[bytes]) -> None:
        """Continue the digest by the outputs of a block."""
        together = hashlib.sha256(self.digest.encode())
        for each in outputs:
            together.update(each)
        self.digest = together.hexdigest()

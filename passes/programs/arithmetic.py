"""The arithmetic in which heads are evaluated, by element type: steepness of limits, and negligible errors."""

from __future__ import annotations

from dataclasses import dataclass

import onnx


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic in which a block's heads are evaluated."""

    steepness: float  # factor k of the limit ReLU(y) = lim SiLU(k y) / k: a power of two, so that k y is exact
    tolerance: float  # errors of programs that this arithmetic cannot distinguish from 0
    small: float  # the number e of the limit g = lim tanh(e g) / e, which is evaluated in float64
    limit: float  # the error, over max(1, |f|), up to which that limit counts as reached; sets the largest |g|
    lines: str  # the lines (`passes.programs.line`) for "single", "double" or "half" precision
    narrow: str = ""  # lines with fewer keys, for gates whose self value counts near 0 only
    # the lines of gates over pairs of keys, in forms that pay for every head: errors are those of the arithmetic. Empty
    # where the limit is close enough.
    pairs: str = ""

    @property
    def paired(self) -> bool:
        """Whether gates are over pairs of keys, since the limit is not accurate enough."""
        return bool(self.pairs) and self.tolerance < self.limit


_HALF = Arithmetic(steepness=2.0**40, tolerance=2.0**-12, small=2.0**-27, limit=2.0**-15, lines="half")
_SINGLE = Arithmetic(2.0**40, tolerance=1.2e-7, small=2.0**-24, limit=2.0**-26, lines="single", narrow="narrow single")

ARITHMETIC: dict[int, Arithmetic] = {
    onnx.TensorProto.FLOAT: _SINGLE,
    onnx.TensorProto.DOUBLE: Arithmetic(
        2.0**80, tolerance=1e-16, small=2.0**-24, limit=2.0**-31, lines="double", pairs="double pairs"
    ),
    onnx.TensorProto.FLOAT16: _HALF,
    onnx.TensorProto.BFLOAT16: _HALF,
}
"""Element type of a block to its arithmetic. Half precisions are computed in float32, with casts around the heads.

steepness: SiLU(k y) / k is within 0.28 / k of ReLU everywhere, and equal bit for bit once |k y| > 104, where the
exponential is 0 or infinite: with k = 2^40, for |y| > 1e-10. tolerance: half a unit in the last place of 1; bfloat16
uses float16's, since one more bias token costs little, and its own would leave GELU at 1.5e-3. small: balances the
error of the limit, 2/3 (e g)^2, which bounds |g| at 3,500 (float32), 630 (float64, clipped gates only) and beyond every
float16, against float64's rounding over e, 2e-9 and 2e-8.
"""

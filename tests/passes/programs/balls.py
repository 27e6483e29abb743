"""Head programs in ball arithmetic (python-flint), and the allowance for their evaluation in float64.

It shares no code with `passes`: programs are read as plain coefficients. Results are balls, which hold the number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("flint")
from flint import arb, ctx

from passes.programs.head import Array
from passes.programs.program import Program

__all__ = ["arb"]


@contextmanager
def precision(bits: int) -> Iterator[None]:
    """Ball arithmetic with this many bits inside the block."""
    before, ctx.prec = ctx.prec, bits
    try:
        yield
    finally:
        ctx.prec = before


def program_at(program: Program, y: arb, z: arb) -> arb:
    """A program: its heads and the linear term."""
    result = arb(program.linear) * z + arb(program.constant)
    for head in program.heads:
        keys = [(head.beta, head.gamma), *((token.slope, token.offset) for token in head.bias_tokens)]
        logits = [arb(slope) * y + arb(offset) for slope, offset in keys]
        top = max(logit.mid() for logit in logits)
        weights = [(logit - top).exp() for logit in logits]
        values = [arb(head.c) * z + arb(head.d), *(arb(token.value) for token in head.bias_tokens)]
        result += sum((w * v for w, v in zip(weights, values, strict=True)), arb(0)) / sum(weights, arb(0))
    return result


def allowance(program: Program, y: Array, z: Array | None = None) -> Array:
    """Absolute, for the rounding of `Program.evaluate` in float64: from that of float32, unless it is stated."""
    share = program.rounding if program.double else 2.0**-26 * program.rounding
    return np.asarray(
        share * np.maximum(np.maximum(1.0, 0.0 if z is None else np.abs(z)), np.abs(program.evaluate(y, z)))
    )


def errors(values: Sequence[float] | Array, exact: Sequence[arb]) -> Array:
    """The distances of floats from balls, rounded up; infinite for floats that are not finite."""
    return np.array(
        [
            float(abs(arb(float(a)) - b).upper()) * (1.0 + 2.0**-50) if np.isfinite(a) else np.inf
            for a, b in zip(values, exact, strict=True)
        ]
    )

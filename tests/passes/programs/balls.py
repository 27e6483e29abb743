"""Head programs in ball arithmetic (python-flint).

It shares no code with `passes`: programs are read as plain coefficients. Results are balls, which hold the number.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("flint")
from flint import arb, ctx

from passes.programs.program import Array, Program

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


def errors(values: Sequence[float] | Array, exact: Sequence[arb]) -> Array:
    """The distances of floats from balls, rounded up; infinite for floats that are not finite."""
    return np.array(
        [
            float(abs(arb(float(a)) - b).upper()) * (1.0 + 2.0**-50) if np.isfinite(a) else np.inf
            for a, b in zip(values, exact, strict=True)
        ]
    )

"""What may be expected of a model that was converted to a narrower type, and which of its parts cost most.

Every linear operator of the converted model rounds its inputs or weights to the narrow type, with a unit roundoff u.
Independent errors add in squares, so after n operators an output is off by about u sqrt(n) of its scale. Eight times
that may be expected; more suggests an overflow, a saturated quantisation or a wrong conversion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import onnx

from rewriter.arrays import Array
from rewriter.compare.taps import Tap
from rewriter.compare.verdicts import Tolerance
from rewriter.files.walk import iter_nodes
from rewriter.proof.distance import magnitude

ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 254}
"""Unit roundoff by type, as a share of the value; for int8 half a step of a symmetric scale, as a share of its end."""

FACTOR = 8.0

_LINEAR = ("MatMul", "Gemm", "Conv", "Attention", "MultiHeadAttention", "GroupQueryAttention", "FusedMatMul")
_MOST = 0.5
"""Share of the squared error that the parts to keep in float32 have together."""


@dataclass(frozen=True)
class Expected:
    """What is expected of outputs and boundaries.

    Attributes:
        name: a key of `ROUNDOFF`.
        operators: number of linear operators in the original.
    """

    name: str
    operators: int

    @property
    def share(self) -> float:
        """The largest error, as a share of an output's largest value."""
        return FACTOR * ROUNDOFF[self.name] * sqrt(max(self.operators, 1))

    def tolerance(self, values: Sequence[Array]) -> Tolerance:
        """The tolerance of an output with these values, case by case."""
        return Tolerance(self.share * max(map(magnitude, values), default=0.0))

    @property
    def words(self) -> str:
        """How the tolerance comes about."""
        return (
            f"expected of {self.name}: at most {100 * self.share:.2g} % of an output's largest value, "
            f"{FACTOR:g} x {ROUNDOFF[self.name]:.2g} x sqrt({self.operators} linear operators)"
        )


def expected_of(name: str, model: onnx.ModelProto) -> Expected:
    """What is expected of a model after its conversion to a type."""
    nodes = (*iter_nodes(model.graph.node), *(node for each in model.functions for node in iter_nodes(each.node)))
    return Expected(name, sum(node.op_type in _LINEAR for node in nodes))


@dataclass(frozen=True)
class Cost:
    """What one part adds to the error.

    Attributes:
        part: the label of the boundary in which it ends.
        relative: the error there, over the largest value there.
        added: how much of that the part itself adds: the root of the difference of squares to the boundary before.
        share: its share of the sum of all squares added.
        keep: whether it is one of the fewest parts that add half of the error.
    """

    part: str
    relative: float
    added: float
    share: float
    keep: bool


def costs(taps: Sequence[Tap]) -> tuple[Cost, ...]:
    """The parts between boundaries by what they add to the error, largest first."""
    measured = [each for each in taps if each.finite and each.relative < float("inf")]
    before = [0.0, *(each.relative for each in measured)]
    added = [max(each.relative**2 - last**2, 0.0) for each, last in zip(measured, before, strict=False)]
    total = sum(added)
    found, reached = [], 0.0
    for square, each in sorted(zip(added, measured, strict=True), key=lambda pair: -pair[0]):
        keep = total > 0.0 and square > 0.0 and reached < _MOST * total
        reached += square
        found.append(Cost(each.boundary.label, each.relative, sqrt(square), square / total if total else 0.0, keep))
    return tuple(found)

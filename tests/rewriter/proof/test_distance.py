"""Functions of single entries are evaluated a piece at a time."""

from __future__ import annotations

import numpy as np
import pytest

from passes.programs.head import Head
from passes.programs.program import Program
from rewriter.proof.distance import PIECE, Array, in_pieces
from rewriter.proof.planned import PlannedOperator

SHAPES: list[tuple[int, ...]] = [(), (0,), (3,), (PIECE,), (2, PIECE + 5), (2 * PIECE + 1,)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_in_bounded_pieces(shape: tuple[int, ...]) -> None:
    sizes: list[int] = []

    def function(x: Array, y: Array | None, z: Array) -> Array:
        assert y is None
        sizes.append(x.size)
        return np.asarray(np.exp(x) * z)

    rng = np.random.default_rng(0)
    x, z = rng.normal(size=shape), rng.normal(size=shape[-1:])
    made = in_pieces(function, x, None, z)
    assert made.shape == shape
    np.testing.assert_array_equal(made, np.exp(x) * z)
    assert sum(sizes) == x.size
    assert max(sizes, default=0) <= PIECE


def test_a_program_sees_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    program, sizes = Program("silu", (Head(beta=1.0),)), list[int]()
    for name in ("evaluate", "float64_rounding"):
        original = getattr(type(program), name)

        def watched(self: object, y: Array, z: Array | None = None, original: object = original) -> Array:
            sizes.append(y.size)
            return np.asarray(original(self, y, z))  # type: ignore[operator]

        monkeypatch.setattr(type(program), name, watched)
    y = np.random.default_rng(0).normal(size=(3, PIECE))
    for shaken in (False, True):
        assert PlannedOperator(program, shaken=shaken)({}, y).shape == y.shape
    assert set(sizes) == {PIECE}
    assert len(sizes) == 9

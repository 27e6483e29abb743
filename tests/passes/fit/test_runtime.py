"""Fits at run time: the accuracy they reach, what they state, what they refuse."""

import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.fit import float32
from passes.fit import find_kinks, fit_function
from passes.programs.program import Array, Function
from rewriter.graph.view import LostError

CASES: dict[str, tuple[Callable[[Array], Array], float, int]] = {
    # function, error reached over max(1, |f|), heads
    "sin": (np.sin, 1e-5, 1),
    "square": (lambda y: y * y, 1e-6, 1),
    "exp": (np.exp, 1e-6, 1),
    "hypot": (lambda y: np.sqrt(1.0 + y * y), 1e-6, 1),
    "erf": (np.vectorize(math.erf), 1e-6, 1),
    "abs": (np.abs, 1e-6, 1),
    "relu6": (lambda y: np.clip(y, 0.0, 6.0), 1e-6, 2),
    "line": (lambda y: 2.0 * y + 1.0, 1e-6, 1),
    "constant": (lambda y: 0.0 * y + 3.0, 1e-6, 1),
    "elu": (lambda y: np.where(y > 0.0, y, np.expm1(np.minimum(y, 0.0))), 1e-5, 1),
    "softsign": (lambda y: y / (1.0 + np.abs(y)), 1e-5, 2),
    "relu_squared": (lambda y: np.maximum(y, 0.0) ** 2, 1e-5, 1),
    "hard_swish": (lambda y: y * np.clip(y / 6.0 + 0.5, 0.0, 1.0), 3e-5, 5),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_stated_error_holds(name: str) -> None:
    f, reached, heads = CASES[name]
    program = fit_function(f, 6.0, 1e-6, name)
    assert len(program.heads) <= heads
    assert program.domain == 6.0
    rng = np.random.default_rng(3)
    y = rng.uniform(-6.0, 6.0, 50_000)
    size = max(1.0, float(np.max(np.abs(f(y)))))
    assert np.max(np.abs(program.evaluate(y) - f(y))) <= program.max_error + 1e-14 * size
    assert program.max_error <= reached * size
    single = y.astype(np.float32)
    expected = program.evaluate(single.astype(np.float64))
    added = np.abs(float32.evaluate(program, single) - expected) / np.maximum(1.0, np.abs(expected))
    assert np.max(added) <= 1.3 * program.rounding


def test_the_stated_error_holds_around_a_kink() -> None:
    """A CELU with slope 1 on both sides of 0, whose fit is off by most at distances of 1e-4."""
    y = np.geomspace(1e-6, 1e-2, 2000)
    y = np.append(-y, y)

    def f(x: Array) -> Array:
        return np.where(x > 0.0, x, 0.1 * np.expm1(np.minimum(x, 0.0) / 0.1))

    program = fit_function(f, 192.0, 1.2e-7, "f")
    assert np.max(np.abs(program.evaluate(y) - f(y))) <= program.max_error


def test_a_fit_is_repeatable() -> None:
    first, second = (fit_function(np.tanh, 4.0, 1e-4, "f") for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("f", "reach", "reason"),
    [
        (np.sign, 3.0, "it jumps near y = "),
        (np.floor, 3.0, "it jumps near y = "),
        (np.log, 3.0, "it is not finite at y = "),
        (lambda y: np.sin(60.0 * y), 8.0, "give a narrower --option domain"),
        (lambda y: np.abs(np.mod(y, 0.5) - 0.25), 8.0, "it has more than 8 kinks"),
    ],
)
def test_refusals(f: Callable[[Array], Array], reach: float, reason: str) -> None:
    with pytest.raises(LostError, match=re.escape(reason)):
        fit_function(f, reach, 1e-6, "f")


@pytest.mark.parametrize(
    ("f", "smooth", "derivative", "place", "jump"),
    [
        (lambda y: np.abs(y - 1.25) + np.sin(y), np.sin, 1, 1.25, 2.0),
        (lambda y: np.maximum(y + 0.5, 0.0) ** 2 + np.cos(y), np.cos, 2, -0.5, 2.0),
    ],
    ids=["slope", "curvature"],
)
def test_kinks_are_found_where_they_are(
    f: Function, smooth: Function, derivative: int, place: float, jump: float
) -> None:
    kinks = find_kinks(f, 4.0, derivative=derivative)
    assert [found for found, _ in kinks] == [place]
    assert kinks[0][1] == pytest.approx(jump, rel={1: 1e-5, 2: 1e-2}[derivative])
    assert find_kinks(smooth, 4.0, derivative=derivative) == ()

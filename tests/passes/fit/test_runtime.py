"""Fits at run time: the accuracy they reach, what they state, what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.fit import float32
from passes.fit.runtime import Fitted, find_kinks, fit_function
from passes.programs.head import Array
from rewriter.graph import elementwise
from tests.conftest import slow

CASES: dict[str, tuple[Callable[[Array], Array], float, int]] = {
    # function, error reached over max(1, |f|), heads
    "sin": (np.sin, 1e-5, 1),
    "square": (lambda y: y * y, 1e-6, 1),
    "exp": (np.exp, 1e-6, 1),
    "hypot": (lambda y: np.sqrt(1.0 + y * y), 1e-6, 1),
    "erf": (elementwise.erf, 1e-6, 1),
    "abs": (np.abs, 1e-6, 1),
    "relu6": (lambda y: np.clip(y, 0.0, 6.0), 1e-6, 2),
    "line": (lambda y: 2.0 * y + 1.0, 1e-6, 1),
    "constant": (lambda y: 0.0 * y + 3.0, 1e-6, 1),
    "elu": (lambda y: np.where(y > 0.0, y, np.expm1(np.minimum(y, 0.0))), 1e-5, 1),
    "softsign": (lambda y: y / (1.0 + np.abs(y)), 1e-5, 2),
    "relu_squared": (lambda y: np.maximum(y, 0.0) ** 2, 1e-5, 1),
    "hard_swish": (lambda y: y * np.clip(y / 6.0 + 0.5, 0.0, 1.0), 3e-5, 5),
}


SLOW = ("sin", "hypot", "square", "exp", "softsign", "hard_swish")


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow if name in SLOW else ()) for name in CASES])
def test_stated_error_holds(name: str) -> None:
    f, reached, heads = CASES[name]
    found = fit_function(f, (-6.0, 6.0), 1e-6, name)
    assert isinstance(found, Fitted), found
    program = found.program
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


def test_a_fit_is_repeatable() -> None:
    first, second = (fit_function(np.tanh, (-4.0, 4.0), 1e-4, "f") for _ in range(2))
    assert first == second


def test_reached_is_honest() -> None:
    """sin(5 y) within 1e-9 is beyond float32: the program is returned, and says that it missed the tolerance."""
    found = fit_function(lambda y: np.sin(2.0 * y), (-4.0, 4.0), 1e-7, "f")
    assert isinstance(found, Fitted)
    assert not found.reached
    easy = fit_function(lambda y: np.sin(y / 2.0), (-4.0, 4.0), 1e-4, "f")
    assert isinstance(easy, Fitted)
    assert easy.reached


def test_one_sided_domains() -> None:
    """A function that ends at 0 is fitted where it is defined, other functions on the symmetric interval."""
    root = fit_function(np.sqrt, (0.5, 8.0), 1e-5, "f")
    assert isinstance(root, Fitted)
    assert (root.low, root.high) == (0.5, 8.0)
    both = fit_function(np.tanh, (0.5, 4.0), 1e-4, "f")
    assert isinstance(both, Fitted)
    assert (both.low, both.high) == (-4.0, 4.0)


@pytest.mark.parametrize(
    ("f", "domain", "reason"),
    [
        (np.sign, (-3.0, 3.0), "it jumps near y = "),
        (np.floor, (-3.0, 3.0), "it jumps near y = "),
        (np.log, (-1.0, 3.0), "it is not finite at y = "),
        (np.sin, (3.0, 3.0), "is not an interval; give --option domain"),
        (np.sin, (0.0, float("inf")), "is not an interval; give --option domain"),
        (lambda y: np.sin(60.0 * y), (-8.0, 8.0), "give a narrower --option domain"),
        (lambda y: np.abs(np.mod(y, 0.5) - 0.25), (-8.0, 8.0), "it has more than 8 kinks"),
    ],
)
def test_refusals(f: Callable[[Array], Array], domain: tuple[float, float], reason: str) -> None:
    found = fit_function(f, domain, 1e-6, "f")
    assert isinstance(found, str)
    assert reason in found


def test_kinks_are_found_where_they_are() -> None:
    kinks = find_kinks(lambda y: np.abs(y - 1.25) + np.sin(y), -4.0, 4.0)
    assert isinstance(kinks, tuple)
    assert [kink.place for kink in kinks] == [1.25]
    assert kinks[0].jump == pytest.approx(2.0, rel=1e-5)
    assert find_kinks(np.sin, -4.0, 4.0) == ()


def test_jumps_of_the_curvature_are_found() -> None:
    kinks = find_kinks(lambda y: np.maximum(y + 0.5, 0.0) ** 2 + np.cos(y), -4.0, 4.0, derivative=2)
    assert isinstance(kinks, tuple)
    assert [kink.place for kink in kinks] == [-0.5]
    assert kinks[0].jump == pytest.approx(2.0, rel=1e-2)
    assert find_kinks(np.cos, -4.0, 4.0, derivative=2) == ()

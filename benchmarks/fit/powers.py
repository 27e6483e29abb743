"""Fit heads with equally spaced keys, whose weights are powers of one exponential (`passes.programs.program`).

For a given step c, Phi (z P + 2 R) = r P + R is linear in the coefficients of P and R. Least squares, weighted with the
denominator found before, give a start for each of many steps, and the roots of P make it a sum of fractions.
From the best of them sequential linear programs minimise the largest error of y Phi(y). Then the number whose rounding
to float32 costs most is rounded, those still free are fitted again, and so on. By symmetry y > 0 is enough.

Needs scipy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.fit.table import FUNCTIONS
from passes.programs.program import Array, Powers

_STARTS = 60
_REWEIGHTED = 12
_ENOUGH = 1e-7
"""A step must lessen the error by this share of it."""
_SMALLEST = 1e-9
"""The search ends at this radius, relative to the numbers."""
_LEAST = 0.1
"""What is divided by is larger than this."""
_REAL = 1e-9
"""A root with an imaginary part below this share of it is real."""


def points() -> Array:
    """Where the error is measured."""
    return np.concatenate([np.linspace(0.0, 9.0, 1501)[1:], np.linspace(9.0, 16.0, 40)])


def fit(
    activation: str, keys: int, *, single: bool, step: float | None = None, based: bool = True, rounds: int = 200
) -> tuple[Powers, float]:
    """Phi of `activation`, y Phi(y), over an odd number of keys, at least 5, and the largest error measured.

    Args:
        activation: a name in `benchmarks.fit.table.FUNCTIONS`.
        keys: their number.
        single: whether the numbers are to be float32 numbers.
        step: the step c; None to search for the best.
        based: whether there is a base; without, it is one operation less.
        rounds: the largest number of linear programs after each rounding.
    """
    y = points()
    share = FUNCTIONS[activation](y) / y
    levels = (keys - 3) // 2
    steps = np.geomspace(0.5, 2.5, _STARTS) if step is None else [step]
    starts = [_start(c, levels, y, share, based=based) for c in steps]
    start = min(starts, key=lambda powers: _Fit(y, share, powers.pairs).largest(_numbers(powers)))
    search, x = _Fit(y, share, start.pairs), _numbers(start)
    free = np.flatnonzero([step is None, based, *[True] * (2 * levels)])
    for radius in (1e-1, 1e-2, 1e-3):
        x = search.sequential(x, free, rounds, radius)
    if single:
        x = search.on_grid(x, free.tolist(), rounds)
    return search.powers(x), search.largest(x)


def _levels(powers: Powers, z: Array) -> tuple[Array, list[Array]]:
    """The sum h at z, and what the parts of its fractions are divided by."""
    h, levels = np.full_like(z, powers.base), list[Array]()
    for fraction in powers.fractions:
        below: Array = np.zeros(())
        for part, shift in reversed(fraction):
            levels.append(np.asarray(z + shift + below))
            below = part / levels[-1]
        h = h + below
    return h, levels


def _numbers(powers: Powers) -> Array:
    return np.array([powers.step, powers.base, *powers.parts, *powers.shifts])


@dataclass(frozen=True)
class _Fit:
    """Numbers x as `_numbers` has them, and the error of y Phi(y) that they give.

    Attributes:
        y: where it is measured.
        share: Phi there.
        pairs: the number of fractions of two levels.
    """

    y: Array
    share: Array
    pairs: int

    def powers(self, x: Array) -> Powers:
        """The numbers as a program."""
        step, base, *rows = map(float, x)
        return Powers(step, tuple(rows[: len(rows) // 2]), tuple(rows[len(rows) // 2 :]), self.pairs, base)

    def errors(self, x: Array) -> Array:
        """The error at each point."""
        powers = self.powers(x)
        r = np.exp(powers.step * self.y)
        z = r + 1.0 / r
        h, _ = _levels(powers, z)
        return np.asarray(self.y * ((r + h) / (z + 2.0 * h) - self.share))

    def largest(self, x: Array) -> float:
        """The largest error; infinite where something that is divided by is not positive."""
        powers = self.powers(x)
        z = 2.0 * np.cosh(powers.step * np.append(0.0, self.y))
        if any(np.min(level) <= _LEAST for level in _levels(powers, z)[1]):
            return np.inf
        found = float(np.max(np.abs(self.errors(x))))
        return found if np.isfinite(found) else np.inf

    def sequential(self, x: Array, free: NDArray[np.intp], rounds: int, radius: float) -> Array:
        """The numbers after linear programs that minimise the largest error within a trust region."""
        from scipy.optimize import linprog  # type: ignore[import-untyped]  # a development tool

        errors = self.errors(x)
        best = self.largest(x)
        for _ in range(rounds):
            if radius < _SMALLEST or not np.isfinite(best):
                break
            scale = radius / best
            rows = np.stack([self._slope(x, int(i)) for i in free], axis=1) * scale
            ones = np.ones((self.y.size, 1))
            result = linprog(
                np.append(np.zeros(free.size), 1.0),
                A_ub=np.block([[rows, -ones], [-rows, -ones]]),
                b_ub=np.concatenate([-errors, errors]) / best,
                bounds=[*[(-1.0, 1.0)] * free.size, (0.0, None)],
                method="highs-ds",
            )
            if result.status != 0:
                radius /= 4.0
                continue
            trial = x.copy()
            trial[free] *= 1.0 + result.x[:-1] * radius
            found = self.largest(trial)
            if found < best * (1.0 - _ENOUGH):
                x, best, radius = trial, found, min(2.0 * radius, 0.2)
                errors = self.errors(x)
            else:
                radius /= 3.0
        return x

    def _slope(self, x: Array, place: int) -> Array:
        """The derivative of the errors by the logarithm of one number."""
        ends = []
        for factor in (1.0 + 1e-5, 1.0 - 1e-5):
            moved = x.copy()
            moved[place] *= factor
            ends.append(self.errors(moved))
        return np.asarray((ends[0] - ends[1]) / 2e-5)

    def on_grid(self, x: Array, free: list[int], rounds: int) -> Array:
        """All numbers rounded to float32, the one that costs most first; those not `free` are float32 numbers."""
        while free:
            place = max(free, key=lambda i: self.largest(_narrowed(x, i)))
            x = _narrowed(x, place)
            free.remove(place)
            if free:
                x = self.sequential(x, np.array(free), rounds, 1e-5)
        return x


def _narrowed(x: Array, place: int) -> Array:
    result = x.copy()
    result[place] = np.float32(result[place])
    return result


def _start(c: float, degree: int, y: Array, share: Array, *, based: bool) -> Powers:
    """Numbers for the step c: least squares on the equation that is linear in P and R."""
    near = y <= 16.0 / c
    r = np.exp(c * y[near])
    z, s = r + 1.0 / r, share[near]
    powers = z[:, None] ** np.arange(degree, -1, -1)
    # Unknowns: P without its leading 1, then R.
    of_r = powers if based else powers[:, 1:]
    matrix = np.concatenate([(s * z - r)[:, None] * powers[:, 1:], (2.0 * s - 1.0)[:, None] * of_r], axis=1)
    right = -(s * z - r) * powers[:, 0]
    weight = 1.0 / z ** (degree + 1)
    for _ in range(_REWEIGHTED):
        rows = matrix * (y[near] * weight)[:, None]
        sizes = np.linalg.norm(rows, axis=0)
        solved = np.linalg.lstsq(rows / sizes, right * y[near] * weight, rcond=None)[0] / sizes
        total = z * (powers[:, 0] + powers[:, 1:] @ solved[:degree]) + 2.0 * (of_r @ solved[degree:])
        weight = 1.0 / np.maximum(np.abs(total), 1e-300)
    denominator, numerator = np.append(1.0, solved[:degree]), solved[degree:]
    base = float(numerator[0]) if based else 0.0
    return _fractions(c, base, numerator[1:] - base * denominator[1:] if based else numerator, denominator)


def _fractions(c: float, base: float, numerator: Array, denominator: Array) -> Powers:
    """Partial fractions of a quotient of polynomials; those of complex roots two at a time, as a continued fraction."""
    roots = np.roots(denominator)
    residues = np.polyval(numerator, roots) / np.polyval(np.polyder(denominator), roots)
    levels = []
    single = np.abs(roots.imag) <= _REAL * np.abs(roots)
    for root, residue in zip(roots[single].real, residues[single].real, strict=True):
        levels.append((residue, -root))
    paired = ~single & (roots.imag > 0.0)
    for root, residue in zip(roots[paired], residues[paired], strict=True):
        # (p z + q) / (z^2 + a z + b) = p / (z + a - q/p + (b - (a - q/p) q/p) / (z + q/p))
        p, quotient = 2.0 * residue.real, -(residue * np.conj(root)).real / residue.real
        first = -2.0 * root.real - quotient
        levels += [(p, first), (abs(root) ** 2 - first * quotient, quotient)]
    parts, shifts = zip(*levels, strict=True)
    return Powers(c, tuple(map(float, parts)), tuple(map(float, shifts)), int(paired.sum()), base)

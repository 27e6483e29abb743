"""A head program for a function that no table names, fitted on the spot.

Comes in: a function of one variable, known by its values, an interval and a tolerance. Goes out: `Fitted`, or why
there is none. Numpy alone, deterministic, seconds.

Bias tokens with logits y t_j / s^2 - t_j^2 / (2 s^2) are a normalised row of Gaussians of width s with centres t_j:
the largest logit is that of the centre nearest to y. Given centres and width, values follow from linear least
squares. The token itself takes the last centre, so that beyond it the program is its self value, a straight line;
the linear term makes the other end one. Kinks get a steep head each (the limit that ReLU is), what is left is smooth.
Few bias tokens are then moved freely (`minimax.gauss_newton`), which buys orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from passes.fit import float32
from passes.fit.kinks import Kink, find_kinks
from passes.fit.minimax import gauss_newton
from passes.fit.model import Layout, evaluate, to_program
from passes.programs import Array, BiasToken, Head, Program

Function = Callable[[Array], Array]

SIZES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
WORTH_RETURNING = 1e-3
"""A fit whose error is above this share of the largest |f| is none."""

_STEEPNESS = 2.0**40
_RELU_GAP = 0.27846454276107379
_FREE = 12
"""Up to so many bias tokens, slopes and offsets are moved too."""
_SINGLE = 2.0**-24
"""From this tolerance on the coefficients are put on the float32 grid."""


@dataclass(frozen=True)
class Fitted:
    """A program and what is known about it.

    Attributes:
        program: its `max_error` holds from `low` to `high`; its `domain` is the larger of their sizes.
        low: least y of the fit.
        high: largest y of the fit.
        reached: whether `max_error` plus float32's rounding is within the tolerance asked for. Where it is not, this
            is the best program found, within `WORTH_RETURNING` of the largest |f|: the caller decides.
        note: how the error was established, in one line.
    """

    program: Program
    low: float
    high: float
    reached: bool
    note: str


@dataclass(frozen=True)
class _Smooth:
    """What is to be fitted: points, values, and the part of the interval where f is no straight line."""

    y: Array
    target: Array
    low: float
    high: float
    tolerance: float


def fit_function(f: Function, domain: tuple[float, float], tolerance: float, name: str) -> Fitted | str:
    """The smallest program found for `f` whose error on `domain` is within the tolerance, or why there is none.

    Args:
        f: values at an array of points (float64), entry by entry.
        domain: (low, high), where y lies. Made symmetric where f stays finite and of its size.
        tolerance: largest absolute error, in units of max(1, largest |f| on the domain).
        name: name of the program.
    """
    low, high = _symmetric(f, *(float(end) for end in domain))
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        return f"its domain from {low:.6g} to {high:.6g} is no interval; give --domain"
    y = np.linspace(low, high, 20_001)
    values = _values(f, y)
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        return f"it is not finite at y = {y[wrong[0]]:.6g}; give --domain without such points"
    size = max(1.0, float(np.max(np.abs(values))))
    kinks = find_kinks(lambda points: _values(f, points), low, high)
    if isinstance(kinks, str):
        return kinks

    def smooth(points: Array) -> Array:
        return np.asarray(_values(f, points) - sum((_ramp(kink, points) for kink in kinks), np.zeros_like(points)))

    best = _best(smooth, low, high, tolerance * size)
    return _state(f, _with_kinks(best, kinks, name), (low, high), tolerance, size)


# -- the smooth part ---------------------------------------------------------------------------------------------


def _best(f: Function, low: float, high: float, tolerance: float) -> Program:
    """The first size whose error is within the tolerance, else the best of all."""
    nodes = np.cos(np.pi * (np.arange(400) + 0.5) / 400)
    y = np.sort(np.concatenate([(low + high + (high - low) * nodes) / 2.0, np.linspace(low, high, 400)]))
    target = f(y)
    line = np.polyfit(y, target, 1)
    if np.max(np.abs(np.polyval(line, y) - target)) <= 1e-12 * max(1.0, float(np.max(np.abs(target)))):
        return Program("line", (), linear=float(line[0]), constant=float(line[1]))
    start, end = _core(y, target, tolerance / 8.0)
    task = _Smooth(y, target, start, end, tolerance)
    single = float32.points(low, high, 4001)
    expected = f(single.astype(np.float64))
    found: tuple[float, Program] | None = None
    for m in SIZES:
        for layout, x in _candidates(task, m):
            program = to_program(layout, x, "smooth")
            if tolerance >= _SINGLE:
                program = float32.shifted(program, single, expected)
                error = float(np.max(np.abs(float32.evaluate(program, single) - expected)))
            else:
                error = float(np.max(np.abs(program.evaluate(y) - target)))
            if found is None or error < found[0]:
                found = (error, program)
        if found is not None and found[0] <= 0.9 * tolerance:
            break
    assert found is not None  # noqa: S101 - every size has candidates
    return found[1]


def _candidates(task: _Smooth, m: int) -> list[tuple[Layout, Array]]:
    """Parameter vectors with m bias tokens: the best linear fit, and what moving its tokens freely makes of it."""
    layout = Layout((m,))
    fits = []
    for width in (0.7, 1.0, 1.4):
        for pad in (0.0, 1.0, 2.0):
            if m > 2.0 * pad:
                x = _linear_fit(task, layout, m, width, pad)
                fits.append((float(np.max(np.abs(evaluate(layout, x, task.y)[0] - task.target))), x))
    fits.sort(key=lambda fit: fit[0])
    result = [(layout, fits[0][1])]
    if m <= _FREE and fits[0][0] < 1e5 * task.tolerance:
        free = np.ones(layout.size, dtype=bool)
        free[-1] = False  # the weights sum to 1: a constant is in the values already
        starts = [x for _, x in fits[:3]]
        best = min(
            (_moved(task, layout, x, free) for x in starts),
            key=lambda x: float(np.max(np.abs(evaluate(layout, x, task.y)[0] - task.target))),
        )
        result.append((layout, best))
    return result


def _moved(task: _Smooth, layout: Layout, x: Array, free: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Array:
    for norm in (2.0, 8.0):
        x = gauss_newton(layout, x, task.y, task.target, free, norm=norm, steps=25)
    return x


def _linear_fit(task: _Smooth, layout: Layout, m: int, width: float, pad: float) -> Array:
    """Values by Lawson-weighted least squares, for m + 1 equally spaced centres of which the last is the token's."""
    spacing = (task.high - task.low) / (m - 2.0 * pad)
    centres = task.low - pad * spacing + spacing * np.arange(m + 1)
    variance = (width * spacing) ** 2
    slopes, offsets = centres / variance, -(centres**2) / (2.0 * variance)
    x = np.zeros(layout.size)
    x[2 : 2 + m], x[2 + m : 2 + 2 * m] = slopes[:-1] - slopes[-1], offsets[:-1] - offsets[-1]
    linear = np.array([0, 1, *range(2 + 2 * m, 2 + 3 * m), layout.size - 2])
    columns = evaluate(layout, x, task.y)[1][:, linear]
    scale = np.max(np.abs(columns), axis=0) + 1e-300
    columns = columns / scale
    weights = np.ones_like(task.y)
    best = (np.inf, np.zeros(len(linear)))
    for _ in range(4):
        solution = np.linalg.lstsq(columns * weights[:, None], weights * task.target, rcond=1e-11)[0]
        residual = np.abs(columns @ solution - task.target)
        error = float(np.max(residual))
        if error < best[0]:
            best = (error, solution)
        weights *= np.sqrt(residual / max(error, 1e-300) + 1e-2)
    x[linear] = best[1] / scale
    return x


def _core(y: Array, target: Array, tolerance: float) -> tuple[float, float]:
    """The part of the interval outside of which the function is a straight line to within the tolerance."""
    fifth = len(y) // 20

    def straight(points: Array, values: Array) -> int:
        line = np.polyfit(points[:fifth], values[:fifth], 1)
        bent = np.flatnonzero(np.abs(np.polyval(line, points) - values) > tolerance)
        return int(bent[0]) if bent.size else len(points) - 1

    left, right = straight(y, target), straight(y[::-1], target[::-1])
    low = y[left] if left >= fifth else y[0]
    high = y[::-1][right] if right >= fifth else y[-1]
    return (float(low), float(high)) if low < high else (float(y[0]), float(y[-1]))


# -- the whole -----------------------------------------------------------------------------------------------------


def _values(f: Function, y: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(f(y), dtype=np.float64)


def _symmetric(f: Function, low: float, high: float) -> tuple[float, float]:
    """The interval made symmetric, where f is finite there and at most ten times as large."""
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        return low, high
    reach = max(abs(low), abs(high))
    inner, outer = (np.abs(_values(f, np.linspace(*ends, 2001))) for ends in ((low, high), (-reach, reach)))
    fine = np.all(np.isfinite(outer)) and np.max(outer) <= 10.0 * max(1.0, float(np.max(inner)))
    return (-reach, reach) if fine else (low, high)


def _ramp(kink: Kink, y: Array) -> Array:
    return kink.jump * np.maximum(y - kink.place, 0.0)


def _with_kinks(smooth: Program, kinks: tuple[Kink, ...], name: str) -> Program:
    heads = tuple(
        Head(
            beta=_STEEPNESS,
            gamma=-_STEEPNESS * kink.place,
            c=kink.jump,
            d=-kink.jump * kink.place,
            bias_tokens=(BiasToken(),),
        )
        for kink in kinks
    )
    heads = (*smooth.heads, *heads)
    if not heads:  # a straight line: a head that attends to the bias token as to itself, whose weights cannot matter
        line = Head(beta=0.0, c=0.0, d=smooth.constant, bias_tokens=(BiasToken(value=smooth.constant),))
        return replace(smooth, name=name, heads=(line,), constant=0.0)
    return replace(smooth, name=name, heads=heads)


def _state(
    f: Function, program: Program, ends: tuple[float, float], tolerance: float, size: float
) -> Fitted | str:
    """Measure the program's error and its rounding, and judge."""
    low, high = ends
    y = np.linspace(low, high, 200_001)
    expected = _values(f, y)
    if tolerance * size >= _SINGLE:
        program = float32.on_grid(program)
    signed = program.evaluate(y) - expected
    # between two points an error can exceed both by an eighth of its second difference
    between = np.max(np.abs(np.diff(signed, 2))) / 8.0
    error = float(np.max(np.abs(signed)) + between)
    single = float32.points(low, high)
    exact = program.evaluate(single.astype(np.float64))
    added = np.abs(float32.evaluate(program, single) - exact) / np.maximum(1.0, np.abs(exact))
    rounding = max(float(np.max(added)), Program.rounding) if np.all(np.isfinite(added)) else float("inf")
    if not error <= WORTH_RETURNING * size or not np.isfinite(rounding):
        return (
            f"the best head program found is {error:.2g} off on [{low:.6g}, {high:.6g}], more than 1e-3 of its largest "
            f"value {size:.3g}; give a narrower --domain"
        )
    total = error + (rounding if tolerance * size >= _SINGLE else 0.0)
    note = f"fitted on [{low:.6g}, {high:.6g}]; error measured at {y.size} points plus what curvature adds between them"
    stated = replace(program, max_error=error, rounding=rounding, domain=max(abs(low), abs(high)))
    return Fitted(stated, low, high, total <= tolerance * size, note)

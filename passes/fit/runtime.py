"""Fitting a head program at run time to a function of one variable, given by its values.

A fit needs numpy only, is deterministic and takes seconds. Each kink gets a steep head (ReLU's limit). The rest is
differentiable; where its curvature jumps it is cut into pieces, each continued by its tangents, and each piece gets a
head (`mesh`) whose keys crowd towards the cuts. For a smooth function with few bias tokens, all parameters are then
optimised (`gauss_newton`), which gains orders of magnitude. All choices are by the error in float32, or in
float64 where the tolerance needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from passes.programs.head import FACTORED, Array, BiasToken, Head
from passes.programs.program import Program

Function = Callable[[Array], Array]

MOST_TOKENS = 64
WORTH_RETURNING = 1e-3
"""Fits with an error above this fraction of the largest |f| are discarded."""

_STEEPNESS = 2.0**40
_FREE = 12
"""With at most this many bias tokens, slopes and offsets are optimised too."""
_SINGLE = 2.0**-24
"""For tolerances of at least this, fits are judged in float32."""


@dataclass(frozen=True)
class Fitted:
    """A fitted program.

    Attributes:
        program: its `max_error` holds from `low` to `high`; its `domain` is the larger of their magnitudes.
        low: smallest y of the fit.
        high: largest y of the fit.
        reached: whether `max_error` and float32's rounding are within the tolerance. If not, this is the best program
            found, within `WORTH_RETURNING` of the largest |f|, and the caller decides.
    """

    program: Program
    low: float
    high: float
    reached: bool


def fit_function(f: Function, domain: tuple[float, float], tolerance: float, name: str) -> Fitted | str:
    """The smallest program found for `f` whose error on `domain` is within the tolerance, or why there is none.

    Args:
        f: elementwise values at an array of points (float64).
        domain: (low, high) of y. Made symmetric if f stays finite and of similar size.
        tolerance: largest absolute error, in units of max(1, largest |f| on the domain).
        name: name of the program.
    """
    low, high = _symmetric(f, *(float(end) for end in domain))
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        return f"its domain from {low:.6g} to {high:.6g} is not an interval; give --option domain=R"
    y = np.linspace(low, high, 20_001)
    values = _values(f, y)
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        return f"it is not finite at y = {y[wrong[0]]:.6g}; give --option domain=R without such points"
    size = max(1.0, float(np.max(np.abs(values))))
    # Kinks of the slope first: once their ramps are subtracted, second derivatives are finite and can be searched.
    corners = find_kinks(lambda points: _values(f, points), low, high)
    if isinstance(corners, str):
        return corners

    def smooth(points: Array) -> Array:
        return np.asarray(_values(f, points) - sum((_ramp(kink, points) for kink in corners), np.zeros_like(points)))

    cuts = find_kinks(smooth, low, high, derivative=2)
    if isinstance(cuts, str):
        return cuts
    parts, line = _pieces(smooth, low, high, tuple(kink.place for kink in cuts))
    # The pieces' errors may add up, so each gets a share of the tolerance.
    wanted = tolerance * size / max(1, len(parts))
    fits = [_best(part, wanted) for part in parts]
    whole = Program(
        name,
        tuple(head for part in fits for head in part.heads) + tuple(_corner(kink) for kink in corners),
        linear=sum((part.linear for part in fits), float(line[0])),
        constant=sum((part.constant for part in fits), float(line[1])),
    )
    return _state(f, _tidy(whole), (low, high), tolerance, size)


# -- pieces ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """A function between `low` and `high`, with a straight line (or the domain's end) on either side."""

    f: Function
    domain: tuple[float, float]
    low: float
    high: float
    bent_low: bool
    bent_high: bool


def _pieces(f: Function, low: float, high: float, cuts: tuple[float, ...]) -> tuple[list[_Piece], Array]:
    """The function as a sum of pieces, each continued by its tangents at the cuts, and a line (slope, constant)."""
    ends = (low, *cuts, high)
    # Left of a cut the next piece equals the tangent, right of it the previous one does. The sum of the pieces contains
    # every tangent once too often, which the line subtracts.
    tangents = [_tangent(f, cut, min(np.diff(ends)) / 8.0) for cut in cuts]
    total = -np.sum(tangents, axis=0) if tangents else np.zeros(2)
    pieces = []
    for index, (start, end) in enumerate(pairwise(ends)):
        left = tangents[index - 1] if index > 0 else None
        right = tangents[index] if index < len(cuts) else None
        continued = _continued(f, start, end, left, right)
        y = np.linspace(low, high, 4001)
        values = continued(y)
        # A piece that is straight itself needs no head.
        line = np.polyfit(y, values, 1)
        if np.max(np.abs(np.polyval(line, y) - values)) <= 1e-9 * max(1.0, float(np.max(np.abs(values)))):
            total = total + line
        else:
            pieces.append(_Piece(continued, (low, high), start, end, left is not None, right is not None))
    return pieces, total


def _tangent(f: Function, at: float, room: float) -> Array:
    """(slope, constant) of the tangent: the mean of the two one-sided slopes, to second order in the step."""
    step = min(1e-4, room)
    near = f(at + step * np.array([-2.0, -1.0, 0.0, 1.0, 2.0]))
    above = (-3.0 * near[2] + 4.0 * near[3] - near[4]) / (2.0 * step)
    below = (3.0 * near[2] - 4.0 * near[1] + near[0]) / (2.0 * step)
    slope = (above + below) / 2.0
    return np.array([slope, near[2] - slope * at])


def _continued(f: Function, start: float, end: float, left: Array | None, right: Array | None) -> Function:
    """The function between start and end, continued by the given tangents."""

    def continued(y: Array) -> Array:
        values = f(np.clip(y, start, end))
        if left is not None:
            values = np.where(y < start, np.polyval(left, y), values)
        if right is not None:
            values = np.where(y > end, np.polyval(right, y), values)
        return values

    return continued


# -- one piece, one head -----------------------------------------------------------------------------------------


def _best(piece: _Piece, tolerance: float) -> Program:
    """The smallest program whose error is within the tolerance, else the most accurate one."""
    task = _task(piece, tolerance)
    single = _points(*piece.domain, 4001)
    expected = piece.f(single.astype(np.float64))

    def off(program: Program) -> float:
        return float(np.max(np.abs(_in_single(program, single) - expected)))

    best: tuple[float, Program] | None = None
    for spacings in _ladder(task):
        for layout, x in _candidates(task, spacings):
            program = to_program(layout, x, "smooth")
            error = float(np.max(np.abs(program.evaluate(task.y) - task.target)))
            if tolerance >= _SINGLE:
                # In float32 the shift of the logits decides about the rounding.
                (head,) = program.heads
                slopes = sorted(slope for slope, _ in head.logits)
                tried = {0.0, slopes[0], slopes[len(slopes) // 2], slopes[-1]}
                shifts = [replace(program, heads=(head.shifted(-slope, 0.0),)) for slope in sorted(tried)]
                program = min(shifts, key=off)
                error = max(error, off(program))
            if best is None or error < best[0]:
                best = (error, program)
        # Sizes ascend, so the first that is good enough is the smallest. The margin is for points between the samples.
        if best is not None and best[0] <= 0.8 * tolerance:
            break
    return best[1] if best is not None else Program("smooth", ())


def _task(piece: _Piece, tolerance: float) -> Smooth:
    # Points: evenly spaced, crowded at both ends like Chebyshev's, and crowded geometrically at jumps of the curvature.
    low, high = piece.domain
    rows = [np.linspace(low, high, 300), (low + high + (high - low) * np.cos(np.pi * np.arange(200.5) / 200.0)) / 2.0]
    near = np.geomspace(1e-6, 1.0, 250) * (high - low)
    rows += [near + piece.low, piece.low - near] if piece.bent_low else []
    rows += [near + piece.high, piece.high - near] if piece.bent_high else []
    y = np.unique(np.concatenate(rows))
    y = y[(y >= low) & (y <= high)]
    target = piece.f(y)
    start, end = _core(y, target, tolerance / 8.0)
    start = piece.low if piece.bent_low else start
    end = piece.high if piece.bent_high else end
    return Smooth(y, target, start, end, piece.bent_low, piece.bent_high, tolerance)


def _ladder(task: Smooth) -> Iterator[list[Spacing]]:
    """Lists of spacings to try together, in order of the number of bias tokens."""
    length = task.high - task.low
    if task.bent:
        for least in (0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4):
            yield [
                Spacing(length / parts, least * min(1.0, length), 1, width)
                for parts in (5, 10, 20)
                for width in (1.2, 1.4, 1.7, 2.0)
            ]
    else:
        for m in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, MOST_TOKENS):
            yield [
                Spacing(length / (m - 2 * pad), 0.0, pad, width)
                for pad in (0, 1, 2, 3)
                for width in (0.7, 1.0, 1.4, 2.0, 2.8)
                if m > 2 * pad
            ]


def _candidates(task: Smooth, spacings: list[Spacing]) -> list[tuple[Layout, Array]]:
    """Parameters of the best linear fits, and of these after optimising all parameters, where they are few."""
    fits = [fit for spacing in spacings if (fit := linear_fit(task, spacing, MOST_TOKENS)) is not None]
    fits.sort(key=lambda fit: fit[0])
    result = [(layout, x) for _, layout, x in fits[:2]]
    for error, layout, x in fits[:2]:
        if layout.tokens[0] <= _FREE and error < 1e5 * task.tolerance and not task.bent:
            result.append((layout, _moved(task, layout, x)))
    return result


def _moved(task: Smooth, layout: Layout, x: Array) -> Array:
    """The parameters after Gauss-Newton steps: least squares first, then a norm closer to the largest error."""
    free = np.ones(layout.size, dtype=bool)
    free[-1] = False  # weights sum to 1, so a constant is the same as a change of all values
    for norm in (2.0, 8.0):
        x = gauss_newton(layout, x, task.y, task.target, free, norm=norm, steps=25)
    return x


def _core(y: Array, target: Array, tolerance: float) -> tuple[float, float]:
    """The part of the interval outside of which the function is a straight line within the tolerance."""
    few = len(y) // 20

    def straight(points: Array, values: Array) -> int:
        line = np.polyfit(points[:few], values[:few], 1)
        bent = np.flatnonzero(np.abs(np.polyval(line, points) - values) > tolerance)
        return int(bent[0]) if bent.size else len(points) - 1

    left, right = straight(y, target), straight(y[::-1], target[::-1])
    low = y[left] if left >= few else y[0]
    high = y[::-1][right] if right >= few else y[-1]
    return (float(low), float(high)) if low < high else (float(y[0]), float(y[-1]))


# -- the whole -----------------------------------------------------------------------------------------------------


def _values(f: Function, y: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(f(y), dtype=np.float64)


def _symmetric(f: Function, low: float, high: float) -> tuple[float, float]:
    """The interval made symmetric, if f is finite there and at most ten times as large."""
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        return low, high
    reach = max(abs(low), abs(high))
    inner, outer = (np.abs(_values(f, np.linspace(*ends, 2001))) for ends in ((low, high), (-reach, reach)))
    fine = np.all(np.isfinite(outer)) and np.max(outer) <= 10.0 * max(1.0, float(np.max(inner)))
    return (-reach, reach) if fine else (low, high)


def _ramp(kink: Corner, y: Array) -> Array:
    return kink.jump * np.maximum(y - kink.place, 0.0)


def _corner(kink: Corner) -> Head:
    """The ramp `jump max(y - place, 0)`, within 0.28 |jump| / 2^40."""
    d = -kink.jump * kink.place
    return Head(_STEEPNESS, (BiasToken(),), gamma=-_STEEPNESS * kink.place, c=kink.jump, d=d)


def _tidy(program: Program) -> Program:
    """Move the constant into the values of a head; a straight line gets a head whose weights do not matter."""
    first = program.heads[0] if program.heads else Head(beta=0.0, c=0.0, d=0.0)
    tokens = tuple(replace(token, value=token.value + program.constant) for token in first.bias_tokens)
    first = replace(first, d=first.d + program.constant, bias_tokens=tokens)
    return replace(program, heads=(first, *program.heads[1:]), constant=0.0)


def _state(f: Function, program: Program, ends: tuple[float, float], tolerance: float, size: float) -> Fitted | str:
    """Measure the program's error and rounding, and compare them with the tolerance."""
    low, high = ends
    y = np.linspace(low, high, 200_001)
    expected = _values(f, y)
    in_single = tolerance * size >= _SINGLE
    signed = program.evaluate(y) - expected
    # Between two points the error can exceed both by an eighth of its second difference.
    between = np.max(np.abs(np.diff(signed, 2))) / 8.0
    error = float(np.max(np.abs(signed)) + between)
    single = _points(low, high, 100_001)
    exact = program.evaluate(single.astype(np.float64))
    added = np.abs(_in_single(program, single) - exact) / np.maximum(1.0, np.abs(exact))
    rounding = max(float(np.max(added)), Program.rounding)
    if not error <= WORTH_RETURNING * size or not np.isfinite(rounding):
        return (
            f"the best head program found has error {error:.2g} on [{low:.6g}, {high:.6g}], more than 1e-3 of the "
            f"largest value {size:.3g}; give a narrower --option domain=R"
        )
    total = error + (float(np.max(added * np.maximum(1.0, np.abs(exact)))) if in_single else 0.0)
    stated = replace(program, max_error=error, rounding=rounding, domain=max(abs(low), abs(high)), measured=True)
    return Fitted(stated, low, high, total <= tolerance * size)


def _points(low: float, high: float, count: int) -> Array:
    """Float32 numbers, evenly spaced with random jitter: those of a regular grid would round too well."""
    random = np.random.default_rng(20)
    points = np.linspace(low, high, count)
    points[1:-1] += random.uniform(-0.5, 0.5, count - 2) * (high - low) / (count - 1)
    return points.astype(np.float32).astype(np.float64)


def _in_single(program: Program, y: Array) -> Array:
    """The program in float32 as form `local` computes it: offsets are factors of the exponentials, if not steep."""
    single = np.float32
    x = y.astype(single)
    total = single(program.linear) * x + single(program.constant)
    with np.errstate(over="ignore", under="ignore"):
        for head in program.heads:
            slopes, offsets = (column[:, None] for column in np.array(head.shifted(0.0, -head.gamma).logits).T)
            steep = bool(np.max(np.abs(offsets)) > FACTORED)
            logits = slopes.astype(single) * x + (offsets if steep else 0.0 * offsets).astype(single)
            shares = np.exp(logits - np.max(logits, axis=0))
            factors = np.ones_like(offsets) if steep else np.exp(offsets)
            values = np.array([[0.0], *([token.value] for token in head.bias_tokens)]) * factors
            parts = np.sum(shares * values.astype(single), axis=0) + shares[0] * (single(head.c) * x + single(head.d))
            total = total + parts / np.sum(shares * factors.astype(single), axis=0)
    return np.asarray(total, dtype=np.float64)


# -- kinks: points at which the slope or the curvature jumps ----------------------------------------------------------
#
# The n-th difference of a smooth function shrinks like the n-th power of the step. Where a lower derivative jumps, it
# stands out among its neighbours, and still does after repeated halving of the step, which also locates the kink.

_CELLS = 4096
_HALVINGS = 10


@dataclass(frozen=True)
class Corner:
    """A point at which a derivative (1 the slope, 2 the curvature) changes by `jump`."""

    place: float
    jump: float


def find_kinks(f: Function, low: float, high: float, *, derivative: int = 1, most: int = 8) -> tuple[Corner, ...] | str:
    """The kinks of f between low and high from left to right, or why a sum of heads cannot approximate f."""
    order = derivative + 1
    y = np.linspace(low, high, _CELLS + 1)
    values, step = f(y), (high - low) / _CELLS
    bends = np.abs(np.diff(values, order))
    padded = np.pad(bends, 8, mode="edge")
    around = np.maximum.reduce([padded[8 + shift : 8 + shift + bends.size] for shift in (-6, -5, 5, 6)])
    noise = 1e-14 * max(float(np.max(np.abs(values))), 1e-30)
    kinks: list[Corner] = []
    for index in np.flatnonzero((bends > 3.0 * around) & (bends > 1e3 * noise)):
        if kinks and float(y[index]) < kinks[-1].place + 4.0 * step:
            continue
        found = _locate(f, float(y[index]), float(y[index + order]), order)
        if isinstance(found, str):
            return found
        if found is not None:
            kinks.append(found)
    if len(kinks) > most:
        return (
            f"it has more than {most} kinks, the first near y = {kinks[0].place:.6g}, and each needs heads of its own"
        )
    return tuple(kinks)


def _locate(f: Function, low: float, high: float, order: int) -> Corner | str | None:
    """The kink between two points, the description of a jump, or None where f is smooth."""
    start, width = _difference(f, low, high, order), high - low
    left, right = low, high
    for _ in range(_HALVINGS if order == 2 else 6):
        quarter = (right - left) / 4.0
        places = (left + shift * quarter for shift in (0.0, 0.5, 1.0, 1.5, 2.0))
        left = max(places, key=lambda place: abs(_difference(f, place, place + 2.0 * quarter, order)))
        right = left + 2.0 * quarter
    shrunk = (right - left) / width
    ratio = abs(_difference(f, left, right, order)) / max(abs(start), 1e-300)
    # With step h an n-th difference is of order h^n where f is smooth, h^(n-1) at a kink, and 1 at a jump.
    if ratio > 0.2 * shrunk ** (order - 2) and order == 2:
        return f"it jumps near y = {left:.6g}, and a sum of heads is continuous"
    if ratio < 0.2 * shrunk ** (order - 1):
        return None
    place = _rounded((left + right) / 2.0, right - left)
    jump = _one_sided(f, place, width / 8.0, order - 1) - _one_sided(f, place, -width / 8.0, order - 1)
    return Corner(place, jump) if abs(jump) > 1e-7 else None


def _difference(f: Function, low: float, high: float, order: int) -> float:
    return float(np.diff(f(np.linspace(low, high, order + 1)), order)[0])


def _one_sided(f: Function, at: float, step: float, order: int) -> float:
    """The one-sided slope or curvature at a point, to second order in the step or better."""
    f0, f1, f2, f3 = (float(value) for value in f(at + step * np.arange(4.0)))
    if order == 1:
        return (-11.0 * f0 + 18.0 * f1 - 9.0 * f2 + 2.0 * f3) / (6.0 * step)
    return (2.0 * f0 - 5.0 * f1 + 4.0 * f2 - f3) / step**2


def _rounded(place: float, width: float) -> float:
    """The shortest decimal within the bracket: 3 rather than 2.9999998."""
    for digits in range(12):
        if abs(round(place, digits) - place) <= width:
            return float(np.float32(round(place, digits)))
    return float(np.float32(place))


# -- one head: its parameters, with exact derivatives, and Gauss-Newton steps -----------------------------------------
#
# Parameters of a head: c and d of its self value `c y + d`, then the slopes a of all bias tokens, their offsets b
# and their values v. Slopes and offsets are relative to the self logit, which is 0 (softmax is invariant to a common
# shift). The last two parameters are the program's linear factor and its constant. With p the softmax weights of a head
# and o its output, the derivatives are p_j by v_j, p_j (v_j - o) by b_j, and y times that by a_j.

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Layout:
    """The shape of a parameter vector.

    Attributes:
        tokens: bias tokens per head.
    """

    tokens: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of parameters, including fixed ones."""
        return sum(2 + 3 * m for m in self.tokens) + 2

    def head(self, index: int) -> tuple[int, int]:
        """(first parameter, bias tokens) of a head."""
        return sum(2 + 3 * m for m in self.tokens[:index]), self.tokens[index]


def evaluate(layout: Layout, x: Array, y: Array) -> tuple[Array, Array]:
    """Values [points] and Jacobian [points, parameters] of the program with parameters `x`."""
    jacobian = np.empty((y.size, layout.size))
    values = x[-2] * y + x[-1]
    jacobian[:, -2], jacobian[:, -1] = y, 1.0
    for index in range(len(layout.tokens)):
        start, m = layout.head(index)
        c, d = x[start : start + 2]
        a, b, v = x[start + 2 : start + 2 + 3 * m].reshape(3, m)
        logits = np.concatenate([np.zeros((y.size, 1)), y[:, None] * a + b], axis=1)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        own = c * y + d
        out = p[:, 0] * own + p[:, 1:] @ v
        lever = p[:, 1:] * (v - out[:, None])
        jacobian[:, start], jacobian[:, start + 1] = p[:, 0] * y, p[:, 0]
        jacobian[:, start + 2 : start + 2 + m] = lever * y[:, None]
        jacobian[:, start + 2 + m : start + 2 + 2 * m] = lever
        jacobian[:, start + 2 + 2 * m : start + 2 + 3 * m] = p[:, 1:]
        values = values + out
    return values, jacobian


def to_program(layout: Layout, x: Array, name: str) -> Program:
    """The parameters as a `Program`, without a stated error."""
    heads = []
    for index in range(len(layout.tokens)):
        start, m = layout.head(index)
        rows = x[start + 2 : start + 2 + 3 * m].reshape(3, m).T
        tokens = tuple(BiasToken(*(float(number) for number in row)) for row in rows)
        heads.append(Head(beta=0.0, c=float(x[start]), d=float(x[start + 1]), bias_tokens=tokens))
    return Program(name, tuple(heads), linear=float(x[-2]), constant=float(x[-1]))


# -- all parameters -------------------------------------------------------------------------------------------------


def gauss_newton(
    layout: Layout,
    x: Array,
    y: Array,
    target: Array,
    free: Mask,
    *,
    norm: float = 2.0,
    steps: int = 60,
    weights: Array | None = None,
) -> Array:
    """Levenberg-Marquardt steps on the p-norm of the error (iteratively reweighted least squares)."""
    base = np.ones_like(y) if weights is None else weights
    damping, best = 1e-6, x.copy()
    values, jacobian = evaluate(layout, best, y)
    residual = base * (values - target)
    score = _norm(residual, norm)
    for _ in range(steps):
        scale = np.max(np.abs(residual))
        if scale == 0.0:
            break
        lawson = base * (np.abs(residual) / scale + 1e-3) ** ((norm - 2.0) / 2.0)
        scale_of = np.maximum(np.abs(best[free]), 0.1)
        left, sizes, right = np.linalg.svd(jacobian[:, free] * scale_of * lawson[:, None], full_matrices=False)
        along = left.T @ (lawson * (values - target))
        improved = False
        for _ in range(8):
            step = -scale_of * (right.T @ (sizes / (sizes**2 + damping * sizes[0] ** 2) * along))
            # Reweighting for a p-norm needs a shorter step than least squares, by the factor 1 / (p - 1).
            trial = best.copy()
            trial[free] += step / (norm - 1.0)
            values_new, jacobian_new = evaluate(layout, trial, y)
            residual_new = base * (values_new - target)
            score_new = _norm(residual_new, norm)
            if np.isfinite(score_new) and score_new < score:
                improved = True
                break
            damping *= 8.0
        if not improved:
            break
        gain = (score - score_new) / score
        best, values, jacobian, residual, score = trial, values_new, jacobian_new, residual_new, score_new
        damping = max(damping / 12.0, 1e-26)
        if gain < 1e-5:
            break
    return best


def _norm(residual: Array, p: float) -> float:
    scale = float(np.max(np.abs(residual)))
    if scale == 0.0 or not np.isfinite(scale):
        return scale
    return scale * float(np.mean((np.abs(residual) / scale) ** p) ** (1.0 / p))


# -- the values of a head whose keys are given ----------------------------------------------------------------------
#
# Each centre t_0 < ... < t_m has a key whose logit, a straight line, is the largest around it: from one centre to the
# next the slope grows by 1 / (width^2 (t_j+1 - t_j)), and the lines cross half way. Evenly spaced centres give a
# normalised row of Gaussians; centres that crowd towards a jump of the curvature resolve it, with one bias token per
# halving of the distance. The last centre is that of the token itself, so that beyond it the program is the self value,
# a straight line; the linear term makes the other end one too. The values then follow from linear least squares.


_LAWSON = 3
_RATIO = 0.5
"""Spacing over distance, where centres crowd."""


@dataclass(frozen=True)
class Smooth:
    """A function to be fitted by one head.

    Attributes:
        y: points.
        target: its values there.
        low: left of here it is a straight line, within a fraction of the tolerance.
        high: right of here likewise.
        bent_low: whether the curvature jumps at `low`.
        bent_high: whether it jumps at `high`.
        tolerance: largest error wanted.
    """

    y: Array
    target: Array
    low: float
    high: float
    bent_low: bool
    bent_high: bool
    tolerance: float

    @property
    def bent(self) -> bool:
        """Whether the curvature jumps at an end."""
        return self.bent_low or self.bent_high


@dataclass(frozen=True)
class Spacing:
    """Placement of centres: `largest` apart, `least` at a jump of the curvature, `pad` more at each end."""

    largest: float
    least: float
    pad: int
    width: float


def centres(task: Smooth, spacing: Spacing) -> Array:
    """The centres from left to right."""
    if not task.bent:
        count = max(1, round((task.high - task.low) / spacing.largest))
        step = (task.high - task.low) / count
        return np.array(task.low + step * np.arange(-spacing.pad, count + spacing.pad + 1), dtype=np.float64)
    row = [task.low]
    while row[-1] < task.high and len(row) < 200:
        step = spacing.largest
        if task.bent_low:
            step = min(step, max(spacing.least, _RATIO * (row[-1] - task.low)))
        if task.bent_high:
            step = min(step, max(spacing.least, _RATIO / (1.0 + _RATIO) * (task.high - row[-1])))
        row.append(row[-1] + step)
    first, last, more = row[1] - row[0], row[-1] - row[-2], np.arange(1, spacing.pad + 1)
    return np.array([*(row[0] - first * more[::-1]), *row, *(row[-1] + last * more)], dtype=np.float64)


def linear_fit(task: Smooth, spacing: Spacing, most: int) -> tuple[float, Layout, Array] | None:
    """(rank, layout, parameters) of the head with these centres; None where it has more than `most` tokens.

    The rank is the largest error plus an estimate of float32's rounding.
    """
    at = centres(task, spacing)
    m = len(at) - 1
    if not 1 <= m <= most:
        return None
    rise = 1.0 / (spacing.width**2 * np.diff(at))
    slopes = np.append(0.0, np.cumsum(rise))
    offsets = np.append(0.0, np.cumsum(-rise * (at[1:] + at[:-1]) / 2.0))
    layout = Layout((m,))
    x = np.zeros(layout.size)
    x[2 : 2 + m], x[2 + m : 2 + 2 * m] = slopes[:-1] - slopes[-1], offsets[:-1] - offsets[-1]
    linear = np.array([0, 1, *range(2 + 2 * m, 2 + 3 * m), layout.size - 2])
    columns = evaluate(layout, x, task.y)[1][:, linear]
    scale = np.max(np.abs(columns), axis=0) + 1e-300
    columns = columns / scale
    weights, best = np.ones_like(task.y), (np.inf, np.zeros(len(linear)))
    for _ in range(_LAWSON):  # Lawson's weights: from least squares towards the smallest largest error
        solution = np.linalg.lstsq(columns * weights[:, None], weights * task.target, rcond=1e-11)[0]
        residual = np.abs(columns @ solution - task.target)
        error = float(np.max(residual))
        if error < best[0]:
            best = (error, solution)
        if error > 100.0 * task.tolerance or error == 0.0:
            break
        weights = weights * np.sqrt(residual / error + 1e-2)
    x[linear] = best[1] / scale
    return best[0] + _rounding(layout, x, task.y), layout, x


def _rounding(layout: Layout, x: Array, y: Array) -> float:
    """An estimate of float32's rounding: that of the logits, in proportion to their magnitude, for a good shift."""
    m = layout.tokens[0]
    slopes = x[2 : 2 + m]
    levers = np.abs(evaluate(layout, x, y)[1][:, 2 : 2 + m])  # derivatives by the slopes
    shifts = (0.0, float(np.median(slopes)), float(slopes[0]))
    return 2.0**-25 * min(float(np.max(levers @ np.abs(slopes - shift))) for shift in shifts)

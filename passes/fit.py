"""Activations without a program in the table: fitted while planning, once per domain, deterministically and in seconds.

The function is evaluated by the region's own nodes. Each kink gets a steep head (ReLU's limit), and the remainder one
head with given keys (`_head`), denser near jumps of the curvature, whose values are a linear least-squares problem. The
smallest such head within the tolerance is chosen, otherwise the closest.
"""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np

from passes.match.identify import Identified
from passes.programs.program import FACTORED, MARGIN, Arithmetic, Array, BiasToken, Function, Head, Program, grid
from rewriter.arrays import distinct
from rewriter.graph.view import LostError

MAX_DEFAULT_ERROR = 1e-5  # over max(1, |f|)
_MAX_FLOAT32_ROUNDING = 4.0  # in tolerances; a fit that rounds by more is evaluated in float64
_GATE_TOLERANCE = 8.0  # in tolerances: the bound on a gate's additional error is not sharp
_ADVICE = "keep its product in the graph with --gate product"  # if a fit is not a gate
DOMAIN_MARGIN = 1.5  # the domain of a fit relative to the largest |y| seen
MAX_FIT_ERROR = 1e-3  # over the largest |f|
_STEEPNESS = 2.0**40


def domain_of(reached: float) -> float:
    """The domain of a fit for |y| up to `reached`: at least `DOMAIN_MARGIN` times as far, as 2^n or 1.5 2^n."""
    # Rounded, so that blocks with similar reaches share one fit.
    wanted = max(DOMAIN_MARGIN * reached, 1.0)
    power = 2.0 ** math.floor(math.log2(wanted))
    return next(size for size in (power, 1.5 * power, 2.0 * power) if size >= wanted)


@cache
def fitted(
    named: Identified, domain: float, arithmetic: Arithmetic, *, gated: bool, strict: bool, quick: bool = False
) -> Program | str:
    """The program of an activation on |y| <= `domain`, or why there is none.

    It uses float64 where float32's rounding would exceed the arithmetic's tolerance by far. `strict` requires that
    tolerance; otherwise `MAX_DEFAULT_ERROR` is enough where it cannot be reached. `quick` is as in `decide`.
    """
    name, tolerance = f"{named.activation.name}_fitted", arithmetic.tolerance
    allowed = tolerance if strict else max(tolerance, MAX_DEFAULT_ERROR)
    try:
        program = fit_function(
            lambda y: named.activation.function(y, named.parameters), domain, tolerance, name, allowed
        )
    except LostError as lost:
        return lost.miss.reason
    if program.rounding > _MAX_FLOAT32_ROUNDING * tolerance:
        program = replace(program, double=True)
    if (error := program.max_error) > allowed:
        power = 10.0 ** math.floor(math.log10(error))
        how = f"accept it with --accuracy {math.ceil(error / power) * power:.0e}, or give a smaller --option domain=R"
        return f"the closest fit on |y| <= {domain:g} has error {error:.2g}; {how}"
    activation = replace(named.activation, program=lambda *_: program)
    if (made := activation.program_for((), arithmetic, gated=gated, quick=quick)) is None:
        return f"its fit has several heads, which cannot become a gate; {_ADVICE}"
    if made.max_error > max(allowed, _GATE_TOLERANCE * tolerance):
        return f"as a gate, its closest fit on |y| <= {domain:g} is off by {made.max_error:.2g}; {_ADVICE}"
    return made


@np.errstate(all="ignore")
def fit_function(f: Function, reach: float, tolerance: float, name: str, allowed: float = math.inf) -> Program:
    """The smallest program found for `f` on |y| <= reach within the tolerance, else the closest.

    The tolerance is in units of max(1, largest |f|), but at most the absolute error `allowed`. Raises LostError where
    the closest program is not within `MAX_FIT_ERROR`, or `f` is not finite, jumps or has too many kinks.
    """
    y = np.linspace(-reach, reach, 20_001)
    values = f(y)
    if (wrong := np.flatnonzero(~np.isfinite(values))).size:
        raise LostError(f"it is not finite at y = {y[wrong[0]]:.6g}; give --option domain=R without such points", name)
    # Kinks of the slope first: once their ramps are subtracted, second derivatives are finite and can be searched.
    corners = find_kinks(f, reach)

    def smooth(points: Array) -> Array:
        ramps = [jump * np.maximum(points - place, 0.0) for place, jump in corners]
        return np.asarray(f(points) - sum(ramps, np.zeros_like(points)))

    cuts = find_kinks(smooth, reach, derivative=2)
    size = max(1.0, float(np.max(np.abs(values))))
    program = _smallest_head(smooth, reach, [place for place, _ in cuts], min(tolerance * size, allowed))
    # The ramp `jump max(y - place, 0)`, within 0.28 |jump| / 2^40.
    k = _STEEPNESS
    steep = [Head(k, (BiasToken(),), -k * place, jump, -jump * place) for place, jump in corners]
    first, *others = (*program.heads, *steep) or (Head(beta=0.0, c=0.0, d=0.0),)
    # A constant goes into the values of a head; a straight line gets a head whose weights do not matter.
    tokens = tuple(replace(token, value=token.value + program.constant) for token in first.bias_tokens)
    first = replace(first, d=first.d + program.constant, bias_tokens=tokens)
    return _with_measured_error(f, Program(name, (first, *others), linear=program.linear), reach, size)


def _with_measured_error(f: Function, program: Program, reach: float, size: float) -> Program:
    """The program with its measured error and rounding. Raises LostError where it is useless."""
    y = np.linspace(-reach, reach, 200_001)
    signed = program.evaluate(y) - f(y)
    # Between two points the error can exceed both by an eighth of its second difference, and around a kink by more.
    error = float(np.max(np.abs(signed)) + np.max(np.abs(np.diff(signed, 2))) / 8.0)
    near = grid(reach, program)
    found = float(np.max(np.abs(program.evaluate(near) - f(near))))
    error = error if found <= error else MARGIN * found
    rounding = max(_rounding(program, _single_points(reach, 100_001)), Program.rounding)
    if not error <= MAX_FIT_ERROR * size or not np.isfinite(rounding):
        off = f"error {error:.2g} on |y| <= {reach:.6g}, more than 1e-3 of the largest value {size:.3g}"
        raise LostError(f"the best head program found has {off}; give a narrower --option domain=R", program.name)
    return replace(program, max_error=error, rounding=rounding, domain=reach, measured=True)


def _single_points(reach: float, count: int) -> Array:
    """Float32 numbers with random jitter: a regular grid would round too well."""
    points = np.linspace(-reach, reach, count)
    points[1:-1] += np.random.default_rng(20).uniform(-0.5, 0.5, count - 2) * 2.0 * reach / (count - 1)
    return points.astype(np.float32).astype(np.float64)


def _rounding(program: Program, y: Array) -> float:
    """The largest rounding over max(1, |program|) in float32, as form `local` computes it."""
    x = y.astype(single := np.float32)
    total = single(program.linear) * x + single(program.constant)
    for head in program.heads:
        slopes, offsets = (column[:, None] for column in np.array(head.shifted(0.0, -head.gamma).logits).T)
        steep = bool(np.max(np.abs(offsets)) > FACTORED)
        logits = slopes.astype(single) * x + (offsets if steep else 0.0 * offsets).astype(single)
        shares = np.exp(logits - np.max(logits, axis=0))
        factors = np.ones_like(offsets) if steep else np.exp(offsets)
        values = np.array([[0.0], *([token.value] for token in head.bias_tokens)]) * factors
        parts = np.sum(shares * values.astype(single), axis=0) + shares[0] * (single(head.c) * x + single(head.d))
        total = total + parts / np.sum(shares * factors.astype(single), axis=0)
    exact = program.evaluate(y)
    return float(np.max(np.abs(total - exact) / np.maximum(1.0, np.abs(exact))))


# -- one head whose keys are given ------------------------------------------------------------------------------------
#
# Each centre t_0 < ... < t_m has a key whose logit, a straight line, is the largest around it: from one centre to the
# next the slope grows by 1 / (width^2 (t_j+1 - t_j)), and the lines cross half way. Centres that crowd towards a jump
# of the curvature resolve it. The last centre is that of the token itself, so that beyond it the program is a straight
# line, the self value; the linear term makes the other end one too. The values follow from linear least squares.

_KEYS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
_WIDTHS = (0.7, 1.0, 1.4, 2.0, 2.8)
_PADS = (0, 1, 2, 3)  # centres beyond either end
_MIN_DISTANCES = (1e-2, 1e-3, 1e-4)  # from a jump of the curvature, over the length: centres crowd no closer
_SINGULAR_CUTOFF = 1e-9
"""Singular values below this, or a thousandth of the tolerance, are dropped: their values are large and cancel."""


def _smallest_head(f: Function, reach: float, cuts: list[float], tolerance: float) -> Program:
    """A line and the head with the fewest keys within the tolerance, else the closest, with jumps of f'' at `cuts`."""
    # Evenly spaced points, more at both ends like Chebyshev's, and many more around the cuts.
    far = np.geomspace(1e-6, 1.0, 250) * 2.0 * reach
    rows = [reach * np.cos(np.pi * np.arange(200.5) / 200.0), *(cut + side * far for cut in cuts for side in (-1, 1))]
    y = distinct(np.concatenate([np.linspace(-reach, reach, 300), *rows]))
    y = y[np.abs(y) <= reach]
    target = f(y)
    line = np.polyfit(y, target, 1)
    if np.max(np.abs(np.polyval(line, y) - target)) <= 1e-9 * max(1.0, float(np.max(np.abs(target)))):
        return Program("", (), linear=float(line[0]), constant=float(line[1]))
    start, end = _curved_interval(y, target, tolerance / 8.0)
    ends = min([start, *cuts]), max([end, *cuts])
    closest: tuple[float, Program] = (math.inf, Program("", ()))
    for keys in _KEYS:
        for width, pad, least in product(_WIDTHS, (1,) if cuts else _PADS, _MIN_DISTANCES if cuts else (1.0,)):
            if keys > 2 * pad:
                found = _head(_centres(*ends, cuts, least, keys, pad), width, y, target, tolerance)
                closest = min(closest, found, key=lambda pair: pair[0])
        if closest[0] <= 0.8 * tolerance:  # the margin is for points between the samples
            break
    program = closest[1]
    # In float32 the shift of the logits decides about the rounding.
    (head,) = program.heads
    slopes, points = sorted(slope for slope, _ in head.logits), _single_points(reach, 4001)
    shifts = [head.shifted(-slope, 0.0) for slope in (0.0, slopes[0], slopes[len(slopes) // 2], slopes[-1])]
    return min((replace(program, heads=(each,)) for each in shifts), key=lambda each: _rounding(each, points))


def _curved_interval(y: Array, target: Array, tolerance: float) -> tuple[float, float]:
    """The ends of the interval outside of which the function is a straight line within the tolerance."""
    few = len(y) // 20

    def straight(points: Array, values: Array) -> float:
        line = np.polyfit(points[:few], values[:few], 1)
        bent = np.flatnonzero(np.abs(np.polyval(line, points) - values) > tolerance)
        first = int(bent[0]) if bent.size else len(points) - 1
        return float(points[first if first >= few else 0])

    low, high = straight(y, target), straight(y[::-1], target[::-1])
    return (low, high) if low < high else (float(y[0]), float(y[-1]))


def _centres(low: float, high: float, cuts: list[float], least: float, keys: int, pad: int) -> Array:
    """The centres of `keys` keys and of the token itself, `pad` at each end beyond low and high."""
    far = np.geomspace(1e-6, 1.0, 400) * (length := high - low)
    t = np.concatenate([np.linspace(low, high, 400), *(cut + side * far for cut in cuts for side in (-1, 1))])
    t = distinct(np.clip(t, low, high))
    density = 1.0 / length + sum((0.5 / (np.abs(t - cut) + least * length) for cut in cuts), np.zeros_like(t))
    count = np.append(0.0, np.cumsum((density[1:] + density[:-1]) / 2.0 * np.diff(t)))
    row = np.interp(np.linspace(0.0, count[-1], keys - 2 * pad + 1), count, t)
    more = np.arange(1, pad + 1)
    return np.concatenate([row[0] - (row[1] - row[0]) * more[::-1], row, row[-1] + (row[-1] - row[-2]) * more])


def _head(centres: Array, width: float, y: Array, target: Array, tolerance: float) -> tuple[float, Program]:
    rise = 1.0 / (width**2 * np.diff(centres))
    slopes, offsets = (np.append(0.0, np.cumsum(steps)) for steps in (rise, -rise * (centres[1:] + centres[:-1]) / 2.0))
    slopes, offsets = slopes[:-1] - slopes[-1], offsets[:-1] - offsets[-1]
    offsets[np.abs(offsets) < 2.0**-23] = 0.0  # weights closer to 1 round to 1 in float32: docs/decisions/0009
    tokens = [BiasToken(float(slope), float(offset)) for slope, offset in zip(slopes, offsets, strict=True)]
    weights = Head(beta=0.0, bias_tokens=tuple(tokens)).weights(y)
    columns = np.stack([weights[0] * y, *weights, y], axis=1)
    scale = np.max(np.abs(columns), axis=0) + 1e-300
    solution = np.linalg.lstsq(columns / scale, target, rcond=max(_SINGULAR_CUTOFF, 1e-3 * tolerance))[0] / scale
    c, d, *values, linear = solution.tolist()
    tokens = [replace(token, value=value) for token, value in zip(tokens, values, strict=True)]
    error = float(np.max(np.abs(columns @ solution - target)))
    return error, Program("", (Head(beta=0.0, c=c, d=d, bias_tokens=tuple(tokens)),), linear=linear)


# -- kinks: points at which the slope or the curvature jumps ----------------------------------------------------------
#
# The n-th difference of a smooth function shrinks like the n-th power of the step. Where a lower derivative jumps, it
# stands out among its neighbours, and still does after repeated halving of the step, which also locates the kink.

_CELLS = 4096
_MAX_KINKS = 8


Kink = tuple[float, float]  # a point, and by how much a derivative (1 the slope, 2 the curvature) changes there


def find_kinks(f: Function, reach: float, *, derivative: int = 1) -> tuple[Kink, ...]:
    """The kinks of f on |y| <= reach from left to right. Raises LostError where heads cannot approximate f."""
    order = derivative + 1
    y = np.linspace(-reach, reach, _CELLS + 1)
    values, step = f(y), 2.0 * reach / _CELLS
    bends = np.abs(np.diff(values, order))
    padded = np.pad(bends, 8, mode="edge")
    around = np.maximum.reduce([padded[8 + shift : 8 + shift + bends.size] for shift in (-6, -5, 5, 6)])
    noise = 1e-14 * max(float(np.max(np.abs(values))), 1e-30)
    kinks: list[Kink] = []
    for index in np.flatnonzero((bends > 3.0 * around) & (bends > 1e3 * noise)):
        near = kinks and y[index] < kinks[-1][0] + 4.0 * step
        found = None if near else _locate(f, float(y[index]), float(y[index + order]), order)
        kinks += [] if found is None else [found]
    if len(kinks) > _MAX_KINKS:
        what = f"more than {_MAX_KINKS} kinks, each with a separate head, the first near y = {kinks[0][0]:.6g}"
        raise LostError(f"it has {what}", "")
    return tuple(kinks)


def _locate(f: Function, low: float, high: float, order: int) -> Kink | None:
    """The kink between two points; None where f is smooth. Raises LostError where f jumps."""
    left, right = low, high
    for _ in range(10 if order == 2 else 6):
        quarter = (right - left) / 4.0
        places = (left + shift * quarter for shift in (0.0, 0.5, 1.0, 1.5, 2.0))
        left = max(places, key=lambda place: abs(_difference(f, place, place + 2.0 * quarter, order)))
        right = left + 2.0 * quarter
    shrunk = (right - left) / (high - low)
    ratio = abs(_difference(f, left, right, order)) / max(abs(_difference(f, low, high, order)), 1e-300)
    # With step h an n-th difference is of order h^n where f is smooth, h^(n-1) at a kink, and 1 at a jump.
    if ratio > 0.2 * shrunk ** (order - 2) and order == 2:
        raise LostError(f"it jumps near y = {left:.6g}, and a sum of heads is continuous", "")
    if ratio < 0.2 * shrunk ** (order - 1):
        return None
    middle = (left + right) / 2.0
    decimals = (round(middle, digits) for digits in range(12))  # the shortest: 3 rather than 2.9999998
    place = float(np.float32(next((each for each in decimals if abs(each - middle) <= right - left), middle)))
    above, below = (_one_sided(f, place, side * (high - low) / 8.0, order - 1) for side in (1.0, -1.0))
    return (place, above - below) if abs(above - below) > 1e-7 else None


def _difference(f: Function, low: float, high: float, order: int) -> float:
    return float(np.diff(f(np.linspace(low, high, order + 1)), order)[0])


def _one_sided(f: Function, at: float, step: float, order: int) -> float:
    """The slope or curvature of the cubic through four points on one side."""
    cubic = np.polyfit(np.arange(4.0), f(at + step * np.arange(4.0)), 3)
    return float(cubic[-1 - order]) * math.factorial(order) / step**order

"""Which function an activation region computes, however it is spelled: exporters write GELU in dozens of ways.

The region is evaluated in float64 on a grid, dense near 0 and logarithmic up to large magnitudes of both signs, and
compared with the entries of `passes.programs.activations`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from passes.programs.activations import ACTIVATIONS, LINEAR, UNNAMED, UNSOLVED, Activation, Values
from passes.programs.program import Array, Function, Parameters
from rewriter.arrays import distinct
from rewriter.graph.constants import Constants, evaluate
from rewriter.graph.view import GraphView

_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
FIRST_INPUT_ONLY = {"Dropout", "CastLike"}  # others: a ratio and a training flag; the tensor whose type is taken
_TOLERANCE = 8  # in units of the precision of a region's constants
IDENTICAL = 1e-13  # functions this close are the same, evaluated in another order


@dataclass(frozen=True)
class ActivationRegion:
    """The nodes that compute `output` from `leaves` (one leaf, or gate and value), in topological order."""

    output: str
    leaves: tuple[str, ...]
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Identified:
    """An activation, of the table or known by its values alone: `activation(y)`, or `activation(gate) * value`."""

    activation: Activation
    parameters: Parameters
    error: float  # from the region's values on the grid, relative to max(1, |f|)
    gated: tuple[int, int] | None = None  # for two leaves, the positions of gate and value among the region's leaves

    @property
    def label(self) -> str:
        named = self.activation.label(self.parameters)
        return named if self.gated is None else f"{named}(gate) * value"


def in_table(found: Identified | str) -> bool:
    """Whether a region was identified as an activation that has a name."""
    return isinstance(found, Identified) and found.activation.name != UNNAMED.name


_TAILS = np.logspace(-8, 6, 281)
_GRID = distinct(np.concatenate([np.arange(-2048, 2049) / 128.0, _TAILS, -_TAILS]))
"""Points with a step of 1/128 up to |y| = 16, and logarithmic from 1e-8 to 1e6."""


class Identifier:
    """Identifies regions of one view; regions with the same values are compared with the table once."""

    def __init__(self, view: GraphView, constants: Constants, *, fit: bool) -> None:
        """With `fit`, functions that no entry of the table matches become unnamed activations."""
        self._view, self._constants, self._fit = view, constants, fit
        self._known: dict[object, Identified | str] = {}  # by the values on the grid

    def identify(self, region: ActivationRegion) -> Identified | str:
        """The activation, for two leaves that of the gate; or why there is none."""
        count, tolerance = len(region.leaves), _TOLERANCE * self._precision(region)
        pairs = [_GRID, np.random.default_rng(0).permutation(_GRID)]  # at random, as the roles of two leaves differ
        key = count, tolerance, self.evaluate(region, pairs[:count]).tobytes()
        found = self._known.get(key)
        if found is None and count > 1:
            found = self._identify_gated(region, tolerance)
        elif found is None:
            found = identify_function(lambda y: self.evaluate(region, [y]), tolerance, ACTIVATIONS, fit=self._fit)
        return self._known.setdefault(key, found)

    def evaluate(self, region: ActivationRegion, leaves: Sequence[Array]) -> Array:
        """In float64, leaf values in the order of `region.leaves`."""
        env: dict[str, Array] = dict(zip(region.leaves, leaves, strict=True))
        for index in region.nodes:
            node = self._view.nodes[index]
            names = node.input[:1] if node.op_type in FIRST_INPUT_ONLY else node.input
            for name in {*filter(None, names)} - env.keys():
                value = self._constants.scalar(name)
                # NaN disagrees with every table entry, so that a constant whose value is unknown is never assumed.
                env[name] = np.asarray(np.nan if value is None else value, dtype=np.float64)
            env[node.output[0]] = evaluate(node, [env.get(name) for name in names])
        # The region of a corrupt model may use no leaf, so that its value is a single number.
        return np.broadcast_arrays(env[region.output], *leaves)[0]

    def _precision(self, region: ActivationRegion) -> float:
        nodes = [self._view.nodes[index] for index in region.nodes]
        read = (self._constants.value(name) for node in nodes for name in node.input if name in self._constants)
        known = (value for value in read if value is not None and value.dtype.name in _EPSILON)
        found = {value.dtype.name for value in known if not _is_short(float(value.reshape(-1)[0]))}
        floats = any(each.type == onnx.AttributeProto.FLOAT for node in nodes for each in node.attribute)
        given = [_EPSILON[name] for name in found | ({"float32"} if floats else set())]
        return max([_EPSILON["float64"] * 64, *given])  # the table itself is computed in float64

    def _identify_gated(self, region: ActivationRegion, tolerance: float) -> Identified | str:
        # f(g, u) = h(g) u exactly if f(g, u) = f(g, 1) u for all g and u, tested at random pairs, in both orders.
        value, gate = np.random.default_rng(0).normal(0.0, 3.0, (2, 512))
        best: Identified | str = "two projections are joined, but not as activation(gate) * value"
        for slots in ((0, 1), (1, 0)):

            def weight(g: Array, u: Array | None = None, slots: tuple[int, int] = slots) -> Array:
                given = g, np.ones_like(g) if u is None else u
                return self.evaluate(region, [given[slot] for slot in slots])

            expected = weight(gate) * value
            with np.errstate(all="ignore"):
                close = np.abs(weight(gate, value) - expected) <= tolerance * np.maximum(1.0, np.abs(expected))
            if not close.all():
                continue
            # The gate of a bilinear layer is not an activation of the table, but a program exists.
            best = identify_function(weight, tolerance, (*ACTIVATIONS, LINEAR), fit=self._fit)
            best = best if isinstance(best, str) else replace(best, gated=slots)
            if in_table(best):
                break
        return best


@np.errstate(all="ignore")
def identify_function(f: Function, tolerance: float, table: Sequence[Activation], *, fit: bool) -> Identified | str:
    """The entry closest to `f`, if within `tolerance` (relative to max(1, |f|)) on the whole grid."""
    values = f(_GRID)
    attempts = [attempt for entry in table if (attempt := _attempt(entry, f, values, tolerance))]
    if agreeing := [attempt for attempt in attempts if attempt.error <= tolerance]:
        # Equally close: within a factor of 4, or both within float64's own rounding.
        floor = 4 * min(attempt.error for attempt in agreeing) + 2.0**-46
        return next(attempt for attempt in agreeing if attempt.error <= floor)
    # Only for a better reason: an affine region would be nearest to some entry by accident.
    start, end = f(np.array([0.0, 1.0]))
    if _distance(lambda y, p: p[0] + p[1] * y, (float(start), float(end - start)), values) <= tolerance:
        return "the function between the operators is affine, so there is no activation"
    if fit:
        return Identified(replace(UNNAMED, function=lambda y, _: f(y)), (), 0.0)
    return _explain(min(attempts, key=lambda attempt: attempt.error, default=None), values)


def _attempt(activation: Activation, f: Function, values: Array, tolerance: float) -> Identified | None:
    """Solve for the entry's parameters, preferring round or float32 numbers."""
    try:
        solved = activation.solve(f)
    except UNSOLVED:
        return None
    if solved is None:
        return None
    plain, stored = tuple(round(value, 4) for value in solved), tuple(float(np.float32(value)) for value in solved)
    # Parameters rounded to zero, of a function below the tolerance, would leave nothing to convert to heads.
    tried = [p for p in dict.fromkeys((plain, stored, solved)) if np.any(activation.function(_GRID, p))]
    found = [Identified(activation, p, _distance(activation.function, p, values)) for p in tried]
    # The exporter's 1.702 rather than a solved 1.7020000000000002, in programs and in reports.
    close = (attempt for bound in (IDENTICAL, tolerance) for attempt in found if attempt.error <= bound)
    return next(close, None) or min(found, key=lambda attempt: attempt.error, default=None)


def _distance(function: Values, parameters: Parameters, values: Array) -> float:
    """Largest |values - function| / max(1, |function|); infinite where either is NaN."""
    expected = function(_GRID, parameters)
    error = np.abs(values - expected) / np.maximum(1.0, np.abs(expected))
    error = np.where(values == expected, 0.0, error)  # the same infinity
    return float(np.max(np.where(np.isfinite(error), error, np.inf)))


def _is_short(value: float) -> bool:
    """Whether a constant is exact in every float type (0.5, 1, 2, 3), which says nothing about precision."""
    return abs(value) <= 8.0 and value * 64.0 == round(value * 64.0)


def _explain(nearest: Identified | None, values: Array) -> str:
    if nearest is None or not np.isfinite(nearest.error):
        shown = ", ".join(f"f({y:g}) = {v:.6g}" for y, v in zip(_GRID, values, strict=True) if y in (-1.0, 1.0, 3.0))
        return f"no known activation has these values: {shown}"
    usual = np.abs(_GRID) <= 16.0  # a distance at 1e6 is not informative
    points, values = _GRID[usual], values[usual]
    gap = np.abs(values - nearest.activation.function(points, nearest.parameters)) / np.maximum(1.0, np.abs(values))
    worst, name = int(np.argmax(gap)), nearest.activation.name
    return f"no known activation; the nearest, {name}, differs by {gap[worst]:.2g} at y = {points[worst]:.3g}"

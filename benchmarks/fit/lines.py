"""Fit the line g as attention: symmetric nodes that minimise the largest relative error.

With h = x / 2 and s = 1 - 2 r, S(x) x / (1 - e^-x) is an even function of h:

    F(h) h / sinh h,   F(h) = 2 end cosh h + sum over pairs 2 w cosh(s h) + middle.

A Remez exchange in multiple precision levels its distance from 1 over 0 <= h <= end / 2, since exponentials with
neighbouring rates are nearly dependent. Each exchange solves for the nodes, the weights and the level by Newton's
method, on logits of s and logarithms of weights. Starts are nodes of Gauss and Lobatto on a short range, which then
grows. The certificate that counts is in the tests, in ball arithmetic.
"""

import math
from dataclasses import dataclass
from typing import Any

import mpmath as mp
import numpy as np

Number = Any
"""A number of mpmath, which has no types."""

_DIGITS = 60
_POINTS = 40
"""Points of the search for extrema, per key."""
_LEVEL = 1.01
"""The largest and the smallest extremum differ by at most this factor in the end."""
_ROUNDS, _STEPS = 25, 40
_LONGEST = 0.4
"""The largest Newton step in a logit or logarithm."""
_DENSE = 4000


class NotFoundError(Exception):
    """The exchange did not converge."""


@dataclass(frozen=True)
class Nodes:
    """A symmetric S.

    Attributes:
        pairs: (r, w) of the nodes below 1/2, without r = 0.
        end: weight of r = 0 and of r = 1.
        middle: weight of r = 1/2, 0 for none.
    """

    pairs: tuple[tuple[Number, Number], ...]
    end: Number
    middle: Number

    def error(self, h: Number) -> Number:
        """The relative error at x = 2 h."""
        total = 2 * self.end * mp.cosh(h) + self.middle
        total += sum(2 * w * mp.cosh((1 - 2 * r) * h) for r, w in self.pairs)
        return total * _over_sinh(h) - 1

    def gradient(self, h: Number) -> list[Number]:
        """Derivatives of `error` by logits of s, then logarithms of the pairs' weights, the end's and the middle's."""
        k = _over_sinh(h)
        s = [1 - 2 * r for r, _ in self.pairs]
        moved = [2 * w * h * mp.sinh(a * h) * a * (1 - a) * k for a, (_, w) in zip(s, self.pairs, strict=True)]
        scaled = [2 * w * mp.cosh(a * h) * k for a, (_, w) in zip(s, self.pairs, strict=True)]
        return [*moved, *scaled, 2 * self.end * mp.cosh(h) * k, *([self.middle * k] if self.middle else [])]

    def moved(self, step: list[Number]) -> "Nodes":
        """The nodes after a step in the same coordinates."""
        count = len(self.pairs)
        pairs = []
        for (r, w), by, factor in zip(self.pairs, step[:count], step[count : 2 * count], strict=True):
            s = 1 - 2 * r
            shifted = 1 / (1 + (1 - s) / s * mp.exp(-by))
            pairs.append(((1 - shifted) / 2, w * mp.exp(factor)))
        middle = self.middle * mp.exp(step[2 * count + 1]) if self.middle else self.middle
        return Nodes(tuple(pairs), self.end * mp.exp(step[2 * count]), middle)

    def rounded(self, *, single: bool) -> "Nodes":
        """With coefficients that are float32 or float64 numbers."""

        def narrow(number: Number) -> Number:
            return mp.mpf(float(np.float32(float(number))) if single else float(number))

        pairs = tuple((narrow(r), narrow(w)) for r, w in self.pairs)
        return Nodes(pairs, narrow(self.end), narrow(self.middle))

    def largest(self, end: float) -> float:
        """The largest |error| at many points of |x| <= end."""
        places = np.concatenate([np.linspace(0.0, 1.0, _DENSE), np.linspace(0.0, 1.0, _DENSE) ** 2])
        return float(max(abs(self.error(mp.mpf(float(place)) * end / 2)) for place in places))


def fit(keys: int, end: float) -> Nodes:
    """The symmetric S with the smallest largest relative error over |x| <= end.

    Raises:
        NotFoundError: the exchange does not converge on the way to `end`.
    """
    with mp.workdps(_DIGITS):
        reached = min(end, keys / 4.0)
        nodes = _exchanged(_interpolated(_lobatto(keys), reached), reached)
        growth = 1.5
        while reached < end:
            further = min(end, reached * growth)
            try:
                nodes, reached = _exchanged(nodes, further), further
            except NotFoundError:
                growth = 1.0 + (growth - 1.0) / 2.0
                if growth < 1.01:
                    raise
        return nodes


def entry(keys: int, end: float, step: float, *, single: bool) -> dict[str, object]:
    """The entry of `programs.json`, without its arithmetic: coefficients rounded, and the error that they have."""
    nodes = fit(keys, end).rounded(single=single)
    with mp.workdps(_DIGITS):
        error = nodes.largest(end)
    unit = 10.0 ** (math.floor(math.log10(error)) - 1)
    return {
        "name": f"line_{keys}",
        "step": step,
        "domain": math.floor(end / step),
        "end": float(nodes.end),
        "pairs": [[float(r), float(w)] for r, w in nodes.pairs],
        "middle": float(nodes.middle),
        "max_error": float(f"{math.ceil(1.01 * error / unit) * unit:.1e}"),
    }


def _over_sinh(h: Number) -> Number:
    return h / mp.sinh(h) if h else mp.mpf(1)


def _lobatto(keys: int) -> Nodes:
    """The nodes of Gauss and Lobatto on [0, 1], which are right for x near 0."""
    series = np.zeros(keys)
    series[-1] = 1.0
    inner = np.sort(np.polynomial.legendre.legroots(np.polynomial.legendre.legder(series)))

    def weight(t: float) -> Number:
        return mp.mpf(1) / (keys * (keys - 1) * mp.legendre(keys - 1, t) ** 2)

    pairs = tuple((mp.mpf((1.0 + t) / 2.0), weight(t)) for t in inner[: (keys - 2) // 2])
    return Nodes(pairs, weight(1.0), weight(0.0) if keys % 2 else mp.mpf(0))


def _interpolated(nodes: Nodes, end: float) -> Nodes:
    """The nodes whose error is 0 at Chebyshev's points in h^2: an error that alternates, as the exchange needs."""
    count = len(nodes.gradient(mp.mpf(0)))
    places = [end / 2 * mp.sqrt((1 - mp.cos(mp.pi * (k + mp.mpf(0.5)) / count)) / 2) for k in range(count)]
    for _ in range(2 * _STEPS):
        rows = mp.matrix([nodes.gradient(h) for h in places])
        step, longest = _damped(mp.lu_solve(rows, mp.matrix([-nodes.error(h) for h in places])))
        nodes = nodes.moved(step)
        if longest < mp.mpf(10) ** -18:
            return nodes
    raise NotFoundError("no nodes interpolate on the shortest range")


def _exchanged(nodes: Nodes, end: float) -> Nodes:
    """The nodes whose error has extrema of one size and alternating sign over |x| <= end."""
    for _ in range(_ROUNDS):
        places = _extrema(nodes, end)
        errors = [nodes.error(h) for h in places]
        if len(places) != len(nodes.gradient(mp.mpf(0))) + 1:
            raise NotFoundError(f"{len(places)} extrema over |x| <= {end:g}")
        if max(map(abs, errors)) < _LEVEL * min(map(abs, errors)):
            return nodes
        nodes = _levelled(nodes, places, [mp.sign(error) for error in errors])
    raise NotFoundError(f"no convergence over |x| <= {end:g}")


def _levelled(nodes: Nodes, places: list[Number], signs: list[Number]) -> Nodes:
    """The nodes whose errors at the places have one size and the given signs."""
    for _ in range(_STEPS):
        rows = mp.matrix([[*nodes.gradient(h), -sign] for h, sign in zip(places, signs, strict=True)])
        try:
            solved = mp.lu_solve(rows, mp.matrix([-nodes.error(h) for h in places]))
        except ZeroDivisionError as error:
            raise NotFoundError("the nodes coincide") from error
        step, longest = _damped(list(solved)[:-1])
        nodes = nodes.moved(step)
        if longest < mp.mpf(10) ** -14:
            return nodes
    raise NotFoundError("Newton's method does not converge")


def _damped(step: Any) -> tuple[list[Number], Number]:
    """The step, shortened where it is long, and its largest component before that."""
    longest = max(map(abs, step))
    factor = min(mp.mpf(1), _LONGEST / longest) if longest else mp.mpf(1)
    return [factor * part for part in step], longest


def _extrema(nodes: Nodes, end: float) -> list[Number]:
    """The places of the extrema over 0 <= h <= end / 2, the largest of each run of one sign."""
    count = _POINTS * (2 * len(nodes.pairs) + 3)
    steps = [(mp.sin(mp.pi * k / count / 2) + mp.mpf(k) / count) / 2 for k in range(count + 1)]
    places = [end / 2 * step for step in steps]
    errors = [nodes.error(h) for h in places]
    turns = [k for k in range(1, count) if (errors[k] - errors[k - 1]) * (errors[k + 1] - errors[k]) <= 0]
    kept: list[int] = []
    for k in [0, *turns, count]:
        if kept and mp.sign(errors[k]) == mp.sign(errors[kept[-1]]):
            kept[-1] = max(kept[-1], k, key=lambda place: abs(errors[place]))
        else:
            kept.append(k)
    return [places[k] for k in kept]

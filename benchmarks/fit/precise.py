"""`python -m benchmarks.fit.precise gelu 24 0.5417`: fit one head for float64 models, with equally spaced slopes.

The token itself has logit 0 and value y, bias token j = 0 ... n - 1 the slope (j - n) c. For a given c the weights w_j
and the products w_j v_j enter f (1 + sum w_j e_j) = y + sum w_j v_j e_j linearly. Least squares in multiple precision,
weighted with the denominator found before and, later, with the errors found before (Lawson), level the largest error.
Needs python-flint. It prints the bias tokens and the largest error seen; the tests prove it.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Number = Any
"""A ball of python-flint, which has no types."""

_BITS = 400
_ROUNDS, _PLAIN = 40, 5
_NEAR, _COUNT = 8.5, 300


def gelu(y: Number) -> Number:
    """Y times the normal distribution function."""
    from flint import arb

    return y * (-y / arb(2).sqrt()).erfc() / 2


def gelu_tanh(y: Number) -> Number:
    """The approximation by tanh, as y times a sigmoid."""
    from flint import arb

    return y / (1 + (-((8 / arb.pi()).sqrt()) * (y + arb("0.044715") * y**3)).exp())


FUNCTIONS: dict[str, Callable[[Number], Number]] = {"gelu": gelu, "gelu_tanh": gelu_tanh}


def points() -> NDArray[np.float64]:
    """Chebyshev's points where the keys share the weight, and points of the tails."""
    near = _NEAR * np.cos(np.pi * (np.arange(_COUNT) + 0.5) / _COUNT)
    return np.concatenate([near, np.linspace(_NEAR, 40.0, 60)[1:], -np.linspace(_NEAR, 30.0, 30)[1:]])


def fit(name: str, keys: int, step: float, rounds: int = _ROUNDS) -> tuple[float, list[list[float]]]:
    """(largest error at the points, bias tokens [slope, offset, value]) of the best round with positive weights.

    Raises:
        ValueError: no round had positive weights; another step may.
    """
    from flint import arb, arb_mat, ctx

    ctx.prec = _BITS
    y = [arb(float(place)) for place in points()]
    f = [FUNCTIONS[name](place) for place in y]
    e = [[(arb(step) * (j - keys) * place).exp() for j in range(keys)] for place in y]
    emphasis, total, best = np.ones(len(y)), [1 + row[0] for row in e], None
    for number in range(rounds):
        rows, right = [], []
        for k, row in enumerate(e):
            s = arb(float(emphasis[k])) / total[k]
            rows.append([-s * f[k] * each for each in row] + [s * each for each in row[1:]])
            right.append([s * (f[k] - y[k])])
        matrix = arb_mat(rows)
        turned = matrix.transpose()
        solved = (turned * matrix).solve(turned * arb_mat(right))
        x = [solved[i, 0].mid() for i in range(2 * keys - 1)]
        weights, products = x[:keys], [arb(0), *x[keys:]]
        total = [sum((w * each for w, each in zip(weights, row, strict=True)), arb(1)).mid() for row in e]
        sums = [y[k] + sum(p * each for p, each in zip(products, row, strict=True)) for k, row in enumerate(e)]
        errors = np.array([abs(float((s / t - value).mid())) for s, t, value in zip(sums, total, f, strict=True)])
        if all(float(w) > 0.0 for w in weights) and (best is None or errors.max() < best[0]):
            best = float(errors.max()), weights, products
        if number >= _PLAIN:
            emphasis = emphasis * np.sqrt(errors / errors.mean() + 1e-3)
            emphasis /= emphasis.max()
    if best is None:
        raise ValueError(f"no fit of {keys} keys with step {step} has positive weights; try another step")
    parts = enumerate(zip(best[1], best[2], strict=True))
    return best[0], [[(j - keys) * step, float(w.log().mid()), float((p / w).mid())] for j, (w, p) in parts]


if __name__ == "__main__":
    largest, tokens = fit(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    sys.stdout.write(json.dumps({"largest_error_seen": largest, "bias_tokens": tokens}) + "\n")

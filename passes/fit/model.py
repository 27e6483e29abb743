"""A head program as a vector of parameters, with exact derivatives.

The parameters of a head are c and d of its self value `c y + d`, then the slopes a of all bias tokens, their offsets b
and their values v. Slopes and offsets are relative to the self logit, which is 0 (softmax is invariant to a common
shift). The last two parameters are the program's linear factor and its constant. With p the softmax weights of a head
and o its output, the derivatives are p_j by v_j, p_j (v_j - o) by b_j, and y times that by a_j.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.programs.head import Array, BiasToken, Head
from passes.programs.program import Program

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

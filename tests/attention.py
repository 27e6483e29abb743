"""Attention in plain numpy, as the sources write it: heads, masks, widened streams; independent of the passes.

`tests.passes.test_theorems` builds the heads. A residual stream [N, D] is widened by *slots*: columns that are
1 in some rows. `Slots.one` is 1 at every token and 0 at every bias token, `Slots.bias[j]` is 1 at bias token j alone;
the data columns of bias tokens are 0. The arithmetic is that of the stream's type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


BiasNumbers: TypeAlias = Any
"""A bias token as one head sees it: logit `slope y + offset`, value `value`."""
HeadNumbers: TypeAlias = Any
"""Self logit `beta y + gamma`, self value `c z + d`, and the `bias_tokens`."""


class ProgramNumbers(Protocol):
    """A sum of heads, plus `linear z + constant`."""

    @property
    def heads(self) -> Sequence[HeadNumbers]: ...
    @property
    def linear(self) -> float: ...
    @property
    def constant(self) -> float: ...


@dataclass(frozen=True)
class Mlp:
    """`f(x W1 + b1) W2 + b2`, or with a gate `(f(x W1 + b1) * (x V1 + c1)) W2 + b2`. W1 [D, d_ff], W2 [d_ff, D]."""

    w1: Array
    b1: Array
    w2: Array
    b2: Array
    v1: Array | None = None
    c1: Array | None = None

    def plain(self, x: Array, f: Callable[[Array], Array]) -> Array:
        """The MLP in its usual form."""
        hidden = f(x @ self.w1 + self.b1)
        if self.v1 is not None and self.c1 is not None:
            hidden = hidden * (x @ self.v1 + self.c1)
        return hidden @ self.w2 + self.b2


@dataclass(frozen=True)
class AttentionHead:
    """One head by its matrices: W_Q, W_K [D', k], W_V [D', d], W_O [d, D']."""

    w_q: Array
    w_k: Array
    w_v: Array
    w_o: Array

    @property
    def dimension(self) -> int:
        """Internal dimension, the larger of k and d."""
        return max(len(self.w_q.T), len(self.w_v.T))


@dataclass(frozen=True)
class Slots:
    """The extra columns of a widened stream (see the module), as vectors: one [D'], bias [m, D']."""

    one: Array
    bias: Array


def attend(x: Array, heads: Sequence[AttentionHead], allowed: Array | None = None) -> Array:
    """The sum of the heads' outputs, without the skip connection. x [N', D'], allowed [N', N'] (None: every pair)."""
    total = np.zeros_like(x)
    for head in heads:
        logits = (x @ head.w_q) @ (x @ head.w_k).T
        if allowed is not None:
            logits = np.where(allowed, logits, np.array(-np.inf, x.dtype))
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        total += weights / weights.sum(axis=1, keepdims=True) @ (x @ head.w_v) @ head.w_o
    return total


def neurons(program: ProgramNumbers, y: Array, z: Array) -> Array:
    """The output of a program for every pre-activation y and value z: theorem 3 without the stream."""
    total = program.linear * z + program.constant
    for head in program.heads:
        logits = [head.beta * y + head.gamma]
        logits += [token.slope * y + token.offset for token in head.bias_tokens]
        values = [head.c * z + head.d] + [np.full_like(z, token.value) for token in head.bias_tokens]
        weights = np.exp(np.stack(logits) - np.max(logits, axis=0))
        total = total + np.sum(weights * np.stack(values), axis=0) / weights.sum(axis=0)
    return np.asarray(total)


# -- streams and masks ---------------------------------------------------------------------------------------


def with_indicators(x: Array, m: int, hidden: int = 0) -> tuple[Array, Slots]:
    """The stream with m bias tokens on top and 1 + m indicator columns; `hidden` empty columns between."""
    return _widen(x, m, hidden, np.concatenate([np.eye(1 + m)[1:], np.repeat(np.eye(1 + m)[:1], len(x), axis=0)]))


def with_positions(x: Array, m: int, hidden: int = 0) -> tuple[Array, Slots]:
    """The stream with m bias tokens on top and one-hot positions; the bias tokens hold the first m of them."""
    return _widen(x, m, hidden, np.eye(len(x) + m))


def _widen(x: Array, m: int, hidden: int, slots: Array) -> tuple[Array, Slots]:
    start = x.shape[1] + hidden
    wide = np.zeros((len(x) + m, start + slots.shape[1]), x.dtype)
    wide[m:, : x.shape[1]] = x
    wide[:, start:] = slots
    bias = np.concatenate([np.zeros((m, start)), slots[:m]], axis=1).astype(x.dtype)
    one = np.concatenate([np.zeros(start), slots[m:].max(axis=0)]).astype(x.dtype)
    return wide, Slots(one, bias)


def neuron_mask(tokens: int, m: int) -> Array:
    """Theorem 3's mask: a token attends to itself and to the bias tokens, a bias token to itself."""
    allowed = np.eye(tokens + m, dtype=bool)
    allowed[m:, :m] = True
    return allowed

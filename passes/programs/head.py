"""One attention head over {self, bias tokens}, as plain numbers (docs/programs.md#what-one-head-can-compute).

A head attends from one token to itself and to m constant *bias tokens*. With y the neuron's pre-activation,

    self logit        beta y + gamma      self value        c z + d
    bias-token logit  a_j y + b_j         bias-token value  v_j

where z is y, or in a gated block the other projection. The head returns the softmax-weighted sum of the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[np.float64]
# Offsets up to this magnitude are taken out of the exponential, e^(a y + b) = e^b e^(a y), as the rounding error of a
# logit is proportional to its magnitude. For larger ones e^b could leave the range of float32; these belong to steep
# keys, whose weights are 0 or 1.
FACTORED = 60.0
# The same for a head that also has larger offsets: in graphs its exponentials are at least e^-87
# (`passes.forms.local`), which a factor of e^60 makes non-negligible.
FACTORED_BESIDE_STEEP = 20.0
LARGEST_QUERY = 2.0**500  # queries are clipped to it: all weights are 0 or 1 long before


def narrowed(number: float, dtype: DTypeLike) -> float:
    """The nearest number of a type."""
    return float(np.asarray(number, dtype=dtype))


@dataclass(frozen=True)
class BiasToken:
    """A constant token in one head: logit `slope y + offset`, value `value`."""

    slope: float = 0.0
    offset: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class Head:
    """One attention head over {self, bias tokens}; the self logit is `beta y + gamma`, the self value `c z + d`."""

    beta: float
    bias_tokens: tuple[BiasToken, ...] = (BiasToken(),)
    gamma: float = 0.0
    c: float = 1.0
    d: float = 0.0

    @property
    def logits(self) -> list[tuple[float, float]]:
        return [(self.beta, self.gamma), *((token.slope, token.offset) for token in self.bias_tokens)]

    def logits_at(self, y: Array) -> Array:
        """The logits [keys, ...] at points [...], its own key first; finite for finite y."""
        slopes, offsets = np.array(self.logits).T
        query = np.clip(y, -LARGEST_QUERY, LARGEST_QUERY)
        return np.asarray(np.multiply.outer(slopes, query) + offsets.reshape(-1, *[1] * np.ndim(query)))

    def weights(self, y: Array) -> Array:
        """The softmax weights [keys, ...] at points [...], its own key first."""
        weights = self.logits_at(y)
        weights -= np.max(weights, axis=0)
        np.exp(weights, out=weights)
        weights /= np.sum(weights, axis=0)
        return weights

    @property
    def crossings(self) -> Array:
        """The points at which two keys have equal weights: there the weights change, and limits have their kinks."""
        slopes, offsets = np.array(self.logits).T
        with np.errstate(all="ignore"):
            places = -np.subtract.outer(offsets, offsets) / np.subtract.outer(slopes, slopes)
        return np.unique(places[np.isfinite(places)])

    def evaluate(self, y: Array, z: Array) -> Array:
        multiple, constant = self.mean(y)
        return np.asarray(z * multiple + constant)

    def mean(self, y: Array) -> tuple[Array, Array]:
        """(multiple, constant): the head's output is `z multiple + constant`."""
        own, *others = self.weights(y)
        values = [token.value for token in self.bias_tokens]
        constant = sum((weight * value for weight, value in zip(others, values, strict=True)), own * self.d)
        return self.c * own, np.asarray(constant)

    @property
    def multiples(self) -> tuple[tuple[float, float], ...] | None:
        """All keys (slope, offset) in order, if all values are multiples of z; else None."""
        if self.d != 0.0 or any(token.value != 0.0 for token in self.bias_tokens):
            return None
        return tuple(sorted(self.logits))

    @property
    def zero_bias(self) -> bool:
        return self.bias_tokens == (BiasToken(),) and self.gamma == 0.0

    @property
    def largest_factored(self) -> float:
        """The magnitude up to which graphs take offsets relative to the self logit out of the exponentials."""
        steep = any(abs(token.offset - self.gamma) > FACTORED for token in self.bias_tokens)
        return FACTORED_BESIDE_STEEP if steep else FACTORED

    def shifted(self, slope: float, offset: float) -> Head:
        """The same head with `slope y + offset` added to every logit; softmax is invariant to it."""
        tokens = tuple(replace(t, slope=t.slope + slope, offset=t.offset + offset) for t in self.bias_tokens)
        return replace(self, beta=self.beta + slope, gamma=self.gamma + offset, bias_tokens=tokens)

    def scaled(self, inner: float, outer: float) -> Head:
        """`outer` times the head at `inner y`, whose self value still reads y."""
        tokens = tuple(BiasToken(t.slope * inner, t.offset, t.value * outer) for t in self.bias_tokens)
        return Head(self.beta * inner, tokens, self.gamma, self.c * inner * outer, self.d * outer)

    def unscaled(self) -> Head:
        """The head with self value z + d / c. Multiplied by c last, a value of weight 0 cannot overflow."""
        tokens = tuple(replace(token, value=token.value / self.c) for token in self.bias_tokens)
        return replace(self, c=1.0, d=self.d / self.c, bias_tokens=tokens)

    def rounded(self, dtype: DTypeLike, *, factored: bool = True, conditioned: bool = False) -> Head:
        """The head with coefficients rounded as a graph of type `dtype` stores them.

        If not `factored`, logits are computed with their offsets, and every coefficient is rounded. Otherwise the graph
        stores, for an offset of at most `largest_factored`, the factor e^offset of the bias token's weight and its
        product with the value, and these two are rounded. All logits are shifted so that the self logit has no offset,
        or as `conditioned` does. The factor c is applied after the softmax (`unscaled`).
        """
        if self.c not in (0.0, 1.0):
            scale = narrowed(self.c, dtype)
            inner = self.unscaled().rounded(dtype, factored=factored, conditioned=conditioned)
            tokens = tuple(replace(token, value=token.value * scale) for token in inner.bias_tokens)
            return replace(inner, c=scale, d=inner.d * scale, bias_tokens=tokens)

        narrow = partial(narrowed, dtype=dtype)

        def token_of(token: BiasToken) -> BiasToken:
            if abs(token.offset) > self.largest_factored or not factored:
                return BiasToken(narrow(token.slope), narrow(token.offset), narrow(token.value))
            weight = narrow(math.exp(token.offset))
            value = narrow(weight * token.value) / weight
            return BiasToken(narrow(token.slope), math.log(weight), value)

        plain = self.conditioned() if conditioned else self.shifted(0.0, -self.gamma)
        tokens = tuple(map(token_of, plain.bias_tokens))
        return Head(narrow(plain.beta), tokens, *map(narrow, (plain.gamma, plain.c, plain.d)))

    def conditioned(self) -> Head:
        """The head shifted so that its largest logit at y = 0 is zero: float32 rounds logits by their magnitude."""
        keys = [(self.gamma, self.beta), *((token.offset, token.slope) for token in self.bias_tokens)]
        offset, slope = max(keys, key=lambda key: (key[0], -abs(key[1]), key[1]))
        return self.shifted(-slope, -offset)


def heads_over(keys: Sequence[tuple[float, float]], multiples: Iterable[float]) -> tuple[Head, ...]:
    """Heads over the same keys (slope, offset), one for every key with a nonzero multiple of z as its value."""
    tokens = [BiasToken(*key) for key in keys]  # there may be more than multiples
    return tuple(
        Head(slope, (*tokens[:place], *tokens[place + 1 :]), offset, multiple)
        for place, ((slope, offset), multiple) in enumerate(zip(keys, multiples, strict=False))
        if multiple != 0.0
    )

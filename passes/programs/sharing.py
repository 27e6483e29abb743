"""Grouping the heads of a program that attend to the same keys.

The heads of a gate all have the same set of keys, and differ in which of them is their own. Their softmax is computed
once, and their sum is a weighted mean of multiples of the value. Where the slopes of the keys are an arithmetic
progression, all shares are powers of one exponential.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from passes.programs.head import FACTORED, Head
from passes.programs.program import Program


@dataclass(frozen=True)
class Key:
    """One key as a graph stores it.

    Attributes:
        slope: factor of the query in the logit.
        offset: offset of the logit, 0 where it is in the weight.
        weight: factor of the key's exponential.
        part: the weight times the value, or times the multiple of the value.
    """

    slope: float
    offset: float
    weight: float
    part: float

    @classmethod
    def of(cls, slope: float, offset: float, value: float, largest: float = FACTORED) -> Key:
        """A key with its logit's offset factored out of the exponential, unless it is above `largest`."""
        if abs(offset) > largest:
            return cls(slope, offset, 1.0, value)
        weight = math.exp(offset)
        return cls(slope, 0.0, weight, weight * value)


@dataclass(frozen=True)
class Group:
    """Heads over the same keys.

    Attributes:
        heads: the heads.
        keys: where values are multiples of z, all keys, those of the heads first; None for a head with other values.
        own: the number of keys with a nonzero multiple.
    """

    heads: tuple[Head, ...]
    keys: tuple[Key, ...] | None = None
    own: int = 0


@dataclass(frozen=True)
class Progression:
    """Shared keys with the shares w_j e^(j step y), j = 0, 1, ...; the last w and all multiples but the first are 1.

    Attributes:
        step: the difference of neighbouring slopes.
        weights: the w but for the last, which is 1.
        part: the first weight times its multiple.
    """

    step: float
    weights: tuple[float, ...]
    part: float


def progression_of(keys: Sequence[Key], dtype: DTypeLike) -> Progression | None:
    """Shared keys as a progression, with exactly the numbers of a type that they have; None where they are none.

    That is so for Mish, leaky ReLU and tanh gates.
    """

    def narrow(number: float) -> float:
        return float(np.asarray(number, dtype=dtype))

    ascending = sorted(keys, key=lambda key: key.slope)
    for ordered in (ascending, ascending[::-1]):
        slopes = [narrow(key.slope) for key in ordered]
        weights = [narrow(key.weight) for key in ordered]
        parts = [narrow(key.part) for key in ordered]
        step = slopes[1] - slopes[0]
        even = slopes == [slopes[0] + place * step for place in range(len(slopes))] and narrow(step) == step
        if even and weights[-1] == 1.0 and parts[1:] == weights[1:] and not any(key.offset for key in keys):
            return Progression(step, tuple(weights[:-1]), parts[0])
    return None


def groups_of(program: Program) -> tuple[tuple[Group, ...], float]:
    """The heads of `program` in groups, and the remaining linear term.

    A single group of multiples absorbs the linear term, since its weights sum to one. A separate linear term would
    cancel most digits of the head (Mish at y = -15).
    """
    by_keys: dict[object, list[Head]] = {}
    for number, head in enumerate(program.heads):
        by_keys.setdefault(head.multiples or number, []).append(head)
    alone = len(by_keys) == 1 and program.heads[0].multiples is not None
    linear = program.linear if alone else 0.0
    groups = []
    for heads in by_keys.values():
        shared = len(heads) > 1 or linear != 0.0
        groups.append(_shared(tuple(heads), linear) if shared else Group(tuple(heads)))
    return tuple(groups), program.linear - linear


def _shared(heads: tuple[Head, ...], linear: float) -> Group:
    multiples: dict[tuple[float, float], float] = {}
    for head in heads:
        for token in head.bias_tokens:
            multiples.setdefault((token.slope, token.offset), linear)
        own = (head.beta, head.gamma)
        multiples[own] = multiples.get(own, linear) + head.c
    keys = [Key.of(slope, offset, multiple) for (slope, offset), multiple in multiples.items()]
    keys.sort(key=lambda key: key.part == 0.0)
    return Group(heads, tuple(keys), sum(key.part != 0.0 for key in keys))

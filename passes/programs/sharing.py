"""Heads that attend to the same keys, found in a program.

Comes in: a program. Goes out: its heads in groups. The heads of a gate all see one set of keys and differ in which of
them is their own; their softmax is computed once, and the sum of the heads is a mean of multiples of the value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from passes.programs.head import Head
from passes.programs.program import Program
from passes.programs.softmax import FACTORED


@dataclass(frozen=True)
class Key:
    """One key as the nodes hold it.

    Attributes:
        slope: what the query is multiplied with.
        offset: what is added to that, 0 where the weight holds it.
        weight: factor of the key's exponential.
        part: the weight times the value, or the multiple of the value.
    """

    slope: float
    offset: float
    weight: float
    part: float

    @classmethod
    def of(cls, slope: float, offset: float, value: float) -> Key:
        """A key with its logit's offset taken out of the exponential, unless it is steep."""
        if abs(offset) > FACTORED:
            return cls(slope, offset, 1.0, value)
        weight = math.exp(offset)
        return cls(slope, 0.0, weight, weight * value)


@dataclass(frozen=True)
class Group:
    """Heads over the same keys.

    Attributes:
        heads: the heads.
        keys: where values are multiples of z, all keys, those of the heads first; None for a head with other values.
        own: how many keys have a multiple other than zero.
    """

    heads: tuple[Head, ...]
    keys: tuple[Key, ...] | None = None
    own: int = 0


def groups_of(program: Program) -> tuple[tuple[Group, ...], float]:
    """The heads of `program` in groups, and the linear term that is left beside them.

    A single group of multiples takes the linear term in, since the weights sum to one: a linear term beside the head
    would cancel digits (Mish at y = -15).
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

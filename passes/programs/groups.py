"""A program as groups of heads: each group is one head per neuron, or all heads over the same keys.

The outputs of the groups add up to the program, and each is a head over {self, bias tokens} and nothing else. Terms
outside the program's heads become heads too:

- A linear term l z beside a single head whose values are multiples of z is spread over that head's keys, as the weights
  sum to one: the weight of a bias token is the self weight of another head, with that key and the self key exchanged.
  Thus Mish becomes y p_1 + y p_2, without cancellation. `spread_error` bounds the rounding of these sums.
- Otherwise `linear z + constant` is a head that attends only to itself (Theorem 7): no bias tokens, weight 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from passes.programs.program import FACTORED, BiasToken, Head, Program, narrowed


@dataclass(frozen=True)
class Group:
    """One head per neuron, with c 0 or 1; the factor is that of its output."""

    head: Head
    factor: float = 1.0

    @property
    def bias_tokens(self) -> int:
        return len(self.head.bias_tokens)

    @property
    def dimension(self) -> int:
        """d_head of queries and keys: y alone, or (y, 1) where logits have offsets."""
        return 2 if any(offset for _, offset in self.head.logits) else 1

    def logits(self, bias_tokens: int) -> list[tuple[float, list[float]]]:
        """(self, bias tokens) of slopes, then of offsets; further bias tokens have the logit of self."""
        head, others = self.head, bias_tokens - self.bias_tokens
        slopes = [*(token.slope for token in head.bias_tokens), *[head.beta] * others]
        offsets = [*(token.offset for token in head.bias_tokens), *[head.gamma] * others]
        return [(head.beta, slopes), (head.gamma, offsets)]


def groups_of(program: Program) -> tuple[Group, ...]:
    """The groups of a program, in order; at least one."""
    heads = list(program.heads)
    if program.linear != 0.0 and spreads(program):
        heads = spread(heads[0], program.linear)
    elif program.linear != 0.0 or program.constant != 0.0:
        heads.append(Head(beta=0.0, bias_tokens=(), c=program.linear, d=program.constant))
    return tuple(map(group_of, heads))


def spreads(program: Program) -> bool:
    """Whether a linear term of the program can be spread over the keys of its only head."""
    return len(program.heads) == 1 and program.constant == 0.0 and program.heads[0].multiples is not None


def spread_error(program: Program, dtype: DTypeLike) -> float:
    """The largest relative change from rounding the spread coefficients to a type."""
    if program.linear == 0.0 or not spreads(program):
        return 0.0
    sums = np.asarray([value for value in (program.heads[0].c + program.linear, program.linear) if value != 0.0])
    return float(np.max(np.abs(sums.astype(dtype).astype(np.float64) / sums - 1.0)))


def stored(program: Program, dtype: DTypeLike, *, factored: bool = False, conditioned: bool = False) -> Program:
    """The program with coefficients as a form stores them in a type (`Head.rounded`), and what that changes."""
    made = program.rounded(dtype, factored=factored, conditioned=conditioned)
    # Every form adds a linear term to the coefficients of the head beside it, and these sums are rounded once more.
    return replace(made, coefficient_error=made.coefficient_error + spread_error(made, dtype))


def spread(head: Head, linear: float) -> list[Head]:
    """The heads of `head` plus `linear z`: one per key, with the others as its bias tokens."""
    own = BiasToken(slope=head.beta, offset=head.gamma)
    heads = [replace(head, c=head.c + linear)] if head.c + linear != 0.0 else []
    for number, token in enumerate(head.bias_tokens):
        others = (*head.bias_tokens[:number], own, *head.bias_tokens[number + 1 :])
        heads.append(Head(beta=token.slope, gamma=token.offset, bias_tokens=others, c=linear))
    return heads


def group_of(head: Head) -> Group:
    """The group of a head; a factor of its value is applied last, where it cannot overflow a value of weight 0."""
    return Group(head) if head.c in (0.0, 1.0) else Group(head.unscaled(), head.c)


# -- heads over the same keys ---------------------------------------------------------------------------------------
#
# The heads of a gate all have the same set of keys. Their softmax is computed once, and their sum is a weighted mean of
# multiples of the value. Where slopes are an arithmetic progression, all shares are powers of one exponential.


@dataclass(frozen=True)
class SharedKey:
    """One key as a graph stores it: logit `slope y + offset`, factor `weight` of its exponential.

    The offset is 0 where it is in the weight; `part` is the weight times the value or multiple.
    """

    slope: float
    offset: float
    weight: float
    part: float

    @classmethod
    def of(cls, slope: float, offset: float, value: float, largest: float = FACTORED) -> SharedKey:
        """A key with its logit's offset factored out of the exponential, unless it is above `largest`."""
        if abs(offset) > largest:
            return cls(slope, offset, 1.0, value)
        weight = math.exp(offset)
        return cls(slope, 0.0, weight, weight * value)


def progression_of(keys: Sequence[SharedKey], dtype: DTypeLike) -> tuple[float, tuple[float, ...], float] | None:
    """(step, weights, part) of shared keys as a progression with exactly their numbers in a type, as for Mish.

    Shares are w_j e^(j step y), j = 0, 1, ...; the last w and all multiples but the first are 1. `weights` are the
    other w; `part` is the first weight times its multiple. None if the keys do not form a progression.
    """
    narrow = partial(narrowed, dtype=dtype)
    ascending = sorted(keys, key=lambda key: key.slope)
    for ordered in (ascending, ascending[::-1]):
        slopes = [narrow(key.slope) for key in ordered]
        weights, parts = [narrow(key.weight) for key in ordered], [narrow(key.part) for key in ordered]
        step = slopes[1] - slopes[0]
        even = slopes == [slopes[0] + place * step for place in range(len(slopes))] and narrow(step) == step
        if even and weights[-1] == 1.0 and parts[1:] == weights[1:] and not any(key.offset for key in keys):
            return step, tuple(weights[:-1]), parts[0]
    return None


def by_keys(program: Program) -> tuple[tuple[Head | tuple[SharedKey, ...], ...], float]:
    """The heads, or keys that several share, nonzero multiples first; and the remaining linear term.

    A single group absorbs that term, since weights sum to one: separate, it would cancel most digits (Mish at y = -15).
    """
    by_keys: dict[object, list[Head]] = {}
    for number, head in enumerate(program.heads):
        by_keys.setdefault(head.multiples or number, []).append(head)
    alone = len(by_keys) == 1 and program.heads[0].multiples is not None
    linear = program.linear if alone else 0.0
    groups = (_shared(each, linear) if len(each) > 1 or linear != 0.0 else each[0] for each in by_keys.values())
    return tuple(groups), program.linear - linear


def _shared(heads: list[Head], linear: float) -> tuple[SharedKey, ...]:
    multiples: dict[tuple[float, float], float] = {}
    for head in heads:
        own, *others = head.logits
        for other in others:
            multiples.setdefault(other, linear)
        multiples[own] = multiples.get(own, linear) + head.c
    keys = [SharedKey.of(slope, offset, multiple) for (slope, offset), multiple in multiples.items()]
    return tuple(sorted(keys, key=lambda key: key.part == 0.0))

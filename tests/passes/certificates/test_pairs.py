"""What a gate over pairs of keys loses by rounding its coefficients: the bound holds in balls, and is not empty."""

from __future__ import annotations

import numpy as np
import pytest

from passes.certificates.pairs import pairable, pairing_error
from passes.programs.fitted import lines
from passes.programs.head import BiasToken, Head
from tests.passes.programs.balls import arb, head_at, precision, upper

(LINE,) = lines("double pairs")
HEADS = {
    "silu": Head(1.0),
    "thirds": Head(1.0 / 3.0, (BiasToken(-2.0 / 3.0, 0.7, 0.0), BiasToken(0.1, -1.3, 0.0)), gamma=0.1),
    "far": Head(1e3 / 3.0, (BiasToken(0.0, 20.0 / 3.0, 0.0),)),
}


def change(head: Head, g: float) -> float:
    """The distance of the pairs' sum from the product of line and weight, over max(1, |h|)."""
    y = arb(g)
    keys = [(arb(slope), arb(offset), arb(value)) for slope, offset, value in LINE.keys]
    weights = [(slope * y + offset).exp() for slope, offset, _ in keys]
    line = sum((w * value for w, (_, _, value) in zip(weights, keys, strict=True)), arb(0)) / sum(weights, arb(0))
    exact = head_at(head, y, arb(1)) * line
    written = sum((head_at(each, y, arb(1)) for each in LINE.heads(head)), arb(0))
    return upper(written - exact) / max(1.0, float(abs(exact).lower()))


@pytest.mark.parametrize("name", HEADS)
def test_the_bound_holds(name: str) -> None:
    head, rng = HEADS[name], np.random.default_rng(0)
    bound = pairing_error(head, LINE, LINE.domain, enough=1e-17)
    g = np.concatenate([rng.normal(0.0, 3.0, 60), rng.normal(0.0, 0.02, 40), rng.uniform(-512.0, 512.0, 20)])
    with precision(300):
        seen = max(change(head, float(value)) for value in g)
    assert seen <= bound
    assert bound <= max(1e-15, 50.0 * seen)
    assert bound > 0.0


def test_a_steep_key_with_an_offset_cannot_be_paired() -> None:
    assert pairable(Head(1.0))
    assert pairable(Head(2.0**80))
    assert not pairable(Head(0.0, (BiasToken(2.0**80, -6.0 * 2.0**80),)))
    assert not pairable(Head(1.0, alpha=0.5))


def test_what_needs_no_pairs_loses_nothing() -> None:
    assert pairing_error(Head(1.0, c=0.0, d=2.0), LINE, 512.0, enough=0.0) == 0.0
    assert pairing_error(Head(0.0, ()), LINE, 512.0, enough=0.0) == 0.0

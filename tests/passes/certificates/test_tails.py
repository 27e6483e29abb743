"""Tails of certificates: the line that a head approaches, and a bound on its distance, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from passes.certificates.certify import _head_tail
from passes.programs.head import BiasToken, Head

# The self key wins on the right, the second bias token on the left.
HEAD = Head(beta=1.0, gamma=0.5, c=2.0, d=-1.0, bias_tokens=(BiasToken(0.0, 0.25, 3.0), BiasToken(-2.0, 0.0, -4.0)))


@pytest.mark.parametrize("start", [6.0, 20.0])
def test_on_the_side_of_the_self_key(start: float) -> None:
    """(c, d) is the line; each other key adds its weight at the start times what it is apart there."""
    line, bound = _head_tail(HEAD, start)
    assert line == (2.0, -1.0)
    first = math.exp(0.25 - 0.5 - start) * (4.0 + 2.0 * start)
    second = math.exp(0.0 - 0.5 - 3.0 * start) * (3.0 + 2.0 * start)
    assert bound == pytest.approx(first + second, rel=1e-8)
    assert bound >= first + second


@pytest.mark.parametrize("start", [-6.0, -20.0])
def test_on_the_side_of_a_bias_token(start: float) -> None:
    line, bound = _head_tail(HEAD, start)
    assert line == (0.0, -4.0)
    own = math.exp(0.5 - 0.0 + 3.0 * start) * (3.0 + 2.0 * -start)
    other = math.exp(0.25 - 0.0 + 2.0 * start) * 7.0
    assert bound == pytest.approx(own + other, rel=1e-8)
    assert bound >= own + other


@pytest.mark.parametrize("start", [6.0, -6.0, 10.0, -10.0])
def test_the_head_is_that_close_to_its_line(start: float) -> None:
    (slope, constant), bound = _head_tail(HEAD, start)
    y = start * np.linspace(1.0, 3.0, 2001)
    assert np.max(np.abs(HEAD.evaluate(y, y) - slope * y - constant)) <= bound


def test_keys_of_equal_values_do_not_matter() -> None:
    """However close their logits are."""
    twins = Head(beta=0.0, c=0.0, d=5.0, bias_tokens=(BiasToken(1.0, 0.0, 7.0), BiasToken(1.0, 0.0, 7.0)))
    line, bound = _head_tail(twins, 8.0)
    assert line == (0.0, 7.0)
    assert bound == pytest.approx(math.exp(-8.0) * 2.0, rel=1e-8)


@pytest.mark.parametrize(("start", "finite"), [(4.0, False), (4.1, True)])
def test_no_bound_before_the_distance_falls(start: float, finite: bool) -> None:
    """|A + B y| e^(-d y) decreases once d y > 1."""
    slow = Head(beta=0.0, c=1.0, bias_tokens=(BiasToken(0.25, 0.0, 0.0),))
    assert math.isfinite(_head_tail(slow, start)[1]) is finite


def test_large_offsets_do_not_overflow() -> None:
    far = Head(beta=0.0, c=1.0, bias_tokens=(BiasToken(1.0, -5000.0, 0.0),))
    line, bound = _head_tail(far, 10.0)
    assert line == (0.0, 0.0)
    assert math.isfinite(bound)
    assert bound > 1e300

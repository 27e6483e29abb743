"""Influence, pruning and scores on graphs whose values are known, and against a matrix inverse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rewriter.interpret.graph import influence, normalised, prune, scores

Array = NDArray[Any]

# Places: two tokens, a bias, three heads, the logit.
TOKEN, OTHER, BIAS, FIRST, SECOND, WEAK, LOGIT = range(7)


def small() -> Array:
    edges = np.zeros((7, 7))
    edges[FIRST, TOKEN], edges[FIRST, OTHER] = 3.0, -1.0
    edges[SECOND, FIRST], edges[SECOND, BIAS] = -2.0, 2.0
    edges[WEAK, OTHER] = 1.0
    edges[LOGIT, FIRST], edges[LOGIT, SECOND], edges[LOGIT, WEAK] = 5.0, -4.0, 1.0
    return edges


def test_influence_by_hand() -> None:
    start = np.eye(7)[LOGIT]
    found = influence(normalised(small()), start)
    # FIRST: 5/10 directly and 4/10 of SECOND's input, of which it is half.
    np.testing.assert_allclose(found, [0.7 * 0.75, 0.7 * 0.25 + 0.1, 0.2, 0.7, 0.4, 0.1, 0.0])


def test_influence_is_the_series_of_a_random_graph() -> None:
    generator = np.random.default_rng(0)
    weights = normalised(np.tril(generator.normal(size=(30, 30)), -1))
    start = generator.random(30)
    series = start @ (np.linalg.inv(np.eye(30) - weights) - np.eye(30))
    np.testing.assert_allclose(influence(weights, start), series, atol=1e-12)


def test_scores_without_and_with_errors() -> None:
    tokens, none = np.arange(7) < 2, np.zeros(7)
    whole = scores(small(), none, tokens, LOGIT)
    assert whole.replacement == 1.0
    assert whole.completeness == pytest.approx(1.0)
    missing = none.copy()
    missing[LOGIT] = 10.0  # half of what the logit reads
    found = scores(small(), missing, tokens, LOGIT)
    begun = (0.525 + 0.275) / 2
    assert found.replacement == pytest.approx(begun / (begun + 0.5))
    passing = 1.0 + (0.525 + 0.275 + 0.2 + 0.7 + 0.4 + 0.1) / 2
    assert found.completeness == pytest.approx((passing - 0.5) / passing)


def test_pruning() -> None:
    kept, sources = np.isin(np.arange(7), [TOKEN, OTHER, LOGIT]), np.arange(7) <= BIAS
    whole = prune(small(), kept, sources, LOGIT, 1.0, 1.0)
    assert whole.nodes.all()
    assert (whole.edges == (small() != 0.0)).all()
    # Influence falls: 0.7, 0.525, 0.4, 0.275, 0.2, 0.1 of 2.2 in all.
    np.testing.assert_allclose(whole.cumulative[[FIRST, SECOND, WEAK]] * 2.2, [0.7, 1.625, 2.2])
    # 0.8 of it is reached with OTHER: the bias and the weak head go.
    some = prune(small(), kept, sources, LOGIT, 0.8, 1.0)
    assert set(np.flatnonzero(some.nodes)) == {TOKEN, OTHER, FIRST, SECOND, LOGIT}
    assert not some.edges[:, WEAK].any()
    # Edges: only the largest. A head without in-edges or out-edges goes as well.
    few = prune(small(), kept, sources, LOGIT, 1.0, 0.3)
    assert {(int(target), int(source)) for target, source in np.argwhere(few.edges)} == {(LOGIT, FIRST), (FIRST, TOKEN)}
    assert set(np.flatnonzero(few.nodes)) == {TOKEN, OTHER, FIRST, LOGIT}


def test_a_head_that_lost_all_it_reads_goes() -> None:
    edges = np.zeros((4, 4))
    edges[1, 0] = 1e-30  # smaller than what any row is divided by
    edges[2, 0], edges[3, 1], edges[3, 2] = 1.0, 1.0, 1.0
    found = prune(edges, np.array([True, False, False, True]), np.array([True, False, False, False]), 3, 1.0, 0.9)
    assert list(found.nodes) == [True, False, True, True]
    assert {tuple(each) for each in np.argwhere(found.edges)} == {(2, 0), (3, 2)}

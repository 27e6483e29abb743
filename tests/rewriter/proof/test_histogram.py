"""Counts of errors in units in the last place."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rewriter import rewrite
from rewriter.proof.statistics import (
    BINS,
    HIGHEST,
    LOWEST,
    added,
    against_truth,
    compare,
    counts_against,
    merge,
    ulp_counts,
)
from tests.textmodels import SILU, mlp

EPS = 2.0**-23


def place(ulps: float) -> int:
    """The bin of an error, by its definition."""
    if ulps == 0:
        return 0
    return next((k - LOWEST + 1 for k in range(LOWEST, HIGHEST + 1) if ulps <= 2.0**k), BINS - 1)


@pytest.mark.parametrize(
    "ulps", [0.0, 1e-9, 2.0**-4, 0.07, 0.5, 0.51, 1.0, 1.01, 2.0, 3.0, 2.0**16, 2.0**16 + 1, 1e30, np.inf]
)
@pytest.mark.parametrize("expected", [0.0, 0.3, -1.0, 1.999, 2.0, -1000.0, 1e30])
def test_bins(ulps: float, expected: float) -> None:
    unit = EPS * 2.0 ** np.floor(np.log2(max(1.0, abs(expected))))
    counts = ulp_counts(np.array([ulps * unit]), np.array([expected]), EPS)
    assert counts.shape == (BINS,)
    assert np.flatnonzero(counts).tolist() == [place(ulps)]


def test_distance_beyond_the_largest_ratio() -> None:
    """A finite distance over a unit may overflow."""
    assert ulp_counts(np.array([1e308]), np.array([0.0]), 2.0**-52)[-1] == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_one_step_is_one_unit(dtype: Any) -> None:
    one = np.ones((2, 3), dtype)
    next_one = one + np.asarray(ml_dtypes.finfo(dtype).eps, dtype)
    stats = compare("out", one, next_one)
    assert stats.ulps[place(1.0)] == sum(stats.ulps) == 6
    assert compare("out", one, one).ulps[0] == 6


def test_what_is_not_counted() -> None:
    assert compare("out", np.arange(3), np.arange(3)).ulps == ()
    assert compare("out", np.ones(2, np.float32), np.ones(3, np.float32)).ulps == ()
    holes = np.array([1.0, np.nan, np.inf, -np.inf], np.float32)
    assert sum(compare("out", holes, holes).ulps) == 1


def test_merged_counts_add_up() -> None:
    one = np.ones(4, np.float32)
    merged = merge([compare("out", one, one), compare("out", one, one + np.float32(EPS))])
    assert (merged.ulps[0], merged.ulps[place(1.0)]) == (4, 4)
    assert added([(), (1, 2), (3, 4)]) == (4, 6)
    assert added([(), ()]) == ()


def test_against_truth() -> None:
    truth = np.array([1.0, 2.0, np.nan])
    old = np.array([1.0 + EPS, 2.0, 0.0], np.float32)
    new = np.array([1.0, np.inf, 0.0], np.float32)
    stats = against_truth(compare("out", old, new), [old], [new], [truth])
    assert (stats.original_ulps[place(1.0)], stats.original_ulps[0], sum(stats.original_ulps)) == (1, 1, 2)
    assert (stats.rewritten_ulps[0], stats.rewritten_ulps[-1], sum(stats.rewritten_ulps)) == (1, 1, 2)
    assert counts_against([old], [np.ones(2)]) == ()
    assert counts_against([np.arange(3)], [truth]) == ()


def test_a_run_fills_it() -> None:
    report = rewrite(mlp(SILU))
    assert report.validation is not None
    stats = report.validation.providers["cpu"].outputs["out"]
    assert sum(stats.ulps) == stats.elements

"""Regions on adversarial points: what they are, parity of NaN and infinities, and what is reported at infinity."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto

from rewriter import ExitStatus, rewrite
from rewriter.proof.blocks.activation import _same_overflow
from rewriter.proof.blocks.adversarial_points import adversarial, laid_out, largest_finite
from rewriter.proof.claims import Claim
from tests.plans import Silu
from tests.textmodels import ERF_GELU, SILU, mlp

CLAIM = Claim("mlp", ("y",), "h", ("x",), ("out",), 0.0, 0.0, TensorProto.FLOAT, Silu())


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
def test_points(kind: int) -> None:
    points = adversarial(kind)
    limits = ml_dtypes.finfo(points.dtype)
    assert points.dtype == onnx.helper.tensor_dtype_to_np_dtype(kind)
    wide = points.astype(np.float64)
    near = [1e4, float(limits.max), float(limits.smallest_subnormal), float(limits.tiny), 0.0]
    for value in np.asarray([*near, *(-value for value in near)]).astype(points.dtype).astype(np.float64):
        assert np.any((wide == value) & (np.signbit(wide) == np.signbit(value))), value
    assert np.isnan(wide).sum() == 1
    assert np.isfinite(wide[~np.isnan(wide)]).all()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (SILU, ()),  # the original gives NaN at -inf as well
        ("h = LeakyRelu<alpha = 0.1>(y)", ()),
        ("h = Relu(y)", ("nan instead of 0 at -inf",)),
        (ERF_GELU, ()),
    ],
)
def test_infinite_pre_activations_are_reported_and_do_not_fail(text: str, found: tuple[str, ...]) -> None:
    report = rewrite(mlp(text))
    assert report.exit_status is ExitStatus.CONVERTED
    assert report.validation is not None
    assert report.validation.blocks[0].infinite == found


@pytest.mark.parametrize(
    ("old", "new", "truth", "same"),
    [
        (np.inf, np.inf, 1e39, True),
        (-np.inf, np.inf, -1e39, False),
        (np.inf, 3e38, 1e39, False),
        (np.inf, np.nan, 1e39, False),
        (3e38, np.inf, 1e39, True),  # the original saturates: nothing to agree with
        (1.0, 2.0, 1.0, True),  # no overflow: judged by the error
    ],
)
def test_overflow_is_the_same_overflow(old: float, new: float, truth: float, same: bool) -> None:
    assert largest_finite(CLAIM.elem_type) < 1e39
    before, after = (np.asarray([value], np.float32) for value in (old, new))
    assert _same_overflow(before, after, np.asarray([truth]), CLAIM, np.asarray([True])) is same
    assert _same_overflow(before, after, np.asarray([truth]), CLAIM, np.asarray([False]))  # beyond the domain


def test_points_reach_every_order_of_magnitude() -> None:
    points = np.abs(adversarial(TensorProto.FLOAT).astype(np.float64))
    decades = np.unique(np.floor(np.log10(points[(points > 1e4) & np.isfinite(points)])))
    np.testing.assert_array_equal(decades, np.arange(4, 39))


@pytest.mark.parametrize(("rank", "axis", "rows"), [(1, -1, 1), (2, -1, 23), (3, -1, 46), (4, -3, 46), (3, -2, 46)])
def test_points_differ_in_every_batch_and_token(rank: int, axis: int, rows: int) -> None:
    points = adversarial(TensorProto.FLOAT)
    placed = laid_out(points, rank, axis)
    assert placed.ndim == rank
    by_row = np.moveaxis(placed, axis, -1).reshape(-1, placed.shape[axis])
    assert by_row.shape[0] == rows
    wide = by_row.astype(np.float64)
    assert set(wide[np.isfinite(wide)]) == set(points[np.isfinite(points)].astype(np.float64))  # none is lost
    for one in range(rows):
        for other in range(one):
            assert not np.array_equal(wide[one], wide[other], equal_nan=True)


def test_no_more_tokens_than_the_block_takes() -> None:
    assert laid_out(adversarial(TensorProto.FLOAT), 3, -1, longest=5).shape[:2] == (2, 5)

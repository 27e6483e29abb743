"""Regions on adversarial points: what they are, parity of NaN and infinities, and what is reported at infinity."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto

from rewriter import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.proof.blocks.activation import Regions, _at_infinity, _parity, _same_overflow, regions_of
from rewriter.proof.blocks.adversarial_points import adversarial, laid_out, largest_finite, machine_epsilon
from rewriter.proof.claims import Claim, Side
from tests.plans import Silu
from tests.textmodels import text_model

CLAIM = Claim("mlp", ("y",), "h", ("x",), ("out",), 0.0, 0.0, TensorProto.FLOAT, Silu())


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
def test_points(kind: int) -> None:
    points = adversarial(kind)
    limits = ml_dtypes.finfo(points.dtype)
    assert points.dtype == onnx.helper.tensor_dtype_to_np_dtype(kind)
    wide = points.astype(np.float64)
    edge = float(limits.max)
    near = [1e4, edge, edge / 2, np.sqrt(edge), float(limits.smallest_subnormal), float(limits.tiny), 0.0]
    for value in np.asarray([*near, *(-value for value in near)]).astype(points.dtype).astype(np.float64):
        assert np.any((wide == value) & (np.signbit(wide) == np.signbit(value))), value
    assert np.isnan(wide).sum() == 1
    assert np.isfinite(wide[~np.isnan(wide)]).all()


@pytest.mark.parametrize("crossing", [0.0, 5.0, -5.0])
def test_points_gather_on_both_sides_of_a_crossing(crossing: float) -> None:
    """From a part in 10^8 to a tenth of it, 8 a decade; of 0 as far as from 1."""
    points = adversarial(TensorProto.DOUBLE, np.array([crossing, np.inf]))
    assert np.isfinite(points[:-1]).all()
    near = points[np.abs(points) < 10.0]
    offsets = (near - crossing) / (abs(crossing) or 1.0)
    assert crossing in points
    for side in (1, -1):
        for step in np.logspace(-8, -1, 57):
            assert np.any(np.abs(offsets * side / step - 1) < 1e-6), (side, step)


NAN = np.nan


@pytest.mark.parametrize(
    ("old", "new", "holds"),
    [
        ((1, NAN, 2), (1, NAN, 2), True),
        ((1, 0, 2), (1, NAN, 2), True),  # the original swallows it
        ((1, NAN, 2), (1, 0, 2), False),
        ((NAN, NAN, 2), (1, NAN, 2), False),
        ((1, NAN, 2), (NAN, NAN, 2), False),
        ((1, NAN, 2), (1, NAN, NAN), False),
    ],
)
def test_parity_where_an_input_is_nan(old: tuple[float, ...], new: tuple[float, ...], holds: bool) -> None:
    nans = {"y": np.array([1, NAN, -1])}
    regions = Regions(None, None, {}, nans, {})  # type: ignore[arg-type]
    runs = [lambda _, values=values: {"h": np.array(values)} for values in (old, new)]
    plain = np.ones(3)
    found = _parity(regions, CLAIM, plain, plain, runs, "cpu")
    assert found == ([] if holds else ["mlp: NaN at other points than in the original on cpu"])
    assert _parity(regions, CLAIM, plain, np.array([1, NAN, 1]), [runs[0]] * 2, "cpu") != []


class Gives:
    """A session that gives fixed values, or refuses to run."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def run(self, _: object) -> dict[str, np.ndarray]:
        if not self.values:
            raise ValidationError("it does not run")
        return {"h": np.array(self.values)}


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ((0, np.inf), (0, np.inf), []),
        ((0, np.inf), (NAN, np.inf), ["nan instead of 0 at -inf"]),
        ((NAN, 1), (NAN, 1.009), []),
        ((NAN, 1), (0, 1.011), ["0 instead of nan at -inf", "1.011 instead of 1 at inf"]),
        ((0, 200), (0.009, 201.9), []),
        ((0, 200), (-0.011, 202.1), ["-0.011 instead of 0 at -inf", "202.1 instead of 200 at inf"]),
        ((-np.inf, np.inf), (np.inf, 7), ["inf instead of -inf at -inf", "7 instead of inf at inf"]),
        ((), (0, 1), []),
    ],
)
def test_what_is_reported_at_infinity(old: tuple[float, ...], new: tuple[float, ...], found: list[str]) -> None:
    regions = Regions(None, None, {}, {}, {"y": np.array([-np.inf, np.inf])})  # type: ignore[arg-type]
    assert _at_infinity(regions, CLAIM, [Gives(*old), Gives(*new)]) == found  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("old", "new", "truth", "same"),
    [
        (np.inf, np.inf, 1e39, True),
        (-np.inf, np.inf, -1e39, False),
        (np.inf, 3e38, 1e39, False),
        (np.inf, np.nan, 1e39, False),
        (np.inf, 3e38, float(np.finfo(np.float32).max), True),  # not beyond the range: the original's fault
        (np.inf, 3e38, 3.5e38, False),
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


def test_how_close_points_are() -> None:
    """1/1024 apart around 0; 40 a decade from 1e-12 to 1e4, on both sides; 20 a decade from there to the largest."""
    points = np.unique(adversarial(TensorProto.DOUBLE))
    points = points[np.isfinite(points)]
    around = points[np.abs(points) <= 24.0]
    assert around[0] == -24.0
    assert around[-1] == 24.0
    assert np.max(np.diff(around)) <= 1.0 / 1024.0
    for side in (points[points > 0.0], -points[points < 0.0][::-1]):
        low = side[(side >= 0.999e-12) & (side < 1e-3)]
        assert low[0] == pytest.approx(1e-12)
        assert np.max(low[1:] / low[:-1]) <= 10.0 ** (1.0 / 40.0) * (1.0 + 1e-9)
        middle = side[(side > 24.0) & (side <= 1e4)]
        assert np.max(middle[1:] / middle[:-1]) <= 10.0 ** (1.0 / 40.0) * (1.0 + 1e-9)
        high = side[(side >= 1e4) & (side < 1e300)]
        assert np.max(high[1:] / high[:-1]) <= 10.0 ** (1.0 / 19.9)
        assert high[-1] > 1e299


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


@pytest.mark.parametrize(
    ("shape", "rank"),
    [("float[4]", 1), ("float[n, 4]", 2), ("float[b, n, 4]", 3), ("float[a, b, n, 4]", 4), ("float", 3)],
)
def test_points_have_the_rank_of_the_pre_activation(shape: str, rank: int) -> None:
    """3 where it is unknown; several batches and tokens where there are such axes."""
    model = text_model("h = Neg(y) out = Abs(h)", inputs=f"{shape} y", outputs=f"{shape} out")
    if shape == "float":
        model.graph.input[0].type.tensor_type.ClearField("shape")
    side = Side.of(LoadedModel(model, None, None, (), 0))
    found = regions_of(side, side, CLAIM)
    assert [feeds["y"].ndim for feeds in (found.feeds, found.nans, found.infinities)] == [rank] * 3
    assert found.feeds["y"].shape[:-1] == {1: (), 2: (23,), 3: (2, 23), 4: (2, 1, 23)}[rank]
    assert found.nans["y"].shape == (1,) * (rank - 1) + (3,)


@pytest.mark.parametrize("axis", [-3, 0, 1])
def test_channels_of_an_unknown_axis_are_the_last(axis: int) -> None:
    assert laid_out(np.arange(230.0), 2, axis).shape == (23, 10)


@pytest.mark.parametrize(
    ("rank", "axis", "shape"),
    [
        (1, -1, (460,)),
        (2, -1, (23, 20)),
        (2, -2, (20, 23)),
        (3, -1, (2, 23, 10)),
        (3, -2, (2, 10, 23)),
        (3, -3, (10, 2, 23)),
        (4, -3, (2, 10, 1, 23)),
        (4, -4, (10, 2, 1, 23)),
    ],
)
def test_where_batch_tokens_and_channels_lie(rank: int, axis: int, shape: tuple[int, ...]) -> None:
    points = np.arange(460.0)
    placed = laid_out(points, rank, axis)
    assert placed.shape == shape
    assert sorted(placed.reshape(-1)) == sorted(points)
    np.testing.assert_array_equal(placed, laid_out(points, rank, axis))


def test_no_more_tokens_than_the_block_takes() -> None:
    assert laid_out(adversarial(TensorProto.FLOAT), 3, -1, longest=5).shape[:2] == (2, 5)


@pytest.mark.parametrize(("longest", "tokens"), [(None, 23), (30, 23), (23, 23), (22, 22), (1, 1), (0, 1)])
def test_tokens_of_points(longest: int | None, tokens: int) -> None:
    assert laid_out(np.arange(1000.0), 3, -1, longest).shape[1] == tokens


def test_many_crossings_do_not_crowd_out_the_rest() -> None:
    """The first 64 get points of their own."""
    crossings = 10.0 + np.arange(100) / 7.0
    points = adversarial(TensorProto.DOUBLE, crossings)
    found = [bool(np.any(points == place + place * 1e-8)) for place in crossings]
    assert found == [True] * 64 + [False] * 36
    assert len(adversarial(TensorProto.DOUBLE)) < len(points) < len(adversarial(TensorProto.DOUBLE)) + 64 * 115


def test_numbers_of_types() -> None:
    assert (machine_epsilon(TensorProto.FLOAT16), machine_epsilon(TensorProto.BFLOAT16)) == (2.0**-10, 2.0**-7)
    assert (machine_epsilon(TensorProto.INT64), machine_epsilon(TensorProto.BOOL)) == (0.0, 0.0)
    assert largest_finite(TensorProto.FLOAT16) == 65504.0

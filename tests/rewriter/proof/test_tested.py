"""Further inputs of a block: other batches and tokens, no two rows alike; all position slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from rewriter.files.load import LoadedModel
from rewriter.proof.claims import Claim
from rewriter.proof.inputs.cases import Case
from rewriter.proof.tested import longest, sizes_of, spread, wanted


def _claim(**given: Any) -> Claim:
    return Claim("mlp", ("y",), "h", ("x",), ("out",), 0.0, TensorProto.FLOAT, **given)


def _real(*shape: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.random.default_rng(1).normal(size=shape).astype(np.float32)}]


@pytest.mark.parametrize(
    ("shape", "longest", "expected"),
    [
        ((1, 17, 8), None, [(2, 67, 8), (6, 19, 8), (1, 131, 8)]),
        ((17, 8), None, [(67, 8), (19, 8), (131, 8)]),
        ((1, 5, 8), 6, [(2, 6, 8), (6, 6, 8), (1, 6, 8)]),
        ((2, 3, 4, 8), None, [(2, 1, 67, 8), (6, 1, 19, 8), (1, 1, 131, 8)]),
    ],
)
def test_sizes(shape: tuple[int, ...], longest: int | None, expected: list[tuple[int, ...]]) -> None:
    cases = spread(_claim(longest=longest), _real(*shape))
    assert [case.feeds["x"].shape for case in cases] == expected


def test_channels_that_are_not_last() -> None:
    """As before a convolution; the lengths of the real inputs may differ."""
    feeds = [*_real(1, 8, 17), *_real(2, 8, 5)]
    cases = spread(_claim(axis=-2), feeds)
    assert [case.feeds["x"].shape for case in cases] == [(2, 8, 67), (6, 8, 19), (1, 8, 131)]
    assert [sizes_of(_claim(axis=-2), case) for case in cases] == [(2, 67), (6, 19), (1, 131)]
    (image, *_) = spread(_claim(axis=-3), _real(2, 8, 4, 3))
    assert image.feeds["x"].shape == (2, 8, 1, 67)
    drawn = image.feeds["x"][0, :, 0, 0]
    rows = np.moveaxis(_real(2, 8, 4, 3)[0]["x"], 1, -1).reshape(-1, 8)
    assert np.isclose(drawn / rows, (drawn / rows)[:, :1], rtol=1e-5).all(axis=1).any()  # a row, scaled


def test_no_two_rows_are_alike() -> None:
    for case in spread(_claim(), _real(1, 3, 8)):
        rows = case.feeds["x"].reshape(-1, 8)
        assert len(np.unique(rows, axis=0)) == len(rows)


def test_a_block_that_reads_shapes_is_tried_on_real_inputs_only() -> None:
    feeds = [{"x": np.zeros((1, 3, 8), np.float32), "shape": np.asarray([1, 3])}]
    assert spread(_claim(), feeds) == []


def test_every_position_slot_is_filled() -> None:
    claim = _claim(longest=40)
    found = longest(claim, spread(claim, _real(1, 17, 8)))
    assert [case.feeds["x"].shape for case in found] == [(1, 40, 8)]


def test_nothing_to_fill_without_slots() -> None:
    assert longest(_claim(), spread(_claim(), _real(1, 17, 8))) == []
    assert longest(_claim(longest=9), [Case("shapes", {"x": np.zeros(3), "shape": np.zeros(2)})]) == []


def test_what_a_part_does_not_read_is_not_given() -> None:
    graph = helper.make_graph([], "part", [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)], [])
    part = LoadedModel(helper.make_model(graph), None, None, (), 0)
    one, other = np.zeros(1), np.ones(1)
    assert wanted({"x": one, "z": other}, part) == {"x": one}


def test_rows_are_real_ones_scaled() -> None:
    """By a factor between a half and three halves, each row by its own; of the type of the input."""
    rows = np.array([[1.0, 0.0], [0.0, 1.0]], np.float16)
    (large, *_) = spread(_claim(), [{"x": rows[None, :1]}, {"x": rows[None, 1:]}])
    made = large.feeds["x"]
    assert made.dtype == np.float16
    flat = made.reshape(-1, 2).astype(np.float64)
    assert np.all((flat == 0.0).sum(1) == 1), "each is a multiple of one of the rows"
    factors = flat.sum(1)
    assert 0.5 <= factors.min() < 0.6
    assert 1.4 < factors.max() <= 1.5
    assert {int(place) for place in flat.argmax(1)} == {0, 1}
    assert large.name == "batch 2, 67 tokens"


def test_inputs_that_are_no_floats_or_empty() -> None:
    assert spread(_claim(), [{"x": np.zeros((1, 3, 8), np.int64)}]) == []
    assert spread(_claim(), [{"x": np.zeros((1, 0, 8), np.float32)}]) == []
    assert spread(_claim(), []) == []
    assert len(spread(_claim(), [{"x": np.zeros((1, n, 8), np.float32)} for n in (0, 2)])) == 3


@pytest.mark.parametrize(("slots", "tried"), [(4096, True), (4097, False)])
def test_very_long_sequences_are_not_tried(slots: int, tried: bool) -> None:
    claim = _claim(longest=slots)
    assert len(longest(claim, spread(claim, _real(1, 17, 8)))) == tried


@pytest.mark.parametrize(
    "feeds", [{}, {"y": np.zeros((1, 17, 8), np.float32)}, {"x": np.zeros((1, 17, 8)), "n": np.ones(1)}]
)
def test_only_what_the_block_reads_is_varied(feeds: dict[str, np.ndarray]) -> None:
    """Neither where something else is given nor where more is, such as shapes."""
    assert spread(_claim(), [feeds]) == []
    assert longest(_claim(longest=9), [Case("other", feeds)]) == []

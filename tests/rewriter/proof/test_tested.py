"""Further inputs of a block: other batches and tokens, no two rows alike; small chunks and all position slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from rewriter.files.load import LoadedModel
from rewriter.proof.claims import Claim
from rewriter.proof.exposed import wanted
from rewriter.proof.inputs.cases import Case
from rewriter.proof.tested import _chunks, _shape, _with_constant, sizes_of, spread, variants


def _claim(**given: Any) -> Claim:
    return Claim("mlp", ("y",), "h", ("x",), ("out",), 0.0, TensorProto.FLOAT, **given)


def _real(*shape: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.random.default_rng(1).normal(size=shape).astype(np.float32)}]


def _part(name: str = "mlp/heads/pattern_size", *, node: bool = False) -> LoadedModel:
    tensor = numpy_helper.from_array(np.asarray([10**6]), name)
    nodes = [helper.make_node("Constant", [], [name], value=tensor)] if node else []
    graph = helper.make_graph(nodes, "part", [], [], [] if node else [tensor])
    return LoadedModel(helper.make_model(graph), None, Path(), (), 0)


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


@pytest.mark.parametrize("lead", [(6,), ()], ids=["batch", "no-batch"])
@pytest.mark.parametrize(("neurons", "node"), [(32, False), (96, False), (96, True), (105, False)])
def test_small_chunks_are_several_and_the_last_is_uneven(neurons: int, node: bool, lead: tuple[int, ...]) -> None:
    claim = _claim(chunk_size="mlp/heads/pattern_size", neurons=neurons, bias_tokens=2)
    cases = spread(claim, _real(*(1 for _ in lead), 17, 8))
    found = list(variants(claim, _part(node=node), cases))
    assert len(found) == 2
    keys, batch = 19 + 2, 6 if lead else 1
    sizes = []
    for case, part, _ in found:
        assert case.feeds["x"].shape == (*lead, 19, 8)
        graph = part.proto.graph
        tensor = graph.node[0].attribute[0].t if node else graph.initializer[0]
        sizes.append(int(numpy_helper.to_array(tensor)[0]))
    assert [what for _, _, what in found] == [
        f"in chunks of {sizes[0] // (batch * keys * keys)} heads",
        f"in chunks of {sizes[1] // (batch * keys)} queries",
    ]
    heads, rows = sizes[0] // (batch * keys * keys), sizes[1] // (batch * keys)
    steps = -(-neurons // heads)
    assert steps > 1
    assert neurons % steps  # the function spreads its heads over as many steps
    assert 1 < rows < keys
    assert keys % rows


def test_without_a_small_case_no_chunks_are_forced() -> None:
    claim = _claim(chunk_size="mlp/heads/pattern_size", neurons=32, bias_tokens=2)
    large = [Case("large", {"x": np.zeros((2, 67, 8), np.float32)})]
    assert not list(variants(claim, _part(), large))


def test_every_position_slot_is_filled() -> None:
    claim = _claim(longest=40)
    found = list(variants(claim, _part(), spread(claim, _real(1, 17, 8))))
    assert [(case.feeds["x"].shape, what) for case, _, what in found] == [((1, 40, 8), "on 40 tokens")]


def test_nothing_to_vary_without_chunks_and_slots() -> None:
    assert not list(variants(_claim(), _part(), spread(_claim(), _real(1, 17, 8))))
    assert not list(variants(_claim(chunk_size="elsewhere", neurons=4), _part(), spread(_claim(), _real(1, 17, 8))))
    assert not list(variants(_claim(longest=9), _part(), [Case("shapes", {"x": np.zeros(3), "shape": np.zeros(2)})]))


# -- bounds on the size of patterns ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "tokens", "few"),
    [(3, 19, 5), (2, 5, 7), (5, 7, 11), (35, 11, 13), (35, 11 * 13, 4)],
)
def test_chunks_of_tokens_do_not_divide_them(batch: int, tokens: int, few: int) -> None:
    """Each token's pattern has `row_size` entries; the second bound leaves room for one token."""
    claim = _claim(row_size=6, neurons=32)
    assert _chunks(claim, batch, tokens) == (
        (few * 6, f"in chunks of {few} tokens"),
        (1, "one token at a time"),
    )


@pytest.mark.parametrize(
    ("neurons", "heads"), [(32, 11), (96, 20), (105, 10), (15, 3), (1155, 89), (15015, 7508), (None, 1), (1, 1)]
)
def test_chunks_of_heads_and_queries(neurons: int | None, heads: int) -> None:
    """A number of chunks of 3, 5, 7, 11 or 13 that does not divide the neurons, else 2."""
    claim = _claim(neurons=neurons, bias_tokens=2)
    assert _chunks(claim, 3, 19) == (
        (3 * 21 * 21 * heads, f"in chunks of {heads} heads"),
        (3 * 21 * 11, "in chunks of 11 queries"),
    )


@pytest.mark.parametrize(
    ("shape", "found"), [((3, 19, 8), (3, 19)), ((19, 8), (1, 19)), ((8,), (1, -1)), ((2, 3, 4, 8), (1, -1))]
)
def test_batch_and_tokens_of_a_case(shape: tuple[int, ...], found: tuple[int, int]) -> None:
    assert _shape(_claim(), Case("c", {"x": np.zeros(shape)})) == found


def test_a_constant_is_replaced_in_a_copy() -> None:
    for node in (False, True):
        part = _part(node=node).proto
        before = part.SerializeToString(deterministic=True)
        made = _with_constant(part, "mlp/heads/pattern_size", 17)
        assert made is not None
        tensor = made.graph.node[0].attribute[0].t if node else made.graph.initializer[0]
        assert numpy_helper.to_array(tensor).tolist() == [17]
        assert part.SerializeToString(deterministic=True) == before
        assert _with_constant(part, "another", 17) is None


def test_other_constants_are_left() -> None:
    part = _part().proto
    part.graph.initializer.insert(0, numpy_helper.from_array(np.asarray([3]), "first"))
    part.graph.node.append(helper.make_node("Neg", ["first"], ["mlp/other"]))
    made = _with_constant(part, "mlp/heads/pattern_size", 17)
    assert made is not None
    assert [numpy_helper.to_array(each).tolist() for each in made.graph.initializer] == [[3], [17]]
    assert _with_constant(part, "mlp/other", 17) is None


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


@pytest.mark.parametrize(("longest", "slots"), [(4096, True), (4097, False)])
def test_very_long_sequences_are_not_tried(longest: int, slots: bool) -> None:
    found = list(variants(_claim(longest=longest), _part(), spread(_claim(longest=longest), _real(1, 17, 8))))
    assert [what for *_, what in found] == (["on 4096 tokens"] if slots else [])


@pytest.mark.parametrize(
    "feeds", [{}, {"y": np.zeros((1, 17, 8), np.float32)}, {"x": np.zeros((1, 17, 8)), "n": np.ones(1)}]
)
def test_only_what_the_block_reads_is_varied(feeds: dict[str, np.ndarray]) -> None:
    """Neither where something else is given nor where more is, such as shapes."""
    assert spread(_claim(), [feeds]) == []
    assert not list(variants(_claim(longest=9), _part(), [Case("other", feeds)]))

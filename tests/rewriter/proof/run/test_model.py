"""A model that is loaded as a whole is evaluated in float64 with a part of its weights in memory."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter.files.load import load_model
from rewriter.graph.segments import bytes_of
from rewriter.ort.sessions import open_session
from rewriter.proof.claims import Side
from rewriter.proof.distance import gap, largest
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.generate import make_cases
from rewriter.proof.reference.late_widening import open_wide
from rewriter.proof.run.model import run_model
from rewriter.proof.run.whole import Wanted, Way, run_whole, within
from tests.committed import FOLDER

LIMIT = 20_000
WAYS = (Way("cpu", optimise=False), Way("cpu", optimise=True))


def quiet(_what: str, _done: int, _total: int) -> None:
    """No progress."""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of weights of each part that is evaluated in float64."""
    found: list[int] = []

    def watched(part: Any, *arguments: Any) -> Any:
        found.append(sum(bytes_of(tensor) for tensor in part.proto.graph.initializer))
        return open_wide(part, *arguments)

    monkeypatch.setattr("rewriter.proof.run.segmented.open_wide", watched)
    monkeypatch.setattr("rewriter.proof.run.model.WIDE_SEGMENT", LIMIT)
    return found


@pytest.mark.parametrize("file", ["silu-decoder.onnx", "gelu-encoder.onnx"])
def test_same_as_the_whole_in_segments(file: str, held: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        opened.append(1)
        return open_session(*arguments, **options)

    side = Side.of(load_model(FOLDER / file, mapped=True))
    cases = make_cases(side.model.proto)[:3]
    wanted = Wanted(WAYS, wide=True, may_refuse=True)
    whole = run_whole(side, cases, wanted, quiet)
    monkeypatch.setattr("rewriter.proof.run.whole.open_session", counted)
    found = run_model(side, cases, wanted, quiet, by_blocks=False)
    assert (len(opened), found.segments) == (len(WAYS), 1)  # each way loads the model once, as a whole
    assert len(held) > 5
    largest_weight = max(bytes_of(tensor) for tensor in side.model.proto.graph.initializer)
    assert max(held) <= max(LIMIT, largest_weight)
    assert found.truth is not None
    assert whole.truth is not None
    assert found.ways.keys() == whole.ways.keys()
    for one, other in zip(found.truth, whole.truth, strict=True):
        assert max(largest(gap(one[name], other[name])) for name in other) < 1e-13


def test_small_models_are_evaluated_at_once(held: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.proof.run.model.WIDE_SEGMENT", 10**6)
    side = Side.of(load_model(FOLDER / "silu-decoder.onnx"))
    assert run_model(side, make_cases(side.model.proto)[:1], Wanted(wide=True), quiet, by_blocks=False).truth
    assert held == []


def test_a_default_that_a_case_replaces_is_fed(held: list[int]) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[n] x, float[1] b = {1}) => (float[n] y) { y = Add(x, b) }"""
    )
    model.graph.doc_string = "x" * 2 * LIMIT
    side = Side.of(load_model(model))
    case = Case("own", {"x": np.ones(2, np.float32), "b": np.asarray([2.0], np.float32)})
    runs = run_model(side, [case], Wanted(WAYS, wide=True), quiet, by_blocks=False)
    assert runs.truth is not None
    np.testing.assert_array_equal(runs.truth[0]["y"], [3.0, 3.0])
    assert held == []


def test_progress_of_a_part_never_goes_back() -> None:
    told: list[tuple[str, int, int]] = []
    part = within(lambda *step: told.append(step), 0.2, 0.6)
    for done in (0, 5, 10, 2, 10):
        part("working", done, 10)
    assert told == [("working", done, 1000) for done in (200, 400, 600, 600, 600)]
    inner = within(part, 0.5, 1.0)
    inner("inside", 1, 1)
    assert told[-1] == ("inside", 600, 1000)


def test_one_session_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        assert all(reference() is None for reference in alive)
        session = open_session(*arguments, **options)
        alive.append(weakref.ref(session))
        return session

    monkeypatch.setattr("rewriter.proof.run.whole.open_session", watched)
    side = Side.of(load_model(FOLDER / "silu-decoder.onnx"))
    run_whole(side, make_cases(side.model.proto)[:1], Wanted(WAYS), quiet)
    assert len(alive) == len(WAYS)

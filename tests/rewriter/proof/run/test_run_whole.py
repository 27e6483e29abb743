"""Models that are run as a whole."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter.files.load import load_model
from rewriter.ort.sessions import open_session
from rewriter.proof.claims import Side
from rewriter.proof.inputs.cases import Case, make_cases
from rewriter.proof.run.segmented import run_model
from rewriter.proof.run.whole import Wanted, Way, run_whole
from tests.committed import FOLDER

WAYS = (Way("cpu", optimise=False), Way("cpu", optimise=True))


def quiet(_what: str, _done: int, _total: int) -> None:
    """No progress."""


def test_a_default_that_a_case_replaces_is_fed() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[n] x, float[1] b = {1}) => (float[n] y) { y = Add(x, b) }"""
    )
    side = Side.of(load_model(model))
    case = Case("own", {"x": np.ones(2, np.float32), "b": np.asarray([2.0], np.float32)})
    runs = run_model(side, [case], Wanted(WAYS, wide=True), quiet, by_blocks=False)
    assert runs.truth is not None
    np.testing.assert_array_equal(runs.truth[0]["y"], [3.0, 3.0])


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

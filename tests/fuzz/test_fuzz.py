"""Damaged models end with a message, never with an unforeseen exception: a few trials, and every case that did once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import onnx
import pytest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from rewriter.errors import ExitStatus
from tests.conftest import slow
from tests.fuzz.__main__ import case
from tests.fuzz.guided import key_of, mutated, run_guided, way_of
from tests.fuzz.seeds import small
from tests.fuzz.trial import UNSOUND, WAYS, Outcome, a_way, tried, unproved

CASES = sorted((Path(__file__).parent / "cases").glob("*.onnx"))


@slow
@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_cases_that_were_mended(path: Path, tmp_path: Path) -> None:
    for way in WAYS:
        outcome = tried(path.read_bytes(), unproved(way), tmp_path)
        assert not outcome.finding, (way, outcome.message)


def test_some_trials(tmp_path: Path) -> None:
    statuses = set()
    for number in range(40):
        data, rng = case(2026, number)
        outcome = tried(data, unproved(a_way(rng)), tmp_path)
        assert not outcome.finding, (number, outcome.message)
        statuses.add(outcome.status)
    # Damage must neither be so little that all is well nor so much that nothing is loaded.
    assert {ExitStatus.CONVERTED, ExitStatus.NOTHING_TO_CONVERT, ExitStatus.BAD_MODEL} <= statuses


def test_unforeseen_exceptions_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr("tests.fuzz.trial.rewrite", broken)
    outcome = tried(b"x", WAYS[0], tmp_path)
    assert outcome.finding
    assert outcome.message.startswith("KeyError: 'x' in [")
    assert Outcome(UNSOUND).finding
    assert not Outcome(int(ExitStatus.BAD_MODEL)).finding


def test_what_guided_fuzzing_makes_of_an_input() -> None:
    data = small()[0].SerializeToString()
    calls: list[int] = []

    def blindly(given: bytes, largest: int) -> bytes:
        calls.append(largest)
        return given[:3]

    made = [mutated(data, 2**16, seed, blindly) for seed in range(60)]
    assert 5 < len(calls) < 40
    models = [each for each in made if len(each) > 3]
    assert len({*models}) > 20
    assert sum(_is_model(each) for each in models) > 20
    # What is no model, or grows too large, is changed as bytes.
    assert {mutated(b"\xff" * 9, 2**16, seed, blindly) for seed in range(9)} == {b"\xff" * 3}
    assert all(len(mutated(data, 100, seed, blindly)) <= 100 for seed in range(9))
    # An input that was kept is tried in the same way again, and all ways are tried.
    assert [way_of(each) for each in made] == [way_of(each) for each in made]
    assert {way_of(each)["command"] for each in made} == {"rewrite", "inspect", "heads"}


def test_kinds_of_findings() -> None:
    one = key_of(Outcome(70, "KeyError: 'x' in ['plan.py:3 f', 'view.py:9 g']"))
    assert one == key_of(Outcome(70, "KeyError: 'y' in ['plan.py:3 f', 'view.py:9 g']"))
    assert one != key_of(Outcome(70, "KeyError: 'x' in ['plan.py:3 f', 'view.py:8 g']"))
    assert one != key_of(Outcome(70, "TypeError: 'x' in ['plan.py:3 f', 'view.py:9 g']"))
    unsound = [key_of(Outcome(UNSOUND, f"_UnsoundError: node '{name}' has no inputs in []")) for name in "ab"]
    assert unsound[0] == unsound[1] != key_of(Outcome(UNSOUND, "_UnsoundError: node 'a' has no outputs in []"))


def test_without_atheris(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match=r"pip install 'attnonly\[fuzz\]'"):
        run_guided(1.0, 0, tmp_path, print)


@slow
def test_guided_fuzzing(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed")
    said: list[str] = []
    assert run_guided(0.5, 0, tmp_path, said.append) == 0, said
    assert "by exit status 0: " in said[-2]


def _is_model(data: bytes) -> bool:
    try:
        return bool(onnx.ModelProto.FromString(data).graph.node)
    except DecodeError:
        return False

"""Damaged models end with a message, never with an unforeseen exception: a few trials, and every case that did once."""

from pathlib import Path

import pytest

from rewriter.errors import ExitStatus
from tools.fuzz.__main__ import case
from tools.fuzz.trial import WAYS, a_way, tried, unproved

CASES = sorted((Path(__file__).parent / "cases").glob("*.onnx"))


@pytest.mark.sample(0)
@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_cases_that_were_mended(path: Path, tmp_path: Path) -> None:
    for way in WAYS:
        outcome = tried(path.read_bytes(), unproved(way), tmp_path)
        assert not outcome.finding, (way, outcome.message)


@pytest.mark.slow
def test_some_trials(tmp_path: Path) -> None:
    statuses = set()
    for number in range(40):
        data, rng = case(2026, number)
        outcome = tried(data, unproved(a_way(rng)), tmp_path)
        assert not outcome.finding, (number, outcome.message)
        statuses.add(outcome.status)
    # Damage must neither be so little that all is well nor so much that nothing is loaded.
    assert {ExitStatus.CONVERTED, ExitStatus.NOTHING_TO_CONVERT, ExitStatus.BAD_MODEL} <= statuses

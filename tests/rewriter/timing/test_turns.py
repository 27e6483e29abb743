"""Turns: their order, which runs count, and processes that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter.errors import ValidationError
from rewriter.timing.measure import Start, Turn, all_started, measure, ratio, rounds, started, take
from tests.textmodels import SILU, mlp

X = np.ones((1, 3, 4), np.float32)


def test_every_model_has_one_turn_a_round_in_changing_order() -> None:
    orders = ["".join(order) for order in rounds("abc", 6)]
    assert sorted(orders) == ["abc", "acb", "bac", "bca", "cab", "cba"]
    assert orders[1] == orders[0][::-1]
    assert ["".join(order) for order in rounds("ab", 5)] == ["ab", "ba", "ba", "ab", "ab"]
    assert all(sorted(order) == list("abcdefgh") for order in rounds("abcdefgh", 20))


def test_ratio_is_taken_within_rounds() -> None:
    found = ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])
    assert (found.of_medians, found.paired, found.low, found.high, found.of_fastest) == (2.0, 2.0, 2.0, 2.0, 2.0)
    drifting = ratio([3.0, 30.0, 1.0], [1.0, 10.0, 1.0])
    assert (drifting.of_medians, drifting.paired, drifting.low, drifting.of_fastest) == (3.0, 3.0, 2.0, 1.0)


class Clock:
    """Time that passes only in runs, a second each."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, _feeds: Any) -> None:
        self.now += 1.0


@pytest.mark.parametrize(
    ("turn", "runs", "counted"),
    [
        (Turn(None, 3.0), 3, 3),
        (Turn(None, 3.0, warm=1.5), 3, 1),
        (Turn(None, 0.5, warm=0.1), 1, 1),
        (Turn(None, 0.0, runs=4), 4, 4),
    ],
)
def test_runs_that_count(turn: Turn, runs: int, counted: int) -> None:
    """A turn goes on until its time is up; runs at its start do not count, unless there is no other."""
    clock: Any = Clock()
    assert take(clock, {}, turn, clock) == [1.0] * counted
    assert clock.now == runs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(mlp(SILU), path)
    return path


def test_models_in_processes(model: Path) -> None:
    done: list[int] = []
    starts = {"file": Start(model, "cpu", 1), "bytes": Start(model.read_bytes(), "cpu", 1)}
    with all_started(starts) as processes:
        children = [process.child for process in processes.values()]
        found = measure(processes, {"x": X}, 3, done.append, seconds=0.0)
        assert len({child.pid for child in children}) == 2
    assert done == [1, 2, 3]
    assert {name: len(seconds) for name, seconds in found.items()} == {"file": 3, "bytes": 3}
    assert all(each > 0.0 for seconds in found.values() for each in seconds)
    assert all(child.poll() is not None for child in children), "no process is left"
    for process in processes.values():
        assert process.loaded["load_seconds"] > 0.0
        assert process.loaded["cpu_nodes"] == []
        assert process.peak_bytes is None or process.peak_bytes >= 0


def test_a_model_that_does_not_load(tmp_path: Path) -> None:
    with (
        pytest.raises(ValidationError, match=r"^broken: onnxruntime could not load the model: "),
        started("broken", Start(b"not a model", "cpu", 1)),
    ):
        pass


def test_inputs_that_do_not_fit(model: Path) -> None:
    expected = pytest.raises(ValidationError, match=r"^mine: onnxruntime could not run the model: ")
    with started("mine", Start(model, "cpu", 1)) as process, expected:
        process.turn(Turn({"x": X[..., :2]}, 0.0))


def test_a_process_that_dies(model: Path) -> None:
    with started("mine", Start(model, "cpu", 1)) as process:
        process.child.kill()
        process.child.wait()
        with pytest.raises(ValidationError, match=r"^mine: its process was ended by SIGKILL"):
            process.turn(Turn({"x": X}, 0.0))

"""Turns: their order, which runs count, and processes that fail."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.timing import measure, ratio, rounds, started, take
from rewriter.errors import ValidationError
from tests.counting import Clock
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


@pytest.mark.parametrize(("seconds", "runs"), [(3.0, 3), (0.5, 1), (0.0, 1)])
def test_a_turn_goes_on_until_its_time_is_up(seconds: float, runs: int) -> None:
    clock: Any = Clock()
    assert take(clock, {}, seconds, clock) == 1.0
    assert clock.now == 1000.0 + runs


def test_runs_at_the_start_of_a_turn_do_not_count() -> None:
    clock: Any = Clock()
    took = iter([5.0, *[1.0] * 9])
    clock.run = lambda _feeds: setattr(clock, "now", clock.now + next(took))
    assert take(clock, {}, 5.5, clock) == 1.0, "of 5 and 1 seconds the first began within the first fifth"


def test_models_in_processes(tmp_path: Path) -> None:
    path, done = tmp_path / "model.onnx", list[tuple[int, int]]()
    onnx.save(mlp(SILU), path)
    with started({"file": path, "proto": mlp(SILU)}, "cpu", 1) as processes:
        children = [process.child for process in processes.values()]
        found = measure(processes, {"x": X}, 3, lambda *each: done.append(each), seconds=0.0)
        assert len({child.pid for child in children}) == 2
        for process in processes.values():
            assert process.known["load_seconds"] > 0.0
            assert process.known["cpu_nodes"] == []
            assert process.known["peak_bytes"] is None or process.known["peak_bytes"] >= 0
        with pytest.raises(ValidationError, match=r"^file: onnxruntime could not run the model: "):
            processes["file"].turn({"x": X[..., :2]}, 0.0)
        processes["proto"].child.kill()
        processes["proto"].child.wait()
        with pytest.raises(ValidationError, match=r"^proto: its process was ended by SIGKILL"):
            processes["proto"].turn({"x": X}, 0.0)
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert {name: len(seconds) for name, seconds in found.items()} == {"file": 3, "proto": 3}
    assert all(each > 0.0 for seconds in found.values() for each in seconds)
    assert all(child.poll() is not None for child in children), "no process is left"
    path.write_bytes(b"not a model")
    expected = pytest.raises(ValidationError, match=r"^broken: onnxruntime could not load the model: ")
    with expected, started({"broken": path}, "cpu", 1):
        pass

"""Time by kind of node: reading onnxruntime's profile, and which nodes are those of the blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.kinds import OTHERS, Node, kind_times, nodes_of, read_profile
from rewriter import rewrite
from tests.textmodels import SILU, mlp


def event(name: str, kind: str, microseconds: int, **other: Any) -> dict[str, Any]:
    return {"cat": "Node", "name": name, "dur": microseconds, "args": {"op_name": kind, "provider": "P"}, **other}


def test_medians_of_the_runs_that_count() -> None:
    times = [900, 1, 3, 2]
    events = [event("a_kernel_time", "Add", each) for each in times]
    events += [event("a_fence_before", "Add", 50), {"cat": "Session", "name": "run_kernel_time", "dur": 1, "args": {}}]
    found = read_profile(json.dumps(events), skip=1)
    assert list(found) == ["a"]
    assert (found["a"].kind, found["a"].provider) == ("Add", "P")
    assert found["a"].seconds == pytest.approx(2e-6)


def test_nodes_that_both_models_have_are_others() -> None:
    original = {"first": Node("MatMul", "P", 4.0), "act": Node("Gelu", "P", 1.0)}
    heads = {"first": Node("MatMul", "P", 4.0), "h": Node("Exp", "P", 3.0), "i": Node("Exp", "P", 1.0)}
    heads["Add_12"] = Node("Add", "P", 2.0)
    (act, rest) = kind_times("a", original, [heads])
    assert (act.kind, act.nodes, act.milliseconds, act.share) == ("Gelu", 1, 1e3, 0.2)
    assert (rest.kind, rest.share) == (OTHERS, 0.8)
    rows = kind_times("b", heads, [original])
    assert [(row.kind, row.nodes, row.share) for row in rows] == [("Exp", 2, 0.4), (OTHERS, 2, 0.6)]


def test_the_nodes_of_a_converted_block(tmp_path: Path) -> None:
    original, heads = tmp_path / "a.onnx", tmp_path / "b.onnx"
    model = mlp(SILU)
    for number, node in enumerate(model.graph.node):
        node.name = f"node {number}"
    onnx.save(model, original)
    rewrite(original, heads, validate=False)
    feeds = {"x": np.ones((1, 3, 4), np.float32)}
    a, b = (nodes_of(path, "cpu", feeds, 1) for path in (original, heads))
    assert {row.kind for row in kind_times("b", b, [a])} >= {"Exp", "Div", OTHERS}
    assert "Exp" not in {row.kind for row in kind_times("a", a, [b])}
    assert all(node.provider == "CPUExecutionProvider" for node in (*a.values(), *b.values()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "b.onnx"], "the profile is gone"

"""Files of the coverage matrix: kept in a folder, and decoders merged as optimum merges them; without PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime

from models.tools.merged import CONDITION, merge_decoders

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'
FIRST = f"""{HEADER} first (float[N, 2] x) => (float[N, 2] y, float[N, 2] present, float[N, 2] kept)
<float[2, 2] w = {{1, 2, 3, 4}}> {{
    t = MatMul(x, w) y = Relu(t) present = Neg(t) kept = Abs(x)
}}"""
PAST = f"""{HEADER} past (float[N, 2] x, float[N, 2] key) => (float[N, 2] y, float[N, 2] present)
<float[2, 2] w = {{1, 2, 3, 4}}, float[2, 2] v = {{0, 1, 1, 0}}> {{
    t = MatMul(x, w) u = MatMul(key, v) present = Sub(u, t) y = Add(u, t)
}}"""


def test_merged_decoders_are_both_decoders() -> None:
    first, past = onnx.parser.parse_model(FIRST), onnx.parser.parse_model(PAST)
    merged = merge_decoders(onnx.parser.parse_model(FIRST), onnx.parser.parse_model(PAST))
    onnx.checker.check_model(merged, full_check=True)
    assert [tensor.name for tensor in merged.graph.initializer] == ["w_merged_0", "v_merged_0"]
    (branch,) = merged.graph.node
    for attribute in branch.attribute:  # the names shadow
        assert [value.name for value in attribute.g.output] == list(branch.output)
    feeds = {"x": np.array([[1, -2]], np.float32), "key": np.array([[3, 5]], np.float32)}
    for with_past, alone in ((False, first), (True, past)):
        found = _run(merged, {**feeds, CONDITION: np.array([with_past])})
        names = [value.name for value in alone.graph.input]
        expected = _run(alone, {name: feeds[name] for name in names})
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)
    assert found["kept"].shape == (0, 2)


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))

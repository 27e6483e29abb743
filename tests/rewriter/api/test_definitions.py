"""Operators that onnxruntime has no kernel for, and that ONNX defines by others."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import ExitStatus, rewrite, validate
from rewriter.errors import ValidationError
from rewriter.graph.walk import iter_nodes
from rewriter.ort import load_onnxruntime, open_session
from tests.changes import change_values, copied
from tests.textmodels import FIRST, mlp, text_model

SWISH, SWIGLU = "Swish(25)", "SwiGLU(28)"
GATED = f"{FIRST} u = MatMul(x, V1)"
MODELS = {
    SWISH: mlp("h = Swish<alpha = 1.5>(y)", opset=25, ir=11),
    SWIGLU: mlp("h = SwiGLU(y, u)", first=GATED, opset=28, ir=11),
}
X = np.array([1, -2], np.float32)


@pytest.mark.parametrize("operator", MODELS)
def test_rewriting_repairs_a_model_that_does_not_run(operator: str) -> None:
    report = rewrite(MODELS[operator])
    assert (report.exit_status, len(report.converted)) == (ExitStatus.CONVERTED, 1), report.problems
    validation = report.validation
    note = f"onnxruntime has no kernel for {operator}; run by its definition; the rewritten model runs"
    assert (validation.certified, validation.notes) == (True, (note,))
    assert validation.providers["cpu"].error_ratio is not None  # it has a float64 form as well
    assert not open_session(report.rewritten).defined


@pytest.mark.sample(0)
@pytest.mark.parametrize("operator", MODELS)
def test_a_planted_error_is_refused(operator: str) -> None:
    made = rewrite(MODELS[operator], validate=False).rewritten
    for node in iter_nodes([node for function in made.functions for node in function.node]):
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value_float":
                attribute.f *= 1.001
            elif attribute.t.data_type == onnx.TensorProto.FLOAT:
                change_values(attribute.t, "v *= 1.001")
    found = validate(MODELS[operator], made)
    assert (found.exit_status, found.validation.certified) == (ExitStatus.VALIDATION_FAILED, False)


def test_what_the_rewritten_model_keeps_is_said() -> None:
    model = mlp("h = Swish(y)", second="o = MatMul(h, W2) out = Swish(o)", opset=25, ir=11)
    validation = rewrite(model).validation
    note = f"onnxruntime has no kernel for {SWISH}; run by its definition; the rewritten model has it too"
    assert (validation.passed, validation.notes) == (True, (note,))


def test_files_with_external_data(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(copied(MODELS[SWISH]), path, save_as_external_data=True, location="data", size_threshold=0)
    session = open_session(path)
    assert session.defined == (SWISH,)
    x = np.ones((1, 2, 4), np.float32)
    np.testing.assert_array_equal(session.run({"x": x})["out"], open_session(MODELS[SWISH]).run({"x": x})["out"])


CALLED = '<domain: "d", opset_import: ["": {}]> f (x) => (y) {{ y = Swish(x) }}'
BODIES = (
    "out = If(c) <then_branch = a () => (float[2] p) { p = Swish(x) },"
    " else_branch = b () => (float[2] q) { q = Neg(x) }>"
)


def test_bodies_and_local_functions() -> None:
    options: dict[str, Any] = {"inputs": "float[2] x", "outputs": "float[2] out", "opset": 25, "ir": 11}
    inside = open_session(text_model(BODIES, **{**options, "inputs": "float[2] x, bool c"}))
    called = open_session(text_model("out = d.f(x)", domains={"d": 1}, functions=CALLED.format(25), **options))
    wanted = X / (1 + np.exp(-X))
    for session, feeds in ((inside, {"x": X, "c": np.array(True)}), (called, {"x": X})):
        assert session.defined == (SWISH,)
        np.testing.assert_allclose(session.run(feeds)["out"], wanted, rtol=1e-6)
    # What cannot be inlined, and what has no definition, stays an error.
    other: dict[str, Any] = {"domains": {"d": 1}, "functions": CALLED.format(24)}
    for text, more in (("out = d.f(x)", other), ("out = Erf(x)", {"elem": "double"})):
        with pytest.raises(ValidationError, match="NOT_IMPLEMENTED"):
            open_session(text_model(text, **{**options, **more}))


def test_cuda_says_otherwise_that_it_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    ort = load_onnxruntime()
    opened, errors = ort.InferenceSession, [RuntimeError("Provider type for Swish node with name '' is not set.")]

    def refusing(*given: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return opened(*given, **options)

    monkeypatch.setattr(ort, "InferenceSession", refusing)
    assert open_session(MODELS[SWISH]).defined == (SWISH,)

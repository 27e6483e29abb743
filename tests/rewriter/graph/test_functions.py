"""Local functions inlined as onnxruntime runs them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from rewriter.files.load import load_model
from rewriter.graph.functions import inlined
from rewriter.ort.sessions import open_session
from rewriter.proof.certificate.certify import certify

X = np.array([[0.5, -1.5, 0.25]], np.float32)
HEAD = '<domain: "local", opset_import: ["": 17, "local": 1]>'
LEAKY = f"{HEAD} f <alpha: float = 0.9> (a) => (b) {{ b = LeakyRelu<alpha = @alpha>(a) }}"
OUTER = f"{HEAD} g (a) => (b) {{ b = local.f(a) }} {LEAKY}"
PASSED_ON = f"{HEAD} g <alpha: float = 0.4> (a) => (b) {{ b = local.f<alpha = @alpha>(a) }} {LEAKY}"
MAYBE = f"{HEAD} g <alpha> (a) => (b) {{ b = local.f<alpha = @alpha>(a) }} {LEAKY}"
BODY = (
    f"{HEAD} g (a) => (b) {{ t = Constant<value = bool {{1}}>() b = If(t) <then_branch = p () => (float[1, 3] r) "
    f"{{ r = local.f(a) }}, else_branch = q () => (float[1, 3] s) {{ s = Identity(a) }}> }} {LEAKY}"
)


def model(call: str, functions: str) -> onnx.ModelProto:
    versions = '<ir_version: 9, opset_import: ["": 17, "local": 1]>'
    return parser.parse_model(f"{versions} g (float[1, 3] x) => (float[1, 3] y) {{ {call} }} {functions}")


@pytest.mark.parametrize(
    ("call", "functions"),
    [
        ("y = local.f(x)", LEAKY),
        ("y = local.f<alpha = 0.3>(x)", LEAKY),
        ("z = local.f(x) y = local.f<alpha = 0.3>(z)", LEAKY),
        ("y = local.g(x)", OUTER),
        ("y = local.g(x)", PASSED_ON),
        ("y = local.g<alpha = 0.2>(x)", PASSED_ON),
        ("y = local.g(x)", BODY),
        ("y = local.g<alpha = 0.2>(x)", MAYBE),
    ],
)
@pytest.mark.parametrize("only", [None, [("local", "f"), ("local", "g")]])
def test_defaults_hold(call: str, functions: str, only: list[tuple[str, str]] | None) -> None:
    before = model(call, functions)
    stated = before.SerializeToString()
    if functions == MAYBE and only:
        with pytest.raises(RuntimeError, match="may be absent"):
            inlined(before, only)
        return
    after = inlined(before, only)
    assert before.SerializeToString() == stated
    assert bool(after.functions) is (functions == MAYBE)
    expected, made = (open_session(each, optimise=False).run({"x": X})["y"] for each in (before, after))
    np.testing.assert_array_equal(made, expected)


def test_another_default_is_another_function() -> None:
    before, after = model("y = local.g(x)", OUTER), model("y = local.g(x)", OUTER.replace("0.9", "0.5"))
    assert certify(load_model(before), load_model(before)).certified
    assert not certify(load_model(before), load_model(after)).certified

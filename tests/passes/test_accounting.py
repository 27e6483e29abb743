"""Heads, keys and patterns that the accounting states for each form."""

from typing import Any

import numpy as np
import onnx
import pytest

from passes.accounting import account
from passes.options import Options
from passes.plan import make_plan
from tests.textmodels import ERF_GELU, SILU, mlp, text_model

MICROSOFT, OWN = ({"domains": {name: 1}} for name in ("com.microsoft", "own"))
FUNCTION = '<domain: "own", opset_import: ["": 17]> f (a) => (b) {{ b = {} }}'
CALLING = """<domain: "own", opset_import: ["": 17, "own": 1]> f (a) => (b) {{ c = own.g(a) b = own.g(c) }}
<domain: "own", opset_import: ["": 17, "own": 1]> g (a) => (b) {{ b = own.h(a) }}
<domain: "own", opset_import: ["": 17]> h (a) => (b) {{ b = {} }}"""

COUNTS: dict[str, dict[str, tuple[tuple[int, ...], int, int]]] = {
    SILU: {
        "local": ((8,), 2, 8 * 100 * 2 * 4),
        "compact": ((8,), 2, 8 * 100 * 2 * 4),
        "masked": ((8,), 101, 8 * 101 * 101 * 4),
        "maskless": ((8,), 101, 8 * 101 * 101 * 4),
        # W1, one per neuron, and W2 together with the clearing of the hidden columns; d_head is 64.
        "staged": ((1, 8, 1), 101, 8 * 101 * 101 * 4),
        "whole": ((8,), 101, 8 * 101 * 101 * 4),
    },
    # GELU has 9 heads over 11 shared keys in form local, and float64 heads with 8 bias tokens in the others.
    ERF_GELU: {"local": ((72,), 11, 72 * 100 * 11 * 4), "masked": ((8,), 108, 8 * 108 * 108 * 8)},
}


@pytest.mark.parametrize("text", COUNTS, ids=["silu", "gelu"])
def test_heads_keys_and_patterns(text: str) -> None:
    (block,) = account(make_plan(mlp(text), Options()), tokens=100).blocks
    found = {each.form: (each.heads, each.keys, each.pattern_bytes) for each in block.forms}
    assert {form: found[form] for form in COUNTS[text]} == COUNTS[text]


def test_a_form_that_does_not_take_the_block_says_why() -> None:
    (block,) = account(make_plan(mlp(SILU, opset=10), Options())).blocks
    assert [each.form for each in block.forms] == ["local"]
    assert "needs opset 11" in dict(block.refused)["masked"]


@pytest.mark.parametrize(("text", "remaining", "options"), [
    *(
        (f"out = com.microsoft.{name}(x)", {f"com.microsoft::{name}": 1}, MICROSOFT)
        for name in ("MatMulNBitsMlp", "MatMulNBitsQkv", "FusedMatMulActivation", "BiasSplitGelu", "GatedRMSNorm",
                     "MoEPacked", "QMoE", "SwiGLU", "QLinearSigmoid", "NobodyKnows")
    ),
    ("out = other.MatMul(x)", {"other::MatMul": 1}, {"domains": {"other": 1}}),
    ("out = LinearAttention(x, x, x)", {"LinearAttention": 1}, {"opset": 27}),
    ('out = CausalConvWithState<activation = "silu">(x, w)', {"CausalConvWithState": 1}, {"opset": 27}),
    ('out = CausalConvWithState<activation = "none">(x, w)', {}, {"opset": 27}),
    ("a = RMSNormalization(x, w) out = TensorScatter(a, x)", {}, {"opset": 24}),
    ("out = SwiGLU(x, x)", {"SwiGLU": 1}, {"opset": 28}),
    ("out = TopK(x, k)", {"TopK": 1}, {}),
    ("s = Shape(x) f = Cast<to = 1>(s) l = Log(f) i = Cast<to = 7>(l) out = Reshape(x, i)", {}, {}),
    ("y = MatMul(x, W1) h = Sin(y) out = MatMul(h, W2)", {"activation f": 1}, {}),
    ("out = own.f(x)", {"own::f": 1}, {**OWN, "functions": FUNCTION.format("Mod<fmod = 1>(a, a)")}),
    ("out = own.f(x)", {}, {**OWN, "functions": FUNCTION.format("Add(a, a)")}),
    ("out = own.f(x)", {"own::f": 1}, {**OWN, "functions": CALLING.format("Mod<fmod = 1>(a, a)")}),
    ("out = own.f(x)", {}, {**OWN, "functions": CALLING.format("Add(a, a)")}),
])  # fmt: skip
def test_what_is_not_known_to_be_pure_is_counted(text: str, remaining: dict[str, int], options: dict[str, Any]) -> None:
    model = text_model(text, constants={"w": np.ones((4, 1, 3)), "k": onnx.numpy_helper.from_array(np.array([2]), "k")},
                       **options)  # fmt: skip
    assert account(make_plan(model, Options())).remaining == remaining

"""Blocks whose region changes its element type, or whose types inference cannot determine."""

import numpy as np
import onnx
import pytest

from passes.options import Options
from passes.plan import make_plan
from rewriter import ExitStatus, rewrite
from tests.cases import proved
from tests.errors import accurate, feeds_of
from tests.textmodels import ELEMENTS, SILU, mlp, tensor, values


def mixed(gate: str, out: str) -> onnx.ModelProto:
    """W1 in float32, the bias and SiLU between casts, W2 in another type."""
    casts = f"half = Cast<to = {ELEMENTS[gate]}>(m)", f"h = Cast<to = {ELEMENTS[out]}>(a)"
    return mlp(
        "s = Sigmoid(y) a = Mul(y, s) " + casts[1],
        first=f"m = MatMul(x, W1) {casts[0]} y = Add(half, b1)",
        second="out = MatMul(h, W2)",
        outputs=f"{out}[batch, tokens, 4] out",
        constants={"b1": tensor("b1", values("b1"), gate), "W2": tensor("W2", values("W2"), out)},
    )


@pytest.mark.parametrize("inline", [False, True], ids=["function", "inline"])
@pytest.mark.parametrize(
    ("gate", "out"),
    [
        pytest.param("float16", "float", id="half-inside"),
        pytest.param("float", "float16", id="half-after"),
        pytest.param("float", "double", id="double-after"),
        pytest.param("double", "float", id="double-inside"),
    ],
)
def test_casts_around_the_activation(gate: str, out: str, inline: bool) -> None:
    """Heads are computed in float32 or better; the largest error measured is 1.0 times the original's."""
    model = mixed(gate, out)
    accurate(model, make_plan(model, Options(inline=inline)), ratio=1.5)
    if (gate, out, inline) == ("float16", "float", False):
        assert rewrite(model).exit_status is ExitStatus.CONVERTED


def test_type_behind_an_operator_that_inference_does_not_know() -> None:
    """MatMulNBits stops onnx's inference; its scales have the type of the product. So has W1 behind an unknown one."""
    rng = np.random.default_rng(0)
    quantised = rng.integers(0, 255, (32, 1, 16)).astype(np.uint8)
    model = mlp(
        SILU,
        first="y = com.microsoft.MatMulNBits<K = 32, N = 32, bits = 4, block_size = 32>(x, B, scales)",
        second="out = MatMul(h, W2)",
        inputs="float[n, 32] x",
        outputs="float[n, 8] out",
        domains={"com.microsoft": 1},
        constants={
            "B": onnx.numpy_helper.from_array(quantised, "B"),
            "scales": np.full(32, 0.05),
            "W2": rng.normal(size=(32, 8)),
        },
    )
    report = proved(model)
    assert [row.first for row in report.converted] == ["MatMulNBits 32x32"]
    accurate(model, make_plan(model, Options()), cases=[feeds_of(model)])
    behind = mlp(SILU, first="u = acme.Norm(x) m = MatMul(u, W1) y = Add(m, b1)", domains={"acme": 1})
    assert make_plan(behind, Options()).conversions

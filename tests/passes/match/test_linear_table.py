"""Every entry of the table of linear operators: what each one reads of its node, and why it does not qualify."""

from typing import Any

import numpy as np
import pytest

from passes.match.linear import LINEAR_OPERATORS, LinearOperator, linear_operator
from rewriter.graph.constants import Constants
from rewriter.graph.view import Miss, all_views
from tests.textmodels import text_model

INPUTS = "float[batch, tokens, 4] x, float[batch, tokens, 4] z, float[4, tokens] t, float[batch, 4, n, m] image"
WEIGHTS: dict[str, Any] = {
    "w": np.zeros((4, 8)),
    "v": np.zeros((8, 4)),
    "b": np.zeros(8),
    "ones": np.zeros((1, 1, 4, 8)),
    "row": np.zeros(4),
    "k1": np.zeros((8, 4, 1)),
    "k11": np.zeros((8, 4, 1, 1)),
    "k13": np.zeros((8, 4, 1, 3)),
    "grouped": np.zeros((8, 2, 1, 1)),
}


def recognised(node: str, constants: dict[str, Any] | None = None) -> LinearOperator | Miss | None:
    """What the last node of a text is found to be."""
    model = text_model(
        f"{node} out = Identity(x)",
        inputs=INPUTS,
        constants={**WEIGHTS, **(constants or {})},
        domains={"com.microsoft": 1, "custom": 1},
    )
    view = all_views(model)[0]
    return linear_operator(view, Constants(view), len(view.nodes) - 2)


def operator(kind: str, data: str, weight: str, sizes: tuple[int | None, int | None], **given: Any) -> LinearOperator:
    return LinearOperator(given.pop("node", 0), "y", kind, data, weight, *sizes, **given)


OPERATORS: tuple[tuple[str, LinearOperator], ...] = (
    ("y = MatMul(x, w)", operator("MatMul", "x", "w", (4, 8))),
    ("y = ai.onnx.MatMul(x, w)", operator("MatMul", "x", "w", (4, 8))),
    ("y = MatMul(v, t)", operator("MatMul (W X)", "t", "v", (4, 8), transposed=True, axis=-2)),
    ("y = MatMul(x, ones)", operator("MatMul", "x", "ones", (4, 8))),
    ("y = MatMul(x, row)", operator("MatMul", "x", "row", (None, None))),
    ("y = Gemm(x, w, b)", operator("Gemm", "x", "w", (4, 8))),
    ("y = Gemm(x, w)", operator("Gemm", "x", "w", (4, 8))),
    ("y = Gemm(x, w, z)", operator("Gemm", "x", "w", (4, 8), added="z")),
    ("y = Gemm<transB = 1>(x, v, b)", operator("Gemm", "x", "v", (4, 8), transposed=True)),
    ("y = Gemm(v, t)", operator("Gemm (W X)", "t", "v", (4, 8), transposed=True, axis=-2)),
    ("y = Gemm<transA = 1>(w, t, z)", operator("Gemm (W X)", "t", "w", (4, 8), axis=-2, added="z")),
    ("y = com.microsoft.FusedGemm(x, w, b)", operator("FusedGemm", "x", "w", (4, 8))),
    ("y = com.microsoft.FusedMatMul(x, w)", operator("FusedMatMul", "x", "w", (4, 8))),
    ("y = com.microsoft.FusedMatMul<transB = 1>(x, v)", operator("FusedMatMul", "x", "v", (4, 8), transposed=True)),
    ("y = com.microsoft.FusedMatMul(v, t)", operator("FusedMatMul (W X)", "t", "v", (4, 8), transposed=True, axis=-2)),
    ("y = com.microsoft.TransposeMatMul(x, w)", operator("TransposeMatMul", "x", "w", (4, 8))),
    ('y = Einsum<equation = "bsd,df->bsf">(x, w)', operator("Einsum", "x", "w", (4, 8))),
    ('y = Einsum<equation = "fd,bds->bfs">(v, t)', operator("Einsum", "t", "v", (4, 8), transposed=True, axis=-2)),
    ("y = Conv(x, k1, b)", operator("Conv 1", "x", "k1", (4, 8), axis=-2)),
    ("y = Conv(image, k11)", operator("Conv 1x1", "image", "k11", (4, 8), axis=-3)),
    ("y = Conv(image, k13)", operator("Conv 1x3", "image", "k13", (4, 8), axis=-3, rowwise=False)),
    ("y = Conv<strides = [1, 1], pads = [0, 0, 0, 0]>(image, k11)",
     operator("Conv 1x1", "image", "k11", (4, 8), axis=-3)),
    ("y = Conv<strides = [1, 2]>(image, k11)",
     operator("Conv 1x1", "image", "k11", (4, 8), axis=-3, rowwise=False)),
    ("y = Conv<pads = [0, 0, 1, 0]>(image, k11)",
     operator("Conv 1x1", "image", "k11", (4, 8), axis=-3, rowwise=False)),
    ("y = Conv<group = 2>(image, grouped)",
     operator("Conv 1x1, 2 groups", "image", "grouped", (4, 8), axis=-3)),
    ("y = com.microsoft.FusedConv(image, k11, b)", operator("Conv 1x1", "image", "k11", (4, 8), axis=-3)),
    ("y = MatMulInteger(x, w)", operator("MatMulInteger", "x", "w", (4, 8))),
    ("y = QLinearMatMul(x, b, b, w, b, b, b, b)", operator("QLinearMatMul", "x", "w", (4, 8))),
    ("y = QLinearMatMul(v, b, b, t, b, b, b, b)",
     operator("QLinearMatMul (W X)", "t", "v", (4, 8), transposed=True, axis=-2)),
    ("y = QLinearConv(image, b, b, k11, b, b, b, b, b)", operator("Conv 1x1", "image", "k11", (4, 8), axis=-3)),
    ("y = com.microsoft.QGemm<transB = 1>(x, b, b, v, b, b)", operator("QGemm", "x", "v", (4, 8), transposed=True)),
    ("y = com.microsoft.QGemm(x, b, b, w, b, b)", operator("QGemm", "x", "w", (4, 8))),
    ("y = com.microsoft.MatMulNBits<K = 12, N = 20>(x, b, b)", operator("MatMulNBits", "x", "b", (12, 20))),
    ("y = com.microsoft.MatMulNBits<K = 12>(x, b, b)", operator("MatMulNBits", "x", "b", (None, None))),
    ("y = com.microsoft.MatMulNBits<N = 12>(x, w, b)", operator("MatMulNBits", "x", "w", (4, 8))),
    ("y = com.microsoft.MatMulBnb4<K = 4, N = 8>(x, b, b)", operator("MatMulBnb4", "x", "b", (4, 8))),
    ("y = com.microsoft.MatMulFpQ4(x, w, b)", operator("MatMulFpQ4", "x", "w", (4, 8))),
    ("y = com.microsoft.DynamicQuantizeMatMul(x, w, b)", operator("DynamicQuantizeMatMul", "x", "w", (4, 8))),
    ("y = com.microsoft.MatMulIntegerToFloat(x, w, b, b)", operator("MatMulIntegerToFloat", "x", "w", (4, 8))),
    # A weight may come from an operator that type inference does not know.
    ("w2 = custom.Decode(w) y = MatMul(x, w2)", operator("MatMul", "x", "w2", (None, None), node=1)),
    ("w2 = custom.Decode(w) y = Conv(image, w2)",
     operator("Conv ?", "image", "w2", (None, None), node=1, rowwise=False)),
    ("w2 = Transpose(w) y = MatMul(x, w2)", operator("MatMul", "x", "w2", (8, 4), node=1)),
)  # fmt: skip


@pytest.mark.parametrize(("node", "expected"), OPERATORS)
def test_operators(node: str, expected: LinearOperator) -> None:
    assert recognised(node) == expected


def test_every_operator_is_tried() -> None:
    tried = {node.partition(" = ")[2].partition("(")[0].partition("<")[0] for node, _ in OPERATORS}
    assert {f"{domain}.{name}".removeprefix(".") for domain, name in LINEAR_OPERATORS} <= tried


NEITHER = "neither factor is constant"
TURNED = "the data factor is transposed, so input and output lie on different axes"
FUSED = "it is fused with a sum or an unknown activation"


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("y = MatMul(x, z)", NEITHER),
        ("y = Gemm(x, z)", NEITHER),
        ("y = Gemm<transA = 1>(t, w)", TURNED),
        ("y = Gemm<transB = 1>(v, x)", TURNED),
        ('y = com.microsoft.FusedGemm<activation = "Unheard">(x, w)', "it is fused with an unknown activation"),
        ("y = com.microsoft.FusedMatMul(x, z)", NEITHER),
        ("y = com.microsoft.FusedMatMul<transA = 1>(x, w)", TURNED),
        ("y = com.microsoft.FusedMatMul<transBatchA = 1>(x, w)", TURNED),
        ("y = com.microsoft.FusedMatMul<transBatchB = 1>(x, w)", TURNED),
        ('y = Einsum<equation = "bsd,btd->bst">(x, z)', "it does not multiply data with one constant weight"),
        ('y = Einsum<equation = "bsd,df,f->bsf">(x, w, b)', "it does not multiply data with one constant weight"),
        ('y = Einsum<equation = "bsd,df->sbf">(x, w)',
         "'bsd,df->sbf' is not the product of a matrix with one axis of the data"),
        ("y = Einsum(x, w)", "'' is not the product of a matrix with one axis of the data"),
        ("y = Conv(image, image)", "the kernel is not constant"),
        ("y = Conv(image, k11, z)", "the bias is not constant"),
        ('y = com.microsoft.FusedConv<activation = "Unheard">(image, k11)', FUSED),
        ("y = com.microsoft.FusedConv(image, k11, b, image)", FUSED),
        ("y = Conv(x, w)", "the kernel has no axis of positions"),
        ("y = MatMulInteger(x, z)", "the quantised weight is not constant"),
        ("y = QLinearMatMul(x, b, b, z, b, b, b, b)", "neither factor is constant"),
    ],
)  # fmt: skip
def test_reasons(node: str, reason: str) -> None:
    found = recognised(node)
    assert isinstance(found, Miss)
    assert (found.reason, found.kind) == (reason, "")
    assert found.node.endswith(" 'y'")


@pytest.mark.parametrize(
    "node",
    [
        "y = MatMul(w, v)",  # constants only
        "y = Gemm(w, v)",
        "y = com.microsoft.FusedMatMul(w, v)",
        'y = Einsum<equation = "de,ef->df">(w, v)',
        "y = MatMulInteger(v, w)",
        "y = Relu(x)",
        "y = custom.MatMul(x, w)",
        "y = FusedMatMul(x, w)",
    ],
)
def test_other_nodes(node: str) -> None:
    assert recognised(node) is None

"""The operators that onnxruntime computes in double when it is given double.

Each was measured: against onnx's definition in numpy, and for results that do not stick to float32 when the operands
change by less than that (tests/rewriter/proof/reference). Operators that onnxruntime takes apart into others, with
constants rounded to float32, are not among them (Gelu, Swish, Attention, GroupNormalization).
"""

from __future__ import annotations

from dataclasses import replace

import onnx

from rewriter.proof.reference.scope import Node

KERNELS = frozenset(
    """
    Abs Add AffineGrid And ArgMax ArgMin BatchNormalization BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor
    BlackmanWindow Cast CastLike Ceil CenterCropPad Clip Compress Concat ConstantOfShape Cos CumProd CumSum DFT
    DeformConv DepthToSpace Div Dropout Einsum Equal Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND
    Gemm Greater GreaterOrEqual GridSample HammingWindow HannWindow Identity IsInf IsNaN LayerNormalization LeakyRelu
    Less LessOrEqual Log LogSoftmax LpNormalization MatMul Max MaxPool Min Mod Mul Neg NonZero Not Or PRelu Pad Pow
    RMSNormalization Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin
    ReduceProd ReduceSum ReduceSumSquare Relu Reshape ReverseSequence RoiAlign Round STFT Scatter ScatterElements
    ScatterND Shape Sigmoid Sign Sin Size Slice Softmax SpaceToDepth Split Sqrt Squeeze Sub Sum Tanh TensorScatter Tile
    TopK Transpose Trilu Unique Unsqueeze Where Xor
    """.split()  # noqa: SIM905 - a list of 120 names reads better so
)
"""Operators of the default domain with a double kernel on the CPU, in some opset at least."""

_LATER = {"MaxPool": 8, "GridSample": 20}
"""Operators whose double kernel is of a later opset than their meaning."""

_MODES = {b"bilinear": b"linear", b"bicubic": b"cubic"}


def double_kernel(node: Node) -> Node | None:
    """The node as onnxruntime computes it in double, or None where it does not."""
    domain, name = node.key
    if domain or name not in KERNELS:
        return None
    if name == "LayerNormalization" and len(node.gives) > 1:
        return None  # mean and deviation are float32
    return _as_later(node, _LATER[name]) if node.opset < _LATER.get(name, 0) else node


def _as_later(node: Node, opset: int) -> Node:
    proto = onnx.NodeProto()
    proto.CopyFrom(node.proto)
    for attribute in proto.attribute:
        if attribute.s in _MODES:
            attribute.s = _MODES[attribute.s]
    return replace(node, proto=proto, opset=opset)

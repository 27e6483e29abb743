"""The operators that onnxruntime really computes in double when its operands are double.

Each was measured: its results agree with onnx's definition in numpy, and they follow changes of the operands below
float32's resolution (tests/rewriter/proof/reference). Operators that onnxruntime decomposes into others, with constants
rounded to float32, are excluded (Gelu, Swish, Attention, GroupNormalization).
"""

from __future__ import annotations

from dataclasses import replace

import onnx

from rewriter.graph.view import key_of, subgraphs
from rewriter.proof.reference.parts import Node

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
    """.split()  # noqa: SIM905 - more readable for 120 names
)
"""Operators of the default domain with a double kernel on the CPU in at least some opset."""

_LATER = {"MaxPool": 8, "GridSample": 20}
"""Operators whose double kernel appeared in a later opset, with the same semantics but for names of modes."""

_WITH_BODIES = {("", "If"), ("", "Loop"), ("", "Scan")}

_MODES = {b"bilinear": b"linear", b"bicubic": b"cubic"}


def double_kernel(node: Node) -> Node | None:
    """The node as onnxruntime computes it in double, or None if it does not."""
    name = node.proto.op_type
    if not _has_kernel(node.proto):
        return None
    return _as_later(node, _LATER[name]) if node.opset < _LATER.get(name, 0) else node


def _has_kernel(proto: onnx.NodeProto, inside: bool = False) -> bool:
    domain, name = key_of(proto)
    bodies = [graph for _, graph in subgraphs(proto)]
    if bodies:
        return (domain, name) in _WITH_BODIES and all(
            _has_kernel(inner, inside=True) for graph in bodies for inner in graph.node
        )
    if domain or (name not in KERNELS and not (inside and name == "Constant")) or (inside and name in _LATER):
        return False
    # onnxruntime gives the mean and the deviation in float32.
    return name != "LayerNormalization" or len([each for each in proto.output if each]) == 1


def _as_later(node: Node, opset: int) -> Node:
    proto = onnx.NodeProto()
    proto.CopyFrom(node.proto)
    for attribute in proto.attribute:
        if attribute.s in _MODES:
            attribute.s = _MODES[attribute.s]
    return replace(node, proto=proto, opset=opset)

"""Linear operators: which nodes apply a constant weight to one data input.

A node of a linear kind that does not qualify is a `Miss` with the reason. One table, `LINEAR_OPERATORS`, has an entry
per operator; adding one is one line and one function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import onnx

from rewriter.graph.constants import Constants
from rewriter.graph.view import ONNX_DOMAINS, GraphView, label


@dataclass(frozen=True)
class Miss:
    """Why something is not what it was tried as.

    Attributes:
        reason: words to act on.
        node: where it failed.
        kind: what later steps tell it by; `domain`: only the range of the pre-activations is missing.
    """

    reason: str
    node: str
    kind: Literal["", "domain"] = ""


@dataclass(frozen=True)
class LinearOperator:
    """A node that maps data linearly with a constant weight.

    Attributes:
        node: index of the node in its view.
        kind: the operator as reports print it, for example `MatMul` or `Conv 1x1`.
        data: name of the data input.
        weight: name of the weight, which is never read.
        output: name of the output.
        rowwise: whether the same map is applied to every token alone (false for a convolution with a
            spatial kernel): only such operators bound an MLP.
        axis: the axis of data and output that it maps, counted from the end: -1 for X W, -2 for W X and -rank + 1
            for a convolution.
        in_features: size of the input axis, None when unknown.
        out_features: size of the output axis, None when unknown.
        added: a tensor that is no constant and that the node adds to the product, such as a residual fused into a Gemm.
    """

    node: int
    kind: str
    data: str
    weight: str
    output: str
    rowwise: bool
    axis: int
    in_features: int | None
    out_features: int | None
    added: str = ""


Recognise = Callable[[GraphView, Constants, int], LinearOperator | Miss | None]


def linear_operator(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
    """Recognise the node at `index` as a linear operator; a Miss says which condition failed; None: another kind."""
    node = view.nodes[index]
    domain = "" if node.domain in ONNX_DOMAINS else node.domain
    recognise = LINEAR_OPERATORS.get((domain, node.op_type))
    return None if recognise is None else recognise(view, constants, index)


def _matmul(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
    node = view.nodes[index]
    left, right = node.input[0], node.input[1]
    if left in constants and right in constants:
        return None
    if left not in constants and right not in constants:
        return Miss("neither factor is constant", label(node))
    weight, data = (right, left) if right in constants else (left, right)
    shape = constants.shape(weight)
    if shape is not None and len(shape) > 2 and any(dim != 1 for dim in shape[:-2]):
        return Miss("the weight differs along a batch axis (grouped or per-expert weights)", label(node))
    features: Features = (shape[-2], shape[-1]) if shape is not None and len(shape) >= 2 else (None, None)
    if weight == right:
        return _operator(view, index, "MatMul", data, weight, features)
    return _operator(view, index, "MatMul (W X)", data, weight, features[::-1], axis=-2)


def _fused_matmul(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
    node = view.nodes[index]
    flags = _integers(node)
    left, right = node.input[0], node.input[1]
    if right not in constants or left in constants:
        return Miss("the second factor is not the constant one", label(node))
    if flags.get("transA") or flags.get("transBatchA") or flags.get("transBatchB"):
        return Miss("a transposed data factor, so the product mixes tokens", label(node))
    return _operator(view, index, "FusedMatMul", left, right, _matrix(constants, right, transposed=flags.get("transB")))


def _gemm(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
    node = view.nodes[index]
    flags = _integers(node)
    left, right = node.input[0], node.input[1]
    if left in constants and right in constants:
        return None
    if left not in constants and right not in constants:
        return Miss("neither factor is constant", label(node))
    bias = node.input[2] if len(node.input) > 2 else ""
    added = "" if bias in constants else bias
    if any(attribute.name == "activation" for attribute in node.attribute):
        return Miss("it is fused with an activation that is not known", label(node))
    if right in constants and not flags.get("transA"):
        features = _matrix(constants, right, transposed=flags.get("transB"))
        return replace(_operator(view, index, node.op_type, left, right, features), added=added)
    if left in constants and not flags.get("transB"):
        features = _matrix(constants, left, transposed=not flags.get("transA"))
        return replace(_operator(view, index, f"{node.op_type} (W X)", right, left, features, axis=-2), added=added)
    return Miss("the data factor is transposed, so input and output lie on different axes", label(node))


def _einsum(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
    node = view.nodes[index]
    held = [name for name in node.input if name in constants]
    if len(held) == len(node.input):
        return None
    if len(node.input) != 2 or not held:
        return Miss("it does not multiply data with one constant weight", label(node))
    equation = next((item.s.decode("ascii", "replace") for item in node.attribute if item.name == "equation"), "")
    read = einsum_map(equation, weight=list(node.input).index(held[0]))
    if read is None:
        return Miss(f"'{equation}' is not the product of a matrix with one axis of the data", label(node))
    features = _matrix(constants, held[0], transposed=read.transposed)
    data = next(name for name in node.input if name != held[0])
    return _operator(view, index, "Einsum", data, held[0], features, axis=read.axis)


@dataclass(frozen=True)
class EinsumMap:
    """A matrix applied to one axis by an Einsum.

    Attributes:
        axis: the axis of data and output, counted from the end.
        transposed: whether the matrix is [out, in].
    """

    axis: int
    transposed: bool


def einsum_map(equation: str, weight: int) -> EinsumMap | None:
    """Read `bsd,df->bsf` and the like; `weight` is the operand that holds the matrix. None for anything else."""
    left, arrow, output = equation.replace(" ", "").replace("...", ".").partition("->")
    operands = left.split(",")
    if not arrow or len(operands) != 2:
        return None
    matrix, data = operands[weight], operands[1 - weight]
    known = all(len(set(term)) == len(term) for term in (matrix, data, output))
    if not known or len(matrix) != 2 or "." in matrix or len(data) != len(output):
        return None
    shared, new = set(matrix) & set(data), set(matrix) - set(data)
    if len(shared) != 1 or len(new) != 1:
        return None
    (contracted,), (made,) = shared, new
    if contracted in output or data.replace(contracted, made) != output:
        return None
    axis = data.index(contracted) - len(data)
    if "." in data[axis:]:
        return None  # how many axes the dots stand for is not known here
    return EinsumMap(axis, transposed=matrix[0] == made)


def _conv(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
    node = view.nodes[index]
    if node.input[1] not in constants:
        return Miss("the kernel is not constant", label(node))
    if len(node.input) > 2 and node.input[2] and node.input[2] not in constants:
        return Miss("the bias is not constant", label(node))
    if any(attribute.name == "activation" for attribute in node.attribute) or len(node.input) > 3:
        return Miss("it is fused with an activation or a sum that is not known", label(node))
    shape = constants.shape(node.input[1])
    group = _integers(node).get("group", 1)
    pointwise = shape is not None and all(size == 1 for size in shape[2:])
    for attribute in node.attribute:
        neutral = {"strides": 1, "pads": 0}.get(attribute.name)
        if neutral is not None and any(value != neutral for value in attribute.ints):
            pointwise = False
    kernel = "x".join(str(size) for size in shape[2:]) if shape else "?"
    kind = f"Conv {kernel}" if group == 1 else f"Conv {kernel}, {group} groups"
    features: Features = (shape[1] * group, shape[0]) if shape else (None, None)
    axis = 1 - len(shape) if shape else -1
    return _operator(view, index, kind, node.input[0], node.input[1], features, rowwise=pointwise, axis=axis)


def _quantised(weight: int) -> Recognise:
    """Operators with a quantised constant weight at input `weight`, whose other inputs are scales and zero points."""

    def recognise(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
        node = view.nodes[index]
        data, name = node.input[0], node.input[weight]
        if name not in constants:
            return Miss("the quantised weight is not constant", label(node))
        if data in constants:
            return None
        sizes = _integers(node)
        features: Features = _matrix(constants, name)
        if "N" in sizes and "K" in sizes:
            features = (sizes["K"], sizes["N"])
        return _operator(view, index, node.op_type, data, name, features)

    return recognise


Features = tuple[int | None, int | None]


def _matrix(constants: Constants, weight: str, *, transposed: int | bool | None = False) -> Features:
    """Input and output features of a weight matrix, as far as they are known."""
    shape = constants.shape(weight)
    if shape is None or len(shape) < 2:
        return (None, None)
    return (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])


def _integers(node: onnx.NodeProto) -> dict[str, int]:
    return {attribute.name: attribute.i for attribute in node.attribute if attribute.type == onnx.AttributeProto.INT}


def _operator(
    view: GraphView,
    index: int,
    kind: str,
    data: str,
    weight: str,
    features: Features,
    *,
    rowwise: bool = True,
    axis: int = -1,
) -> LinearOperator:
    return LinearOperator(
        node=index,
        kind=kind,
        data=data,
        weight=weight,
        output=view.nodes[index].output[0],
        rowwise=rowwise,
        axis=axis,
        in_features=features[0],
        out_features=features[1],
    )


MICROSOFT = "com.microsoft"

LINEAR_OPERATORS: dict[tuple[str, str], Recognise] = {
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    ("", "Conv"): _conv,
    ("", "Einsum"): _einsum,
    ("", "MatMulInteger"): _quantised(1),
    ("", "QLinearMatMul"): _quantised(3),
    (MICROSOFT, "FusedMatMul"): _fused_matmul,
    (MICROSOFT, "TransposeMatMul"): _fused_matmul,
    (MICROSOFT, "FusedGemm"): _gemm,
    (MICROSOFT, "FusedConv"): _conv,
    (MICROSOFT, "MatMulNBits"): _quantised(1),
    (MICROSOFT, "MatMulBnb4"): _quantised(1),
    (MICROSOFT, "MatMulFpQ4"): _quantised(1),
    (MICROSOFT, "DynamicQuantizeMatMul"): _quantised(1),
    (MICROSOFT, "MatMulIntegerToFloat"): _quantised(1),
    (MICROSOFT, "QGemm"): _quantised(3),
}

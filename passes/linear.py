"""Linear operators: which nodes apply a constant weight to one data input.

Comes in: a node and what is constant around it. Goes out: a `LinearOperator`, or a `Miss` when a node of a
linear kind does not qualify. One table, `LINEAR_OPERATORS`, has an entry per operator; adding one is one line
and one function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rewriter.graph.constants import Constants
from rewriter.graph.view import ONNX_DOMAINS, GraphView, label


@dataclass(frozen=True)
class Miss:
    """Why something is not what it was tried as: a reason to act on, and the node where it failed."""

    reason: str
    node: str


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
        in_features: size of the input axis, None when unknown.
        out_features: size of the output axis, None when unknown.
    """

    node: int
    kind: str
    data: str
    weight: str
    output: str
    rowwise: bool
    in_features: int | None
    out_features: int | None


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
    if right in constants:
        shape = constants.shape(right)
        if shape is not None and len(shape) > 2 and any(dim != 1 for dim in shape[:-2]):
            return Miss("the weight differs along a batch axis (grouped or per-expert weights)", label(node))
        features = (shape[-2], shape[-1]) if shape is not None and len(shape) >= 2 else (None, None)
        return _operator(view, index, "MatMul", left, right, features)
    if left in constants:
        return Miss("the constant is the left factor, so the product mixes tokens", label(node))
    return Miss("neither factor is constant", label(node))


def _gemm(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
    node = view.nodes[index]
    attributes = {attribute.name: attribute.i for attribute in node.attribute if attribute.name.startswith("trans")}
    left, right = node.input[0], node.input[1]
    if left in constants and right in constants:
        return None
    if right not in constants:
        return Miss("the second factor is not constant", label(node))
    if attributes.get("transA", 0):
        return Miss("transA is set, so the product mixes tokens", label(node))
    if len(node.input) > 2 and node.input[2] and node.input[2] not in constants:
        return Miss("the bias is not constant", label(node))
    shape = constants.shape(right)
    features: tuple[int | None, int | None] = (None, None)
    if shape is not None and len(shape) == 2:
        features = (shape[1], shape[0]) if attributes.get("transB", 0) else (shape[0], shape[1])
    return _operator(view, index, "Gemm", left, right, features)


def _conv(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
    node = view.nodes[index]
    if node.input[1] not in constants:
        return Miss("the kernel is not constant", label(node))
    if len(node.input) > 2 and node.input[2] and node.input[2] not in constants:
        return Miss("the bias is not constant", label(node))
    shape = constants.shape(node.input[1])
    attributes = {attribute.name: attribute for attribute in node.attribute}
    pointwise = shape is not None and all(size == 1 for size in shape[2:])
    group = attributes["group"].i if "group" in attributes else 1
    for name in ("strides", "pads"):
        neutral = 1 if name == "strides" else 0
        if name in attributes and any(value != neutral for value in attributes[name].ints):
            pointwise = False
    kernel = "x".join(str(size) for size in shape[2:]) if shape else "?"
    kind = f"Conv {kernel}" if group == 1 else f"Conv {kernel}, {group} groups"
    features = (shape[1] * group, shape[0]) if shape else (None, None)
    return _operator(view, index, kind, node.input[0], node.input[1], features, rowwise=pointwise)


def _operator(
    view: GraphView,
    index: int,
    kind: str,
    data: str,
    weight: str,
    features: tuple[int | None, int | None],
    *,
    rowwise: bool = True,
) -> LinearOperator:
    return LinearOperator(
        node=index,
        kind=kind,
        data=data,
        weight=weight,
        output=view.nodes[index].output[0],
        rowwise=rowwise,
        in_features=features[0],
        out_features=features[1],
    )


LINEAR_OPERATORS: dict[tuple[str, str], Recognise] = {
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    ("", "Conv"): _conv,
}

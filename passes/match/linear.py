"""Linear operators: nodes that apply a constant weight to one data input; `LINEAR_OPERATORS` is the table.

A node of a listed type that does not qualify gives a `Miss` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from rewriter.graph.constants import Constants
from rewriter.graph.elementwise import MICROSOFT
from rewriter.graph.fused import einsum_map
from rewriter.graph.view import REARRANGED, GraphView, Miss, attributes, integer_of, integers_of, key_of, label

# Operators whose output is a projection if their input is one: biases, layouts, rounding.
AFTER_LINEAR = REARRANGED | {"Add", "QLinearAdd", "QuantizeLinear", "DequantizeLinear"}


@dataclass(frozen=True)
class LinearOperator:
    """A node that maps its data linearly by a constant weight."""

    node: int
    kind: str
    data: str
    weight: str
    output: str
    in_features: int | None
    out_features: int | None
    rowwise: bool = True  # whether each token is mapped separately, not as by a convolution with a spatial kernel
    axis: int = -1  # the mapped axis from the end: -1 for X W, -2 for W X and -rank + 1 for a convolution
    transposed: bool = False  # whether a matrix is stored as [out, in]
    added: str = ""  # a non-constant tensor that the node adds to the product, such as a residual fused into a Gemm
    experts: int = 0  # number of matrices that tokens are routed to; 0 where all tokens share one

    @property
    def shown(self) -> str:
        """The operator as reports print it: `MatMul 64x256`, or `MatMul 64x256 of 8 experts`."""
        size = f" {self.in_features}x{self.out_features}" if self.in_features else ""
        return self.kind + size + (f" of {self.experts} experts" if self.experts else "")


Operators = tuple[LinearOperator, ...]
Recognise = Callable[[GraphView, Constants, int], LinearOperator | Miss | None]


def linear_operator(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
    """The node at `index` as a linear operator; a Miss if it fails a condition, None if its type is not listed."""
    recognise = LINEAR_OPERATORS.get(key_of(view.nodes[index]))
    return None if recognise is None else recognise(view, constants, index)


def made_linearly(view: GraphView, constants: Constants, tensor: str) -> LinearOperator | None:
    """The linear operator that computes a tensor."""
    index = view.producer.get(tensor)
    found = None if index is None else linear_operator(view, constants, index)
    return found if isinstance(found, LinearOperator) else None


def _weight(view: GraphView, constants: Constants, names: Sequence[str]) -> str:
    """The factor that is a constant, or the matrices of the experts that a router chose."""
    held = [name for name in names if name in constants]
    # A matrix of an expert comes from a constant of three axes; one of two is a table, of embeddings for example.
    chosen = [name for name in names if len(constants.shape(view.picked.get(name, "")) or ()) > 2]
    return held[0] if len(held) == 1 else chosen[0] if not held and len(chosen) == 1 else ""


def _product(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
    node, flags = view.nodes[index], attributes(view.nodes[index])
    left, right = node.input[0], node.input[3 if node.op_type == "QLinearMatMul" else 1]
    if left in constants and right in constants:
        return None
    weight = _weight(view, constants, (left, right))
    if not weight:
        return Miss("neither factor is constant", label(node))
    # Lowering has decomposed a FusedGemm with a known activation already.
    if any(attribute.name == "activation" for attribute in node.attribute):
        return Miss("it is fused with an unknown activation", label(node))
    last = weight == right
    if flags.get("transA" if last else "transB") or flags.get("transBatchA") or flags.get("transBatchB"):
        return Miss("the data factor is transposed, so input and output lie on different axes", label(node))
    bias = node.input[2] if node.op_type in ("Gemm", "FusedGemm") and len(node.input) > 2 else ""
    added = "" if bias in constants or (bias in view.picked and weight in view.picked) else bias
    if last:
        turned = bool(flags.get("transB"))
        return _operator(view, constants, index, node.op_type, left, weight, transposed=turned, added=added)
    kind, turned = f"{node.op_type} (W X)", not flags.get("transA")
    return _operator(view, constants, index, kind, right, weight, transposed=turned, axis=-2, added=added)


def _einsum(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
    node = view.nodes[index]
    if all(name in constants for name in node.input):
        return None
    weight = _weight(view, constants, node.input) if len(node.input) == 2 else ""
    if not weight:
        return Miss("it does not multiply data with one constant weight", label(node))
    equation = attributes(node).get("equation", b"").decode("ascii", "replace")
    read = einsum_map(equation, weight=list(node.input).index(weight))
    if read is None:
        return Miss(f"'{equation}' is not the product of a matrix with one axis of the data", label(node))
    axis, contracted, made, rank = read
    shape = constants.shape(weight) or ()
    features = (shape[contracted], shape[made]) if len(shape) == rank else (None, None)
    data = next(name for name in node.input if name != weight)
    return _operator(view, constants, index, "Einsum", data, weight, features, transposed=made < contracted, axis=axis)


def _conv(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
    node = view.nodes[index]
    kernel_at, bias_at = (3, 8) if node.op_type == "QLinearConv" else (1, 2)
    weight = node.input[kernel_at]
    if weight not in constants:
        return Miss("the kernel is not constant", label(node))
    if any(name and name not in constants for name in node.input[bias_at : bias_at + 1]):
        return Miss("the bias is not constant", label(node))
    if any(attribute.name == "activation" for attribute in node.attribute) or len(node.input) > bias_at + 1:
        return Miss("it is fused with a sum or an unknown activation", label(node))
    shape = constants.shape(weight)
    if shape is not None and len(shape) < 3:
        return Miss("the kernel has no axis of positions", label(node))
    group = integer_of(node, "group", 1)
    # A 1x1 kernel that skips or pads positions does not map every token, and is not rowwise either.
    moves = {*(integers_of(node, "strides") or [1])} != {1} or any(integers_of(node, "pads") or ())
    pointwise = shape is not None and all(size == 1 for size in shape[2:]) and not moves
    kernel = "x".join(str(size) for size in shape[2:]) if shape else "?"
    kind = f"Conv {kernel}" if group == 1 else f"Conv {kernel}, {group} groups"
    features: Features = (shape[1] * group, shape[0]) if shape else (None, None)
    axis = 1 - len(shape) if shape else -1
    return _operator(view, constants, index, kind, node.input[0], weight, features, rowwise=pointwise, axis=axis)


def _quantised(weight: int) -> Recognise:
    """Recognise an operator with a quantised constant weight at input `weight`."""

    def recognise(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
        node = view.nodes[index]
        data, name = node.input[0], node.input[weight]
        if name not in constants:
            return Miss("the quantised weight is not constant", label(node))
        if data in constants:
            return None
        sizes = attributes(node)
        # The dims of packed weights are not those of the matrix.
        features = (sizes["K"], sizes["N"]) if "N" in sizes and "K" in sizes else None
        turned = bool(sizes.get("transB"))
        return _operator(view, constants, index, node.op_type, data, name, features, transposed=turned)

    return recognise


Features = tuple[int | None, int | None]


def _operator(
    view: GraphView,
    constants: Constants,
    index: int,
    kind: str,
    data: str,
    weight: str,
    features: Features | None = None,
    *,
    transposed: bool = False,
    **further: Any,
) -> LinearOperator:
    shape = constants.shape(weight) or view.type_of(weight).shape or ()
    found = [size if isinstance(size, int) else None for size in shape[-2:]] if len(shape) > 1 else [None, None]
    rows, columns = features or (found[::-1] if transposed else found)
    known = rows and columns and "Conv" not in kind  # a kernel has more numbers than a matrix anyway
    whole = constants.shape(view.picked.get(weight, weight)) if known else None
    experts = prod(whole) // ((rows or 1) * (columns or 1)) if whole else 0
    further |= {"transposed": transposed, "experts": experts if experts > 1 else 0}
    return LinearOperator(index, kind, data, weight, view.nodes[index].output[0], rows, columns, **further)


LINEAR_OPERATORS: dict[tuple[str, str], Recognise] = {
    ("", "MatMul"): _product,
    ("", "Gemm"): _product,
    ("", "Conv"): _conv,
    ("", "Einsum"): _einsum,
    ("", "MatMulInteger"): _quantised(1),
    ("", "QLinearMatMul"): _product,
    ("", "QLinearConv"): _conv,
    (MICROSOFT, "FusedMatMul"): _product,
    (MICROSOFT, "TransposeMatMul"): _product,
    (MICROSOFT, "FusedGemm"): _product,
    (MICROSOFT, "FusedConv"): _conv,
    (MICROSOFT, "MatMulNBits"): _quantised(1),
    (MICROSOFT, "MatMulBnb4"): _quantised(1),
    (MICROSOFT, "MatMulFpQ4"): _quantised(1),
    (MICROSOFT, "DynamicQuantizeMatMul"): _quantised(1),
    (MICROSOFT, "MatMulIntegerToFloat"): _quantised(1),
    (MICROSOFT, "QGemm"): _quantised(3),
}

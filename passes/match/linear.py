"""Linear operators: nodes that apply a constant weight to one data input; `LINEAR_OPERATORS` is the table.

A node of a listed type that does not qualify gives a `Miss` with the reason. `routing` finds what chooses weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import onnx

from rewriter.evaluate.table import MICROSOFT
from rewriter.graph.constants import COMPUTED, Constants
from rewriter.graph.fused import einsum_map
from rewriter.graph.view import REARRANGED, GraphView, Miss, attributes, integer_of, integers_of, key_of, label

# Operators whose output is a projection if their input is one: biases, layouts, rounding.
AFTER_LINEAR = REARRANGED | {"Add", "QLinearAdd", "QuantizeLinear", "DequantizeLinear"}

_OVER_EXPERTS = {"Softmax", "TopK", "ArgMax"}
_MOVED = ("ReduceSum", "ReduceMax", "Expand", "GatherElements", "GatherND", "ScatterND", "Shape")
_ROUTING = COMPUTED.union(_OVER_EXPERTS, _MOVED) - {"Transpose"}


@dataclass(frozen=True)
class LinearOperator:
    """A node that maps its data linearly by a constant weight."""

    node: int
    output: str
    kind: str
    data: str
    weight: str
    in_features: int | None = None
    out_features: int | None = None
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
Make = Callable[..., LinearOperator]  # of one node: from the kind, the data and the weight on
Recognise = Callable[[GraphView, Constants, onnx.NodeProto, Make], LinearOperator | str | None]
"""A node as a linear operator, without features where they are the last two axes of its weight; or why it is none."""


def linear_operator(view: GraphView, constants: Constants, index: int) -> LinearOperator | Miss | None:
    """The node at `index` as a linear operator; a Miss if it fails a condition, None if its type is not listed."""
    node = view.nodes[index]
    recognise = LINEAR_OPERATORS.get(key_of(node))
    make = partial(LinearOperator, index, *node.output[:1])
    found = None if recognise is None else recognise(view, constants, node, make)
    if not isinstance(found, LinearOperator):
        return None if found is None else Miss(found, label(node))
    rows, columns = found.in_features, found.out_features
    if rows is None:
        shape = constants.shape(found.weight) or view.sizes_of(found.weight) or ()
        rows, columns = shape[-2:] if len(shape) > 1 else (None, None)
        rows, columns = (columns, rows) if found.transposed else (rows, columns)
    experts = 0
    if rows and columns and "Conv" not in found.kind:  # a kernel has more numbers than a matrix anyway
        experts = prod(constants.shape(view.picked.get(found.weight, found.weight)) or ()) // (rows * columns)
    return replace(found, in_features=rows, out_features=columns, experts=experts if experts > 1 else 0)


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


def _product(view: GraphView, constants: Constants, node: onnx.NodeProto, make: Make) -> LinearOperator | str | None:
    flags = attributes(node)
    left, right = node.input[0], node.input[3 if node.op_type == "QLinearMatMul" else 1]
    if left in constants and right in constants:
        return None
    weight = _weight(view, constants, (left, right))
    if not weight:
        return "neither factor is constant"
    # Lowering has decomposed a FusedGemm with a known activation already.
    if any(attribute.name == "activation" for attribute in node.attribute):
        return "it is fused with an unknown activation"
    last = weight == right
    if flags.get("transA" if last else "transB") or flags.get("transBatchA") or flags.get("transBatchB"):
        return "the data factor is transposed, so input and output lie on different axes"
    bias = node.input[2] if node.op_type in ("Gemm", "FusedGemm") and len(node.input) > 2 else ""
    added = "" if bias in constants or (bias in view.picked and weight in view.picked) else bias
    if last:
        return make(node.op_type, left, weight, transposed=bool(flags.get("transB")), added=added)
    return make(f"{node.op_type} (W X)", right, weight, transposed=not flags.get("transA"), axis=-2, added=added)


def _einsum(view: GraphView, constants: Constants, node: onnx.NodeProto, make: Make) -> LinearOperator | str | None:
    if all(name in constants for name in node.input):
        return None
    weight = _weight(view, constants, node.input) if len(node.input) == 2 else ""
    if not weight:
        return "it does not multiply data with one constant weight"
    equation = attributes(node).get("equation", b"").decode("ascii", "replace")
    if (read := einsum_map(equation, weight=list(node.input).index(weight))) is None:
        return f"'{equation}' is not the product of a matrix with one axis of the data"
    axis, contracted, made, rank = read
    shape = constants.shape(weight) or ()
    rows, columns = (shape[contracted], shape[made]) if len(shape) == rank else (None, None)
    data, turned = next(name for name in node.input if name != weight), made < contracted
    return make("Einsum", data, weight, rows, columns, transposed=turned, axis=axis)


def _conv(_: GraphView, constants: Constants, node: onnx.NodeProto, make: Make) -> LinearOperator | str | None:
    kernel_at, bias_at = (3, 8) if node.op_type == "QLinearConv" else (1, 2)
    weight = node.input[kernel_at]
    if weight not in constants:
        return "the kernel is not constant"
    if any(name and name not in constants for name in node.input[bias_at : bias_at + 1]):
        return "the bias is not constant"
    if any(attribute.name == "activation" for attribute in node.attribute) or len(node.input) > bias_at + 1:
        return "it is fused with a sum or an unknown activation"
    shape = constants.shape(weight)
    if shape is not None and len(shape) < 3:
        return "the kernel has no axis of positions"
    group = integer_of(node, "group", 1)
    # A 1x1 kernel that skips or pads positions does not map every token, and is not rowwise either.
    moves = {*(integers_of(node, "strides") or [1])} != {1} or any(integers_of(node, "pads") or ())
    pointwise = shape is not None and all(size == 1 for size in shape[2:]) and not moves
    kernel = "x".join(str(size) for size in shape[2:]) if shape else "?"
    sizes = (shape[1] * group, shape[0], pointwise, 1 - len(shape)) if shape else (None, None, pointwise, -1)
    return make(f"Conv {kernel}" if group == 1 else f"Conv {kernel}, {group} groups", node.input[0], weight, *sizes)


def _quantised(_: GraphView, constants: Constants, node: onnx.NodeProto, make: Make) -> LinearOperator | str | None:
    data, weight = node.input[0], node.input[3 if node.op_type == "QGemm" else 1]
    if weight not in constants:
        return "the quantised weight is not constant"
    if data in constants:
        return None
    sizes = attributes(node)
    # The dims of packed weights are not those of the matrix.
    rows, columns = (sizes["K"], sizes["N"]) if "N" in sizes and "K" in sizes else (None, None)
    return make(node.op_type, data, weight, rows, columns, transposed=bool(sizes.get("transB")))


LINEAR_OPERATORS: dict[tuple[str, str], Recognise] = {
    (domain, name): recognise
    for domain, recognise, names in (
        ("", _product, "MatMul Gemm QLinearMatMul"),
        ("", _conv, "Conv QLinearConv"),
        ("", _einsum, "Einsum"),
        ("", _quantised, "MatMulInteger"),
        (MICROSOFT, _product, "FusedMatMul TransposeMatMul FusedGemm"),
        (MICROSOFT, _conv, "FusedConv"),
        (MICROSOFT, _quantised, "MatMulNBits MatMulBnb4 MatMulFpQ4 DynamicQuantizeMatMul MatMulIntegerToFloat QGemm"),
    )
    for name in names.split()
}


def routing(view: GraphView) -> frozenset[int]:
    """The nodes whose numbers only choose weights, or scale whole rows, as those of a router and of a gate by token."""
    found = set[int]()

    def last(tensor: str) -> object:
        return [None, *(view.type_of(tensor).shape or ())][-1]

    def ends(tensor: str, reader: onnx.NodeProto) -> bool:
        scaled = {last(name) for name in reader.input if name != tensor}
        scales = reader.op_type == "Mul" and last(tensor) == 1 and scaled.isdisjoint((1, None))
        return scales or view.type_of(tensor).elem_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)

    for index, node in reversed([*enumerate(view.nodes)]):
        uses = [(name, reader) for name in node.output for reader in view.consumers.get(name, ())]
        if not uses or node.op_type not in _ROUTING or not {*view.outputs}.isdisjoint(node.output):
            continue
        if node.op_type in _OVER_EXPERTS:  # of which there is a fixed number, unlike tokens
            axis, rank = integer_of(node, "axis", -1), view.type_of(node.input[0]).rank or 0
            if axis not in (-1, rank - 1) or not isinstance(last(node.input[0]), int):
                continue
        if all(reader in found or ends(name, view.nodes[reader]) for name, reader in uses):
            found.add(index)
    return frozenset(found)

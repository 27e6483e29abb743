"""Infer element types and shapes without touching the weights.

onnx's own inference runs on a skeleton of the model without weight bytes, so the size of the model does not matter and
external data need not be loaded.
"""

import re
from collections.abc import Container, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from math import prod

import onnx

from rewriter.evaluate.table import MICROSOFT, NCHWC
from rewriter.graph.walk import all_graphs, iter_nodes, own_names

FLOATS = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
"""The element types of floating-point numbers that models compute in, from the fewest digits to the most."""

Dim = int | str | None  # one dimension: a number, the name of a symbolic dimension, or None where nothing is known

_TERM = re.compile(r"\s*(?:(\d{1,9})\s*\*\s*)?([A-Za-z_][\w.]*)|\s*(\d{1,9})")


def terms_of(dim: str) -> Mapping[str, int]:
    """A dimension as a sum: `2*s0 + past - 1` is `{"s0": 2, "past": 1, "": -1}`.

    Exporters write multiples and sums of names. Other text is one name; so is `batch-size`: a minus has blanks.
    """
    parts, terms = ["+", *re.split(r"(\+|\s-\s)", dim)], dict[str, int]()
    for sign, part in zip(parts[::2], parts[1::2], strict=True):
        if (found := _TERM.fullmatch(part.rstrip())) is None:
            return {dim: 1}
        factor, name, number = found.groups()
        count = int(number or factor or 1)
        terms[name or ""] = terms.get(name or "", 0) + (count if sign == "+" else -count)
    return terms


_INLINE_LIMIT = 1024
"""Initializers of at most this many elements keep their values: inference reads operands of Reshape and the like."""


@dataclass(frozen=True)
class TensorType:
    """Element type (TensorProto.DataType, 0 when unknown) and shape (None when the rank is unknown)."""

    elem_type: int = 0
    shape: tuple[Dim, ...] | None = None

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    def __str__(self) -> str:
        """Such as `float32[batch, 768]`."""
        dims = None if self.shape is None else ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        return elem_name(self.elem_type) + ("" if dims is None else f"[{dims}]")


_PACKED = ("MatMulNBits", "MatMulBnb4")  # products with a packed matrix [K, N], whose type is that of its scales

_MAX_OUTPUTS = 4
_FORMALS = f"({', '.join(f'x{place}' for place in range(24))}) => (y0, y1, y2, y3)"
"""More operands than any operator of the table below has, and the maximum number of outputs."""
_SAME, _TYPE = "y0 = Identity(x0)", "y0 = Reshape(x0, x23)"
"""An output of the type and shape of the first operand; one of its type only."""

_SIMILAR: Mapping[tuple[str, str], onnx.FunctionProto] = {
    (domain, name): onnx.parser.parse_function(
        f'<domain: "{domain}", opset_import: ["": 17]> {name} {_FORMALS} {{ {nodes} }}'
    )
    for domain, nodes, names in (
        ("", _SAME, "SimplifiedLayerNormalization"),
        (MICROSOFT, _SAME, "Gelu QuickGelu FastGelu BiasGelu RotaryEmbedding MoE QMoE"),
        (MICROSOFT, f"{_SAME} y3 = Identity(x0)", "SkipLayerNormalization SkipSimplifiedLayerNormalization"),
        (MICROSOFT, "y0 = Gather(x2, x0) y1 = Compress(x0, x1) y2 = Gather(x2, x0)", "EmbedLayerNormalization"),
        (MICROSOFT, _TYPE, "Attention MultiHeadAttention GroupQueryAttention BiasAdd"),
        (MICROSOFT, _TYPE, "FusedConv NhwcFusedConv FusedGemm FusedMatMul GemmFastGelu"),
        (NCHWC, _SAME, "ReorderInput"),
        (NCHWC, _TYPE, "ReorderOutput Upsample"),
    )
    for name in names.split()
}
"""Operators of onnxruntime's domains as functions with outputs of the same types and shapes, so that inference does not
stop there."""


def elem_name(elem_type: int) -> str:
    """The name of an element type in messages; a corrupt model may contain an invalid element type."""
    if elem_type == onnx.TensorProto.FLOAT:
        return "float32"
    known = onnx.TensorProto.DataType
    return known.Name(elem_type).lower() if elem_type in known.values() else str(elem_type)


def inferred_graph(model: onnx.ModelProto) -> onnx.GraphProto:
    """The main graph of `model` with inferred types in the value_info of every graph, as far as they are known.

    If inference fails, the declared types remain. The graph has no large weights. Its nodes are in the same order and
    have the same bodies; fused operators may be replaced by similar ones.
    """
    skeleton = skeleton_of(model)
    for node in skeleton.graph.node:
        node.CopyFrom(_in_onnx_terms(node, skeleton.graph))
    for node in iter_nodes(skeleton.graph.node):
        if (node.domain, node.op_type) in _SIMILAR:  # onnx requires a name, perhaps empty, for each function output
            node.output.extend([""] * (_MAX_OUTPUTS - len(node.output)))
    missing = {domain for domain, _ in _SIMILAR} - {each.domain for each in skeleton.opset_import} - {""}
    skeleton.opset_import.extend(onnx.helper.make_opsetid(domain, 1) for domain in missing)  # optional in onnxruntime
    hidden = _without_hidden(skeleton.graph)
    own = {(each.domain, each.name) for each in model.functions}
    skeleton.functions.extend(function for key, function in _SIMILAR.items() if key not in own)
    found = skeleton.graph
    # The C++ inference raises bare exceptions on odd models; then declared types remain.
    with suppress(Exception):
        found = onnx.shape_inference.infer_shapes(skeleton, check_type=False, strict_mode=False, data_prop=True).graph
    del found.initializer[len(model.graph.initializer) :]
    for value, declared in zip(found.output, model.graph.output, strict=True):
        if value.name in hidden:
            value.CopyFrom(declared)
    return found


def _without_hidden(graph: onnx.GraphProto) -> set[str]:
    """Drop declarations of names that bodies define again, which onnx would apply to the inner tensors."""
    every = set[str]()
    for each in all_graphs(graph):
        _, *inside = all_graphs(each)
        hidden = set[str]().union(*map(own_names, inside))
        forget_types(each, hidden)
        for value in each.output:
            if value.name in hidden:
                value.ClearField("type")
        every |= hidden
    return every


def forget_types(graph: onnx.GraphProto, tensors: Container[str]) -> None:
    """Remove the value_info of some tensors, for example if their shapes changed."""
    kept = [value for value in graph.value_info if value.name not in tensors]
    del graph.value_info[:]
    graph.value_info.extend(kept)


def _in_onnx_terms(node: onnx.NodeProto, graph: onnx.GraphProto) -> onnx.NodeProto:
    """An operator that onnx knows, with the type and shape of a fused one; else the node."""
    if node.domain not in (MICROSOFT, NCHWC) or not node.input or len(node.output) != 1:
        return node
    if node.domain == NCHWC and (node.domain, node.op_type) not in _SIMILAR:  # Conv and pooling, as onnx has them
        plain = deepcopy(node)
        plain.ClearField("domain")
        return plain
    sizes = {attribute.name: attribute.i for attribute in node.attribute}
    turned = [name for name, size in sizes.items() if "trans" in name and size]
    if node.op_type == "FusedMatMul" and not turned:
        return onnx.helper.make_node("MatMul", node.input, node.output)
    if node.op_type == "QGemm":  # the result is of the type of its zero point, or floats, as scales are
        return onnx.helper.make_node("Reshape", [node.input[8 if len(node.input) == 9 else 1], ""], node.output)
    given = {each.name: each for each in graph.initializer if each.name in node.input}
    weight, scales = (given.get(name) for name in [*node.input, "", ""][1:3])
    operator, name = "MatMul", f"{node.output[0]}/matrix"
    if node.op_type in _PACKED and {"K", "N"} <= sizes.keys() and scales is not None:
        kind, dims = scales.data_type, [sizes["K"], sizes["N"]]
    elif node.op_type == "FusedMatMul" and turned == ["transB"] and weight is not None and len(weight.dims) > 1:
        kind, dims = weight.data_type, [*weight.dims[:-2], *weight.dims[:-3:-1]]
    elif node.op_type == "ReorderOutput" and not sizes.get("channels_last"):  # a 1x1 kernel makes the same shape
        operator, kind, dims = "Conv", onnx.TensorProto.FLOAT, [sizes.get("channels", 0), 1, 1, 1]
    else:
        return node
    graph.initializer.append(_stub(onnx.TensorProto(name=name, data_type=kind, dims=dims), bare=True))
    return onnx.helper.make_node(operator, [node.input[0], name], node.output)


def declared_types(graph: onnx.GraphProto, outer: Mapping[str, TensorType] | None = None) -> dict[str, TensorType]:
    """The types that a graph declares, and the outer ones that it does not hide."""
    hidden = own_names(graph) if outer else ()
    types = {name: kind for name, kind in (outer or {}).items() if name not in hidden}
    # In increasing order of authority: value_info may be stale, an initializer knows its own type.
    for value in (*graph.value_info, *graph.output, *graph.input):
        if value.type.HasField("tensor_type"):
            types[value.name] = type_of(value.type)
    for tensor in graph.initializer:
        types[tensor.name] = TensorType(tensor.data_type, tuple(tensor.dims))
    return types


def skeleton_of(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of `model` without weight bytes: large initializers become external stubs of the same type and shape.

    Fields are copied one by one, never the whole model, so a model of gigabytes costs kilobytes.
    """
    graph = onnx.GraphProto(
        name="skeleton",  # the name of the model need not be UTF-8
        node=map(_without_large_constants, model.graph.node),
        input=model.graph.input,
        output=model.graph.output,
        value_info=model.graph.value_info,
        initializer=map(_stub, model.graph.initializer),
    )
    return onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions, graph=graph
    )


def _stub(tensor: onnx.TensorProto, *, bare: bool = False) -> onnx.TensorProto:
    if not bare and prod(tensor.dims) <= _INLINE_LIMIT and tensor.data_location != onnx.TensorProto.EXTERNAL:
        return tensor
    stub = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    stub.data_location = onnx.TensorProto.EXTERNAL
    stub.external_data.add(key="location", value="weights")
    return stub


def _without_large_constants(node: onnx.NodeProto) -> onnx.NodeProto:
    if node.op_type != "Constant" or node.ByteSize() < 8 * _INLINE_LIMIT:
        return node
    make = onnx.helper.make_attribute
    given = (make("value", _stub(each.t)) if each.name == "value" else each for each in node.attribute)
    return onnx.NodeProto(op_type="Constant", domain=node.domain, name=node.name, output=node.output, attribute=given)


def type_of(kind: onnx.TypeProto) -> TensorType:
    """The declared type of a tensor; unknown for anything else."""
    if not kind.tensor_type.HasField("shape"):
        return TensorType(kind.tensor_type.elem_type, None)
    dims = kind.tensor_type.shape.dim
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims)
    return TensorType(kind.tensor_type.elem_type, shape)

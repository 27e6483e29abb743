"""Check nodes against the schemas of their operators: how many inputs and outputs, which of them, which attributes.

All other code reads the inputs that an operator must have without looking whether they are there. The bounds are those
of the operator set that the model imports, so this refuses nothing that the ONNX checker accepts. Operators without a
schema in onnx are not checked, but for some of onnxruntime's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import onnx

from rewriter.errors import ModelError
from rewriter.files.walk import iter_nodes
from rewriter.text import counted, quoted

_DEFAULT = ("", "ai.onnx")


_MICROSOFT: Mapping[str, int] = {
    "BiasGelu": 2,
    "FastGelu": 1,
    "Gelu": 1,
    "GemmFastGelu": 2,
    "QuickGelu": 1,
    "FusedConv": 2,
    "FusedGemm": 2,
    "FusedMatMul": 2,
    "TransposeMatMul": 2,
    "DynamicQuantizeMatMul": 3,
    "MatMulIntegerToFloat": 4,
    "QGemm": 6,
    "MatMulBnb4": 3,
    "MatMulFpQ4": 3,
    "MatMulNBits": 3,
    "SkipLayerNormalization": 3,
    "SkipSimplifiedLayerNormalization": 3,
    "RotaryEmbedding": 4,
}
"""How many inputs operators of onnxruntime have at least, for those that are read; onnx has no schemas of them."""


@dataclass(frozen=True)
class _Arity:
    """How many inputs, or outputs, a node may have, and the positions that must have a name."""

    least: int
    most: int
    named: tuple[int, ...]


@dataclass(frozen=True)
class _Signature:
    inputs: _Arity
    outputs: _Arity
    attributes: Mapping[str, str]
    """Attribute name to the name of its type."""
    needed: tuple[str, ...]
    """Names of the attributes without a default."""


def check_operators(model: onnx.ModelProto) -> None:
    """Check all nodes of the default domain, in subgraphs and local functions too.

    Raises:
        ModelError: a node lacks an input, output or attribute of its operator, or has too many, or one of another type.
    """
    functions = {(_domain(function.domain), function.name) for function in model.functions}
    opset = _opset(model.opset_import)
    _check_references(model.graph)
    _check_nodes(model.graph.node, opset, functions)
    for function in model.functions:
        _check_nodes(function.node, _opset(function.opset_import) or opset, functions)


def _domain(domain: str) -> str:
    return "" if domain in _DEFAULT else domain


def _opset(imports: Iterable[onnx.OperatorSetIdProto]) -> int:
    return next((entry.version for entry in imports if entry.domain in _DEFAULT), 0)


def _check_references(graph: onnx.GraphProto) -> None:
    for node in iter_nodes(graph.node):
        name = next((attribute.name for attribute in node.attribute if attribute.ref_attr_name), None)
        if name is not None:
            raise _error(node, f"refers with {quoted(name)} to an attribute of a function, but is in none")


def _check_nodes(nodes: Iterable[onnx.NodeProto], opset: int, functions: set[tuple[str, str]]) -> None:
    for node in iter_nodes(nodes):
        if (_domain(node.domain), node.op_type) in functions:
            continue
        if node.domain == "com.microsoft" and node.op_type in _MICROSOFT:
            _check_microsoft(node)
        if node.domain not in _DEFAULT:
            continue
        signature = _signature(node.op_type, opset)
        if signature is not None:
            _check_names(node, "input", node.input, signature.inputs, opset)
            _check_names(node, "output", node.output, signature.outputs, opset)
            _check_attributes(node, signature, opset)


def _check_microsoft(node: onnx.NodeProto) -> None:
    least = _MICROSOFT[node.op_type]
    if len(node.input) < least:
        raise _error(node, f"has {counted(len(node.input), 'input')} where onnxruntime needs at least {least}")
    if not node.output or not node.output[0]:
        raise _error(node, "has no output")


@cache
def _signature(operator: str, opset: int) -> _Signature | None:
    """What the schema says; None for an operator that onnx does not know.

    onnx knows neither the operator sets of the future nor operators that onnxruntime added to older ones, such as
    LayerNormalization. Of these only what the latest schema needs is checked, since they may have more.
    """
    known = 0 < opset <= onnx.defs.onnx_opset_version()
    schema = _schema(lambda: onnx.defs.get_schema(operator, opset, "")) if known else None
    exact = schema is not None
    schema = schema or _schema(lambda: onnx.defs.get_schema(operator, ""))
    if schema is None or schema.deprecated:
        return None
    return _Signature(
        _arity(schema.inputs, schema.min_input, schema.max_input if exact else None),
        # An output without a name is one that nobody reads, whether the schema calls it optional or not.
        replace(_arity(schema.outputs, schema.min_output, schema.max_output if exact else None), named=()),
        _types(schema.attributes) if exact else {},
        tuple(name for name, attribute in schema.attributes.items() if attribute.required) if exact else (),
    )


def _schema(get: Callable[[], onnx.defs.OpSchema]) -> onnx.defs.OpSchema | None:
    try:
        return get()
    except onnx.defs.SchemaError:
        return None


def _arity(parameters: Iterable[onnx.defs.OpSchema.FormalParameter], least: int, most: int | None) -> _Arity:
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    named = tuple(position for position, each in enumerate(parameters) if each.option == single)
    return _Arity(least, 2**31 if most is None else most, named)


def _types(attributes: Mapping[str, Any]) -> dict[str, str]:  # onnx's stubs lack the names of its enumeration
    return {name: attribute.type.name for name, attribute in attributes.items()}


def _check_names(node: onnx.NodeProto, what: str, names: Iterable[str], arity: _Arity, opset: int) -> None:
    names = tuple(names)
    if not arity.least <= len(names) <= arity.most:
        allowed = str(arity.least) if arity.least == arity.most else f"{arity.least} to {arity.most}"
        if arity.most >= 2**31 - 1:
            allowed = f"at least {arity.least}"
        raise _error(node, f"has {counted(len(names), what)} where opset {opset} allows {allowed}")
    missing = next((position for position in arity.named if position < len(names) and not names[position]), None)
    if missing is not None:
        raise _error(node, f"lacks its {what} {missing}, which opset {opset} requires")


def _check_attributes(node: onnx.NodeProto, signature: _Signature, opset: int) -> None:
    given = {attribute.name: attribute.type for attribute in node.attribute}
    if len(given) < len(node.attribute):
        raise _error(node, "has two attributes of one name")
    for name in signature.needed:
        if name not in given:
            raise _error(node, f"lacks the attribute {quoted(name)}, which opset {opset} requires")
    for name, number in given.items():
        wanted = signature.attributes.get(name)
        # Files of IR version 1 declare no types of attributes.
        if wanted is None or number == onnx.AttributeProto.UNDEFINED:
            continue
        found = onnx.AttributeProto.AttributeType.Name(number)
        if found != wanted:
            raise _error(node, f"has the attribute {quoted(name)} of type {found} where opset {opset} has {wanted}")


def _error(node: onnx.NodeProto, what: str) -> ModelError:
    return ModelError(f"node {quoted(node.name)} ({quoted(node.op_type)}) {what}; export the model again")

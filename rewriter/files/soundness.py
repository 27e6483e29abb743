"""Check that a loaded model is structurally sound, which all other code relies on.

onnx's checker sees names, operators and small attributes, no types and no weights; the rest is checked here:

- It has a graph with at least one output, an IR version, and one operator set per domain.
- Names are defined once in their scope and before they are read. A subgraph sees the names that are defined before its
  node around it. No output of a node shadows one of them; inputs and initializers may.
- Dims are non-negative and amount to less than 2**63 bytes, and inline data has exactly the length that they need.
- Nodes have the inputs, outputs and attributes that their operators need, as far as onnx knows these (its checker).
- Subgraphs nest at most `walk.MAX_DEPTH` deep. Local functions are unique, not recursive, and bounded in depth and
  size: onnxruntime inlines them, and n functions that each call the previous one twice grow to 2**n nodes.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx

from rewriter.errors import ModelError
from rewriter.files.tensors import check_inline, count_elements, malformed
from rewriter.graph.edit import set_nodes
from rewriter.graph.view import ONNX_DOMAINS, key_of, opsets
from rewriter.graph.walk import is_external, iter_all, iter_nodes, iter_sparse, iter_tensors, reads, subgraphs
from rewriter.text import counted, one_line, quoted

MAX_INLINED = 10_000_000  # nodes of a model once its functions are inlined
MAX_CALLS = 100  # of functions inside each other: onnxruntime loads no more, and onnx does not inline them
_Key = tuple[str, str, str]
_TYPE = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, ())
_EMPTY_TENSOR = onnx.TensorProto(data_type=onnx.TensorProto.FLOAT, dims=[0])
_INDICES = onnx.TensorProto(data_type=onnx.TensorProto.INT64, dims=[0])
_SPARSE = onnx.SparseTensorProto(values=_EMPTY_TENSOR, indices=_INDICES, dims=[1])
_PLACEHOLDERS: dict[str, Any] = {
    "t": _EMPTY_TENSOR,
    "tensors": [_EMPTY_TENSOR],
    "sparse_tensor": _SPARSE,
    "tp": _TYPE,
    **dict.fromkeys(("sparse_tensors", "type_protos"), ()),
    "doc_string": "",
}
"""Placeholder in outlines for values that may be large or not UTF-8; tensors are checked here."""

_OTHER_DOMAIN = "other"  # of the operators without a schema in an outline
_UNUSED_NAME, _COUNT = f"unread {secrets.token_hex(8)}", itertools.count()
"""Prefix of names for outputs without one, which no model reads; onnx's checker requires a name for each."""


def check_structure(model: onnx.ModelProto) -> None:
    """Check that a model is structurally sound. Raises ModelError for the first fault."""
    if not model.HasField("graph"):
        raise ModelError("the model has no graph; the file is truncated or not ONNX: download or export it again")
    if model.ir_version < 1:
        raise ModelError("the model has no IR version; the file is truncated or damaged: download or export it again")
    _check_opsets(model)
    # First, because the checks below recurse and rely on the bound on nesting that this walk enforces.
    for tensor in iter_tensors(model):
        if not is_external(tensor):
            check_inline(tensor)
    for sparse in iter_sparse(model):
        count_elements(sparse.dims, sparse.values.name)
    if not model.graph.output:
        raise ModelError("the model has no outputs, so there is nothing to compare; export it with its outputs")
    odd = next((text for text in _texts(model) if not isinstance(text, str)), None)
    if odd is not None:
        raise malformed(f"the name {quoted(odd)} is not UTF-8")
    _check_functions(model)
    opset = opsets(model.opset_import).get("", 0)
    for node in iter_nodes(model.graph.node):
        if name := next((attribute.name for attribute in node.attribute if attribute.ref_attr_name), None):
            raise ModelError(
                f"{_title(node)} refers with {quoted(name)} to an attribute of a function, but is in none; export the "
                "model again"
            )
    _check_graph(model.graph, "the graph", opset)
    for function in model.functions:
        named = ([onnx.ValueInfoProto(name=name) for name in names] for names in (function.input, function.output))
        body = onnx.GraphProto(node=function.node, input=next(named), output=next(named))
        _check_graph(body, f"local function {quoted(function.name)}", opsets(function.opset_import).get("", opset))


def _texts(model: onnx.ModelProto) -> Iterator[str | bytes]:
    for function in model.functions:
        yield from (function.name, function.domain, function.overload, *function.input, *function.output)
    for thing in iter_all(model):
        if isinstance(thing, onnx.NodeProto):
            yield from (thing.op_type, thing.domain, thing.name, *thing.input, *thing.output)
        elif isinstance(thing, onnx.AttributeProto):
            yield from (thing.name, thing.ref_attr_name)
        else:
            yield from (value.name for value in (*thing.input, *thing.output, *thing.initializer))
            yield from (sparse.values.name for sparse in thing.sparse_initializer)
            for value in (*thing.input, *thing.output, *thing.value_info):
                yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)


def _check_opsets(model: onnx.ModelProto) -> None:
    if not model.opset_import:
        raise malformed("the model names no operator set (opset_import is empty)")
    functions = [each for function in model.functions for each in function.opset_import]
    domains = ["" if each.domain in ONNX_DOMAINS else each.domain for each in (*model.opset_import, *functions)]
    for place, (opset, domain) in enumerate(zip((*model.opset_import, *functions), domains, strict=True)):
        twice = place < len(model.opset_import) and domain in domains[:place]
        if twice or not isinstance(domain, str) or not 0 < opset.version < 2**31:
            raise malformed(f"the operator set of domain {quoted(domain)} is named twice or has no version")


def sort_main_graph(model: onnx.ModelProto) -> bool:
    """Sort the main graph in place and return whether that moved anything. Raises ModelError for a cycle.

    ONNX requires the order, but onnxruntime loads unsorted graphs and its float16 converter writes them.
    """
    nodes = model.graph.node
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    sources = {
        index: sorted({producer[name] for name in reads(node) if name in producer}) for index, node in enumerate(nodes)
    }
    if all(source < index for index, each in sources.items() for source in each):
        return False
    try:
        order = list(TopologicalSorter(sources).static_order())
    except CycleError as error:
        looping = _title(nodes[error.args[1][0]])
        raise malformed(f"the graph has a cycle through {looping}, so it has no meaning") from error
    set_nodes(model.graph, [nodes[index] for index in order])
    return True


def _check_graph(graph: onnx.GraphProto, what: str, opset: int) -> None:
    checker: Any = onnx.checker  # its stubs lack the module in C++
    context = checker.C.CheckerContext()
    context.ir_version, context.opset_imports = onnx.IR_VERSION, {"": opset or 1, _OTHER_DOMAIN: 1}
    try:
        checker.check_graph(_outline(graph, opset), context)
    except onnx.checker.ValidationError as error:
        reason = one_line(str(error).replace("==> Context: Bad node spec for node.", "in")).rstrip(".")
        raise malformed(f"{what} breaks a rule of ONNX (opset {opset}): {reason}") from error


def _outline(graph: onnx.GraphProto, opset: int) -> onnx.GraphProto:
    """The graph for onnx's checker: small, and without operators that it does not know well."""
    weights = (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))
    return onnx.GraphProto(
        name="graph",
        node=[_outlined(node, opset) for node in graph.node],
        input=[onnx.ValueInfoProto(name=value.name, type=_TYPE) for value in graph.input],
        output=[onnx.ValueInfoProto(name=value.name, type=_TYPE) for value in graph.output],
        initializer=[onnx.TensorProto(name=tensor.name, data_type=1, dims=[0]) for tensor in weights],
    )


def _outlined(node: onnx.NodeProto, opset: int) -> onnx.NodeProto:
    schema = _schema(node, opset)
    made = onnx.NodeProto(op_type=node.op_type, name=node.name, input=node.input)
    made.output.extend(name or f"{_UNUSED_NAME} {next(_COUNT)}" for name in node.output or [""])
    if schema is None:
        made.domain = _OTHER_DOMAIN
        for place, (_, graph) in enumerate(subgraphs(node)):
            made.attribute.add(name=f"body {place}", type=onnx.AttributeProto.GRAPH, g=_outline(graph, opset))
        return made
    if not node.output:
        del made.output[:]
    for attribute in node.attribute:
        given = {field.name: _PLACEHOLDERS.get(field.name, value) for field, value in attribute.ListFields()}
        if "g" in given:
            given["g"] = _outline(attribute.g, opset)
        if "graphs" in given:
            given["graphs"] = [_outline(graph, opset) for graph in attribute.graphs]
        if attribute.ref_attr_name and not attribute.type and attribute.name in schema.attributes:
            # Attributes that a function passes on need not state their type: onnx.parser does not write it.
            given["type"] = int(schema.attributes[attribute.name].type)
        made.attribute.add(**given)
    return made


def _schema(node: onnx.NodeProto, opset: int) -> Any:
    """The schema of an operator; None (after the checks here) if onnx has none for the opset."""
    domain = key_of(node)[0]
    if not domain and 0 < opset <= onnx.defs.onnx_opset_version() and onnx.defs.has(node.op_type, opset):
        return onnx.defs.get_schema(node.op_type, opset)
    least = _operators().get((domain, node.op_type)) if domain == "com.microsoft" else None
    if not domain and onnx.defs.has(node.op_type):
        # onnx knows neither the operator sets of the future nor operators that onnxruntime added to older ones,
        # such as LayerNormalization; they may have more than the latest schema.
        least = onnx.defs.get_schema(node.op_type).min_input
    if least is not None and (len(node.input) < least or not any(node.output[:1])):
        few = f"has {counted(len(node.input), 'input')} and needs at least {least}"
        fault = few if len(node.input) < least else "has no output"
        raise malformed(f"{_title(node)} {fault}")
    return None


def overridden(function: onnx.FunctionProto) -> bool:
    """Whether onnxruntime has an operator of this name: it then never runs the body."""
    return ("" if function.domain in ONNX_DOMAINS else function.domain, function.name) in _operators()


@cache
def _operators() -> Mapping[tuple[str, str], int]:
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    return {(schema.domain, schema.name): schema.min_input for schema in get_all_operator_schema()}


def _title(node: onnx.NodeProto) -> str:
    return f"node {quoted(node.name)} ({quoted(node.op_type)})"


def _check_functions(model: onnx.ModelProto) -> None:
    functions: dict[_Key, onnx.FunctionProto] = {}
    for function in model.functions:
        key = ("" if function.domain in ONNX_DOMAINS else function.domain, function.name, function.overload)
        if not function.name:
            raise malformed(f"a local function has the unusable name {quoted(function.name)}")
        if key in functions:
            raise malformed(f"local function {quoted(function.name)} is defined twice")
        if not key[0] and not overridden(function):
            raise ModelError(
                f"local function {quoted(function.name)} is in the domain of ONNX, where onnxruntime finds no function;"
                " move it to another domain"
            )
        functions[key] = function
    calls = {key: _calls(function.node, functions) for key, function in functions.items()}
    inlined, deep = dict[_Key, int](), dict[_Key, int]()
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        raise malformed(
            f"local function {quoted(error.args[1][0][1])} calls itself, directly or through others, which ONNX forbids"
        ) from error
    for key in order:
        deep[key] = 1 + max((deep[callee] for callee in calls[key]), default=0)
        if deep[key] > MAX_CALLS:
            raise ModelError(
                f"local functions call each other more than {MAX_CALLS} deep, which onnxruntime does not load; export "
                "the model without functions"
            )
        inlined[key] = len(functions[key].node) + sum(inlined[callee] * n for callee, n in calls[key].items())
    main = _calls(model.graph.node, functions)
    if sum(inlined[callee] * n for callee, n in main.items()) > MAX_INLINED:
        raise ModelError(
            f"inlining the local functions of this model yields more than {MAX_INLINED:,} nodes; export it without "
            "functions"
        )


def _calls(nodes: Iterable[onnx.NodeProto], functions: dict[_Key, onnx.FunctionProto]) -> Counter[_Key]:
    keys = (((*key_of(node), node.overload), node) for node in iter_nodes(nodes if functions else ()))
    calls = [(key, functions[key], node) for key, node in keys if key in functions]
    for _, function, node in calls:
        more = len(node.input) > len(function.input) or len(node.output) > len(function.output)
        if more and not overridden(function):
            raise malformed(f"{_title(node)} has more operands or outputs than the local function that it calls")
    return Counter(key for key, _, _ in calls)

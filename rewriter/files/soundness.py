"""Whether a model that was read is structurally sound, which all other code relies on.

Unlike the ONNX checker this does not look at the types of tensors. A model that passes satisfies:

- It has a graph with at least one output, an IR version, and one operator set per domain.
- Names are defined once in their scope and before they are read: no cycles, nodes in topological order. A subgraph sees
  the names that are defined before its node in the graphs around it. As in onnx and onnxruntime, the output of a node
  may not shadow any name in sight, while inputs and initializers of a subgraph may shadow outer ones.
- Dims are non-negative and amount to less than 2**63 bytes, and inline data has exactly the length that they need.
- Nodes have the inputs, outputs and attributes that their operators need, as far as onnx knows these (its checker).
- Subgraphs nest at most `walk.MAX_DEPTH` deep; local functions are unique, not recursive, and of bounded size:
  onnxruntime inlines them, so a small file of n functions that each call the previous one twice would grow to 2**n
  nodes, and would fill its memory.

The check takes time linear in the size of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx

from rewriter.errors import ModelError
from rewriter.files.tensors import check_inline, count_elements
from rewriter.files.walk import is_external, iter_nodes, iter_sparse, iter_tensors, subgraphs
from rewriter.text import counted, decoded, one_line, quoted

MAX_INLINED = 10_000_000
"""Maximum number of nodes of a model once its functions are inlined."""

RUNTIME_DOMAINS = frozenset(
    ("com.microsoft", "com.microsoft.experimental", "com.microsoft.nchwc", "com.ms.internal.nhwc", "ai.onnx.ml")
)
"""The domains whose operators onnxruntime has kernels for. Which of them it knows depends on how it was built."""

_Key = tuple[str, str, str]

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

_TINY = onnx.TensorProto(data_type=onnx.TensorProto.FLOAT, dims=[0])
_STANDS_IN = {
    "t": onnx.AttributeProto(t=_TINY),
    "tensors": onnx.AttributeProto(tensors=[_TINY]),
    "g": onnx.AttributeProto(g=onnx.GraphProto(name="body")),
    "graphs": onnx.AttributeProto(graphs=[onnx.GraphProto(name="body")]),
    "sparse_tensor": onnx.AttributeProto(sparse_tensor=onnx.SparseTensorProto(values=_TINY, indices=_TINY, dims=[1])),
    "sparse_tensors": onnx.AttributeProto(),
    "tp": onnx.AttributeProto(tp=onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)),
    "type_protos": onnx.AttributeProto(),
    "doc_string": onnx.AttributeProto(),
}
"""What onnx's checker is shown in place of what may be large, or not UTF-8; tensors and graphs are checked here."""


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
    _check_functions(model)
    for function in model.functions:
        _check_function(function)
    _check_graph(model.graph)
    _check_operators(model)


def _check_opsets(model: onnx.ModelProto) -> None:
    if not model.opset_import:
        raise ModelError("the model names no operator set (opset_import is empty); export the model again")
    seen: set[str] = set()
    for opset in model.opset_import:
        domain = "" if opset.domain == "ai.onnx" else opset.domain
        if not isinstance(domain, str) or domain in seen or opset.version < 1:
            raise ModelError(
                f"the operator set of domain {quoted(domain)} is named twice or has no version; export the model again"
            )
        seen.add(domain)


def sort_main_graph(model: onnx.ModelProto) -> bool:
    """Sort the main graph in place and return whether anything moved.

    ONNX requires the order, but onnxruntime loads unsorted graphs and its float16 converter writes them, so refusing
    them would refuse working models. Raises ModelError for a cycle.
    """
    nodes = model.graph.node
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    reads = {
        index: sorted(
            {
                producer[name]
                for each in (iter_nodes([node]) if node.attribute else (node,))
                for name in each.input
                if name in producer
            }
        )
        for index, node in enumerate(nodes)
    }
    if all(source < index for index, sources in reads.items() for source in sources):
        return False
    try:
        order = list(TopologicalSorter(reads).static_order())
    except CycleError as error:
        looping = _title(nodes[error.args[1][0]])
        raise ModelError(
            f"the graph has a cycle through {looping}, so it has no meaning; export the model again"
        ) from error
    copies = [onnx.NodeProto() for _ in order]
    for copy, index in zip(copies, order, strict=True):
        copy.CopyFrom(nodes[index])
    del nodes[:]
    nodes.extend(copies)
    return True


# -- names -------------------------------------------------------------------------------------------------------------


class _Scope:
    __slots__ = ("names", "nodes", "parent")

    def __init__(self, nodes: Sequence[onnx.NodeProto], parent: _Scope | None) -> None:
        self.names: set[str] = set()
        self.nodes = nodes
        self.parent = parent

    def sees(self, name: str) -> bool:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return True
            scope = scope.parent
        return False


def _check_graph(graph: onnx.GraphProto, parent: _Scope | None = None) -> None:
    """Check the names and the order of a graph and its subgraphs. Raises ModelError."""
    scope = _Scope(graph.node, parent)
    _declare(scope, (value.name for value in graph.input), "graph input")
    # An initializer may share the name of an input: it is that input's default. So the two are checked apart.
    initializers = _Scope(graph.node, None)
    _declare(initializers, (tensor.name for tensor in graph.initializer), "initializer")
    _declare(initializers, (sparse.values.name for sparse in graph.sparse_initializer), "initializer")
    scope.names |= initializers.names
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if not isinstance(dim.dim_param, str):
                name = quoted(value.name)
                raise ModelError(
                    f"{quoted(dim.dim_param)}, a dimension of {name}, is not UTF-8; export the model again"
                )
    _check_nodes(scope)
    _check_outputs(scope, (value.name for value in graph.output), "graph output")


def _check_function(function: onnx.FunctionProto) -> None:
    """Check the names and the order of a local function. Raises ModelError."""
    scope = _Scope(function.node, None)
    _declare(scope, function.input, "function input")
    _check_nodes(scope)
    _check_outputs(scope, function.output, "function output")


def _declare(scope: _Scope, names: Iterable[str], what: str) -> None:
    for name in names:
        if not name or not isinstance(name, str):
            raise ModelError(f"{what} has the unusable name {quoted(name)}; export the model again")
        if name in scope.names:
            raise ModelError(f"{what} {quoted(name)} is defined twice in one graph; export the model again")
        scope.names.add(name)


def _check_outputs(scope: _Scope, names: Iterable[str], what: str) -> None:
    for name in names:
        if name not in scope.names:
            raise ModelError(
                f"{what} {quoted(name)} is never defined in its graph; the file is damaged: export the model again"
            )


def _check_nodes(scope: _Scope) -> None:
    for node in scope.nodes:
        texts = (node.op_type, node.domain, node.name, *(attribute.name for attribute in node.attribute))
        if not node.op_type or not all(isinstance(text, str) for text in texts):
            raise ModelError(
                f"{_title(node)} of domain {quoted(node.domain)} has no usable operator, domain, name or attribute; "
                "export the model again"
            )
        for name in node.input:
            if name and not scope.sees(name):
                raise _unseen(name, node, scope)
        for graph in subgraphs(node) if node.attribute else ():
            _check_graph(graph, scope)
        for name in node.output:
            if not name:
                continue
            if scope.sees(name) or not isinstance(name, str):
                raise ModelError(
                    f"{_title(node)} defines {quoted(name)} again, or its name is not UTF-8; a name may be "
                    "defined once (static single assignment): export the model again"
                )
            scope.names.add(name)


def _unseen(name: str, node: onnx.NodeProto, scope: _Scope) -> ModelError:
    around: _Scope | None = scope
    while around is not None:
        if any(name in other.output for other in around.nodes):
            return ModelError(
                f"{_title(node)} reads {quoted(name)} before it is produced: the nodes are not in topological order, "
                "or form a cycle; sort the graph (onnx_graphsurgeon: toposort), or export the model again"
            )
        around = around.parent
    return ModelError(f"{_title(node)} reads {quoted(name)}, which is never defined; export the model again")


def _title(node: onnx.NodeProto) -> str:
    return f"node {quoted(node.name)} ({quoted(node.op_type)})"


# -- local functions ---------------------------------------------------------------------------------------------------


def _check_functions(model: onnx.ModelProto) -> None:
    """Check the local functions of a model, in time linear in its size.

    Raises:
        ModelError: a function is defined twice, unnamed, named like an operator of ONNX, in a domain of onnxruntime,
            or recursive (directly or mutually), or inlining would yield more than `MAX_INLINED` nodes.
    """
    functions: dict[_Key, onnx.FunctionProto] = {}
    for function in model.functions:
        key = (_domain(function.domain), function.name, function.overload)
        if not all(isinstance(part, str) for part in key) or not function.name:
            raise ModelError(f"a local function has the unusable name {quoted(function.name)}; export the model again")
        if key in functions:
            raise ModelError(f"local function {quoted(function.name)} is defined twice; export the model again")
        if (not key[0] and onnx.defs.has(function.name)) or key[0] in RUNTIME_DOMAINS:
            fault = f"is in onnxruntime's domain {quoted(key[0])}" if key[0] else "has the name of an ONNX operator"
            raise ModelError(
                f"local function {quoted(function.name)} {fault}; runtimes differ in which of the two they run: move "
                "it to a domain of its own"
            )
        functions[key] = function
    calls = {key: _calls(function.node, functions) for key, function in functions.items()}
    inlined: dict[_Key, int] = {}
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        raise ModelError(
            f"local function {quoted(error.args[1][0][1])} calls itself, directly or through others, which "
            "ONNX forbids; export the model again"
        ) from error
    for key in order:
        inlined[key] = len(functions[key].node) + sum(inlined[callee] * n for callee, n in calls[key].items())
    main = _calls(model.graph.node, functions)
    if sum(inlined[callee] * n for callee, n in main.items()) > MAX_INLINED:
        raise ModelError(
            f"inlining the local functions of this model yields more than {MAX_INLINED:,} nodes; export it without "
            "functions"
        )


def _calls(nodes: Iterable[onnx.NodeProto], functions: dict[_Key, onnx.FunctionProto]) -> Counter[_Key]:
    if not functions:
        return Counter()
    keys = ((_domain(node.domain), node.op_type, node.overload) for node in iter_nodes(nodes))
    return Counter(key for key in keys if key in functions)


# -- operators ---------------------------------------------------------------------------------------------------------


def _check_operators(model: onnx.ModelProto) -> None:
    """Check all nodes against the schemas of their operators, in subgraphs and local functions too.

    All other code reads the inputs that an operator must have without looking whether they are there. Operators
    without a schema in onnx are not checked, but for some of onnxruntime's.
    """
    opset = _opset(model.opset_import)
    for node in iter_nodes(model.graph.node):
        name = next((attribute.name for attribute in node.attribute if attribute.ref_attr_name), None)
        if name is not None:
            raise _unfit(node, f"refers with {quoted(name)} to an attribute of a function, but is in none")
    _check_nodes_of(model.graph.node, opset)
    for function in model.functions:
        _check_nodes_of(function.node, _opset(function.opset_import) or opset)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _opset(imports: Iterable[onnx.OperatorSetIdProto]) -> int:
    return next((entry.version for entry in imports if not _domain(entry.domain)), 0)


def _check_nodes_of(nodes: Iterable[onnx.NodeProto], opset: int) -> None:
    known = 0 < opset <= onnx.defs.onnx_opset_version()
    checker: Any = onnx.checker  # its stubs lack the module in C++
    context = checker.C.CheckerContext()
    context.ir_version, context.opset_imports = onnx.IR_VERSION, {"": opset}
    for node in iter_nodes(nodes):
        domain = _domain(node.domain)
        if not domain and known and onnx.defs.has(node.op_type, opset):
            try:
                checker.check_node(_outline(node), context)
            except onnx.checker.ValidationError as error:
                reason = str(error).partition("==> Context")[0]
                raise _unfit(node, f"does not suit opset {opset}: {one_line(reason).rstrip('.')}") from error
        elif not domain and onnx.defs.has(node.op_type):
            # onnx knows neither the operator sets of the future nor operators that onnxruntime added to older ones,
            # such as LayerNormalization; they may have more than the latest schema.
            _check_least(node, onnx.defs.get_schema(node.op_type).min_input)
        elif domain == "com.microsoft" and node.op_type in _MICROSOFT:
            _check_least(node, _MICROSOFT[node.op_type])


def _check_least(node: onnx.NodeProto, least: int) -> None:
    if len(node.input) < least:
        raise _unfit(node, f"has {counted(len(node.input), 'input')} and needs at least {least}")
    if not node.output or not node.output[0]:
        raise _unfit(node, "has no output")


def _outline(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node as onnx's checker is shown it: small, and with names for all outputs, which need not have one."""
    made = onnx.NodeProto(op_type=node.op_type, input=node.input, output=[name or "unread" for name in node.output])
    for attribute in node.attribute:
        bare = made.attribute.add()
        for field, value in attribute.ListFields():
            if field.name in _STANDS_IN:
                bare.MergeFrom(_STANDS_IN[field.name])
            elif isinstance(value, (int, float, str, bytes)):
                setattr(bare, field.name, decoded(value) if isinstance(value, bytes) and field.name != "s" else value)
            else:
                getattr(bare, field.name).MergeFrom(value)
    return made


def _unfit(node: onnx.NodeProto, what: str) -> ModelError:
    return ModelError(f"{_title(node)} {what}; export the model again")

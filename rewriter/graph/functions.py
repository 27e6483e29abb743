"""Local functions, inlined as the runtime does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import onnx
import onnx.inliner

from rewriter.graph.view import all_graphs, subgraphs

Name = tuple[str, str]
"""Domain and name of a function."""


def inlined(model: onnx.ModelProto, only: Collection[Name] | None = None) -> onnx.ModelProto:
    """A copy of the model without its local functions, or without those in `only`.

    Functions that import another operator set stay, and all of them if a call passes an attribute on that may be absent
    while the function that is called has a default for it: onnx cannot inline that.

    Raises:
        RuntimeError: one of `only` cannot be inlined.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    # onnx leaves out an attribute that a call does not give, default or not.
    sure = _state_defaults(copy)
    if only is None:
        return onnx.inliner.inline_local_functions(copy) if sure and copy.functions else copy
    if not sure:
        raise RuntimeError("a call passes an attribute on that may be absent")
    return onnx.inliner.inline_selected_functions(copy, list(only), exclude=False)


def _state_defaults(model: onnx.ModelProto) -> bool:
    """Let every call state the defaults of the attributes that it leaves out; False if that cannot be decided."""
    functions = {(each.domain, each.name, each.overload): each for each in model.functions}
    holders = [(list(model.graph.node), frozenset[str]())]
    holders += [(list(each.node), frozenset(each.attribute)) for each in model.functions]
    for nodes, unsure in holders:
        for node in _all_nodes(nodes):
            called = functions.get((node.domain, node.op_type, node.overload))
            given = {attribute.name: attribute.ref_attr_name for attribute in node.attribute}
            for default in () if called is None else called.attribute_proto:
                if default.name not in given:
                    node.attribute.append(default)
                elif given[default.name] in unsure:
                    return False
    return True


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and those of their bodies."""
    for node in nodes:
        yield node
        yield from (inner for _, body in subgraphs(node) for graph in all_graphs(body) for inner in graph.node)

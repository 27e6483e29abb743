"""Ways to change a model by hand, for tests of what notices that; `run` carries out one that a table tells as text.

Most tables of wrong models have one statement a row, such as `maker(m, "out").op_type = "Mul"`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.attention import Array

Nodes = Any
"""A repeated field of nodes, for which protobuf has no public type."""

Change = Callable[[onnx.ModelProto], object]

BRANCHES = ("then_branch", "else_branch")


def run(statement: str, **names: Any) -> Mapping[str, Any]:
    """Carry out a statement with numpy, onnx and this module at hand; what the names are afterwards."""
    scope = {**globals(), **names}
    exec(statement, scope)  # noqa: S102 - the tables are these tests' own
    return scope


def value(expression: str, **names: Any) -> Any:
    return eval(expression, {**globals(), **names})  # noqa: S307 - the tables are these tests' own


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    return deepcopy(model)


def changed(model: onnx.ModelProto, change: Change) -> onnx.ModelProto:
    """A copy that a change is made to."""
    result = copied(model)
    change(result)
    return result


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and all bodies of control flow in it."""
    yield graph
    for node in graph.node:
        for item in node.attribute:
            if item.HasField("g"):
                yield from graphs(item.g)


def body(model: onnx.ModelProto, attribute: str) -> onnx.GraphProto:
    """The first body under an attribute of that name."""
    found: onnx.GraphProto = next(
        item.g for node in model.graph.node for item in node.attribute if item.name == attribute
    )
    return found


def maker(model: onnx.ModelProto, tensor: str) -> onnx.NodeProto:
    """The node that makes a tensor, wherever it is."""
    found: onnx.NodeProto = next(node for graph in graphs(model.graph) for node in graph.node if tensor in node.output)
    return found


def weight(model: onnx.ModelProto, pattern: str) -> onnx.TensorProto:
    """The first initializer of the main graph whose name matches."""
    found: list[onnx.TensorProto] = [each for each in model.graph.initializer if fnmatchcase(each.name, pattern)]
    if not found:
        raise LookupError(f"no constant {pattern}")
    return found[0]


def function(model: onnx.ModelProto, name: str, domain: str | None = None) -> onnx.FunctionProto:
    found: onnx.FunctionProto = next(
        each for each in model.functions if each.name == name and domain in (None, each.domain)
    )
    return found


def nodes_of(model: onnx.ModelProto, operator: str) -> list[onnx.NodeProto]:
    """The main graph's nodes of a type."""
    found = [node for node in model.graph.node if node.op_type == operator]
    if not found:
        raise LookupError(f"no {operator}")
    return found


def change_values(tensor: onnx.TensorProto, statement: str) -> None:
    """Run a statement on the values `v` of a tensor, in float64; its type and shape stay."""
    before = numpy_helper.to_array(tensor)
    after = run(statement, v=before.astype(np.float64))["v"]
    tensor.CopyFrom(numpy_helper.from_array(after.astype(before.dtype), tensor.name))


def next_float(number: float) -> float:
    return float(np.nextafter(np.float32(number), np.float32(np.inf)))


def of_rank(values: Array, rank: int) -> Array:
    """Where the entries are that have the value of this rank, in ascending order."""
    return np.asarray(values == np.unique(values)[rank])


def nudge(tensor: onnx.TensorProto) -> None:
    """The first value of a weight becomes the next larger float32."""
    change_values(tensor, "v.flat[0] = next_float(v.flat[0])")


def add_weight(model: onnx.ModelProto, name: str, values: Any) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))


def reads(model: onnx.ModelProto, tensor: str, place: int, name: str) -> None:
    maker(model, tensor).input[place] = name


def swap(entries: Any, first: int, second: int) -> None:
    """Two entries of a repeated field change places."""
    copies = deepcopy(entries[first]), deepcopy(entries[second])
    entries[first].CopyFrom(copies[1])
    entries[second].CopyFrom(copies[0])


def swap_branches(model: onnx.ModelProto) -> None:
    """The bodies of an If change places."""
    bodies = [deepcopy(body(model, name)) for name in BRANCHES]
    for name, other in zip(BRANCHES, reversed(bodies), strict=True):
        body(model, name).CopyFrom(other)


def set_nodes(field: Nodes, nodes: Iterable[onnx.NodeProto]) -> None:
    """Other nodes in a graph or function, some of which may be its own."""
    copies = [deepcopy(node) for node in nodes]
    del field[:]
    field.extend(copies)


def attribute(node: onnx.NodeProto, **values: Any) -> None:
    kept = [entry for entry in node.attribute if entry.name not in values]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(*item) for item in values.items())])


def becomes(node: onnx.NodeProto, operator: str) -> None:
    """A node of another type of ONNX's own, with its first input only."""
    node.op_type = operator
    if node.domain:
        node.domain = ""
    del node.input[1:]


def turn(node: onnx.NodeProto) -> None:
    """The first input of a node moved to the end."""
    node.input.append(node.input.pop(0))


def swap_inputs(node: onnx.NodeProto) -> None:
    node.input[0], node.input[1] = node.input[1], node.input[0]


def rename(nodes: Nodes, names: Mapping[str, str]) -> None:
    for node in nodes:
        for field in (node.input, node.output):
            field[:] = [names.get(name, name) for name in field]


def insert(model: onnx.ModelProto, behind: str, operator: str, inputs: str, output: str, **attributes: Any) -> None:
    """A node more, right behind the one that makes a tensor; "" for the beginning."""
    nodes = list(model.graph.node)
    place = 1 + nodes.index(maker(model, behind)) if behind else 0
    made = helper.make_node(operator, inputs.split(), [output], f"n_{output}", **attributes)
    model.graph.node.insert(place, made)


def bypass(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """A node is gone, and what read it reads its first input."""
    model.graph.node.remove(node)
    rename(model.graph.node, {node.output[0]: node.input[0]})


def freeze(model: onnx.ModelProto, node: onnx.NodeProto, values: Array) -> None:
    """A computed tensor is replaced by an initializer of the same name."""
    model.graph.node.remove(node)
    add_weight(model, node.output[0], values)


def without(tensor: str) -> Change:
    """The node that makes a tensor is gone."""
    return lambda model: model.graph.node.remove(maker(model, tensor))

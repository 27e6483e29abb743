"""Edits of single constants, weights and nodes."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx

from passes.plan import Plan
from tests.sabotage.edits import Array, Edit, places
from tests.sabotage.harness import SabotageError

Change = Callable[[Array], Any]
"""From the values of a constant to wrong ones of the same shape."""

NodeChange = Callable[[onnx.NodeProto], object]


# -- constants -------------------------------------------------------------------------------------------------------


def weight(pattern: str, change: Change) -> Edit:
    """The first initializer whose name matches."""

    def edit(model: onnx.ModelProto, _: Plan) -> None:
        change_weight(model, pattern, change)

    return edit


def constant(name: str, change: Change, block: int = 0) -> Edit:
    """A constant that the rewriter made for one block."""

    def edit(model: onnx.ModelProto, plan: Plan) -> None:
        change_weight(model, f"{plan.conversions[block].block.name}/heads/{name}", change)

    return edit


def operand(which: str, change: Change, block: int = 0) -> Edit:
    """A weight of the original: `W1`, `b1`, `W2` or `b2` of one block."""

    def edit(model: onnx.ModelProto, plan: Plan) -> None:
        change_weight(model, _operand(plan, which, block), change)

    return edit


def change_weight(model: onnx.ModelProto, pattern: str, change: Change) -> None:
    """Change the first initializer whose name matches.

    Raises:
        SabotageError: there is none.
    """
    found = [tensor for tensor in model.graph.initializer if fnmatchcase(tensor.name, pattern)]
    if not found:
        raise SabotageError(f"no constant {pattern}")
    replace_values(found[0], change)


def replace_values(tensor: onnx.TensorProto, change: Change) -> None:
    """Change the values of a tensor; its type and shape stay."""
    before = onnx.numpy_helper.to_array(tensor)
    after = np.asarray(change(before.copy())).astype(before.dtype).reshape(before.shape)
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(after), tensor.name))


def _operand(plan: Plan, which: str, block: int) -> str:
    """The name of a weight, told by its rank: exporters put biases on either side of an Add."""
    found, view = plan.conversions[block].block, plan.views[0]
    (operator, *_) = found.first if which.endswith("1") else found.second
    node = view.nodes[operator.node]
    readers = [view.nodes[index] for index in view.consumers.get(node.output[0], ())]
    names = [*node.input, *(name for reader in readers if reader.op_type == "Add" for name in reader.input)]
    rank = 2 if which.startswith("W") else 1
    given = [name for name in names if name in view.initializers and len(view.initializers[name].dims) == rank]
    if not given:
        raise SabotageError(f"{found.name} has no {which}")
    return str(given[0])


# -- what becomes of values ------------------------------------------------------------------------------------------


def scaled(factor: float, *indices: int) -> Change:
    """Entries of an array (all without indices, counted flat) times a factor."""

    def change(values: Array) -> Array:
        flat = values.reshape(-1)
        chosen = list(indices) or slice(None)
        flat[chosen] = (flat[chosen].astype(np.float64) * factor).astype(values.dtype)
        return values

    return change


def value_scaled(factor: float, rank: int) -> Change:
    """All entries that equal the value of this rank, in ascending order, times a factor."""
    return lambda values: np.where(values == np.unique(values)[rank], values * factor, values)


def next_number(*indices: int) -> Change:
    """Entries of an array moved to the next number of their type."""

    def change(values: Array) -> Array:
        flat = values.reshape(-1)
        flat[list(indices)] = np.nextafter(flat[list(indices)], np.asarray(np.inf, values.dtype))
        return values

    return change


def rows_swapped(values: Array) -> Array:
    """The first two rows of a matrix exchanged."""
    values[[0, 1]] = values[[1, 0]]
    return values


# -- nodes -----------------------------------------------------------------------------------------------------------


def maker(pattern: str, change: NodeChange) -> Edit:
    """The nodes that make tensors whose names match."""

    def edit(model: onnx.ModelProto, _: Plan) -> None:
        for place in places(model, pattern):
            change(place.node)

    return edit


def nth(operator: str, number: int, change: NodeChange) -> Edit:
    """One of the main graph's nodes of a type."""
    return lambda model, _: _discard(change(nodes_of(model, operator)[number]))


def nodes_of(model: onnx.ModelProto, operator: str) -> list[onnx.NodeProto]:
    """The main graph's nodes of a type.

    Raises:
        SabotageError: there are none.
    """
    found = [node for node in model.graph.node if node.op_type == operator]
    if not found:
        raise SabotageError(f"no {operator}")
    return found


def attribute(name: str, value: Any) -> NodeChange:
    """Give a node another attribute."""

    def change(node: onnx.NodeProto) -> None:
        kept = [entry for entry in node.attribute if entry.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])

    return change


def becomes(operator: str, inputs: int | None = None) -> NodeChange:
    """A node of another type, with its first inputs only."""

    def change(node: onnx.NodeProto) -> None:
        node.op_type = operator
        if inputs is not None:
            del node.input[inputs:]

    return change


def turned(node: onnx.NodeProto) -> None:
    """The first input of a node moved to the end."""
    node.input.append(node.input.pop(0))


def renamed(nodes: Any, names: dict[str, str]) -> None:
    """Other names for tensors, wherever nodes read or make them."""
    for node in nodes:
        for field in (node.input, node.output):
            new = [names.get(name, name) for name in field]
            del field[:]
            field.extend(new)


def _discard(_: object) -> None:
    return None

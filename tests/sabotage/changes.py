"""What the statements of the table can call: changes of values, nodes, models, files and programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from passes.plan import Plan
from passes.programs.head import BiasToken, Head
from passes.programs.program import Program
from tests.sabotage.harness import SabotageError

Array = NDArray[Any]
Nodes = Any
"""A repeated field of nodes, for which protobuf has no public type."""


def run(statement: str, **names: Any) -> Mapping[str, Any]:
    """Carry out a statement of the table; what the names are afterwards."""
    scope = {**_AT_HAND, **names}
    exec(statement, scope)  # noqa: S102 - the table is this suite's own
    return scope


def value(expression: str, **names: Any) -> Any:
    """What an expression of the table is."""
    return eval(expression, {**_AT_HAND, **names})  # noqa: S307 - the table is this suite's own


# -- values ----------------------------------------------------------------------------------------------------------


def change_values(tensor: onnx.TensorProto, statement: str) -> None:
    """Run a statement on the values `v` of a tensor, in float64; its type and shape stay."""
    before = onnx.numpy_helper.to_array(tensor)
    after = run(statement, v=before.astype(np.float64))["v"]
    tensor.CopyFrom(onnx.numpy_helper.from_array(after.astype(before.dtype), tensor.name))


def next_float(number: float) -> float:
    """The next larger float32."""
    return float(np.nextafter(np.float32(number), np.float32(np.inf)))


def of_rank(values: Array, rank: int) -> Array:
    """Where the entries are that have the value of this rank, in ascending order."""
    return np.asarray(values == np.unique(values)[rank])


def first_initializer(model: onnx.ModelProto, pattern: str) -> onnx.TensorProto:
    """The first whose name matches.

    Raises:
        SabotageError: there is none.
    """
    found: list[onnx.TensorProto] = [each for each in model.graph.initializer if fnmatchcase(each.name, pattern)]
    if not found:
        raise SabotageError(f"no constant {pattern}")
    return found[0]


def operand(plan: Plan, which: str, block: int) -> str:
    """The name of `W1`, `b1`, `W2` or `b2` of one block, told by its rank: exporters put biases on either side."""
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


def larger_constant(model: onnx.ModelProto) -> None:
    """The float of the first Constant node that has one, a unit in the last place larger."""
    for node in nodes_of(model, "Constant"):
        for entry in node.attribute:
            if entry.t.data_type == onnx.TensorProto.FLOAT and not entry.t.dims:
                change_values(entry.t, "v[...] = next_float(v)")
                return
    raise SabotageError("no Constant node with a float")


# -- nodes -----------------------------------------------------------------------------------------------------------


def nodes_of(model: onnx.ModelProto, operator: str) -> list[onnx.NodeProto]:
    """The main graph's nodes of a type.

    Raises:
        SabotageError: there are none.
    """
    found = [node for node in model.graph.node if node.op_type == operator]
    if not found:
        raise SabotageError(f"no {operator}")
    return found


def set_nodes(field: Nodes, nodes: Iterable[onnx.NodeProto]) -> None:
    """Other nodes in a graph or function, some of which may be its own."""
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del field[:]
    field.extend(copies)


def attribute(node: onnx.NodeProto, **values: Any) -> None:
    """Give a node other attributes of these names."""
    kept = [entry for entry in node.attribute if entry.name not in values]
    del node.attribute[:]
    node.attribute.extend([*kept, *(onnx.helper.make_attribute(*item) for item in values.items())])


def becomes(node: onnx.NodeProto, operator: str) -> None:
    """A node of another type, with its first input only."""
    node.op_type = operator
    del node.input[1:]


def turn(node: onnx.NodeProto) -> None:
    """The first input of a node moved to the end."""
    node.input.append(node.input.pop(0))


def rename(nodes: Nodes, names: Mapping[str, str]) -> None:
    """Other names for tensors, wherever nodes read or make them."""
    for node in nodes:
        for field in (node.input, node.output):
            field[:] = [names.get(name, name) for name in field]


def bypass(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """A node is gone, and what read it reads its first input."""
    model.graph.node.remove(node)
    rename(model.graph.node, {node.output[0]: node.input[0]})


def freeze(model: onnx.ModelProto, node: onnx.NodeProto, values: Array) -> None:
    """A computed tensor is replaced by an initializer of the same name."""
    model.graph.node.remove(node)
    model.graph.initializer.append(onnx.numpy_helper.from_array(values, node.output[0]))


def drop_residual(model: onnx.ModelProto) -> None:
    """The last sum of two computed tensors becomes the second of them."""
    made = {name for node in model.graph.node for name in node.output if node.op_type != "Constant"}
    last = [node for node in nodes_of(model, "Add") if made.issuperset(node.input)][-1]
    last.op_type = "Identity"
    del last.input[0]


# -- models ----------------------------------------------------------------------------------------------------------


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model of its own."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def reverse(values: Any) -> None:
    """Inputs or outputs of a graph in the opposite order."""
    copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in reversed(values)]
    del values[:]
    values.extend(copies)


def branches(model: onnx.ModelProto) -> tuple[onnx.GraphProto, onnx.GraphProto]:
    """The bodies of the first If."""
    by_name = {entry.name: entry.g for entry in nodes_of(model, "If")[0].attribute}
    return by_name["then_branch"], by_name["else_branch"]


def exchange(first: onnx.GraphProto, second: onnx.GraphProto) -> None:
    """Each becomes the other."""
    data = first.SerializeToString()
    first.CopyFrom(second)
    second.ParseFromString(data)


def strip(model: onnx.ModelProto) -> None:
    """Everything lost that no runtime reads."""
    del model.metadata_props[:]
    del model.graph.value_info[:]
    model.producer_name = model.producer_version = model.doc_string = ""
    for node in (*model.graph.node, *(inner for function in model.functions for inner in function.node)):
        del node.metadata_props[:]
        node.doc_string = ""


def unuse_heads(model: onnx.ModelProto, plan: Plan) -> None:
    """The heads are there, and the original's activation is what the model uses."""
    block = plan.conversions[0].block
    view, made = plan.view_of(block), block.output
    (place,) = (at for at, node in enumerate(model.graph.node) if made in node.output)
    model.graph.node[place].output[list(model.graph.node[place].output).index(made)] = f"{made}/unused"
    present = {name for node in model.graph.node for name in node.output}
    region = [view.nodes[index] for index in block.region.nodes]
    back = [node for node in region if not present.issuperset(node.output)]
    set_nodes(model.graph.node, [*model.graph.node[:place], *back, *model.graph.node[place:]])
    known = {tensor.name for tensor in model.graph.initializer}
    model.graph.initializer.extend(tensor for tensor in plan.model.graph.initializer if tensor.name not in known)


# -- files -----------------------------------------------------------------------------------------------------------


def largest(model: onnx.ModelProto) -> onnx.TensorProto:
    """The initializer with the most bytes in the file."""
    found: onnx.TensorProto = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    return found


def flipped(data: bytes) -> bytes:
    """One bit of the largest tensor, the lowest of a mantissa."""
    place = data.index(largest(onnx.ModelProto.FromString(data)).raw_data)
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def round_weights(model: onnx.ModelProto) -> None:
    """Matrices in float32 with values of float16."""
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) == 2 and tensor.raw_data:
            change_values(tensor, "v = v.astype(np.float16)")


def shift_external(model: onnx.ModelProto) -> None:
    """A reference to external data points one number further."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "offset":
                entry.value = str(int(entry.value) - 4 if int(entry.value) else 4)
                return
    raise SabotageError("no external data")


def exchange_external(model: onnx.ModelProto) -> None:
    """Two weights of the same shape read each other's external data."""
    by_shape: dict[tuple[int, ...], onnx.TensorProto] = {}
    for tensor in model.graph.initializer:
        other = by_shape.setdefault(tuple(tensor.dims), tensor)
        if tensor.external_data and other.external_data and other is not tensor:
            name = tensor.name
            other.name, tensor.name = name, other.name
            return
    raise SabotageError("no two weights of the same shape")


# -- programs --------------------------------------------------------------------------------------------------------


def each_head(program: Program, change: Callable[[Head], Head]) -> Program:
    """Every head of a program changed."""
    return replace(program, heads=tuple(change(head) for head in program.heads), powers=None)


def steeper(program: Program, factor: float) -> Program:
    """Every slope times a factor."""

    def change(head: Head) -> Head:
        tokens = tuple(replace(token, slope=token.slope * factor) for token in head.bias_tokens)
        return replace(head, beta=head.beta * factor, bias_tokens=tokens)

    return each_head(program, change)


def one_fewer(head: Head) -> Head:
    """The last bias token missing."""
    return replace(head, bias_tokens=head.bias_tokens[:-1] or (BiasToken(value=1.0),))


def swapped_tokens(head: Head) -> Head:
    """Key and value of bias tokens swapped."""
    return replace(head, bias_tokens=tuple(replace(t, slope=t.value, value=t.slope) for t in head.bias_tokens))


_AT_HAND: Mapping[str, Any] = {
    **{name: each for name, each in globals().items() if callable(each)},
    "np": np,
    "onnx": onnx,
}

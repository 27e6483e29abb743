"""What the statements of the table can call beside `tests.changes`: what needs the plan, and changes of few models."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import onnx

from passes.plan import Plan, apply
from passes.programs.program import Head, Program
from tests import changes
from tests.changes import change_values, nodes_of, set_nodes
from tests.sabotage.harness import SabotageError


def run(statement: str, **names: Any) -> None:
    changes.run(statement, **_AT_HAND, **names)


def value(expression: str, **names: Any) -> Any:
    return changes.value(expression, **_AT_HAND, **names)


def operand(plan: Plan, which: str, block: int) -> str:
    """The name of `W1`, `b1`, `W2` or `b2` of one block, found by its rank: exporters put biases on either side."""
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


def drop_residual(model: onnx.ModelProto) -> None:
    """The last sum of two computed tensors becomes the second of them."""
    made = {name for node in model.graph.node for name in node.output if node.op_type != "Constant"}
    last = [node for node in nodes_of(model, "Add") if made.issuperset(node.input)][-1]
    last.op_type = "Identity"
    del last.input[0]


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


def largest(model: onnx.ModelProto) -> onnx.TensorProto:
    """The initializer with the most bytes in the file."""
    found: onnx.TensorProto = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    return found


def flipped(data: bytes) -> bytes:
    """One bit of the largest tensor, the lowest of a mantissa."""
    place = data.index(largest(onnx.ModelProto.FromString(data)).raw_data)
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def shift_external(model: onnx.ModelProto) -> None:
    """A reference to external data points one number further."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "offset":
                entry.value = str(int(entry.value) - 4 if int(entry.value) else 4)
                return
    raise SabotageError("no external data")


def exchange_external(model: onnx.ModelProto) -> None:
    """Two weights of the same shape exchange their external data."""
    by_shape: dict[tuple[int, ...], onnx.TensorProto] = {}
    for tensor in model.graph.initializer:
        other = by_shape.setdefault(tuple(tensor.dims), tensor)
        if tensor.external_data and other.external_data and other is not tensor:
            name = tensor.name
            other.name, tensor.name = name, other.name
            return
    raise SabotageError("no two weights of the same shape")


def first_only(plan: Plan) -> onnx.ModelProto:
    return apply(replace(plan, conversions=plan.conversions[:1]))


def each_head(program: Program, change: Callable[[Head], Head]) -> Program:
    return replace(program, heads=tuple(change(head) for head in program.heads), powers=None)


def steeper(program: Program, factor: float) -> Program:

    def change(head: Head) -> Head:
        tokens = tuple(replace(token, slope=token.slope * factor) for token in head.bias_tokens)
        return replace(head, beta=head.beta * factor, bias_tokens=tokens)

    return each_head(program, change)


_OWN = ("run", "value", "changes")
_AT_HAND: Mapping[str, Any] = {name: each for name, each in globals().items() if name not in _OWN}

"""Random damage to a model: `DAMAGES` is the table, `damaged` applies some of it.

Half of it is blind: any field of any message of the file may change. The other half knows what a graph is, so that many
results are still sound, and get as far as the matcher and the emitters.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from random import Random
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]

from passes.match.linear import LINEAR_OPERATORS
from rewriter.evaluate.table import ELEMENTWISE
from rewriter.graph.fused import FUSED
from rewriter.graph.walk import all_graphs

Damage = Callable[[onnx.ModelProto, Random], None]

_OTHERS = (
    *("Attention", "BatchNormalization", "Cast", "CastLike", "Concat", "Constant", "DequantizeLinear", "Dropout"),
    *("DynamicQuantizeLinear", "Expand", "Flatten", "Gather", "Identity", "If", "LayerNormalization", "Loop"),
    *("QuantizeLinear", "Reshape", "Shape", "Slice", "Softmax", "Split", "Squeeze", "Swish", "Transpose", "Where"),
)
OPERATORS = sorted({*LINEAR_OPERATORS, *FUSED, *ELEMENTWISE, *(("", name) for name in _OTHERS)})
NUMBERS = (-(2**63), -(2**31), -65, -3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 64, 255, 2**20, 2**31 - 1, 2**31, 2**63 - 1)
REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-7, 3.4e38, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "x", "mlp", "a/b", "\x1b[31m", "[red]", "\u202egnp", "é" * 40, "'", "{}", "%s", "<b>", "\x00", "w" * 5000)
TYPES = (0, 1, 1, 1, 2, 3, 6, 7, 8, 9, 10, 11, 16, 17, 22, 99)


def damaged(model: onnx.ModelProto, rng: Random) -> bytes:
    """The bytes of a copy of `model` with one to four places damaged."""
    copy = deepcopy(model)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        damage = rng.choice(tuple(DAMAGES.values()))
        damage(copy, rng)
    data: bytes = copy.SerializeToString()
    if rng.random() < 0.05:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        data = bytes(changed[: rng.choice((len(changed), rng.randrange(len(changed)) + 1))])
    return data


# -- blind ---------------------------------------------------------------------------------------------------


def _any_field(model: onnx.ModelProto, rng: Random) -> None:
    every = list(messages(model))
    message = rng.choice(every)
    field = rng.choice(message.DESCRIPTOR.fields)
    if repeated(field):
        _change_list(getattr(message, field.name), field, every, rng)
    elif field.message_type is not None:
        others = [each for each in every if each.DESCRIPTOR is field.message_type]
        if others and rng.random() < 0.6:
            getattr(message, field.name).CopyFrom(deepcopy(rng.choice(others)))
        else:
            message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(field, rng))


def repeated(field: FieldDescriptor) -> bool:
    """Whether a field is a list; protobuf changed how it says so."""
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def _change_list(items: Any, field: FieldDescriptor, messages: list[Any], rng: Random) -> None:
    act = rng.choice(("delete", "double", "add", "swap", "clear"))
    if act == "clear":
        del items[:]
    elif act == "delete" and items:
        del items[rng.randrange(len(items))]
    elif field.message_type is not None:
        others = (
            list(items) if act == "double" else [each for each in messages if each.DESCRIPTOR is field.message_type]
        )
        if others:
            items.add().CopyFrom(deepcopy(rng.choice(others)))
    elif act == "swap" and items:
        items[rng.randrange(len(items))] = _value(field, rng)
    else:
        items.append(rng.choice(list(items)) if items and act == "double" else _value(field, rng))


def messages(message: Any) -> Iterator[Any]:
    """A message and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if repeated(field) else (value,):
                yield from messages(each)


def _value(field: FieldDescriptor, rng: Random) -> Any:
    if field.enum_type is not None:
        return rng.choice(field.enum_type.values).number
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice(TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(REALS)
    number = rng.choice(NUMBERS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_INT32:
        return (number + 2**31) % 2**32 - 2**31
    return number % 2**64 if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64 else number


# -- with sense ----------------------------------------------------------------------------------------------


def _node(model: onnx.ModelProto, rng: Random) -> onnx.NodeProto:
    graphs = [graph for graph in all_graphs(model.graph) if graph.node] or [model.graph]
    graph = rng.choice(graphs)
    node: onnx.NodeProto = rng.choice(graph.node) if graph.node else graph.node.add(op_type="Identity")
    return node


def _operator(model: onnx.ModelProto, rng: Random) -> None:
    node = _node(model, rng)
    node.domain, node.op_type = rng.choice(OPERATORS)
    if node.domain and all(each.domain != node.domain for each in model.opset_import):
        model.opset_import.add(domain=node.domain, version=1)


def _operand(model: onnx.ModelProto, rng: Random) -> None:
    """Another tensor as an input of a node: of all names, so that most are in order where nodes are few."""
    node = _node(model, rng)
    names = [name for each in model.graph.node for name in (*each.input, *each.output)]
    names += [each.name for each in (*model.graph.initializer, *model.graph.input)]
    if node.input and names:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)


def _inputs(model: onnx.ModelProto, rng: Random) -> None:
    names = _node(model, rng).input
    act = rng.choice(("drop", "double", "empty", "turn"))
    if act == "drop" and names:
        names.pop()
    elif act == "empty" and names:
        names[rng.randrange(len(names))] = ""
    elif act == "turn":
        names[:] = list(names)[::-1]
    elif names:
        names.append(rng.choice(list(names)))


def _weight(model: onnx.ModelProto, rng: Random) -> None:
    """Another shape, element type or values of an initializer, with as many bytes as that needs."""
    if not model.graph.initializer:
        return
    tensor = rng.choice(model.graph.initializer)
    try:
        array = np.asarray(onnx.numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError):
        return
    act = rng.choice(("shape", "type", "values", "axes", "empty"))
    if act == "shape":
        array = np.resize(array, [rng.choice((1, 2, 3, 4, 8)) for _ in range(rng.randrange(4))])
    elif act == "type":
        array = array.astype(rng.choice((np.float16, np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_)))
    elif act == "values" and array.dtype.kind == "f" and array.size:
        array = array.copy()
        array.flat[rng.randrange(array.size)] = rng.choice(REALS)
    elif act == "axes":
        array = array.T if rng.random() < 0.5 else array[None]
    elif act == "empty":
        array = array[:0] if array.ndim else array.reshape(1)[:0]
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), tensor.name))


def _type(model: onnx.ModelProto, rng: Random) -> None:
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    if not values:
        return
    tensor = rng.choice(values).type.tensor_type
    if rng.random() < 0.4:
        tensor.elem_type = rng.choice(TYPES)
    elif tensor.shape.dim and rng.random() < 0.7:
        tensor.shape.dim[rng.randrange(len(tensor.shape.dim))].dim_value = rng.choice(NUMBERS)
    else:
        del tensor.shape.dim[1:]


def _opset(model: onnx.ModelProto, rng: Random) -> None:
    if model.opset_import:
        rng.choice(model.opset_import).version = rng.choice((1, 5, 6, 7, 9, 10, 11, 12, 13, 15, 18, 20, 22, 23, 24, 99))


def _branch(model: onnx.ModelProto, rng: Random) -> None:
    """A node moves into both branches of an If."""
    node = _node(model, rng)
    inner, outputs = deepcopy(node), list(node.output)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(rng.random() < 0.5), "condition"))
    body = onnx.helper.make_graph([inner], "body", [], [onnx.ValueInfoProto(name=name) for name in outputs if name])
    made = onnx.helper.make_node("If", ["condition"], outputs, then_branch=body, else_branch=body)
    node.CopyFrom(made)


def _function(model: onnx.ModelProto, rng: Random) -> None:
    """A node moves into a local function."""
    node = _node(model, rng)
    inner = deepcopy(node)
    read, made = list(dict.fromkeys(filter(None, node.input))), list(dict.fromkeys(filter(None, node.output)))
    name = rng.choice(("f", "Relu", "SiLU"))
    domain = rng.choice(("local", "", "pkg.torch"))
    model.functions.append(
        onnx.helper.make_function(domain, name, read, made, [inner], [deepcopy(each) for each in model.opset_import])
    )
    node.CopyFrom(onnx.helper.make_node(name, read, made, domain=domain))
    if all(each.domain != domain for each in model.opset_import):
        model.opset_import.add(domain=domain, version=1)


def _defaults(model: onnx.ModelProto, rng: Random) -> None:
    """An initializer becomes the default of an input, or is gone and only the input is left."""
    if model.graph.initializer:
        index = rng.randrange(len(model.graph.initializer))
        tensor = model.graph.initializer[index]
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        if rng.random() < 0.5:
            del model.graph.initializer[index]


def _names(model: onnx.ModelProto, rng: Random) -> None:
    """A tensor gets a strange name, everywhere."""
    names = [name for node in model.graph.node for name in node.output if name]
    if not names:
        return
    old, new = rng.choice(names), rng.choice(TEXTS[1:])
    for node in (node for graph in all_graphs(model.graph) for node in graph.node):
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for value in (*model.graph.output, *model.graph.value_info):
        value.name = new if value.name == old else value.name


DAMAGES: Mapping[str, Damage] = {
    "any field": _any_field,
    "any other field": _any_field,
    "and another": _any_field,
    "operator": _operator,
    "operand": _operand,
    "inputs": _inputs,
    "weight": _weight,
    "type": _type,
    "opset": _opset,
    "branch": _branch,
    "function": _function,
    "defaults": _defaults,
    "names": _names,
}

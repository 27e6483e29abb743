"""An oracle: what an ONNX model computes, in float64, by nothing that this project could have wrong.

`evaluate` takes a model and what it is fed with, and gives its outputs, `tensors` all tensors of its main graph: every
float in float64, casts among float types included. Model-local functions are called, If and Loop are carried out; the
operators are those of `tests.oracle_operators`, and onnx's where numbers are only moved, compared or summed. A test can
plant values: functions of the tensors made so far that take the place of one, such as the numbers of a head program
that take an activation's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from tests.attention import Array
from tests.oracle_operators import OPERATORS, Call, Outputs, widened

Values = dict[str, Array]
Inputs = Sequence[Array | None]
Attributes = Mapping[str, onnx.AttributeProto]
Planted = Mapping[str, Callable[[Mapping[str, Array]], Array]]
"""Name of a tensor to what it is to be, as a function of all tensors made before it."""


@dataclass(frozen=True)
class _Scope:
    """What nodes need beside their inputs: the opsets, the functions, and the attributes of the function's call."""

    opsets: Mapping[str, int]
    functions: Mapping[tuple[str, str], onnx.FunctionProto]
    planted: Planted = field(default_factory=dict)
    given: Attributes = field(default_factory=dict)


def evaluate(model: onnx.ModelProto, feeds: Mapping[str, Array], planted: Planted | None = None) -> Values:
    made = tensors(model, feeds, planted)
    return {output.name: made[output.name] for output in model.graph.output}


def tensors(model: onnx.ModelProto, feeds: Mapping[str, Array], planted: Planted | None = None) -> Values:
    """All tensors of the model's main graph."""
    functions = {(_domain(function), function.name): function for function in model.functions}
    scope = _Scope(_opsets(model.opset_import), functions, planted or {})
    fed = {name: widened(np.asarray(array)) for name, array in feeds.items()}
    with np.errstate(all="ignore"):
        return _graph(model.graph, fed, scope)


def _graph(graph: onnx.GraphProto, around: Mapping[str, Array], scope: _Scope) -> Values:
    """All tensors of a graph. A graph input that is fed hides the initializer that is its default."""
    values = {tensor.name: widened(onnx.numpy_helper.to_array(tensor)) for tensor in graph.initializer}
    values.update(around)
    _run(graph.node, values, scope)
    return values


def _run(nodes: Sequence[onnx.NodeProto], values: Values, scope: _Scope) -> None:
    for node in nodes:
        if set(node.output) <= set(scope.planted):
            made: Outputs = tuple(scope.planted[name](values) for name in node.output)
        else:
            made = _node(node, values, scope)
        outputs = made if isinstance(made, tuple) else (made,)
        for name, value in zip(node.output, outputs, strict=False):
            values[name] = np.asarray(value)


def _node(node: onnx.NodeProto, values: Values, scope: _Scope) -> Outputs:
    inputs = [values[name] if name else None for name in node.input]
    stated = [scope.given.get(entry.ref_attr_name) if entry.ref_attr_name else entry for entry in node.attribute]
    names = [entry.name for entry in node.attribute]
    attributes = {name: entry for name, entry in zip(names, stated, strict=True) if entry is not None}
    key = (_domain(node), node.op_type)
    if key in scope.functions:
        return _function(scope.functions[key], inputs, attributes, scope)
    if key in _CONTROL:
        return _CONTROL[key](attributes, inputs, values, scope)
    if key not in OPERATORS:
        return _by_onnx(node, inputs, attributes, scope)
    call = Call({name: _value(entry) for name, entry in attributes.items()}, scope.opsets[key[0]])
    return OPERATORS[key](call, *inputs)


def _by_onnx(node: onnx.NodeProto, inputs: Inputs, attributes: Attributes, scope: _Scope) -> Outputs:
    """What only moves, compares or sums numbers, by onnx's reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    feeds = {f"i{place}": value for place, value in enumerate(inputs) if value is not None}
    names = [f"i{place}" if value is not None else "" for place, value in enumerate(inputs)]
    outputs = [f"o{place}" for place in range(len(node.output))]
    alone = onnx.helper.make_node(node.op_type, names, outputs)
    for name, stated in attributes.items():
        entry = alone.attribute.add()
        entry.CopyFrom(stated)
        entry.name, entry.ref_attr_name = name, ""
    graph = onnx.helper.make_graph(
        [alone], "g", [onnx.ValueInfoProto(name=name) for name in feeds], [onnx.ValueInfoProto(name=o) for o in outputs]
    )
    opsets = [onnx.helper.make_opsetid("", scope.opsets[""])]
    made = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets)).run(None, feeds)
    return tuple(widened(np.asarray(value)) for value in made)


def _function(function: onnx.FunctionProto, inputs: Inputs, attributes: Attributes, scope: _Scope) -> Outputs:
    """A function sees its inputs and attributes, and nothing else of the graph that calls it."""
    given = {entry.name: entry for entry in function.attribute_proto} | dict(attributes)
    inner = _Scope(_opsets(function.opset_import), scope.functions, given=given)
    values = {name: value for name, value in zip(function.input, inputs, strict=False) if value is not None}
    _run(function.node, values, inner)
    return tuple(values[name] for name in function.output)


def _if(attributes: Attributes, inputs: Inputs, values: Values, scope: _Scope) -> Outputs:
    (condition,) = inputs
    graph = attributes["then_branch" if condition is not None and condition.item() else "else_branch"].g
    made = _graph(graph, values, scope)
    return tuple(made[output.name] for output in graph.output)


def _loop(attributes: Attributes, inputs: Inputs, values: Values, scope: _Scope) -> Outputs:
    """Inputs: trips, condition, states. The body: step, condition, states -> condition, states, scanned outputs."""
    body = attributes["body"].g
    trips, going, *states = inputs
    scanned: list[list[Array]] = [[] for _ in body.output[1 + len(states) :]]
    step = 0
    while (trips is None or step < trips.item()) and (going is None or going.item()):
        given = [np.asarray(step, np.int64), np.asarray(True if going is None else going), *states]
        named = {entry.name: value for entry, value in zip(body.input, given, strict=True) if value is not None}
        made = _graph(body, {**values, **named}, scope)
        going, *rest = (made[output.name] for output in body.output)
        states = list(rest[: len(states)])
        for kept, value in zip(scanned, rest[len(states) :], strict=True):
            kept.append(value)
        step += 1
    return (*(np.asarray(state) for state in states), *(np.stack(kept) for kept in scanned))


_CONTROL = {("", "If"): _if, ("", "Loop"): _loop}


def _value(entry: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(entry)
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return value.decode() if isinstance(value, bytes) else value


def _opsets(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in imports}


def _domain(named: onnx.NodeProto | onnx.FunctionProto) -> str:
    return "" if named.domain == "ai.onnx" else str(named.domain)

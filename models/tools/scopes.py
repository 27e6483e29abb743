"""The same nodes in an inner scope: the bodies of If and Loop, and model-local functions."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models.tools.common import Hints, Refused, opset, topological

CONDITION = "use_cache_branch"
DOMAIN = "blocks"
_LAYER = re.compile(r"^(.*?[./]\d+)(?:[./]|$)")


def if_bodies(*, weights_outside: bool) -> Callable[[Path, Path, Hints], None]:
    """The whole graph in both bodies of an If, as optimum merges decoders; weights are captured or stored in each."""

    def run(source: Path, target: Path, _: Hints) -> None:
        model = onnx.load(source)
        inner = model.graph
        outputs = [value.name for value in inner.output]
        outer = helper.make_graph([], "merged", list(inner.input), list(inner.output))
        outer.input.append(helper.make_tensor_value_info(CONDITION, TensorProto.BOOL, [1]))
        if weights_outside:
            outer.initializer.extend(inner.initializer)
        bodies = {branch: _body(inner, branch, weights=not weights_outside) for branch in ("then", "else")}
        outer.node.append(
            helper.make_node("If", [CONDITION], outputs, "if", then_branch=bodies["then"], else_branch=bodies["else"])
        )
        model.graph.CopyFrom(outer)
        onnx.save(model, target)

    return run


def loop_body(source: Path, target: Path, _: Hints) -> None:
    """The whole graph in the body of a Loop that runs once; weights are captured from outside."""
    model = onnx.load(source)
    if opset(model) < 13:
        raise Refused("written for opset 13 and above")
    inner = model.graph
    body = _body(inner, "body", weights=False)
    body.input.extend(
        [
            helper.make_tensor_value_info("loop/i", TensorProto.INT64, []),
            helper.make_tensor_value_info("loop/go", TensorProto.BOOL, []),
        ]
    )
    results = list(body.output)
    del body.output[:]
    body.output.extend([helper.make_tensor_value_info("loop/again", TensorProto.BOOL, []), *results])
    body.node.append(helper.make_node("Identity", ["loop/go"], ["loop/again"]))
    outer = helper.make_graph([], "looped", list(inner.input), list(inner.output), list(inner.initializer))
    outer.initializer.extend(
        [
            numpy_helper.from_array(np.array(1, np.int64), "loop/trips"),
            numpy_helper.from_array(np.array(True), "loop/start"),
            numpy_helper.from_array(np.array([0], np.int64), "loop/axis"),
        ]
    )
    scans = [f"{value.name}/scan" for value in inner.output]
    outer.node.append(helper.make_node("Loop", ["loop/trips", "loop/start"], scans, "loop", body=body))
    for scan, value in zip(scans, inner.output, strict=True):
        outer.node.append(helper.make_node("Squeeze", [scan, "loop/axis"], [value.name]))
    model.graph.CopyFrom(outer)
    onnx.save(model, target)


def _body(graph: onnx.GraphProto, suffix: str, *, weights: bool) -> onnx.GraphProto:
    """The nodes as a body that captures the graph's inputs; its tensors get a suffix to avoid shadowing."""
    made = {name for node in graph.node for name in node.output if name}
    if weights:
        made |= {tensor.name for tensor in graph.initializer}
    body = helper.make_graph([], f"{graph.name}_{suffix}", [], [])
    for node in graph.node:
        if any(attribute.g.node or attribute.graphs for attribute in node.attribute):
            raise Refused("the graph holds control flow already")
        copy = body.node.add()
        copy.CopyFrom(node)
        copy.input[:] = [f"{name}/{suffix}" if name in made else name for name in node.input]
        copy.output[:] = [f"{name}/{suffix}" if name else "" for name in node.output]
    for tensor in graph.initializer if weights else ():
        copied = body.initializer.add()
        copied.CopyFrom(tensor)
        copied.name = f"{tensor.name}/{suffix}"
    for value in graph.output:
        output = body.output.add()
        output.CopyFrom(value)
        output.name = f"{value.name}/{suffix}"
        if value.name not in made:
            raise Refused("an output of the graph is an input")
    for value in graph.value_info:
        if value.name in made:
            copied_info = body.value_info.add()
            copied_info.CopyFrom(value)
            copied_info.name = f"{value.name}/{suffix}"
    return body


def functions(*, shared: bool) -> Callable[[Path, Path, Hints], None]:
    """Every layer as a call of a model-local function.

    Args:
        shared: layers with the same nodes call one function, and weights are its inputs. Otherwise each layer has a
            separate function that holds its weights as Constant nodes.
    """

    def run(source: Path, target: Path, _: Hints) -> None:
        model = onnx.load(source)
        groups = _layers(model.graph)
        model.ir_version = max(model.ir_version, 8)
        bodies: dict[bytes, str] = {}
        calls: dict[int, onnx.NodeProto] = {}
        for name, members in groups.items():
            body, inputs, outputs = _function(model, members, constants=not shared)
            key = body.SerializeToString(deterministic=True) if shared else name.encode()
            if key not in bodies:
                bodies[key] = f"Layer{len(bodies)}"
                body.name = bodies[key]
                model.functions.append(body)
            calls[members[0]] = helper.make_node(bodies[key], inputs, outputs, name, domain=DOMAIN)
        inside = {index for members in groups.values() for index in members}
        rest = [node for index, node in enumerate(model.graph.node) if index not in inside]
        ordered = topological([*rest, *calls.values()], model.graph)
        del model.graph.node[:]
        model.graph.node.extend(ordered)
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        onnx.save(model, target)

    return run


def _layers(graph: onnx.GraphProto) -> dict[str, list[int]]:
    """Nodes grouped by the layer that their scope names."""
    groups: dict[str, list[int]] = {}
    for index, node in enumerate(graph.node):
        scopes = next((prop.value for prop in node.metadata_props if prop.key.endswith("name_scopes")), node.name)
        for path in reversed(scopes.strip("[]").split(",")):
            found = _LAYER.match(path.strip(" '\""))
            if found:
                groups.setdefault(found.group(1), []).append(index)
                break
    groups = {name: members for name, members in groups.items() if len(members) > 3}
    if not groups:
        raise Refused("no layer can be told from the names of the nodes")
    return groups


def _function(
    model: onnx.ModelProto, members: list[int], *, constants: bool
) -> tuple[onnx.FunctionProto, list[str], list[str]]:
    """The nodes as a function with its own tensor names, and the inputs and outputs of a call of it."""
    graph = model.graph
    nodes = [graph.node[index] for index in members]
    if any(attribute.g.node for node in nodes for attribute in node.attribute):
        raise Refused("a layer holds control flow")
    weights = {tensor.name: tensor for tensor in graph.initializer} if constants else {}
    made = {name for node in nodes for name in node.output if name}
    read = list(dict.fromkeys(name for node in nodes for name in node.input if name and name not in made))
    inside = set(members)
    elsewhere = {name for index, node in enumerate(graph.node) if index not in inside for name in node.input} | {
        value.name for value in graph.output
    }
    outputs = [name for name in dict.fromkeys(n for node in nodes for n in node.output) if name in elsewhere]
    held = [name for name in read if name in weights]
    inputs = [name for name in read if name not in weights]
    names = {name: f"in{position}" for position, name in enumerate(inputs)}
    names |= {name: f"w{position}" for position, name in enumerate(held)}
    body = onnx.FunctionProto(name="", domain=DOMAIN)
    for name in held:
        body.node.append(helper.make_node("Constant", [], [names[name]], value=weights[name]))
    for node in nodes:
        for name in node.output:
            if name:
                names[name] = f"t{len(names)}"
        copy = body.node.add(op_type=node.op_type, domain=node.domain)
        copy.input.extend(names.get(name, "") for name in node.input)
        copy.output.extend(names.get(name, "") for name in node.output)
        copy.attribute.extend(sorted(node.attribute, key=lambda attribute: attribute.name))
    body.input.extend(names[name] for name in inputs)
    body.output.extend(names[name] for name in outputs)
    body.opset_import.extend(model.opset_import)
    return body, inputs, outputs

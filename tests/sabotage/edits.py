"""From a row of the table, *where* and *what*, to the wrong part of the rewriter.

| where | what is done there |
| --- | --- |
| `heads N` | text: what the heads of block N compute, [..., neurons]; N is 0 unless told |
| `result N` | text: what block N adds to the residual stream, [..., width] |
| `tensor GLOB` | text: tensors that the rewritten model makes, in functions and bodies too; `$` is of the heads' type |
| `float32 GLOB` | text: the same, where `$` is float32 |
| `constant NAME` | statement on the values `v` of a constant of the first block's heads |
| `weight GLOB`, `operand W2 N` | statement on the values `v` of an initializer, of a weight of block N |
| `maker GLOB`, `nth OP N` | statement on the `node` that makes a tensor, on one of a type |
| `model` | statement on the rewritten `model`, with the `plan` at hand |
| `instead` | expression: another model than the rewritten one |
| `plan` | expression: another `program` than the certificate is about |
| `lowered OP` | statement on each `node` of a type, after fused operators are taken apart |
| `file`, `bytes` | statement on the `model`, expression of the `data` that are written |
| `nowhere` | nothing is wrong with the rewriter |

Text is in the syntax of `onnx.parser`: `own` is what the rewriter computes, `out` what is put in its place. `$0.5` is a
scalar of the tensor's element type, `#0` an integer tensor [1], `#0,2` one of [2], and `#end` the end of any axis.
Statements are Python with numpy, onnx and what `changes.py` has.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.plan import Plan
from tests.cases import result_of
from tests.changes import Nodes, change_values, copied, nodes_of, rename, set_nodes, weight
from tests.sabotage import changes
from tests.sabotage.changes import operand
from tests.sabotage.harness import Part, Patch, SabotageError

DOMAIN = "attnonly"

_NUMBER = r"-?(?:[0-9.]+(?:e[+-]?[0-9]+)?|inf|nan|end)"
_SHORTHAND = re.compile(rf"([$#])({_NUMBER}(?:,{_NUMBER})*)")
_END = 2**62


def patch(where: str, what: str, *, only_carried: bool = False) -> Patch:
    """The wrong part; `only_carried`: wrong only in the model whose network carries bias tokens."""
    place, _, at = where.partition(" ")
    if place == "nowhere":
        return {}
    if place in _OTHER_PARTS:
        point, make = _OTHER_PARTS[place]
        return {point: lambda right: make(right, at, what)}

    def wrapper(right: Part) -> Part:
        def wrong(plan: Plan) -> tuple[onnx.ModelProto, list[str]]:
            made, added = right(plan)
            if not only_carried or plan.whole is not None:
                _edit(made, plan, place, at, what)
            return made, added

        return wrong

    return {"made": wrapper}


def _edit(model: onnx.ModelProto, plan: Plan, place: str, at: str, what: str) -> None:
    """An edit that fails or does nothing is a mistake of the suite, and must not look like one of the rewriter."""
    before = model.SerializeToString(deterministic=True)
    try:
        _EDITS[place](model, plan, at, what)
    except Exception as error:
        raise SabotageError(f"the edit failed: {error}") from error
    if model.SerializeToString(deterministic=True) == before:
        raise SabotageError("the edit changed nothing")


def _heads(model: onnx.ModelProto, plan: Plan, at: str, what: str) -> None:
    """In the text `y` and `u` are pre-activation and value.

    In forms that replace a whole block there is no `y`, and the rows of the bias tokens come after those of the tokens.
    """
    conversion = plan.conversions[int(at or 0)]
    if conversion.projections is not None:
        z = f"{conversion.block.name}/heads/z_side_by_side"
        _replace(model, z, what, conversion.compute_type, {})
    else:
        block = conversion.block
        _replace(model, block.output, what, block.elem_type, {"y": block.gate, "u": block.value})


def _result(model: onnx.ModelProto, plan: Plan, at: str, what: str) -> None:
    conversion = plan.conversions[int(at or 0)]
    _replace(model, result_of(conversion), what, conversion.block.elem_type, {})


def _operand(model: onnx.ModelProto, plan: Plan, at: str, what: str) -> None:
    which, _, block = at.partition(" ")
    change_values(weight(model, operand(plan, which, int(block or 0))), what)


def _constant(model: onnx.ModelProto, plan: Plan, at: str, what: str) -> None:
    change_values(weight(model, f"{plan.conversions[0].block.name}/heads/{at}"), what)


def _maker(model: onnx.ModelProto, _: Plan, at: str, what: str) -> None:
    for place in places(model, at):
        changes.run(what, node=place.node)


def _nth(model: onnx.ModelProto, _: Plan, at: str, what: str) -> None:
    operator, number = at.split()
    changes.run(what, node=nodes_of(model, operator)[int(number)])


_EDITS: Mapping[str, Callable[[onnx.ModelProto, Plan, str, str], None]] = {
    "heads": _heads,
    "result": _result,
    "tensor": lambda model, plan, at, what: _replace(model, at, what, plan.conversions[0].compute_type, {}),
    "float32": lambda model, _, at, what: _replace(model, at, what, onnx.TensorProto.FLOAT, {}),
    "constant": _constant,
    "weight": lambda model, _, at, what: change_values(weight(model, at), what),
    "operand": _operand,
    "maker": _maker,
    "nth": _nth,
    "model": lambda model, plan, _, what: changes.run(what, model=model, plan=plan),
}


def _instead(_: Part, __: str, what: str) -> Part:
    return lambda plan: (copied(changes.value(what, plan=plan)), [])


def _planned(right: Part, _: str, what: str) -> Part:
    def wrong(*arguments: Any, **options: Any) -> Any:
        found = right(*arguments, **options)
        if not isinstance(found, Conversion):
            return found
        # rounded again, so that the heads in the graph are those of the plan
        program = changes.value(what, program=found.program).rounded(found.dtype, factored=found.form == "local")
        return replace(found, program=program)

    return wrong


def _lowered(right: Part, at: str, what: str) -> Part:
    def wrong(*arguments: Any, **options: Any) -> tuple[onnx.ModelProto, Any, Any]:
        found, *others = right(*arguments, **options)
        model = copied(found)
        for node in nodes_of(model, at):
            changes.run(what, node=node)
        return model, *others

    return wrong


def _bytes(right: Part, at: str, what: str, change: Callable[[bytes], bytes] | None = None) -> Part:
    def wrong(*arguments: Any, **options: Any) -> tuple[int, list[bytes]]:
        data = b"".join(right(*arguments, **options)[1])
        changed = change(data) if change else changes.value(what, data=data)
        if changed == data:
            raise SabotageError("the bytes are the same")
        return len(changed), [changed]

    return wrong


def _file(right: Part, at: str, what: str) -> Part:
    def change(data: bytes) -> bytes:
        model = onnx.ModelProto.FromString(data)
        changes.run(what, model=model)
        return bytes(model.SerializeToString(deterministic=True))

    return _bytes(right, at, what, change)


_OTHER_PARTS: Mapping[str, tuple[str, Callable[[Part, str, str], Part]]] = {
    "instead": ("made", _instead),
    "plan": ("decide", _planned),
    "lowered": ("lower", _lowered),
    "bytes": ("serialise", _bytes),
    "file": ("serialise", _file),
}


@dataclass(frozen=True)
class Place:
    """A tensor where it is made: a node of a graph or of a function's body, and which of its outputs."""

    nodes: Nodes
    index: int
    slot: int
    function: bool

    @property
    def node(self) -> onnx.NodeProto:
        node: onnx.NodeProto = self.nodes[self.index]
        return node


def places(model: onnx.ModelProto, pattern: str) -> list[Place]:
    found = [
        Place(nodes, index, slot, function)
        for nodes, function in _scopes(model)
        for index, node in enumerate(nodes)
        for slot, name in enumerate(node.output)
        if name == pattern or fnmatchcase(name, pattern)
    ]
    if not found:
        raise SabotageError(f"no node makes {pattern}")
    return found


def _scopes(model: onnx.ModelProto) -> Iterator[tuple[Nodes, bool]]:
    """The nodes of every graph and of every function that the rewriter made; the second: in a function."""
    pending: list[tuple[Nodes, bool]] = [(model.graph.node, False)]
    pending += [(function.node, True) for function in model.functions if function.domain == DOMAIN]
    while pending:
        nodes, function = pending.pop()
        yield nodes, function
        pending += [(attribute.g.node, function) for node in nodes for attribute in node.attribute if attribute.g.node]


def _replace(model: onnx.ModelProto, tensor: str, text: str, elem_type: int, bound: Mapping[str, str]) -> None:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
    for place in reversed(places(model, tensor)):
        maker = place.node
        name = str(maker.output[place.slot])
        prefix = f"{name.replace('/', '_') if place.function else name}/sabotage/"
        own = f"{prefix}own"
        maker.output[place.slot] = own
        made = _parsed(text, {"own": own, "out": name, **bound}, prefix, dtype)
        for node in () if place.function else made:
            node.metadata_props.extend(maker.metadata_props)
        behind = place.index + 1
        set_nodes(place.nodes, [*place.nodes[:behind], *made, *place.nodes[behind:]])


def _parsed(text: str, names: Mapping[str, str], prefix: str, dtype: np.dtype[Any]) -> list[onnx.NodeProto]:
    """The nodes of a text; `names` are tensors that exist, all other outputs get the prefix."""
    constants: dict[str, onnx.NodeProto] = {}

    def named(match: re.Match[str]) -> str:
        known = constants.setdefault(match[0], _number(match[1], match[2], f"c{len(constants)}", dtype))
        return str(known.output[0])

    graph = onnx.parser.parse_graph(f"sabotage () => () {{ {_SHORTHAND.sub(named, text)} }}")
    nodes = [*constants.values(), *graph.node]
    made = {name for node in nodes for name in node.output}
    for node in nodes:
        node.name = f"{prefix}{node.output[0]}"
    rename(nodes, {name: f"{prefix}{name}" for name in made} | dict(names))
    return nodes


def _number(kind: str, digits: str, name: str, dtype: np.dtype[Any]) -> onnx.NodeProto:
    integers = [int(text.replace("end", str(_END))) for text in digits.split(",")] if kind == "#" else []
    values = np.asarray(integers) if kind == "#" else np.asarray(float(digits), dtype)
    return onnx.helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(values))

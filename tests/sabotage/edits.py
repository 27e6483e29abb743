"""Wrong emitters as edits of the rewritten model.

An `Edit` changes a model in place; it knows the plan, so that it finds blocks by what they are and not by node names.
Most are written as text in the syntax of `onnx.parser`: `own` is what the rewriter computes, `out` what is put in its
place. `$0.5` is a scalar of the tensor's element type, `#0` an integer tensor [1], `#0,2` one of [2], and `#end` the
end of any axis:

    heads("m = ReduceSum(own, #-2) out = Max(own, m)")
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from passes.plan import Plan
from rewriter.pipeline import Unit
from tests.sabotage.harness import Part, Patch, SabotageError

Edit = Callable[[onnx.ModelProto, Plan], None]
Array = NDArray[Any]
Nodes = Any
"""A repeated field of nodes, for which protobuf has no public type."""

DOMAIN = "attnonly"

_NUMBER = r"-?(?:[0-9.]+(?:e[+-]?[0-9]+)?|inf|nan|end)"
_SHORTHAND = re.compile(rf"([$#])({_NUMBER}(?:,{_NUMBER})*)")
_END = 2**62


def applied(*edits: Edit, only_carried: bool = False) -> Patch:
    """The rewritten model is changed by these edits; `only_carried`: only where the network carries bias tokens."""

    def wrapper(right: Part) -> Part:
        def wrong(unit: Unit) -> onnx.ModelProto:
            made, plan = right(unit), unit.fact(Plan)
            assert isinstance(made, onnx.ModelProto)
            if not only_carried or plan.whole is not None:
                _carry_out(edits, made, plan)
            return made

        return wrong

    return {"made": wrapper}


def _carry_out(edits: Sequence[Edit], model: onnx.ModelProto, plan: Plan) -> None:
    """An edit that fails or does nothing is a mistake of the suite, and must not look like one of the rewriter."""
    before = model.SerializeToString(deterministic=True)
    try:
        for edit in edits:
            edit(model, plan)
    except Exception as error:
        raise SabotageError(f"the edit failed: {error}") from error
    if model.SerializeToString(deterministic=True) == before:
        raise SabotageError("the edit changed nothing")


# -- text in the place of a tensor -----------------------------------------------------------------------------------


def heads(text: str, block: int = 0) -> Edit:
    """What the heads of one block compute, [..., neurons]; in the text `y` and `u` are pre-activation and value.

    In forms that replace a whole block there is no `y`, and the rows of the bias tokens come after those of the tokens.
    """

    def edit(model: onnx.ModelProto, plan: Plan) -> None:
        conversion = plan.conversions[block]
        if conversion.heads_tensor:
            _replace(model, conversion.heads_tensor, text, conversion.compute_type, {})
        else:
            bound = {"y": conversion.block.gate, "u": conversion.block.value}
            _replace(model, conversion.block.output, text, conversion.block.elem_type, bound)

    return edit


def result(text: str, block: int = 0) -> Edit:
    """What one block adds to the residual stream, [..., width]."""

    def edit(model: onnx.ModelProto, plan: Plan) -> None:
        conversion = plan.conversions[block]
        _replace(model, conversion.outputs[0], text, conversion.block.elem_type, {})

    return edit


def inner(tensor: str, text: str) -> Edit:
    """A tensor that the rewriter made: in a block (`*/heads/q`), or in its functions' bodies (`attn_scores`)."""

    def edit(model: onnx.ModelProto, plan: Plan) -> None:
        _replace(model, tensor, text, plan.conversions[0].compute_type, {})

    return edit


def anywhere(tensor: str, text: str, elem_type: int = onnx.TensorProto.FLOAT) -> Edit:
    """Any tensor of the model that a node makes."""

    def edit(model: onnx.ModelProto, _: Plan) -> None:
        _replace(model, tensor, text, elem_type, {})

    return edit


def _replace(model: onnx.ModelProto, tensor: str, text: str, elem_type: int, bound: Mapping[str, str]) -> None:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
    for place in reversed(places(model, tensor)):
        name = place.name
        prefix = f"{name.replace('/', '_') if place.function else name}/sabotage/"
        own = f"{prefix}own"
        maker = place.nodes[place.index]
        maker.output[place.slot] = own
        made = parsed(text, {"own": own, "out": name, **bound}, prefix, dtype)
        for node in () if place.function else made:
            node.metadata_props.extend(maker.metadata_props)
        _insert(place.nodes, place.index + 1, made)


# -- places ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A tensor where it is made: a node of a graph or of a function's body, and which of its outputs."""

    nodes: Nodes
    index: int
    slot: int
    function: bool

    @property
    def node(self) -> onnx.NodeProto:
        """The node."""
        node: onnx.NodeProto = self.nodes[self.index]
        return node

    @property
    def name(self) -> str:
        """The tensor."""
        return str(self.node.output[self.slot])


def places(model: onnx.ModelProto, pattern: str) -> list[Place]:
    """Where tensors are made whose names match.

    Raises:
        SabotageError: nowhere.
    """
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


def _insert(nodes: Nodes, index: int, new: Sequence[onnx.NodeProto]) -> None:
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (*nodes[:index], *new, *nodes[index:])]
    del nodes[:]
    nodes.extend(copies)


# -- from text to nodes ----------------------------------------------------------------------------------------------


def parsed(text: str, names: Mapping[str, str], prefix: str, dtype: np.dtype[Any]) -> list[onnx.NodeProto]:
    """The nodes of a text; `names` are tensors that exist, all other outputs get the prefix."""
    constants: dict[str, onnx.NodeProto] = {}

    def named(match: re.Match[str]) -> str:
        known = constants.setdefault(match[0], _constant(match[1], match[2], f"c{len(constants)}", dtype))
        return str(known.output[0])

    graph = onnx.parser.parse_graph(f"sabotage () => () {{ {_SHORTHAND.sub(named, text)} }}")
    nodes = [*constants.values(), *graph.node]
    made = {name for node in nodes for name in node.output}
    final = {name: f"{prefix}{name}" for name in made} | dict(names)
    for node in nodes:
        node.name = f"{prefix}{node.output[0]}"
        for field in (node.input, node.output):
            renamed = [final.get(name, name) for name in field]
            del field[:]
            field.extend(renamed)
    return nodes


def _constant(kind: str, digits: str, name: str, dtype: np.dtype[Any]) -> onnx.NodeProto:
    values: Array
    values = np.asarray(float(digits), dtype) if kind == "$" else np.asarray([*map(_integer, digits.split(","))])
    return onnx.helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(values))


def _integer(text: str) -> int:
    return int(text.replace("end", str(_END)))

"""Whether a graph computes nothing but attention heads: the operators that heads consist of, used as heads use them.

What depends on the inputs is followed in graph order. Operators that choose between numbers (Max, Clip, Where, a
comparison) make up most activations; heads apply them to logits and to masks alone. So what they choose may reach an
output only through an exponential or a softmax, and there must be one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.graph.view import ONNX_DOMAINS, label, subgraphs, tensor_of

_PLAIN = {
    *("Add", "Cast", "Concat", "Constant", "Div", "Exp", "Expand", "Gather", "Identity", "MatMul", "Mul", "Neg", "Pad"),
    *("Range", "Reciprocal", "Reshape", "Shape", "Slice", "Split", "Squeeze", "Sub", "Transpose", "Unsqueeze"),
    *("And", "Attention", "Not", "Or", "Softmax"),
}
_CHOOSING = {"Clip", "Equal", "Less", "Max", "Min", "Where"}
_BOUNDING = ("Clip", "Max", "Min")

_FINITE = 2.0**40
"""A bound of this size or more changes no number that a network has; it keeps one finite."""

_VALUES = 2
"""The input of the operator Attention that takes the values."""


def not_heads(graph: onnx.GraphProto, data: Collection[str]) -> str | None:
    """Why a graph, its functions inlined, is more than attention heads on the tensors `data`; None if it is not."""
    walk = _Walk(set(data))
    walk.constants.update({tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer})
    stray = walk.follow(graph)
    if stray is not None:
        return stray
    if not walk.softmax:
        return "there is no softmax in it"
    chosen = next((value.name for value in graph.output if value.name in walk.chosen), None)
    return None if chosen is None else f"'{chosen}' is chosen between numbers outside of a softmax"


@dataclass
class _Walk:
    """What is known of tensors: which depend on the inputs, and which of them are a choice between numbers."""

    depends: set[str]
    chosen: set[str] = field(default_factory=set)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    softmax: bool = False

    def follow(self, graph: onnx.GraphProto) -> str | None:
        """Go through the nodes; the first that no head has, if there is one."""
        for node in graph.node:
            if node.op_type not in _PLAIN | _CHOOSING or node.domain not in ONNX_DOMAINS:
                return f"{label(node)} is no operator of heads"
            if node.op_type == "Constant" and (tensor := tensor_of(node)) is not None:
                self.constants[node.output[0]] = onnx.numpy_helper.to_array(tensor)
            stray = self._step(node)
            if stray is not None:
                return stray
        return None

    def _step(self, node: onnx.NodeProto) -> str | None:
        if any(True for _ in subgraphs(node)):
            return f"{label(node)} is no operator of heads"
        read = [name for name in node.input if name]
        depends = node.op_type != "Shape" and any(name in self.depends for name in read)
        if not depends:
            return None
        self.depends.update(node.output)
        if node.op_type in ("Exp", "Softmax", "Attention"):
            self.softmax = True
            chosen = node.op_type == "Attention" and node.input[_VALUES] in self.chosen
        else:
            chosen = self._chooses(node, read) or any(name in self.chosen for name in read)
        self.chosen.update(node.output if chosen else ())
        return None

    def _chooses(self, node: onnx.NodeProto, read: Sequence[str]) -> bool:
        """Whether what a node chooses depends on data; a mask does not."""
        if node.op_type == "Where":
            return node.input[0] in self.depends
        return node.op_type in _CHOOSING and not (node.op_type in _BOUNDING and self._bounds(node, read))

    def _bounds(self, node: onnx.NodeProto, read: Sequence[str]) -> bool:
        """Whether a node only keeps numbers finite."""
        limits = [np.asarray(entry.f) for entry in node.attribute]
        for name in read:
            if name not in self.depends:
                if name not in self.constants:
                    return False
                limits.append(self.constants[name])
        return bool(limits) and all(bool(np.all(np.abs(each.astype(np.float64)) >= _FINITE)) for each in limits)

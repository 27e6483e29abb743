"""Emitting a graph whose residual stream has m more rows, the bias tokens (Theorem 6).

Every tensor on the route has N + m rows, the last m of which are bias tokens. They are appended once
(`bias_token/stream`), kept apart from the tokens in every softmax, and cut off where a node outside the route reads a
carried tensor. The outputs stay the same. Blocks find the bias tokens by the tensors of `passes.network.names`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from passes.network.names import COUNT, IS_TOKEN, PREFIX, ROWS, STREAM
from passes.network.route import Route
from passes.network.sizes import KEYS, TOKENS
from passes.network.step import Pad, Step, Target, token_axes
from rewriter.graph.edit import forget_types
from rewriter.graph.types import elem_name
from rewriter.graph.view import GraphView

_LAST = 2**62
_INT64 = int(onnx.TensorProto.INT64)

Attribute = int | list[int]
"""The value of an attribute of a new node."""


def carry(model: onnx.ModelProto, view: GraphView, route: Route, bias_tokens: int) -> onnx.ModelProto:
    """A copy of `model` in which the bias tokens travel along `route`."""
    return Carrier(view, route, bias_tokens).copy(model)


class Carrier:
    """Emits the nodes of a graph with a longer stream; `passes.whole.widen` makes the stream wider as well."""

    def __init__(self, view: GraphView, route: Route, bias_tokens: int) -> None:
        self._view = view
        self._route = route
        self._m = bias_tokens
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._made: dict[tuple[object, ...], str] = {}

    def copy(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """A copy of the model with the new graph."""
        result = onnx.ModelProto()
        result.CopyFrom(model)
        nodes = self.run()
        del result.graph.node[:]
        result.graph.node.extend(nodes)
        result.graph.initializer.extend(self._constants.values())
        # Declared shapes of carried tensors say N where there are now N + m rows.
        forget_types(result.graph, self._route.sizes)
        return result

    def run(self) -> list[onnx.NodeProto]:
        """All nodes of the new graph, in topological order."""
        entry = self._route.entry
        if entry not in self._view.producer:
            self._get_on()
        for index, node in enumerate(self._view.nodes):
            step = self._route.steps.get(index)
            if step is None:
                self._off_route(node)
            else:
                self._on_route(node, step)
            if entry in node.output:
                self._get_on()
            # A carried graph output keeps its name for the tokens alone; the wide tensor gets another one.
            for name in node.output:
                if name in self._view.outputs and name in self._route.sizes and name != entry:
                    self._nodes[-1].output[list(node.output).index(name)] = _wide(name)
                    self._cut(name, output=name)
        return self._nodes

    # -- the nodes of the graph ------------------------------------------------------------------------------

    def _off_route(self, node: onnx.NodeProto) -> None:
        """Copy a node outside the route, which reads the tokens only."""
        inputs = [self._cut(name) if name in self._route.sizes else name for name in node.input]
        self._copy(node, inputs)

    def _on_route(self, node: onnx.NodeProto, step: Step) -> None:
        """Copy a node on the route with the edits of its step."""
        inputs = [self._name(name) for name in node.input]
        for pad in step.pads:
            inputs = [self._pad(pad) if name == pad.tensor else name for name in inputs]
        if step.target is not None:
            inputs[1] = self._retarget(node.output[0], inputs[1], step.target)
        if step.floor:
            elem_type = self._view.type_of(node.input[0]).elem_type
            square = self._route.sizes[node.input[0]][-1] == TOKENS
            inputs[0] = self._floored(node.output[0], inputs[0], elem_type, square=square)
        copy = self._copy(node, inputs)
        if any(step.correct):
            self._corrected(copy, step.correct)

    def _copy(self, node: onnx.NodeProto, inputs: Sequence[str]) -> onnx.NodeProto:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        del copy.input[:]
        copy.input.extend(inputs)
        self._nodes.append(copy)
        return copy

    def _name(self, tensor: str) -> str:
        return carried_name(self._view, self._route, tensor)

    # -- getting on and off ----------------------------------------------------------------------------------

    def _get_on(self) -> None:
        """Append the bias tokens, rows of zeros, and compute the tensors that identify them."""
        # Zeros suffice: sublayers recognise bias tokens by the indicators, which depend on the row's position only.
        shape = self._node("Shape", [self._route.entry], "entry_shape")
        batch = self._node("Gather", [shape, self._integers(0)], "batch", axis=0)
        self._node("Gather", [shape, self._integers(1)], "tokens", axis=0)
        m = self._integers(self._m)
        self._node("Add", [COUNT, m], "rows")
        size = self._node("Concat", [batch, m, self._integers(self._route.width)], "bias_tokens_shape", axis=0)
        dtype = helper.tensor_dtype_to_np_dtype(self._route.elem_type)
        bias_tokens = self._node("Expand", [self._constant("zero", np.zeros(1, dtype)), size], "bias_tokens")
        self._node("Concat", [self._route.entry, bias_tokens], "stream", axis=1)
        scalar = self._constant("scalar", np.zeros(0, np.int64))
        last = self._node("Reshape", [ROWS, scalar], "last")
        first, by_one = (self._constant(name, np.asarray(i, np.int64)) for i, name in enumerate(("first", "by_one")))
        places = self._node("Range", [first, last, by_one], "places")
        column = self._node("Reshape", [places, self._integers(-1, 1)], "places_column")
        self._node("Less", [column, COUNT], "is_token")
        row = self._node("Less", [places, COUNT], "is_token_row")
        self._node("And", [IS_TOKEN, row], "tokens_alone")
        self._node("Equal", [column, places], "diagonal")
        behind = self._node("Add", [self._node("Sub", [column, COUNT], "behind_last"), self._integers(1)], "behind")
        which = self._node("Max", [behind, self._integers(0)], "which")
        self._node("Equal", [which, self._integers(*range(1 + self._m))], "indicators")

    def _cut(self, tensor: str, output: str | None = None) -> str:
        """The rows of a carried tensor that belong to tokens."""
        if tensor == self._route.entry:
            return tensor  # under its own name the entry has no bias tokens; with them it is `STREAM`
        if tensor in self._view.outputs and output is None:
            return tensor
        key = ("cut", tensor)
        if key not in self._made:
            self._made[key] = self._cut_axes(tensor, output)
        return self._made[key]

    def _cut_axes(self, tensor: str, output: str | None) -> str:
        sizes, name = self._route.sizes[tensor], self._name(tensor)
        label, zero = f"{tensor}/tokens", self._integers(0)
        axes = token_axes(sizes)
        if all(sizes[axis] in (TOKENS, KEYS) for axis in axes):
            for number, axis in enumerate(axes):
                last = number == len(axes) - 1
                end = COUNT if sizes[axis] == TOKENS else self._integers(-self._m)
                name = self._node(
                    "Slice", [name, zero, end, self._integers(axis)], f"{label}_{axis}", output if last else None
                )
            return name
        # Batch and tokens are merged into the first axis, so the bias tokens are not at its end but after every
        # sequence: split it as [batch, N + m], cut, and merge again.
        shape = self._node("Shape", [name], f"{label}_shape")
        rest = self._node("Slice", [shape, self._integers(1), self._integers(_LAST), zero], f"{label}_rest")
        apart = self._node("Concat", [self._integers(-1), ROWS, rest], f"{label}_apart_shape", axis=0)
        split = self._node("Reshape", [name, apart], f"{label}_apart")
        kept = self._node("Slice", [split, zero, COUNT, self._integers(1)], f"{label}_kept")
        flat = self._node("Concat", [self._integers(-1), rest], f"{label}_flat_shape", axis=0)
        return self._node("Reshape", [kept, flat], f"{label}_flat", output)

    # -- edits -----------------------------------------------------------------------------------------------

    def _pad(self, pad: Pad) -> str:
        """Append m rows along the axes where the operand does not broadcast; their values do not affect any token."""
        # Whether an axis has size 1 and broadcasts may depend on the input, so it is decided at run time.
        key = ("pad", pad.tensor, pad.axes)
        if key not in self._made:
            name = f"{pad.tensor}/padded_{'_'.join(str(-axis) for axis in pad.axes)}"
            more = np.zeros(pad.rank, np.int64)
            more[list(pad.axes)] = self._m
            shape = self._node("Shape", [pad.tensor], f"{name}_shape")
            one = self._node("Equal", [shape, self._integers(1)], f"{name}_broadcasts")
            long = self._node("Cast", [self._node("Not", [one], f"{name}_long")], f"{name}_is_long", to=_INT64)
            zeros = self._constant(f"zeros_{pad.rank}", np.zeros(pad.rank, np.int64))
            grown = self._node("Mul", [long, self._constant(f"{name}_more", more)], f"{name}_rows")
            pads = self._node("Concat", [zeros, grown], f"{name}_pads", axis=0)
            self._made[key] = self._node("Pad", [pad.tensor, pads], name)
        return self._made[key]

    def _retarget(self, output: str, shape: str, target: Target) -> str:
        """The shape operand of a Reshape or Expand, with N + m for N, and m more for a number of keys."""
        # Shapes themselves are not carried and still say N, so it is replaced at the positions known to hold tokens.
        keep, rows, fixed = np.ones(target.length, np.int64), *np.zeros((2, target.length), np.int64)
        keep[list(target.rows)], rows[list(target.rows)] = 0, 1
        for place, number in target.fixed:
            keep[place], fixed[place] = 0, number
        if not target.rows and not target.fixed and not target.keys:
            return shape
        fixed[list(target.keys)] = self._m
        kept = self._node("Mul", [shape, self._constant(f"{output}/keep", keep)], f"{output}/kept")
        more = self._constant(f"{output}/fixed", fixed)
        if target.rows:
            counted = self._node("Mul", [ROWS, self._constant(f"{output}/is_rows", rows)], f"{output}/rows_there")
            more = self._node("Add", [counted, more], f"{output}/known")
        return self._node("Add", [kept, more], f"{output}/shape")

    def _floored(self, output: str, scores: str, elem_type: int, *, square: bool) -> str:
        """Scores [..., N + m, N + m] in which tokens attend to tokens only, and each bias token to itself only.

        Where keys of a cache come first, there are K + m columns, and a token attends to the first K.
        """
        # A bias token keeps one allowed key: a row of -inf alone would be NaN after the softmax.
        kind = elem_name(elem_type)
        dtype = helper.tensor_dtype_to_np_dtype(elem_type)
        own, other = (self._constant(f"{word}_{kind}", np.asarray(value, dtype)) for word, value in _FLOOR.items())
        alone, diagonal = (f"{PREFIX}/tokens_alone", f"{PREFIX}/diagonal") if square else self._behind(output, scores)
        key = ("floor", elem_type, diagonal)
        if key not in self._made:
            name = f"apart_{kind}" if square else f"{output}/apart"
            self._made[key] = self._node("Where", [diagonal, own, other], name)
        return self._node("Where", [alone, scores, self._made[key]], f"{output}/scores_apart")

    def _behind(self, output: str, scores: str) -> tuple[str, str]:
        """Boolean [N + m, K + m]: which scores are those of tokens, and each bias token's own key."""
        shape = self._node("Shape", [scores], f"{output}/scores_shape")
        all_keys = self._node("Gather", [shape, self._integers(-1)], f"{output}/all_keys", axis=0)
        keys = self._node("Sub", [all_keys, self._integers(self._m)], f"{output}/keys")
        scalar = self._constant("scalar", np.zeros(0, np.int64))
        last = self._node("Reshape", [all_keys, scalar], f"{output}/last_key")
        first, by_one = f"{PREFIX}/first", f"{PREFIX}/by_one"
        places = self._node("Range", [first, last, by_one], f"{output}/key_places")
        is_token = self._node("Less", [places, keys], f"{output}/key_is_token")
        alone = self._node("And", [IS_TOKEN, is_token], f"{output}/tokens_alone")
        cached = self._node("Sub", [keys, COUNT], f"{output}/cached")
        own = self._node("Add", [f"{PREFIX}/places_column", cached], f"{output}/own_places")
        return alone, self._node("Equal", [own, places], f"{output}/diagonal")

    def _corrected(self, node: onnx.NodeProto, places: Sequence[bool]) -> None:
        """Subtract m from a shape, so that everything computed from shapes keeps its value."""
        shape = node.output[0]
        node.output[0] = raw_shape(shape)
        more = self._constant(f"{shape}/more", self._m * np.asarray(places, np.int64))
        self._node("Sub", [node.output[0], more], f"{shape}/less", shape)

    # -- nodes -----------------------------------------------------------------------------------------------

    def _node(
        self, operator: str, inputs: Sequence[str], name: str, output: str | None = None, **given: int | list[int]
    ) -> str:
        made = output or f"{PREFIX}/{name}"
        self._nodes.append(_node(operator, inputs, made, f"{PREFIX}/{name}", given))
        return made

    def _integers(self, *values: int) -> str:
        return self._constant("integers_" + "_".join(map(str, values)), np.asarray(values, np.int64))

    def _constant(self, name: str, values: NDArray[np.generic]) -> str:
        full = f"{PREFIX}/{name}"
        self._constants.setdefault(full, numpy_helper.from_array(values, full))
        return full


_FLOOR = {"own": 0.0, "other": -np.inf}


def _node(
    operator: str, inputs: Sequence[str], output: str, name: str, given: Mapping[str, Attribute]
) -> onnx.NodeProto:
    node = helper.make_node(operator, list(inputs), [output], name)
    node.attribute.extend(helper.make_attribute(key, value) for key, value in given.items())
    return node


def raw_shape(tensor: str) -> str:
    """The name of a shape before m is subtracted from it."""
    return f"{PREFIX}/{tensor}/rows"


def carried_name(view: GraphView, route: Route, tensor: str) -> str:
    """The name of a tensor with its bias tokens; tensors off the route keep theirs."""
    if tensor == route.entry:
        return STREAM
    return _wide(tensor) if tensor in route.sizes and tensor in view.outputs else tensor


def _wide(tensor: str) -> str:
    return f"{PREFIX}/{tensor}"

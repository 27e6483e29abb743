"""A graph of form `whole`, read back by its structure and its numbers; names and metadata are not needed.

The stream is found by its constants: the columns of tokens (a one and a one-hot position) and the rows of bias tokens
(zeros and a one-hot position). What adds up to it, or renews its first columns, is the stream again. Heads are told
apart by W_QK between positions: a token of a head that is a neuron attends to bias tokens, one of an original head does
not. `narrow` takes positions and biases back out of the tensors that are followed from head to weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from rewriter.graph.edit import forget_types
from rewriter.graph.view import GraphView, all_views, integer_of, tensor_of

_LARGEST = 2**26
"""Elements of the largest constant that is read."""
_BATCHES = 3
_PAIR = 2
_FORBIDDEN = -1000.0
"""Pairs with at most this in W_QK do not attend; the largest number that form `whole` writes there is far below it."""


@dataclass(frozen=True)
class Product:
    """A product of queries and keys that both have columns of positions.

    Attributes:
        node: index of the MatMul.
        query: the queries without positions.
        key: the keys without positions, laid out as the MatMul reads them; empty where the two were turned together.
        neurons: whether tokens attend to bias tokens, as heads that are neurons do.
    """

    node: int
    query: str
    key: str
    neurons: bool


@dataclass(frozen=True)
class WholeGraph:
    """What was found in a graph.

    Attributes:
        width: D, the columns of the model.
        bias_tokens: R.
        max_tokens: T.
        products: the heads' products, in graph order.
        biases: index of an Add to (the place of the operand that is a bias, its vector).
        sums: index of a Slice of the model's columns of a sum to (those columns of the stream, what is added).
        joined: queries and keys with columns of positions, to those without.
        entry: the model's columns of the stream behind the embeddings, with rows of bias tokens.
    """

    width: int
    bias_tokens: int
    max_tokens: int
    products: tuple[Product, ...]
    biases: Mapping[int, tuple[int, str]]
    sums: Mapping[int, tuple[str, str]]
    joined: Mapping[str, str]
    entry: str

    def neurons(self, view: GraphView) -> list[list[int]]:
        """The nodes of each softmax of neurons: product of queries and keys, softmax, product with the values."""
        found = []
        for product in self.products:
            run = [product.node]
            for kind in ("Softmax", "MatMul"):
                readers = view.consumers.get(view.nodes[run[-1]].output[0], ())
                run += [reader for reader in readers if view.nodes[reader].op_type == kind][:1]
            if product.neurons and len(run) > _PAIR:
                found.append(run)
        return found


def read_whole(view: GraphView) -> WholeGraph | None:
    """The stream of a graph of form `whole`; None for any other graph."""
    if not any(node.op_type == "Concat" and integer_of(node, "axis", None) == 1 for node in view.nodes):
        return None
    reader = _Reader(view)
    for index, node in enumerate(view.nodes):
        reader.read(index, node)
    sizes = reader.sizes
    if sizes is None or not reader.products:
        return None
    products = tuple(each for each in reader.products.values())
    return WholeGraph(*sizes, products, reader.biases, reader.sums, reader.plain, reader.entry)


def narrow(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """A model of form `whole` in which original heads' scores are q k^T, biases are constants and sums have D columns.

    None for any other model. Nodes and tensors keep their places and names, so that what is found in the copy is found
    in the model. The copy is for following tensors back to weights: nothing masks in it, so it must not be run.
    """
    whole = read_whole(all_views(model)[0])
    if whole is None:
        return None
    result = onnx.ModelProto()
    result.CopyFrom(model)
    nodes = result.graph.node
    for product in whole.products:
        if product.key:
            nodes[product.node].input[:] = [product.query, product.key]
    written = {operands[1] for operands in whole.sums.values()}
    for node in nodes:
        if node.op_type == "Pad" and node.input[0] in written:
            node.input[0] = whole.entry  # of the same shape: what a sublayer writes is read by the sum alone
    for index, operands in whole.sums.items():
        output = nodes[index].output[0]
        nodes[index].CopyFrom(onnx.helper.make_node("Add", operands, [output], nodes[index].name))
    makers = {name: node for node in nodes for name in node.output}
    for index, (place, vector) in whole.biases.items():
        node = nodes[index]
        normed = makers.get(node.input[1 - place])
        if normed is not None and normed.op_type == "LayerNormalization" and len(normed.input) == _PAIR:
            output = node.output[0]
            node.CopyFrom(normed)
            node.input.append(vector)
            node.output[:] = [output]
        else:
            node.input[place] = vector
    # The shapes that the file declares are those with positions; inference tells the others.
    stale = {name for product in whole.products for name in nodes[product.node].output}
    forget_types(result.graph, stale)
    return result


@dataclass
class _Reader:
    """What is known of the tensors so far; `read` takes the nodes in order."""

    view: GraphView
    sizes: tuple[int, int, int] | None = None
    hidden: int = 0
    entry: str = ""
    wide: set[str] = field(default_factory=set)
    further: set[str] = field(default_factory=set)
    ones: set[str] = field(default_factory=set)
    positions: set[str] = field(default_factory=set)
    weighed: dict[str, str] = field(default_factory=dict)
    vectors: dict[str, str] = field(default_factory=dict)
    queries: dict[str, tuple[str, str]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    products: dict[int, Product] = field(default_factory=dict)
    biases: dict[int, tuple[int, str]] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    added: dict[str, tuple[str, str]] = field(default_factory=dict)
    sums: dict[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def plain(self) -> dict[str, str]:
        """Queries and keys with positions to those without."""
        return {**{name: query for name, (query, _) in self.queries.items()}, **self.keys}

    def read(self, index: int, node: onnx.NodeProto) -> None:
        """One node."""
        if not self.view.is_onnx(node) or not node.output:
            return
        if self.sizes is None:
            self._entry(node)
        elif node.op_type == "Concat" and len(node.input) == _PAIR:
            self._concat(node)
        elif node.op_type == "Slice":
            self._slice(index, node)
        elif node.op_type in ("Add", "Sub"):
            self._add(index, node)
        elif node.op_type == "MatMul":
            self._product(index, node)
        elif node.op_type in ("Transpose", "Unsqueeze", "Expand", "Reshape", "Cast", "Identity"):
            self._moved(node)

    # -- the stream ------------------------------------------------------------------------------------------

    def _entry(self, node: onnx.NodeProto) -> None:
        """The Concat of the tokens' rows and those of bias tokens."""
        if node.op_type != "Concat" or integer_of(node, "axis", None) != 1 or len(node.input) != _PAIR:
            return
        tokens, rows = (self.view.made_by(name) for name in node.input)
        if tokens is None or rows is None or tokens.op_type != "Concat" or rows.op_type != "Expand":
            return
        own = None if len(tokens.input) != _PAIR else self.view.made_by(tokens.input[1])
        part = None if own is None or own.op_type != "Expand" else self.view.made_by(own.input[0])
        if part is None or part.op_type != "Slice":
            return
        table, bias = self._value(part.input[0]), self._value(rows.input[0])
        if table is None or bias is None or table.ndim != _BATCHES or bias.ndim != _BATCHES:
            return
        count, longest = bias.shape[1], table.shape[1]
        width, hidden = bias.shape[2] - table.shape[2], table.shape[2] - 1 - count - longest
        if width <= 0 or hidden < 0:
            return
        own_rows = [np.ones((longest, 1)), np.eye(longest, count + longest, count), np.zeros((longest, hidden))]
        same_tokens = np.array_equal(table[0], np.concatenate(own_rows, 1))
        if same_tokens and np.array_equal(bias[0], np.eye(count, bias.shape[2], width + 1)):
            self.sizes, self.hidden = (width, count, longest), hidden
            self.wide.add(node.output[0])

    def _concat(self, node: onnx.NodeProto) -> None:
        first, second = node.input
        out = node.output[0]
        if second in self.further:
            self.wide.add(out)
            self.columns[out] = first
        elif second in self.weighed:
            self.queries[out] = (first, self.weighed[second])
        elif second in self.positions:
            self.keys[out] = first

    def _slice(self, index: int, node: onnx.NodeProto) -> None:
        bounds = [self._integer(name) for name in node.input[1:]]
        if node.input[0] not in self.wide or len(bounds) != _BATCHES or self.sizes is None:
            return
        start, stop, axis = bounds
        width, slots = self.sizes[0], sum(self.sizes) + 1
        end = slots + self.hidden
        if axis not in (2, -1) or start is None or stop is None:
            return
        if (start, stop) == (0, width):
            self._model_columns(index, node)
        kind = {
            (width, width + 1): self.ones,
            (width, end): self.further,
            (width + 1, slots): self.positions,
        }.get((start, min(stop, end)))
        if kind is not None:
            kind.add(node.output[0])

    def _model_columns(self, index: int, node: onnx.NodeProto) -> None:
        wide, out = node.input[0], node.output[0]
        before, written = self.added.get(wide, ("", ""))
        if before in self.columns:
            self.sums[index] = self.columns[before], written
        self.columns.setdefault(wide, out)
        self.entry = self.entry or out

    def _add(self, index: int, node: onnx.NodeProto) -> None:
        for place, name in enumerate(node.input):
            if name in self.vectors:
                self.biases[index] = place, self.vectors[name]
            elif name in self.wide:
                self._total(name, node.input[1 - place], node.output[0])

    def _total(self, wide: str, tensor: str, out: str) -> None:
        """A sum of the stream and what a sublayer writes to the model's columns, or to hidden ones."""
        node = self.view.made_by(tensor)
        if node is None or node.op_type != "Pad" or len(node.input) != _PAIR or self.sizes is None:
            return
        pads = self._value(node.input[1])
        if pads is None or pads.shape != (2 * _BATCHES,) or pads[:2].any() or pads[3:5].any():
            return
        if (pads[2], pads[5]) == (0, 1 + self.sizes[1] + self.sizes[2] + self.hidden):
            self.wide.add(out)
            self.added[out] = wide, str(node.input[0])
        elif pads[2] > sum(self.sizes):
            # The model's columns stay what they are.
            self.wide.add(out)
            self.columns.update({out: self.columns[wide]} if wide in self.columns else {})
            self.added.update({out: self.added[wide]} if wide in self.added else {})

    # -- heads -----------------------------------------------------------------------------------------------

    def _product(self, index: int, node: onnx.NodeProto) -> None:
        left, right = node.input
        if left in self.positions and self.sizes is not None:
            self.weighed[node.output[0]] = right
        elif left in self.ones:
            self.vectors[node.output[0]] = self._row(right)
        elif left in self.weighed and right in self.positions:
            self.products[index] = Product(index, "", "", neurons=True)  # heads that attend to themselves
        elif left in self.queries and right in self.keys:
            query, weight = self.queries[left]
            kinds = self._kind(weight)
            if kinds is not None:
                self.products[index] = Product(index, query, self.keys[right], kinds)

    def _row(self, tensor: str) -> str:
        """The vector of which a row is a Reshape."""
        node = self.view.made_by(tensor)
        return str(node.input[0]) if node is not None and node.op_type == "Reshape" else tensor

    def _kind(self, weight: str) -> bool | None:
        """Whether W_QK between positions is that of neurons; None if tokens see some bias tokens and not themselves."""
        values = self._value(weight)
        if values is None or self.sizes is None:
            return None
        count = self.sizes[1]
        if values.shape != (count + self.sizes[2],) * 2:
            return None
        allowed = values.astype(np.float64) > _FORBIDDEN
        seen = allowed[count:, :count]
        if not seen.any():
            return False
        return True if seen.any(axis=1).all() and np.array_equal(allowed[count:, count:], np.eye(len(seen))) else None

    def _moved(self, node: onnx.NodeProto) -> None:
        """Tensors that stay what they are when their axes move."""
        name, out = node.input[0], node.output[0]
        for known in (self.positions, self.ones):
            if name in known:
                known.add(out)
        if name in self.wide and node.op_type in ("Cast", "Identity"):
            self.wide.add(out)
        if name in self.weighed:
            self.weighed[out] = self.weighed[name]
        if name in self.vectors:
            self.vectors[out] = self.vectors[name]
        if name in self.keys:
            self.keys[out] = ""  # keys and positions are turned together: there is no tensor of the keys alone

    # -- constants -------------------------------------------------------------------------------------------

    def _value(self, tensor: str) -> NDArray[np.generic] | None:
        """The value of a constant that stands in the file itself, past a Cast."""
        node = self.view.made_by(tensor)
        if node is not None and node.op_type == "Cast":
            return self._value(node.input[0])
        held = self.view.initializers.get(tensor)
        if held is None and node is not None and node.op_type == "Constant":
            held = tensor_of(node)
        if held is None or tensor in self.view.overridable or held.data_location == onnx.TensorProto.EXTERNAL:
            return None
        if held.data_type == onnx.TensorProto.STRING or int(np.prod(held.dims, dtype=object)) > _LARGEST:
            return None
        return numpy_helper.to_array(held)

    def _integer(self, tensor: str) -> int | None:
        value = self._value(tensor)
        return int(value.reshape(-1)[0]) if value is not None and value.size == 1 else None


__all__: Sequence[str] = ("Product", "WholeGraph", "narrow", "read_whole")

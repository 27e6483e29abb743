"""Emitting form `whole`: one residual stream with bias tokens, indicator and position columns, and no mask operator.

The wide stream is `bias_token/wide` behind the embeddings and `bias_token/<sum>/wide` behind each residual addition,
whose second operand has zeros in the further columns. Its first D columns go by the model's own names, so that
everything that reads them stays as it was. The masks of the network's heads become -omega in W_QK, between columns of
positions that are joined to queries and keys after the model's own operations on them (such as rotations).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import groupby

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from passes.conversion import Conversion
from passes.forms.square import BIAS_ROWS, COUNT, POSITION_ROWS, PREFIX, ROWS, STREAM, neuron_scores
from passes.sizes import BATCH, TOKENS, Sizes, factors, token_axes
from passes.whole.masks import Mask, Scores
from passes.whole.route import Whole
from rewriter.graph.edit import drop_dead, set_nodes
from rewriter.graph.types import forget_types
from rewriter.graph.view import GraphView, all_views, attributes

_BATCH = f"{PREFIX}/batch"


def carry_whole(
    model: onnx.ModelProto, view: GraphView, whole: Whole, conversions: Sequence[Conversion]
) -> tuple[onnx.ModelProto, tuple[GraphView, ...], tuple[Conversion, ...]]:
    """The graph on the wide residual stream, its views, and the conversions that read it."""
    wider = widen(model, view, whole)
    views = all_views(wider)

    def moved(conversion: Conversion) -> Conversion:
        block, projections = conversion.block, conversion.whole_block
        query, value = (
            replace(each, data=_carried(view, whole, each.data)) for each in (projections.query, projections.value)
        )
        result = _carried(view, whole, projections.result)
        nodes = tuple(sorted(views[0].producer[view.nodes[index].output[0]] for index in block.region.nodes))
        return replace(
            conversion,
            projections=replace(projections, query=query, value=value, result=result, shapes=()),  # no Shape is left
            block=replace(block, region=replace(block.region, nodes=nodes)),
            carried=whole.bias_tokens,
            stream=_wide_name(whole, whole.stream[conversion.inputs[0]]),
        )

    return wider, views, tuple(moved(conversion) for conversion in conversions)


def _carried(view: GraphView, whole: Whole, tensor: str) -> str:
    """The name of a tensor with its bias tokens: another one for the entry, and for outputs of the graph."""
    if tensor == whole.entry:
        return STREAM
    return f"{PREFIX}/{tensor}" if tensor in whole.sizes and tensor in view.outputs else tensor


def _wide_name(whole: Whole, stream: str) -> str:
    return f"{PREFIX}/wide" if stream == whole.entry else f"{PREFIX}/{stream}/wide"


def widen(model: onnx.ModelProto, view: GraphView, whole: Whole) -> onnx.ModelProto:
    """A copy of `model` on the wide stream; its blocks are still MLPs, on rows of the model's columns."""
    made = _Widener(view, whole)
    result = deepcopy(model)
    set_nodes(result.graph, made.nodes)
    result.graph.initializer.extend(made.constants.values())
    # Declared shapes of carried tensors say N where there are now N + R rows.
    forget_types(result.graph, whole.sizes)
    # Masks, shapes and biases that moved elsewhere leave what computed them behind.
    drop_dead(result.graph, made.left)
    return result


class _Widener:
    def __init__(self, view: GraphView, whole: Whole) -> None:
        self._view = view
        self._whole = whole
        self._sizes = whole.sizes
        self._m = whole.bias_tokens
        self._dtype = helper.tensor_dtype_to_np_dtype(whole.elem_type)
        self._done: set[str] = set()
        self._pseudo_masks: dict[tuple[bytes, float, float], str] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.left: set[str] = set()
        way = frozenset(whole.nodes)
        if whole.entry not in view.producer:
            self._start_stream()
        for index, node in enumerate(view.nodes):
            if index in way:
                self._on_path(index, node)
            else:  # it reads the tokens only
                self._copy(node, [self._cut(name) if name in self._sizes else name for name in node.input])
            if whole.entry in node.output:
                self._start_stream()
            # A carried graph output keeps its name for the tokens alone; the wide tensor gets another one.
            for name in node.output:
                if name in view.outputs and name in self._sizes and name != whole.entry:
                    self.nodes[-1].output[list(node.output).index(name)] = self._name(name)
                    self._done.discard(name)
                    self._cut_to(name, name)

    def _name(self, tensor: str) -> str:
        return _carried(self._view, self._whole, tensor)

    def _on_path(self, index: int, node: onnx.NodeProto) -> None:
        whole = self._whole
        if index in whole.moved:
            self.left.update(name for name in node.input if name not in self._sizes)
        elif node.op_type == "Shape":
            self._shape(node)
        elif index in whole.sums:
            self._sum(node, *whole.sums[index])
        elif index in whole.scores:
            self._head(node, whole.scores[index])
        elif index in whole.biases:
            self._biased(node, whole.biases[index])
        else:
            inputs = [self._name(name) for name in node.input]
            for name, axes in whole.pads.get(index, ()):
                padded = self._pad(name, axes, len(whole.shapes.of(name) or ()))
                inputs = [padded if each == name else each for each in inputs]
            if node.op_type in ("Reshape", "Expand"):
                self.left.add(inputs[1])
                inputs[1] = self._shape_of(self._sizes[node.output[0]], ROWS, rest=node.op_type == "Reshape")
            self._copy(node, inputs)

    def _shape(self, node: onnx.NodeProto) -> None:
        """The original shape of a tensor: everything computed from shapes keeps its value."""
        given, sizes = attributes(node), self._sizes[node.input[0]]
        part, out = sizes[given.get("start", 0) : given.get("end", len(sizes))], str(node.output[0])
        self.left.add(out)
        if all(size in (BATCH, TOKENS) or (size is not None and size < BATCH) for size in part):
            self._node("Identity", [self._shape_of(part, COUNT)], f"{out}/shape", out)
        else:
            self._copy(node, [self._cut(node.input[0])])

    def _shape_of(self, sizes: Sizes, tokens: str, *, rest: bool = False) -> str:
        """A shape with `tokens` as the number of tokens; if `rest`, sizes other than numbers are -1."""
        parts: list[str] = []
        for size in sizes:
            plain = {TOKENS: tokens} if rest else {TOKENS: tokens, BATCH: _BATCH}
            parts.append(plain.get(size or 0, "-1" if size is None or size >= BATCH else str(size)))
        names: list[str] = []
        for tensors, run in groupby(parts, lambda part: part.startswith(PREFIX)):
            each = list(run)
            names += each if tensors else [self._integers(*map(int, each))]
        label = "_".join(part.removeprefix(f"{PREFIX}/") for part in parts)
        return names[0] if len(names) == 1 else self._node("Concat", names, f"shape_{label}", axis=0)

    def _in_batches(self, tensor: str) -> str:
        """[batch, rows, width], where batch and tokens may be one axis."""
        if not self._whole.flat(tensor):
            return self._name(tensor)
        shape = self._shape_of((-1, TOKENS, self._whole.width), ROWS)
        return self._node("Reshape", [self._name(tensor), shape], f"{tensor}/in_batches")

    def _start_stream(self) -> None:
        """Start the stream behind the embeddings: rows of bias tokens, columns of indicators and positions."""
        whole, integers = self._whole, self._integers
        shape = self._node("Shape", [whole.entry], "entry_shape")
        self._node("Gather", [shape, integers(0)], _BATCH, axis=0)
        self._node("Gather", [shape, integers(1)], COUNT, axis=0)
        self._node("Add", [COUNT, integers(self._m)], ROWS)
        each = self._node("Concat", [_BATCH, integers(1, 1)], "each_batch", axis=0)
        slots = self._m + whole.max_tokens
        table = np.concatenate([np.ones((whole.max_tokens, 1)), np.eye(whole.max_tokens, slots, self._m)], axis=1)
        positions = self._constant(POSITION_ROWS, table[None])
        bias = self._constant(BIAS_ROWS, np.eye(self._m, whole.width + 1 + slots, whole.width + 1)[None])
        own = self._node("Slice", [positions, integers(0), COUNT, integers(1)], "own_columns")
        spread = self._node("Expand", [own, each], "own_columns_each")
        wide = self._node("Concat", [whole.entry, spread], f"tokens_wide/{self._limit}", axis=2)
        rows = [wide, self._node("Expand", [bias, each], "bias_tokens")]
        stream = self._node("Concat", rows, _wide_name(whole, whole.entry), axis=1)
        self._columns(stream, 0, whole.width, STREAM)
        for count in whole.neurons:
            # A token attends to itself and to the first bias tokens.
            weight = self._isolated_scores(-whole.omega)
            np.fill_diagonal(weight[self._m :, self._m :], 0.0)
            weight[self._m :, :count] = 0.0
            self._constant(neuron_scores(count), weight)

    def _sum(self, node: onnx.NodeProto, stream: str, written: str) -> None:
        """Add to all columns; a sublayer writes zeros to the further ones."""
        width, out = self._whole.width, str(node.output[0])
        pads = self._integers(0, 0, 0, 0, 0, 1 + self._m + self._whole.max_tokens)
        padded = self._node("Pad", [self._in_batches(written), pads], f"{out}/written_wide")
        wide = self._node("Add", [self._wide(stream), padded], _wide_name(self._whole, out))
        if self._whole.flat(out):
            model = self._columns(wide, 0, width)
            self._node("Reshape", [model, self._integers(-1, width)], f"{out}/flat", out)
        else:
            self._columns(wide, 0, width, out)

    def _wide(self, stream: str) -> str:
        """The wide stream with the columns of `stream`; a renewed one is joined where first needed."""
        name = _wide_name(self._whole, stream)
        if stream in self._whole.renewed:
            further = self._columns(_wide_name(self._whole, self._whole.renewed[stream]), self._whole.width)
            self._node("Concat", [self._in_batches(stream), further], name, axis=2)
        return name

    def _columns(self, wide: str, start: int, stop: int = 2**62, output: str | None = None) -> str:
        bounds = [self._integers(each) for each in (start, stop, 2)]
        return self._node("Slice", [wide, *bounds], f"{wide}/columns_{start}_{stop if stop < 2**62 else ''}", output)

    def _stream_of(self, tensor: str) -> str:
        """The current wide stream when a carried tensor was computed."""
        return _wide_name(self._whole, self._whole.stream[tensor])

    @property
    def _limit(self) -> str:
        """Name of nodes whose operands do not fit together if a sequence is too long."""
        return f"sequence_longer_than_max_tokens_{self._whole.max_tokens}"

    def _biased(self, node: onnx.NodeProto, place: int) -> None:
        """The bias as weight of the stream's column of ones, so that bias tokens stay rows of zeros."""
        tensor, out, first = str(node.input[place]), str(node.output[0]), self._whole.width
        width = self._sizes[out][-1] or -1
        row = self._node("Reshape", [tensor, self._integers(1, width)], f"{out}/bias_row")
        bias = self._node("MatMul", [self._columns(self._stream_of(out), first, first + 1), row], f"{out}/bias")
        if self._whole.flat(out):
            bias = self._node("Reshape", [bias, self._integers(-1, width)], f"{out}/bias_flat")
        if node.op_type in ("Add", "Sub"):
            self._copy(node, [bias if number == place else self._name(name) for number, name in enumerate(node.input)])
            return
        beta = attributes(node).get("beta", 1.0) if node.op_type == "Gemm" else 1.0
        if beta != 1.0:
            bias = self._node("Mul", [bias, self._constant(f"{PREFIX}/{out}/beta", beta)], f"{out}/bias_scaled")
        plain = self._copy(node, [self._name(name) for name in node.input[:place]], f"{PREFIX}/{out}/unbiased")
        self._node("Add", [plain, bias], f"{out}/biased", out)

    def _head(self, softmax: onnx.NodeProto, scores: Scores) -> None:
        """Scores q k^T with columns of positions on both sides: [q, p W] [k, p]^T = q k^T + p W p^T (Theorem 9)."""
        product = self._view.nodes[scores.product]
        query, key = (self._name(name) for name in product.input)
        for scale in (self._view.nodes[index] for index in scores.scales):
            inputs = [query if name in self._sizes else name for name in scale.input]
            query = self._copy(scale, inputs, f"{PREFIX}/{scale.output[0]}/of_queries")
        positions = self._columns(self._stream_of(product.input[0]), self._whole.width + 1)
        weight = self._pseudo_mask(scores.masks)
        turned = self._node("Transpose", [positions], f"{positions}/turned", perm=[0, 2, 1])
        weighed = self._node("MatMul", [positions, weight], f"{positions}/{weight.rpartition('/')[2]}")
        query = self._joined(query, weighed, self._sizes[product.input[0]], -1)
        key = self._joined(key, turned, self._sizes[product.input[1]], -2)
        logits = self._copy(product, [query, key])
        for mask in scores.masks:
            if mask.data:
                logits = self._node("Add", [logits, self._data_mask(mask)], f"{logits}/with_data")
        self._copy(softmax, [logits])

    def _joined(self, tensor: str, positions: str, sizes: Sizes, axis: int) -> str:
        if len(sizes) == 4:
            alone = self._node("Unsqueeze", [positions, self._integers(1)], f"{positions}/alone")
            each = self._integers(1, sizes[1] or 1, 1, 1)
            positions = self._node("Expand", [alone, each], f"{positions}/each_of_{sizes[1]}")
        return self._node("Concat", [tensor, positions], f"{tensor}/with_positions_{-axis}", axis=axis)

    def _isolated_scores(self, low: float) -> NDArray[np.float64]:
        """W_QK [R + T, R + T] between isolated positions; bias tokens attend to the last one, of value 0."""
        weight = np.full((self._m + self._whole.max_tokens,) * 2, low)
        weight[: self._m, self._m - 1] = 0.0
        return weight

    def _pseudo_mask(self, masks: Sequence[Mask]) -> str:
        """W_QK between positions: 0 where a query may attend to a key, else very negative."""
        longest, m = self._whole.max_tokens, self._m
        allowed = np.logical_and.reduce([np.ones((longest, longest), np.bool_), *(mask.allowed for mask in masks)])
        low = min((mask.low for mask in masks), default=0.0)
        apart, future = -self._whole.omega, -self._whole.omega
        if low:
            # Pairs forbidden by position and padding weigh the same for a token without any allowed key, as in the
            # original; bias tokens weigh less.
            future = low * self._share(low)
            apart = low if self._share(low) < 1.0 else min(apart, 2.0 * low)
        name = f"{PREFIX}/W_QK_positions_{len(self._pseudo_masks)}"
        name = self._pseudo_masks.setdefault((allowed.tobytes(), future, apart), name)
        weight = self._isolated_scores(apart)
        weight[m:, m:] = np.where(allowed, 0.0, future)
        return self._constant(name, weight)

    def _share(self, low: float) -> float:
        """The share of a data mask that is added, so that bias tokens can weigh less in floating point."""
        return 0.5 if -low > np.finfo(self._dtype).max / 4 else 1.0

    def _data_mask(self, mask: Mask) -> str:
        """The mask without what W_QK forbids by position, [..., rows, rows]."""
        keep = np.where(mask.allowed, self._share(mask.low), 0.0)
        table = self._constant(f"{PREFIX}/{mask.data}/not_by_position", keep)
        bounds = self._integers(0, 0), self._shape_of((TOKENS, TOKENS), COUNT), self._integers(0, 1)
        own = self._node("Slice", [table, *bounds], f"{mask.data}/own")
        data = self._node("Mul", [mask.data, own], f"{mask.data}/data/{self._limit}")
        return self._pad(data, (-2, -1), mask.rank)

    def _cut(self, tensor: str) -> str:
        """The rows of a carried tensor that belong to tokens, under its name for the entry and outputs."""
        own = tensor == self._whole.entry or tensor in self._view.outputs
        return tensor if own else self._cut_to(tensor)

    def _cut_to(self, tensor: str, output: str | None = None) -> str:
        sizes, name = self._sizes[tensor], self._name(tensor)
        axes = token_axes(sizes)
        if all(sizes[axis] == TOKENS for axis in axes):
            bounds = self._shape_of((TOKENS,) * len(axes), COUNT), self._integers(*axes)
            return self._node("Slice", [name, self._integers(*[0] * len(axes)), *bounds], f"{tensor}/tokens", output)
        # Batch and tokens are merged into the first axis, so the bias tokens are not at its end but after every
        # sequence: split it as [batch, N + R, ...], cut, and merge again.
        apart = self._shape_of((-1, TOKENS, factors(sizes[0] or 0)[0], *sizes[1:]), ROWS)
        split = self._node("Reshape", [name, apart], f"{tensor}/apart")
        kept = self._node("Slice", [split, self._integers(0), COUNT, self._integers(1)], f"{tensor}/kept")
        return self._node("Reshape", [kept, self._shape_of(sizes, COUNT, rest=True)], f"{tensor}/tokens", output)

    def _pad(self, tensor: str, axes: Sequence[int], rank: int) -> str:
        """Append R rows along axes; their values do not affect any token."""
        pads = [0] * 2 * rank
        for axis in axes:
            pads[axis] = self._m
        name = f"{tensor}/padded_{'_'.join(str(-axis) for axis in axes)}"
        return self._node("Pad", [tensor, self._integers(*pads)], name)

    def _node(
        self, operator: str, inputs: Sequence[str], name: str, output: str | None = None, **given: int | list[int]
    ) -> str:
        """A node `bias_token/<name>`, created once; its output may have another name."""
        called = f"{PREFIX}/{name.removeprefix(f'{PREFIX}/')}"
        made = output or called
        if made not in self._done:
            self._done.add(made)
            node = helper.make_node(operator, list(inputs), [made], called)
            node.attribute.extend(helper.make_attribute(key, value) for key, value in given.items())
            self.nodes.append(node)
        return made

    def _copy(self, node: onnx.NodeProto, inputs: Sequence[str], output: str = "") -> str:
        copy = deepcopy(node)
        copy.ClearField("input")
        copy.input.extend(inputs)
        copy.output[0] = output or node.output[0]
        self.nodes.append(copy)
        return str(copy.output[0])

    def _integers(self, *values: int) -> str:
        name = f"{PREFIX}/integers_{'_'.join(map(str, values))}"
        self.constants.setdefault(name, numpy_helper.from_array(np.asarray(values, np.int64), name))
        return name

    def _constant(self, name: str, values: NDArray[np.float64] | float) -> str:
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.asarray(values, self._dtype), name)
        return name

"""Emitting form `whole`: one residual stream with bias tokens, indicator and position columns, and no mask operator.

The wide stream is `bias_token/stream` behind the embeddings and `<sum>/stream` behind each residual addition, whose
second operand has zeros in the further columns. Its first D columns go by the model's own names, so that everything
that reads them stays as it was. The masks of the network's heads become -omega in W_QK, between columns of positions
that are joined to queries and keys behind whatever the model does to them (such as rotations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from passes.conversion import Conversion
from passes.forms.whole import BIAS_ROWS, COUNT, POSITION_ROWS, PREFIX, ROWS, STREAM
from passes.sizes import TOKENS, Sizes, factors, token_axes
from passes.whole.masks import Mask, Scores
from passes.whole.route import Whole
from rewriter.graph.edit import drop_dead_constants, forget_types
from rewriter.graph.view import GraphView, all_views, attributes

_HALF = 0.5
_BATCH = f"{PREFIX}/batch"


def widen(model: onnx.ModelProto, view: GraphView, whole: Whole) -> onnx.ModelProto:
    """A copy of `model` on the wide stream; its blocks are still MLPs, on rows of the model's columns."""
    carrier = _Widener(view, whole)
    result = carrier.copy(model)
    # Masks and biases that moved into the stream leave what computed them behind.
    drop_dead_constants(result.graph, frozenset(carrier.left))
    return result


def stream_of(whole: Whole, tensor: str) -> str:
    """The wide stream that was current when a carried tensor was computed."""
    return wide_name(whole, whole.stream[tensor])


def wide_name(whole: Whole, stream: str) -> str:
    """The name of the wide stream whose first columns are the tensor `stream`."""
    return f"{PREFIX}/wide" if stream == whole.entry else f"{PREFIX}/{stream}/wide"


def carry_whole(
    model: onnx.ModelProto, view: GraphView, whole: Whole, conversions: Sequence[Conversion]
) -> tuple[onnx.ModelProto, tuple[GraphView, ...], tuple[Conversion, ...]]:
    """The graph on the wide residual stream, its views, and the conversions that read it."""
    wider = widen(model, view, whole)
    views = all_views(wider)
    on_stream = tuple(
        replace(
            _moved(conversion, view, views[0], whole),
            carried=whole.bias_tokens,
            stream=stream_of(whole, conversion.inputs[0]),
        )
        for conversion in conversions
    )
    return wider, views, on_stream


def _moved(conversion: Conversion, old: GraphView, new: GraphView, whole: Whole) -> Conversion:
    """The conversion with its region's nodes as indices of the new view, and tensors that have other names there."""
    block, projections = conversion.block, conversion.projections
    if projections is not None:
        # The entry and outputs of the graph have their bias tokens under another name. No Shape is left.
        query, value = (
            replace(each, data=carried_name(old, whole, each.data)) for each in (projections.query, projections.value)
        )
        result = carried_name(old, whole, projections.result)
        projections = replace(projections, query=query, value=value, result=result, shapes=())
    nodes = tuple(sorted(new.producer[old.nodes[index].output[0]] for index in block.region.nodes))
    return replace(conversion, projections=projections, block=replace(block, region=replace(block.region, nodes=nodes)))


class _Widener:
    """Emits the nodes; `left` are the tensors that the new nodes no longer read."""

    def __init__(self, view: GraphView, whole: Whole) -> None:
        self._view = view
        self._whole = whole
        self._sizes = whole.sizes
        self._m = whole.bias_tokens
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._made: dict[tuple[object, ...], str] = {}
        self._dtype = helper.tensor_dtype_to_np_dtype(whole.elem_type)
        self._alias: dict[str, str] = {}
        self._skipped: dict[int, Mask | None] = {}
        self.left: set[str] = set()
        for scores in whole.scores.values():
            self._skipped.update(dict.fromkeys(scores.scales))
            self._skipped.update(scores.masks)

    def copy(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """A copy of the model with the new graph."""
        result = onnx.ModelProto()
        result.CopyFrom(model)
        nodes = _sorted(self._run())
        del result.graph.node[:]
        result.graph.node.extend(nodes)
        result.graph.initializer.extend(self._constants.values())
        # Declared shapes of carried tensors say N where there are now N + R rows.
        forget_types(result.graph, self._sizes)
        return result

    def _run(self) -> list[onnx.NodeProto]:
        entry, way = self._whole.entry, frozenset(self._whole.nodes)
        if entry not in self._view.producer:
            self._get_on()
        for index, node in enumerate(self._view.nodes):
            if index in way:
                self._on_way(index, node)
            else:  # it reads the tokens only
                self._copy(node, [self._cut(name) if name in self._sizes else name for name in node.input])
            if entry in node.output:
                self._get_on()
            # A carried graph output keeps its name for the tokens alone; the wide tensor gets another one.
            for name in node.output:
                if name in self._view.outputs and name in self._sizes and name != entry:
                    self._nodes[-1].output[list(node.output).index(name)] = _wide(name)
                    self._cut(name, output=name)
        return self._nodes

    # -- nodes of the graph ----------------------------------------------------------------------------------

    def _name(self, tensor: str) -> str:
        return self._alias.get(tensor) or carried_name(self._view, self._whole, tensor)

    def _on_way(self, index: int, node: onnx.NodeProto) -> None:
        whole = self._whole
        if node.op_type == "Shape":
            self._shape(node)
        elif index in whole.sums:
            self._sum(node, *whole.sums[index])
        elif index in whole.scores:
            self._scores(node, whole.scores[index])
        elif index in self._skipped:
            self._masked(node, self._skipped[index])
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
        """The shape of a tensor as it was, so that everything computed from shapes keeps its value."""
        given, sizes = attributes(node), self._sizes[node.input[0]]
        part, out = sizes[given.get("start", 0) : given.get("end", len(sizes))], str(node.output[0])
        self.left.add(out)
        if None in part:
            self._copy(node, [self._cut(node.input[0])])
        else:
            self._node("Identity", [self._shape_of(part, COUNT)], f"{out}/shape", out)

    def _shape_of(self, sizes: Sizes, tokens: str, *, rest: bool = False) -> str:
        """A shape with as many tokens as `tokens` says; with `rest`, the first product of batch and others is -1."""
        parts: list[int | str] = []
        for size in sizes:
            number, batch, rows = factors(size or 0)
            if not batch and not rows:
                parts.append(number)
            elif (number, batch, rows) == (1, 0, 1):
                parts.append(tokens)
            elif rest:
                parts.append(-1)
                rest = False
            else:
                parts.append(self._product([self._integers(number), *[_BATCH] * batch, *[tokens] * rows]))
        names: list[str] = []
        for fixed, run in groupby(parts, lambda part: isinstance(part, int)):
            each = list(run)
            names += [self._integers(*map(int, each))] if fixed else map(str, each)
        key = ("shape", *names)
        if key not in self._made:
            label = "_".join(str(part).removeprefix(f"{PREFIX}/") for part in parts)
            self._made[key] = names[0] if len(names) == 1 else self._node("Concat", names, f"shape_{label}", axis=0)
        return self._made[key]

    def _product(self, names: list[str]) -> str:
        key = ("product", *names)
        if key not in self._made:
            total, label = names[0], names[0].rpartition("_")[2]
            for name in names[1:]:
                label = f"{label}_{name.rpartition('/')[2]}"
                total = self._node("Mul", [total, name], f"product_{label}")
            self._made[key] = total
        return self._made[key]

    def _copy(self, node: onnx.NodeProto, inputs: Sequence[str]) -> onnx.NodeProto:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        del copy.input[:]
        copy.input.extend(inputs)
        self._nodes.append(copy)
        return copy

    # -- the stream ------------------------------------------------------------------------------------------

    def _get_on(self) -> None:
        """The stream behind the embeddings: rows of bias tokens, columns of indicators and positions."""
        entry, width = self._whole.entry, self._whole.width
        shape = self._node("Shape", [entry], "entry_shape")
        self._node("Gather", [shape, self._integers(0)], "batch", axis=0)
        self._node("Gather", [shape, self._integers(1)], "tokens", axis=0)
        self._node("Add", [COUNT, self._integers(self._m)], "rows")
        tokens, bias = token_columns(self._whole), bias_rows(self._whole)
        each = self._node("Concat", [_BATCH, self._integers(1, 1)], "each_batch", axis=0)
        table = self._constant(POSITION_ROWS.removeprefix(f"{PREFIX}/"), tokens.astype(self._dtype))
        own = self._node("Slice", [table, self._integers(0), COUNT, self._integers(1)], "own_columns")
        spread = self._node("Expand", [own, each], "own_columns_each")
        wide = self._node("Concat", [entry, spread], f"tokens_wide/{self._limit}", axis=2)
        rows = self._constant(BIAS_ROWS.removeprefix(f"{PREFIX}/"), bias.astype(self._dtype))
        more = self._node("Expand", [rows, each], "bias_tokens")
        stream = self._node("Concat", [wide, more], "stream_rows", wide_name(self._whole, entry), axis=1)
        self._node("Slice", [stream, self._integers(0), self._integers(width), self._integers(2)], "stream")
        for count in self._whole.neurons:
            self._constant(f"W_QK_neurons_{count}", neuron_mask(self._whole, count).astype(self._dtype))

    def _sum(self, node: onnx.NodeProto, stream: str, written: str) -> None:
        """A residual addition to all columns; what the sublayer writes has zeros in the further ones."""
        width, out = self._whole.width, str(node.output[0])
        before, three = self._wide(stream), self._in_batches(self._name(written), written, out)
        pads = self._integers(0, 0, 0, 0, 0, self._further)
        padded = self._node("Pad", [three, pads], f"{out}/written_wide")
        wide = self._node("Add", [before, padded], f"{out}/wide", wide_name(self._whole, out))
        columns = [wide, self._integers(0), self._integers(width), self._integers(2)]
        if self._whole.flat(out):
            model = self._node("Slice", columns, f"{out}/model_columns")
            self._node("Reshape", [model, self._integers(-1, width)], f"{out}/flat", out)
        else:
            self._node("Slice", columns, f"{out}/model_columns", out)

    def _wide(self, stream: str) -> str:
        """The wide stream with the columns of `stream`; a renewed one is joined where it is first needed."""
        name = wide_name(self._whole, stream)
        key = ("wide", stream)
        if stream in self._whole.renewed and key not in self._made:
            three = self._in_batches(self._name(stream), stream, stream)
            further = self._columns(wide_name(self._whole, self._whole.renewed[stream]), self._whole.width, None)
            self._made[key] = self._node("Concat", [three, further], f"{stream}/joined", name, axis=2)
        return name

    def _columns(self, wide: str, start: int, stop: int | None) -> str:
        """Some columns of a wide stream."""
        key = ("columns", wide, start, stop)
        if key not in self._made:
            bounds = self._integers(start), self._integers(2**62 if stop is None else stop)
            label = f"{wide.removeprefix(f'{PREFIX}/')}/columns_{start}_{'' if stop is None else stop}"
            self._made[key] = self._node("Slice", [wide, *bounds, self._integers(2)], label)
        return self._made[key]

    @property
    def _limit(self) -> str:
        """The name of nodes that fail on too long a sequence, whose operands do not fit together then."""
        return f"sequence_longer_than_max_tokens_{self._whole.max_tokens}"

    @property
    def _further(self) -> int:
        return further_columns(self._whole)

    def _in_batches(self, name: str, tensor: str, label: str) -> str:
        """[batch, rows, width], where batch and tokens may be one axis."""
        if not self._whole.flat(tensor):
            return name
        shape = self._shape_of((-1, TOKENS, self._whole.width), ROWS)
        return self._node("Reshape", [name, shape], f"{label}/in_batches")

    # -- biases ----------------------------------------------------------------------------------------------

    def _biased(self, node: onnx.NodeProto, place: int) -> None:
        """The bias as the weight of the stream's column of ones; bias tokens have 0 there and stay rows of zeros."""
        tensor, out = str(node.input[place]), str(node.output[0])
        width = self._sizes[out][-1] or -1
        row = self._node("Reshape", [tensor, self._integers(1, width)], f"{out}/bias_row")
        ones = self._columns(stream_of(self._whole, out), self._whole.width, self._whole.width + 1)
        bias = self._node("MatMul", [ones, row], f"{out}/bias")
        if self._whole.flat(out):
            bias = self._node("Reshape", [bias, self._integers(-1, width)], f"{out}/bias_flat")
        if node.op_type in ("Add", "Sub"):
            inputs = [bias if number == place else self._name(name) for number, name in enumerate(node.input)]
            self._copy(node, inputs)
            return
        plain = self._copy(node, [self._name(name) for name in node.input[:place]])
        plain.output[0] = f"{PREFIX}/{out}/unbiased"
        beta = attributes(node).get("beta", 1.0) if node.op_type == "Gemm" else 1.0
        if beta != 1.0:
            scale = self._constant(f"{out}/beta", np.asarray(beta, self._dtype))
            bias = self._node("Mul", [bias, scale], f"{out}/bias_scaled")
        self._node("Add", [plain.output[0], bias], f"{out}/biased", out)

    # -- heads of the network --------------------------------------------------------------------------------

    def _scores(self, node: onnx.NodeProto, scores: Scores) -> None:
        """Scores q k^T with columns of positions on both sides: [q, p W] [k, p]^T = q k^T + p W p^T (Theorem 9)."""
        out = str(node.output[0])
        query, key = (self._name(name) for name in node.input)
        for index in scores.scales:
            scale = self._view.nodes[index]
            inputs = [query if name in self._sizes else name for name in scale.input]
            query = f"{PREFIX}/{scale.output[0]}/of_queries"
            self._copy(scale, inputs).output[0] = query
        masks = [mask for _, mask in scores.masks]
        positions = self._columns(stream_of(self._whole, str(node.input[0])), self._whole.width + 1, None)
        turned, weighed = self._turned(positions), self._weighed(positions, self._pseudo_mask(masks))
        rank = len(self._sizes[str(node.input[0])])
        query = self._joined(query, weighed, rank, -1, f"{out}/query")
        key = self._joined(key, turned, rank, -2, f"{out}/key")
        self._copy(node, [query, key])

    def _turned(self, positions: str) -> str:
        key = ("turned", positions)
        if key not in self._made:
            label = f"{positions.removeprefix(f'{PREFIX}/')}/turned"
            self._made[key] = self._node("Transpose", [positions], label, perm=[0, 2, 1])
        return self._made[key]

    def _weighed(self, positions: str, weight: str) -> str:
        key = ("weighed", positions, weight)
        if key not in self._made:
            label = f"{positions.removeprefix(f'{PREFIX}/')}/{weight.rpartition('/')[2]}"
            self._made[key] = self._node("MatMul", [positions, weight], label)
        return self._made[key]

    def _joined(self, tensor: str, positions: str, rank: int, axis: int, label: str) -> str:
        """Queries or keys with the columns of positions, the same for every head."""
        if rank == 4:
            alone = self._node("Unsqueeze", [positions, self._integers(1)], f"{label}_positions")
            heads = self._node(
                "Gather", [self._node("Shape", [tensor], f"{label}_shape"), self._integers(1)], f"{label}_heads", axis=0
            )
            one = self._integers(1)
            shape = self._node("Concat", [one, heads, one, one], f"{label}_each_head", axis=0)
            positions = self._node("Expand", [alone, shape], f"{label}_positions_each")
        return self._node("Concat", [tensor, positions], f"{label}_joined", axis=axis)

    def _pseudo_mask(self, masks: list[Mask]) -> str:
        """W_QK between positions: 0 where a query may attend to a key, else very negative."""
        whole, m = self._whole, self._m
        allowed = np.logical_and.reduce([np.ones((whole.max_tokens,) * 2, np.bool_), *(mask.allowed for mask in masks)])
        low = min((mask.low for mask in masks), default=0.0)
        apart, future = -whole.omega, -whole.omega
        if low:
            # What is forbidden by position and what is padding weigh the same for a token that may attend to nothing
            # else, as in the original; bias tokens weigh less.
            future = low * self._share(low)
            apart = low if self._share(low) == _HALF else min(apart, 2.0 * low)
        weight = np.full((m + whole.max_tokens,) * 2, apart)
        weight[m:, m:] = np.where(allowed, 0.0, future)
        weight[:m, :m] = rests(whole, apart)
        key = ("pseudo_mask", allowed.tobytes(), future, apart)
        if key not in self._made:
            number = sum(1 for each in self._made if each[0] == "pseudo_mask")
            self._made[key] = self._constant(f"W_QK_positions_{number}", weight.astype(self._dtype))
        return self._made[key]

    def _share(self, low: float) -> float:
        """The part of a data mask's number that is added, so that bias tokens can weigh less in floating point."""
        return _HALF if -low > np.finfo(self._dtype).max / 4 else 1.0

    def _masked(self, node: onnx.NodeProto, mask: Mask | None) -> None:
        """Nothing where a scale went to the queries and a mask into W_QK; a mask that is data is added as it is."""
        scores = next(name for name in node.input if name in self._sizes)
        out = str(node.output[0])
        self.left.update(name for name in node.input if name != scores)
        if mask is None or not mask.data:
            self._alias[out] = self._name(scores)
            return
        self._copy(node, [self._name(scores), self._data_mask(mask)])

    def _data_mask(self, mask: Mask) -> str:
        """The mask without what W_QK forbids by position, [..., rows, rows]."""
        key = ("data", mask.data)
        if key not in self._made:
            keep = np.where(mask.allowed, self._share(mask.low), 0.0).astype(self._dtype)
            bounds = [self._integers(0, 0), self._node("Concat", [COUNT, COUNT], f"{mask.data}/square", axis=0)]
            table = self._constant(f"{mask.data}/not_by_position", keep)
            own = self._node("Slice", [table, *bounds, self._integers(0, 1)], f"{mask.data}/own")
            data = self._node("Mul", [mask.data, own], f"{mask.data}/data/{self._limit}")
            self._made[key] = self._pad(data, (-2, -1), mask.rank)
        return self._made[key]

    # -- off the route ---------------------------------------------------------------------------------------

    def _cut(self, tensor: str, output: str | None = None) -> str:
        """The rows of a carried tensor that belong to tokens."""
        if tensor == self._whole.entry:
            return tensor  # under its own name the entry has no bias tokens; with them it is `STREAM`
        if tensor in self._view.outputs and output is None:
            return tensor
        key = ("cut", tensor)
        if key not in self._made:
            self._made[key] = self._cut_axes(tensor, output)
        return self._made[key]

    def _cut_axes(self, tensor: str, output: str | None) -> str:
        sizes, name = self._sizes[tensor], self._name(tensor)
        label, zero = f"{tensor}/tokens", self._integers(0)
        axes = token_axes(sizes)
        if all(sizes[axis] == TOKENS for axis in axes):
            for number, axis in enumerate(axes):
                last = number == len(axes) - 1
                bounds = zero, COUNT, self._integers(axis)
                name = self._node("Slice", [name, *bounds], f"{label}_{axis}", output if last else None)
            return name
        # Batch and tokens are merged into the first axis, so the bias tokens are not at its end but after every
        # sequence: split it as [batch, N + m], cut, and merge again.
        apart = self._shape_of((-1, TOKENS, factors(sizes[0] or 0)[0], *sizes[1:]), ROWS)
        split = self._node("Reshape", [name, apart], f"{label}_apart")
        kept = self._node("Slice", [split, zero, COUNT, self._integers(1)], f"{label}_kept")
        return self._node("Reshape", [kept, self._shape_of(sizes, COUNT, rest=True)], f"{label}_flat", output)

    def _pad(self, tensor: str, axes: tuple[int, ...], rank: int) -> str:
        """Append R rows along axes; their values do not affect any token."""
        key = ("pad", tensor, axes)
        if key not in self._made:
            pads = [0] * 2 * rank
            for axis in axes:
                pads[axis] = self._m
            name = f"{tensor}/padded_{'_'.join(str(-axis) for axis in axes)}"
            self._made[key] = self._node("Pad", [tensor, self._integers(*pads)], name)
        return self._made[key]

    # -- nodes -----------------------------------------------------------------------------------------------

    def _node(
        self, operator: str, inputs: Sequence[str], name: str, output: str | None = None, **given: int | list[int]
    ) -> str:
        made = output or f"{PREFIX}/{name}"
        node = helper.make_node(operator, list(inputs), [made], f"{PREFIX}/{name}")
        node.attribute.extend(helper.make_attribute(key, value) for key, value in given.items())
        self._nodes.append(node)
        return made

    def _integers(self, *values: int) -> str:
        return self._constant("integers_" + "_".join(map(str, values)), np.asarray(values, np.int64))

    def _constant(self, name: str, values: NDArray[np.generic]) -> str:
        full = f"{PREFIX}/{name}"
        self._constants.setdefault(full, numpy_helper.from_array(values, full))
        return full


def _sorted(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes in topological order: a scale of scores, now one of queries, comes before its constants otherwise."""
    makers = {name: node for node in nodes for name in node.output}
    done: set[int] = set()
    ordered: list[onnx.NodeProto] = []
    for node in nodes:
        pending = [node]
        while pending:
            late = [makers[name] for name in pending[-1].input if name in makers and id(makers[name]) not in done]
            if late:
                pending += late
                continue
            last = pending.pop()
            if id(last) not in done:
                done.add(id(last))
                ordered.append(last)
    return ordered


def further_columns(whole: Whole) -> int:
    """1 + R + T."""
    return 1 + whole.bias_tokens + whole.max_tokens


def token_columns(whole: Whole) -> NDArray[np.float64]:
    """[1, T, 1 + R + T]: a one, and the one-hot position behind those of the bias tokens."""
    ones = np.ones((whole.max_tokens, 1))
    return np.concatenate([ones, np.eye(whole.max_tokens, further_columns(whole) - 1, whole.bias_tokens)], axis=1)[None]


def bias_rows(whole: Whole) -> NDArray[np.float64]:
    """[1, R, D + 1 + R + T]: zeros, and a one-hot position."""
    width = whole.width + further_columns(whole)
    return np.eye(whole.bias_tokens, width, whole.width + 1)[None]


def rests(whole: Whole, apart: float) -> NDArray[np.float64]:
    """Scores [R, R] among bias tokens: all attend to the last one, whose value is 0 in every head."""
    scores = np.full((whole.bias_tokens,) * 2, apart)
    scores[:, -1] = 0.0
    return scores


def neuron_mask(whole: Whole, bias_tokens: int) -> NDArray[np.float64]:
    """W_QK between positions for heads that are neurons: a token attends to itself and to the first bias tokens."""
    m = whole.bias_tokens
    weight = np.full((m + whole.max_tokens,) * 2, -whole.omega)
    np.fill_diagonal(weight[m:, m:], 0.0)
    weight[m:, :bias_tokens] = 0.0
    weight[:m, :m] = rests(whole, -whole.omega)
    return weight


def carried_name(view: GraphView, whole: Whole, tensor: str) -> str:
    """The name of a tensor with its bias tokens; tensors off the way keep theirs."""
    if tensor == whole.entry:
        return STREAM
    return _wide(tensor) if tensor in whole.sizes and tensor in view.outputs else tensor


def _wide(tensor: str) -> str:
    return f"{PREFIX}/{tensor}"

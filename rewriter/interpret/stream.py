"""The residual stream: normalisations, sums where sublayers write, the path to the logit, rows of bias tokens."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper

from passes.match.linear import made_linearly
from passes.match.projections import Projection, matrix_of
from rewriter.arrays import Array
from rewriter.errors import UsageError
from rewriter.graph.constants import Constants
from rewriter.graph.edit import set_nodes
from rewriter.graph.fused import Writer
from rewriter.graph.view import REARRANGED, GraphView, LostError, integer_of, label
from rewriter.interpret.sublayers import Sublayer
from rewriter.interpret.trace import NORMS, Norm, norm_before, without_constant

_MAX_FROZEN_ERROR = 1e-4  # of a frozen normalisation, relative; float32 leaves about 1e-6


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """`(x - mean) / denominator * scale + bias`; RMS has no mean, and `factors` [T] are 1 / denominator."""

    factors: Array
    scale: Array
    bias: Array
    centred: bool

    def linear(self, rows: Array) -> Array:
        """The contribution of rows [..., T, D], without the bias."""
        data = rows - rows.mean(axis=-1, keepdims=True) if self.centred else rows
        return np.asarray(data * self.scale * self.factors[:, None])

    def back(self, gradient: Array, token: int | slice = slice(None)) -> Array:
        """[T, D] at the result to [T, D] at the stream, or rows [K, D] at one token likewise."""
        inner = gradient * (self.scale * self.factors[token, None])
        return np.asarray(inner - inner.mean(axis=-1, keepdims=True) if self.centred else inner)


def held_norm(stream: Array, result: Array, constants: Mapping[str, Array], where: str) -> FrozenNorm:
    """The normalisation `stream` [T, D] to `result` [T, D] with `constants` `w` and `b`, if any. Raises UsageError."""
    scale, bias = (constants.get(part, np.full(stream.shape[-1], part == "w", float)) for part in "wb")
    for centred in (False, True):
        shaped = FrozenNorm(np.ones(len(stream)), scale, bias, centred).linear(stream)
        power = (shaped * shaped).sum(axis=-1)
        factors = (shaped * (result - bias)).sum(axis=-1) / np.where(power == 0.0, 1.0, power)
        miss = np.abs(shaped * factors[:, None] + bias - result).max()
        if miss <= _MAX_FROZEN_ERROR * max(1e-30, np.abs(result).max()):
            return FrozenNorm(factors, scale, bias, centred)
    raise UsageError(f"{where} does not read the residual stream through a normalisation; it cannot be attributed")


# Operators of normalisations, sums and layout: their results have the channels of their inputs.
STREAM = {
    *("Add", "Sum", "Sub", "Mul", "Div", "Neg", "Pow", "Sqrt", "Reciprocal"),
    *("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "LpNormalization"),
    *(*NORMS, *REARRANGED, "Expand"),
}


@dataclass(frozen=True)
class Write:
    """How a sublayer's result enters the residual stream."""

    out: str  # the added result, after its bias and normalisation
    before: str  # the stream before
    after: str  # the stream with it, shared by parallel sublayers
    norm: Norm | None


def writes(view: GraphView, constants: Constants, sublayers: Sequence[Sublayer]) -> dict[str, Write]:
    """Sublayer to its write, if its result is simply added."""
    ends = (node for node in view.nodes if node.op_type in (*NORMS, "Add", "Mul"))
    made = (norm_before(view, constants, node.output[0]) for node in ends)
    norms = {norm.data: norm for norm in made if norm is not None}
    found = {each.name: _sum(view, constants, each.result, norms) for each in sublayers}
    sums = {name: write for name, write in found.items() if write is not None}
    # Results of parallel sublayers are added to each other first, and their sum to the stream.
    shared = Counter(found.after for found in sums.values())
    for name, write in sums.items():
        if shared[write.after] > 1 and (outer := _sum(view, constants, write.after, {})):
            sums[name] = replace(write, before=outer.before, after=outer.after)
    return sums


def _sum(view: GraphView, constants: Constants, tensor: str, norms: Mapping[str, Norm]) -> Write | None:
    """The first sum of a tensor with data, past biases, scales, a normalisation and layout."""
    norm: Norm | None = None
    while True:
        norm = norms.get(tensor, norm)
        tensor = norms[tensor].output if tensor in norms else tensor
        readers = view.readers(tensor)
        if len(readers) != 1:
            return None
        node, others = readers[0], [name for name in readers[0].input if name != tensor]
        if node.op_type == "Add" and len(others) == 1 and others[0] not in constants:
            return Write(tensor, others[0], node.output[0], norm)
        scaled = node.op_type in ("Add", "Mul") and all(name in constants for name in others)
        if not view.is_onnx(node) or not (scaled or (node.op_type in REARRANGED and node.input[0] == tensor)):
            return None
        tensor = node.output[0]


@dataclass(frozen=True, eq=False)
class Stage:
    """Sublayers that read one value of the stream, more than one if they are in parallel."""

    before: str
    after: str
    sublayers: tuple[Sublayer, ...]
    norm: Norm | None = None  # behind it, before the next stage, as in post-norm models


@dataclass(frozen=True, eq=False)
class Chain:
    """The path to an output."""

    stages: tuple[Stage, ...]  # first to last; each reads the output of the one before
    norm: Norm
    unembedding: Projection | None  # None where the output is the normalised stream
    logits: str  # the output, before a tanh cap if any
    token: int | None = None  # of the output, such as 0 for a class token; None where it has all tokens
    factor: float = 1.0  # of the normalised stream before the unembedding


def chain_to(view: GraphView, sublayers: Sequence[Sublayer], added: Mapping[str, Write], output: str) -> Chain:
    """The path to an output [batch, tokens, vocabulary]; `added` are the `writes`. Raises UsageError unless linear."""
    constants = Constants(view)
    node = view.made_by(_factor(view, constants, view.before(output))[0])  # of an output c tanh(x / c): logits are x
    node = view.made_by(node.input[0]) if node is not None and node.op_type == "Tanh" else None
    capped = node is not None and node.op_type == "Div" and node.input[1] in constants
    logits = node.input[0] if node is not None and capped else output
    tensor, token, factor = view.before(logits), None, 1.0
    unembedding: Projection | None = None
    tensor = view.before(without_constant(view, tensor, "Add")[0])
    if (operator := made_linearly(view, constants, tensor)) is not None and operator.axis == -1:
        try:
            unembedding = matrix_of(view, constants, operator, biased=True)
        except LostError as lost:
            raise UsageError(f"output {output} cannot be attributed: {lost.miss.reason}") from lost
        tensor, factor = _factor(view, constants, operator.data)
        node = view.made_by(tensor)
        if node is not None and node.op_type == "Gather" and integer_of(node, "axis", 0) == 1:
            place = constants.scalar(node.input[1])
            tensor, token = (tensor, None) if place is None else (node.input[0], int(place))
    norm = norm_before(view, constants, tensor)
    if norm is None or (unembedding is None and view.before(logits) != tensor):
        node = view.made_by(tensor)
        where = label(node) if node is not None else tensor
        raise UsageError(f"output {output} cannot be attributed: {where} is not a normalisation of the residual stream")
    return Chain(_stages(view, sublayers, added, norm.output, output), norm, unembedding, logits, token, factor)


def _factor(view: GraphView, constants: Constants, tensor: str) -> tuple[str, float]:
    """(tensor, number) of a product with a number; else the tensor itself and 1."""
    data, constant = without_constant(view, tensor, "Mul")
    number = constants.scalar(constant)
    return (tensor, 1.0) if number is None else (data, number)


class Embedding(NamedTuple):
    """An embedding: the rows of a constant from `first` on, less a zero point, times a factor."""

    name: str
    factor: float
    zero: float
    first: int | None = 0  # the row that the first position takes; None where it is not known


def embedded(view: GraphView, constants: Constants, tensor: str) -> dict[str, Embedding]:
    """The tables whose rows a tensor is the sum of, by TransformerLens' names; {} if others add.

    Rows of W_E and W_token_type are taken by inputs of the model, those of W_pos by positions.
    """
    by_input, others, pending = list[Embedding](), list[Embedding](), [(tensor, 1.0)]
    while pending:
        name, factor = pending.pop()
        name, number = _factor(view, constants, view.before(name))
        node, factor = view.made_by(view.before(name)), factor * number
        if node is not None and node.op_type == "Add":
            pending += [(each, factor) for each in node.input]
            continue
        zero: float | None = 0.0
        if node is not None and node.op_type == "DequantizeLinear":
            scale, zero, *_ = (*(constants.scalar(each) for each in node.input[1:]), 0.0)
            node, factor = view.made_by(view.before(node.input[0])), factor * (scale or 0.0)
        gather = node is not None and node.op_type == "Gather" and len(constants.shape(node.input[0]) or ()) == 2
        if node is not None and gather and factor and zero is not None:
            given = view.made_by(view.before(node.input[1])) is None
            first = 0 if given else _first_row(view, constants, node.input[1])
            (by_input if given else others).append(Embedding(node.input[0], factor, zero, first))
        else:
            return {}
    tables = [sorted(each, key=lambda table: constants.shape(table.name) or ())[::-1] for each in (by_input, others)]
    (ids, *types), (positions, *fixed) = ([*each, None, None] for each in tables)
    rest = types[0] or (fixed[0] and fixed[0]._replace(first=0))
    named = {"embed.W_E": ids, "embed.W_token_type": rest, "pos_embed.W_pos": positions}
    return {name: table for name, table in named.items() if table is not None and table.first is not None}


def _first_row(view: GraphView, constants: Constants, tensor: str) -> int | None:
    """The row that the first of several positions takes; None where that is not understood."""
    row = 0
    while (node := view.made_by(view.before(tensor))) is not None:
        numbers = [constants.scalar(name) for name in node.input]
        known = [number for number in numbers if number is not None]
        made = [view.made_by(view.before(name)) for name in node.input]
        counted = [place for place, each in enumerate(made) if each is not None and each.op_type == "CumSum"]
        if node.op_type in ("Add", "Sub") and len(known) == 1:
            row += int(known[0]) if node.op_type == "Add" else -int(known[0])
            tensor = node.input[numbers.index(None)]
        elif node.op_type == "Mul" and len(counted) == 1:  # by a mask
            tensor = node.input[counted[0]]
        elif node.op_type in ("Expand", "Slice"):
            tensor = node.input[0]
        elif node.op_type in ("CumSum", "Range"):
            start = 1 if node.op_type == "CumSum" else numbers[0]
            return None if start is None else row + int(start)
        else:
            return None
    return row if view.before(tensor) in constants else None  # a list of all positions


def _stages(
    view: GraphView, sublayers: Sequence[Sublayer], added: Mapping[str, Write], end: str, output: str
) -> tuple[Stage, ...]:
    """The consecutive stages on whose results the normalised stream `end` depends."""
    what = f"output {output} cannot be attributed"
    if silent := next((each.name for each in sublayers if each.name not in added), None):
        raise UsageError(f"{what}: {silent} does not add to the residual stream")
    chain, apart = list[Stage](), list[Sublayer]()
    for after, group in groupby(reversed(sublayers), lambda each: added[each.name].after):
        own, read = tuple(group)[::-1], chain[0].before if chain else end
        same = view.before(after) == view.before(read)
        norm = None if same else norm_before(view, Constants(view), read)
        if same or (norm is not None and after in view.back(norm.output, STREAM, {after})):
            chain.insert(0, Stage(added[own[-1].name].before, after, own, norm if chain else None))
        else:
            apart[:0] = own
    if not chain:
        raise UsageError(f"{what}: no sublayer writes to the stream that it reads")
    # The sublayers of an encoder write to another stream; in one stack none may be missing.
    stacks = {each.layer.split(".")[0] for each in chain[0].sublayers}
    if lost := next((each.name for each in apart if each.layer.split(".")[0] in stacks), None):
        raise UsageError(f"{what}: {lost} is not on the stream that it reads")
    return tuple(chain)


# -- form `whole` ------------------------------------------------------------------------------------------------------

_WEIGHED = "/p_q_W_QK"  # ends the names that `passes.whole` gives to positions by W_QK
_WITH_SINK = f"{_WEIGHED}_with_sink"  # and to those with a sink


def without_bias_rows(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a network of form `whole` whose own heads weigh no bias tokens, and add positions to the scores.

    It computes the same, since the heads give bias tokens no weight, except a sink, which is joined to the scores
    again. Returns any other model unchanged.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    cores = tuple(f"{name.removesuffix(_WEIGHED)}/" for name in makers if name.endswith(_WEIGHED))

    def apart(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        name = node.output[0]
        if not name.startswith(cores):
            return [node]
        if node.op_type == "Pad" or name.endswith("/p_k_joined"):
            return [helper.make_node("Identity", node.input[:1], [name], name)]
        if node.op_type == "Softmax" and (sink := _sink(makers.get, name.removesuffix("/pattern"))):
            return _beside_sink(node, sink)
        joined = [[*makers[each].input] for each in node.input if each in makers]
        if not name.endswith("/scores") or [*map(len, joined)] != [2, 2]:
            return [node]
        parts = f"{name}/content", f"{name}/positions"
        products = [helper.make_node("MatMul", pair, [part], part) for part, *pair in zip(parts, *joined, strict=True)]
        return [*products, helper.make_node("Add", parts, [name], name)]

    if not cores:
        return model
    plain = copy.deepcopy(model)
    set_nodes(plain.graph, [part for node in model.graph.node for part in apart(node)])
    read = {name for node in plain.graph.node for name in node.input}
    for field in (plain.graph.value_info, plain.graph.initializer):  # shapes are others, and some constants unread
        kept = [each for each in field if not each.name.startswith(cores) or each.name in read.difference(makers)]
        del field[:]
        field.extend(kept)
    return plain


def _sink(made_by: Callable[[str], onnx.NodeProto | None], core: str) -> str:
    """The constant [heads or 1, 1, R + T] of which the first column is a sink; empty without one."""
    node = made_by(f"{core}{_WITH_SINK}")
    return "" if node is None else node.input[1]


def _beside_sink(node: onnx.NodeProto, sink: str) -> list[onnx.NodeProto]:
    """A softmax over scores and a sink, without the sink's column."""
    written = Writer(node)
    zero, one, last = (written.constant([number]) for number in (0, 1, -1))
    size = written.put("Slice", written.put("Shape", node.input[0]), zero, last)
    own = written.put("Slice", sink, zero, one, last)
    own = written.put("Expand", own, written.put("Concat", size, one, axis=0))
    pattern = written.put("Softmax", written.put("Concat", node.input[0], own, axis=-1), axis=-1)
    written.put("Slice", pattern, zero, last, last, output=node.output[0])
    return written.nodes


def positions_of(view: GraphView, product: str) -> tuple[str, str]:
    """The constants W_QK between positions of own heads with this q k^T, and of sinks; empty where there are none."""
    core = product.removesuffix("/content").removesuffix("/scores")
    node = view.made_by(f"{core}{_WEIGHED}")
    return "" if node is None else node.input[node.op_type == "MatMul"], _sink(view.made_by, core)

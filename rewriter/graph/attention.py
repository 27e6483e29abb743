"""Expand operators of onnxruntime for attention, a sum before a norm, or packed weights, by their definitions.

    z = Softmax(scores) V,  scores = scale q k  [capped, plus a bias, and -infinity where a query does not see a key]

Keys and values are those of the cache, then the new ones. GroupQueryAttention counts positions by the given lengths:
its cache may be over-allocated. A weight of MatMulNBits and GatherBlockQuantized is (number - zero point) scale, with
one scale for each block of a row. Heads are read from these definitions, and the certificate evaluates attention by
them (`rewriter.evaluate.nodes`); the run uses onnxruntime's own kernels.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise, zip_longest
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from rewriter.arrays import Array
from rewriter.evaluate.moves import CASTS
from rewriter.evaluate.scalar import activation_numbers
from rewriter.evaluate.table import MICROSOFT
from rewriter.graph.constants import UNFIT, elem_type_of
from rewriter.graph.edit import drop_dead
from rewriter.graph.fused import Writer, with_parts
from rewriter.graph.types import FLOATS, TensorType, declared_types, inferred_graph
from rewriter.graph.view import GraphView, LostError, attributes, integer_of, integers_of, key_of, label, opsets
from rewriter.graph.walk import all_graphs

ATTENTION: Mapping[tuple[str, str], tuple[str, ...]] = {
    (MICROSOFT, "GroupQueryAttention"): (
        *("query", "key", "value", "past_key", "past_value", "seqlens_k", "total", "cos", "sin", "positions", "bias"),
        "sink",
    ),
    ("", "Attention"): ("query", "key", "value", "bias", "past_key", "past_value", "count"),
    (MICROSOFT, "MultiHeadAttention"): ("query", "key", "value", "offset", "seen", "bias", "past_key", "past_value"),
    (MICROSOFT, "Attention"): ("data", "weight", "offset", "seen", "past", "bias"),
}
"""Attention operators, with names for their operands; a node with further operands is not expanded."""

PACKED = (MICROSOFT, "MatMulNBits")
NORMED = "GroupQueryAttention with q_norm_weight"  # a variant for which onnxruntime only has a GPU kernel
_OPSET, _AXES_AS_INPUT = 11, 13  # the first opset with all operators used here, and with axes as an operand
_SIDES = ("query", "key", "value")
_RANK_BY_HEAD, _RANK_PACKED = 4, 5  # axes of [batch, heads, tokens, channels], [batch, tokens, heads, 2 or 3, channels]
_MISSING_MASK_AXES = {2: (1, 2), 3: (1,)}  # of masks [batch, keys] and [batch, tokens, keys]
_SHORT_MASKS = 24  # the first opset in which a mask may have fewer columns than there are keys
_END = 2**31 - 1  # of a slice
_UNSEEN_POSITION = 2**31  # a position that no query attends to


def with_plain(model: onnx.ModelProto, left: Collection[tuple[str, str]] = ()) -> onnx.ModelProto:
    """A copy in which operators of the table, except those in `left`, are expanded where possible."""
    model = with_parts(model, norms_apart)
    known = cache(lambda: declared_types(inferred_graph(model)))
    read = {name for graph in all_graphs(model.graph) for node in graph.node for name in node.input}
    read |= {value.name for graph in all_graphs(model.graph) for value in graph.output}

    def plain(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if key_of(node) not in DEFINITIONS or key_of(node) in left:
            return None
        used = onnx.NodeProto.FromString(node.SerializeToString())
        used.output[1:] = [name if name in read else "" for name in node.output[1:]]
        try:
            return definition(used, known(), opsets(model.opset_import).get("", 1))
        except LostError:
            return None

    return with_parts(model, plain)


def with_dequantised(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which MatMulInteger of dynamically quantised data is MatMul of the unquantised data."""
    makers, gone = {name: node for node in model.graph.node for name in node.output}, list[str]()

    def plain(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        # Mul(Cast(MatMulInteger(data, weight, zero point, zero point)), Mul(scale of data, scale of weight))
        chain, name = [node], node.input[0] if node.op_type == "Mul" else ""
        for operator in ("Cast", "MatMulInteger", "DynamicQuantizeLinear"):
            if name not in makers or key_of(makers[name]) != ("", operator):
                return None
            chain, name = [*chain, makers[name]], makers[name].input[0]
        *_, product, data = chain
        scales = makers.get(node.input[1], onnx.NodeProto())
        if (scales.op_type, *scales.input[:1], *product.input[2:3]) != ("Mul", *data.output[1:3]):
            return None
        written = Writer(node)
        weight = written.put("DequantizeLinear", product.input[1], scales.input[1], *product.input[3:], axis=1)
        written.put("MatMul", name, weight, output=node.output[0])
        gone.extend((node.input[0], node.input[1]))
        return written.nodes

    made = with_parts(model, plain)
    if gone:
        drop_dead(made.graph, gone)
    return made


def norms_apart(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """GroupQueryAttention behind its norms of queries and keys, which the CPU kernel lacks; None for other nodes."""
    norms, sides = node.input[14:16], list(node.input[:3])
    if key_of(node) != (MICROSOFT, "GroupQueryAttention") or not any(norms):
        return None
    bare = onnx.NodeProto.FromString(node.SerializeToString())
    bare.output[0] = f"{node.output[0]}/normed"  # prefix of new tensors
    written = _Expansion(bare, {}, _AXES_AS_INPUT)
    counts = [integer_of(node, name, 0) for name in ("num_heads", "kv_num_heads", "kv_num_heads")]
    if not any(sides[1:]):
        packed = written.put("Reshape", sides[0], written.constant([0, 0, sum(counts), -1]))
        sides = [written.part(packed, 2, *each) for each in pairwise([0, *accumulate(counts)])]
    for place, scale in enumerate(norms):
        rows = written.put("Reshape", sides[place], written.constant([0, 0, counts[place], -1]))
        epsilon = written.number(f"{'qk'[place]}_norm_epsilon", written.number("qk_norm_epsilon", 1e-6))
        sides[place] = written.put("SimplifiedLayerNormalization", rows, scale, axis=-1, epsilon=epsilon)
    sides = [written.put("Reshape", each, written.constant([0, 0, -1])) for each in sides]
    bare.input[:] = [*sides, *node.input[3:14], "", "", *node.input[16:]]
    bare.output[0] = node.output[0]
    return [*written.nodes, bare]


def keys_alone(view: GraphView, scores: str, of_keys: Callable[[str], bool]) -> tuple[str, str, frozenset[int]]:
    """The scores `of_keys` that a softmax reads, a sink, and the nodes that join it or subtract the largest score.

    A sink is one more score, the column of which is dropped; it is empty if there is none.
    """
    sink, tensor, passed = "", scores, list[int]()
    while not sink and (index := view.producer.get(tensor)) is not None:
        node = view.nodes[index]
        largest = view.made_by(node.input[1]) if node.op_type == "Sub" else None
        if node.op_type == "Concat":
            parts = [name for name in node.input if of_keys(name)]
            if len(parts) != 1:
                raise LostError("its scores are joined of several products", label(node))
            scores, sink = parts[0], next(name for name in node.input if name not in parts)
        elif largest is not None and (largest.op_type, *largest.input[:1]) == ("ReduceMax", node.input[0]):
            passed, scores = [*passed, view.producer[node.input[1]]], node.input[0]
        elif node.op_type not in CASTS:
            break
        passed, tensor = [*passed, index], node.input[0]
    return scores, sink, frozenset(passed)


def definition(node: onnx.NodeProto, types: Mapping[str, TensorType], opset: int) -> list[onnx.NodeProto]:
    """The nodes that define an operator. Raises LostError if it uses a feature that the definition lacks."""
    *norms, node = norms_apart(node) or [node]
    written = _Expansion(node, types, opset)
    if key_of(node) not in DEFINITIONS:
        linear = node.op_type == "LinearAttention"
        raise written.lost("it has a state and no softmax" if linear else "what it computes is not known")
    if opset < _OPSET:
        raise written.lost(f"its parts need opset {_OPSET}, and the model has {opset}")
    try:
        DEFINITIONS[key_of(node)](written)
    except UNFIT as error:
        raise written.lost("its operands do not fit") from error
    return [*norms, *written.nodes]


def packed_matrix(node: onnx.NodeProto, value_of: Callable[[str], Array]) -> Array:
    """The matrix [N, K] of a MatMulNBits, in the type of its scales. Raises LostError if it is unknown."""
    bits, rows, columns, block = (integer_of(node, name, 4) for name in ("bits", "N", "K", "block_size"))
    packed, scales, zeros, order = [*node.input, "", ""][1:5]
    if order or integer_of(node, "weight_prepacked", 0) > 0:
        raise LostError("its weight is in another order", label(node))
    numbers, factors = value_of(packed), value_of(scales)
    if bits not in (4, 8) or numbers.dtype != np.uint8 or elem_type_of(factors) not in FLOATS:
        raise LostError("its weight is not of 4 bits or 8 bits with a scale for each block", label(node))

    def unpacked(entries: Array) -> Array:
        """[rows, ...]: of 4 bits the first of two numbers is in the lower half of an entry."""
        halves = np.stack([entries & 15, entries >> 4], axis=-1) if bits == 4 else entries
        return halves.reshape(rows, -1)

    middle = np.asarray(2 ** (bits - 1), factors.dtype)
    if zeros:
        held = value_of(zeros)
        own = held.reshape(rows, -1) if elem_type_of(held) in FLOATS else unpacked(held)[:, : -(-columns // block)]
        middle = own.astype(factors.dtype)[..., None]
    made = unpacked(numbers).reshape(rows, -(-columns // block), -1).astype(factors.dtype)
    made -= middle
    made *= factors.reshape(rows, -1, 1)
    return np.asarray(made.reshape(rows, -1)[:, :columns])


@dataclass(frozen=True)
class _Expansion(Writer):
    types: Mapping[str, TensorType]
    opset: int

    def lost(self, reason: str) -> LostError:
        return LostError(reason, label(self.node))

    @cached_property
    def given(self) -> dict[str, str]:
        """Its operands by name. Raises LostError for an operand that the definition lacks."""
        names = ATTENTION[key_of(self.node)]
        for place, name in enumerate(self.node.input):
            if name and place >= len(names):
                raise self.lost(f"its operand number {place} is not understood")
        return {key: name for key, name in zip(names, self.node.input, strict=False) if name}

    def of(self, tensor: str) -> TensorType:
        return self.types.get(tensor, TensorType())

    def known(self, number: object, what: str) -> int:
        """A size, a rank or a type. Raises LostError for anything but an integer."""
        if not isinstance(number, int):
            raise self.lost(f"{what} is not known")
        return number

    def rank(self, tensor: str) -> int:
        return self.known(self.of(tensor).rank, f"the shape of '{tensor}'")

    def width(self, tensor: str, axis: int) -> int:
        shape = self.of(tensor).shape or ()
        return self.known(shape[axis] if len(shape) > max(axis, 0) else None, f"the shape of '{tensor}'")

    def outputs(self, *made: str) -> None:
        """Give tensors the names of the operator's outputs. Raises LostError if it has more outputs."""
        for tensor, name in zip_longest(made, self.node.output, fillvalue=""):
            if name and not tensor:
                raise self.lost(f"how it makes '{name}' is not known")
            if name:
                self.put("Identity", tensor, output=name)

    @cached_property
    def kind(self) -> int:
        kind = self.of(self.node.input[0]).elem_type or self.of(self.node.output[0]).elem_type
        return self.known(kind or None, "the type of its operands")

    def float(self, number: float) -> str:
        return self.constant(number, self.kind)

    def part(self, tensor: str, axis: int, start: int, stop: int) -> str:
        return self.put("Slice", tensor, *(self.constant([each]) for each in (start, stop, axis)))

    def size(self, tensor: str, axis: int) -> str:
        return self.part(self.put("Shape", tensor), 0, axis, axis + 1)

    def axis(self, tensor: str, *axes: int) -> str:
        return self.along("Unsqueeze", tensor, axes)

    def along(self, operator: str, tensor: str, axes: Sequence[int], **attributes: Any) -> str:
        if self.opset < _AXES_AS_INPUT:
            return self.put(operator, tensor, axes=axes, **attributes)
        return self.put(operator, tensor, self.constant(axes), **attributes)

    def places(self, count: str) -> str:
        """0, 1, ... up to a number [1]."""
        zero, one = self.constant(0), self.constant(1)
        return self.put("Range", zero, self.along("Squeeze", count, [0]), one)

    def taken(self, tensor: str, index: str, axis: int) -> str:
        """Entries along one of four axes, by an index that broadcasts along the others."""
        before, behind = (self.part(self.put("Shape", tensor), 0, *ends) for ends in ((0, axis), (axis + 1, 4)))
        index = self.put("Expand", index, self.put("Concat", before, self.constant([1]), behind, axis=0))
        tensor = self.put("Expand", tensor, self.put("Concat", self.size(index, 0), self.constant([1, 1, 1]), axis=0))
        return self.put("GatherElements", tensor, index, axis=axis)

    def by_head(self, tensor: str, heads: int) -> str:
        """[batch, tokens, heads * channels] as [batch, heads, tokens, channels]."""
        heads = self.known(max(heads, 0) or None, "its number of heads")
        apart = self.put("Reshape", tensor, self.constant([0, 0, heads, -1]))
        return self.put("Transpose", apart, perm=[0, 2, 1, 3])

    def attended(
        self, query: str, key: str, value: str, shared: int, bias: str = "", seen: str = "", sink: str = ""
    ) -> tuple[str, list[str]]:
        """The output of heads from queries, keys and values by head; `shared` query heads use each key head.

        `bias` is added to scores, `seen` says which keys a query attends to, and `sink` is an additional score; each
        may be empty. Returned, too, are the stages of the scores: products, capped, biased, and the pattern.
        """
        key, value = (self.repeated(each, shared) for each in (key, value))
        scale = self.float(self.number("scale", 0.0))
        if not self.number("scale", 0.0):
            width = self.put("Cast", self.size(query, 3), to=TensorProto.DOUBLE)  # so that the scale is rounded once
            scale = self.put("Cast", self.put("Reciprocal", self.put("Sqrt", width)), to=self.kind)
        scores = self.put("MatMul", query, self.put("Transpose", key, perm=[0, 1, 3, 2]), name="product")
        product = scores = self.put("Mul", scores, scale)
        if (cap := self.number("softcap", 0.0)) > 0:
            limit = self.float(cap)
            scores = self.put("Mul", self.put("Tanh", self.put("Div", scores, limit)), limit)
        capped = scores
        scores = self.put("Add", scores, bias) if bias else scores
        scores = self.put("Where", seen, scores, self.float(-np.inf), name="scores") if seen else scores
        stages = [product, capped, scores]
        if sink:
            size = self.put("Concat", self.part(self.put("Shape", scores), 0, 0, 3), self.constant([1]), axis=0)
            scores = self.put("Concat", scores, self.put("Expand", sink, size), axis=-1)
        pattern = self.put("Softmax", scores, axis=-1, name="pattern")
        pattern = self.part(pattern, -1, 0, -1) if sink else pattern
        pattern = self.put("Where", seen, pattern, self.float(0.0)) if seen else pattern  # a row may have no keys
        return self.put("MatMul", pattern, value, name="z"), [*stages, pattern]

    def joined(self, tensor: str) -> str:
        """[batch, heads, tokens, channels] as [batch, tokens, heads * channels]."""
        return self.put("Reshape", self.put("Transpose", tensor, perm=[0, 2, 1, 3]), self.constant([0, 0, -1]))

    def repeated(self, tensor: str, times: int) -> str:
        if times == 1:
            return tensor
        apart = self.put("Expand", self.axis(tensor, 2), self.constant([1, 1, times, 1, 1]))
        shape = self.put("Concat", self.constant([0, -1]), self.part(self.put("Shape", tensor), 0, 2, 5), axis=0)
        return self.put("Reshape", apart, shape)

    def cached(self, past: str, new: str) -> str:
        return self.put("Concat", past, new, axis=2) if past else new

    def turned(self, tensor: str, heads: int, positions: str) -> str:
        given, interleaved = self.given, integer_of(self.node, "rotary_interleaved", 0)
        operands = (tensor, positions, given["cos"], given["sin"])
        width = 2 * self.width(given["cos"], -1)
        how: dict[str, Any] = {"num_heads": heads, "rotary_embedding_dim": width, "interleaved": interleaved}
        return self.put("RotaryEmbedding", *operands, domain=MICROSOFT, **how)

    def grouped(self) -> None:
        given = self.given
        heads, groups = (integer_of(self.node, name, 0) for name in ("num_heads", "kv_num_heads"))
        if integer_of(self.node, "causal", 1) != 1:
            raise self.lost("its queries see later keys")
        if groups < 1 or heads % groups:
            raise self.lost("its number of heads is not known")
        if "key" in given:
            query, key, value = (self.by_head(given[each], heads if each == "query" else groups) for each in _SIDES)
        else:
            packed, ends = self.by_head(given["query"], heads + 2 * groups), [0, *accumulate((heads, groups, groups))]
            query, key, value = (self.part(packed, 1, *each) for each in pairwise(ends))
        past, bias, count = given.get("past_key", ""), given.get("bias", ""), self.size(query, 2)
        past = "" if (self.of(past).shape or ())[2:3] == (0,) else past
        total = self.axis(self.put("Cast", given["seqlens_k"], to=TensorProto.INT64), 1)
        total = self.put("Add", total, self.constant(1))
        before = self.put("Sub", total, count)
        # In the first call all tokens are given, padded on the right.
        longest = self.put("Cast", given["total"], to=TensorProto.INT64)
        prompt = self.put("Equal", longest, count)
        before = self.put("Where", prompt, self.constant(0), before)
        positions = key_positions = self.put("Add", before, self.places(count))
        if integer_of(self.node, "do_rotary", 0) == 1:
            at = given.get("positions", positions)
            if at != positions:  # of a prompt, the kernel reads the first one
                first = self.part(self.put("Reshape", at, self.constant([-1])), 0, 0, 1)
                at = self.put("Where", prompt, self.put("Add", first, self.places(count)), at)
            query, key = (self.turned(*each, at) for each in ((query, heads), (key, groups)))
        keys, values = self.cached(past, key), self.cached(past and given.get("past_value", ""), value)
        presents = [keys, values]
        if past:
            capacity, windows = self.size(past, 2), integer_of(self.node, "sliding_window_cache", 0)
            held, places = self.resident(before, capacity), self.places(capacity)
            filled = self.put("Add", self.put("Sub", before, held), places)
            filled = self.put("Where", self.put("Less", places, held), filled, self.constant(_UNSEEN_POSITION))
            key_positions = self.put("Concat", filled, positions, axis=1)
            if bias:  # by the positions of keys; arbitrary for places without a key
                known = self.put("Less", key_positions, self.size(bias, 3))
                columns = self.put("Where", known, key_positions, self.constant(0))
                bias = self.taken(bias, self.axis(columns, 1, 2), 3)
            # New entries follow the cached ones; a sliding cache evicts the oldest. The unused tail does not change.
            all_held = self.put("Add", held, count)
            gone = self.put("Sub", all_held, self.resident(total, capacity)) if windows else self.constant([0])
            index = self.put("Add", self.places(capacity if windows else self.put("Max", capacity, longest)), gone)
            last = self.put("Sub", self.size(keys, 2), self.constant(1))
            tail = self.put("Where", self.put("Less", index, capacity), index, last)
            new = self.put("Add", index, self.put("Sub", capacity, held))
            new = self.put("Where", self.put("Less", index, all_held), new, tail)
            index = self.put("Where", self.put("Less", index, held), index, new)
            presents = [self.taken(each, self.axis(index, 1, 3), 2) for each in presents]
        positions, key_positions = self.axis(positions, 1, 3), self.axis(key_positions, 1, 2)
        seen = self.put("Not", self.put("Greater", key_positions, positions))
        if (window := integer_of(self.node, "local_window_size", -1)) >= 0:
            outside = self.put("Sub", positions, self.constant(window))
            seen = self.put("And", seen, self.put("Greater", key_positions, outside))
        sink, smooth = given.get("sink", ""), integer_of(self.node, "smooth_softmax", 0)
        if sink or smooth == 1:
            sink = self.put("Reshape", sink or self.float(0.0), self.constant([1, -1, 1, 1]))
        made, _ = self.attended(query, keys, values, heads // groups, bias, seen, sink)
        self.outputs(self.joined(made), *presents)

    def resident(self, tokens: str, capacity: str) -> str:
        """The number of tokens in a cache after `tokens` in all; a sliding one evicts several at a time."""
        if not integer_of(self.node, "sliding_window_cache", 0):
            return self.put("Min", tokens, capacity)
        step = self.put("Sub", capacity, self.constant(integer_of(self.node, "local_window_size", -1) - 1))
        step = self.put("Max", step, self.constant(1))
        beyond = self.put("Max", self.put("Sub", tokens, capacity), self.constant(0))
        steps = self.put("Div", self.put("Sub", self.put("Add", beyond, step), self.constant(1)), step)
        return self.put("Sub", tokens, self.put("Mul", steps, step))

    def multi_head(self) -> None:
        """MultiHeadAttention, and Attention of ONNX: a mask selects the keys."""
        given, sides = self.given, list[str]()
        if any(integer_of(self.node, f"{side}_window_size", -1) >= 0 for side in ("left", "right")):
            raise self.lost("its queries see a window of keys")
        shapes = [self.of(given.get(name, "")).shape or () for name in _SIDES[:2]]
        counts = [shape[-2] for shape in shapes if 1 < len(shape) < _RANK_PACKED and isinstance(shape[-2], int)]
        causal = integer_of(self.node, "unidirectional" if self.node.domain else "is_causal", 0) == 1
        odd = self.node.domain or (counts[:1] == [1] and "past_key" in given)  # where onnxruntime's mask is not causal
        if causal and counts != sorted(counts, reverse=True) and odd:
            raise self.lost("it has more keys than queries, where onnxruntime's mask is not causal")
        ranks = [self.rank(given[name]) for name in _SIDES if name in given]
        for name, rank in zip(_SIDES, ranks, strict=False):
            held = self.width(given[name], 3) if rank == _RANK_PACKED else 0
            apart = [self.put("Gather", given[name], self.constant(place), axis=3) for place in range(min(held, 4))]
            sides += [self.put("Reshape", each, self.constant([0, 0, -1])) for each in apart] or [given[name]]
        if len(sides) != len(_SIDES):
            raise self.lost("its queries, keys or values are missing")
        if "offset" in given:
            width = self.size(sides[0], 2)
            ends = [self.constant([0]), width, self.put("Add", width, width), self.constant([_END])]
            parts = [self.put("Slice", given["offset"], *each, self.constant([0])) for each in pairwise(ends)]
            pairs = zip(sides, parts, strict=True)
            sides = [
                each if self.of(each).rank == _RANK_BY_HEAD else self.put("Add", each, part) for each, part in pairs
            ]
        counts = list[int]()
        for place, side in enumerate(sides):
            joined = self.of(side).rank != _RANK_BY_HEAD
            attribute = "num_heads" if self.node.domain else f"{'kv' if place else 'q'}_num_heads"
            counts.append(integer_of(self.node, attribute, 0) if joined else self.width(side, 1))
            sides[place] = self.by_head(side, counts[-1]) if joined else side
        pasts = [given.get(name, "") for name in ("past_key", "past_value")]
        made, presents, stages = self.masked(sides, counts[0] // max(counts[1], 1), pasts)
        stage = [] if self.node.domain else [stages[integer_of(self.node, "qk_matmul_output_mode", 0)]]
        self.outputs(made if ranks[0] == _RANK_BY_HEAD else self.joined(made), *presents, *stage)

    def packed(self) -> None:
        """Attention of onnxruntime: one matrix computes queries, keys and values."""
        given, heads, past = self.given, integer_of(self.node, "num_heads", 0), self.given.get("past", "")
        if any(integer_of(self.node, name, 0) for name in ("do_rotary", "past_present_share_buffer")):
            raise self.lost("it rotates queries, or its cache is over-allocated")
        sizes = integers_of(self.node, "qkv_hidden_sizes") or [self.width(given["weight"], 1) // 3] * 3
        made = self.put("MatMul", given["data"], given["weight"])
        made = self.put("Add", made, given["offset"]) if "offset" in given else made
        ends = [0, *accumulate(sizes)]
        sides = [self.by_head(self.part(made, 2, *each), heads) for each in pairwise(ends)]
        pasts = [self.put("Gather", past, self.constant(place), axis=0) if past else "" for place in (0, 1)]
        made, presents, _ = self.masked(sides, 1, pasts)
        both = [self.axis(each, 0) for each in presents if any(self.node.output[1:])]
        self.outputs(self.joined(made), *([self.put("Concat", *both, axis=0)] if both else []))

    def masked(self, sides: Sequence[str], shared: int, pasts: Sequence[str]) -> tuple[str, list[str], list[str]]:
        """z by head, with the keys that a mask selects; keys and values with the cache; and the stages of scores."""
        (query, *fresh), past = sides, pasts[0]
        keys, values = (self.cached(*each) for each in zip(pasts, fresh, strict=True))
        bias, kept, seen = self.given.get("bias", ""), self.given.get("seen", ""), ""
        filler = self.float(self.number("mask_filter_value", -10000.0) if kept else -np.inf)
        kind = self.of(bias).elem_type
        if kind not in (0, TensorProto.BOOL, self.kind):
            bias = self.put("Cast", bias, to=self.kind)
        if bias and not self.node.domain and self.opset >= _SHORT_MASKS:  # keys behind the mask are not seen
            shape = self.put("Shape", bias)
            missing = self.put("Sub", self.size(keys, 2), self.part(shape, 0, -1, _END))
            more = self.put("Concat", self.part(shape, 0, 0, -1), missing, axis=0)
            unseen = self.constant(False, kind) if kind == TensorProto.BOOL else self.float(-np.inf)
            bias = self.put("Concat", bias, self.put("Expand", unseen, more), axis=-1)
        if kind == TensorProto.BOOL:
            seen, bias = bias, ""
        if kept:
            rank = self.rank(kept)
            if rank not in (1, *_MISSING_MASK_AXES):
                raise self.lost("its mask has an axis of heads")
            kept = self.put("Cast", kept, to=TensorProto.INT64 if rank == 1 else TensorProto.BOOL)
            kept = self.within(kept, query, keys) if rank == 1 else self.axis(kept, *_MISSING_MASK_AXES[rank])
            mask = self.put("Where", kept, self.float(0.0), filler)
            bias = self.put("Add", mask, bias) if bias else mask
        count = self.axis(self.given["count"], 1, 2, 3) if "count" in self.given else ""  # of a cache's keys
        if count:
            filled = self.put("Less", self.places(self.size(keys, 2)), count)
            seen = self.put("And", seen, filled) if seen else filled
        if integer_of(self.node, "unidirectional" if self.node.domain else "is_causal", 0) == 1:
            places = self.axis(self.places(self.size(query, 2)), 1)
            before = self.put("Sub", count, self.size(query, 2)) if count else self.size(past, 2) if past else ""
            places = self.put("Add", places, before) if before else places
            earlier = self.put("Not", self.put("Greater", self.places(self.size(keys, 2)), places))
            seen = self.put("And", seen, earlier) if seen else earlier
        made, stages = self.attended(query, keys, values, shared, bias, seen)
        return made, [keys, values], stages

    def within(self, bounds: str, query: str, keys: str) -> str:
        """Whether keys are within bounds: by sequence where they end, perhaps followed by where they begin."""
        (count, *_), (rows, *_) = (self.of(name).shape or (None,) for name in (self.given["seen"], self.node.input[0]))
        if isinstance(count, int) and isinstance(rows, int) and count not in (rows, 2 * rows):
            raise self.lost("its mask holds cumulated lengths")
        zero, batch, places = self.constant([0]), self.size(query, 0), self.places(self.size(keys, 2))
        bounds = self.put("Concat", bounds, self.put("Expand", zero, batch), axis=0)
        pairs = pairwise([zero, batch, self.put("Add", batch, batch)])
        end, start = (self.axis(self.put("Slice", bounds, *each, zero), 1, 2, 3) for each in pairs)
        return self.put("And", self.put("Less", places, end), self.put("Not", self.put("Less", places, start)))

    def added(self) -> None:
        """SkipLayerNormalization and its variants: a sum, which may be an output too, and its norm."""
        node, operator = self.node, self.node.op_type.removeprefix("Skip")
        data, skip, scale, *further = node.input
        centred, (made, *statistics) = operator == "LayerNormalization", node.output[:3]
        if not centred and any(statistics[:1]):
            raise self.lost("how its mean is computed is not known")
        beta, bias = ([*further, "", ""] if centred else ["", *further, ""])[:2]
        total = node.output[3] if len(node.output) > 3 and node.output[3] else f"{node.output[0]}/sum"
        # Optimisers put the tensor that the bias belongs to first.
        self.put("Add", self.put("Add", data, bias, output=f"{total}/biased") if bias else data, skip, output=total)
        epsilon = self.number("epsilon", 1e-12)  # plain normalisations take 1e-5
        self.put(operator, total, scale, *filter(None, [beta]), output=made, axis=-1, epsilon=epsilon)
        self.nodes[-1].output.extend(statistics if centred else statistics[1:])

    def embedded(self) -> None:
        """EmbedLayerNormalization: the norm of a sum of embeddings, and the number of unmasked tokens."""
        tokens, kinds, table, places, table_of_kinds, *norm, mask, positions = [*self.node.input, *["", ""]][:9]
        total = self.put("Gather", table, tokens)
        total = self.put("Add", total, self.put("Gather", places, positions or self.places(self.size(tokens, 1))))
        total = self.put("Add", total, self.put("Gather", table_of_kinds, kinds)) if kinds else total
        made = self.put("LayerNormalization", total, *norm, axis=-1, epsilon=self.number("epsilon", 1e-12))
        none = self.put("Expand", self.constant(0, TensorProto.INT32), self.size(tokens, 0))
        self.outputs(made, self.along("ReduceSum", mask, [1], keepdims=0) if mask else none, total)

    def multiplied(self) -> None:
        """FusedMatMul: alpha A B, with A and B perhaps transposed, and perhaps an activation of it."""
        sides = []
        for side, tensor in zip("AB", self.node.input, strict=True):
            turned, moved = (integer_of(self.node, f"trans{name}{side}", 0) for name in ("", "Batch"))
            order = [*range(self.rank(tensor))] if turned or moved else []
            order = [*order[1:-1], order[0], order[-1]] if moved and len(order) > 1 else order
            order = [*order[:-2], *order[:-3:-1]] if turned else order
            sides.append(self.put("Transpose", tensor, perm=order) if order else tensor)
        made, alpha = self.put("MatMul", *sides), self.number("alpha", 1.0)
        made = made if alpha == 1.0 else self.put("Mul", made, self.float(alpha))
        if activation := b"".join(each.s for each in self.node.attribute if each.name == "activation").decode():
            made = self.put(activation, made, **activation_numbers(activation, attributes(self.node)))
        self.outputs(made)

    def rows(self) -> None:
        """GatherBlockQuantized: rows of a table of packed numbers, with scales for each block of a row."""
        packed, place, scales, zeros = [*self.node.input, ""][:4]
        axes = [integer_of(self.node, "gather_axis", 0), integer_of(self.node, "quantize_axis", 1)]
        blocks = [each for each in self.of(scales).shape or () if isinstance(each, int)]
        if axes != [0, 1] or len(blocks) != len(axes):
            raise self.lost("it does not take rows of a table with two axes")
        bits, kinds = integer_of(self.node, "bits", 4), [self.of(each).elem_type for each in (packed, scales, zeros)]
        if bits not in (4, 8) or kinds[0] != TensorProto.UINT8 or kinds[1] not in FLOATS:
            raise self.lost("its weight is not of 4 bits or 8 bits with a scale for each block")
        if zeros:
            zeros = self.unpacked(zeros, blocks, 8 if kinds[2] in FLOATS else bits, kinds[1])
        numbers = self.dequantised(packed, scales, zeros, bits, blocks, kinds[1])
        table = self.put("Reshape", numbers, self.constant([blocks[0], -1]), name="weight")
        self.outputs(self.put("Gather", table, place, axis=0))


DEFINITIONS: Mapping[tuple[str, str], Callable[[_Expansion], None]] = {
    (MICROSOFT, "GroupQueryAttention"): _Expansion.grouped,
    (MICROSOFT, "MultiHeadAttention"): _Expansion.multi_head,
    (MICROSOFT, "Attention"): _Expansion.packed,
    ("", "Attention"): _Expansion.multi_head,
    (MICROSOFT, "SkipLayerNormalization"): _Expansion.added,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _Expansion.added,
    (MICROSOFT, "EmbedLayerNormalization"): _Expansion.embedded,
    (MICROSOFT, "FusedMatMul"): _Expansion.multiplied,
    (MICROSOFT, "FusedMatMulActivation"): _Expansion.multiplied,
    (MICROSOFT, "TransposeMatMul"): _Expansion.multiplied,
    (MICROSOFT, "GatherBlockQuantized"): _Expansion.rows,
}

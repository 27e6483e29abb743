"""The attention sublayer of a block: its weights, its stream, and which keys its queries attend to (docs/forms.md).

**Weights** have the names and shapes of TransformerLens, [n_heads, d_model, d_head] (W_O: [n_heads, d_head, d_model]).
The stream has the model's columns, then indicators: one is 1 on tokens and 0 on bias tokens, so that b1 and the
constants of self keys and values ride on it; then one for each bias token. W1 and W2 are stored once: nodes with
constant inputs compute W_Q, W_V and W_O from them, and onnxruntime folds these when it loads the model. Projections
shared by all heads (keys, constant values) have one head.

**Positions** are one-hot columns behind these, with which W_QK replaces a mask. Bias token j has slot j, and tokens the
slots behind: the weights are static while the number of tokens is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.forms.builder import LARGEST_FLOAT32_QUERY, Builder, replacement
from passes.match.projections import Projection, Projections
from passes.programs.groups import Group, groups_of
from passes.programs.program import LARGEST_QUERY
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable

# Bytes of W_QK between positions from which on these are refused; form `whole` takes as many by default as keep the
# patterns of every block within it.
LARGEST_PATTERN = 2**26


@dataclass(frozen=True)
class StreamColumns:
    """Columns of the stream: those of the model, one that is 1 on tokens, and one for each bias token."""

    model: int
    bias_tokens: int

    @property
    def width(self) -> int:
        return self.model + 1 + self.bias_tokens

    def column(self, on_tokens: float, on_bias: Sequence[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """A functional of the indicator columns, [width]: a value on tokens, and one on each bias token."""
        made = np.zeros(self.width)
        made[self.model : self.model + 1 + len(on_bias)] = (on_tokens, *on_bias)
        return made


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """The weights of one block's heads; projections are by head, or [batch, tokens, heads, d_head] if `by_token`."""

    b: Builder
    layout: StreamColumns
    neurons: int
    elem_type: int
    by_token: bool = False

    def functional(self, projection: Projection, name: str) -> Tensor:
        """`x W + b` on tokens and 0 on bias tokens, as [neurons, width, 1]."""
        b, empty = self.b, self.layout.bias_tokens
        bias, zero = self.bias(projection, name), b.numbers(f"{name}_zero", 0.0)
        on_tokens: Tensor = zero if bias is None else b.reshape(bias, (-1, 1, 1), f"{name}_bias_column")
        # Rows: W for the model's columns, b for the one that is 1 on tokens, and 0 for those of the bias tokens.
        parts: list[Tensor] = [
            b.unsqueeze(self.matrix(projection, name), 2, f"{name}_columns"),
            b.node("Expand", [on_tokens, b.integers(self.neurons, 1, 1)], f"{name}_on_tokens"),
        ]
        if empty:
            parts.append(b.node("Expand", [zero, b.integers(self.neurons, empty, 1)], f"{name}_on_bias_tokens"))
        return b.concat(parts, 1, name)

    def query(self, functional: Tensor, dimension: int) -> Tensor:
        """W_Q: y, or (y, 1); bias tokens have 0."""
        if dimension == 1:
            return functional
        b, one = self.b, self.b.numbers("W_Q_one", self.layout.column(1.0, ())[None, :, None])
        second = b.node("Expand", [one, b.integers(self.neurons, self.layout.width, 1)], "W_Q_second")
        return b.concat([functional, second], 2, "W_Q")

    def key(self, group: Group, dimension: int, name: str) -> Tensor:
        """W_K [1, width, d_head], shared by all heads."""
        columns = [self.layout.column(*each) for each in group.logits(self.layout.bias_tokens)]
        return self.b.numbers(name, np.stack(columns[:dimension], axis=-1)[None])

    def constants(self, group: Group, name: str) -> Tensor | None:
        """The part of W_V shared by all heads, [1, width, 1]: d on tokens, v_j on bias tokens; None if it is 0."""
        head = group.head
        columns = self.layout.column(head.d, [token.value for token in head.bias_tokens])
        return self.b.numbers(name, columns[None, :, None]) if columns.any() or head.c == 0.0 else None

    def value(self, functional: Tensor, group: Group, name: str) -> Tensor:
        """W_V: z + d on tokens and v_j on bias tokens; [1, width, 1] for all heads if z does not occur."""
        constants = self.constants(group, name if group.head.c == 0.0 else f"{name}_constants")
        if constants is None:
            return functional
        return constants if group.head.c == 0.0 else self.b.node("Add", [functional, constants], name)

    def bias(self, projection: Projection, name: str) -> Tensor | None:
        """The sum of the biases of a projection, [neurons] or [1]; None without biases."""
        b, vectors = self.b, list[Tensor]()
        for place, vector in enumerate(projection.biases):
            wide = b.read(vector.name, self.elem_type, f"{name}_bias_{place}_wide")
            flat = b.reshape(wide, (-1,), f"{name}_bias_{place}")
            part = f"{name}_bias_{place}_part"
            vectors.append(flat if vector.stop is None else b.rows(flat, vector.start, vector.stop, 0, part))
        return b.total(vectors, f"{name}_biases") if vectors else None

    def map(self, stream: Tensor, weight: Tensor, name: str) -> Variable:
        """The stream [batch, tokens, width] by a weight [heads, width, d_head]: [batch, tokens, heads * d_head]."""
        b, turned = self.b, self.b.transpose(weight, (1, 0, 2), f"{name}_side_by_side")
        return b.node("MatMul", [stream, b.reshape(turned, (self.layout.width, -1), f"{name}_flat")], f"{name}_all")

    def project(self, stream: Tensor, weight: Tensor, heads: int, dimension: int, name: str) -> Variable:
        """The same as [batch, heads, tokens, d_head], or by token."""
        made, last = self.map(stream, weight, name), name if self.by_token else f"{name}_by_head"
        by_token = self.b.reshape(made, (0, 0, heads, dimension), last)
        return by_token if self.by_token else self.b.transpose(by_token, (0, 2, 1, 3), name)

    def matrix(self, projection: Projection, name: str, *, rows_are_heads: bool = False) -> Tensor:
        """The constant matrix with one row per head, [heads, the other side], in the arithmetic's type."""
        b = self.b
        matrix = b.read(projection.weight, self.elem_type, f"{name}_weight")
        if projection.stop is not None:
            axis = 0 if projection.transposed else 1
            matrix = b.rows(matrix, projection.start, projection.stop, axis, f"{name}_part")
        # The neurons are the columns of W1 and the rows of W2; `transposed` exchanges the two.
        if projection.transposed != rows_are_heads:
            return matrix
        return b.transpose(matrix, (1, 0), f"{name}_by_head")


def default_omega(groups: tuple[Group, ...], compute_type: int) -> float:
    """A power of two at which every forbidden weight is 0, for every pre-activation."""
    steepest, offset = (max(map(abs, each)) for each in zip(*(group.head.logits[0] for group in groups), strict=True))
    single = compute_type == onnx.TensorProto.FLOAT
    largest, underflow = (LARGEST_FLOAT32_QUERY, 256.0) if single else (LARGEST_QUERY, 1024.0)
    return float(2.0 ** ceil(log2(max(steepest * largest + offset, underflow))))


def as_batches(b: Builder, tensor: Tensor, rank: int) -> Tensor:
    """[..., tokens, width] as [batch, tokens, width]."""
    if rank < 4:
        return tensor if rank == 3 else b.unsqueeze(tensor, 0, "one_batch")
    last_two = b.sizes(tensor, rank - 2, rank, "last_two")
    return b.reshape(tensor, b.concat([b.integers(-1), last_two], 0, "batches_shape"), "batches")


def in_place(b: Builder, conversion: Conversion, tensor: Tensor, data: Tensor) -> Replacement:
    """[batch, tokens, width] in place of the second operator's result, in its shape and type."""
    projections = conversion.whole_block
    width = projections.output.out_features
    if projections.result_rank == 2:
        tensor = b.reshape(tensor, (-1, width), "one_below_the_other")
    elif projections.rank != 3:
        leading = b.sizes(data, 0, projections.rank - 1, "leading")
        tensor = b.reshape(tensor, b.concat([leading, b.integers(width)], 0, "result_shape"), "shaped", zeros=True)
    b.write(tensor, projections.result, conversion.block.elem_type)
    return replacement(b, conversion)


def with_indicator(
    b: Builder, tokens: Tensor, further: int = 0, name: str = "tokens"
) -> tuple[Variable, tuple[Tensor, Tensor]]:
    """The tokens [batch, N, width] with a column of ones and `further` columns of zeros; batch and N, 1-D."""
    sizes = b.sizes(tokens, 0, 1, "batch"), b.sizes(tokens, 1, 2, "token_count")
    one = b.numbers("token_indicator", np.eye(1, 1 + further)[None])
    shape = b.concat([*sizes, b.integers(1 + further)], 0, "indicators_shape")
    return b.concat([tokens, b.node("Expand", [one, shape], "indicators")], 2, name), sizes


def open_stream(
    b: Builder, conversion: Conversion, layout: StreamColumns, positions: Positions | None = None, hidden: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's input; as tokens, with their indicators (or `positions`) and m bias tokens; N as a 1-D tensor."""
    projections, m = conversion.whole_block, layout.bias_tokens
    data = b.read(projections.query.data, conversion.block.elem_type, "input")
    made, (batch, count) = with_indicator(b, as_batches(b, data, projections.rank), 0 if positions else m)
    each = b.concat([batch, b.integers(1, 1)], 0, "each_batch")
    if positions:
        own = b.node("Expand", [positions.of_tokens(count), each], "token_positions_each")
        # Too long a sequence fails at run time, in a node whose name says so.
        made = b.concat([made, own], 2, f"tokens/sequence_longer_than_max_tokens_{positions.tokens}")
        made = b.padded(made, 0, hidden, "tokens_wide") if hidden else made
    width = layout.model + 1 + (positions.slots if positions else m) + hidden
    rows = b.numbers("bias_token", np.eye(m, width, layout.model + 1)[None])
    return data, b.concat([made, b.node("Expand", [rows, each], "bias_tokens")], 1, "stream"), count


class Positions:
    """Position slots of one block's stream: one per bias token, then one per token."""

    def __init__(self, b: Builder, groups: tuple[Group, ...], max_tokens: int) -> None:
        self._b = b
        self._bias_tokens = max(group.bias_tokens for group in groups)
        self._omega = default_omega(groups, b.compute_type)
        self.tokens = max_tokens
        self.slots = self._bias_tokens + max_tokens
        self._all = b.constant("slots", np.arange(self.slots, dtype=np.int64))
        self._same = b.node("Equal", [b.reshape(self._all, (-1, 1), "slots_column"), self._all], "same_slot")

    def of_tokens(self, count: Tensor) -> Variable:
        """One-hot rows [N, slots] of N tokens; fewer rows where N exceeds the slots."""
        table = self._b.node("Cast", [self._same], "one_hot_slots", to=int(self._b.compute_type))
        own = self._b.rows(table, self._bias_tokens, self.slots, 0, "one_hot_positions")
        return self._b.rows(own, 0, count, 0, "token_positions")

    def scores(self, columns: Tensor, bias_tokens: int, name: str) -> Variable:
        """p_i W_QK p_j, [1, 1, rows, rows], of columns [batch, rows, slots]: attention to self and to bias tokens."""
        b, allowed = self._b, self._same
        if bias_tokens:
            is_bias = b.node("Less", [self._all, b.integers(bias_tokens)], f"{name}_is_bias")
            allowed = b.node("Or", [allowed, is_bias], f"{name}_allowed")
        omega = b.numbers(f"{name}_minus_omega", -self._omega)
        weight = b.node("Where", [allowed, b.numbers(f"{name}_zero", 0.0), omega], f"{name}_W_QK")
        rows = b.rows(columns, 0, 1, 0, f"{name}_rows")  # all sequences have the same
        queries = b.node("MatMul", [rows, weight], f"{name}_queries")
        keys = b.transpose(rows, (0, 2, 1), f"{name}_keys")
        return b.unsqueeze(b.node("MatMul", [queries, keys], f"{name}_pairs"), 1, name)


# [batch, heads, rows, rows] of one group, from query, key and a suffix for names
Pattern = Callable[[Group, Tensor, Tensor, str], Variable]
Values = Callable[[Group, str], Tensor]  # [batch, heads or 1, rows, 1], from a suffix for names


def under_mask(b: Builder, stream: Tensor, count: Tensor) -> Pattern:
    """A query attends to its own key and to the first bias tokens of its group, behind N tokens (Theorem 3)."""

    def pattern(group: Group, query: Tensor, key: Tensor, suffix: str) -> Variable:
        def node(operator: str, inputs: list[Tensor], name: str) -> Variable:
            return b.node(operator, inputs, f"{name}{suffix}")

        first, one = (b.constant(f"{name}{suffix}", np.asarray(i)) for name, i in (("first_row", 0), ("step", 1)))
        rows = node("Gather", [node("Shape", [stream], "stream_shape"), one], "row_count")
        positions = node("Range", [first, rows, one], "positions")
        before_bias = node("Less", [positions, count], "before_bias")
        end = node("Add", [count, b.integers(group.bias_tokens)], "end_bias")
        before_end = node("Less", [positions, end], "before_end")
        is_bias = node("And", [node("Not", [before_bias], "not_before"), before_end], "is_bias")
        own = b.reshape(positions, (-1, 1), f"own{suffix}")
        mask = node("Or", [node("Equal", [own, positions], "diagonal"), is_bias], "mask")
        return b.pattern(query, key, suffix, mask=mask)

    return pattern


def by_positions(b: Builder, positions: Positions, columns: Tensor) -> Pattern:
    """W_QK between positions selects the keys (Theorem 9).

    That part of the scores, from the positions' `columns` of the stream, is shared by all heads and computed once.
    """
    known: dict[int, Variable] = {}

    def pattern(group: Group, query: Tensor, key: Tensor, suffix: str) -> Variable:
        m = group.bias_tokens
        if m not in known:
            known[m] = positions.scores(columns, m, f"position_scores{suffix}")
        return b.pattern(query, key, suffix, added=known[m])

    return pattern


def attend(
    weights: HeadWeights, stream: Tensor, groups: tuple[Group, ...], query: Tensor, values: Values, pattern: Pattern
) -> Variable:
    """Queries [batch, heads, rows, d_head] attend to a stream [batch, rows, width]: [batch, heads, rows, 1]."""
    dimension = max(group.dimension for group in groups)
    terms: list[Variable] = []
    for number, group in enumerate(groups):
        suffix = f"_{number}" if len(groups) > 1 else ""
        key = weights.project(stream, weights.key(group, dimension, f"W_K{suffix}"), 1, dimension, f"k{suffix}")
        weighed = [pattern(group, query, key, suffix), values(group, suffix)]
        terms.append(weights.b.node("MatMul", weighed, f"z{suffix}"))
    return add_groups(weights.b, terms, groups)


def attend_block(
    b: Builder,
    conversion: Conversion,
    layout: StreamColumns,
    stream: Tensor,
    pattern: Pattern,
    data: Tensor,
    count: Tensor,
    *,
    bounded: bool = True,
) -> Replacement:
    """All heads on the columns [batch, rows, width] of a stream, whose rows of bias tokens are dropped after `count`.

    If not `bounded`, queries are not clipped.
    """
    projections, groups = conversion.whole_block, groups_of(conversion.program)
    neurons, dimension = projections.query.out_features, max(group.dimension for group in groups)
    weights = HeadWeights(b, layout, neurons, conversion.block.elem_type)
    constants = any(group.head.d or any(token.value for token in group.head.bias_tokens) for group in groups)
    y = weights.functional(projections.query, "W_Q" if dimension == 1 else "W_Q_first")
    z = weights.functional(projections.value, "W_V_first" if constants else "W_V") if projections.gated else y
    unbounded = weights.project(stream, weights.query(y, dimension), neurons, dimension, "q")
    b.expose("q", unbounded, (None, neurons, None, dimension))

    def values(group: Group, suffix: str) -> Tensor:
        weight = weights.value(z, group, f"W_V{suffix}")
        if weight is y and dimension == 1:
            return unbounded  # the query's projection, but not clipped: values beyond 2^60 must pass
        return weights.project(stream, weight, 1 if group.head.c == 0.0 else neurons, 1, f"v{suffix}")

    query = b.bounded(unbounded, "finite_q") if bounded else unbounded
    attended = attend(weights, stream, groups, query, values, pattern)
    written = b.rows(write_output(weights, attended, projections), 0, count, 1, "tokens_only")
    return in_place(b, conversion, written, data)


def attend_to_self(b: Builder, values: Tensor, width: int, d_head: int, scores: Tensor, name: str) -> Variable:
    """Theorem 7: ceil(width / d_head) heads that attend only to themselves, over which the values are split.

    `values` is [batch, rows, width]; `scores` of positions make the pattern of all heads the identity.
    """
    d_head = min(d_head, width)
    heads = ceil(width / d_head)
    missing = heads * d_head - width
    if missing:
        values = b.padded(values, 0, missing, f"{name}_padded")
    by_head = b.transpose(b.reshape(values, (0, 0, heads, d_head), f"{name}_split"), (0, 2, 1, 3), f"{name}_v")
    written = b.node("MatMul", [b.node("Softmax", [scores], f"pattern_{name}", axis=3), by_head], f"{name}_z")
    by_token = b.transpose(written, (0, 2, 1, 3), f"{name}_by_token")
    joined = b.reshape(by_token, (0, 0, heads * d_head), f"{name}_heads")
    return b.rows(joined, 0, width, 2, name) if missing else joined


def add_groups(b: Builder, terms: Sequence[Tensor], groups: tuple[Group, ...]) -> Tensor:
    """The sum of the groups' outputs, each times its factor; heads of all groups write along the same rows of W2."""
    scaled = list(terms)
    for number, factor in enumerate(group.factor for group in groups):
        if factor != 1.0:
            scaled[number] = b.node("Mul", [terms[number], b.numbers(f"factor_{number}", factor)], f"scaled_{number}")
    return b.total(scaled, "z_sum")


def write_output(weights: HeadWeights, attended: Tensor, projections: Projections) -> Variable:
    """W_O and b_O on [batch, heads, tokens, 1], or [batch, tokens, heads, 1] by token."""
    b, neurons, width = weights.b, projections.output.in_features, projections.output.out_features
    tokens = attended if weights.by_token else b.transpose(attended, (0, 2, 1, 3), "z_by_token")
    side_by_side = b.reshape(tokens, (0, 0, neurons), "z_side_by_side")
    b.expose("z", side_by_side, (None, None, neurons))
    w_o = b.unsqueeze(weights.matrix(projections.output, "W_O", rows_are_heads=True), 1, "W_O")
    flat = b.reshape(w_o, (neurons, width), "W_O_flat")
    written = b.node("MatMul", [side_by_side, flat], "attn_out")
    bias = weights.bias(projections.output, "b_O")
    return written if bias is None else b.node("Add", [written, bias], "attn_out_biased")

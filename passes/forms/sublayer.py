"""Attention sublayers that replace whole blocks: their stream, positions, weights, and steps; shared by the forms.

**Weights** have the names and shapes of TransformerLens, [n_heads, d_model, d_head] (W_O: [n_heads, d_head, d_model]).
The stream has `StreamColumns.width` columns: the model's own, then indicators. One is 1 on every token and 0 on bias
tokens; b1 and the constants of self keys and values ride on it. Bias token j has a column of its own. W1 and W2 are
stored once: nodes with constant inputs compute W_Q, W_V and W_O from them, and onnxruntime folds these when it loads
the model. Projections that are the same for all heads (keys, constant values) have one head.

**Positions** are one-hot columns; the weights between them replace a mask (Theorem 9).
The bias tokens have slots 0 to m - 1, and tokens the slots after them, so that the weights are static while the number
of tokens is not.

Positions contribute p_i W_QK p_j to a score. W_QK is -omega on forbidden pairs and 0 on allowed ones, so allowed scores
stay exact. (The post's code adds omega to the allowed pairs instead, which rounds y to the spacing of floats near
omega.) A forbidden score is self - omega, since all tokens have the same key, so its weight is at most exp(-omega)
times the largest. In floating point the weight is exactly 0

    if omega exceeds -log of the smallest positive number (104 in float32, 746 in float64),
    and if self - omega does not round back to something near self: omega is at least the largest |self|.

`default_omega` is a power of two above both for every finite pre-activation (queries are clipped to 2^60, in float64
2^500). A large omega costs no accuracy, since it is added to forbidden scores only.

**The stream** is that of the post: model columns, hidden columns, positions. A row-wise linear map (Theorem 7) and an
elementwise activation (Theorem 8) act on it; each returns what its heads write, and the skip connection is
`PostStream.plus`. A head reads only some of the columns: instead of storing zeros of W_Q, W_K and W_V, its product with
the stream is one with a Slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2

import numpy as np
import onnx

from passes.conversion import Conversion
from passes.forms.builder import Builder
from passes.match.projections import Projection, Projections, Vector
from passes.programs.groups import Group
from rewriter.graph.surgeon import Tensor, Variable

LARGEST_PATTERN = 2**26
"""Bytes of W_QK between positions above which a number of positions is refused; form `whole` takes as many by default
as keep the patterns of every block within it."""


@dataclass(frozen=True)
class StreamColumns:
    """Columns of the stream.

    Attributes:
        model: columns of the model's own residual stream.
        tokens: number of columns that are 1 on tokens: one, or one per position.
        bias_tokens: number of columns of the bias tokens.
        bias_first: whether the bias tokens' columns come before those of the tokens (position slot 0).
    """

    model: int
    bias_tokens: int
    tokens: int = 1
    bias_first: bool = False

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.model + self.tokens + self.bias_tokens

    def column(self, on_tokens: float, on_bias: list[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """A functional of the indicator columns, [width], with one value on tokens and one on each bias token."""
        # Bias tokens that only other groups attend to have the value 0.
        on_bias = [*on_bias, *[0.0] * (self.bias_tokens - len(on_bias))]
        parts = ([on_bias, [on_tokens] * self.tokens], [[on_tokens] * self.tokens, on_bias])[not self.bias_first]
        return np.asarray([*[0.0] * self.model, *parts[0], *parts[1]], dtype=np.float64)


class HeadWeights:
    """The weights of one block's heads; `neurons` is the number of heads.

    `by_token`: what they project is [batch, tokens, heads, d_head].
    """

    def __init__(
        self, builder: Builder, layout: StreamColumns, neurons: int, elem_type: int, *, by_token: bool = False
    ) -> None:
        self._by_token = by_token
        self._b = builder
        self._layout = layout
        self.neurons = neurons
        self._elem_type = elem_type

    def functional(self, projection: Projection, name: str) -> Tensor:
        """`x W + b` on tokens and 0 on bias tokens, as [neurons, width, 1]."""
        # Rows of the result: W for the model's columns, b for each column that is 1 on tokens (a token is 1 in exactly
        # one of them), and 0 for those of the bias tokens.
        b, layout = self._b, self._layout
        matrix = self._matrix(projection, name)
        parts: list[Tensor] = [b.unsqueeze(matrix, 2, f"{name}_columns")]
        bias = self.bias(projection, name)
        zero = b.numbers(f"{name}_zero", 0.0)
        on_tokens = zero if bias is None else b.reshape(bias, (-1, 1, 1), f"{name}_bias_column")
        on_tokens = b.node("Expand", [on_tokens, b.integers(self.neurons, layout.tokens, 1)], f"{name}_on_tokens")
        if layout.bias_tokens == 0:
            return b.concat([*parts, on_tokens], 1, name)
        empty = b.node("Expand", [zero, b.integers(self.neurons, layout.bias_tokens, 1)], f"{name}_on_bias_tokens")
        parts += [empty, on_tokens] if layout.bias_first else [on_tokens, empty]
        return b.concat(parts, 1, name)

    def query(self, functional: Tensor, dimension: int, on_bias: float = 1.0) -> Tensor:
        """W_Q: y, or (y, 1), with `on_bias` for the 1 in the rows of bias tokens."""
        if dimension == 1:
            return functional
        one = self._b.numbers("W_Q_one", self._layout.column(1.0, [on_bias] * self._layout.bias_tokens)[None, :, None])
        return self._with_column(functional, one, "W_Q")

    def key(self, group: Group, dimension: int, name: str, unused: float = 0.0) -> Tensor:
        """W_K [1, width, d_head], one for all heads: logits have the same coefficients for every neuron.

        The logit of bias tokens of other groups is the self logit plus `unused`.
        """
        columns = [self._layout.column(*each) for each in group.logits(self._layout.bias_tokens, unused)]
        return self._b.numbers(name, np.stack(columns[:dimension], axis=-1)[None])

    def value(self, functional: Tensor, group: Group, name: str) -> Tensor:
        """W_V: z + d on tokens and v_j on bias tokens; [1, width, 1], one for all heads, where z does not occur."""
        head = group.head
        constants = self._layout.column(head.d, [token.value for token in head.bias_tokens])[None, :, None]
        if head.c == 0.0:
            return self._b.numbers(name, constants)
        if not constants.any():
            return functional
        return self._b.node("Add", [functional, self._b.numbers(f"{name}_constants", constants)], name)

    def output(self, projection: Projection) -> Tensor:
        """W_O [neurons, 1, d_model]."""
        return self._b.unsqueeze(self._matrix(projection, "W_O", rows_are_heads=True), 1, "W_O")

    def bias(self, projection: Projection, name: str) -> Tensor | None:
        """The biases of a projection, added up, [neurons] or [1]; None where it has none."""
        vectors = [self._vector(vector, f"{name}_bias_{i}") for i, vector in enumerate(projection.biases)]
        if not vectors:
            return None
        total = vectors[0]
        for number, vector in enumerate(vectors[1:], start=1):
            total = self._b.node("Add", [total, vector], f"{name}_biases_{number}")
        return total

    def project(self, stream: Tensor, weight: Tensor, heads: int, dimension: int, name: str) -> Variable:
        """The stream [batch, tokens, width] by a weight [heads, width, d_head]: [batch, heads, tokens, d_head].

        This is one product for all heads, with their weights side by side.
        """
        b = self._b
        flat = b.reshape(
            b.transpose(weight, (1, 0, 2), f"{name}_side_by_side"), (self._layout.width, -1), f"{name}_flat"
        )
        made = b.node("MatMul", [stream, flat], f"{name}_all_heads")
        shape = (0, 0, heads, dimension)
        if self._by_token:
            return b.reshape(made, shape, name)
        return b.transpose(b.reshape(made, shape, f"{name}_by_head"), (0, 2, 1, 3), name)

    def _with_column(self, first: Tensor, second: Tensor, name: str) -> Variable:
        shape = self._b.integers(self.neurons, self._layout.width, 1)
        return self._b.concat([first, self._b.node("Expand", [second, shape], f"{name}_second")], 2, name)

    def _matrix(self, projection: Projection, name: str, *, rows_are_heads: bool = False) -> Tensor:
        """The constant matrix with one row per head, [heads, the other side], in the arithmetic's type."""
        b = self._b
        matrix = b.read(projection.weight, self._elem_type, f"{name}_weight")
        if projection.stop is not None:
            axis = 0 if projection.transposed else 1
            bounds = b.integers(projection.start), b.integers(projection.stop)
            matrix = b.rows(matrix, *bounds, axis, f"{name}_part")
        # The neurons are the columns of W1 and the rows of W2; `transposed` exchanges the two.
        if projection.transposed != rows_are_heads:
            return matrix
        return b.transpose(matrix, (1, 0), f"{name}_by_head")

    def _vector(self, vector: Vector, name: str) -> Tensor:
        b = self._b
        flat = b.reshape(b.read(vector.name, self._elem_type, f"{name}_wide"), (-1,), name)
        if vector.stop is None:
            return flat
        return b.rows(flat, b.integers(vector.start), b.integers(vector.stop), 0, f"{name}_part")


# -- positions ------------------------------------------------------------------------------------------------------

_QUERY_BITS: dict[int, int] = {onnx.TensorProto.FLOAT: 60, onnx.TensorProto.DOUBLE: 500}
_UNDERFLOW: dict[int, float] = {onnx.TensorProto.FLOAT: 256.0, onnx.TensorProto.DOUBLE: 1024.0}


def default_omega(groups: tuple[Group, ...], compute_type: int) -> float:
    """A power of two at which every forbidden weight is 0, whatever the pre-activation."""
    steepest = max(abs(group.head.beta) for group in groups)
    offset = max(abs(group.head.gamma) for group in groups)
    largest = steepest * 2.0 ** _QUERY_BITS[compute_type] + offset
    return float(2.0 ** ceil(log2(max(largest, _UNDERFLOW[compute_type]))))


class Positions:
    """Position columns of one block's stream.

    Attributes:
        bias_tokens: m.
        slots: one per bias token, then one per token.
    """

    def __init__(self, b: Builder, bias_tokens: int, max_tokens: int, omega: float) -> None:
        self._b = b
        self.bias_tokens = bias_tokens
        self._max_tokens = max_tokens
        self._omega = omega
        self.slots = bias_tokens + max_tokens
        self._all = b.fragment.constant("slots", np.arange(self.slots, dtype=np.int64))

    def layout(self, model: int) -> StreamColumns:
        """The layout of a stream with `model` columns and the positions."""
        return StreamColumns(model, self.bias_tokens, tokens=self._max_tokens, bias_first=True)

    def of_tokens(self, count: Tensor) -> Variable:
        """One-hot rows [1, N, slots] of N tokens; fewer rows than N where N exceeds the slots."""
        b = self._b
        own = b.rows(self._all, b.integers(self.bias_tokens), b.integers(self.slots), 0, "token_slots")
        pairs = b.node("Equal", [b.reshape(own, (-1, 1), "token_slots_column"), self._all], "one_hot_pairs")
        table = b.node("Cast", [pairs], "one_hot_positions", to=int(b.compute_type))
        taken = b.rows(table, b.integers(0), count, 0, "token_positions")
        return b.unsqueeze(taken, 0, "token_positions_rows")

    def of_bias_tokens(self) -> Tensor:
        """One-hot rows [1, m, slots]."""
        return self._b.numbers("bias_positions", np.eye(self.bias_tokens, self.slots)[None])

    def checked(self, tensors: list[Tensor], axis: int, name: str) -> Variable:
        """Concatenate with position columns; too long a sequence fails at run time in a node whose name says so."""
        limit = f"sequence_longer_than_max_tokens_{self._max_tokens}"
        return self._b.concat(tensors, axis, f"{name}/{limit}")

    def scores(self, positions: Tensor, name: str, *, bias_tokens: bool) -> Variable:
        """The scores p_i W_QK p_j, [1, 1, rows, rows], of positions [1, rows, slots].

        `bias_tokens` says whether every query may attend to the bias tokens; itself it always may.
        """
        b = self._b
        slots = self._all
        column = b.reshape(slots, (-1, 1), f"{name}_slots")
        allowed = b.node("Equal", [column, slots], f"{name}_same")
        if bias_tokens:
            is_bias = b.node("Less", [slots, b.integers(self.bias_tokens)], f"{name}_is_bias")
            allowed = b.node("Or", [allowed, is_bias], f"{name}_allowed")
        omega = b.numbers(f"{name}_minus_omega", -self._omega)
        weight = b.node("Where", [allowed, b.numbers(f"{name}_zero", 0.0), omega], f"{name}_W_QK")
        queries = b.node("MatMul", [positions, weight], f"{name}_queries")
        keys = b.transpose(positions, (0, 2, 1), f"{name}_keys")
        return b.unsqueeze(b.node("MatMul", [queries, keys], f"{name}_pairs"), 1, name)


# -- steps of a sublayer --------------------------------------------------------------------------------------------

Pattern = Callable[[Group, Tensor, Tensor, str], Variable]
"""The pattern of one group, from query, key and a suffix for names."""


def with_indicators(
    b: Builder, tokens: Tensor, layout: StreamColumns, sizes: tuple[Tensor, Tensor], name: str
) -> Variable:
    """The tokens with their indicator columns, [batch, N, width]; `sizes` are batch and N, 1-D."""
    one = np.zeros((1, 1, 1 + layout.bias_tokens))
    one[..., 0] = 1.0
    shape = b.concat([*sizes, b.integers(1 + layout.bias_tokens)], 0, "indicators_shape")
    indicators = b.node("Expand", [b.numbers("token_indicator", one), shape], "indicators")
    return b.concat([tokens, indicators], 2, name)


def as_batches(b: Builder, tensor: Tensor, rank: int) -> Tensor:
    """[..., tokens, width] as [batch, tokens, width]."""
    if rank == 3:
        return tensor
    if rank == 2:
        return b.unsqueeze(tensor, 0, "one_batch")
    last_two = b.sizes(tensor, rank - 2, rank, "last_two")
    return b.reshape(tensor, b.concat([b.integers(-1), last_two], 0, "batches_shape"), "batches")


def sequences_of(b: Builder, data: Tensor, conversion: Conversion, projections: Projections) -> Tensor:
    """The block's input as [batch, tokens, width], no sequence longer than the positions.

    Where the tokens of all sequences are one axis, nothing in the block says where a sequence ends. Heads of neurons
    attend to their own token and to bias tokens, so that any sequences give the same result: the rows are divided into
    the longest that leave no rest.
    """
    if not conversion.merged:
        return as_batches(b, data, projections.rank)
    rows = b.sizes(data, 0, 1, "row_count")
    lengths = b.fragment.constant("lengths", np.arange(1, conversion.options.positions + 1, dtype=np.int64))
    whole = b.node("Mul", [b.node("Div", [rows, lengths], "sequence_counts"), lengths], "rows_in_sequences")
    fits = b.node("Equal", [whole, rows], "length_fits")
    fitting = b.node("Where", [fits, lengths, b.integers(1)], "fitting_lengths")
    length = b.node("ReduceMax", [fitting], "sequence_length", keepdims=1)
    return b.reshape(
        data,
        b.concat([b.integers(-1), length, b.integers(projections.query.in_features)], 0, "by_sequence_shape"),
        "by_sequence",
    )


def as_before(b: Builder, tensor: Tensor, data: Tensor, projections: Projections) -> Tensor:
    """[batch, tokens, width] in the shape of the second operator's result."""
    width = projections.output.out_features
    if projections.result_rank == 2:
        return b.reshape(tensor, (-1, width), "one_below_the_other")
    if projections.rank == 3:
        return tensor
    leading = b.sizes(data, 0, projections.rank - 1, "leading")
    return b.reshape(tensor, b.concat([leading, b.integers(width)], 0, "result_shape"), "shaped")


def attend_block(
    b: Builder,
    weights: HeadWeights,
    stream: Tensor,
    projections: Projections,
    groups: tuple[Group, ...],
    pattern: Pattern,
    *,
    unused: float | None = None,
    bounded: bool = True,
) -> Variable:
    """All heads on the stream [batch, rows, width]: the sum of the groups, [batch, heads, rows, 1].

    The logit of bias tokens that a group does not attend to is the self logit plus `unused`; None where a mask hides
    them. If not `bounded`, queries are not clipped, and those of bias tokens are 0: only positions tell them what to
    attend to.
    """
    neurons = projections.query.out_features
    dimension = max(group.dimension for group in groups)
    if unused is not None and len({group.bias_tokens for group in groups}) > 1:
        dimension = 2  # the logits of unused bias tokens have an offset
    y = weights.functional(projections.query, "W_Q" if dimension == 1 else "W_Q_first")
    z = (
        weights.functional(projections.value, "W_V" if not _constants(groups) else "W_V_first")
        if projections.gated
        else y
    )
    own_query = weights.query(y, dimension, on_bias=1.0 if bounded else 0.0)
    unbounded = weights.project(stream, own_query, neurons, dimension, "q")
    b.expose("q", unbounded, (None, neurons, None, dimension))
    query = b.bounded(unbounded, "finite_q") if bounded else unbounded
    terms: list[Variable] = []
    for number, group in enumerate(groups):
        suffix = f"_{number}" if len(groups) > 1 else ""
        key_weight = weights.key(group, dimension, f"W_K{suffix}", unused or 0.0)
        key = weights.project(stream, key_weight, 1, dimension, f"k{suffix}")
        value_weight = weights.value(z, group, f"W_V{suffix}")
        if value_weight is y and dimension == 1:
            value = unbounded  # the query's projection, but not clipped: values beyond 2^60 must pass
        else:
            heads = 1 if group.head.c == 0.0 else neurons
            value = weights.project(stream, value_weight, heads, 1, f"v{suffix}")
        terms.append(b.node("MatMul", [pattern(group, query, key, suffix), value], f"z{suffix}"))
    return add_groups(b, terms, groups)


def _constants(groups: tuple[Group, ...]) -> bool:
    """Whether some W_V has constants beside the projection of the values."""
    return any(group.head.d or any(token.value for token in group.head.bias_tokens) for group in groups)


def add_groups(b: Builder, terms: Sequence[Tensor], groups: tuple[Group, ...]) -> Variable:
    """The sum of the groups' outputs, each times its factor; heads of all groups write along the same rows of W2."""
    scaled = [
        term
        if group.factor == 1.0
        else b.node("Mul", [term, b.numbers(f"factor_{number}", group.factor)], f"scaled_{number}")
        for number, (term, group) in enumerate(zip(terms, groups, strict=True))
    ]
    total = scaled[0]
    for number, term in enumerate(scaled[1:], start=1):
        total = b.node("Add", [total, term], f"z_sum_{number}")
    return total


def write_output(
    b: Builder, weights: HeadWeights, attended: Tensor, projections: Projections, *, by_token: bool = False
) -> Variable:
    """W_O on [batch, heads, tokens, 1] ([batch, tokens, heads, 1] if `by_token`): [batch, tokens, d_model]."""
    neurons, width = projections.output.in_features, projections.output.out_features
    tokens = attended if by_token else b.transpose(attended, (0, 2, 1, 3), "z_by_token")
    side_by_side = b.reshape(tokens, (0, 0, neurons), "z_side_by_side")
    b.expose("z", side_by_side, (None, None, neurons))
    flat = b.reshape(weights.output(projections.output), (neurons, width), "W_O_flat")
    written = b.node("MatMul", [side_by_side, flat], "attn_out")
    bias = weights.bias(projections.output, "b_O")
    return written if bias is None else b.node("Add", [written, bias], "attn_out_biased")


# -- the stream of the post -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PostStream:
    """A residual stream [batch, N + m, model + hidden + slots].

    Attributes:
        tensor: the stream.
        model: columns of the model's own stream.
        hidden: hidden columns.
        positions: the position columns, which come last.
        count: N, a 1-D tensor.
        stage: the number of sublayers that have written to it, for names.
    """

    tensor: Tensor
    model: int
    hidden: int
    positions: Positions
    count: Tensor
    stage: int = 0

    def columns(self, b: Builder, start: int, stop: int, name: str) -> Variable:
        """Some of the columns."""
        return b.rows(self.tensor, b.integers(start), b.integers(stop), 2, name)

    def ones(self, b: Builder, name: str) -> Variable:
        """The position columns."""
        start = self.model + self.hidden
        return self.columns(b, start, start + self.positions.slots, name)

    def plus(self, b: Builder, written: Tensor, start: int, width: int) -> PostStream:
        """The skip connection: the stream plus the heads' output in the `width` columns from `start`."""
        after = self.model + self.hidden + self.positions.slots - start - width
        shape = b.sizes(written, 0, 2, f"rows_{self.stage}")
        parts: list[Tensor] = [written]
        if start:
            parts.insert(0, self._zeros(b, shape, start, "left"))
        parts.append(self._zeros(b, shape, after, "right"))
        placed = b.concat(parts, 2, f"attn_out_{self.stage + 1}")
        stage = self.stage + 1
        return replace(self, tensor=b.node("Add", [self.tensor, placed], f"stream_{stage}"), stage=stage)

    def _zeros(self, b: Builder, rows: Tensor, width: int, name: str) -> Variable:
        name = f"zeros_{name}_{self.stage}"
        return b.node(
            "Expand", [b.numbers(f"{name}_0", 0.0), b.concat([rows, b.integers(width)], 0, f"{name}_shape")], name
        )


def open_stream(
    b: Builder, tokens: Tensor, model: int, hidden: int, positions: Positions, name: str = "stream_0"
) -> PostStream:
    """The stream before the first sublayer: tokens [batch, N, model], hidden columns 0, and m bias tokens."""
    batch, count = b.sizes(tokens, 0, 1, "batch"), b.sizes(tokens, 1, 2, "token_count")
    each = b.concat([batch, b.integers(1, 1)], 0, "each_batch")
    own = b.node("Expand", [positions.of_tokens(count), each], "token_positions_each")
    parts: list[Tensor] = [tokens, own]
    if hidden:
        zero = b.numbers("empty", 0.0)
        shape = b.concat([batch, count, b.integers(hidden)], 0, "hidden_shape")
        parts.insert(1, b.node("Expand", [zero, shape], "hidden_empty"))
    with_own = positions.checked(parts, 2, "tokens")
    shape = b.concat([batch, b.integers(positions.bias_tokens, model + hidden)], 0, "bias_tokens_shape")
    empty = b.node("Expand", [b.numbers("empty", 0.0), shape], "bias_tokens_empty")
    bias_positions = b.node("Expand", [positions.of_bias_tokens(), each], "bias_positions_each")
    bias_tokens = b.concat([empty, bias_positions], 2, "bias_tokens")
    return PostStream(b.concat([with_own, bias_tokens], 1, name), model, hidden, positions, count)


def position_scores(b: Builder, stream: PostStream, name: str, *, bias_tokens: bool) -> Variable:
    """The scores of the positions, [1, 1, rows, rows]."""
    one_batch = b.rows(stream.ones(b, f"{name}_positions"), b.integers(0), b.integers(1), 0, f"{name}_rows")
    return stream.positions.scores(one_batch, name, bias_tokens=bias_tokens)


def attend_to_self(b: Builder, values: Tensor, width: int, d_head: int, scores: Tensor, name: str) -> Variable:
    """Theorem 7: ceil(width / d_head) heads that attend only to themselves, over which the values are split.

    `values` is [batch, rows, width]. W_Q and W_K are zero except on positions, so the pattern is the identity and each
    head writes its values.
    """
    d_head = min(d_head, width)
    heads = ceil(width / d_head)
    zero = b.numbers(f"{name}_zero", 0.0)
    missing = heads * d_head - width
    if missing:
        padding = b.node(
            "Expand",
            [zero, b.concat([b.sizes(values, 0, 2, f"{name}_rows"), b.integers(missing)], 0, f"{name}_missing")],
            f"{name}_padding",
        )
        values = b.concat([values, padding], 2, f"{name}_padded")
    by_head = b.transpose(b.reshape(values, (0, 0, heads, d_head), f"{name}_split"), (0, 2, 1, 3), f"{name}_v")
    batch, tokens = b.sizes(values, 0, 1, f"{name}_batch"), b.sizes(values, 1, 2, f"{name}_tokens")
    sizes = [
        b.concat([batch, b.integers(n), tokens, b.integers(1)], 0, f"{name}_shape_{n}")
        for n in dict.fromkeys((heads, 1))
    ]
    query, key = b.node("Expand", [zero, sizes[0]], f"{name}_q"), b.node("Expand", [zero, sizes[-1]], f"{name}_k")
    written = b.node("MatMul", [b.pattern(query, key, f"_{name}", added=scores), by_head], f"{name}_z")
    joined = b.reshape(b.transpose(written, (0, 2, 1, 3), f"{name}_by_token"), (0, 0, heads * d_head), f"{name}_heads")
    return b.rows(joined, b.integers(0), b.integers(width), 2, name) if missing else joined


def attend_with_activation(
    b: Builder,
    queries: Tensor,
    values: Tensor,
    ones: Tensor,
    scores: Tensor,
    groups: tuple[Group, ...],
    positions: Positions,
    omega: float,
) -> Variable:
    """Theorem 8: one head per column and group.

    `queries` and `values` are columns of the stream, [batch, rows, width], and `ones` its position columns.
    """
    layout = positions.layout(0)
    dimension = max(group.dimension for group in groups)
    if len({group.bias_tokens for group in groups}) > 1:
        dimension = 2
    y = b.bounded(by_head(b, queries, "q"), "finite_q")
    z = by_head(b, values, "v")
    query: Tensor = y
    if dimension == 2:
        one = b.node("Expand", [b.numbers("q_one", 1.0), b.node("Shape", [y], "q_shape")], "q_ones")
        query = b.concat([y, one], 3, "q_pair")
    terms: list[Variable] = []
    for number, group in enumerate(groups):
        suffix = f"_{number}" if len(groups) > 1 else ""
        head = group.head
        columns = [layout.column(*each) for each in group.logits(layout.bias_tokens, -omega)]
        weight = b.numbers(f"W_K{suffix}", np.stack(columns[:dimension], axis=-1))
        key = b.unsqueeze(b.node("MatMul", [ones, weight], f"k{suffix}_all"), 1, f"k{suffix}")
        constants = layout.column(head.d, [token.value for token in head.bias_tokens])[:, None]
        value: Tensor = z
        if constants.any() or head.c == 0.0:
            weight = b.numbers(f"W_V{suffix}_constants", constants)
            fixed = b.unsqueeze(b.node("MatMul", [ones, weight], f"v{suffix}_all"), 1, f"v{suffix}_constants")
            value = fixed if head.c == 0.0 else b.node("Add", [z, fixed], f"v{suffix}_value")
        terms.append(b.node("MatMul", [b.pattern(query, key, suffix, added=scores), value], f"z{suffix}"))
    total = b.transpose(add_groups(b, terms, groups), (0, 2, 1, 3), "z_by_token")
    return b.reshape(total, b.node("Shape", [queries], "z_shape"), "z_written")


def by_head(b: Builder, columns: Tensor, name: str) -> Variable:
    """[batch, rows, width] as [batch, width, rows, 1], one head per column."""
    return b.unsqueeze(b.transpose(columns, (0, 2, 1), f"{name}_columns"), 3, name)

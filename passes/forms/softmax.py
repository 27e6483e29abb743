"""Forms `compact`, `masked`, `maskless`, `staged` and `whole`: attention sublayers whose heads have a softmax.

docs/forms.md describes each, with the names and shapes of its tensors. The linear operators must be plain matrices,
except in `compact`. All of `compact` is float32 in models of that type or narrower, with logits less an affine function
of y (`Head.conditioned`), but programs marked `double` are float64 up to z.

The stream has the model's columns, then indicators: one is 1 on tokens and 0 on bias tokens, so that b1 and the
constants of self keys and values ride on it; then one for each bias token. W1 and W2 are stored once: nodes with
constant inputs compute W_Q, W_V and W_O from them, and onnxruntime folds these when it loads the model. Projections
shared by all heads (keys, constant values) have one head. One-hot positions are columns behind these: bias token j has
slot j, and tokens the slots behind, so that the weights are static while the number of tokens is not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import onnx

from passes.conversion import ALLOWZERO_OPSET, LARGEST_FLOAT32_QUERY, SMALLEST_OPSET, Builder, Conversion, replacement
from passes.match.projections import Projection, ProjectionReader, Projections
from passes.options import WHOLE
from passes.programs.program import LARGEST_QUERY, Array, Group, Head, Program, groups_of, spread_error, spreads
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable
from rewriter.graph.view import GraphView, LostError

LARGEST_PATTERN = 2**26  # bytes of W_QK between positions; in form `whole`, by default also of a block's patterns


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """The weights of one block's heads; projections are by head, or [batch, tokens, heads, d_head] if `by_token`."""

    b: Builder
    model: int  # columns of the stream; then one that is 1 on tokens, and one for each bias token
    bias_tokens: int
    neurons: int
    elem_type: int
    by_token: bool = False

    @property
    def width(self) -> int:
        return self.model + 1 + self.bias_tokens

    def column(self, on_tokens: float, on_bias: Sequence[float]) -> Array:
        """A functional of the indicator columns, [width]: a value on tokens, and one on each bias token."""
        made = np.zeros(self.width)
        made[self.model : self.model + 1 + len(on_bias)] = (on_tokens, *on_bias)
        return made

    def functional(self, projection: Projection, name: str) -> Tensor:
        """`x W + b` on tokens and 0 on bias tokens, as [neurons, width, 1]."""
        b, empty = self.b, self.bias_tokens
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

    def key(self, group: Group, dimension: int, name: str) -> Tensor:
        """W_K [1, width, d_head], shared by all heads."""
        others = self.bias_tokens - group.bias_tokens  # of larger groups; they get the logit of self
        slopes_and_offsets = zip(*group.head.logits, strict=True)
        columns = [self.column(own, [*tokens, *[own] * others]) for own, *tokens in slopes_and_offsets]
        return self.b.numbers(name, np.stack(columns[:dimension], axis=-1)[None])

    def constants(self, group: Group, name: str) -> Tensor | None:
        """The part of W_V shared by all heads, [1, width, 1]: d on tokens, v_j on bias tokens; None if it is 0."""
        head = group.head
        columns = self.column(head.d, head.constants[1:])
        return self.b.numbers(name, columns[None, :, None]) if columns.any() or head.c == 0.0 else None

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
        return b.node("MatMul", [stream, b.reshape(turned, (self.width, -1), f"{name}_flat")], f"{name}_all")

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
        by_head = projection.transposed != rows_are_heads
        return matrix if by_head else b.transpose(matrix, (1, 0), f"{name}_by_head")


def default_omega(groups: tuple[Group, ...], compute_type: int) -> float:
    """A power of two at which every forbidden weight is 0, for every pre-activation."""
    steepest, offset = (max(map(abs, each)) for each in zip(*(group.head.logits[0] for group in groups), strict=True))
    single = compute_type == onnx.TensorProto.FLOAT
    largest, underflow = (LARGEST_FLOAT32_QUERY, 256.0) if single else (LARGEST_QUERY, 1024.0)
    if any(abs(offset) > underflow for group in groups for _, offset in group.head.logits):
        underflow = largest  # to be distinguished from the offsets of steep keys
    least: int = max(int(steepest * largest) + ceil(offset), int(underflow))
    return 2.0 ** (least - 1).bit_length()


def as_batches(b: Builder, data: Tensor, rank: int, *, alone: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """[..., tokens, width] as [batch, N, width], all tokens on one axis as one batch, or each `alone`; batch and N."""
    if rank == 2 and not alone:  # the proof follows sizes of what the original has, too, to every size
        return b.unsqueeze(data, 0, "one_batch"), b.integers(1), b.sizes(data, 0, 1, "token_count")
    if rank > 3:
        last_two = b.sizes(data, rank - 2, rank, "last_two")
        tokens = b.reshape(data, b.concat([b.integers(-1), last_two], 0, "batches_shape"), "batches")
    else:  # neurons attend to the token itself and to bias tokens only
        tokens = b.unsqueeze(data, 1, "each_alone") if rank == 2 else data
    return tokens, b.sizes(tokens, 0, 1, "batch"), b.sizes(tokens, 1, 2, "token_count")


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


def with_indicator(b: Builder, tokens: Tensor, sizes: list[Tensor], further: int = 0, name: str = "tokens") -> Tensor:
    """The tokens [batch, N, width] with a column of ones and `further` columns of zeros; `sizes` are batch and N."""
    one = b.numbers("token_indicator", np.eye(1, 1 + further)[None])
    shape = b.concat([*sizes, b.integers(1 + further)], 0, "indicators_shape")
    return b.concat([tokens, b.node("Expand", [one, shape], "indicators")], 2, name)


def open_stream(
    weights: HeadWeights, conversion: Conversion, positions: "Positions | None" = None, hidden: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's input; as tokens, with their indicators (or `positions`) and m bias tokens; N as a 1-D tensor."""
    b, projections, m = weights.b, conversion.whole_block, weights.bias_tokens
    data = b.read(projections.query.data, weights.elem_type, "input")
    tokens, batch, count = as_batches(b, data, projections.rank, alone=conversion.carried > 0)
    made = with_indicator(b, tokens, [batch, count], 0 if positions else m)
    each = b.concat([batch, b.integers(1, 1)], 0, "each_batch")
    if positions:
        own = b.node("Expand", [positions.of_tokens(count), each], "token_positions_each")
        # A sequence that is too long fails at run time, in a node whose name states the limit.
        made = b.concat([made, own], 2, f"tokens/sequence_longer_than_max_tokens_{positions.tokens}")
        made = b.padded(made, 0, hidden, "tokens_wide") if hidden else made
    width = weights.model + 1 + (positions.slots if positions else m) + hidden
    rows = b.numbers("bias_token", np.eye(m, width, weights.model + 1)[None])
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
        unmasked = b.scores(query, key, suffix, "unmasked_")
        return b.pattern(node("Where", [mask, unmasked, b.numbers("forbidden", -np.inf)], "scores"), suffix)

    return pattern


def by_positions(b: Builder, positions: Positions, columns: Tensor) -> Pattern:
    """W_QK between positions, `columns` of the stream, selects the keys (Theorem 9), computed once for all heads."""
    known: dict[int, Variable] = {}

    def pattern(group: Group, query: Tensor, key: Tensor, suffix: str) -> Variable:
        m = group.bias_tokens
        if m not in known:
            known[m] = positions.scores(columns, m, f"position_scores{suffix}")
        return b.pattern(b.add(b.scores(query, key, suffix, "own_"), known[m], f"scores{suffix}"), suffix)

    return pattern


def attend(
    weights: HeadWeights, stream: Tensor, groups: tuple[Group, ...], query: Tensor, values: Values, pattern: Pattern
) -> Tensor:
    """Queries [batch, heads, rows, d_head] attend to a stream [batch, rows, width]: [batch, heads, rows, 1]."""
    dimension, terms = max(group.dimension for group in groups), list[Tensor]()
    for number, group in enumerate(groups):
        suffix = f"_{number}" if len(groups) > 1 else ""
        key = weights.project(stream, weights.key(group, dimension, f"W_K{suffix}"), 1, dimension, f"k{suffix}")
        weighed = [pattern(group, query, key, suffix), values(group, suffix)]
        terms.append(weights.b.node("MatMul", weighed, f"z{suffix}"))
    return add_groups(weights.b, terms, groups)


def attend_block(
    weights: HeadWeights, conversion: Conversion, stream: Tensor, pattern: Pattern, count: Tensor
) -> Variable:
    """The output of all heads on a stream [batch, rows, width], without the rows of bias tokens after `count`."""
    projections, groups = conversion.whole_block, groups_of(conversion.program)
    b, neurons, dimension = weights.b, weights.neurons, max(group.dimension for group in groups)
    constants = any(any(group.head.constants) for group in groups)
    y = weights.functional(projections.query, "W_Q" if dimension == 1 else "W_Q_first")
    z = weights.functional(projections.value, "W_V_first" if constants else "W_V") if projections.gated else y
    w_q = y  # (y, 1) where logits have offsets; bias tokens have 0
    if dimension > 1:
        one = b.numbers("W_Q_one", weights.column(1.0, ())[None, :, None])
        w_q = b.concat([y, b.node("Expand", [one, b.integers(neurons, weights.width, 1)], "W_Q_second")], 2, "W_Q")
    unbounded = weights.project(stream, w_q, neurons, dimension, "q")
    b.expose("q", unbounded, (None, neurons, None, dimension))

    def values(group: Group, suffix: str) -> Tensor:
        name, shared = f"W_V{suffix}", group.head.c == 0.0  # without z, W_V is [1, width, 1]
        fixed = weights.constants(group, name if shared else f"{name}_constants")
        if fixed is None and z is y and dimension == 1:
            return unbounded  # the query's projection, but not clipped: values beyond 2^60 must pass
        weight = z if fixed is None else fixed if shared else b.add(z, fixed, name)
        return weights.project(stream, weight, 1 if shared else neurons, 1, f"v{suffix}")

    query = unbounded if conversion.form == WHOLE else b.bounded(unbounded, "finite_q")
    attended = attend(weights, stream, groups, query, values, pattern)
    return b.rows(write_output(weights, attended, projections), 0, count, 1, "tokens_only")


def attend_to_self(b: Builder, values: Tensor, width: int, d_head: int, scores: Tensor, name: str) -> Variable:
    """Theorem 7: ceil(width / d_head) heads that attend only to themselves, over which the values are split.

    `values` is [batch, rows, width]; `scores` of positions make the pattern of all heads the identity.
    """
    d_head = min(d_head, width)
    heads = ceil(width / d_head)
    if missing := heads * d_head - width:
        values = b.padded(values, 0, missing, f"{name}_padded")
    by_head = b.transpose(b.reshape(values, (0, 0, heads, d_head), f"{name}_split"), (0, 2, 1, 3), f"{name}_v")
    written = b.node("MatMul", [b.node("Softmax", [scores], f"pattern_{name}", axis=3), by_head], f"{name}_z")
    joined = b.reshape(b.transpose(written, (0, 2, 1, 3), f"{name}_by_token"), (0, 0, heads * d_head), f"{name}_heads")
    return b.rows(joined, 0, width, 2, name) if missing else joined


def add_groups(b: Builder, terms: Sequence[Tensor], groups: tuple[Group, ...]) -> Tensor:
    """The sum of the groups' outputs, each times its factor; heads of all groups write along the same rows of W2."""
    pairs = enumerate(zip(terms, (group.factor for group in groups), strict=True))
    scaled = (t if f == 1.0 else b.mul(t, b.numbers(f"factor_{n}", f), f"scaled_{n}") for n, (t, f) in pairs)
    return b.total([*scaled], "z_sum")


def write_output(weights: HeadWeights, attended: Tensor, projections: Projections) -> Variable:
    """W_O and b_O on [batch, heads, tokens, 1], or [batch, tokens, heads, 1] by token."""
    b, neurons, width = weights.b, projections.output.in_features, projections.output.out_features
    tokens = attended if weights.by_token else b.transpose(attended, (0, 2, 1, 3), "z_by_token")
    side_by_side = b.reshape(tokens, (0, 0, neurons), "z_side_by_side")
    b.expose("z", side_by_side, (None, None, neurons))
    w_o = b.unsqueeze(weights.matrix(projections.output, "W_O", rows_are_heads=True), 1, "W_O")
    written = b.node("MatMul", [side_by_side, b.reshape(w_o, (neurons, width), "W_O_flat")], "attn_out")
    bias = weights.bias(projections.output, "b_O")
    return written if bias is None else b.add(written, bias, "attn_out_biased")


# -- forms with a row for each bias token ------------------------------------------------------------------------------

PREFIX = "bias_token"  # of the tensors that a network has in form `whole`
POSITION_ROWS = f"{PREFIX}/token_columns"  # constant [1, T, 1 + R + T]: a token's columns beside the model's
BIAS_ROWS = f"{PREFIX}/bias_token_rows"  # constant [1, R, 1 + R + T]: the same columns of bias tokens


def neuron_scores(bias_tokens: int) -> str:
    """Constant [R + T, R + T]: W_QK between positions of the heads that attend to so many bias tokens."""
    return f"{PREFIX}/W_QK_neurons_{bias_tokens}"


def with_projections(view: GraphView, conversion: Conversion) -> Conversion:
    """The projections as plain matrices; by reference where they are not. Raises LostError if the opset is too old."""
    if (opset := view.opsets.get("", 1)) < SMALLEST_OPSET:
        what = f"form {conversion.form} needs opset {SMALLEST_OPSET}, and the model has {opset}"
        raise LostError(f"{what}; convert the model to a newer opset first, or use form local", conversion.block.output)
    try:
        return replace(conversion, projections=ProjectionReader(view).read(conversion.block))
    except LostError as lost:
        return replace(conversion, by_reference=lost.miss.reason)


def prepare_rows(view: GraphView, conversion: Conversion) -> Conversion:
    """The projections as plain matrices. Raises LostError where they are not, or positions do not fit into W_QK."""
    prepared, output = with_projections(view, conversion), conversion.block.output
    if prepared.projections is None:
        reason = f"form {conversion.form} replaces whole blocks, and {prepared.by_reference}; use form compact or local"
        raise LostError(reason, output)
    if conversion.form == "masked":
        return prepared
    shape = view.type_of(prepared.projections.query.data).shape or ()
    fixed = next((tokens for tokens in shape[-2:-1] if isinstance(tokens, int)), 0)
    limit = prepared.options.max_tokens or fixed or prepared.options.positions
    if fixed > limit:
        raise LostError(f"its sequences have {fixed} tokens; raise --max-tokens from {limit} to {fixed}", output)
    slots = limit + prepared.program.bias_tokens
    if (size := slots * slots * np.dtype(prepared.dtype).itemsize) > LARGEST_PATTERN:
        most = f"more than {LARGEST_PATTERN >> 20} MB; lower --max-tokens"
        raise LostError(f"W_QK of {slots} positions takes {size / 2**20:.0f} MB, {most}", output)
    return replace(prepared, options=replace(prepared.options, max_tokens=limit), fixed=fixed > 0)


def activation(conversion: Conversion) -> tuple[Program, bool]:
    """The program of the second sublayer of `staged`, and whether in place: f(y) - z where that loses no digits."""
    minus = replace(conversion.program, linear=conversion.program.linear - 1.0)
    in_place = spreads(minus) and spread_error(minus, conversion.dtype) == 0.0
    return (minus if in_place else conversion.program), in_place


def emit_rows(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion in form `masked` or `maskless`; reads no weights."""
    b, groups, query = Builder.of(view, conversion), groups_of(conversion.program), conversion.whole_block.query
    model, m = query.in_features, max(group.bias_tokens for group in groups)
    weights = HeadWeights(b, model, m, query.out_features, conversion.block.elem_type)
    slots = None if conversion.form == "masked" else Positions(b, groups, conversion.options.positions)
    data, stream, count = open_stream(weights, conversion, slots)
    if slots is None:
        read, pattern = stream, under_mask(b, stream, count)
    else:
        read = b.rows(stream, 0, weights.width, 2, "stream_columns")
        pattern = by_positions(b, slots, b.rows(stream, model + 1, model + 1 + slots.slots, 2, "positions"))
    return in_place(b, conversion, attend_block(weights, conversion, read, pattern, count), data)


def emit_whole(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one block on the network's columns and rows; reads no weights."""
    b, projections, elem_type = Builder.of(view, conversion), conversion.whole_block, conversion.type_of_positions
    model, neurons = projections.query.in_features, projections.query.out_features
    weights = HeadWeights(b, model, conversion.carried, neurons, conversion.block.elem_type)
    data = b.read(projections.query.data, conversion.block.elem_type, "input")
    tokens, batch, count = as_batches(b, data, projections.rank, alone=True)
    each = b.concat([batch, b.integers(1, 1)], 0, "each_batch")
    own = b.rows(b.read(POSITION_ROWS, elem_type, "token_columns"), 0, count, 1, "own_columns")
    wide = [tokens, b.node("Expand", [own, each], "own_columns_each")]
    bias = b.padded(b.read(BIAS_ROWS, elem_type, "bias_token_rows"), model, 0, "bias_tokens")
    limit = f"sequence_longer_than_max_tokens_{conversion.options.positions}"
    rows = [b.concat(wide, 2, f"tokens/{limit}"), b.node("Expand", [bias, each], "bias_tokens_each")]
    stream = b.concat(rows, 1, "stream")
    read = b.rows(stream, 0, weights.width, 2, "stream_columns")
    positions = b.rows(stream, model + 1, 2**31, 2, "positions")
    keys = b.unsqueeze(positions, 1, "k_positions")

    def pattern(group: Group, query: Tensor, key: Tensor, suffix: str) -> Variable:
        weight = b.read(neuron_scores(group.bias_tokens), elem_type, f"W_QK_positions{suffix}")
        alone = b.node("MatMul", [positions, weight], f"q_positions{suffix}")
        alone = b.unsqueeze(alone, 1, f"q_positions_one{suffix}")
        for_all = b.node("Expand", [alone, b.integers(1, neurons, 1, 1)], f"q_positions_each{suffix}")
        both = b.concat([query, for_all], 3, f"query{suffix}")
        return b.pattern(b.scores(both, b.concat([key, keys], 3, f"key{suffix}"), suffix), suffix)

    return in_place(b, conversion, attend_block(weights, conversion, read, pattern, count), data)


# -- three sublayers -----------------------------------------------------------------------------------------------


def emit_staged(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    b, projections = Builder.of(view, conversion), conversion.whole_block
    elem_type, d_head = conversion.block.elem_type, conversion.options.d_head
    program, direct = activation(conversion)
    groups = groups_of(program)
    query, width = projections.query, projections.output.out_features
    model, neurons = query.in_features, query.out_features
    first = {"linear_1_0": query, "linear_1_1": projections.value} if projections.gated else {"linear_1": query}
    made = neurons * len(first)
    hidden = made if direct else made + neurons
    m = max(group.bias_tokens for group in groups)
    weights = HeadWeights(b, model, m, neurons, elem_type)
    slots = Positions(b, groups, conversion.options.positions)
    start = model + 1 + slots.slots
    data, stream, count = open_stream(weights, conversion, slots, hidden)
    ones = b.rows(stream, model, weights.width, 2, "indicator_columns")
    positions = b.rows(stream, model + 1, start, 2, "positions")
    alone = slots.scores(positions, 0, "self_scores")

    read = b.rows(stream, 0, weights.width, 2, "stream_columns")
    functionals = ((name, weights.functional(each, f"W_V_{name}")) for name, each in first.items())
    values = [weights.map(read, functional, f"{name}_values") for name, functional in functionals]
    linear = values[0] if len(values) == 1 else b.concat(values, 2, "linear_1_values")
    written = b.padded(attend_to_self(b, linear, made, d_head, alone, "linear_1"), start, hidden - made, "attn_out_1")
    stream = b.add(stream, written, "stream_1")

    def by_head(first_column: int, name: str) -> Tensor:
        columns = b.rows(stream, first_column, first_column + neurons, 2, f"{name}_columns")
        return b.unsqueeze(b.transpose(columns, (0, 2, 1), f"{name}_turned"), 3, name)

    y = by_head(start, "q")
    z = by_head(start + neurons, "v") if projections.gated else y
    weights = HeadWeights(b, 0, m, neurons, elem_type)

    def of_group(group: Group, suffix: str) -> Tensor:
        if (weight := weights.constants(group, f"W_V{suffix}_constants")) is None:
            return z
        fixed = weights.project(ones, weight, 1, 1, f"v{suffix}_constants")
        return fixed if group.head.c == 0.0 else b.add(z, fixed, f"v{suffix}_value")

    finite = b.bounded(y, "finite_q")
    finite = b.paired(finite, "q_pair") if max(group.dimension for group in groups) > 1 else finite
    attended = attend(weights, ones, groups, finite, of_group, by_positions(b, slots, positions))
    by_token = b.reshape(b.transpose(attended, (0, 2, 1, 3), "z_by_token"), (0, 0, neurons), "z_written")
    # In place these are the columns of y, or of u in a gated block; otherwise the last ones, which are still 0.
    target = start + hidden - neurons
    stream = b.add(stream, b.padded(by_token, target, 0, "attn_out_2"), "stream_2")

    weights = HeadWeights(b, neurons, m, width, elem_type)
    linear = b.concat([b.rows(stream, target, start + hidden, 2, "z_side_by_side"), ones], 2, "linear_2_reads")
    linear = weights.map(linear, weights.functional(projections.output, "W_V_linear_2"), "linear_2_values")
    cleared = b.node("Neg", [b.rows(stream, start, start + hidden, 2, "hidden_columns")], "cleared_columns")
    every = b.concat([linear, cleared], 2, "linear_2_and_clear")
    last = attend_to_self(b, every, width + hidden, d_head, alone, "linear_2")
    result = b.rows(last, 0, width, 2, "model_columns_written")
    return in_place(b, conversion, b.rows(result, 0, count, 1, "tokens_only"), data)


# -- form compact ------------------------------------------------------------------------------------------------------

_LARGEST_VALUE = 2.0**20  # float32 rounds its logarithm by up to 4.8e-7


def prepare_compact(view: GraphView, conversion: Conversion) -> Conversion:
    """The projections as plain matrices, by reference where they are not; in float32 if that is enough."""
    prepared, program = with_projections(view, conversion), conversion.program
    # For large values, as of exp and ELU, float32 rounds the keys' offsets -ln(value) too much: half a unit in the last
    # place of an offset is the relative error of the product.
    values = [abs(value) for head in program.heads for value in head.constants]
    if not prepared.widened or program.double or max(values, default=0.0) > _LARGEST_VALUE:
        return prepared
    return replace(prepared, program=program.rounded(np.float32, factored=False, conditioned=True), double=False)


OwnKey = Callable[[np.ndarray, str], Tensor]  # [batch, tokens, 1, d_head] from d_head numbers and a suffix for names


def _attend(b: Builder, conversion: Conversion, y: Tensor, z: Tensor, each: Tensor, own_key: OwnKey) -> Tensor:
    """The heads' output [batch, tokens, heads, 1]; `b` has the type of the projections, `each` is (batch, tokens)."""
    made, groups = b.typed(conversion.compute_type), groups_of(conversion.program)
    neurons, dimension = conversion.block.neurons, max(group.dimension for group in groups)
    # W_Q has one column: a second one, which computes the number 1 from the indicator, would cost another W1.
    query = b.bounded(y, "q" if dimension == 1 else "finite_q")
    if dimension > 1:  # for `each` see `as_batches`
        plain = conversion.projections
        shape = b.concat([each, b.integers(plain.query.out_features, 1)], 0, "q_shape") if plain else None
        query = b.paired(query, "q", one_first=True, shape=shape)
    b.expose("q", query, (None, None, neurons, dimension))
    query = made.cast(query, b.compute_type, "wide_q")
    terms = list[Tensor]()
    for number, group in enumerate(groups):
        suffix, head, m = f"_{number}" if len(groups) > 1 else "", group.head, group.bias_tokens
        keys = np.asarray([(offset, slope) for slope, offset in head.logits])[:, -dimension:]
        key = own_key(keys[0], suffix)
        if m:
            shape = b.concat([each, b.integers(m, dimension)], 0, f"k_bias{suffix}_shape")
            bias = b.node("Expand", [made.numbers(f"k_bias{suffix}", keys[1:]), shape], f"k_bias{suffix}_everywhere")
            key = b.concat([key, bias], 2, f"k{suffix}")
        pattern = made.pattern(made.scores(query, key, suffix), suffix, (None, None, neurons, 1 + m))
        terms.append(_weighed(made, head, pattern, made.cast(z, b.compute_type, f"wide_v{suffix}"), suffix))
    return b.cast(add_groups(made, terms, groups), made.compute_type, "narrow_z")


def _weighed(b: Builder, head: Head, pattern: Tensor, z: Tensor, suffix: str) -> Tensor:
    if not any(head.constants) and head.c:
        parts = (1, len(head.bias_tokens)), (f"self_weight{suffix}", f"bias_weight{suffix}")
        return b.mul(b.split(pattern, *parts)[0] if head.bias_tokens else pattern, z, f"z{suffix}")
    rows = [[head.c, head.d], *([0.0, value] for value in head.constants[1:])]
    if not head.c:
        return b.node("MatMul", [pattern, b.numbers(f"v_rows{suffix}", np.asarray(rows)[:, 1:])], f"z{suffix}")
    # One product for both: a short row of weights costs more to split than to multiply.
    both = b.node("MatMul", [pattern, b.numbers(f"v_rows{suffix}", rows)], f"weighed_rows{suffix}")
    own, constant = b.split(both, (1, 1), (f"self_weight{suffix}", f"z_constant{suffix}"))
    return b.add(b.mul(own, z, f"z_self{suffix}"), constant, f"z{suffix}")


def emit_compact(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    single = conversion.widened and conversion.program.double
    b = Builder.of(view, conversion).typed(onnx.TensorProto.FLOAT if single else conversion.compute_type)
    if conversion.projections is None:
        return _by_reference(b, view, conversion)
    projections, elem_type = conversion.projections, conversion.block.elem_type
    model, neurons = projections.query.in_features, projections.query.out_features
    scoring = b.typed(conversion.compute_type)
    data = b.read(projections.query.data, elem_type, "input")
    tokens, *sizes = as_batches(b, data, projections.rank)
    stream, each = with_indicator(b, tokens, sizes, name="stream"), b.concat(sizes, 0, "each_token")
    wide_stream = scoring.cast(stream, b.compute_type, "wide_stream")
    # This stream has no rows of bias tokens.
    weights, of_scores = (HeadWeights(each, model, 0, neurons, elem_type, by_token=True) for each in (b, scoring))

    def own_key(numbers: np.ndarray, suffix: str) -> Tensor:
        columns = np.stack([weights.column(number, ()) for number in numbers], axis=-1)
        weight = scoring.numbers(f"W_K{suffix}", columns[None])
        return of_scores.project(wide_stream, weight, 1, len(numbers), f"k_self{suffix}")

    y = z = weights.project(stream, weights.functional(projections.query, "W_Q"), neurons, 1, "unbounded_q")
    if projections.gated:
        z = weights.project(stream, weights.functional(projections.value, "W_V"), neurons, 1, "v")
    written = write_output(weights, _attend(b, conversion, y, z, each, own_key), projections)
    return in_place(b, conversion, written, data)


def _by_reference(b: Builder, view: GraphView, conversion: Conversion) -> Replacement:
    """The attention of a block whose linear operators stay as projections."""
    block = conversion.block
    rank, axes = view.type_of(block.gate).rank, {operator.axis for operator in block.first}
    order = [*range(rank or 0)]
    if len(axes) == 1 and rank is not None and rank > 1:
        order.append(order.pop(axes.pop()))  # the permutation that moves the channels last
    back = [order.index(axis) for axis in range(len(order))]
    # Each token attends only to itself, so any grouping into sequences gives the same result.
    lead = (0, 0) if rank == 3 else (0, 1) if rank == 2 and b.opset < ALLOWZERO_OPSET else (1, -1)

    def rows_of(tensor: str, elem_type: int, name: str) -> tuple[Variable, Variable]:
        """[batch, tokens, heads] of any layout, and its shape with the channels last."""
        given = b.read(tensor, elem_type, name)
        given = b.transpose(given, order, f"{name}_channels_last") if back != sorted(back) else given
        shape = b.node("Shape", [given], f"{name}_shape")
        known = view.type_of(tensor).shape or (None,)
        width = known[order[-1]] if len(known) == rank else block.neurons
        if isinstance(width, int):
            return b.reshape(given, (*lead, width), f"{name}_rows"), shape
        # Does not run at a size of 0: onnxruntime's fusion of Reshapes writes the computed size as -1.
        heads = b.rows(shape, -1, 2**31, 0, f"{name}_heads")
        return b.reshape(given, b.concat([b.integers(*lead), heads], 0, f"{name}_rows_shape"), f"{name}_rows"), shape

    def own_key(numbers: np.ndarray, suffix: str) -> Tensor:
        constants = b.typed(conversion.compute_type).numbers(f"k_self{suffix}_constants", numbers)
        shape = b.concat([each, b.integers(1, len(numbers))], 0, f"k_self{suffix}_shape")
        return b.node("Expand", [constants, shape], f"k_self{suffix}")

    rows, shape = rows_of(block.gate, block.gate_type, "query")
    each = b.sizes(rows, 0, 2, "each_token")
    y = z = b.unsqueeze(rows, 3, "y")
    if block.value != block.gate:
        z = b.unsqueeze(rows_of(block.value, block.value_type, "value")[0], 3, "u")
    by_token = _attend(b, conversion, y, z, each, own_key)
    b.expose("z", by_token, (None, None, block.neurons, 1))
    shaped = b.reshape(by_token, shape, "activation", zeros=rank != 3)
    shaped = b.transpose(shaped, back, "activation_as_before") if back != sorted(back) else shaped
    b.write(shaped, block.output, block.elem_type)
    return replacement(b, conversion)

"""Forms `masked`, `maskless` and `staged`: each MLP is attention sublayers over N tokens and m bias tokens.

`masked` (Theorems 3 and 6): bias tokens and indicator columns are appended to the sublayer's input; W_Q, W_K and W_V of
d_ff heads project this stream; each query attends to itself and to the bias tokens, under a mask computed from the
runtime length; W_O writes the result, and the bias tokens' rows are dropped.

`maskless` (Theorem 9): the stream is widened by one-hot position columns, and W_QK has -omega on the pairs that a mask
would forbid (`passes.forms.sublayer`). b1 and the constants of self keys and values ride on the tokens' position
columns. A sequence of more than `max_tokens` tokens fails at run time, in the node `sequence_longer_than_max_tokens_N`
whose operands then have different sizes; it never gives wrong numbers.

`staged`: three sublayers per MLP, as in the post (linear, activation, linear; Theorems 7 and 8), on a stream of D +
hidden + positions columns and N + m rows:

1. linear: heads that attend only to themselves write x W1 + b1 to the hidden columns; the rank is split over
   ceil(d_ff / d_head) heads.
2. activation: d_ff heads read the hidden columns and write f(y) - y to them, so that the skip connection leaves f(y).
   A gated block has 2 d_ff hidden columns, y and u; heads write f(y) u - u to those of u. This loses no digits where
   f(y) - y is again a weighted mean of multiples of y, as for SiLU, whose heads write -y sigma(-y). For other programs,
   such as GELU or tanh, f(y) - y + y would lose digits where |y| is larger than |f|, so they write f(y) to d_ff columns
   of their own.
3. linear: heads write z W2 + b2 to the model's columns, and clear the hidden columns by writing their negatives.

The skip connection of the third sublayer is the model's own Add, because a normalisation stands between the residual
stream and the block's input; the block's output is what the third sublayer's heads write.

All three replace whole blocks, so the linear operators must be plain matrices.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from passes.conversion import Conversion
from passes.forms.builder import SMALLEST_OPSET, Builder, replacement
from passes.forms.sublayer import (
    LARGEST_PATTERN,
    HeadWeights,
    Positions,
    StreamColumns,
    as_batches,
    as_before,
    attend_block,
    attend_to_self,
    attend_with_activation,
    default_omega,
    open_stream,
    position_scores,
    sequences_of,
    with_indicators,
    write_output,
)
from passes.match.linear import Miss
from passes.match.projections import Projection, projections_of
from passes.programs.groups import Group, as_written, groups_of, spread_error, spreads
from passes.programs.program import Program
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable
from rewriter.graph.view import GraphView


def prepare_softmax(view: GraphView, conversion: Conversion, what: str) -> Conversion | Miss:
    """The program as heads with a literal softmax write it; a Miss where the model's opset is too old for `what`."""
    opset = view.opsets.get("", 1)
    if opset < SMALLEST_OPSET:
        return Miss(
            f"{what} needs opset {SMALLEST_OPSET}, and the model has {opset}; convert the model to a newer opset "
            "first, or use form local",
            conversion.block.output,
        )
    program = conversion.program
    changed = program.coefficient_error + spread_error(program, conversion.dtype)
    written = as_written(program, conversion.dtype)
    return replace(conversion, program=replace(program, coefficient_error=changed), written=written)


def prepare_masked(view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """The projections as plain matrices; a Miss where they are something else."""
    prepared = prepare_softmax(view, conversion, f"form {conversion.form}")
    if isinstance(prepared, Miss):
        return prepared
    found = projections_of(view, conversion.block)
    if isinstance(found, Miss):
        reason = f"form {conversion.form} replaces whole blocks, and {found.reason}; use form compact or local"
        return Miss(reason, conversion.block.output)
    return replace(prepared, projections=found)


def prepare_maskless(view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """As for form `masked`; a Miss where there are too many positions to replace the mask, or too few."""
    prepared, output = prepare_masked(view, conversion), conversion.block.output
    if isinstance(prepared, Miss) or prepared.projections is None:
        return prepared
    shape = view.type_of(prepared.projections.query.data).shape
    length = shape[-2] if shape is not None and len(shape) > 1 else None
    fixed = length if isinstance(length, int) else 0
    options = prepared.options
    limit = options.max_tokens or fixed or options.positions
    if fixed > limit:
        return Miss(f"its sequences have {fixed} tokens; raise --max-tokens from {limit} to {fixed}", output)
    slots = limit + max(group.bias_tokens for group in groups_of(prepared.program))
    size = slots * slots * np.dtype(prepared.dtype).itemsize
    if size > LARGEST_PATTERN:
        most = f"more than {LARGEST_PATTERN >> 20} MB; lower --max-tokens"
        return Miss(f"W_QK of {slots} positions takes {size / 2**20:.0f} MB, {most}", output)
    return replace(prepared, options=replace(options, max_tokens=limit))


def prepare_staged(view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """As for form `maskless`; if the activation is written in place, the skip connection adds the linear term."""
    prepared = prepare_maskless(view, conversion)
    if isinstance(prepared, Miss):
        return prepared
    minus, in_place = activation(prepared)
    return replace(prepared, written=replace(as_written(minus, prepared.dtype), linear=1.0)) if in_place else prepared


def activation(conversion: Conversion) -> tuple[Program, bool]:
    """The program that the second sublayer of form `staged` writes, and whether in place.

    In place it is f(y) - z, to which the skip connection adds z; where that would lose digits, it is f(y).
    """
    program = conversion.program
    minus = replace(program, linear=program.linear - 1.0)
    in_place = spreads(minus) and spread_error(minus, conversion.dtype) == 0.0
    return (minus if in_place else program), in_place


# -- one sublayer ----------------------------------------------------------------------------------------------------


def emit_masked(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    b, projections = Builder.of(view, conversion), conversion.whole_block
    groups = groups_of(conversion.program)
    layout = StreamColumns(projections.query.in_features, max(group.bias_tokens for group in groups))
    data = b.read(projections.query.data, conversion.block.elem_type, "input")
    tokens = as_batches(b, data, projections.rank)
    batch, count = b.sizes(tokens, 0, 1, "batch"), b.sizes(tokens, 1, 2, "token_count")
    rows = np.eye(layout.bias_tokens, layout.width, layout.model + 1)[None]
    shape = b.concat([batch, b.integers(layout.bias_tokens, layout.width)], 0, "bias_tokens_shape")
    bias_tokens = b.node("Expand", [b.numbers("bias_token", rows), shape], "bias_tokens")
    marked = with_indicators(b, tokens, layout, (batch, count), "tokens")
    stream = b.concat([marked, bias_tokens], 1, "stream")

    def pattern(group: Group, query: Tensor, key: Tensor, suffix: str) -> Variable:
        return b.pattern(query, key, suffix, mask=_mask(b, stream, count, group.bias_tokens, suffix))

    weights = HeadWeights(b, layout, projections.query.out_features, conversion.block.elem_type)
    attended = attend_block(b, weights, stream, projections, groups, pattern)
    return _written(b, conversion, (weights, attended), data, count)


def _mask(b: Builder, stream: Tensor, count: Tensor, bias_tokens: int, suffix: str) -> Variable:
    """Boolean [rows, rows]: a query attends to its own key and to the first bias tokens. `count` is N."""

    def node(operator: str, inputs: list[Tensor], name: str) -> Variable:
        return b.node(operator, inputs, f"{name}{suffix}")

    first, one = (b.fragment.constant(f"{name}{suffix}", np.asarray(i)) for name, i in (("first_row", 0), ("step", 1)))
    rows = node("Gather", [node("Shape", [stream], "stream_shape"), one], "row_count")
    positions = node("Range", [first, rows, one], "positions")
    before_bias = node("Less", [positions, count], "before_bias")
    end = node("Add", [count, b.integers(bias_tokens)], "end_bias")
    before_end = node("Less", [positions, end], "before_end")
    is_bias = node("And", [node("Not", [before_bias], "not_before"), before_end], "is_bias")
    own = b.reshape(positions, (-1, 1), f"own{suffix}")
    return node("Or", [node("Equal", [own, positions], "diagonal"), is_bias], "mask")


def emit_maskless(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    b, projections = Builder.of(view, conversion), conversion.whole_block
    groups = groups_of(conversion.program)
    omega = default_omega(groups, conversion.compute_type)
    positions = Positions(b, max(group.bias_tokens for group in groups), conversion.options.positions, omega)
    model = projections.query.in_features
    data = b.read(projections.query.data, conversion.block.elem_type, "input")
    stream = open_stream(b, sequences_of(b, data, conversion, projections), model, 0, positions, "stream")
    scores = position_scores(b, stream, "position_scores", bias_tokens=True)

    def pattern(group: Group, query: Tensor, key: Tensor, suffix: str) -> Variable:
        del group  # the keys of bias tokens that it does not use give the self logit less omega
        return b.pattern(query, key, suffix, added=scores)

    weights = HeadWeights(b, positions.layout(model), projections.query.out_features, conversion.block.elem_type)
    attended = attend_block(b, weights, stream.tensor, projections, groups, pattern, unused=-omega)
    return _written(b, conversion, (weights, attended), data, stream.count)


def _written(
    b: Builder, conversion: Conversion, heads: tuple[HeadWeights, Tensor], data: Tensor, count: Tensor
) -> Replacement:
    """W_O on what the heads write, for the tokens alone."""
    projections = conversion.whole_block
    dropped = b.rows(write_output(b, *heads, projections), b.integers(0), count, 1, "tokens_only")
    b.write(as_before(b, dropped, data, projections), projections.result, conversion.block.elem_type)
    return replacement(b, conversion, projections.result)


# -- three sublayers -------------------------------------------------------------------------------------------------


def emit_staged(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    b, projections = Builder.of(view, conversion), conversion.whole_block
    elem_type, options = conversion.block.elem_type, conversion.options
    program, direct = activation(conversion)
    groups = groups_of(program)
    query, width = projections.query, projections.output.out_features
    model, neurons = query.in_features, query.out_features
    first = [query, projections.value] if projections.gated else [query]
    made = neurons * len(first)
    hidden = made if direct else made + neurons
    m = max([1, *(group.bias_tokens for group in groups)])
    omega = default_omega(groups, conversion.compute_type)
    positions = Positions(b, m, options.positions, omega)
    data = b.read(projections.query.data, elem_type, "input")
    stream = open_stream(b, sequences_of(b, data, conversion, projections), model, hidden, positions)
    alone = position_scores(b, stream, "self_scores", bias_tokens=False)

    read = [stream.columns(b, 0, model, "model_columns"), stream.ones(b, "linear_1_positions")]
    values = _linear_values(b, b.concat(read, 2, "linear_1_reads"), first, positions, elem_type, "linear_1")
    stream = stream.plus(b, attend_to_self(b, values, made, options.d_head, alone, "linear_1"), model, made)

    scores = position_scores(b, stream, "activation_scores", bias_tokens=True)
    y = stream.columns(b, model, model + neurons, "y_columns")
    z = stream.columns(b, model + neurons, model + made, "u_columns") if projections.gated else y
    ones = stream.ones(b, "activation_positions")
    # In place these are the columns of y, or of u in a gated block; otherwise the last ones, which are still 0.
    target = model + hidden - neurons
    stream = stream.plus(b, attend_with_activation(b, y, z, ones, scores, groups, positions, omega), target, neurons)

    activated = stream.columns(b, target, target + neurons, "z_side_by_side")
    read = [activated, stream.ones(b, "linear_2_positions")]
    written = _linear_values(
        b, b.concat(read, 2, "linear_2_reads"), [projections.output], positions, elem_type, "linear_2"
    )
    cleared = b.node("Neg", [stream.columns(b, model, model + hidden, "hidden_columns")], "cleared_columns")
    every = b.concat([written, cleared], 2, "linear_2_and_clear")
    last = attend_to_self(b, every, width + hidden, options.d_head, alone, "linear_2")
    result = b.rows(last, b.integers(0), b.integers(width), 2, "model_columns_written")
    dropped = b.rows(result, b.integers(0), stream.count, 1, "tokens_only")
    b.write(as_before(b, dropped, data, projections), projections.result, elem_type)
    return replacement(b, conversion, projections.result)


def _linear_values(
    b: Builder, source: Tensor, projections: list[Projection], positions: Positions, elem_type: int, name: str
) -> Variable:
    """Values of heads that attend only to themselves: x W + b for each row of `source` [batch, rows, in + slots]."""
    layout = positions.layout(projections[0].in_features)
    made: list[Variable] = []
    for number, projection in enumerate(projections):
        suffix = f"_{number}" if len(projections) > 1 else ""
        weights = HeadWeights(b, layout, projection.out_features, elem_type)
        by_neuron = weights.functional(projection, f"W_V_{name}{suffix}")
        flat = b.reshape(
            b.transpose(by_neuron, (1, 0, 2), f"W_V_{name}{suffix}_turned"),
            (layout.width, -1),
            f"W_V_{name}{suffix}_flat",
        )
        made.append(b.node("MatMul", [source, flat], f"{name}_values{suffix}"))
    return b.concat(made, 2, f"{name}_values") if len(made) > 1 else made[0]

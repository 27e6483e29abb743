"""Forms `masked` and `maskless`: each MLP is one attention sublayer over N tokens and m bias tokens.

`masked` (Theorems 3 and 6): bias tokens and indicator columns are appended to the sublayer's input; W_Q, W_K and W_V of
d_ff heads project this stream; each query attends to itself and to the bias tokens, under a mask computed from the
runtime length; W_O writes the result, and the bias tokens' rows are dropped.

`maskless` (Theorem 9): the stream is widened by one-hot position columns, and W_QK has -omega on the pairs that a mask
would forbid (`passes.forms.sublayer`). b1 and the constants of self keys and values ride on the tokens' position
columns. A sequence of more than `max_tokens` tokens fails at run time, in the node `sequence_longer_than_max_tokens_N`
whose operands then have different sizes; it never gives wrong numbers.

Where the linear operators are not plain matrices (quantised, convolutions, sums of operators), they stay in place as
the projections, *by reference*, and only the activation is replaced. The first operators' output is the query (and
value) of the tokens, and the bias tokens' projections, which are constants, are appended to it. The second operator is
W_O, so the bias tokens' rows are dropped before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from passes.conversion import Conversion
from passes.forms.attention import SMALLEST_OPSET, whole_of
from passes.forms.builder import Builder, replacement
from passes.forms.sublayer import (
    Attend,
    HeadWeights,
    Positions,
    StreamColumns,
    add_groups,
    as_batches,
    as_before,
    attend_block,
    default_omega,
    open_stream,
    sequences_of,
    write_output,
)
from passes.match.linear import Miss
from passes.match.projections import Projections, projections_of
from passes.programs.groups import Group, as_written, groups_of, spread_error
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable
from rewriter.graph.view import GraphView

_MEGABYTE = 2**20


def prepare_masked(view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """Decide whether the projections are plain matrices; a Miss where the model's opset is too old for the form."""
    opset = view.opsets.get("", 1)
    if opset < SMALLEST_OPSET:
        return Miss(
            f"form {conversion.form} needs opset {SMALLEST_OPSET}, and the model has {opset}; convert the model to a "
            "newer opset first, or use form local",
            conversion.block.output,
        )
    program = conversion.program
    changed = program.coefficient_error + spread_error(program, conversion.dtype)
    written = as_written(program, conversion.dtype)
    conversion = replace(conversion, program=replace(program, coefficient_error=changed), written=written)
    found = projections_of(view, conversion.block)
    if isinstance(found, Miss):
        return replace(conversion, projections=None, by_reference=found.reason)
    return replace(conversion, projections=found)


def prepare_maskless(view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """As for form `masked`; a Miss where positions cannot replace the mask, or there are too many or too few."""
    prepared, output = prepare_masked(view, conversion), conversion.block.output
    if isinstance(prepared, Miss):
        return prepared
    groups = groups_of(prepared.program)
    data = prepared.block.gate if prepared.projections is None else prepared.projections.query.data
    shape = view.type_of(data).shape
    length = shape[-2] if shape is not None and len(shape) > 1 else None
    fixed = length if isinstance(length, int) else 0
    options = prepared.options
    limit = options.max_tokens or fixed or options.positions
    if fixed > limit:
        return Miss(f"its sequences have {fixed} tokens; raise --max-tokens from {limit} to {fixed}", output)
    slots = limit + max(group.bias_tokens for group in groups)
    size = slots * slots * np.dtype(prepared.dtype).itemsize / _MEGABYTE
    if size > options.max_pattern_mb:
        return Miss(
            f"W_QK of {slots} positions takes {size:.0f} MB, more than "
            f"--option max_pattern_mb={options.max_pattern_mb:g}; lower --max-tokens or raise that limit",
            output,
        )
    return replace(prepared, options=replace(options, max_tokens=limit))


def emit_masked(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    b, projections = Builder.of(view, conversion), conversion.projections
    if projections is None:
        return _by_reference(b, view, conversion, lambda count: lambda *given: _attend_masked(b, count, *given))
    groups = groups_of(conversion.program)
    layout = StreamColumns(projections.query.in_features, max(group.bias_tokens for group in groups))
    data = b.read(projections.query.data, conversion.block.elem_type, "input")
    stream, count = _with_bias_tokens(b, as_batches(b, data, projections.rank), layout)
    weights = HeadWeights(b, layout, projections.query.out_features, conversion.block.elem_type)
    attended = attend_block(b, weights, stream, projections, groups, lambda *given: _attend_masked(b, count, *given))
    return _written(b, conversion, projections, (weights, attended), data, count)


def emit_maskless(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    b, projections = Builder.of(view, conversion), conversion.projections
    groups = groups_of(conversion.program)
    omega = default_omega(groups, conversion.compute_type)
    positions = Positions(b, max(group.bias_tokens for group in groups), conversion.options.positions, omega)

    def attend_with(scores: Tensor) -> Attend:
        # The keys of bias tokens that a group does not use give the self logit less omega.
        return lambda _, inputs, suffix: b.attend({**inputs, "position_scores": scores}, f"z{suffix}", mask=False)

    if projections is None:
        return _by_reference(
            b, view, conversion, lambda count: attend_with(_scores(b, positions, count)), unused=-omega
        )
    elem_type, model = conversion.block.elem_type, projections.query.in_features
    layout = positions.layout(model)
    data = b.read(projections.query.data, elem_type, "input")
    stream = open_stream(b, sequences_of(b, data, conversion, projections), model, 0, positions, "stream")
    one_batch = b.rows(stream.tensor, b.integers(0), b.integers(1), 0, "one_stream")
    columns = b.rows(one_batch, b.integers(model), b.integers(layout.width), 2, "position_columns")
    scores = positions.scores(columns, "position_scores", bias_tokens=True)
    weights = HeadWeights(b, layout, projections.query.out_features, elem_type)
    attended = attend_block(b, weights, stream.tensor, projections, groups, attend_with(scores), unused=-omega)
    return _written(b, conversion, projections, (weights, attended), data, stream.count)


def _written(
    b: Builder,
    conversion: Conversion,
    projections: Projections,
    heads: tuple[HeadWeights, Tensor],
    data: Tensor,
    count: Tensor,
) -> Replacement:
    """W_O on what the heads write, for the tokens alone."""
    written = write_output(b, *heads, projections)
    dropped = b.rows(written, b.integers(0), count, 1, "tokens_only")
    b.write(as_before(b, dropped, data, projections), projections.result, conversion.block.elem_type)
    return replacement(b, conversion, projections.result)


def _attend_masked(b: Builder, count: Tensor, group: Group, inputs: dict[str, Tensor], suffix: str) -> Variable:
    """Attention of one group under its mask: the diagonal, and the columns of its bias tokens. `count` is N."""
    given = {**inputs, "tokens": count, "bias_tokens": b.integers(group.bias_tokens)}
    if not b.exposes:
        return b.attend(given, f"z{suffix}", mask=True)
    given["forbidden"] = b.numbers(f"z{suffix}_forbidden", -np.inf)
    nodes = whole_of(b.opset, suffix)
    for kind in ("scores", "pattern"):
        b.expose(kind, b.fragment.tensor(b.fragment.qualified(f"{kind}{suffix}")), (None, None, None, None))
    return b.fragment.inlined(nodes, [given[name] for name in nodes.input], "")


def _with_bias_tokens(b: Builder, tokens: Tensor, layout: StreamColumns) -> tuple[Variable, Variable]:
    """The stream [batch, N + m, width] with indicator columns, and N as a 1-D tensor."""
    batch, count = b.sizes(tokens, 0, 1, "batch"), b.sizes(tokens, 1, 2, "token_count")
    rows = np.eye(layout.bias_tokens, layout.width, layout.model + 1)[None]
    shape = b.concat([batch, b.integers(layout.bias_tokens, layout.width)], 0, "bias_tokens_shape")
    bias_tokens = b.node("Expand", [b.numbers("bias_token", rows), shape], "bias_tokens")
    return b.concat([with_indicators(b, tokens, layout, (batch, count), "tokens"), bias_tokens], 1, "stream"), count


def with_indicators(
    b: Builder, tokens: Tensor, layout: StreamColumns, sizes: tuple[Tensor, Tensor], name: str
) -> Variable:
    """The tokens with their indicator columns, [batch, N, width]; `sizes` are batch and N, 1-D."""
    one = np.zeros((1, 1, 1 + layout.bias_tokens))
    one[..., 0] = 1.0
    shape = b.concat([*sizes, b.integers(1 + layout.bias_tokens)], 0, "indicators_shape")
    indicators = b.node("Expand", [b.numbers("token_indicator", one), shape], "indicators")
    return b.concat([tokens, indicators], 2, name)


def _scores(b: Builder, positions: Positions, count: Tensor) -> Variable:
    """The positions' scores of N tokens and the bias tokens, for blocks by reference, which have no stream."""
    one = b.node("Expand", [b.numbers("one", 1.0), b.concat([b.integers(1), count, b.integers(1)], 0, "n")], "ones")
    rows = positions.checked([positions.of_tokens(count), one], 2, "positions")
    columns = b.rows(rows, b.integers(0), b.integers(positions.slots), 2, "token_columns")
    return positions.scores(
        b.concat([columns, positions.of_bias_tokens()], 1, "rows"), "position_scores", bias_tokens=True
    )


# -- projections by reference ---------------------------------------------------------------------------------------


def _by_reference(
    b: Builder,
    view: GraphView,
    conversion: Conversion,
    attend_with: Callable[[Tensor], Attend],
    unused: float | None = None,
) -> Replacement:
    """Emit the attention of one block.

    Args:
        b: the builder.
        view: the graph.
        conversion: the conversion, without plain projections.
        attend_with: from N, a 1-D tensor, to the attention that keeps tokens apart.
        unused: added to the self logit for bias tokens that a group does not attend to; None where a mask hides them.
    """
    block = conversion.block
    groups = groups_of(conversion.program)
    channels_last = order_of(view, conversion)
    query_rows = _tokens(b, b.read(block.gate, block.gate_type, "query"), view.type_of(block.gate).rank, channels_last)
    value_rows = query_rows
    if block.value != block.gate:
        given = b.read(block.value, block.value_type, "value")
        value_rows = _tokens(b, given, view.type_of(block.value).rank, channels_last, "value")
    count = b.sizes(query_rows, 2, 3, "token_count")
    attend = attend_with(count)
    m = max(group.bias_tokens for group in groups)
    dimension = max(group.dimension for group in groups)
    if unused is not None and len({group.bias_tokens for group in groups}) > 1:
        dimension = 2  # the logits of unused bias tokens have an offset
    appended = _appended(b, query_rows, [0.0] * m, "q")
    b.expose("q", appended, (None, block.neurons, None, 1))
    query = b.bounded(appended, "finite_q")
    if dimension == 2:
        query = paired(b, query, "q_pair")
    terms: list[Variable] = []
    for number, group in enumerate(groups):
        suffix = f"_{number}" if len(groups) > 1 else ""
        key = _key(b, query_rows, group, m, dimension, unused or 0.0, suffix)
        value = _value(b, value_rows, group, m, suffix)
        terms.append(attend(group, {"query": query, "key": key, "value": value}, suffix))
    kept = b.rows(add_groups(b, terms, groups), b.integers(0), count, 2, "tokens_only")
    write_back(b, conversion, b.transpose(kept, (0, 2, 1, 3), "z_by_token"), channels_last)
    return replacement(b, conversion, block.output)


def order_of(view: GraphView, conversion: Conversion) -> list[int] | None:
    """The permutation that moves the channels last; None where they are last already."""
    axes = {operator.axis for operator in conversion.block.first}
    rank = view.type_of(conversion.block.gate).rank
    if axes == {-1} or len(axes) != 1 or rank is None or rank < 2:
        return None
    axis = axes.pop() % rank
    return [*(i for i in range(rank) if i != axis), axis]


def _tokens(b: Builder, tensor: Tensor, rank: int | None, order: list[int] | None, name: str = "query") -> Variable:
    """Pre-activations of any layout as [batch, heads, tokens, 1]."""
    rows = rows_of(b, tensor, rank, order, name)
    return b.unsqueeze(b.transpose(rows, (0, 2, 1), f"{name}_by_head"), 3, f"{name}_tokens")


def rows_of(b: Builder, tensor: Tensor, rank: int | None, order: list[int] | None, name: str) -> Variable:
    """Pre-activations of any layout as [batch, tokens, heads]."""
    if order is not None:
        tensor = b.transpose(tensor, order, f"{name}_channels_last")
    # Leading axes merge into one batch, except for channels first, where all spatial axes merge into the tokens. Each
    # token attends only to itself, so any grouping into sequences gives the same result.
    if rank is None or rank < 3:
        lead: Tensor = b.integers(1, -1)
    elif order is None:
        lead = b.concat([b.integers(-1), b.sizes(tensor, rank - 2, rank - 1, f"{name}_length")], 0, f"{name}_lead")
    else:
        lead = b.concat([b.sizes(tensor, 0, 1, f"{name}_batch"), b.integers(-1)], 0, f"{name}_lead")
    shape = b.node("Shape", [tensor], f"{name}_shape")
    last = b.rows(shape, b.integers(-1), b.integers(2**31), 0, f"{name}_heads")
    return b.reshape(tensor, b.concat([lead, last], 0, f"{name}_rows_shape"), f"{name}_rows")


def _appended(b: Builder, rows: Tensor, on_bias: list[float], name: str) -> Tensor:
    """[batch, heads, N, 1] with the projections of the bias tokens appended as rows."""
    if not on_bias:
        return rows
    shape = b.concat([b.sizes(rows, 0, 2, f"{name}_heads"), b.integers(1, 1)], 0, f"{name}_bias_shape")
    constants = b.numbers(f"{name}_bias", np.asarray(on_bias)[None, None, :, None])
    return b.concat([rows, b.node("Expand", [constants, shape], f"{name}_bias_rows")], 2, name)


def paired(b: Builder, query: Tensor, name: str) -> Variable:
    """The query (y, 1), whose second entry multiplies the offsets of the keys."""
    ones = b.node("Expand", [b.numbers(f"{name}_one", 1.0), b.node("Shape", [query], f"{name}_shape")], f"{name}_ones")
    return b.concat([query, ones], 3, name)


def _key(b: Builder, rows: Tensor, group: Group, m: int, dimension: int, unused: float, suffix: str) -> Variable:
    """Keys [batch, 1, N + m, d_head], the same for all heads."""
    name = f"k{suffix}"
    one_head = b.rows(rows, b.integers(0), b.integers(1), 1, f"{name}_one_head")
    tokens_shape = b.node("Shape", [one_head], f"{name}_tokens_shape")
    parts: list[Tensor] = []
    for i, (own, on_bias) in enumerate(group.logits(m, unused)[:dimension]):
        column = b.node("Expand", [b.numbers(f"{name}_self_{i}", own), tokens_shape], f"{name}_tokens_{i}")
        parts.append(_appended(b, column, on_bias, f"{name}_{i}"))
    return b.concat(parts, 3, name)


def _value(b: Builder, rows: Tensor, group: Group, m: int, suffix: str) -> Tensor:
    """Values [batch, heads, N + m, 1], with one head where they are constants."""
    head, name = group.head, f"v{suffix}"
    on_bias = [*(token.value for token in head.bias_tokens), *[0.0] * (m - group.bias_tokens)]
    if head.c == 0.0:
        rows = b.rows(rows, b.integers(0), b.integers(1), 1, f"{name}_one_head")
        shape = b.node("Shape", [rows], f"{name}_tokens_shape")
        own: Tensor = b.node("Expand", [b.numbers(f"{name}_self", head.d), shape], f"{name}_tokens")
    elif head.d != 0.0:
        own = b.node("Add", [rows, b.numbers(f"{name}_constant", head.d)], f"{name}_tokens")
    else:
        own = rows
    return _appended(b, own, on_bias, name)


def write_back(b: Builder, conversion: Conversion, by_token: Tensor, order: list[int] | None) -> None:
    """[batch, N, heads, 1] in the layout and under the name of the activation's output."""
    block = conversion.block
    b.expose("z", by_token, (None, None, block.neurons, 1))
    gate = b.fragment.tensor(block.gate)
    if order is None:
        shaped = b.reshape(by_token, b.node("Shape", [gate], "activation_shape"), "activation")
    else:
        turned = b.transpose(gate, order, "activation_turned")
        shape = b.node("Shape", [turned], "activation_shape")
        back = [order.index(axis) for axis in range(len(order))]
        shaped = b.transpose(b.reshape(by_token, shape, "activation_channels_last"), back, "activation")
    b.write(shaped, block.output, block.elem_type)

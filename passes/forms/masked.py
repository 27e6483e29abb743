"""Form `masked`: each MLP is one attention sublayer over N tokens and m bias tokens (Theorems 3 and 6).

Comes in: a conversion. Goes out: the sublayer, as the paper writes it. The bias tokens are appended to the sublayer's
input, whose stream gets indicator columns; W_Q, W_K, W_V of d_ff heads project it; each query attends to itself and to
the bias tokens, under a mask made from the runtime length; W_O writes the result and the bias tokens' rows are
dropped. Where the linear operators cannot be read as plain matrices, they stay and serve as the projections: their
output is the query, the bias tokens' projections are appended to that, and what is replaced is the activation alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from passes.conversion import Conversion
from passes.forms.attention import ATTENTION_OPSET, SMALLEST_OPSET, Pattern
from passes.forms.builder import Builder
from passes.forms.groups import Group, groups_of
from passes.forms.weights import Layout, Weights
from passes.linear import Miss
from passes.network.names import COUNT, INDICATORS, IS_TOKEN, ROWS
from passes.projections import Projections, projections_of
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable
from rewriter.graph.view import GraphView


def prepare_masked(view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """Decide how the projections are had; a Miss where the model's opset lacks what the form needs."""
    opset, output = view.opsets.get("", 1), conversion.block.output
    if opset < SMALLEST_OPSET:
        return Miss(
            f"form {conversion.form} needs opset {SMALLEST_OPSET}, and the model has {opset}; convert the model to a "
            "newer opset first, or use form local",
            output,
        )
    if conversion.options.attention_op and opset < ATTENTION_OPSET:
        return Miss(
            f"the operator Attention came with opset {ATTENTION_OPSET}, and the model has {opset}; convert the model "
            "to a newer opset first, or leave --attention-op away",
            output,
        )
    found = projections_of(view, conversion.block)
    if isinstance(found, Miss):
        return replace(conversion, projections=None, by_reference=found.reason)
    return replace(conversion, projections=found)


def emit_masked(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    builder = Builder(view, conversion)
    if conversion.projections is not None:
        return _sublayer(builder, conversion.projections)
    return _by_reference(builder, view)


# -- the whole block ---------------------------------------------------------------------------------------------


def _sublayer(b: Builder, projections: Projections) -> Replacement:
    conversion = b.conversion
    elem_type = conversion.block.elem_type
    groups = groups_of(conversion.program)
    layout = Layout(projections.query.in_features, max(group.bias_tokens for group in groups))
    data = b.read(projections.query.data, elem_type, "input")
    if conversion.carried:
        layout = replace(layout, bias_tokens=conversion.carried)
        stream, count = carried_stream(b, data, layout)
    else:
        stream, count = with_bias_tokens(b, as_batches(b, data, projections.rank), layout)
    attended = attend_block(b, stream, count, projections, layout, groups)
    weights = Weights(b, layout, projections.query.out_features, elem_type)
    written = write_output(b, weights, attended, projections)
    if conversion.carried:
        two_axes = 2 in (projections.rank, projections.result_rank)
        shaped: Tensor = b.reshape(written, (-1, projections.output.out_features), "flat") if two_axes else written
        b.write(shaped, projections.result, elem_type)
        return b.replacement(projections.result)
    dropped = b.rows(written, b.integers(0), count, 1, "tokens_only")
    shaped = as_before(b, dropped, b.fragment.tensor(projections.query.data), projections)
    b.write(shaped, projections.result, elem_type)
    return b.replacement(projections.result)


def as_batches(b: Builder, tensor: Tensor, rank: int) -> Tensor:
    """[..., tokens, width] as [batch, tokens, width]."""
    if rank == 3:
        return tensor
    if rank == 2:
        return b.unsqueeze(tensor, 0, "one_batch")
    last_two = b.sizes(tensor, rank - 2, rank, "last_two")
    return b.reshape(tensor, b.concat([b.integers(-1), last_two], 0, "batches_shape"), "batches")


def as_before(b: Builder, tensor: Tensor, data: Tensor, projections: Projections) -> Tensor:
    """[batch, tokens, width] in the shape that the second operator's result had."""
    width = projections.output.out_features
    if projections.result_rank == 2:
        return b.reshape(tensor, (-1, width), "one_below_the_other")
    if projections.rank == 3:
        return tensor
    leading = b.sizes(data, 0, projections.rank - 1, "leading")
    return b.reshape(tensor, b.concat([leading, b.integers(width)], 0, "result_shape"), "shaped")


def with_bias_tokens(b: Builder, tokens: Tensor, layout: Layout) -> tuple[Variable, Variable]:
    """The stream [batch, N + m, width] with indicator columns, and N as a 1-D tensor."""
    batch, count = b.sizes(tokens, 0, 1, "batch"), b.sizes(tokens, 1, 2, "token_count")
    one = np.zeros((1, 1, 1 + layout.bias_tokens))
    one[..., 0] = 1.0
    width = b.integers(1 + layout.bias_tokens)
    shape = b.concat([batch, count, width], 0, "indicators_shape")
    indicators = b.node("Expand", [b.numbers("token_indicator", one), shape], "indicators")
    with_indicators = b.concat([tokens, indicators], 2, "tokens")
    rows = np.eye(layout.bias_tokens, layout.width, layout.model + 1)[None]
    shape = b.concat([batch, b.integers(layout.bias_tokens, layout.width)], 0, "bias_tokens_shape")
    bias_tokens = b.node("Expand", [b.numbers("bias_token", rows), shape], "bias_tokens")
    return b.concat([with_indicators, bias_tokens], 1, "stream"), count


def carried_stream(b: Builder, data: Tensor, layout: Layout) -> tuple[Variable, Variable]:
    """The same where the network carries the bias tokens: their indicators are read, and nothing else of their rows."""
    count, rows, is_token, known = (b.fragment.tensor(name) for name in (COUNT, ROWS, IS_TOKEN, INDICATORS))
    shape = b.concat([b.integers(-1), rows, b.integers(layout.model)], 0, "carried_shape")
    carried = b.reshape(data, shape, "carried")
    own = b.node("Where", [is_token, carried, b.numbers("no_data", 0.0)], "tokens")
    indicators = b.node("Cast", [known], "indicator_columns", to=int(b.conversion.compute_type))
    batch = b.sizes(carried, 0, 1, "batch")
    shape = b.concat([batch, rows, b.integers(1 + layout.bias_tokens)], 0, "indicators_shape")
    return b.concat([own, b.node("Expand", [indicators, shape], "indicators")], 2, "stream"), count


def attend_block(
    b: Builder, stream: Tensor, count: Tensor, projections: Projections, layout: Layout, groups: tuple[Group, ...]
) -> Variable:
    """All heads on the stream: [batch, heads, N + m, 1], groups added up."""
    neurons, elem_type = projections.query.out_features, b.conversion.block.elem_type
    weights = Weights(b, layout, neurons, elem_type)
    dimension = max(group.dimension for group in groups)
    y = weights.functional(projections.query, "W_Q" if dimension == 1 else "W_Q_first")
    z = (
        weights.functional(projections.value, "W_V" if not _constants(groups) else "W_V_first")
        if projections.gated
        else y
    )
    unbounded = weights.project(stream, weights.query(y, dimension), neurons, dimension, "q")
    query = b.bounded(unbounded, "finite_q")
    terms: list[Tensor] = []
    for number, group in enumerate(groups):
        suffix = f"_{number}" if len(groups) > 1 else ""
        key_weight = weights.key(y, group, dimension, f"W_K{suffix}")
        key = weights.project(stream, key_weight, neurons if group.head.alpha else 1, dimension, f"k{suffix}")
        value_weight = weights.value(z, group, f"W_V{suffix}")
        if value_weight is y and dimension == 1:
            value = unbounded
        else:
            heads = 1 if group.head.c == 0.0 else neurons
            value = weights.project(stream, value_weight, heads, 1, f"v{suffix}")
        inputs: dict[str, Tensor] = {"query": query, "key": key, "value": value}
        terms.append(attend_group(b, group, inputs, count, suffix))
    return add_groups(b, terms, groups)


def _constants(groups: tuple[Group, ...]) -> bool:
    """Whether some W_V is more than the projection of the values."""
    return any(group.head.d or any(token.value for token in group.head.bias_tokens) for group in groups)


def attend_group(b: Builder, group: Group, inputs: dict[str, Tensor], count: Tensor, suffix: str) -> Variable:
    """One group under its mask: the diagonal, and the columns of its bias tokens."""
    given = {**inputs, "tokens": count, "bias_tokens": b.integers(group.bias_tokens)}
    return b.attend(Pattern(operator=b.conversion.options.attention_op), given, f"z{suffix}")


def add_groups(b: Builder, terms: list[Tensor], groups: tuple[Group, ...]) -> Variable:
    """The groups' outputs, each times its factor, added up: the heads of all groups write along the same rows of W2."""
    total: Tensor | None = None
    for number, (term, group) in enumerate(zip(terms, groups, strict=True)):
        if group.factor != 1.0:
            term = b.node("Mul", [term, b.numbers(f"factor_{number}", group.factor)], f"scaled_{number}")
        total = term if total is None else b.node("Add", [total, term], f"z_sum_{number}")
    assert isinstance(total, Variable)
    return total


def write_output(b: Builder, weights: Weights, attended: Tensor, projections: Projections) -> Variable:
    """W_O on [batch, heads, tokens, 1]: [batch, tokens, d_model]."""
    neurons, width = projections.output.in_features, projections.output.out_features
    side_by_side = b.reshape(b.transpose(attended, (0, 2, 1, 3), "z_by_token"), (0, 0, neurons), "z_side_by_side")
    flat = b.reshape(weights.output(projections.output), (neurons, width), "W_O_flat")
    written = b.node("MatMul", [side_by_side, flat], "attn_out")
    bias = weights.bias(projections.output, "b_O")
    return written if bias is None else b.node("Add", [written, bias], "attn_out_biased")


# -- projections by reference ------------------------------------------------------------------------------------


def _by_reference(b: Builder, view: GraphView) -> Replacement:
    block = b.conversion.block
    groups = groups_of(b.conversion.program)
    channels_last = _order(view, b)
    query_rows = _tokens(b, b.read(block.gate, block.gate_type, "query"), view.type_of(block.gate).rank, channels_last)
    value_rows = query_rows
    if block.value != block.gate:
        given = b.read(block.value, block.value_type, "value")
        value_rows = _tokens(b, given, view.type_of(block.value).rank, channels_last, "value")
    count = b.sizes(query_rows, 2, 3, "token_count")
    m = max(group.bias_tokens for group in groups)
    dimension = max(group.dimension for group in groups)
    query = b.bounded(_appended(b, query_rows, [0.0] * m, "q"), "finite_q")
    if dimension == 2:
        query = _paired(b, query, "q_pair")
    terms: list[Tensor] = []
    for number, group in enumerate(groups):
        suffix = f"_{number}" if len(groups) > 1 else ""
        key = _key(b, query, query_rows, group, m, dimension, suffix)
        value = _value(b, value_rows, group, m, suffix)
        terms.append(attend_group(b, group, {"query": query, "key": key, "value": value}, count, suffix))
    kept = b.rows(add_groups(b, terms, groups), b.integers(0), count, 2, "tokens_only")
    _back(b, kept, b.fragment.tensor(block.gate), view.type_of(block.gate).rank, channels_last)
    return b.replacement(block.output)


def _order(view: GraphView, b: Builder) -> list[int] | None:
    """The axes with the channels last, where they are not."""
    axes = {operator.axis for operator in b.conversion.block.first}
    rank = view.type_of(b.conversion.block.gate).rank
    if axes == {-1} or len(axes) != 1 or rank is None or rank < 2:
        return None
    axis = axes.pop() % rank
    return [*(i for i in range(rank) if i != axis), axis]


def _tokens(b: Builder, tensor: Tensor, rank: int | None, order: list[int] | None, name: str = "query") -> Variable:
    """Pre-activations of any layout as [batch, heads, tokens, 1]."""
    if order is not None:
        tensor = b.transpose(tensor, order, f"{name}_channels_last")
    if rank is None or rank < 3:
        lead: Tensor = b.integers(1, -1)
    elif order is None:
        lead = b.concat([b.integers(-1), b.sizes(tensor, rank - 2, rank - 1, f"{name}_length")], 0, f"{name}_lead")
    else:
        lead = b.concat([b.sizes(tensor, 0, 1, f"{name}_batch"), b.integers(-1)], 0, f"{name}_lead")
    shape = b.node("Shape", [tensor], f"{name}_shape")
    last = b.rows(shape, b.integers(-1), b.integers(2**31), 0, f"{name}_heads")
    rows = b.reshape(tensor, b.concat([lead, last], 0, f"{name}_rows_shape"), f"{name}_rows")
    return b.unsqueeze(b.transpose(rows, (0, 2, 1), f"{name}_by_head"), 3, f"{name}_tokens")


def _appended(b: Builder, rows: Tensor, on_bias: list[float], name: str) -> Tensor:
    """[batch, heads, N, 1] with the projections of the bias tokens as further rows."""
    if not on_bias:
        return rows
    shape = b.concat([b.sizes(rows, 0, 2, f"{name}_heads"), b.integers(1, 1)], 0, f"{name}_bias_shape")
    constants = b.numbers(f"{name}_bias", np.asarray(on_bias)[None, None, :, None])
    return b.concat([rows, b.node("Expand", [constants, shape], f"{name}_bias_rows")], 2, name)


def _paired(b: Builder, query: Tensor, name: str) -> Variable:
    """(y, 1)."""
    ones = b.node("Expand", [b.numbers(f"{name}_one", 1.0), b.node("Shape", [query], f"{name}_shape")], f"{name}_ones")
    return b.concat([query, ones], 3, name)


def _key(b: Builder, query: Tensor, rows: Tensor, group: Group, m: int, dimension: int, suffix: str) -> Variable:
    """Keys [batch, 1, N + m, d_head], the same for all heads; [batch, heads, ...] where the self logit is quadratic."""
    head = group.head
    padding = [0.0] * (m - group.bias_tokens)
    name = f"k{suffix}"
    one_head = b.rows(rows, b.integers(0), b.integers(1), 1, f"{name}_one_head")
    tokens_shape = b.node("Shape", [one_head], f"{name}_tokens_shape")
    parts: list[Tensor] = []
    coefficients = [
        (head.beta, [token.slope for token in head.bias_tokens]),
        (head.gamma, [token.offset for token in head.bias_tokens]),
    ]
    for i, (own, on_bias) in enumerate(coefficients[:dimension]):
        column = b.node("Expand", [b.numbers(f"{name}_self_{i}", own), tokens_shape], f"{name}_tokens_{i}")
        parts.append(_appended(b, column, [*on_bias, *padding], f"{name}_{i}"))
    if head.alpha != 0.0:
        bounded = b.bounded(rows, f"{name}_finite")
        square = b.node("Mul", [bounded, b.numbers(f"{name}_alpha", head.alpha)], f"{name}_square")
        every = _appended(b, square, [0.0] * m, f"{name}_squares")
        parts[0] = b.node("Add", [every, parts[0]], f"{name}_with_square")
        shape = b.node("Shape", [every], f"{name}_each_shape")
        parts[1] = b.node("Expand", [parts[1], shape], f"{name}_offsets")
    return b.concat(parts, 3, name)


def _value(b: Builder, rows: Tensor, group: Group, m: int, suffix: str) -> Tensor:
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


def _back(b: Builder, kept: Tensor, gate: Tensor, rank: int | None, order: list[int] | None) -> None:
    """[batch, heads, N, 1] in the layout and under the name of the activation's output."""
    block = b.conversion.block
    by_token = b.transpose(kept, (0, 2, 1, 3), "z_by_token")
    if order is None:
        shaped = b.reshape(by_token, b.node("Shape", [gate], "activation_shape"), "activation")
    else:
        turned = b.transpose(gate, order, "activation_turned")
        shape = b.node("Shape", [turned], "activation_shape")
        back = [order.index(axis) for axis in range(len(order))]
        shaped = b.transpose(b.reshape(by_token, shape, "activation_channels_last"), back, "activation")
    b.write(shaped, block.output, block.elem_type)

"""Attention whose projections are the block's own linear operators, kept in place.

For blocks whose weights are not plain matrices (quantised, convolutions, sums of operators) only the activation is
replaced. The first operators' output is the query (and value) of the tokens, and the bias tokens' projections, which
are constants, are appended to it. The second operator is W_O, so the bias tokens' rows are dropped before it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from passes.conversion import Conversion
from passes.forms.builder import Builder, replacement
from passes.forms.sublayer import Attend, add_groups
from passes.programs.groups import Group, groups_of
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable
from rewriter.graph.view import GraphView


def emit_by_reference(
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

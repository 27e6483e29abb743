"""The widened residual stream of the post: the model's columns, hidden columns, one-hot positions.

Two kinds of sublayer act on it, a row-wise linear map (Theorem 7) and an elementwise activation (Theorem 8). Each
returns what its heads write; the skip connection is `Stream.plus`.

Each head reads only some of the columns, so most rows of its W_Q, W_K and W_V are zero. Instead of storing zeros, a
product with a matrix that selects columns is a Slice of the stream, and a product with a matrix that has few nonzero
rows is a product with the corresponding columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from passes.forms.builder import Builder
from passes.forms.positions import Positions
from passes.forms.sublayer import add_groups
from passes.programs.groups import Group
from rewriter.graph.surgeon import Tensor, Variable


@dataclass(frozen=True)
class Stream:
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

    def plus(self, b: Builder, written: Tensor, start: int, width: int) -> Stream:
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
) -> Stream:
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
    return Stream(b.concat([with_own, bias_tokens], 1, name), model, hidden, positions, count)


def position_scores(b: Builder, stream: Stream, name: str, *, bias_tokens: bool) -> Variable:
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
    inputs: dict[str, Tensor] = {"query": query, "key": key, "value": by_head, "position_scores": scores}
    written = b.attend(inputs, f"{name}_z", mask=False)
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
        inputs = {"query": query, "key": key, "value": value, "position_scores": scores}
        terms.append(b.attend(inputs, f"z{suffix}", mask=False))
    total = b.transpose(add_groups(b, terms, groups), (0, 2, 1, 3), "z_by_token")
    return b.reshape(total, b.node("Shape", [queries], "z_shape"), "z_written")


def by_head(b: Builder, columns: Tensor, name: str) -> Variable:
    """[batch, rows, width] as [batch, width, rows, 1], one head per column."""
    return b.unsqueeze(b.transpose(columns, (0, 2, 1), f"{name}_columns"), 3, name)

"""A block of form `whole`: an attention sublayer on the residual stream that the network carries (Theorems 3, 6, 9).

It reads the normalised model columns and the stream's own further columns: the indicator of tokens, and one-hot
positions, those of the bias tokens first. W_Q, W_K, W_V and W_O are those of form `masked`. -omega stands in W_QK
between positions: queries and keys have the positions' part behind their own, so that one product gives the scores, and
a softmax follows. Biases ride on the indicator, so that bias tokens write nothing: their query scores only a bias token
whose value is 0.

Blocks are proved one by one on streams of their own, as in form `maskless`.
"""

from __future__ import annotations

from passes.conversion import Conversion
from passes.forms.builder import Builder, replacement
from passes.forms.square import emit_maskless
from passes.forms.sublayer import HeadWeights, StreamColumns, attend_block
from passes.match.projections import Projections
from passes.programs.groups import Group, groups_of
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable
from rewriter.graph.view import GraphView

PREFIX = "bias_token"

STREAM = f"{PREFIX}/stream"
"""The model's columns of the stream after the embeddings, with the bias tokens: [batch, N + R, D]."""

COUNT = f"{PREFIX}/tokens"
"""N, as int64 [1]."""

ROWS = f"{PREFIX}/rows"
"""N + R, as int64 [1]."""

POSITION_ROWS = f"{PREFIX}/token_columns"
"""Constant [1, T, 1 + R + T]: what the columns beside the model's hold for a token at each position."""

BIAS_ROWS = f"{PREFIX}/bias_token_rows"
"""Constant [1, R, D + 1 + R + T]: the bias tokens."""


def neuron_scores(bias_tokens: int) -> str:
    """Constant [R + T, R + T]: W_QK between positions of the heads that attend to so many bias tokens."""
    return f"{PREFIX}/W_QK_neurons_{bias_tokens}"


def emit_whole(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one block on the stream `conversion.stream`, or alone where it has none; reads no weights."""
    if not conversion.stream:
        return emit_maskless(view, conversion)
    b, projections = Builder.of(view, conversion), conversion.whole_block
    elem_type, model = conversion.block.elem_type, projections.query.in_features
    m, slots = conversion.carried, conversion.carried + conversion.options.positions
    layout = StreamColumns(model, m)
    stream = _stream(b, conversion, projections, layout)
    read = b.rows(stream, b.integers(0), b.integers(layout.width), 2, "stream_columns")
    ones = b.rows(stream, b.integers(model), b.integers(model + 1), 2, "indicator")
    positions = b.rows(stream, b.integers(model + 1), b.integers(model + 1 + slots), 2, "positions")
    weights = HeadWeights(b, layout, projections.query.out_features, elem_type)
    keys = b.unsqueeze(positions, 1, "k_positions")

    def pattern(group: Group, query: Tensor, key: Tensor, suffix: str) -> Variable:
        """softmax([q, p W] [k, p]^T)."""
        pseudo = b.read(neuron_scores(group.bias_tokens), elem_type, f"W_QK_positions{suffix}")
        weighed = b.node("MatMul", [positions, pseudo], f"q_positions{suffix}")
        one = b.unsqueeze(weighed, 1, f"q_positions_one{suffix}")
        each = b.node("Expand", [one, b.integers(1, weights.neurons, 1, 1)], f"q_positions_each{suffix}")
        both = b.concat([query, each], 3, f"query{suffix}")
        return b.pattern(both, b.concat([key, keys], 3, f"key{suffix}"), suffix)

    attended = attend_block(b, weights, read, projections, groups_of(conversion.program), pattern, bounded=False)
    total = b.transpose(attended, (0, 2, 1, 3), "z_by_token")
    output = projections.output
    side_by_side = b.reshape(total, (0, 0, output.in_features), "z_side_by_side")
    flat = b.reshape(weights.output(output), (output.in_features, output.out_features), "W_O_flat")
    written: Tensor = b.node("MatMul", [side_by_side, flat], "attn_out")
    bias = weights.bias(output, "b_O")
    if bias is not None:
        row = b.node("MatMul", [ones, b.reshape(bias, (1, -1), "b_O_row")], "b_O_on_tokens")
        written = b.node("Add", [written, row], "attn_out_biased")
    if projections.result_rank == 2:
        written = b.reshape(written, (-1, output.out_features), "flat")
    b.write(written, projections.result, elem_type)
    return replacement(b, conversion, projections.result)


def _stream(b: Builder, conversion: Conversion, projections: Projections, layout: StreamColumns) -> Tensor:
    """[batch, N + R, D + 1 + R + T]: the block's input, and the further columns of the residual stream."""
    data = _rows(b, projections, layout.model)
    wide = b.fragment.tensor(conversion.stream)
    further = b.rows(wide, b.integers(layout.model), b.integers(2**62), 2, "further_columns")
    return b.cast(b.concat([data, further], 2, "stream"), conversion.block.elem_type, "stream_wide")


def _rows(b: Builder, projections: Projections, model: int) -> Tensor:
    """The block's input, [batch, N + R, D]."""
    data: Tensor = b.fragment.tensor(projections.query.data)
    if projections.rank == 2:
        shape = b.concat([b.integers(-1), b.fragment.tensor(ROWS), b.integers(model)], 0, "by_batch")
        data = b.reshape(data, shape, "in_batches")
    return data

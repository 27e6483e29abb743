"""A block of form `whole` as three sublayers on the network's stream (`sublayers=3`; the post, Theorems 7 and 8).

The stream has hidden columns behind the positions, 0 wherever no block is at work:

1. linear: heads that attend only to themselves write x W1 + b1 to the hidden columns;
2. activation: one head per hidden column writes f(y) - y to it, so that the skip connection leaves f(y), or f(y) to a
   column of its own (`passes.forms.staged` says when);
3. linear: heads that attend only to themselves write z W2 + b2 to the model's columns, and minus the hidden columns to
   these, which are 0 again behind it.

The graph that carries the stream has two places for what the block makes of it: the stream behind the second sublayer,
and what the third writes to the hidden columns (`passes.network.names`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from passes.conversion import Conversion
from passes.forms.builder import Builder, replacement
from passes.forms.staged import in_place, linear_values, skipped
from passes.forms.stream import by_head
from passes.forms.sublayer import add_groups
from passes.forms.weights import Layout
from passes.match.projections import Projections
from passes.network.names import activated_stream, cleared_columns, neuron_scores
from passes.programs.groups import Group, groups_of
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable


def groups_in(conversion: Conversion) -> tuple[Group, ...]:
    """The heads of one neuron: those of f(y) - y if they write in place."""
    program = conversion.program
    return groups_of(skipped(program) if _in_place(conversion) else program)


def hidden_columns(conversion: Conversion) -> int:
    """The hidden columns that a block needs: y, the value of a gate, and f where it is not written in place."""
    if conversion.options.sublayers != "3" or conversion.projections is None:
        return 0
    projections = conversion.projections
    own = 0 if _in_place(conversion) else 1
    return (1 + projections.gated + own) * projections.query.out_features


def _in_place(conversion: Conversion) -> bool:
    return conversion.options.sublayers == "3" and in_place(conversion)


@dataclass(frozen=True)
class _Indicators:
    """The columns that biases and constants ride on: is token, and which bias token."""

    bias_tokens: int

    def layout(self, model: int) -> Layout:
        """The layout of `model` columns and the indicators."""
        return Layout(model, self.bias_tokens)


def emit_three(conversion: Conversion, projections: Projections, data: Tensor, b: Builder) -> Replacement:
    """Emit one block; `data` [batch, rows, D] is what it reads. Reads no weights."""
    block = _Block(b, conversion, projections)
    first = [projections.query, projections.value] if projections.gated else [projections.query]
    neurons = projections.query.out_features
    made, used = neurons * len(first), hidden_columns(conversion)
    wide = b.fragment.tensor(conversion.stream)

    read = b.concat([block.wide(data, "input"), block.indicators], 2, "linear_1_reads")
    values = linear_values(b, read, first, _Indicators(conversion.carried), conversion.block.elem_type, "linear_1")
    stream = block.plus(wide, block.to_self(values, made, "linear_1"), 0, made, "stream_1")

    y = block.hidden(stream, 0, neurons, "y_columns")
    z = block.hidden(stream, neurons, 2 * neurons, "u_columns") if projections.gated else y
    target = used - neurons
    stream = block.plus(
        stream, block.activate(y, z), target, neurons, "stream_2", activated_stream(conversion.block.name)
    )

    activated = block.hidden(stream, target, used, "z_side_by_side")
    read = b.concat([activated, block.indicators], 2, "linear_2_reads")
    output = projections.output
    written = linear_values(b, read, [output], _Indicators(conversion.carried), conversion.block.elem_type, "linear_2")
    cleared = b.node("Neg", [block.hidden(stream, 0, used, "hidden_columns")], "hidden_negated")
    width = output.out_features
    last = block.to_self(b.concat([written, cleared], 2, "linear_2_and_clear"), width + used, "linear_2")
    result: Tensor = b.rows(last, b.integers(0), b.integers(width), 2, "model_columns_written")
    if projections.result_rank == 2:
        result = b.reshape(result, (-1, width), "flat")
    b.write(result, projections.result, conversion.block.elem_type)
    back = b.rows(last, b.integers(width), b.integers(width + used), 2, "hidden_written")
    missing = b.integers(0, 0, 0, 0, 0, conversion.hidden - used)
    padded = b.node("Pad", [back, missing], "hidden_padded")
    name, elem_type = conversion.block.name, int(conversion.block.elem_type)
    b.fragment.node("Cast", [padded], "hidden_result", output=cleared_columns(name), to=elem_type)
    return replacement(
        b, conversion, projections.result, before=(activated_stream(name),), after=(cleared_columns(name),)
    )


class _Block:
    """Steps on the stream of one block."""

    def __init__(self, b: Builder, conversion: Conversion, projections: Projections) -> None:
        self._b = b
        self._conversion = conversion
        model, m = projections.query.in_features, conversion.carried
        slots = m + conversion.options.max_tokens
        self._start = model + 1 + slots
        stream = b.fragment.tensor(conversion.stream)
        own = b.rows(stream, b.integers(model), b.integers(model + 1 + m), 2, "indicator_columns")
        self.indicators = self.wide(own, "indicators")
        self._ones = b.rows(self.indicators, b.integers(0), b.integers(1), 2, "is_token")
        places = b.rows(stream, b.integers(model + 1), b.integers(model + 1 + slots), 2, "position_columns")
        self._positions = self.wide(places, "positions")
        self._turned = b.unsqueeze(b.transpose(self._positions, (0, 2, 1), "positions_turned"), 1, "k_positions_turned")
        scores = b.node("MatMul", [self._weighed(0), self._turned], "self_scores")
        self._alone = b.node("Softmax", [scores], "self_pattern", axis=3)

    def wide(self, tensor: Tensor, name: str) -> Tensor:
        """A tensor in the type of the heads' arithmetic."""
        return self._b.cast(tensor, self._conversion.block.elem_type, f"{name}_wide")

    def hidden(self, stream: Tensor, start: int, stop: int, name: str) -> Tensor:
        """Some hidden columns."""
        b = self._b
        part = b.rows(stream, b.integers(self._start + start), b.integers(self._start + stop), 2, name)
        return self.wide(part, name)

    def plus(self, stream: Tensor, written: Tensor, start: int, width: int, name: str, output: str = "") -> Tensor:
        """The skip connection: the stream plus what heads write to hidden columns."""
        b, elem_type = self._b, self._conversion.block.elem_type
        after = self._conversion.hidden - start - width
        if elem_type != b.compute_type:
            written = b.node("Cast", [written], f"{name}_written", to=int(elem_type))
        placed = b.node("Pad", [written, b.integers(0, 0, self._start + start, 0, 0, after)], f"{name}_attn_out")
        if not output:
            return b.node("Add", [stream, placed], name)
        return b.fragment.node("Add", [stream, placed], name, output=output)

    def to_self(self, values: Tensor, width: int, name: str) -> Tensor:
        """Theorem 7: ceil(width / d_head) heads that attend only to themselves, over which the values are split."""
        b = self._b
        d_head = min(self._conversion.options.d_head, width)
        heads = ceil(width / d_head)
        missing = heads * d_head - width
        if missing:
            values = b.node("Pad", [values, b.integers(0, 0, 0, 0, 0, missing)], f"{name}_padded")
        split = b.transpose(b.reshape(values, (0, 0, heads, d_head), f"{name}_split"), (0, 2, 1, 3), f"{name}_v")
        z = b.node("MatMul", [self._alone, split], f"{name}_z")
        joined = b.reshape(b.transpose(z, (0, 2, 1, 3), f"{name}_by_token"), (0, 0, heads * d_head), f"{name}_heads")
        return b.rows(joined, b.integers(0), b.integers(width), 2, name) if missing else joined

    def activate(self, y: Tensor, z: Tensor) -> Tensor:
        """Theorem 8: one head per column and group; [batch, rows, neurons]."""
        b = self._b
        groups = groups_in(self._conversion)
        dimension = max(group.dimension for group in groups)
        query: Tensor = by_head(b, y, "q")
        value = query if z is y else by_head(b, z, "v")
        self._shape = b.node("Shape", [query], "q_shape")
        if dimension > 1:
            # Queries of bias tokens are 0: only positions tell them what to attend to.
            ones = b.node("Expand", [b.unsqueeze(self._ones, 1, "q_is_token"), self._shape], "q_is_token_each")
            query = b.concat([query, ones], 3, "q_pair")
        terms: list[Variable] = []
        for number, group in enumerate(groups):
            terms.append(self._attend(group, query, value, dimension, f"_{number}" if len(groups) > 1 else ""))
        total = b.transpose(add_groups(b, terms, groups), (0, 2, 1, 3), "z_by_token")
        return b.reshape(total, b.node("Shape", [y], "z_shape"), "z_written")

    def _attend(self, group: Group, query: Tensor, value: Tensor, dimension: int, suffix: str) -> Variable:
        """softmax([q, p W] [k, p]^T) v."""
        b, head = self._b, group.head
        column = Layout(0, self._conversion.carried).column
        slopes = column(head.beta, [token.slope for token in head.bias_tokens])
        offsets = column(head.gamma, [token.offset for token in head.bias_tokens])
        weight = b.numbers(f"W_K{suffix}", np.stack([slopes, offsets][:dimension], axis=-1))
        key = b.unsqueeze(b.node("MatMul", [self.indicators, weight], f"k{suffix}_all"), 1, f"k{suffix}")
        constants = column(head.d, [token.value for token in head.bias_tokens])[:, None]
        if constants.any() or head.c == 0.0:
            fixed = b.node("MatMul", [self.indicators, b.numbers(f"W_V{suffix}", constants)], f"v{suffix}_all")
            own = b.unsqueeze(fixed, 1, f"v{suffix}_constants")
            value = own if head.c == 0.0 else b.node("Add", [value, own], f"v{suffix}_value")
        places = b.concat([self._shape_of_positions(), b.integers(1)], 0, f"each{suffix}")
        own_places = b.node("Expand", [self._weighed(group.bias_tokens, suffix), places], f"q_positions_each{suffix}")
        whole = b.concat([query, own_places], 3, f"query{suffix}")
        keys = b.concat([key, b.unsqueeze(self._positions, 1, f"k_positions{suffix}")], 3, f"key{suffix}")
        turned = b.transpose(keys, (0, 1, 3, 2), f"key_turned{suffix}")
        scores = b.node("MatMul", [whole, turned], f"attn_scores{suffix}")
        return b.node("MatMul", [b.node("Softmax", [scores], f"pattern{suffix}", axis=3), value], f"z{suffix}")

    def _shape_of_positions(self) -> Tensor:
        """[1, neurons, 1]: with a 1 behind it, the shape that repeats positions for every head."""
        neurons = self._conversion.projections.query.out_features if self._conversion.projections else 1
        return self._b.integers(1, neurons, 1)

    def _weighed(self, bias_tokens: int, suffix: str = "_self") -> Variable:
        """P W_QK, [batch, 1, rows, slots]."""
        b = self._b
        weight = b.read(neuron_scores(bias_tokens), self._conversion.block.elem_type, f"W_QK_positions{suffix}")
        return b.unsqueeze(b.node("MatMul", [self._positions, weight], f"q_positions{suffix}"), 1, f"q_places{suffix}")


__all__ = ["emit_three", "groups_in", "hidden_columns"]

"""Steps of an attention sublayer that replaces a whole block, shared by the forms.

They are: X as [batch, tokens, width]; queries, keys and values of all heads; their attention, by whatever keeps tokens
apart (`Attend`); W_O; and the result in the shape of the block's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from passes.conversion import Conversion
from passes.forms.builder import Builder
from passes.forms.weights import Weights
from passes.match.projections import Projections
from passes.programs.groups import Group
from rewriter.graph.surgeon import Tensor, Variable

Attend = Callable[[Group, dict[str, Tensor], str], Variable]
"""Attention of one group: from query, key and value, and a suffix for names, to [batch, heads, rows, 1]."""


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
    lengths = b.fragment.constant("lengths", np.arange(1, conversion.options.max_tokens + 1, dtype=np.int64))
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
    weights: Weights,
    stream: Tensor,
    projections: Projections,
    groups: tuple[Group, ...],
    attend: Attend,
    unused: float | None = None,
) -> Variable:
    """All heads on the stream [batch, rows, width]: the sum of the groups, [batch, heads, rows, 1].

    The logit of bias tokens that a group does not attend to is the self logit plus `unused`; None where a mask hides
    them.
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
    unbounded = weights.project(stream, weights.query(y, dimension), neurons, dimension, "q")
    b.expose("q", unbounded, (None, neurons, None, dimension))
    query = b.bounded(unbounded, "finite_q")
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
        inputs: dict[str, Tensor] = {"query": query, "key": key, "value": value}
        terms.append(attend(group, inputs, suffix))
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
    b: Builder, weights: Weights, attended: Tensor, projections: Projections, *, by_token: bool = False
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

"""Form `maskless`: the sublayer of form `masked` without a mask (Theorem 9).

The stream of N + m tokens is widened by one-hot position columns, and W_QK has -omega on the pairs that a mask would
forbid (`passes.forms.positions`). b1 and the constants of self keys and values ride on the tokens' position columns. A
sequence of more than `max_tokens` tokens fails at run time, in the node `sequence_longer_than_max_tokens_N` whose
operands then have different sizes; it never gives wrong numbers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from passes.conversion import Conversion
from passes.forms.builder import Builder, replacement
from passes.forms.by_reference import emit_by_reference
from passes.forms.masked import prepare_masked
from passes.forms.positions import Positions, default_omega
from passes.forms.stream import open_stream
from passes.forms.sublayer import Attend, as_before, attend_block, sequences_of, write_output
from passes.forms.weights import Weights
from passes.match.linear import Miss
from passes.match.projections import Projections
from passes.programs.groups import Group, groups_of
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Tensor, Variable
from rewriter.graph.view import GraphView

_MEGABYTE = 2**20


def prepare_maskless(view: GraphView, conversion: Conversion) -> Conversion | Miss:
    """As for form `masked`; a Miss where positions cannot replace the mask, or W_QK would be too large."""
    block, options = conversion.block, conversion.options
    groups = groups_of(conversion.program)
    slots = options.max_tokens + max(group.bias_tokens for group in groups)
    size = slots * slots * np.dtype(conversion.dtype).itemsize / _MEGABYTE
    if size > options.max_pattern_mb:
        return Miss(
            f"W_QK of {slots} positions takes {size:.0f} MB, more than "
            f"--option max_pattern_mb={options.max_pattern_mb:g}; lower --max-tokens or raise that limit",
            block.output,
        )
    prepared = prepare_masked(view, conversion)
    if isinstance(prepared, Miss):
        return prepared
    return _too_long(view, prepared) or replace(prepared, longest=options.max_tokens)


def _too_long(view: GraphView, conversion: Conversion) -> Miss | None:
    """A Miss for a model whose number of tokens is static and larger than `max_tokens`."""
    data = conversion.projections.query.data if conversion.projections is not None else conversion.block.gate
    shape = view.type_of(data).shape
    length = shape[-2] if shape is not None and len(shape) > 1 else None
    limit = conversion.options.max_tokens
    if not isinstance(length, int) or length <= limit:
        return None
    return Miss(
        f"its sequences have {length} tokens; raise --max-tokens from {limit} to {length}", conversion.block.output
    )


def emit_maskless(view: GraphView, conversion: Conversion) -> Replacement:
    """Emit one conversion; reads no weights."""
    b = Builder.of(view, conversion)
    groups = groups_of(conversion.program)
    omega = default_omega(groups, conversion.compute_type)
    positions = Positions(b, max(group.bias_tokens for group in groups), conversion.options.max_tokens, omega)
    if conversion.projections is not None:
        return _sublayer(b, conversion, conversion.projections, groups, positions, omega)

    def attend_with(count: Tensor) -> Attend:
        return partial(attend_maskless, b, _scores(b, positions, count))

    return emit_by_reference(b, view, conversion, attend_with, unused=-omega)


def attend_maskless(b: Builder, scores: Tensor, group: Group, inputs: dict[str, Tensor], suffix: str) -> Variable:
    """Attention of one group; `scores` [1, 1, rows, rows] are those of the positions."""
    del group  # the keys of bias tokens that it does not use give the self logit less omega
    return b.attend({**inputs, "position_scores": scores}, f"z{suffix}", mask=False)


def _scores(b: Builder, positions: Positions, count: Tensor) -> Variable:
    """The positions' scores of N tokens and the bias tokens, for blocks by reference, which have no stream."""
    one = b.node("Expand", [b.numbers("one", 1.0), b.concat([b.integers(1), count, b.integers(1)], 0, "n")], "ones")
    rows = positions.checked([positions.of_tokens(count), one], 2, "positions")
    columns = b.rows(rows, b.integers(0), b.integers(positions.slots), 2, "token_columns")
    return positions.scores(
        b.concat([columns, positions.of_bias_tokens()], 1, "rows"), "position_scores", bias_tokens=True
    )


def _sublayer(
    b: Builder,
    conversion: Conversion,
    projections: Projections,
    groups: tuple[Group, ...],
    positions: Positions,
    omega: float,
) -> Replacement:
    elem_type = conversion.block.elem_type
    model = projections.query.in_features
    layout = positions.layout(model)
    data = b.read(projections.query.data, elem_type, "input")
    stream = open_stream(b, sequences_of(b, data, conversion, projections), model, 0, positions, "stream")
    one_batch = b.rows(stream.tensor, b.integers(0), b.integers(1), 0, "one_stream")
    columns = b.rows(one_batch, b.integers(model), b.integers(layout.width), 2, "position_columns")
    scores = positions.scores(columns, "position_scores", bias_tokens=True)
    weights = Weights(b, layout, projections.query.out_features, elem_type)
    attend = partial(attend_maskless, b, scores)
    attended = attend_block(b, weights, stream.tensor, projections, groups, attend, unused=-omega)
    written = write_output(b, weights, attended, projections)
    dropped = b.rows(written, b.integers(0), stream.count, 1, "tokens_only")
    b.write(as_before(b, dropped, data, projections), projections.result, elem_type)
    return replacement(b, conversion, projections.result)

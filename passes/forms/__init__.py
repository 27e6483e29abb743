"""Forms: ways to turn a head program into nodes. `FORMS` is the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from passes.conversion import Conversion, decide
from passes.forms.local import emit_local
from passes.forms.softmax import (
    activation,
    emit_compact,
    emit_masked,
    emit_maskless,
    emit_staged,
    emit_whole,
    prepare_compact,
    prepare_masked,
    prepare_maskless,
    with_projections,
)
from passes.match.blocks import Block
from passes.options import COMPACT, LOCAL, STAGED, WHOLE, Options
from passes.programs.program import groups_of
from rewriter.graph.edit import Replacement
from rewriter.graph.view import GraphView, LostError, Miss

Counts = tuple[tuple[int, ...], int, int]  # heads of each sublayer, queries of each head, keys for each query


@dataclass(frozen=True)
class Form:
    """`prepare` completes a conversion during planning, and raises LostError where the form cannot take the block."""

    name: str
    help: str
    cost: Callable[[Conversion, int, int], Counts]  # of a prepared conversion, the columns it reads, and tokens
    prepare: Callable[[GraphView, Conversion], Conversion]
    emit: Callable[[GraphView, Conversion], Replacement]


def _local(conversion: Conversion, _: int, tokens: int) -> Counts:
    return (conversion.heads or 0,), tokens, conversion.program.bias_tokens + 1


def _compact(conversion: Conversion, width: int, tokens: int) -> Counts:
    heads, _, keys = _square(conversion, width, 0)
    return heads, tokens, keys + 1


def _square(conversion: Conversion, _: int, tokens: int) -> Counts:
    groups = groups_of(conversion.program)
    rows = tokens + max(group.bias_tokens for group in groups)
    return ((conversion.block.neurons or 0) * len(groups),), rows, rows


def _staged(conversion: Conversion, width: int, tokens: int) -> Counts:
    program, in_place = activation(conversion)
    heads, rows, _ = _square(replace(conversion, program=program), width, tokens)
    block, d_head = conversion.block, conversion.options.d_head
    made = (block.neurons or 0) * (1 if block.gate == block.value else 2)
    hidden = made if in_place else made + (block.neurons or 0)
    return (ceil(made / d_head), *heads, ceil((width + hidden) / d_head)), rows, rows


def _prepare_staged(view: GraphView, conversion: Conversion) -> Conversion:
    """Scores are clamped at 2^60: where heads compute f(y) - y, that is proved up to there."""
    made = prepare_maskless(view, conversion)
    if not activation(made)[1]:
        return made
    return replace(made, program=replace(made.program, domain=min(made.program.domain, 2.0**59)))


def _prepare_whole(view: GraphView, conversion: Conversion) -> Conversion:
    """As form `compact` where the linear operators are not plain matrices, or as the options say."""
    known = with_projections(view, conversion)
    if known.projections is None or known.options.neurons == COMPACT:
        return prepare_compact(view, replace(known, form=COMPACT))
    if known.options.neurons == STAGED:
        return _prepare_staged(view, replace(known, form=STAGED))
    return prepare_maskless(view, known)


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form(LOCAL, "each query against its own key and bias keys", _local, lambda _, each: each, emit_local),
        Form(COMPACT, "the pattern over {self, bias tokens}", _compact, prepare_compact, emit_compact),
        Form("masked", "one attention sublayer under a mask", _square, prepare_masked, emit_masked),
        Form("maskless", "positions and -omega in W_QK, no mask", _square, prepare_maskless, emit_maskless),
        Form(STAGED, "three sublayers: linear, activation, linear", _staged, _prepare_staged, emit_staged),
        Form(WHOLE, "one stream for the network, all masks in W_QK", _square, _prepare_whole, emit_whole),
    )
}


def convert(view: GraphView, block: Block, options: Options) -> Conversion | Miss:
    """The decision about a block: its conversion in the form that the options name, or why there is none."""
    try:
        return FORMS[options.form].prepare(view, decide(view, block, options))
    except LostError as lost:
        return lost.miss

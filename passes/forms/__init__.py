"""Forms: ways to turn a head program into nodes. `FORMS` is the table."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from passes.conversion import Conversion, decide
from passes.forms import softmax
from passes.forms.local import emit_local
from passes.match.blocks import Block
from passes.options import COMPACT, LOCAL, STAGED, WHOLE, Options
from passes.programs.program import groups_of
from rewriter.graph.edit import Replacement
from rewriter.graph.view import GraphView, LostError, Miss


@dataclass(frozen=True)
class Form:
    """`prepare` completes a conversion during planning, and raises LostError where the form cannot take the block."""

    help: str
    heads: Callable[[Conversion, int], tuple[int, ...]]  # of each sublayer, which reads so many columns
    prepare: Callable[[GraphView, Conversion], Conversion]
    emit: Callable[[GraphView, Conversion], Replacement]


def _plain(conversion: Conversion, _: int) -> tuple[int, ...]:
    return (conversion.heads or 0,)


def _grouped(conversion: Conversion, _: int) -> tuple[int, ...]:
    return ((conversion.block.neurons or 0) * len(groups_of(conversion.program)),)


def _staged(conversion: Conversion, width: int) -> tuple[int, ...]:
    program, in_place = softmax.activation(conversion)
    neurons, d_head = conversion.block.neurons or 0, conversion.options.d_head
    made = neurons * (1 if conversion.block.gate == conversion.block.value else 2)
    hidden = made if in_place else made + neurons
    return ceil(made / d_head), neurons * len(groups_of(program)), ceil((width + hidden) / d_head)


def _prepare_staged(view: GraphView, conversion: Conversion) -> Conversion:
    """Scores are clamped at 2^60: where heads compute f(y) - y, that is proved up to there."""
    made = softmax.prepare_rows(view, conversion)
    if not softmax.activation(made)[1]:
        return made
    return replace(made, program=replace(made.program, domain=min(made.program.domain, 2.0**59)))


def _prepare_whole(view: GraphView, conversion: Conversion) -> Conversion:
    """As form `compact` where the linear operators are not plain matrices, or as the options say."""
    known = softmax.with_projections(view, conversion)
    form = COMPACT if known.projections is None else known.options.neurons
    if form == "square":
        return softmax.prepare_rows(view, known)
    return FORMS[form].prepare(view, replace(known, form=form))


FORMS: dict[str, Form] = {
    LOCAL: Form("each query against its own key and bias keys", _plain, lambda _, each: each, emit_local),
    COMPACT: Form("the pattern over {self, bias tokens}", _grouped, softmax.prepare_compact, softmax.emit_compact),
    "masked": Form("one attention sublayer under a mask", _grouped, softmax.prepare_rows, softmax.emit_rows),
    "maskless": Form("positions and -omega in W_QK, no mask", _grouped, softmax.prepare_rows, softmax.emit_rows),
    STAGED: Form("three sublayers: linear, activation, linear", _staged, _prepare_staged, softmax.emit_staged),
    WHOLE: Form("one stream for the network, all masks in W_QK", _grouped, _prepare_whole, softmax.emit_whole),
}


def convert(view: GraphView, block: Block, options: Options) -> Conversion | Miss:
    """The decision about a block: its conversion in the form that the options name, or why there is none."""
    try:
        return FORMS[options.form].prepare(view, decide(view, block, options))
    except LostError as lost:
        return lost.miss

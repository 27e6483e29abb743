"""Forms: ways to turn a head program into nodes. One file per form; `FORMS` is the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from passes.conversion import Conversion, decide
from passes.forms.compact.form import emit_compact, prepare_compact
from passes.forms.local import emit_local, prepare_local
from passes.forms.masked import emit_masked, prepare_masked
from passes.forms.maskless import emit_maskless, prepare_maskless
from passes.forms.staged import emit_staged, prepare_staged
from passes.match.blocks import Block
from passes.match.linear import Miss
from passes.options import Accuracy
from rewriter.graph.edit import Replacement
from rewriter.graph.view import GraphView


@dataclass(frozen=True)
class Form:
    """One form.

    Attributes:
        emit: makes the nodes for a conversion.
        prepare: completes a conversion during planning, or says why the form cannot take the block.
        factors_offsets: whether it takes the offsets of logits out of the exponentials (docs/decisions/0003);
            otherwise it writes softmax as the paper does.
        quick: whether it takes programs with the fewest operations; otherwise those with the fewest heads and keys,
            which cost it queries, patterns and bias tokens.
    """

    emit: Callable[[GraphView, Conversion], Replacement]
    prepare: Callable[[GraphView, Conversion], Conversion | Miss]
    factors_offsets: bool = False
    quick: bool = False


FORMS: dict[str, Form] = {
    "local": Form(emit_local, prepare_local, factors_offsets=True, quick=True),
    "compact": Form(emit_compact, prepare_compact),
    "masked": Form(emit_masked, prepare_masked),
    "maskless": Form(emit_maskless, prepare_maskless),
    "staged": Form(emit_staged, prepare_staged),
}
"""Form name to form."""


def choose(
    view: GraphView,
    block: Block,
    form: str,
    accuracy: Accuracy,
    *,
    inline: bool,
    quick: bool = True,
    spelling: str = "fused",
) -> Conversion | Miss:
    """The conversion of a block with the program that suits a form, before `Form.prepare`.

    Args:
        view: the graph that contains the block.
        block: the block.
        form: a key of `FORMS`.
        accuracy: how close the program must be.
        inline: write the heads out instead of calling a model-local function.
        quick: whether a form that takes programs with the fewest operations gets them.
        spelling: a member of `passes.options.SPELLINGS`.
    """
    taken = FORMS["compact" if spelling == "softmax" else form]
    return decide(
        block,
        form=form,
        factored=taken.factors_offsets,
        inline=inline,
        opset=view.opsets.get("", 1),
        accuracy=accuracy,
        quick=quick and taken.quick,
    )

"""The output of `rewrite inspect`: the blocks, their size, and the cost of each form."""

from __future__ import annotations

from collections import Counter

from rich.text import Text

from passes.accounting import Accounting, BlockAccount, FormCost
from passes.forms import FORMS
from rewriter.api.inspection import Inspection
from rewriter.report.sections import block_parts
from rewriter.report.tables import Cell, Column, Row, Table, columns
from rewriter.report.terminal.console import Console, plain, show_verdict
from rewriter.text import size


def show_inspection(found: Inspection, console: Console) -> None:
    """Print what `inspect` found."""
    for part in block_parts(found.report):
        console.part(part)
    for note in found.report.notes:
        console.line(f"note: {note}", "yellow")
    accounting = found.accounting
    if accounting.blocks:
        console.print(blocks(accounting))
        share = f"{100 * accounting.share:.1f} %"
        console.print(forms(accounting))
        for line in refusals(accounting):
            console.print(line)
        console.print(plain(f"these blocks take {share} of the multiply-adds of linear operators per token"))
    if accounting.head_dimension is not None:
        heads = "" if accounting.attention_heads is None else f"{accounting.attention_heads} heads per sublayer, "
        console.print(plain(f"the model's own attention: {heads}head dimension {accounting.head_dimension}"))
    console.print(plain(f"purity once converted, nonlinearities that remain: {accounting.purity}"))
    for activation, count in already(found):
        console.print(plain(f"{count} {'MLP is' if count == 1 else 'MLPs are'} attention already: {activation}"))
    if not found.report.converted:
        show_verdict(console, found.report)


def already(found: Inspection) -> list[tuple[str, int]]:
    """The activations of blocks that an earlier run made heads, and how many have each; the most frequent first."""
    made = (row.activation for row in found.report.left if row.reason == "it is attention heads already")
    return Counter(made).most_common()


def blocks(accounting: Accounting) -> Table:
    """The size of the blocks, and their heads."""
    heads = (
        *(Column("block", "name"), *columns("count", "d_model", "d_ff", "parameters")),
        *(Column("share", "share"), *columns("count", "heads", "three sublayers")),
    )
    title = "Accounting: heads of form local, and of three sublayers (W1, activation, W2)"
    return Table(title, heads, tuple(map(_block, accounting.blocks)))


def _block(each: BlockAccount) -> Row:
    staged = None if each.staged is None else Cell(sum(each.staged), " + ".join(f"{count:,}" for count in each.staged))
    return (each.name, each.d_model, each.d_ff, each.parameters, each.share, each.heads, staged)


def forms(accounting: Accounting) -> Table:
    """The cost of a block in each form; blocks of equal cost share a row."""
    title = f"Forms: one block at {accounting.tokens:,} tokens"
    heads = (
        Column("form"),
        *columns("count", "blocks", "heads", "keys", "pattern of all heads"),
        Column("in the graph"),
    )
    found = Counter(form for block in accounting.blocks for form in block.forms)
    return Table(title, heads, tuple(_form(form, blocks) for form, blocks in found.items()))


def _form(form: FormCost, blocks: int) -> Row:
    heads = " + ".join(f"{number:,}" for number in form.heads)
    return (form.form, blocks, heads, form.keys, size(form.pattern_bytes), FORMS[form.form].help)


def refusals(accounting: Accounting) -> list[Text]:
    """Forms that cannot take some of the blocks at this sequence length, and why."""
    reasons = Counter(reason for block in accounting.blocks for reason in block.refused)
    return [
        plain(f"form {form} cannot take {number} of the blocks: {reason}", "yellow")
        for (form, reason), number in reasons.items()
    ]

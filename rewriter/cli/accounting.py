"""What `rewrite inspect` prints: the blocks, what they weigh, and what each form would cost."""

from __future__ import annotations

from collections import Counter

from rich.table import Table
from rich.text import Text

from passes.accounting import Accounting
from rewriter.api import Inspection
from rewriter.report.terminal.console import Console
from rewriter.report.terminal.layout import add_columns, count, new_table, plain, size


def show_inspection(found: Inspection, console: Console) -> None:
    """Print what `inspect` found."""
    console.blocks(found.report)
    accounting = found.accounting
    if accounting.blocks:
        console.print(account_table(accounting))
        share = f"{100 * accounting.share:.1f} %"
        console.print(forms_table(accounting))
        for line in refusals(accounting):
            console.print(line)
        console.print(plain(f"these blocks take {share} of the multiply-adds of linear operators per token"))
    if accounting.head_dimension is not None:
        heads = "" if accounting.attention_heads is None else f"{accounting.attention_heads} heads per sublayer, "
        console.print(plain(f"the model's own attention: {heads}head dimension {accounting.head_dimension}"))
    console.print(plain(f"purity once converted, nonlinearities that remain: {accounting.purity}"))
    if not found.report.converted:
        console.nothing(found.report)


def account_table(accounting: Accounting) -> Table:
    """What the blocks weigh, and their heads."""
    table = new_table("Accounting: heads of form local, and of three sublayers (W1, activation, W2)")
    add_columns(table, text=("block",))
    add_columns(table, numbers=("d_model", "d_ff", "parameters", "share", "heads", "three sublayers"))
    for block in accounting.blocks:
        staged = "-" if block.staged is None else " + ".join(f"{number:,}" for number in block.staged)
        heads = "-" if block.heads is None else f"{block.heads:,}"
        sizes = (count(block.d_model), count(block.d_ff), f"{block.parameters:,}", f"{100 * block.share:.1f} %")
        table.add_row(plain(block.name), *sizes, heads, staged)
    return table


def forms_table(accounting: Accounting) -> Table:
    """What a block would cost in each form; blocks of equal cost share a row."""
    setting = accounting.setting
    table = new_table(
        f"Forms: one block at {setting.tokens:,} tokens; largest pattern at most {setting.max_pattern_mb:g} MiB"
    )
    add_columns(table, text=("form",))
    add_columns(
        table, numbers=("blocks", "heads", "head dim", "rows x width", "keys", "weights reused", "weights added")
    )
    add_columns(table, numbers=("largest pattern", "peak memory"))
    rows = Counter(form for block in accounting.blocks for form in block.forms)
    for form, blocks in rows.items():
        heads = " + ".join(f"{number:,}" for number in form.heads)
        counts = (f"{form.keys:,}", f"{form.parameters_reused:,}", f"{form.parameters_added:,}")
        memory = (size(form.pattern_bytes), size(form.peak_bytes))
        shape = f"{form.rows:,} x {form.width:,}"
        table.add_row(form.form, str(blocks), heads, str(form.head_dimension), shape, *counts, *memory)
    return table


def refusals(accounting: Accounting) -> list[Text]:
    """Forms that do not take some blocks at that length, with the figures."""
    reasons = Counter(reason for block in accounting.blocks for reason in block.refused)
    return [
        plain(f"form {form} does not take {number} of the blocks: {reason}", "yellow")
        for (form, reason), number in reasons.items()
    ]

"""The tables and lines that a person reads on the terminal, from a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rich.text import Text

from rewriter.proof.statistics import OutputStats
from rewriter.proof.tested import BlockTest
from rewriter.proof.validate import Validation
from rewriter.report.report import BlockRow, Report, Shape
from rewriter.report.table import Cell, Column, Row, Table, columns
from rewriter.report.tables import converted_table, operator_table, proof_table
from rewriter.report.terminal.layout import plain
from rewriter.text import size

_MOST_OPERATORS = 14


HOW = {"local": ": fused softmax over {self, bias tokens}"}
"""What a form does, where its name does not say it."""


def converted(rows: tuple[BlockRow, ...], form: str) -> Table:
    """The blocks that become heads."""
    return replace(converted_table(rows), title=f"Blocks to attention heads, form {form}{HOW.get(form, '')}")


def left(rows: tuple[BlockRow, ...]) -> Table:
    """The candidates that stay, with reasons."""
    heads = columns("text", "block", "activation", "reason")
    return Table("Left as they were", heads, tuple((row.name, row.activation or "?", _reason(row)) for row in rows))


def _reason(row: BlockRow) -> str:
    reason = row.reason or ""
    return f"{reason} ({row.node})" if row.node and "'" in row.node and row.node not in reason else reason


def changes(before: Shape, after: Shape, validation: Validation | None) -> Table:
    """Operators, nodes, size and load time, before and after."""
    table = operator_table(before.operators, after.operators)
    totals: list[Row] = [("nodes", before.nodes, after.nodes, after.nodes - before.nodes)]
    if after.bytes:
        sizes = (Cell(each.bytes, size(each.bytes)) for each in (before, after))
        totals.append(("size", *sizes, Cell(None, f"{after.bytes - before.bytes:+,d} B")))
    for name, proof in (validation.providers if validation else {}).items():
        old, new = (seconds * 1e3 for seconds in proof.load_seconds)
        times = (f"{old:.0f} ms", f"{new:.0f} ms", f"{new - old:+.0f} ms")
        totals.append((f"load time, {name}", *times))
    heads = (Column(""), *table.columns[1:])
    return Table("Operators", heads, table.rows[:_MOST_OPERATORS], tuple(totals))


def outputs(validation: Validation, *, verbose: bool) -> Table:
    """Rewritten against original, output by output."""
    table = proof_table("Proof, end to end: rewritten against original", validation)
    relative = ("max rel",) if verbose else ()
    shown = ("provider", "output", "max abs", "mean abs", "p99 abs", *relative, "1 - cosine", "top-1")
    return table.pick(*shown, "passes at atol = rtol")


def tests(blocks: tuple[BlockTest, ...]) -> Table:
    """The blocks that are tested, not proved."""
    heads = (Column("block", "name"), Column("sizes run"), *columns("error", "error in float64", "allowed"))
    return Table("Blocks that are tested, not proved", heads, tuple(map(_test, blocks)))


def _test(each: BlockTest) -> Row:
    return (Cell(each.name, style="" if each.passed else "bad"), ", ".join(each.sizes), each.error, each.allowed)


def remarks(report: Report) -> list[Text]:
    """The lines below the verdict's tables: inputs, the ratio of errors, how much of the rule's room is used."""
    validation = report.validation
    if validation is None:
        return []
    lines = [plain(f"inputs: {'; '.join(validation.cases)}")]
    for provider, proof in validation.providers.items():
        if proof.error_ratio is not None:
            ratio = f"{proof.error_ratio:.2f}"
            text = f"error against float64 on {provider}, rewritten over original: {ratio}"
            lines.append(plain(text))
        used = max((each.error / each.allowed for each in proof.compared.values() if each.allowed), default=0.0)
        lines.append(plain(f"{used:.1%} of what the rule allows is used on {provider}"))
        if proof.control:
            lines.append(plain(f"control, the original on {provider} against the CPU: {_differences(proof.control)}"))
        if proof.cpu_nodes_of_original:
            lines.append(plain(f"{proof.cpu_nodes_of_original} nodes of the original run on the CPU on {provider} too"))
    return lines


def warnings(report: Report) -> list[Text]:
    """What limits the proof: skipped inputs, parts of the model at a time, a missing reference, nodes on the CPU."""
    validation = report.validation
    if validation is None:
        return []
    lines = [plain(f"input skipped, because the original rejects it: {text}", "yellow") for text in validation.skipped]
    lines += [plain(note, "yellow") for note in validation.notes]
    if validation.by_blocks:
        before, after = validation.segments
        lines.append(
            plain(
                "neither model was loaded as a whole: they ran in consecutive segments "
                f"({before} of the original, {after} of the rewritten); onnxruntime optimised within these",
                "yellow",
            )
        )
    for provider, proof in validation.providers.items():
        if proof.cpu_nodes:
            lines.append(plain(f"fell back to the CPU on {provider}: {', '.join(proof.cpu_nodes)}", "yellow"))
        if proof.cpu_nodes_of_original is None:
            lines.append(plain(f"this onnxruntime cannot tell which nodes {provider} left to the CPU", "yellow"))
    return lines


def _differences(outputs: Mapping[str, OutputStats]) -> str:
    return ", ".join(f"{name} differs by {stats.max_abs:.1e}" for name, stats in outputs.items())

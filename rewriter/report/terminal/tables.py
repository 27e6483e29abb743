"""The tables and lines that a person reads on the terminal, from a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rich.text import Text

from rewriter.proof.blocks.block import BlockProof
from rewriter.proof.end_to_end import ProviderProof
from rewriter.proof.statistics import OutputStats
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


def proofs(blocks: tuple[BlockProof, ...]) -> Table:
    """The proof block by block."""
    over, block = Column("over original", "ratio"), Column("block", "name")
    heads = (block, *columns("error", "heads, in float64", "heads"), over, Column("whole block", "error"), over)
    return Table(
        "Proof, block by block: largest errors against float64, and over those of the original",
        heads,
        tuple(map(_proof, blocks)),
    )


def _proof(each: BlockProof) -> Row:
    heads = (each.exact_error, each.region_error, each.region_ratio)
    return (Cell(each.name, style="" if each.passed else "bad"), *heads, each.block_error, each.block_ratio)


QUICK = "every block was proved, but the model end to end on two inputs only; prove it without --quick to be sure"
"""What a quick proof is."""


def remarks(report: Report) -> list[Text]:
    """The lines below the proof: inputs, the ratio of errors, and what certified errors amount to."""
    validation = report.validation
    if validation is None:
        return []
    lines = [plain(f"inputs: {'; '.join(validation.cases)}")]
    for provider, proof in validation.providers.items():
        if proof.error_ratio is not None:
            ratio = f"{proof.error_ratio:.2f}"
            text = f"error against float64 on {provider}, rewritten over original: {ratio}"
            lines.append(plain(f"{text} (reference: {validation.reference})"))
        if proof.allowances:
            certified = max(each.certified / (each.scale or 1.0) for each in proof.allowances.values())
            used = max(each.rewritten / (each.allowed or 1.0) for each in proof.allowances.values())
            lines.append(
                plain(
                    f"certified errors amount to at most {certified:.1e} of an output's largest value on {provider}; "
                    f"{used:.0%} of the allowed error is used"
                )
            )
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
    if validation.quick:
        lines.append(plain(f"quick proof: {QUICK}", "yellow"))
    if validation.by_blocks:
        before, after = validation.segments
        lines.append(
            plain(
                "proved block by block: neither model was loaded as a whole; end to end they ran in consecutive "
                f"segments ({before} of the original, {after} of the rewritten); onnxruntime optimised within these",
                "yellow",
            )
        )
    for provider, proof in validation.providers.items():
        if proof.error_ratio is None:
            lines.append(
                plain(f"on {provider}: {validation.reference}; the original stands in for it{_moved(proof)}", "yellow")
            )
        if proof.distrusted:
            text = f"{proof.doubt}; the original stands in for it{_moved(proof)}"
            names = ", ".join(proof.distrusted)
            lines.append(plain(f"on {provider}, float64 cannot serve as the truth for {names}: {text}", "yellow"))
        if proof.cpu_nodes:
            lines.append(plain(f"fell back to the CPU on {provider}: {', '.join(proof.cpu_nodes)}", "yellow"))
        if proof.cpu_nodes_of_original is None:
            lines.append(plain(f"this onnxruntime cannot tell which nodes {provider} left to the CPU", "yellow"))
    return lines


def _moved(proof: ProviderProof) -> str:
    """How far rounding moves the original where it stands in for the truth, as a share of its outputs."""
    share = max(proof.stand_in.values(), default=0.0)
    if share < _AMPLIFIED:
        return ""
    return f", although rounding alone moves its outputs by up to {share:.1%}; the blocks are proved by themselves"


_AMPLIFIED = 1e-4
"""From this share of an output on, the model amplifies rounding, and the report says so."""


def _differences(outputs: Mapping[str, OutputStats]) -> str:
    return ", ".join(f"{name} differs by {stats.max_abs:.1e}" for name, stats in outputs.items())


def at_infinity(blocks: tuple[BlockProof, ...]) -> list[Text]:
    """Results of heads at infinite pre-activations, with blocks that agree in one line."""
    found: dict[str, list[str]] = {}
    for block in blocks:
        for text in block.infinite:
            found.setdefault(text, []).append(block.name)
    return [
        plain(
            f"infinite pre-activations: {text} ({_some(names)}); all finite ones agree within the certified error",
            "yellow",
        )
        for text, names in found.items()
    ]


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

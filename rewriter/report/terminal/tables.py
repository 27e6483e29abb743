"""Tables of a report for the terminal.

Names from a model are shown as plain text, never as markup or control characters.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from rewriter.proof.blocks.block import BlockProof
from rewriter.proof.end_to_end import ProviderProof
from rewriter.proof.statistics import OutputStats
from rewriter.proof.validate import Validation
from rewriter.report.report import BlockRow, Report, Shape
from rewriter.report.terminal.layout import add_columns as _columns
from rewriter.report.terminal.layout import count, plain, size
from rewriter.report.terminal.layout import new_table as _table

_MOST_OPERATORS = 14


def converted_table(rows: tuple[BlockRow, ...], form: str) -> Table:
    """The blocks that are converted."""
    table = _table(f"Blocks to attention heads, form {form}")
    _columns(table, text=("block", "linear operators", "activation", "program"))
    _columns(table, numbers=("heads", "bias tokens", "certified error"))
    for row in rows:
        error = "exact" if row.exact and not row.max_error else f"{row.max_error or 0.0:.1e}"
        cells = (row.name, _operators(row), row.activation, row.program or "")
        table.add_row(*map(plain, cells), count(row.heads), str(row.bias_tokens), error)
    return table


def left_table(rows: tuple[BlockRow, ...]) -> Table:
    """The candidates that are not converted, with reasons."""
    table = _table("Left as they were")
    _columns(table, text=("block", "activation", "reason"))
    for row in rows:
        reason = row.reason or ""
        if row.node and "'" in row.node and row.node not in reason:
            reason = f"{reason} ({row.node})"
        table.add_row(*map(plain, (row.name, row.activation or "?", reason)))
    return table


def change_table(before: Shape, after: Shape, validation: Validation | None) -> Table:
    """Operators, nodes, size and load time, before and after."""
    table = _table("Operators")
    _columns(table, text=("",), numbers=("before", "after", "change"))
    for name, old, new in _operator_changes(before, after):
        table.add_row(plain(name), str(old), str(new), f"{new - old:+d}")
    table.add_section()
    table.add_row("nodes", str(before.nodes), str(after.nodes), f"{after.nodes - before.nodes:+d}")
    if after.bytes:
        table.add_row("size", size(before.bytes), size(after.bytes), f"{after.bytes - before.bytes:+,d} B")
    for name, proof in (validation.providers if validation else {}).items():
        old_ms, new_ms = (seconds * 1e3 for seconds in proof.load_seconds)
        table.add_row(f"load time, {name}", f"{old_ms:.0f} ms", f"{new_ms:.0f} ms", f"{new_ms - old_ms:+.0f} ms")
    return table


def output_table(validation: Validation, *, verbose: bool) -> Table:
    """Rewritten against original, output by output."""
    table = _table("Proof, end to end: rewritten against original")
    _columns(table, text=("provider", "output"), numbers=("max abs", "mean abs", "p99 abs"))
    _columns(table, numbers=("max rel",) if verbose else ())
    _columns(table, numbers=("1 - cosine", "top-1", "passes at atol = rtol"))
    for provider, proof in validation.providers.items():
        for name, stats in proof.outputs.items():
            numbers = [f"{value:.1e}" for value in (stats.max_abs, stats.mean_abs, stats.p99_abs)]
            numbers += [f"{stats.max_rel:.1e}"] if verbose else []
            cosine = "-" if stats.cosine is None else f"{max(1.0 - stats.cosine, 0.0):.0e}"
            ranked = stats.top1 is not None and any(word in name.lower() for word in ("logit", "score", "prob"))
            top1 = f"{100 * stats.top1:.2f} %" if ranked and stats.top1 is not None else "-"
            table.add_row(provider, plain(name), *numbers, cosine, top1, f"{stats.min_tolerance:.1e}")
    return table


def block_table(proofs: tuple[BlockProof, ...]) -> Table:
    """The proof block by block."""
    table = _table("Proof, block by block: largest errors against float64, and over those of the original")
    _columns(table, text=("block",))
    _columns(table, numbers=("heads, in float64", "heads", "over original", "whole block", "over original"))
    for proof in proofs:
        exact = "-" if proof.exact_error is None else f"{proof.exact_error:.1e}"
        whole = "-" if proof.block_error is None else f"{proof.block_error:.1e}"
        ratio = "-" if proof.block_ratio is None else f"{proof.block_ratio:.2f}"
        heads, heads_ratio = f"{proof.region_error:.1e}", f"{proof.region_ratio:.2f}"
        table.add_row(plain(proof.name, "" if proof.passed else "red"), exact, heads, heads_ratio, whole, ratio)
    return table


def remarks(report: Report) -> list[Text]:
    """The lines below the proof: inputs, skipped inputs, the ratio of errors."""
    validation = report.validation
    if validation is None:
        return []
    lines = [plain(f"inputs: {'; '.join(validation.cases)}")]
    lines += [plain(f"input skipped, because the original rejects it: {text}", "yellow") for text in validation.skipped]
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
        else:
            ratio = f"{proof.error_ratio:.2f}"
            lines.append(
                plain(
                    f"error against float64 on {provider}, rewritten over original: {ratio} "
                    f"(reference: {validation.reference})"
                )
            )
        if proof.allowances:
            certified = max(each.certified / (each.scale or 1.0) for each in proof.allowances.values())
            used = max(each.rewritten / (each.allowed or 1.0) for each in proof.allowances.values())
            lines.append(
                plain(
                    f"certified errors amount to at most {certified:.1e} of an output's largest value on {provider}; "
                    f"{used:.0%} of the allowed error is used"
                )
            )
        if proof.distrusted:
            text = f"{proof.doubt}; the original stands in for it{_moved(proof)}"
            names = ", ".join(proof.distrusted)
            lines.append(plain(f"on {provider}, float64 cannot serve as the truth for {names}: {text}", "yellow"))
        lines += _placement(provider, proof)
    return lines + _at_infinity(validation.blocks)


def _moved(proof: ProviderProof) -> str:
    """How far rounding moves the original where it stands in for the truth, as a share of its outputs."""
    share = max(proof.stand_in.values(), default=0.0)
    if share < _AMPLIFIED:
        return ""
    return f", although rounding alone moves its outputs by up to {share:.1%}; the blocks are proved by themselves"


_AMPLIFIED = 1e-4
"""From this share of an output on, the model amplifies rounding, and the report says so."""


def _placement(provider: str, proof: ProviderProof) -> list[Text]:
    """Nodes that a provider left to the CPU, and how far the original itself differs between the two."""
    lines = [plain(f"control, the original on {provider} against the CPU: {_differences(proof.control)}")]
    lines = lines if proof.control else []
    if proof.cpu_nodes:
        lines.append(plain(f"fell back to the CPU on {provider}: {', '.join(proof.cpu_nodes)}", "yellow"))
    if proof.cpu_nodes_of_original is None:
        lines.append(plain(f"this onnxruntime cannot tell which nodes {provider} left to the CPU", "yellow"))
    elif proof.cpu_nodes_of_original:
        lines.append(plain(f"{proof.cpu_nodes_of_original} nodes of the original run on the CPU on {provider} too"))
    return lines


def _differences(outputs: Mapping[str, OutputStats]) -> str:
    return ", ".join(f"{name} differs by {stats.max_abs:.1e}" for name, stats in outputs.items())


def _at_infinity(blocks: tuple[BlockProof, ...]) -> list[Text]:
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


def _operators(row: BlockRow) -> str:
    """`MatMul 32x128 -> 128x32` if both operators are of the same kind, otherwise both in full."""
    kind, _, size = row.first.partition(" ")
    other, _, second = row.second.partition(" ")
    if not row.second:
        return row.first
    return f"{kind} {size} -> {second}" if kind == other and size and second else f"{row.first} -> {row.second}"


def _operator_changes(before: Shape, after: Shape) -> list[tuple[str, int, int]]:
    """Operators whose count changed, the largest changes first, then by name."""
    names = sorted(set(before.operators) | set(after.operators))
    rows = [(name, before.operators.get(name, 0), after.operators.get(name, 0)) for name in names]
    changed = [row for row in rows if row[1] != row[2]]
    return sorted(changed, key=lambda row: (-abs(row[2] - row[1]), row[0]))[:_MOST_OPERATORS]

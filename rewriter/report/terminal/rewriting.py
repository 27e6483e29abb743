"""What `rewrite` prints: a few lines with labels that fit 80 columns, however many blocks there are; with -v tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rewriter.errors import ExitStatus
from rewriter.proof.certificate.certify import Certificate
from rewriter.proof.statistics import OutputStats
from rewriter.proof.tested import BlockTest
from rewriter.proof.validate import Validation
from rewriter.report.report import BlockRow, Report, Shape
from rewriter.report.tables import (
    Cell,
    Column,
    Row,
    Table,
    columns,
    converted_table,
    folded,
    operator_table,
    proof_table,
    region_table,
    why_not,
    written,
)
from rewriter.report.terminal.console import Console
from rewriter.text import clean, counted, size

_FEW_FAILURES = 5
_MOST_OPERATORS = 14
_HOW = {"local": ": fused softmax over {self, bias tokens}"}
"""What a form does, where its name does not say it."""
_LABEL = 10
_STEPS = {**{each: each for each in ("load", "plan", "calibrate", "apply", "save")}, "validate": "proof"}


def show(console: Console, report: Report, *, proved: bool, planned_only: bool) -> None:
    """Print everything about a rewriting: a few lines, with -v tables; and the verdict."""
    if console.verbose and not console.quiet:
        show_blocks(console, report)
        if report.after is not None:
            console.print(changes(report.before, report.after, report.validation))
        _show_proof(console, report)
    elif not console.quiet:
        _show_summary(console, report)
    seconds = report.seconds.get("total", 0.0)
    if report.exit_status is ExitStatus.NOTHING_TO_CONVERT:
        say_nothing(console, report)
    elif planned_only:
        console.line(f"PLANNED  {report.what} in {report.model}; nothing was written", always=True)
    elif report.exit_status is ExitStatus.VALIDATION_FAILED:
        _show_failures(console, report)
        console.line(f"FAILED  {report.what}: the proof failed, nothing was written", "bold red", always=True)
    elif not proved:
        text = f"NOT PROVED  {report.what}, written to {report.output} in {seconds:.1f} s"
        console.line(text, "yellow", always=True)
    else:
        validation = report.validation
        providers = ", ".join(validation.providers) if validation else ""
        how = "certified for every input" if validation and validation.certified else "tested, not certified"
        text = f"PASSED  {report.what}, {how}, run on {providers}; written to {report.output} in {seconds:.1f} s"
        console.line(text, "bold green", always=True)


def show_model(console: Console, name: str, report: Report) -> None:
    """Print what became of one model of a folder, without a verdict."""
    if console.quiet:
        return
    console.line(name, "bold")
    if console.verbose:
        show_blocks(console, report)
        _show_proof(console, report)
    elif report.converted:
        _show_summary(console, report)
    else:
        console.line("copied    as it is: there is no MLP block to convert")
    _show_failures(console, report)


def show_blocks(console: Console, report: Report) -> None:
    """Print the converted blocks, the other candidates, and notes."""
    if report.converted:
        title = f"Blocks to attention heads, form {report.form}{_HOW.get(report.form, '')}"
        console.print(replace(converted_table(report.converted), title=title))
    if report.left:
        heads = columns("text", "block", "activation", "reason")
        rows = tuple((row.name, row.activation or "?", _reason(row)) for row in report.left)
        console.print(Table("Left as they were", heads, rows))
    for note in report.notes:
        console.line(f"note: {note}", "yellow")


def say_nothing(console: Console, report: Report) -> None:
    """Say that there is nothing to convert."""
    where = "see -v" if console.quiet else "reasons above"
    why = f"{counted(len(report.left), 'candidate')} left, {where}" if report.left else "no candidate was found"
    console.line(f"NOTHING TO CONVERT  in {report.model}: {why}", "yellow", always=True)


def _show_summary(console: Console, report: Report) -> None:
    """The few lines that most people need."""
    for text in summary(report, console.width):
        console.line(text)
    for warning in warnings(report):
        console.line(warning, "yellow")
    if report.validation is not None and any(not block.passed for block in report.validation.blocks):
        console.print(tests_table(report.validation.blocks))


def _show_proof(console: Console, report: Report) -> None:
    validation = report.validation
    if validation is None:
        return
    table = proof_table("Proof, end to end: rewritten against original", validation)
    relative = ("max rel",) if console.verbose else ()
    shown = ("provider", "output", "max abs", "mean abs", *relative, "1 - cosine", "top-1")
    console.print(table.pick(*shown, "passes at atol = rtol"))
    if validation.certificate is not None and validation.certificate.regions:
        console.print(region_table(validation.certificate))
    if validation.blocks:
        console.print(tests_table(validation.blocks))
    for text in remarks(report):
        console.line(text)
    for text in warnings(report):
        console.line(text, "yellow")


def _show_failures(console: Console, report: Report) -> None:
    failures = report.validation.failures if report.validation is not None else ()
    shown = failures if console.verbose else failures[:_FEW_FAILURES]
    for failure in shown:
        console.line(failure, "red", always=True)
    if len(failures) > len(shown):
        console.line(f"and {len(failures) - len(shown)} more, -v shows them", "red", always=True)


def summary(report: Report, width: int) -> list[str]:
    """The lines, wrapped between words."""
    lines: list[str] = []
    for label, text in _entries(report):
        indent = " " * _LABEL
        lines += textwrap.wrap(
            clean(text),
            max(width, 40),
            initial_indent=label.ljust(_LABEL),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _entries(report: Report) -> Iterator[tuple[str, str]]:
    for number, text in enumerate(_converted(report.converted)):
        yield ("" if number else "blocks"), text
    if report.converted:
        yield "form", f"{report.form}{_HOW.get(report.form, '')}; heads = neurons x heads per neuron"
    for number, text in enumerate(_left(report.left)):
        yield ("" if number else "left"), text
    if report.validation is not None:
        yield from _verdict(report.validation)
    if report.after is not None:
        before, after = report.before, report.after
        sizes = f", {size(before.bytes)} -> {size(after.bytes)}" if after.bytes else ""
        yield "graph", f"{before.nodes:,} -> {after.nodes:,} nodes{sizes}"
    if report.files:
        yield "files", ", ".join(report.files)
    if report.after is not None:
        steps = [(_STEPS[step], seconds) for step, seconds in report.seconds.items() if step in _STEPS]
        yield "seconds", ", ".join(f"{step} {seconds:.1f}" for step, seconds in steps)
    for note in report.notes:
        yield "note", note


def _verdict(validation: Validation) -> Iterator[tuple[str, str]]:
    """What is proved, what is tested, and what the run showed."""
    if validation.certificate is not None:
        yield "proved", _proved(validation.certificate)
    if validation.blocks:
        sizes = ", ".join(dict.fromkeys(size for each in validation.blocks for size in each.sizes))
        yield "tested", f"{counted(len(validation.blocks), 'block')}, on inputs of {sizes} rows"
    outputs = [each for proof in validation.providers.values() for each in proof.outputs.values()]
    for number, text in enumerate(_outputs(outputs)):
        yield ("" if number else "outputs"), text
    ratios = [each.error_ratio for each in validation.providers.values() if each.error_ratio is not None]
    if ratios:
        cases = counted(len(validation.cases), "input")
        yield "accuracy", f"{max(ratios):.2f} times the original's own error against float64 on {cases}"


def _proved(certificate: Certificate) -> str:
    """What is proved for every input."""
    regions = certificate.regions
    if not certificate.certified:
        return f"nothing for every input ({why_not(certificate)})"
    if all(each.bound.exact for each in regions):
        within = "each activation equal"
    else:
        within = f"each activation within {certificate.worst:.2g} of max(1, |f|)"
    ends = sorted({each.bound.domain for each in regions if each.bound.domain is not None})
    reach = f", for |pre-activation| up to {ends[0]:g}" if ends else ""
    return f"for every input of every size, over the reals: {within}{reach}; all else identical"


def _converted(rows: Sequence[BlockRow]) -> Iterator[str]:
    alike: dict[tuple[str, str, int | None, int | None, float | None], list[BlockRow]] = {}
    for row in rows:
        alike.setdefault((row.activation, row.program or "", row.heads, row.bias_tokens, row.max_error), []).append(row)
    for (activation, program, heads, tokens, error), group in alike.items():
        each = "" if len(group) == 1 else f"{len(group)} blocks, each "
        count = "heads" if heads is None else f"{counted(heads, 'head')} over {counted(tokens or 0, 'bias token')}"
        name = "" if program == activation else f" by {program}"
        known = "measured to be within" if group[0].measured else "claimed to be within"
        sure = "exact" if group[0].exact else f"{known} {written(error, 'error')}"
        yield f"{folded(row.name for row in group)}: {each}{activation}{name} as {count}, {sure}"


def _left(rows: Sequence[BlockRow]) -> Iterator[str]:
    alike: dict[str, list[str]] = {}
    for row in rows:
        alike.setdefault(row.reason or "", []).append(row.name)
    for reason, names in alike.items():
        yield f"{folded(names)}: {reason}"


def _outputs(found: Sequence[OutputStats]) -> Iterator[str]:
    """One line for the outputs of one kind; the largest difference over them and over providers."""
    alike: dict[str, list[OutputStats]] = {}
    for each in found:
        alike.setdefault(re.sub(r"\d+", "#", each.name), []).append(each)
    for group in alike.values():
        names = list(dict.fromkeys(each.name for each in group))
        count = f"{counted(len(names), 'output')} " if len(names) > 1 else ""
        worst = max(group, key=lambda each: each.max_abs)
        ranked = [each.top1 for each in group if each.top1 is not None]
        top = f", top-1 {written(min(ranked), 'agreement')}" if ranked else ""
        yield f"{count}{folded(names)}: off by at most {written(worst.max_abs, 'error')}{top}"


# -- tables and lines of -v -----------------------------------------------------------------------------------------


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


def tests_table(blocks: tuple[BlockTest, ...]) -> Table:
    """The blocks that are tested, not proved."""
    heads = (Column("block", "name"), Column("sizes run"), *columns("error", "error in float64", "allowed"))
    return Table("Blocks that are tested, not proved", heads, tuple(map(_test, blocks)))


def _test(each: BlockTest) -> Row:
    return (Cell(each.name, style="" if each.passed else "bad"), ", ".join(each.sizes), each.error, each.allowed)


def remarks(report: Report) -> list[str]:
    """The lines below the verdict's tables: inputs, the ratio of errors, how much of the rule's room is used."""
    validation = report.validation
    if validation is None:
        return []
    lines = [f"inputs: {'; '.join(validation.cases)}"]
    for provider, proof in validation.providers.items():
        if proof.error_ratio is not None:
            ratio = f"{proof.error_ratio:.2f}"
            text = f"error against float64 on {provider}, rewritten over original: {ratio}"
            lines.append(text)
        used = max((each.error / each.allowed for each in proof.compared.values() if each.allowed), default=0.0)
        lines.append(f"{used:.1%} of what the rule allows is used on {provider}")
        if proof.control:
            lines.append(f"control, the original on {provider} against the CPU: {_differences(proof.control)}")
        if proof.cpu_nodes_of_original:
            lines.append(f"{proof.cpu_nodes_of_original} nodes of the original run on the CPU on {provider} too")
    return lines


def warnings(report: Report) -> list[str]:
    """What limits the proof: skipped inputs, parts of the model at a time, a missing reference, nodes on the CPU."""
    validation = report.validation
    if validation is None:
        return []
    lines = [f"input skipped, because the original rejects it: {text}" for text in validation.skipped]
    lines += validation.notes
    if validation.by_blocks:
        before, after = validation.segments
        lines.append(
            "neither model was loaded as a whole: they ran in consecutive segments "
            f"({before} of the original, {after} of the rewritten); onnxruntime optimised within these"
        )
    for provider, proof in validation.providers.items():
        if proof.cpu_nodes:
            lines.append(f"fell back to the CPU on {provider}: {', '.join(proof.cpu_nodes)}")
        if proof.cpu_nodes_of_original is None:
            lines.append(f"this onnxruntime cannot tell which nodes {provider} left to the CPU")
    return lines


def _differences(outputs: Mapping[str, OutputStats]) -> str:
    return ", ".join(f"{name} differs by {stats.max_abs:.1e}" for name, stats in outputs.items())

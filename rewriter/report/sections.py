"""What the report of a rewriting says, as sentences and tables: made once, for the terminal, pages and model cards."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from rewriter.proof.certificate.certify import Certificate
from rewriter.proof.statistics import OutputStats
from rewriter.proof.validate import ProviderRun, Validation
from rewriter.report.report import BlockRow, Report
from rewriter.report.tables import (
    Cell,
    Column,
    Row,
    Table,
    columns,
    converted_table,
    folded,
    operator_table,
    operators,
    output_table,
    region_table,
    why_not,
    written,
)
from rewriter.text import clean, counted, size

_MOST_FAILURES = 200
_PROVED = (
    "Over the reals, at every input of every size, each activation is within this bound of the original’s, over "
    "max(1, |f|); every other operator, weight and connection is the original’s. Rounding is not part of this "
    "statement."
)
_HOW = {"local": ": fused softmax over {self, bias tokens}"}
"""What a form does, where its name does not say it."""
_LABEL = 10
_STEPS = {**{each: each for each in ("load", "plan", "calibrate", "apply", "save")}, "validate": "proof"}

Part = str | Sequence[str] | Table
"""A paragraph, the entries of a list, or a table."""


def sections(report: Report) -> list[tuple[str, str, list[Part]]]:
    """Anchor, heading and parts of each section; what the report lacks, such as a proof, has none."""
    validation, after = report.proof, report.made
    proved = None if validation is None else validation.certificate
    found: dict[tuple[str, str], list[Part]] = {
        ("failures", "What failed"): list(_failures(report.problems)),
        ("proved", "Proved for every input"): [_PROVED, region_table(proved)] if proved and proved.regions else [],
        ("outputs", "Outputs"): [] if validation is None else [_output_by_output(validation)],
        ("blocks", "Blocks"): block_parts(report),
        ("operators", "Operators"): [] if after is None else [operator_table(report.before.operators, after.operators)],
        ("conditions", "Conditions"): list(_conditions(report)),
    }
    return [(*place, parts) for place, parts in found.items() if parts]


def block_parts(report: Report) -> list[Part]:
    """The blocks that become heads, and the other candidates."""
    tests = () if report.proof is None else report.proof.blocks
    title = f"Blocks to attention heads, form {report.form}"
    parts: list[Part] = [converted_table(title, report.converted, tests)] if report.converted else []
    if report.left:
        heads = (*columns("name", "block"), *columns("text", "reason", "activation"))
        heads += (Column("linear operators", "operators"), Column("where", "name"))
        rows = ((row.name, row.reason, row.activation or None, operators(row) or None, row.node) for row in report.left)
        parts.append(Table("Left as they were", heads, tuple(rows)).filled())
    return parts


def warnings(report: Report) -> list[str]:
    """What limits the proof: skipped inputs, parts of the model at a time, a missing reference, nodes on the CPU."""
    validation = report.proof
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


def _failures(failures: Sequence[str]) -> Iterator[Part]:
    if failures:
        yield failures[:_MOST_FAILURES]
    if len(failures) > _MOST_FAILURES:
        yield f"And {len(failures) - _MOST_FAILURES:,} more; the JSON report holds them all."


def _output_by_output(validation: Validation) -> Table:
    """Rewritten against original, output by output."""
    runs = [(name, each) for name, run in validation.providers.items() for each in run.outputs.values()]
    table = output_table("Rewritten against original, output by output", runs)
    return table.pick(*(each.name for each in table.columns if each.name != "abs at")).filled()


def _conditions(report: Report) -> Iterator[Part]:
    if report.proof is not None:
        yield "Inputs of the proof:"
        yield report.proof.cases
        yield provider_table(report.proof)
    yield _pairs("Time by step", "step", "time", {key: f"{value:.2f} s" for key, value in report.seconds.items()})
    if report.environment:
        yield _pairs("Made with", "what", "version", report.environment)


def provider_table(validation: Validation) -> Table:
    """One line per execution provider; the control is how far the original is there from itself on the CPU."""
    heads = (
        *(Column("provider"), Column("result"), Column("error over original's", "ratio")),
        *(Column("of what the rule allows", "share"), Column("control", "error")),
        *columns("count", "nodes of the original on the CPU", "load, original", "load, rewritten"),
    )
    rows = tuple(_provider(provider, run) for provider, run in validation.providers.items())
    return Table("Execution providers", heads, rows).filled()


def _provider(name: str, run: ProviderRun) -> Row:
    failed = len(run.failures)
    result = Cell(f"{failed} failed", style="bad") if failed else Cell("held", style="good")
    used = max((each.error / each.allowed for each in run.compared.values() if each.allowed), default=None)
    control = max((each.max_abs for each in run.control.values()), default=None)
    times = (Cell(value, f"{value:.2f} s") for value in run.load_seconds)
    return (name, result, run.error_ratio, used, control, run.cpu_nodes_of_original or None, *times)


def _pairs(title: str, label: str, value: str, pairs: Mapping[str, str]) -> Table:
    """Two columns of our own text."""
    rows = tuple((key, Cell(None, entry)) for key, entry in pairs.items())
    return Table(title, columns("text", label, value), rows)


# -- the few lines that most people need ----------------------------------------------------------------------------


def summary(report: Report, width: int) -> list[str]:
    """The lines, wrapped between words."""
    lines: list[str] = []
    for label, text in summary_lines(report):
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


def summary_lines(report: Report) -> Iterator[tuple[str, str]]:
    """The label and the text of each line; a line without label goes on with what the one before it began."""
    for number, text in enumerate(_converted(report.converted)):
        yield ("" if number else "blocks"), text
    if report.converted:
        yield "form", f"{report.form}{_HOW.get(report.form, '')}; heads = neurons x heads per neuron"
    for number, text in enumerate(_left(report.left)):
        yield ("" if number else "left"), text
    if report.proof is not None:
        yield from _verdict(report.proof)
    if report.made is not None:
        before, after = report.before, report.made
        sizes = f", {size(before.bytes)} -> {size(after.bytes)}" if after.bytes else ""
        yield "graph", f"{before.nodes:,} -> {after.nodes:,} nodes{sizes}"
    if report.files:
        yield "files", ", ".join(report.files)
    if report.made is not None:
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

"""What `rewrite` prints without `-v`: a few lines with labels that fit 80 columns, however many blocks there are."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from rewriter.proof.certificate.certify import Certificate
from rewriter.proof.statistics import OutputStats
from rewriter.proof.validate import Validation
from rewriter.report.folding import folded
from rewriter.report.report import BlockRow, Report
from rewriter.report.terminal.layout import written
from rewriter.report.terminal.tables import HOW
from rewriter.text import clean, counted, size

_LABEL = 10
_STEPS = {**{each: each for each in ("load", "plan", "calibrate", "apply", "save")}, "validate": "proof"}


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
        yield "form", f"{report.form}{HOW.get(report.form, '')}; heads = neurons x heads per neuron"
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
        return f"nothing for every input ({certificate.refusals[0].text})"
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

"""The contents of the page, section by section, as data for the template.

Long lists are truncated or folded here, so that the page of a model with a hundred blocks and thousands of candidates
opens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from rewriter.proof.statistics import OutputStats
from rewriter.proof.validate import Validation
from rewriter.report.details import Drawing
from rewriter.report.html import numbers
from rewriter.report.html.curves import error_figure, values_figure, weights_figure
from rewriter.report.html.histogram import Bars, histogram_figure
from rewriter.report.html.svg import Svg
from rewriter.report.html.tables import Shown, key_table, name
from rewriter.report.html.words import short
from rewriter.report.report import Report
from rewriter.report.table import Table
from rewriter.text import counted

MOST_HISTOGRAMS = 24
MOST_DRAWINGS = 12

_SHAREABLE = 1e-14
"""A drawn difference below this, relative to max(1, |f|), is float64's own rounding, not an error of the program."""


@dataclass(frozen=True)
class Key:
    """One entry of a legend: the CSS class of its sample, and its label."""

    style: str
    label: str


@dataclass(frozen=True)
class Plot:
    """A figure with its caption; `svg` is None if the caption alone says more than a drawing."""

    title: str
    caption: str
    svg: Svg | None
    legend: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Fact:
    """One key figure: its label, the number, and a remark."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class ProgramSection:
    """One head program: its names, a summary, its figures and its coefficients."""

    program: Shown
    activation: str
    summary: str
    plots: tuple[Plot, ...]
    tables: tuple[Table, ...]


def key_figures(report: Report) -> list[Fact]:
    """The numbers that matter most."""
    converted, candidates = len(report.converted), len(report.blocks)
    facts = []
    if candidates or report.validation is None:
        label = "blocks to convert" if converted and report.after is None else "blocks converted"
        facts.append(Fact(label, numbers.count(converted), f"of {counted(candidates, 'candidate')}"))
    if converted:
        heads = sum(row.heads or 0 for row in report.converted)
        tokens = sorted({row.bias_tokens for row in report.converted if row.bias_tokens})
        note = f"with {' or '.join(map(str, tokens))} bias token{'' if tokens == [1] else 's'} each" if tokens else ""
        facts.append(Fact("attention heads", numbers.count(heads), note))
    if report.validation is not None:
        facts += _proof_facts(report.validation)
    if report.after is not None:
        change = numbers.change(report.after.nodes - report.before.nodes)
        facts.append(Fact("nodes", numbers.count(report.after.nodes), f"{change} against the original"))
    else:
        facts.append(Fact("nodes", numbers.count(report.before.nodes), "in the original"))
    if report.after is not None and report.after.bytes:
        facts.append(Fact("file size", numbers.size(report.after.bytes), f"was {numbers.size(report.before.bytes)}"))
    return facts


def _proof_facts(validation: Validation) -> list[Fact]:
    ratios = [proof.error_ratio for proof in validation.providers.values() if proof.error_ratio is not None]
    stats = [each for proof in validation.providers.values() for each in proof.outputs.values()]
    facts = []
    if ratios:
        facts.append(
            Fact("error over original’s", f"{numbers.small(max(ratios), 3)} ×", "largest distances from float64")
        )
    if stats:
        largest = max(each.max_abs for each in stats)
        tolerance = max(each.min_tolerance for each in stats)
        note = f"passes at atol = rtol = {numbers.small(tolerance)}" if isfinite(tolerance) else "no tolerance passes"
        facts.append(Fact("largest difference", numbers.small(largest), note))
    return facts


# -- errors ----------------------------------------------------------------------------------------------------------


def histograms(validation: Validation) -> tuple[list[Plot], int]:
    """Histograms of the outputs, the worst first, and the number of those that were omitted."""
    every = [
        (provider, key, stats)
        for provider, proof in validation.providers.items()
        for key, stats in proof.outputs.items()
        if sum(stats.ulps) or sum(stats.rewritten_ulps)
    ]
    every.sort(key=lambda entry: -entry[2].min_tolerance)
    plots = [_histogram(number, *entry) for number, entry in enumerate(every[:MOST_HISTOGRAMS])]
    return plots, len(every) - len(plots)


def _histogram(number: int, provider: str, key: str, stats: OutputStats) -> Plot:
    title = f"{name(key).text}, on {provider.upper()}"
    if sum(stats.rewritten_ulps) and sum(stats.original_ulps):
        series = [
            Bars("original", stats.original_ulps, "original"),
            Bars("rewritten", stats.rewritten_ulps, "rewritten"),
        ]
        caption = "Distance of each element from float64."
    else:
        series = [Bars("rewritten against original", stats.ulps, "rewritten")]
        caption = "Difference of each element between the two models; there is no float64 evaluation."
    svg = histogram_figure(f"ulps-{number}", f"Errors of {title}, in units in the last place", series)
    return Plot(title, caption, svg, tuple(Key(f"{bars.style} bar", bars.label) for bars in series))


# -- programs --------------------------------------------------------------------------------------------------------


def program_sections(drawings: Sequence[Drawing]) -> list[ProgramSection]:
    """Sections for the first programs of a model, which rarely has more than two."""
    return [_program(number, drawing) for number, drawing in enumerate(drawings[:MOST_DRAWINGS])]


def _program(number: int, drawing: Drawing) -> ProgramSection:
    heads, blocks = counted(drawing.count, "head"), counted(drawing.blocks, "block")
    summary = f"{heads} per neuron, {counted(drawing.tokens, 'bias token')}, in {blocks}."
    plots = [
        Plot(
            "Values",
            "The heads reproduce the activation.",
            values_figure(f"values-{number}", drawing),
            (Key("target", "activation"), Key("program", "heads")),
        )
    ]
    several = len(drawing.heads) > 1
    for place, head in enumerate(drawing.heads):
        title = f"Attention of head {place + 1}" if several else "Attention"
        numbered = "; numbers are bias tokens" if len(head.keys) > 2 else ""
        numbered = "; heads have the same keys, here by their numbers" if head.shared else numbered
        svg = weights_figure(f"weights-{number}-{place}", drawing, head)
        plots.append(Plot(title, f"Softmax weights, which sum to 1{numbered}.", svg))
    plots.append(_error_plot(number, drawing))
    return ProgramSection(
        program=name(drawing.program),
        activation=short(drawing.activation),
        summary=summary,
        plots=tuple(plots),
        tables=tuple(key_table(head, drawing.program) for head in drawing.heads),
    )


def _error_plot(number: int, drawing: Drawing) -> Plot:
    peak, bound = max(abs(value) for value in drawing.error.values), numbers.small(drawing.certified)
    if drawing.certified == 0.0 and peak < _SHAREABLE:
        return Plot(
            "Error",
            f"None: heads and activation are the same function. At the points drawn they differ by at most "
            f"{numbers.small(peak)}, which is the rounding of float64.",
            None,
        )
    known = f"measured on a dense grid: at most {bound}" if drawing.measured else f"certified: {bound} everywhere"
    caption = f"Heads minus activation, over max(1, |f|); {known}."
    legend = (Key("error", "error"), Key("certified", "measured" if drawing.measured else "certified"))
    return Plot("Error", caption, error_figure(f"error-{number}", drawing), legend)


# -- the rest --------------------------------------------------------------------------------------------------------

_STEPS = {
    "load": "load and check",
    "plan": "find the blocks",
    "apply": "replace them",
    "save": "save",
    "validate": "prove",
    "total": "in all",
}


def times(report: Report) -> dict[str, str]:
    """Seconds per step, in the order in which they happen."""
    known = [key for key in _STEPS if key in report.seconds]
    others = [key for key in report.seconds if key not in _STEPS]
    return {_STEPS.get(key, key): numbers.seconds(report.seconds[key]) for key in (*others, *known)}

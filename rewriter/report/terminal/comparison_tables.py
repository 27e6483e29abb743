"""Tables about what two models compute, from a `Comparison`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite, log10

from rich.text import Text

from rewriter.compare.generation import Generation
from rewriter.compare.taps import Tap
from rewriter.compare.verdicts import OutputVerdict, PairProof
from rewriter.proof.blocks.activation import RegionProof
from rewriter.report.comparison import FaultRow
from rewriter.report.table import Cell, Column, Row, Table, columns
from rewriter.report.tables import output_table
from rewriter.report.terminal.layout import plain
from rewriter.text import counted

_BARS = "▁▂▃▄▅▆▇█"
_RULES = {
    "float64": "4 x the rounding of {a}",
    "original": "{a} stands in for float64",
    "tolerance": "the tolerance given",
    "equal": "must be equal",
    "nothing": "-",
}


def differences(providers: Mapping[str, PairProof], title: str, *, verbose: bool) -> Table:
    """B against A, output by output."""
    found = [(provider, each) for provider, proof in providers.items() for each in proof.outputs.values()]
    table = output_table(title, [(provider, each.stats, each.top_k) for provider, each in found])
    rows = (
        row if each.stats.finite and each.stats.comparable else (*row[:2], *[None] * len(row[2:]))
        for row, (_, each) in zip(table.rows, found, strict=True)
    )
    shown = replace(table, rows=tuple(rows))
    # Without -v, what fits into 80 columns.
    known = ("top-1", "KL", "top-k") if verbose else ("top-1", "top-k")
    ranks = (name for name in known if shown.pick(name).filled().columns)
    absolute: tuple[str, ...] = ("max abs", "mean abs")
    relative: tuple[str, ...] = ("max rel",)
    if verbose:
        absolute, relative = (*absolute, "p99 abs", "abs at"), (*relative, "mean rel", "p99 rel", "rel at")
    return shown.pick("provider", "output", *absolute, *relative, "1 - cosine", *ranks, "passes at atol = rtol")


def verdicts(providers: Mapping[str, PairProof], reference: str, names: tuple[str, str]) -> Table:
    """Errors against the truth, what was allowed, and the verdict."""
    truth = names[0] if reference.startswith("no float64") else "float64"
    a, b = names
    errors = (*columns("error", a, b), Column("ratio", "ratio"), Column("allowed", "error"))
    heads = (*columns("text", "provider", "output"), *errors, *columns("text", "rule", "verdict"))
    found = ((provider, each) for provider, proof in providers.items() for each in proof.outputs.values())
    rows = tuple(_verdict(provider, each, names[0]) for provider, each in found)
    return Table(f"Errors against {truth}, in the channel with the least room", heads, rows)


def _verdict(provider: str, each: OutputVerdict, original: str) -> Row:
    measured = isfinite(each.error_b)
    told = each.reason if each.rule in ("tolerance", "nothing") or not measured else None
    verdict = Cell("same", style="good") if each.passed else Cell(told or "differs", style="bad")
    errors = (each.error_a, each.error_b, each.error_ratio, each.allowed)
    shown = errors if measured and each.rule != "nothing" else (None,) * 4
    return (provider, each.name, *shown, _RULES[each.rule].format(a=original), verdict)


def regions(found: Mapping[str, RegionProof], programs: Mapping[str, str]) -> Table:
    """The heads of each block alone."""
    errors = (*columns("error", "in float64", "in the model's type"), Column("over original", "ratio"))
    rows: list[Row] = []
    for name, each in found.items():
        cell = Cell(name, style="bad" if each.failures else "")
        rows.append((cell, programs.get(name, "?"), each.exact_error, each.error, each.ratio))
    title = "Heads alone, on adversarial points: largest errors over max(1, |f|)"
    return Table(title, (*columns("text", "block", "program"), *errors), tuple(rows))


def through_depth(taps: Sequence[Tap], names: tuple[str, str], *, verbose: bool) -> Table:
    """Errors through depth: the ends of blocks and the outputs; all boundaries where asked for."""
    exact = any(each.error_a is not None for each in taps)
    first = next((each for each in taps if each.exceeds), None)
    chosen = [each for each in taps if verbose or each is first or each.boundary.kind != "stream"]
    if all(each.boundary.kind == "output" for each in chosen):
        chosen = list(taps)
    measured = columns("error", "largest value", f"error of {names[0]}", f"of {names[1]}")
    judged = (Column("ratio", "ratio"), *columns("error", "allowed", "relative"))
    heads = (Column("where", "name"), *measured, *judged, *([Column("")] if any(map(_remark, chosen)) else ()))
    rows = []
    for each in chosen:
        style = "bold red" if each is first else "red" if each.exceeds else ""
        rows.append(tuple(Cell(value, style=style) for value in _tap(each)[: len(heads)]))
    return Table(f"Error through depth, against {'float64' if exact else names[0]}", heads, tuple(rows))


def _tap(each: Tap) -> tuple[str | float | None, ...]:
    errors = (each.error_a, each.error_b, each.error_ratio, each.allowed, each.relative)
    shown = errors if each.finite and isfinite(each.error_b) else (None,) * len(errors)
    return (each.boundary.label, each.magnitude if each.finite else None, *shown, _remark(each))


def tap_lines(taps: Sequence[Tap], names: tuple[str, str]) -> list[Text]:
    """Bars of both relative errors on one logarithmic scale, and the first boundary that exceeds its allowance."""
    if not taps:
        return []
    series = [[_relative(each.error_a, each) for each in taps], [_relative(each.error_b, each) for each in taps]]
    seen = [value for row in series for value in row if value is not None and value > 0.0 and isfinite(value)]
    lines = []
    if seen:
        width = max(map(len, names))
        for name, row in zip(names, series, strict=True):
            if any(value is not None for value in row):
                bars = "".join(_bar(value, min(seen), max(seen)) for value in row)
                lines.append(plain(f"{name:<{width}}  {bars}"))
        lines.append(
            plain(f"{'':<{width}}  relative error, {min(seen):.0e} to {max(seen):.0e}, {len(taps)} boundaries")
        )
    first = next((each for each in taps if each.exceeds), None)
    measured = all(each.finite for each in taps)
    if first is None:
        lines.append(plain(f"every boundary {'' if measured else 'with finite values '}is within its allowance"))
    else:
        lines.append(plain(f"first to exceed its allowance: {first.boundary.label}", "red"))
    return lines


def generation_lines(found: Generation, names: tuple[str, str]) -> list[Text]:
    """How well the generated tokens agree."""
    how = f"through a cache of {counted(len(found.cache), 'tensor')}" if found.cache else "without a cache"
    kl = f", KL at most {max(found.kl):.1e}" if found.kl else ""
    lines = [
        plain(
            f"generated {counted(found.steps, 'token')} of {counted(len(found.tokens), 'sequence')} {how}: "
            f"{names[1]} agrees in {100 * found.agreement:.2f} % of choices{kl}"
        )
    ]
    if found.differences:
        first = found.differences[0]
        lines.append(
            plain(
                f"first difference: step {first.step}, token {first.other} instead of {first.chosen}, which leads by "
                f"{first.margin:.1e}"
            )
        )
    return [*lines, plain(f"generation stopped at {found.stopped}", "yellow")] if found.stopped else lines


def guilty(faults: Sequence[FaultRow], names: tuple[str, str]) -> Table:
    """The guilty parts."""
    heads = (*columns("text", "block", "part"), *columns("error", "error", "allowed"), Column("what differs there"))
    title = f"Guilty parts of {names[1]}, each fed with what {names[0]} computes"
    return Table(title, heads, tuple(map(_fault, faults)))


def _fault(fault: FaultRow) -> Row:
    part = fault.part or "from the last boundary to this one"
    part = f"{part}, program {fault.program}" if fault.program else part
    errors = (fault.error, fault.allowed) if isfinite(fault.error) else (None, None)
    causes = "\n".join(fault.causes) or f"from tensor {fault.tensor} on"
    return (Cell(fault.block, style="bad"), part, *errors, causes)


def _remark(each: Tap) -> str:
    """What the numbers cannot say: that B differs in what no tolerance excuses, or that nothing could be measured."""
    if not isfinite(each.error_b):
        return each.reason or ""
    return "" if each.finite else "nothing finite to compare"


def _relative(error: float | None, each: Tap) -> float | None:
    return None if error is None else error / each.magnitude if each.magnitude else 0.0


def _bar(value: float | None, low: float, high: float) -> str:
    if value is None:
        return " "
    if value <= low or high <= low:
        return _BARS[0]
    if not isfinite(value):
        return _BARS[-1]
    return _BARS[min(int(len(_BARS) * log10(value / low) / log10(high / low)), len(_BARS) - 1)]

"""Tables about what two models compute, from a `Comparison`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, log10

from rich.table import Table
from rich.text import Text

from rewriter.compare.taps import Tap
from rewriter.compare.verdicts import OutputVerdict, PairProof
from rewriter.proof.blocks.activation import RegionProof
from rewriter.report.comparison import FaultRow
from rewriter.report.terminal.layout import add_columns, new_table, plain

_BARS = "▁▂▃▄▅▆▇█"
_RULES = {
    "float64": "4 x the rounding of {a}",
    "original": "{a} stands in for float64",
    "tolerance": "the tolerance given",
    "equal": "must be equal",
    "nothing": "-",
}


def number(value: float | None, digits: str = ".1e") -> str:
    """A number for a table: `0` for exactly 0, `-` for a missing or infinite one."""
    if value is None or not isfinite(value):
        return "-"
    return "0" if value == 0.0 else f"{value:{digits}}"


def differences_table(providers: Mapping[str, PairProof], title: str, *, verbose: bool) -> Table:
    """B against A, output by output."""
    verdicts = [(provider, each) for provider, proof in providers.items() for each in proof.outputs.values()]
    ranked = any(_ranked(each) for _, each in verdicts)
    top_k = any(each.top_k is not None for _, each in verdicts)
    table = new_table(title)
    add_columns(table, text=("provider", "output"), numbers=("max abs", "mean abs", "p99 abs"))
    add_columns(table, numbers=("at",) if verbose else (), text=())
    add_columns(table, numbers=("max rel", "mean rel", "p99 rel"))
    add_columns(table, numbers=("at",) if verbose else (), text=())
    add_columns(table, numbers=("1 - cosine", *(("top-1", "KL") if ranked else ()), *(("top-k",) if top_k else ())))
    add_columns(table, numbers=("passes at atol = rtol",))
    for provider, each in verdicts:
        stats = each.stats
        measured = stats.finite > 0 and stats.comparable
        cells = [number(value) for value in (stats.max_abs, stats.mean_abs, stats.p99_abs)]
        cells += [_place(stats.worst)] if verbose else []
        cells += [number(value) for value in (stats.max_rel, stats.mean_rel, stats.p99_rel)]
        cells += [_place(stats.worst_rel)] if verbose else []
        cells.append("-" if stats.cosine is None else number(max(1.0 - stats.cosine, 0.0), ".0e"))
        if ranked:
            cells += [_percent(stats.top1), number(stats.kl)] if _ranked(each) else ["-", "-"]
        cells += [_percent(each.top_k)] if top_k else []
        cells.append(number(stats.min_tolerance))
        table.add_row(provider, plain(each.name), *(cells if measured else ["-"] * len(cells)))
    return table


def verdict_table(providers: Mapping[str, PairProof], reference: str, names: tuple[str, str]) -> Table:
    """Errors against the truth, their allowances, and the verdicts."""
    exact = not reference.startswith("no float64")
    table = new_table(f"Errors against {'float64' if exact else names[0]}, in the channel with the least room")
    add_columns(table, text=("provider", "output"))
    add_columns(table, numbers=(f"of {names[0]}", f"of {names[1]}", "ratio", "allowed"))
    add_columns(table, text=("rule", "verdict"))
    for provider, proof in providers.items():
        for each in proof.outputs.values():
            ratio = number(each.error_ratio, ".2f")
            rule = _RULES[each.rule].format(a=names[0])
            told = each.rule in ("tolerance", "nothing") or not isfinite(each.error_b)
            verdict = (
                plain("same", "green") if each.passed else plain((each.reason if told else None) or "differs", "red")
            )
            cells = [number(each.error_a), number(each.error_b), ratio, number(each.allowed)]
            cells = ["-"] * len(cells) if each.rule == "nothing" or not isfinite(each.error_b) else cells
            table.add_row(provider, plain(each.name), *cells, rule, verdict)
    return table


def region_table(regions: Mapping[str, RegionProof], programs: Mapping[str, str]) -> Table:
    """The heads of each block in isolation."""
    table = new_table("Heads alone, on adversarial points: largest errors over max(1, |f|)")
    add_columns(table, text=("block", "program"), numbers=("in float64", "in the model's type", "over original"))
    for name, region in regions.items():
        style = "red" if region.failures else ""
        cells = (number(region.exact_error), number(region.error), f"{region.ratio:.2f}")
        table.add_row(plain(name, style), plain(programs.get(name, "?")), *cells)
    return table


def tap_table(taps: Sequence[Tap], names: tuple[str, str], *, verbose: bool) -> Table:
    """Errors through depth at the ends of blocks and the outputs, or at all boundaries if `verbose`."""
    exact = any(each.error_a is not None for each in taps)
    first = next((each for each in taps if each.exceeds), None)
    chosen = [each for each in taps if verbose or each is first or each.boundary.kind != "stream"]
    if all(each.boundary.kind == "output" for each in chosen):
        chosen = list(taps)
    table = new_table(f"Error through depth, against {'float64' if exact else names[0]}")
    add_columns(table, text=("where",), numbers=("largest value", f"error of {names[0]}", f"of {names[1]}"))
    add_columns(table, numbers=("ratio", "allowed", "relative"))
    remarks = [_remark(each) for each in chosen]
    add_columns(table, text=("",) if any(remarks) else ())
    for each, remark in zip(chosen, remarks, strict=True):
        style = "bold red" if each is first else "red" if each.exceeds else ""
        cells = [number(value) for value in (each.magnitude, each.error_a, each.error_b)]
        cells += [number(each.error_ratio, ".2f"), number(each.allowed), number(each.relative)]
        cells = cells if each.finite and isfinite(each.error_b) else [cells[0] if each.finite else "-", *["-"] * 5]
        cells += [remark] if any(remarks) else []
        table.add_row(plain(each.boundary.label, style), *(plain(cell, style) for cell in cells))
    return table


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


def fault_table(faults: Sequence[FaultRow], names: tuple[str, str]) -> Table:
    """The guilty parts."""
    table = new_table(f"Guilty parts of {names[1]}, each run on the values of {names[0]}")
    add_columns(table, text=("block", "part"), numbers=("error", "allowed"))
    add_columns(table, text=("what differs there",))
    for fault in faults:
        part = fault.part or "from the last boundary to this one"
        part = f"{part}, program {fault.program}" if fault.program else part
        allowed = number(fault.allowed) if isfinite(fault.error) else "-"
        causes = "\n".join(fault.causes) or f"from tensor {fault.tensor} on"
        table.add_row(plain(fault.block, "red"), plain(part), number(fault.error), allowed, _lines(causes))
    return table


def _remark(each: Tap) -> str:
    """What the numbers cannot say: that B differs in what no tolerance excuses, or that nothing could be measured."""
    if not isfinite(each.error_b):
        return each.reason or ""
    return "" if each.finite else "nothing finite to compare"


def _lines(text: str) -> Text:
    return Text("\n").join(plain(line) for line in text.split("\n"))


def _ranked(verdict: OutputVerdict) -> bool:
    """Whether the rows of an output are a ranking, by its name or because the user asked for one."""
    named = any(word in verdict.name.lower() for word in ("logit", "score", "prob"))
    return verdict.stats.top1 is not None and (named or verdict.top_k is not None)


def _place(index: tuple[int, ...] | None) -> str:
    return "-" if index is None else ",".join(map(str, index))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


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

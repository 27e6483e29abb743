"""Results as sentences and tables: of a rewriting, for the terminal and pages; of given models, and as Markdown."""

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import chain, groupby, repeat
from math import isfinite, isnan
from operator import attrgetter
from typing import Any, Literal, cast

from rewriter.arrays import grouped
from rewriter.compare import GraphDifference
from rewriter.proof.records import Certificate
from rewriter.proof.rule import Judgement
from rewriter.proof.validate import Validation
from rewriter.report.report import BlockRow, Certification, Comparison, Report, RuntimeCertification, loud, reach
from rewriter.text import clean, counted, first_of, shortened, size

# -- a table as data, built once and written by the terminal and by the page ------------------------------------------

_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d*)(?!\d)")  # not 01, whose zero would be lost in a range
_MAX_GROUPS = 3
_FORMATS = {"count": ",", "change": "+,", "error": ".1e", "ratio": ".2f"}
_LARGE_RATIO = 1e4
Kind = Literal["text", "name", "operators", "count", "change", "error", "ratio"]
"""Formats of values. A name comes from a model; operators are those around an activation."""


@dataclass(frozen=True)
class Cell:
    """A cell that is shown as `text`, and sorted by its value; `style` is `good`, `bad`, or one of the terminal."""

    value: str | float | None
    text: str = ""
    style: str = ""


Row = tuple[Cell | str | float | None, ...]


@dataclass(frozen=True)
class Column:
    """One column: its heading, and how its values are written."""

    name: str
    kind: Kind = "text"

    @property
    def numeric(self) -> bool:
        return self.kind not in ("text", "name", "operators")


@dataclass(frozen=True)
class Table:
    """Rows under headings, None where a row has no value; the first cell of a row names it."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, title: str, headings: str, rows: Iterable[Row]) -> "Table":
        """A table without empty columns; `headings` are `name, name:kind, ...`, by default of text."""
        named, rows = (heading.partition(":") for heading in headings.split(", ")), tuple(rows)
        columns = [Column(name, cast("Kind", kind or "text")) for name, _, kind in named]
        used = [place for place in range(len(columns)) if any(row[place] is not None for row in rows)]
        kept = tuple(tuple(_cell(row[place], columns[place].kind) for place in used) for row in rows)
        return cls(title, tuple(columns[place] for place in used), kept)


def written(value: str | float | None, kind: Kind) -> str:
    """A value as text; a dash for None."""
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    form = ".1e" if kind == "ratio" and abs(value) >= _LARGE_RATIO else _FORMATS[kind]
    return "0" if kind == "error" and value == 0.0 else f"{value:{form}}"


def _cell(value: Cell | str | float | None, kind: Kind) -> Cell:
    cell = value if isinstance(value, Cell) else Cell(value)
    return replace(cell, text=cell.text or written(cell.value, kind))


def folded(names: Iterable[str]) -> str:
    """The names, as a range if they differ in one number; of many others the first and how many more."""
    groups = grouped((tuple(each[::2]), tuple(map(int, each[1::2]))) for each in map(_NUMBER.split, names))
    found = [text for fixed, numbers in groups.items() for text in _group(fixed, numbers)]
    if len(found) <= _MAX_GROUPS:
        return ", ".join(found)
    return f"{', '.join(found[: _MAX_GROUPS - 1])} and {len(found) - _MAX_GROUPS + 1} more"


def _group(fixed: Sequence[str], numbers: Sequence[tuple[int, ...]]) -> list[str]:
    varying = [place for place in range(len(fixed) - 1) if len({each[place] for each in numbers}) > 1]
    if len(varying) > 1:  # a range of the first varying number would include names that do not exist
        parts = grouped((each[varying[0]], each) for each in numbers)
        return [text for part in parts.values() for text in _group(fixed, part)]
    texts = [str(number) for number in numbers[0]]
    for place in varying:
        consecutive = groupby(enumerate(sorted({each[place] for each in numbers})), lambda pair: pair[1] - pair[0])
        runs = [[number for _, number in run] for _, run in consecutive]
        parted = (f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
        texts[place] = f"{{{','.join(parted)}}}"
    return ["".join(piece for pair in zip(fixed, [*texts, ""], strict=True) for piece in pair)]


# -- a rewriting -------------------------------------------------------------------------------------------------------

_MAX_FAILURES = 200
_LABEL = 10
Part = str | Sequence[str] | Table  # a paragraph, the entries of a list, or a table


def sections(report: Report) -> list[tuple[str, str, list[Part]]]:
    """Anchor, heading and parts of each section with content."""
    proof = report.proof
    more = len(report.problems) - _MAX_FAILURES
    rest = f"And {more:,} more; the JSON report holds them all." * (more > 0)
    found: dict[tuple[str, str], list[Part]] = {("failures", "What failed"): [report.problems[:_MAX_FAILURES], rest]}
    if proof is not None:
        found["proved", f"Proved {reach(proof.certificate)}"] = [region_table(proof.certificate)]
        found["measured", "Reference measurement of rounding"] = [float_table(report)]
        if proof.providers:
            inputs = ["Inputs of the proof:", proof.cases, skipped(proof, verbose=True)]
            found["run", "Only run"] = [rule_table(proof), *inputs]
    found["blocks", "Blocks"] = block_parts(report)
    if report.made is not None:
        before, after = report.before.operators, report.made.operators
        counts = {name: (before.get(name, 0), after.get(name, 0)) for name in {*before, *after}}
        found["operators", "Operators"] = [operator_table("Operators whose number changed", counts)]
    found["made", "Made with"] = [", ".join(f"{name} {value}" for name, value in report.environment.items())]
    filled = {place: [each for each in parts if getattr(each, "rows", each)] for place, parts in found.items()}
    return [(*place, parts) for place, parts in filled.items() if parts]


def certainty(report: Report) -> Iterator[tuple[str, str, str]]:
    """Sentences on what is proved and what was only run: anchor of the section with details, first word, the rest."""
    proof = report.proof
    if proof is None:
        return
    yield "proved", "Proved", f"{proved(proof.certificate)}. Rounding is not part of this."
    if proof.providers:
        outputs = [each.max_abs for run in proof.providers.values() for each in run.compared.values()]
        text = ", text among them" if any(name.endswith("text") for name in proof.cases) else ""
        ratio = f"; against float64 their root mean square error is {proof.error_ratio:.2f} times the original's"
        ratio = "" if isnan(proof.error_ratio) else ratio
        far = f": the outputs differ by at most {written(max(outputs), 'error')}{ratio}" if outputs else ""
        yield "run", "Only run", f"on {counted(len(proof.cases), 'input')}{text}, on {', '.join(proof.providers)}{far}."


def block_parts(report: Report) -> list[Part]:
    """The blocks that become heads, and the other candidates."""
    title = f"Blocks to attention heads, form {report.form}"
    parts: list[Part] = [converted_table(title, report.converted)] if report.converted else []
    if report.left:
        heads = "block:name, reason, activation, linear operators:operators, where:name"
        rows = ((row.name, row.reason, row.activation or None, operators(row) or None, row.node) for row in report.left)
        parts.append(Table.of("Left as they were", heads, rows))
    return parts


def warnings(report: Report, *, verbose: bool = False) -> list[str]:
    """Limits of the proof: skipped inputs, parts of the model at a time, a missing reference, nodes on the CPU."""
    proof = report.proof
    if proof is None:
        return []
    lines = [*skipped(proof, verbose=verbose), *proof.notes]
    if proof.by_blocks:
        segments = "({} of the original, {} of the rewritten)".format(*proof.segments)
        ran = f"they ran in consecutive segments {segments}; onnxruntime optimised within these"
        lines.append(f"neither model was loaded as a whole: {ran}")
    for provider, run in proof.providers.items():
        if run.cpu_nodes:
            lines.append(f"fell back to the CPU on {provider}: {', '.join(run.cpu_nodes)}")
        if run.cpu_nodes_of_original is None:
            lines.append(f"this onnxruntime cannot tell which nodes {provider} left to the CPU")
        elif run.cpu_nodes_of_original:
            lines.append(f"on {provider}, {counted(run.cpu_nodes_of_original, 'node')} of the original ran on the CPU")
    return lines


def skipped(proof: Validation, *, verbose: bool) -> list[str]:
    """The inputs that the original rejects, in one line, or each with the reason."""
    if verbose or not proof.skipped:
        return [f"input skipped, because the original rejects it: {text}" for text in proof.skipped]
    names = [text.partition(": ")[0] for text in proof.skipped]
    total = counted(len(names) + len(proof.cases), "input")
    return [f"{len(names)} of {total} skipped, which the original rejects ({first_of(names)}); -v says why"]


def float_table(report: Report) -> Table:
    """The errors of the programs as measured; empty where one was not."""
    floats = json.loads(files("rewriter.report").joinpath("floats.json").read_text(encoding="utf-8"))
    used = dict.fromkeys((row.program or "", row.type) for row in report.converted if report.form == "local")
    known = [floats["errors"].get(kind, {}).get(program) for program, kind in used]
    rows = [(*each, *errors) for each, errors in zip(used, known, strict=True)] if all(known) else []
    where = f"measured with onnxruntime {floats['onnxruntime']} on {floats['instructions']}"
    here = report.environment.get("onnxruntime", "none")
    title = f"Largest error over max(1, |f|), in the program's domain, {where}; here: onnxruntime {here}"
    return Table.of(title, "program:name, at every finite, heads:error, original's nodes:error", rows)


def summary(report: Report, width: int) -> Iterator[str]:
    """The lines of `summary_lines`, wrapped between words."""
    whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": " " * _LABEL}
    for label, text in summary_lines(report):
        yield from textwrap.wrap(clean(text), max(width, 40), initial_indent=label.ljust(_LABEL), **whole)


def summary_lines(report: Report, *, proof: bool = True) -> Iterator[tuple[str, str]]:
    """Label and text of each line (without `proof` of the model only); unlabelled lines continue the previous one."""
    yield from zip(chain(["blocks"], repeat("")), _converted(report.converted), strict=False)
    if report.converted:
        meaning = ": activations written as their softmax over {self, bias tokens}, to be read as heads"
        yield "form", f"{report.form}{meaning if report.form == 'local' else ''}; heads = neurons x heads per neuron"
    reasons = grouped((row.reason or "", row.name) for row in report.left)
    left = (f"{folded(names)}: {reason}" for reason, names in reasons.items())
    yield from zip(chain(["left"], repeat("")), left, strict=False)
    if report.proof is not None and proof:
        yield from ((word.lower(), text) for _, word, text in certainty(report))
    if report.made is not None:
        before, after = report.before, report.made
        sizes = f", {size(before.bytes)} -> {size(after.bytes)}" if after.bytes else ""
        yield "graph", f"{before.nodes:,} -> {after.nodes:,} nodes{sizes}"
    if report.files:
        yield "files", ", ".join(report.files)
    if report.made is not None:
        steps = [("proof" if step == "validate" else step, took) for step, took in report.seconds.items()]
        yield "seconds", ", ".join(f"{step} {took:.1f}" for step, took in steps if step != "total")
    yield from (("note", note) for note in report.notes)


def proved(certificate: Certificate) -> str:
    """What is proved for every input, or for those of some sizes."""
    regions = certificate.regions
    if not certificate.certified:
        return f"nothing: {certificate.refusals[0].text}"
    exact = all(each.bound.exact for each in regions)
    within = f"each activation {'equal' if exact else f'within {certificate.worst:.2g} of max(1, |f|)'}"
    if certificate.sizes:
        sizes = "; ".join(certificate.sizes)
        return f"{reach(certificate)} ({sizes}), over the reals, up to a chance of 2^-{certificate.bits}: {within}"
    size = " of every size" if certificate.domain is None else " and every size"
    size = " (longer ones do not run)" if any(each.tokens for each in regions) else size
    return f"{reach(certificate)}{size}, over the reals: {within}; all else identical"


def _converted(rows: Sequence[BlockRow]) -> Iterator[str]:
    shared = attrgetter("activation", "program", "experts", "heads", "bias_tokens", "max_error", "domain")
    for group in grouped(((*shared(row), bool(row.part_of)), row) for row in rows).values():
        row = group[0]
        each = "" if len(group) == 1 else f"{len(group)} {'parts of blocks' if row.part_of else 'blocks'}, each "
        count = "heads" if row.heads is None else counted(row.heads, "head")
        count = count if row.experts is None else f"{counted(row.experts, 'expert')}, {count} each"
        count += "" if row.heads is None else f" over {counted(row.bias_tokens or 0, 'bias token')}"
        name = "" if row.program == row.activation else f" by {row.program}"
        known = "measured to be within" if row.measured else "claimed to be within"
        sure = "exact" if row.exact else f"{known} {written(row.max_error, 'error')}"
        where = "" if row.domain is None else f" for |pre-activation| <= {row.domain:g}"
        yield f"{folded(each.name for each in group)}: {each}{row.activation}{name} as {count}, {sure}{where}"


# -- tables of both ----------------------------------------------------------------------------------------------------


def converted_table(title: str, rows: Sequence[BlockRow]) -> Table:
    """The blocks that become heads."""
    heads = "block:name, linear operators:operators, activation, program:name, heads:count, bias tokens:count"
    heads += ", error at most:error, for"

    def row(block: BlockRow) -> Row:
        error: Cell | float | None = Cell(0.0, "exact") if block.exact and not block.max_error else block.max_error
        if block.measured:
            error = Cell(block.max_error, f"{block.max_error:.1e} (measured)")
        where = None if block.domain is None else f"|y| <= {block.domain:g}"
        about = block.activation, block.program, block.heads, block.bias_tokens, error, where
        return (block.name, operators(block), *about)

    return Table.of(title, heads, map(row, rows))


def region_table(certificate: Certificate) -> Table:
    """The replaced activations, with their proof for every input; equal ones share a row."""
    alike: dict[Row, list[str]] = {}
    for each in certificate.regions:
        bound = each.bound
        proved = "equal, by algebra" if bound.exact else "bounded, by enclosure"
        where = "every y" if bound.domain is None else f"|y| <= {bound.domain:g}"
        least = None if bound.exact else bound.at_least
        alike.setdefault((each.nodes, proved, bound.bound, least, where), []).append(each.original)
    heads = "activation:name, nodes:count, proved, error at most:error, error at least:error, for"
    return Table.of(f"Certified {reach(certificate)}", heads, ((folded(names), *row) for row, names in alike.items()))


def operators(row: BlockRow) -> str:
    """`MatMul 32x128 -> 128x32` where both operators are of one kind, else both in full."""
    kind, _, size = row.first.partition(" ")
    other, _, second = row.second.partition(" ")
    both = (row.first, second if kind == other and size and second else row.second)
    return " -> ".join(part for part in both if part)


def rule_table(proof: Validation, *, tolerated: bool = False) -> Table:
    """The rule, output by output; providers are named if there are several."""
    heads = "output:name, provider, max abs:error, error:error, rounding:error, allowed:error, rule, verdict"

    def row(provider: str, each: Judgement) -> Row:
        verdict = Cell("agrees", style="good") if each.holds else Cell("differs", style="bad")
        if each.holds and each.proves_nothing and not tolerated:
            verdict = Cell("proves nothing")
        rule = "the tolerance given" if tolerated else "16 x rounding"
        shares = (each.error, each.rounding, each.allowed) if isfinite(each.error) else (None,) * 3
        return (each.name, provider if len(proof.providers) > 1 else None, each.max_abs, *shares, rule, verdict)

    rows = (row(name, each) for name, run in proof.providers.items() for each in run.compared.values())
    return Table.of("Errors as shares of the output's norm; with a tolerance, in its units", heads, rows)


def operator_table(title: str, counts: Mapping[str, tuple[int, int]]) -> Table:
    """Operators with two numbers, before and after, that differ; the largest changes first."""
    rows = [(name, before, after, after - before) for name, (before, after) in counts.items() if before != after]
    rows.sort(key=lambda row: (-abs(row[3]), row[0]))
    return Table.of(title, "operator:name, before:count, after:count, change:change", rows)


# -- given models: comparisons and certificates -----------------------------------------------------------------------


_MAX_ROWS = 12  # rows of a table, unless all are to be shown
_MAX_LENGTH = 60  # characters of an entry of a file
_PLAIN = re.compile(r"[^A-Za-z0-9\s.,:;()+=/'^%-]")
Parts = Iterator[tuple[str | Table, str]]  # tables and lines, each with a style


def compared(found: Comparison, *, verbose: bool = False) -> Parts:
    """A comparison, without its verdict and problems."""
    if found.files is not None:
        yield from _files(found.files, verbose=verbose)
    if (proof := found.proof) is not None:
        if verbose:
            yield region_table(proof.certificate), ""
        if proof.providers:
            yield rule_table(proof, tolerated=found.tolerance is not None), ""
            yield f"inputs: {'; '.join(proof.cases)}", ""
        yield f"proved: {proved(proof.certificate)}", ""
        yield from _departure(proof.certificate)
        unproved = (each for each in proof.unproved if each not in found.undecided)
        yield from ((text, "yellow") for text in (*unproved, *skipped(proof, verbose=verbose)))
        fallen = {provider: first_of(each.cpu_nodes) for provider, each in proof.providers.items() if each.cpu_nodes}
        yield from ((f"on {provider}, ran on the CPU: {nodes}", "yellow") for provider, nodes in fallen.items())
    yield from ((f"note: {note}", "yellow") for note in found.notes)


def certified(found: Certification | RuntimeCertification) -> Parts:
    """The certificate of two models, or those of the files that onnxruntime makes of one."""
    if isinstance(found, RuntimeCertification):
        for each in found.levels:
            yield f"level {each.level}: {loud(each.verdict)}, {found.nodes:,} -> {each.nodes:,} nodes", ""
            yield from _certificate(each.certificate)
    elif found.wrong is None:
        certificate = found.certificate
        if certificate.regions:
            yield region_table(certificate), ""
        if certificate.certified:
            yield f"assumed: {'; '.join(certificate.assumed)}", ""
            yield f"not claimed: {'; '.join(certificate.not_claimed)}", ""
        yield from _certificate(certificate)


def _certificate(certificate: Certificate) -> Parts:
    if certificate.certified:
        yield f"proved: {proved(certificate)}", ""
    yield from ((f"note: {note}", "yellow") for note in certificate.notes)
    yield from _departure(certificate)


def _departure(certificate: Certificate) -> Parts:
    for line in () if certificate.departure is None else certificate.departure.lines():
        yield line, "yellow"


def _files(found: GraphDifference, *, verbose: bool) -> Parts:
    def short(text: str | None) -> str:
        return "-" if text is None else shortened(text, _MAX_LENGTH)

    fields = [(each.what, each.name, short(each.a), short(each.b)) for each in (*found.fields, *found.remarks)]
    weights = [(each.name, each.a or "-", each.b or "-", each.how or "-") for each in found.tensors]
    for table in (
        Table.of("Models", ", , A, B", fields),
        operator_table("Operators whose number differs: before in A, after in B", found.operators),
        Table.of("Weights that differ", ", A, B, differ in", weights),
    ):
        most = None if verbose or table.title == "Models" else _MAX_ROWS
        if table.rows:
            yield replace(table, rows=table.rows[:most]), ""
        if len(table.rows) > len(table.rows[:most]):
            yield f"and {len(table.rows) - _MAX_ROWS:,} more, -v shows them", "yellow"
    yield f"the same in both: {found.same_tensors:,} weights bit for bit", ""


def in_markdown(summary: str, problems: Sequence[str], parts: Iterable[str | Table]) -> Iterator[str]:
    """Lines of Markdown: the verdict, what differs, and the rest folded away."""
    yield from (f"**{_escaped(summary)}**", "", *(f"- {_escaped(each)}" for each in problems), "")
    yield from ("<details><summary>Details</summary>", "")
    listed = False
    for part in parts:
        if isinstance(part, str):
            yield from (*([] if listed else [""]), f"- {_escaped(part)}")
        else:
            yield from ("", f"{_escaped(part.title)}:", "")
            rows = [[column.name for column in part.columns], *([each.text for each in row] for row in part.rows)]
            lines = [f"| {' | '.join(map(_escaped, row))} |" for row in rows]
            yield from (lines[0], "| --- " * len(part.columns) + "|", *lines[1:])
        listed = isinstance(part, str)
    yield from ("", "</details>")


def _escaped(text: str) -> str:
    """Text that means nothing in Markdown: names come from models."""
    return _PLAIN.sub(lambda match: f"&#{ord(match[0])};", " ".join(clean(text).split()))

"""Print what was found about given models: a comparison, a certificate, a measurement of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from typing import Any

from rich.text import Text

from rewriter.compare.depth import Fault, Measured
from rewriter.compare.generation import Generation
from rewriter.compare.graphs import GraphDifference
from rewriter.errors import ExitStatus
from rewriter.proof.validate import Validation
from rewriter.report.benchmark import Benchmark, TimeRow
from rewriter.report.certification import Certification
from rewriter.report.comparison import Comparison, Verdict
from rewriter.report.sections import skipped
from rewriter.report.tables import (
    Cell,
    Column,
    Row,
    Table,
    columns,
    operator_table,
    output_table,
    region_table,
    rule_table,
    tests_table,
)
from rewriter.report.terminal.console import Console, plain
from rewriter.text import counted

_FEW_FAILURES = 5
_FEW_ROWS = 12
"""Maximum number of rows of a table, unless everything is to be printed."""

_PLAIN_TEXT = 60
"""Maximum length of a metadata value, in characters."""
_FEW_PROBLEMS = 3
_FEW_NODES = 8


@dataclass(frozen=True)
class Words:
    """The words by which a command names the models and the verdict.

    Attributes:
        names: names of the two models in tables.
        verdicts: the first word of the last line, by verdict.
    """

    names: tuple[str, str]
    verdicts: dict[Verdict, str]


VALIDATING = Words(("original", "rewritten"), {"same": "PASSED", "agrees": "AGREES", "different": "FAILED"})
DIFFING = Words(("A", "B"), {"same": "SAME", "agrees": "AGREES", "different": "DIFFERENT"})
_STYLES = {"same": "bold green", "agrees": "bold yellow", "different": "bold red"}


def show_comparison(console: Console, found: Comparison, words: Words) -> None:
    """Print everything about a comparison."""
    if not console.quiet:
        for part in _parts(found, words, verbose=console.verbose):
            console.print(part)
    failures = found.failures if found.proof or found.signature else ()  # for graphs the last line is enough
    shown = failures if console.verbose else failures[:_FEW_FAILURES]
    for failure in shown:
        console.print(plain(failure, "red"))
    if len(failures) > len(shown):
        console.print(plain(f"and {len(failures) - len(shown)} more, -v shows them", "red"))
    console.print(plain(f"{words.verdicts[found.verdict]}  {_verdict(found)}", _STYLES[found.verdict]))


def _parts(found: Comparison, words: Words, *, verbose: bool) -> Iterator[Table | Text]:
    if found.files is not None:
        yield from _graph_parts(found.files, words.names, verbose=verbose)
    if found.proof is not None:
        yield from _certificate(found.proof, verbose=verbose)
        yield from _outputs(found, found.proof, words, verbose=verbose)
    if found.taps:
        yield _through_depth(found.taps, words.names, verbose=verbose)
        yield _tap_line(found.taps)
    if found.generated is not None:
        yield from _generation_lines(found.generated, words.names)
    if found.faults:
        yield _guilty_table(found.faults, words.names)
    for note in found.notes:
        yield plain(f"note: {note}", "yellow")


def _certificate(proof: Validation, *, verbose: bool) -> Iterator[Table | Text]:
    certificate = proof.certificate
    if certificate is None:
        return
    if certificate.certified:
        if certificate.regions and verbose:
            yield region_table(certificate)
        within = f", each activation within {certificate.worst:.2g} of max(1, |f|)" if certificate.worst else ""
        count = counted(len(certificate.regions), "activation") if certificate.regions else "nothing"
        yield plain(f"certified for every input of every size, over the reals: {count} replaced{within}", "green")
    elif certificate.refusals:
        yield plain(f"not certified: {certificate.refusals[0].text}", "yellow")
    if proof.blocks:
        yield tests_table(proof.blocks)


def _outputs(found: Comparison, proof: Validation, words: Words, *, verbose: bool) -> Iterator[Table | Text]:
    if proof.providers:
        yield output_table(f"Outputs: {words.names[1]} against {words.names[0]}", proof)
        yield rule_table(proof, found.tolerated)
        yield plain(f"inputs: {'; '.join(proof.cases)}")
    for text in skipped(proof, verbose=verbose):
        yield plain(text, "yellow")
    for provider, each in proof.providers.items():
        if each.cpu_nodes:
            yield plain(f"on {provider}, ran on the CPU: {', '.join(each.cpu_nodes[:8])}", "yellow")


def _through_depth(taps: Sequence[Measured], names: tuple[str, str], *, verbose: bool) -> Table:
    """Errors through depth: the ends of blocks and the outputs; all boundaries where asked for."""
    first = next((each for each in taps if each.exceeds), None)
    chosen = [each for each in taps if verbose or each is first or each.kind != "stream"]
    if all(each.kind == "output" for each in chosen):
        chosen = list(taps)
    errors = columns("error", "largest value", f"rounding of {names[0]}", f"{names[1]} is off by", "allowed")
    heads = (Column("where", "name"), *errors, *([Column("")] if any(map(_remark, chosen)) else ()))
    rows = []
    for each in chosen:
        style = "bold red" if each is first else "red" if each.exceeds else ""
        found = each.found
        known = (found.rounding, found.error, found.allowed) if isfinite(found.error) else (None,) * 3
        values = (each.label, each.magnitude, *known, _remark(each))
        rows.append(tuple(Cell(value, style=style) for value in values[: len(heads)]))
    return Table("Errors through depth, as shares of the norm there", heads, tuple(rows))


def _remark(each: Measured) -> str:
    if each.exceeds:
        return each.obstacle or (each.found.reason if not isfinite(each.found.error) else "exceeds")
    return "proves nothing" if each.found.proves_nothing else ""


def _tap_line(taps: Sequence[Measured]) -> Text:
    """The first boundary that exceeds its allowance."""
    first = next((each for each in taps if each.exceeds), None)
    if first is None:
        return plain("every boundary is within its allowance")
    return plain(f"first to exceed its allowance: {first.label}", "red")


def _generation_lines(found: Generation, names: tuple[str, str]) -> Iterator[Text]:
    """How well the generated tokens agree."""
    how = f"through a cache of {counted(len(found.cache), 'tensor')}" if found.cache else "without a cache"
    yield plain(
        f"generated {counted(found.steps, 'token')} of {counted(len(found.tokens), 'sequence')} {how}: "
        f"{names[1]} agrees in {100 * found.agreement:.2f} % of choices"
    )
    if found.differences:
        yield plain(f"first difference: {found.differences[0]}")
    if found.stopped:
        yield plain(f"generation stopped at {found.stopped}", "yellow")


def _guilty_table(faults: Sequence[Fault], names: tuple[str, str]) -> Table:
    """The guilty parts."""
    heads = (*columns("text", "block", "part"), *columns("error", "error", "allowed"), Column("what differs there"))
    title = f"Guilty parts of {names[1]}, each fed with what {names[0]} computes"
    rows: list[Row] = []
    for fault in faults:
        part = fault.part or f"up to {fault.tensor}"
        program = f", program {fault.program}" if fault.program else ""
        errors = (fault.error, fault.allowed) if isfinite(fault.error) else (None, None)
        rows.append((Cell(fault.block, style="bad"), part + program, *errors, "; ".join(fault.causes)))
    return Table(title, heads, tuple(rows))


def _verdict(found: Comparison) -> str:
    """The last line, without its first word."""
    seconds = f"in {found.seconds['total']:.1f} s"
    pair = f"{found.a} and {found.b}"
    proof = found.proof
    if found.signature:
        return f"{pair} have different inputs or outputs, so nothing was run"
    if proof is None:
        what = "are the same graph with the same weights" if found.verdict == "same" else "are different graphs"
        return f"{pair} {what}, compared {seconds}"
    if found.verdict == "different":
        judged = [each for run in proof.providers.values() for each in run.compared.values()]
        if judged and all("nothing could be compared" in each for each in found.failures):
            some = "not every output" if len(found.failures) < len(judged) else "nothing"
            return f"{pair}: {some} could be compared, {seconds}"
        return f"{found.b} does not compute what {found.a} does, {seconds}{_blame(found)}"
    ratio = "" if isnan(found.error_ratio) else f", error ratio {found.error_ratio:.2f}"
    graph = "; their graphs differ" if found.files is not None and not found.files.same else ""
    where = ", ".join(proof.providers)
    if found.verdict == "same":
        return f"{found.b} computes what {found.a} does for every input, and on {where}{ratio}{graph}, {seconds}"
    tested = f", {counted(len(proof.blocks), 'block')} tested" if proof.blocks else ""
    inputs = counted(len(proof.cases), "input")
    return f"{found.b} agrees with {found.a} on {inputs} on {where}{ratio}{tested}; not proved{graph}, {seconds}"


def _blame(found: Comparison) -> str:
    if found.faults:
        first = found.faults[0]
        part = f", {first.part}" if first.part else ""
        program = f" (program {first.program})" if first.program else ""
        more = f" and {len(found.faults) - 1} more" if len(found.faults) > 1 else ""
        return f"; guilty: {first.block}{part}{program}{more}"
    if found.first_exceeding is not None:
        return f"; first to exceed its allowance: {found.first_exceeding.label}"
    return "" if found.isolated else "; 'rewrite validate --bisect' names the guilty block"


# -- two files -----------------------------------------------------------------------------------------------------


def _graph_parts(found: GraphDifference, names: tuple[str, str], *, verbose: bool) -> Iterator[Table | Text]:
    """All tables and lines about the graphs."""
    fields = [(each.what, each.name, _short(each.a), _short(each.b)) for each in (*found.fields, *found.remarks)]
    before, after = ({name: counts[side] for name, counts in found.operators.items()} for side in (0, 1))
    operators: list[Row] = list(operator_table(before, after).rows)
    if operators:
        a, b = sum(before.values()), sum(after.values())
        operators.append(("all nodes", a, b, b - a))
    nodes = [(each.a, each.b, each.how or None) for each in found.regions]
    weights = [(each.name, each.a, each.b, each.how or None) for each in found.tensors]
    counted_columns = (Column(""), *columns("count", *names), Column("change", "change"))
    for title, columns_, rows in (
        ("Models", columns("text", "", "", *names), fields),
        ("Operators", counted_columns, operators),
        ("Nodes that differ", columns("text", *names, "differ in"), nodes),
        ("Weights that differ", columns("text", "", *names, "differ in"), weights),
    ):
        many = not verbose and title.endswith("differ")
        if rows:
            yield Table(title, columns_, tuple(rows[:_FEW_ROWS] if many else rows))
        if many and len(rows) > _FEW_ROWS:
            yield plain(f"and {len(rows) - _FEW_ROWS:,} more, -v shows them", "yellow")
    renamed = f" ({found.renamed:,} under other names)" if found.renamed else ""
    yield plain(
        f"the same in both: {found.same_nodes:,} nodes{renamed}, {found.same_tensors:,} weights bit for bit"
        f"{'; only names and remarks differ' if found.same and (found.renamed or found.remarks) else ''}"
    )


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= _PLAIN_TEXT else f"{text[: _PLAIN_TEXT - 3]}..."


# -- a certificate -------------------------------------------------------------------------------------------------


def show_certification(console: Console, found: Certification) -> None:
    """Print everything about a certificate."""
    certificate = found.certificate
    if certificate.regions:
        console.print(region_table(certificate))
    for what, sentences in (("assumed", certificate.assumed), ("not claimed", certificate.not_claimed)):
        if certificate.certified:
            console.print(plain(f"{what}: {'; '.join(sentences)}"))
    for problem in found.problems[:_FEW_PROBLEMS]:
        console.print(plain(problem, "red"))
    if len(found.problems) > _FEW_PROBLEMS:
        console.print(plain(f"and {len(found.problems) - _FEW_PROBLEMS} more, in the JSON of -o", "red"))
    style = "bold green" if certificate.certified else "bold red"
    first, _, rest = found.summary.partition(" ")
    console.print(plain(f"{first}  {rest}, in {certificate.seconds:.1f} s", style))


def show_check(console: Console, found: Certification, stated: Mapping[str, Any]) -> ExitStatus:
    """Print whether a stated certificate is what was computed from the files, and how it differs."""
    differences = [
        *found.differences(stated),
        *(found.problems[:_FEW_PROBLEMS] if not found.certificate.certified else ()),
    ]
    for difference in differences:
        console.print(plain(difference, "red"))
    pair = f"{found.rewritten.path} against {found.original.path}"
    if differences:
        console.print(plain(f"DOES NOT HOLD  the certificate of {pair}", "bold red"))
        return ExitStatus.VALIDATION_FAILED
    console.print(plain(f"HOLDS  the certificate of {pair}: {found.accuracy}", "bold green"))
    return ExitStatus.CONVERTED


# -- a measurement -------------------------------------------------------------------------------------------------


def show_benchmark(console: Console, found: Benchmark) -> None:
    """Print everything about a measurement."""
    if not console.quiet:
        for table in (_times(found), _models(found)):
            if table.rows:
                console.print(_relevant(table, found))
        for row in found.models:
            if row.cpu_nodes:
                nodes = ", ".join(row.cpu_nodes[:_FEW_NODES])
                more = f" and {len(row.cpu_nodes) - _FEW_NODES} more" if len(row.cpu_nodes) > _FEW_NODES else ""
                console.print(plain(f"{row.model} on {row.provider}, ran on the CPU: {nodes}{more}", "yellow"))
    console.print(plain(found.summary, "bold green"))


def _relevant(table: Table, found: Benchmark) -> Table:
    """The table without the provider if there is only one."""
    several = len({row.provider for row in found.times}) > 1
    return table if several else table.pick(*(each.name for each in table.columns if each.name != "provider"))


def _times(found: Benchmark) -> Table:
    words = ("ms", "quartiles", "over original", "its quartiles", "of fastest")
    heads = (Column("inputs"), Column("provider"), Column("model", "name"), *map(Column, words))
    title = f"Time of one run: median of {found.options['repeat']} rounds; ratios within a round"
    return Table(title, heads, tuple(map(_time, found.times)))


def _time(row: TimeRow) -> Row:
    over = row.over_original
    ratios = (f"{over.paired:.3f}", f"{over.low:.3f} to {over.high:.3f}", f"{over.of_fastest:.3f}") if over else ()
    times = (f"{row.milliseconds:.3f}", f"{row.low:.3f} to {row.high:.3f}")
    return (row.inputs, row.provider, row.model, *times, *(ratios or (None, None, None)))


def _models(found: Benchmark) -> Table:
    heads = (Column("model", "name"), Column("provider"), Column("load s", "ratio"), Column("peak memory MB", "count"))
    rows = (
        (row.model, row.provider, row.load_seconds, None if row.peak_mb is None else round(row.peak_mb))
        for row in found.models
    )
    return Table("Loading, and memory beyond that of the empty process", heads, tuple(rows))

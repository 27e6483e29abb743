"""Print a comparison of two models in the terminal: tables, notes and the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from rewriter.report.comparison import Comparison
from rewriter.report.table import Table
from rewriter.report.terminal import comparison_tables as pairtables
from rewriter.report.terminal import graph_tables as graphtables
from rewriter.report.terminal.console import Console
from rewriter.report.terminal.layout import plain

_FEW_FAILURES = 5


@dataclass(frozen=True)
class Words:
    """The words by which a command names the models and the verdict.

    Attributes:
        names: names of the two models in tables.
        same: the first word of the last line if they agree.
        different: the first word if they do not.
    """

    names: tuple[str, str]
    same: str
    different: str


VALIDATING = Words(("original", "rewritten"), "PASSED", "FAILED")
DIFFING = Words(("A", "B"), "SAME", "DIFFERENT")


def show_comparison(console: Console, found: Comparison, words: Words) -> None:
    """Print everything about a comparison."""
    if not console.quiet:
        for part in _parts(found, words, verbose=console.verbose):
            console.print(part)
    failures = found.failures if found.providers or found.signature else ()  # for graphs the last line is enough
    shown = failures if console.verbose else failures[:_FEW_FAILURES]
    for failure in shown:
        console.print(plain(failure, "red"))
    if len(failures) > len(shown):
        console.print(plain(f"and {len(failures) - len(shown)} more, -v shows them", "red"))
    style = "bold green" if found.same else "bold red"
    console.print(plain(f"{words.same if found.same else words.different}  {_verdict(found)}", style))


def _parts(found: Comparison, words: Words, *, verbose: bool) -> Iterator[Table | Text]:
    if found.graph is not None:
        yield from graphtables.graph_parts(found.graph, words.names, verbose=verbose)
    if found.providers:
        yield from _outputs(found, words, verbose=verbose)
    if found.taps is not None:
        yield pairtables.through_depth(found.taps, words.names, verbose=verbose)
        yield from pairtables.tap_lines(found.taps, words.names)
    if found.generation is not None:
        yield from pairtables.generation_lines(found.generation, words.names)
    if found.faults:
        yield pairtables.guilty(found.faults, words.names)
    for note in found.notes:
        yield plain(f"note: {note}", "yellow")


def _outputs(found: Comparison, words: Words, *, verbose: bool) -> Iterator[Table | Text]:
    title = f"Outputs: {words.names[1]} against {words.names[0]}"
    yield pairtables.differences(found.providers, title, verbose=verbose)
    yield pairtables.verdicts(found.providers, found.reference, words.names)
    if found.regions and (verbose or any(region.failures for region in found.regions.values())):
        yield pairtables.regions(found.regions, found.blocks)
    yield plain(f"inputs: {'; '.join(found.cases)}")
    for text in found.skipped:
        yield plain(f"input skipped, because {words.names[0]} rejects it: {text}", "yellow")
    if found.reference.startswith("no float64"):
        yield plain(f"{found.reference}; {words.names[0]} stands in for it", "yellow")
    else:
        yield plain(f"float64 reference: {found.reference}")
    for provider, proof in found.providers.items():
        if proof.cpu_nodes:
            yield plain(f"on {provider}, ran on the CPU: {', '.join(proof.cpu_nodes[:8])}", "yellow")


def _verdict(found: Comparison) -> str:
    """The last line, without its first word."""
    seconds = f"in {found.seconds['total']:.1f} s"
    pair = f"{found.a} and {found.b}"
    if found.signature:
        return f"{pair} have different inputs or outputs, so nothing was run"
    if not found.providers:
        what = "are the same graph with the same weights" if found.same else "are different graphs"
        return f"{pair} {what}, compared {seconds}"
    if found.same:
        ratio = "" if found.error_ratio is None else f", error ratio {found.error_ratio:.2f}"
        count = len(found.regions)
        heads = f", heads of {count} block{'s' if count != 1 else ''} proved alone" if count else ""
        where = ", ".join(found.providers)
        graph = "; their graphs differ" if found.graph is not None and not found.graph.same else ""
        return f"{found.b} computes what {found.a} does on {where}{ratio}{heads}{graph}, {seconds}"
    verdicts = [each for proof in found.providers.values() for each in proof.outputs.values()]
    if not any(each.exceeds for each in verdicts) and not _guilty(found):
        some = "not every output" if any(each.passed for each in verdicts) else "nothing"
        return f"{pair}: {some} could be compared, {seconds}"
    return f"{found.b} does not compute what {found.a} does, {seconds}{_blame(found)}"


def _guilty(found: Comparison) -> list[str]:
    """Names of the heads and parts that fail in isolation."""
    heads = [name for name, region in found.regions.items() if region.failures]
    return heads + [each.boundary.label for each in found.isolated or () if each.guilty]


def _blame(found: Comparison) -> str:
    if found.faults:
        first = found.faults[0]
        part = f", {first.part}" if first.part else ""
        program = f" (program {first.program})" if first.program else ""
        more = f" and {len(found.faults) - 1} more" if len(found.faults) > 1 else ""
        return f"; guilty: {first.block}{part}{program}{more}"
    exceeding = found.first_exceeding
    if exceeding is not None:
        return f"; first to exceed its allowance: {exceeding.boundary.label}"
    guilty = _guilty(found)
    if guilty:
        more = f" and {len(guilty) - 1} more" if len(guilty) > 1 else ""
        return f"; guilty: {guilty[0]}{more}; 'rewrite validate --bisect' shows what differs there"
    return "" if found.isolated is not None else "; 'rewrite validate --bisect' names the guilty block"

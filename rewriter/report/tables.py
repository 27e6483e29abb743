"""The tables that the terminal and the page both show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rewriter.proof.certificate.certify import Certificate
from rewriter.proof.statistics import OutputStats
from rewriter.proof.tested import BlockTest
from rewriter.proof.validate import Validation
from rewriter.report.details import HeadCount
from rewriter.report.report import BlockRow
from rewriter.report.table import Cell, Column, Row, Table, columns


def converted_table(rows: Sequence[BlockRow], tests: Sequence[BlockTest] = ()) -> Table:
    """The blocks that become heads, with the tests of those that are not certified; empty columns are left out."""
    heads = (
        *(Column("block", "name"), Column("no.", "count"), Column("linear operators", "operators")),
        *(Column("activation"), Column("program", "name"), *columns("count", "heads", "bias tokens")),
        *(Column("error at most", "error"), Column("test"), Column("sizes")),
    )
    known = {test.name: test for test in tests}
    cells = tuple(_converted(row, number, known.get(row.name)) for number, row in enumerate(rows, start=1))
    return Table("Blocks that became attention heads", heads, cells).filled()


def _converted(row: BlockRow, number: int, test: BlockTest | None) -> Row:
    certified: Cell | float | None = Cell(0.0, "exact") if row.exact and not row.max_error else row.max_error
    if row.measured:
        certified = Cell(row.max_error, f"{row.max_error:.1e} (measured)")
    cells = (row.name, number, operators(row), row.activation, row.program, row.heads, row.bias_tokens, certified)
    if test is None:
        return (*cells, None, None)
    verdict = Cell("held", style="good") if test.passed else Cell("failed", style="bad")
    return (*cells, verdict, ", ".join(test.sizes))


def region_table(certificate: Certificate) -> Table:
    """The activations that were replaced, with what is proved about each for every input."""
    heads = (
        *(Column("activation", "name"), Column("of", "name"), Column("proved"), Column("error at most", "error")),
        *(Column("error at least", "error"), Column("at y", "error"), Column("for"), Column("nodes", "count")),
    )
    rows: list[Row] = []
    for each in certificate.regions:
        bound = each.bound
        proved = "equal, by algebra" if bound.exact else "bounded, by enclosure"
        reach = "every y" if bound.domain is None else f"|y| <= {bound.domain:g}"
        least = None if bound.exact else bound.at_least
        rows.append((each.original, ", ".join(each.leaves), proved, bound.bound, least, bound.at, reach, each.nodes))
    return Table("Certified for every input", heads, tuple(rows))


def operators(row: BlockRow) -> str:
    """`MatMul 32x128 -> 128x32` where both operators are of one kind, else both in full."""
    kind, _, size = row.first.partition(" ")
    other, _, second = row.second.partition(" ")
    both = (row.first, second if kind == other and size and second else row.second)
    return " -> ".join(part for part in both if part)


def output_table(title: str, outputs: Iterable[tuple[str, OutputStats, float | None]]) -> Table:
    """One model against another, output by output: (provider, differences, agreement on the best k if asked for)."""
    heads = (
        *(Column("output", "name"), Column("provider"), Column("elements", "count")),
        *(Column("max abs", "error", "largest difference"), Column("mean abs", "error", "mean")),
        *(Column("p99 abs", "error", "99 % below"), Column("abs at", "count")),
        *(Column("max rel", "error", "largest relative"), *columns("error", "mean rel", "p99 rel")),
        *(Column("rel at", "count"), Column("1 - cosine", "error", "1 − cosine"), Column("top-1", "agreement")),
        *(Column("KL", "error"), Column("top-k", "agreement"), Column("passes at atol = rtol", "error")),
    )
    return Table(title, heads, tuple(_output(*each) for each in outputs))


def proof_table(title: str, validation: Validation) -> Table:
    """Rewritten against original, output by output."""
    proofs = validation.providers.items()
    return output_table(title, [(name, each, None) for name, proof in proofs for each in proof.outputs.values()])


def _output(provider: str, stats: OutputStats, top_k: float | None) -> Row:
    named = any(word in stats.name.lower() for word in ("logit", "score", "prob"))
    top1, kl = (stats.top1, stats.kl) if named or top_k is not None else (None, None)
    cosine = None if stats.cosine is None else max(1.0 - stats.cosine, 0.0)
    places = (None if each is None else ",".join(map(str, each)) for each in (stats.worst, stats.worst_rel))
    absolute, relative = (stats.max_abs, stats.mean_abs, stats.p99_abs), (stats.max_rel, stats.mean_rel, stats.p99_rel)
    measured = (*absolute, next(places), *relative, next(places))
    return (stats.name, provider, stats.elements, *measured, cosine, top1, kl, top_k, stats.min_tolerance)


def operator_table(before: Mapping[str, int], after: Mapping[str, int]) -> Table:
    """Operators whose number changed, the largest changes first."""
    counts = [(name, before.get(name, 0), after.get(name, 0)) for name in {*before, *after}]
    changed = sorted((row for row in counts if row[1] != row[2]), key=lambda row: (-abs(row[2] - row[1]), row[0]))
    heads = (Column("operator", "name"), *columns("count", "before", "after"), Column("change", "change"))
    return Table("Operators whose number changed", heads, tuple((*row, row[2] - row[1]) for row in changed))


def account_table(title: str, counts: Iterable[HeadCount]) -> Table:
    """What the blocks weigh, and their heads."""
    heads = (
        *(Column("block", "name"), *columns("count", "d_model", "d_ff", "parameters")),
        *(Column("share", "share", "share of multiply-adds"), Column("heads", "count")),
        Column("three sublayers", "count", "as three sublayers"),
    )
    return Table(title, heads, tuple(map(_account, counts)))


def _account(each: HeadCount) -> Row:
    staged = None if each.staged is None else Cell(sum(each.staged), " + ".join(f"{count:,}" for count in each.staged))
    return (each.name, each.d_model, each.d_ff, each.parameters, each.share, each.heads, staged)

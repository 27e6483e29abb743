"""`rewrite validate`, `diff`, `certify` and `bench`: two models beside each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewriter.cli.options import (
    MODELS,
    carried_out,
    check_report,
    command,
    declared_options,
    file_option,
    report_option,
    with_options,
)
from rewriter.compare import CompareOptions
from rewriter.proof.settings import Settings
from rewriter.text import first_of

if TYPE_CHECKING:
    from rewriter.api.benching import Benchmark, TimeRow
    from rewriter.report.certification import Certification
    from rewriter.report.comparison import Comparison
    from rewriter.report.terminal.console import Console

_model = click.Path(path_type=Path)
_pair = with_options((click.argument("original", type=_model), click.argument("rewritten", type=_model)))
_RUN = declared_options(Settings, only=("providers", "inputs", "dims"))
_SHOWN = with_options(
    (
        report_option("the comparison"),
        click.option("-v", "--verbose", is_flag=True, help="Print everything: all nodes and weights."),
    )
)


@command(
    MODELS,
    ok="REWRITTEN computes what ORIGINAL does, or agrees where it was run",
    failed="it does not, or this is not proved and no run decides it",
    usage="the given inputs left nothing to compare",
)
@_pair
@_RUN
@declared_options(CompareOptions)
@_SHOWN
def validate(original: Path, rewritten: Path, **options: Any) -> int:
    """Judge whether REWRITTEN computes what ORIGINAL does, on inputs made for the model.

    Any two models with the same inputs and outputs can be compared, from any source. SAME: certified, and a run
    agrees. AGREES: not proved, but both agree on the inputs that were run. DIFFERENT: there is a counterexample.
    """
    from rewriter import validate as judge

    return _compared(judge, original, rewritten, **options)


@command(
    MODELS,
    ok="both compute the same, or agree where they were run (with --graph-only: the same graph and weights)",
    failed="they differ, or this is not proved and no run decides it",
    usage="the given inputs left nothing to compare",
)
@click.argument("a", type=_model)
@click.argument("b", type=_model)
@click.option("--graph-only", is_flag=True, help="Compare the files, run nothing.")
@_RUN
@_SHOWN
def diff(a: Path, b: Path, *, graph_only: bool, **options: Any) -> int:
    """Compare two models: operators, nodes, metadata, weights bit for bit, and what they compute.

    Nodes are matched by name and by structure, so a renamed node does not count as different. Outputs are judged as by
    `rewrite validate`, which also takes a tolerance. Two different graphs may compute the same, so the outputs decide
    the exit status, and the graphs only where nothing is run.
    """
    from rewriter import diff as compare

    return _compared(compare, a, b, outputs=not graph_only, **options)


def _compared(
    compare: Callable[..., Comparison], a: Path, b: Path, *, report: Path | None, verbose: bool, **options: Any
) -> int:
    check_report(report, (a, b))
    from rewriter.report.terminal.comparison import show_comparison

    return carried_out(report, lambda told: compare(a, b, progress=told, **options), show_comparison, verbose=verbose)


@command(
    {4: "a model is unreadable, malformed or unsafe"},
    ok="certified (with --check: the certificate holds)",
    failed="not proved, or different (with --check: the certificate does not hold)",
    usage="FILE is not a certificate",
)
@_pair
@file_option(
    "--check",
    metavar="FILE.json",
    help="Compute the certificate afresh, and compare it with the one in this file.",
)
@declared_options(CompareOptions, only=("accuracy",))
@report_option("the certificate", "-o")
def certify(original: Path, rewritten: Path, *, check: Path | None, accuracy: float | None, report: Path | None) -> int:
    """Prove that REWRITTEN computes what ORIGINAL does, at every input of every size, over the reals.

    Nothing is run and nothing is sampled. Activations that are computed otherwise are bounded for all real numbers, or
    in a domain that is named; everything else must be the same operators on the same weights. Any two models can be
    judged, from any source.
    """
    check_report(report, (original, rewritten, check))
    from rewriter import certify as prove
    from rewriter.report.certification import read_certificate
    from rewriter.report.terminal.comparison import show_certification

    stated = None if check is None else read_certificate(check)

    def proved(_progress: object) -> Certification:
        found = prove(original, rewritten, accuracy=accuracy)
        return found if check is None else found.checked(stated)

    return carried_out(report, proved, show_certification)


@command(MODELS, ok="measured", failed="a model does not run", usage="the models take different inputs")
@_pair
@click.argument("more", type=_model, nargs=-1)
@click.option(
    "--tokens", type=int, metavar="N", multiple=True, help="Number of tokens of a sequence (repeatable). Default: 128."
)
@declared_options(
    Settings,
    only=("providers", "inputs"),
    providers={
        "help": "Execution provider: cpu, cuda, cuda:device_id=1 (repeatable). Default: cpu, and cuda where it works."
    },
    inputs={"help": "Run on the inputs in this file, as for rewrite. Default: generated inputs."},
)
@report_option("the measurement")
def bench(
    original: Path,
    rewritten: Path,
    more: tuple[Path, ...],
    *,
    report: Path | None,
    **options: Any,
) -> int:
    """Measure how long REWRITTEN, and MORE models, take beside ORIGINAL.

    Each model runs in a separate process, and they take turns. ORIGINAL is also its own competitor, the control: a
    ratio as close to 1 as the control's is noise. A run includes copying inputs and outputs.
    """
    check_report(report, (original, rewritten, *more))
    from rewriter import bench as measure

    models = (original, rewritten, *more)
    return carried_out(report, lambda told: measure(*models, progress=told, **options), _show_times)


def _show_times(console: Console, found: Benchmark) -> None:
    from rewriter.report.tables import Cell, Column, Row, Table

    several = len({row.provider for row in found.times}) > 1

    def cells(row: TimeRow) -> Row:
        over, place = row.over_original, row.provider if several else None
        ratios = (None,) * 3 if over is None else (over.paired, f"{over.low:.3f} to {over.high:.3f}", over.of_fastest)
        what = (row.inputs, place, row.model, row.milliseconds, *ratios, row.load_seconds, row.peak_mb)
        return tuple(Cell(each, f"{each:.3f}") if isinstance(each, float) else each for each in what)

    heads = (
        *(Column("inputs"), Column("provider"), Column("model", "name"), Column("ms", "ratio")),
        *(Column("over original", "ratio"), Column("its quartiles"), Column("of fastest", "ratio")),
        *(Column("load s", "ratio"), Column("peak memory MB", "count")),
    )
    title = f"Time of one run: median of {found.options['repeat']} rounds; ratios within a round"
    console.part(Table(title, heads, tuple(map(cells, found.times))).filled())
    left = ((row.model, row.provider, tuple(row.cpu_nodes or ())) for row in found.times)
    for name, provider, nodes in dict.fromkeys(left):
        if nodes:
            console.line(f"{name} on {provider}, ran on the CPU: {first_of(nodes)}", "yellow")
    console.line(found.summary, "bold green")

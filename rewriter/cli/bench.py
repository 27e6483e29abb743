"""`rewrite bench ORIGINAL REWRITTEN [MORE...]`: how fast models run; `rewriter.bench` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rewriter.cli.options import MODELS, check_report, command, declared_options, report_option, write_report
from rewriter.cli.streams import STANDARD
from rewriter.proof.settings import Settings
from rewriter.timing import BenchOptions


@command(MODELS, ok="measured", failed="a model does not run", usage="the models take different inputs")
@click.argument("original", type=click.Path(path_type=Path))
@click.argument("rewritten", type=click.Path(path_type=Path))
@click.argument("more", type=click.Path(path_type=Path), nargs=-1)
@declared_options(BenchOptions)
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
    providers: tuple[str, ...],
    report: Path | None,
    **options: Any,
) -> int:
    """Measure how long REWRITTEN, and MORE models, take beside ORIGINAL.

    Each model runs in a process of its own, and they take turns. ORIGINAL is also its own competitor, the control: a
    ratio that is no further from 1 than the control's is noise. A run includes copying inputs and outputs.
    """
    check_report(report, (original, rewritten, *more))
    from rewriter import bench as measure
    from rewriter.report.terminal.comparison import show_benchmark
    from rewriter.report.terminal.console import Console

    console = Console(error=report == STANDARD)
    with console.progress() as progress:
        found = measure(original, rewritten, *more, providers=providers or None, progress=progress, **options)
    write_report(report, found.to_json)
    show_benchmark(console, found)
    return 0

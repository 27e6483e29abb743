"""`rewrite doctor [MODEL]`: what is installed, what works, and what to do where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rewriter.cli.options import MODEL, check_report, command, links_option, report_options, write_report
from rewriter.cli.streams import STANDARD
from rewriter.text import size

if TYPE_CHECKING:
    from rewriter.health.findings import Diagnosis

_LABEL = 10


@command(MODEL, ok="nothing is wrong", failed="something is; each problem is a line that says what to do")
@click.argument("model", type=click.Path(path_type=Path), required=False)
@links_option
@report_options("what was found")
def doctor(model: Path | None, *, allow_links: bool, report: Path | None, quiet: bool) -> int:
    """Look at versions, execution providers, CUDA libraries, memory and disk, and say how to mend what is wrong.

    Every execution provider is started in a process of its own. With MODEL, memory and disk are compared with what its
    proof needs.
    """
    check_report(report, (model,))
    from rewriter.api.estimating.doctor import doctor as look
    from rewriter.report.terminal.console import Console

    console = Console(quiet=quiet, error=report == STANDARD)
    with console.progress() as progress:
        found = look(model, allow_links=allow_links, progress=progress)
    write_report(report, found.to_json)
    for label, text in _lines(found):
        console.line(f"{label:{_LABEL}}{text}")
    for problem in found.problems:
        console.line(f"{'problem':{_LABEL}}{problem}", "red", always=True)
    count = len(found.problems)
    verdict = f"{count} problem{'s' if count > 1 else ''}: see above" if count else "FINE  nothing is wrong"
    console.line(verdict, "bold red" if count else "bold green", always=True)
    return found.exit_status


def _lines(found: Diagnosis) -> Iterator[tuple[str, str]]:
    from rewriter.report.terminal.summary import taken

    yield "packages", ", ".join(f"{name} {version or 'MISSING'}" for name, version in found.packages.items())
    runtimes = ", ".join(f"{name} {version}" for name, version in found.onnxruntimes.items())
    yield "runtime", (runtimes or "none") + (f"; not used here: {', '.join(found.others)}" if found.others else "")
    for number, each in enumerate(found.providers):
        state = f"not in this onnxruntime; {each.reason}"
        if each.built:
            state = f"works, {'float64 too' if each.float64 else 'no float64'}" if each.works else each.reason
        yield "" if number else "providers", f"{each.name}: {state}"
    if found.libraries:
        yield (
            "libraries",
            ", ".join(f"{name} {'found' if here else 'MISSING'}" for name, here in found.libraries.items()),
        )
    machine = found.machine
    if machine.memory is not None and machine.available is not None:
        yield "memory", f"{size(machine.available)} available of {size(machine.memory)}"
    if machine.disk is not None:
        yield "disk", f"{size(machine.disk)} free in {machine.folder}"
    if found.model is not None:
        how = "block by block" if found.model.by_blocks else "whole"
        yield "model", f"{found.model.path}: {size(found.model.bytes)}, proved {how}"
        yield "", f"{size(found.model.disk)} on disk beside it"
        yield "", taken(found.model.estimate) if found.model.estimate is not None else "no MLP block to convert"

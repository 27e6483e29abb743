"""`rewrite FOLDER -o OUT`: the plain command, given a folder; `rewriter.rewrite_folder` does the work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewriter.cli.options import check_report, write_report
from rewriter.cli.streams import STANDARD
from rewriter.errors import ExitStatus, UsageError


def convert_folder(
    folder: Path,
    output: Path | None,
    *,
    report: Path | None,
    quiet: bool,
    verbose: bool,
    refused: Mapping[str, Any],
    **options: Any,
) -> int:
    """Convert all models of a folder, and print each result under its name.

    Args:
        folder: the folder.
        output: the folder to write.
        report: where to write the JSON.
        quiet: print only the last line.
        verbose: print everything.
        refused: flags that a folder does not take, with what was given.
        **options: the keywords of `rewrite_folder`.
    """
    flag = next((flag for flag, given in refused.items() if given), None)
    if flag is not None:
        raise UsageError(f"{flag} is for one model, not for a folder; leave it out, or convert the files one by one")
    if output == STANDARD:
        raise UsageError("a folder cannot go to standard output; give -o a name for the new folder")
    check_report(report, (folder, output))
    from rewriter import rewrite_folder
    from rewriter.report.terminal.console import Console
    from rewriter.report.terminal.rewriting import show_model

    console = Console(quiet=quiet, verbose=verbose, error=report == STANDARD)
    with console.progress() as progress:
        result = rewrite_folder(folder, output, progress=progress, **options)
    write_report(report, result.to_json)
    for name, each in result.models.items():
        show_model(console, name, each)
    colour = {ExitStatus.CONVERTED: "bold green", ExitStatus.VALIDATION_FAILED: "bold red"}
    for line in result.copied_lines():
        console.line(line)
    console.line(result.summary, colour.get(result.exit_status, "yellow"), always=True)
    return int(result.exit_status)

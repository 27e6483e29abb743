"""`rewrite MODEL -o OUT`, the plain command; `rewriter.rewrite` does the work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from passes.options import Options
from rewriter.cli.options import (
    SETTINGS,
    check_page,
    check_report,
    check_suffix,
    declared_options,
    file_option,
    links_option,
    rare_options,
    report_option,
    write_report,
)
from rewriter.cli.streams import STANDARD, from_standard_input, to_standard_output
from rewriter.errors import ExitStatus, UsageError
from rewriter.proof.settings import Settings

_HELP_STATUS = """\b
Commands for models (rewrite COMMAND --help):
  inspect    print the blocks of a model, their size and their heads
  certify    prove for every input that one model computes what another does
  validate   judge whether a rewritten model computes what the original does
  diff       compare any two models: graphs, weights, outputs
  bench      measure how long models take beside the original
  doctor     check versions, execution providers, memory and disk

\b
Commands for heads:
  heads      list all heads, and write their weights or a page about them
  run        run a model and record what heads compute on inputs
  rank       rank heads: which work together, and on what
  attribute  attribute a logit to heads, tokens and biases
  graph      make the attribution graph of a logit

\b
Exit status:
  0   converted, and proved (or --no-validate, or --dry-run)
  1   the proof failed; nothing is written at OUT
  2   usage error
  3   nothing to convert; nothing is written
  4   the model is unreadable, malformed or unsafe
  5   an execution provider is not available, or lacks float64
  70  internal error; please report it
"""


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from rewriter.report.environment import environment

    found = environment()
    parts = [f"{name} {found[name]}" for name in ("onnx", "onnxruntime", "onnx-graphsurgeon", "numpy")]
    click.echo(f"rewrite {found['attnonly']} ({', '.join(parts)})")
    ctx.exit()


@click.command(
    name="rewrite",
    epilog=_HELP_STATUS,
    context_settings=SETTINGS,
)
@click.argument("model", type=click.Path(path_type=Path))
@file_option("-o", "--output", metavar="OUT", help="Where to write the result.")
@declared_options(Options)
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
@click.option("--no-validate", is_flag=True, help="Write the result without proving it.")
@declared_options(Settings)
@rare_options(Options, Settings)
@links_option
@file_option("--html", metavar="FILE.html", help="Write the report as a page.")
@file_option("--certificate", metavar="FILE.json", help="Write the certificate; `rewrite certify --check` checks it.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@report_option("the report")
@click.option("-q", "--quiet", is_flag=True, help="Print the last line only.")
@click.option("-v", "--verbose", is_flag=True, help="Print the proof of every block, and more statistics.")
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Print versions.")
def convert(
    model: Path,
    output: Path | None,
    *,
    dry_run: bool,
    no_validate: bool,
    report: Path | None,
    html: Path | None,
    certificate: Path | None,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Replace the MLP blocks of MODEL by attention heads, and prove that the outputs stay the same.

    MODEL is an ONNX file, - for standard input, or a folder such as optimum writes: then OUT is a new folder with all
    models converted, and the other files copied. The result appears at OUT (-: standard output) only if it computes
    what MODEL does: certified for every input, and run with onnxruntime on a few; otherwise no file is written.
    """
    if output is None and not dry_run:
        raise UsageError("where should the result go? give -o OUT, or --dry-run to see the plan only")
    if model.is_dir():
        refused = {"--html": html, "--certificate": certificate, "--force": options.pop("force")}
        refused["--allow-links"] = options.pop("allow_links")
        options |= {"dry_run": dry_run, "validate": not no_validate}
        return _convert_folder(model, output, refused, report=report, quiet=quiet, verbose=verbose, **options)
    check_suffix(output)
    check_report(report, (model, output), suffix=".json", force=options["force"])
    if html is not None:
        check_page(html, (model, output), report=report, force=options["force"])
    if certificate is not None:
        if no_validate or dry_run or STANDARD in (model, output):
            raise UsageError("--certificate needs a run from a file to a file that proves its result")
        check_report(certificate, (model, output, report, html), suffix=".json", force=options["force"])
    from rewriter import rewrite
    from rewriter.report.terminal.console import Console, show_rewriting

    if STANDARD in (output, report) and output == report:
        raise UsageError("-o - and --report - would mix in standard output; give one of them a file")
    # What a stream carries must not be mixed with tables.
    console = Console(quiet=quiet, verbose=verbose, error=STANDARD in (output, report))
    with from_standard_input(model) as source, to_standard_output(output) as out, console.progress() as progress:
        result = rewrite(
            source,
            out,
            dry_run=dry_run,
            validate=not no_validate,
            progress=progress,
            **options,
        )
    # Streams have no name that outlives the command.
    result = replace(result, model=str(model), output=None if result.output is None else str(output))
    if output == STANDARD:
        result = replace(result, files=())
    write_report(report, result.to_json)
    if certificate is not None and result.output is not None and result.validation is not None:
        from rewriter.api.certifying import certification_of

        if result.validation.certificate is not None:
            certification_of(model, result.output, result.validation.certificate).write(certificate)
    if html is not None:
        from rewriter.report.html import write_page

        write_page(result, html)
    show_rewriting(console, result)
    return int(result.exit_status)


def _convert_folder(
    folder: Path,
    output: Path | None,
    refused: dict[str, Any],
    *,
    report: Path | None,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Convert all models of a folder, and print each result under its name; `refused` are flags for one model."""
    flag = next((flag for flag, given in refused.items() if given), None)
    if flag is not None:
        raise UsageError(f"{flag} is for one model, not for a folder; leave it out, or convert the files one by one")
    if output == STANDARD:
        raise UsageError("a folder cannot go to standard output; give -o a name for the new folder")
    check_report(report, (folder, output))
    from rewriter import rewrite_folder
    from rewriter.report.terminal.console import Console, show_rewriting

    console = Console(quiet=quiet, verbose=verbose, error=report == STANDARD)
    with console.progress() as progress:
        result = rewrite_folder(folder, output, progress=progress, **options)
    write_report(report, result.to_json)
    for name, each in result.models.items():
        show_rewriting(console, each, model=name)
    colour = {ExitStatus.CONVERTED: "bold green", ExitStatus.VALIDATION_FAILED: "bold red"}
    for line in result.copied_lines():
        console.line(line)
    console.line(result.summary, colour.get(result.exit_status, "yellow"), always=True)
    return int(result.exit_status)

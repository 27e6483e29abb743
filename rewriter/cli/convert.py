"""`rewrite MODEL -o OUT`, the plain command; `rewriter.rewrite` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from passes.options import Options
from rewriter.cli.options import (
    SETTINGS,
    STANDARD,
    carried_out,
    check_page,
    check_report,
    check_suffix,
    declared_options,
    file_option,
    rare_options,
    report_option,
)
from rewriter.errors import UsageError
from rewriter.files.atomic import write_text
from rewriter.proof.settings import Settings

if TYPE_CHECKING:
    from rewriter.report.report import Report
    from rewriter.report.terminal import Console

COMMON = (
    *("output", "form", "only", "skip", "dry_run", "certificate_only", "providers", "inputs", "html", "force"),
    *("report", "help_all"),
)
"""The options that `rewrite --help` lists; `--help-all` lists all."""

_EPILOG = """\b
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


class Screen(click.Command):
    """A command whose help lists the options in `COMMON` only."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = {param.name for param in self.params if ctx.meta.get("all")} or COMMON
        shown = [param for param in self.get_params(ctx) if param.name in names or "--help" in param.opts]
        records = [record for param in shown if (record := param.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(records)


def _help_all(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta["all"] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from rewriter.api.run import environment

    found = environment()
    parts = [f"{name} {found[name]}" for name in ("onnx", "onnxruntime", "onnx-graphsurgeon", "numpy")]
    click.echo(f"rewrite {found['attnonly']} ({', '.join(parts)})")
    ctx.exit()


@click.command(name="rewrite", cls=Screen, epilog=_EPILOG, context_settings=SETTINGS)
@click.argument("model", type=click.Path(path_type=Path))
@file_option("-o", "--output", metavar="OUT", help="Where to write the result.")
@declared_options(Options)
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
@click.option(
    "--certificate-only/--no-validate", default=None, help="Prove but run nothing; or write the result unproved."
)
@declared_options(Settings)
@rare_options(Options, Settings)
@file_option("--html", metavar="FILE.html", help="Write the report as a page.")
@file_option("--certificate", metavar="FILE.json", help="Write the certificate; `rewrite certify --check` checks it.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@report_option("the report")
@click.option("-q", "--quiet", is_flag=True, help="Print the last line only.")
@click.option("-v", "--verbose", is_flag=True, help="Print the proof of every block, and more statistics.")
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Print versions.")
@click.option(
    "--help-all", is_flag=True, expose_value=False, is_eager=True, callback=_help_all, help="Show all options."
)
def convert(
    model: Path,
    output: Path | None,
    *,
    dry_run: bool,
    certificate_only: bool | None,
    force: bool,
    report: Path | None,
    html: Path | None,
    certificate: Path | None,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Replace the MLP blocks of MODEL by attention heads, and prove that the outputs stay the same.

    MODEL is an ONNX file, or a folder such as optimum writes: then OUT is a new folder with all models converted, and
    the other files copied. The result appears at OUT only if it computes what MODEL does: certified, for every input or
    in a domain that is named, and run with onnxruntime on a few. For models that this machine cannot run there is
    --certificate-only.
    """
    if output is None and not dry_run:
        raise UsageError("where should the result go? give -o OUT, or --dry-run to see the plan only")
    if STANDARD in (model, output):
        raise UsageError("models are read from files and written to files; '-' is for --report only")
    others = (model, output, report, html)
    check_report(report, (model, output), force=force)
    if not model.is_dir():
        check_suffix(output)
    elif html or certificate:
        flag = "--html" if html else "--certificate"
        raise UsageError(f"{flag} is for one model, not for a folder; leave it out, or convert its files one by one")
    check_page(html, others[:3], force=force)
    if certificate is not None:
        if certificate_only is False or dry_run:
            raise UsageError("--certificate needs a run that proves its result")
        check_report(certificate, others, force=force)
    from rewriter import rewrite
    from rewriter.report.terminal import show_report

    validate = {None: True, True: "certificate", False: False}[certificate_only]
    options |= {"dry_run": dry_run, "validate": validate, "force": force}

    def show(console: Console, result: Report) -> None:
        if certificate is not None and result and result.validation.certificate is not None:
            from rewriter.api.certifying import certification_of

            certification_of(model, result.output, result.validation.certificate).write(certificate)
        if html is not None:
            from rewriter.report.html import render

            write_text(html, render(result))
        show_report(console, result)

    how = {"quiet": quiet, "verbose": verbose}
    return carried_out(report, lambda told: rewrite(model, output, progress=told, **options), show, **how)

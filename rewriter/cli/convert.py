"""`rewrite MODEL -o OUT`: the plain command.

Comes in: arguments. Goes out: the file, the tables on standard output, an exit status. The work is `rewriter.api`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from rewriter.cli.options import check_page, check_report
from rewriter.cli.proof_options import proof_options
from rewriter.errors import UsageError
from rewriter.proof.settings import Settings

_HELP_STATUS = """\b
Commands (rewrite COMMAND --help):
  inspect   print the blocks of a model, what they weigh and their heads; write nothing
  validate  judge whether a rewritten model computes what the original does
  diff      compare any two models: graphs, weights, outputs

\b
Exit status:
  0  converted, and proved (or --no-validate, or --dry-run)
  1  the proof failed; nothing is written at OUT
  2  usage
  3  nothing to convert; nothing is written
  4  the model is unreadable, malformed or unsafe
  5  a requested execution provider is not available
"""


def _accuracy(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    if value is None or value == "dtype":
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0.0 < number < 1.0:
        raise click.BadParameter(f"'{value}' is neither 'dtype' nor a number between 0 and 1, such as 1e-6")
    return number


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from importlib.metadata import version

    parts = [f"{name} {version(name)}" for name in ("onnx", "onnxruntime", "onnx-graphsurgeon", "numpy")]
    click.echo(f"rewrite {version('attnonly')} ({', '.join(parts)})")
    ctx.exit()


@click.command(
    name="rewrite",
    epilog=_HELP_STATUS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="OUT", type=click.Path(path_type=Path), help="Where to write the result.")
@click.option(
    "--form",
    type=click.Choice(["local", "masked", "maskless", "staged"]),
    default="local",
    show_default=True,
    help="How heads become nodes.",
)
@click.option(
    "--max-pattern-mb",
    metavar="MB",
    type=click.FloatRange(min=0, min_open=True),
    default=64.0,
    show_default=True,
    help="Largest attention pattern at run time; more heads run in chunks (not in form local).",
)
@click.option("--attention-op", is_flag=True, help="Use ai.onnx Attention nodes (form masked, opset 23 or newer).")
@click.option(
    "--max-tokens",
    metavar="N",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Longest sequence of the forms with one-hot positions (maskless, staged).",
)
@click.option(
    "--bias-token",
    type=click.Choice(["sublayer", "network"]),
    default="sublayer",
    show_default=True,
    help="Each sublayer appends its own, or it is carried through the whole network (form masked).",
)
@click.option(
    "--omega",
    type=click.FloatRange(min=0, min_open=True),
    help="What form maskless lowers forbidden logits by. Default: so that their weights are exactly 0.",
)
@click.option(
    "--scope",
    type=click.Choice(["mlp", "all"]),
    default="mlp",
    show_default=True,
    help="Convert MLP blocks, or every elementwise activation of a linear operator's output.",
)
@click.option("--inline", is_flag=True, help="Write the heads out instead of calling a model-local function.")
@click.option("--only", metavar="GLOB", multiple=True, help="Convert only blocks whose names match (repeatable).")
@click.option("--skip", metavar="GLOB", multiple=True, help="Leave blocks whose names match (repeatable).")
@click.option(
    "--merge", is_flag=True, help="First remove neurons that are proved not to be needed (reads the weights)."
)
@click.option(
    "--gate",
    type=click.Choice(["heads", "product"]),
    default="heads",
    show_default=True,
    help="Gated blocks: heads of value u, or heads for the activation and the product with u as it was.",
)
@click.option(
    "--accuracy",
    metavar="EPS|dtype",
    callback=_accuracy,
    help="Largest error of a head program, over max(1, |f|). Default: dtype, the rounding of the block's type.",
)
@click.option(
    "--domain",
    metavar="R",
    type=click.FloatRange(0, min_open=True),
    help="Fit unnamed activations on |y| <= R. Default: what the model reaches on the inputs, and half as much more.",
)
@click.option("--no-fit", is_flag=True, help="Leave activations that no entry of the table names.")
@click.option("--dry-run", is_flag=True, help="Plan and explain, write nothing.")
@click.option("--no-validate", is_flag=True, help="Write the result without proving it.")
@proof_options
@click.option("--report", metavar="FILE.json", type=click.Path(path_type=Path), help="Write the report as JSON.")
@click.option("--html", metavar="FILE.html", type=click.Path(path_type=Path), help="Write the report as a page.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
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
    quiet: bool,
    verbose: bool,
    settings: Settings,
    **options: Any,
) -> int:
    """Replace the MLP blocks of MODEL by attention heads, and prove that the outputs stay the same.

    MODEL is an ONNX file. The result appears at OUT only when onnxruntime has shown, on inputs made for the model,
    that it computes what MODEL does; otherwise nothing is left.
    """
    if output is None and not dry_run:
        raise UsageError("where should the result go? give -o OUT, or --dry-run to see the plan only")
    if report is not None:
        check_report(report, (model, output), suffix=".json", force=options["force"])
    if html is not None:
        check_page(html, (model, output), report=report, force=options["force"])
    from rewriter.api import rewrite
    from rewriter.report.terminal.console import Console

    console = Console(quiet=quiet, verbose=verbose)
    with console.progress() as progress:
        result = rewrite(
            model,
            output,
            form=options["form"],
            scope=options["scope"],
            inline=options["inline"],
            only=options["only"],
            skip=options["skip"],
            merge=options["merge"],
            gate=options["gate"],
            fit=not options["no_fit"],
            accuracy=options["accuracy"],
            domain=options["domain"],
            max_pattern_mb=options["max_pattern_mb"],
            attention_op=options["attention_op"],
            max_tokens=options["max_tokens"],
            omega=options["omega"],
            bias_token=options["bias_token"],
            dry_run=dry_run,
            validate=not no_validate,
            force=options["force"],
            details=html is not None,
            progress=progress,
            **vars(settings),
        )
    if report is not None:
        result.write(report)
    if html is not None:
        from rewriter.report.html import write_page

        write_page(result, html)
    console.show(result, proved=not no_validate, planned_only=dry_run)
    return int(result.exit_status)

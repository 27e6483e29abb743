"""`rewrite MODEL -o OUT`: the plain command.

Comes in: arguments. Goes out: the file, the tables on standard output, an exit status. The work is `rewriter.api`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rewriter.cli.options import check_report, dimension
from rewriter.errors import UsageError

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
    "--form", type=click.Choice(["local"]), default="local", show_default=True, help="How heads become nodes."
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
@click.option("--dry-run", is_flag=True, help="Plan and explain, write nothing.")
@click.option("--no-validate", is_flag=True, help="Write the result without proving it.")
@click.option(
    "--provider",
    "providers",
    type=click.Choice(["cpu", "cuda"]),
    multiple=True,
    help="Execution provider to prove on (repeatable). Default: cpu, and cuda where it works.",
)
@click.option("--inputs", metavar="FILE.npz", type=click.Path(path_type=Path), help="Prove on these inputs instead.")
@click.option(
    "--dim", "dims", metavar="NAME=VALUE", multiple=True, callback=dimension, help="Size of a symbolic dimension."
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the inputs.")
@click.option("--report", metavar="FILE.json", type=click.Path(path_type=Path), help="Write the report as JSON.")
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
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Replace the MLP blocks of MODEL by attention heads, and prove that the outputs stay the same.

    MODEL is an ONNX file. The result appears at OUT only when onnxruntime has shown, on inputs made for the model,
    that it computes what MODEL does; otherwise nothing is left.
    """
    if output is None and not dry_run:
        raise UsageError("where should the result go? give -o OUT, or --dry-run to see the plan only")
    if report is not None:
        check_report(report, (model, output), force=options["force"])
    from rewriter.api import rewrite
    from rewriter.cli.console import Console

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
            dry_run=dry_run,
            validate=not no_validate,
            providers=options["providers"] or None,
            inputs=options["inputs"],
            dims=options["dims"],
            seed=options["seed"],
            force=options["force"],
            progress=progress,
        )
    if report is not None:
        result.write(report)
    console.show(result, proved=not no_validate, planned_only=dry_run)
    return int(result.exit_status)

"""`rewrite passes`: the passes of the pipeline, in order, and their options."""

from __future__ import annotations

from inspect import getdoc

import click

from rewriter.cli.options import SETTINGS


@click.command(context_settings=SETTINGS)
def passes() -> int:
    """List the passes of the pipeline, in the order in which they run, and their options.

    `rewrite --time-passes` prints the time of each pass, `--save-after PASS=FILE` saves the model after a pass. In
    Python the pipeline can be changed: see `rewriter.rewrite(passes=...)`.
    """
    from passes.options import Options
    from passes.pipeline import PASSES, MlpToAttention
    from rewriter.options import options_of

    for each in PASSES:
        click.echo(f"{each.name:18} {getdoc(each)}")
        needs = f"after {', '.join(each.requires)}; " if each.requires else ""
        click.echo(f"{'':18} {needs}runs {each.runs}")
        for option in options_of(Options) if each is MlpToAttention else ():
            click.echo(f"{'':20} {option.command_line:18} {option.help}")
    return 0

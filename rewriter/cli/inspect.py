"""`rewrite inspect MODEL`: the blocks of a model as tables or JSON; `rewriter.api.inspect` does the work."""

from __future__ import annotations

import json
from pathlib import Path

import click

from passes.options import Options
from rewriter.cli.declared import declared_options


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("model", type=click.Path(path_type=Path))
@declared_options(
    Options,
    only=("scope", "gate"),
    scope={"help": "Look for MLP blocks, or for every elementwise activation of a linear operator's output."},
    gate={"help": "How to convert gated blocks, as for rewrite."},
)
@click.option("--head-dim", type=click.IntRange(1), help="d_head for the head accounting; default: the model's own.")
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Sequence length for which heads, widths and peak memory of each form are computed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(model: Path, scope: str, gate: str, head_dim: int | None, *, tokens: int, as_json: bool) -> int:
    """Print the MLP blocks of MODEL, their size, and the heads that they would become; write nothing.

    Exit status: 0 if some block can be converted, 3 if none can; 2 and 4 as for `rewrite`.
    """
    from rewriter.api import inspect as look

    found = look(model, scope=scope, gate=gate, head_dimension=head_dim, tokens=tokens)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        from rewriter.cli.accounting import show_inspection
        from rewriter.report.terminal.console import Console

        show_inspection(found, Console())
    return int(found.report.exit_status)

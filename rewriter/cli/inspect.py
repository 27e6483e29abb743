"""`rewrite inspect MODEL`: what is in a model, without writing anything.

Comes in: arguments. Goes out: tables or JSON on standard output, an exit status. The work is `rewriter.api.inspect`.
"""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--scope",
    type=click.Choice(["mlp", "all"]),
    default="mlp",
    show_default=True,
    help="Look for MLP blocks, or for every elementwise activation of a linear operator's output.",
)
@click.option(
    "--gate",
    type=click.Choice(["heads", "product"]),
    default="heads",
    show_default=True,
    help="What becomes of gated blocks, as for rewrite.",
)
@click.option("--head-dim", type=click.IntRange(1), help="d_head for the head accounting; default: the model's own.")
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Length of the sequence that heads, widths and peak memory of each form are given for.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(model: Path, scope: str, gate: str, head_dim: int | None, *, tokens: int, as_json: bool) -> int:
    """Print the MLP blocks of MODEL, what they weigh, and the heads that they would become; write nothing.

    Exit status: 0 when blocks can be converted, 3 when there are none, 2, 4 as for `rewrite`.
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

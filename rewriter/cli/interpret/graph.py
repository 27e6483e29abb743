"""`rewrite graph MODEL`: how a logit is made, as a graph; `rewriter.attribution_graph` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rewriter.cli.interpret.options import files_of, logit_options
from rewriter.cli.options import MODEL, check_report, command, file_option, report_options, write_report
from rewriter.cli.streams import STANDARD
from rewriter.errors import UsageError
from rewriter.proof.inputs.given import Text
from rewriter.text import quoted


@command(
    MODEL, ok="the graph was made", failed="the model cannot be evaluated", usage="this output cannot be attributed"
)
@click.argument("model", type=click.Path(path_type=Path))
@logit_options
@file_option("-o", "--out", metavar="FILE.json", help="Write the pruned graph to FILE.json.")
@click.option(
    "--node-threshold",
    type=click.FloatRange(0.0, 1.0),
    metavar="X",
    default=0.8,
    show_default=True,
    help="Keep the nodes that have this share of the influence on the logit.",
)
@click.option(
    "--edge-threshold",
    type=click.FloatRange(0.0, 1.0),
    metavar="X",
    default=0.98,
    show_default=True,
    help="The same for edges, among those nodes.",
)
@click.option(
    "--max-nodes",
    type=click.IntRange(0),
    metavar="N",
    default=2000,
    show_default=True,
    help="Heads and neurons with nodes of their own; others are one node per sublayer and token.",
)
@report_options("the scores")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def graph(
    model: Path,
    *,
    inputs: Path | Text,
    logit: int,
    out: Path | None,
    report: Path | None,
    quiet: bool,
    force: bool,
    **how: Any,
) -> int:
    """Make the attribution graph of a logit: tokens, biases, heads and neurons, and their direct effects.

    Edges are exact with patterns and normalisation denominators held, without transcoders and without error nodes. The
    file has the JSON schema of circuit-tracer and Neuronpedia.
    """
    for path in (out, report):
        if path is not None:
            check_report(path, (model, *files_of(inputs), out if path is report else None), force=force)
    if out is not None and out.exists() and not force:
        raise UsageError(f"{quoted(out)} exists; pass --force to replace it, or choose another path")
    from rewriter.api.interpret.graph.tracing import attribution_graph
    from rewriter.report.report import plain_data, write_json

    found = attribution_graph(model, inputs, logit, **how)
    made = plain_data(found.to_json())
    if out is not None:
        write_json(out, made)
    facts = {
        **made["metadata"],
        "nodes": len(made["nodes"]),
        "links": len(made["links"]),
        "all_nodes": len(found.nodes),
    }
    write_report(report, lambda: facts)
    whole, left = (
        f"replacement score {facts[f'{kind}replacement_score']:.4f}, "
        f"completeness score {facts[f'{kind}completeness_score']:.4f}"
        for kind in ("", "pruned_")
    )
    residual = f"in-edges off by {facts['largest_residual']:.2g} at most"
    lines = [
        f"logit {found.logit:.6g}",
        f"all: {len(found.nodes)} nodes, {whole}, {residual}",
        f"pruned: {facts['nodes']} nodes, {facts['links']} edges, {left}",
    ]
    if out is not None:
        lines[-1] += f", written to {out}"
    for line in lines[-1:] if quiet else lines:
        click.echo(line, err=report == STANDARD)
    return 0

"""`rewrite graph MODEL`: how a logit is made, as a graph; `rewriter.attribution_graph` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rewriter.cli.interpret.options import files_of, logit_options
from rewriter.cli.options import MODEL, check_new, check_report, command, file_option, report_option, write_report
from rewriter.cli.streams import STANDARD
from rewriter.proof.inputs.given import Text


@command(
    MODEL, ok="the graph was made", failed="the model cannot be evaluated", usage="this output cannot be attributed"
)
@click.argument("model", type=click.Path(path_type=Path))
@logit_options
@file_option("-o", "--out", metavar="FILE.json", help="Write the pruned graph to FILE.json.")
@report_option("the scores")
def graph(
    model: Path,
    *,
    inputs: Path | Text,
    pair: tuple[int, int | None],
    out: Path | None,
    report: Path | None,
    **how: Any,
) -> int:
    """Make the attribution graph of a logit: tokens, biases, heads and neurons, and their direct effects.

    Edges are exact with patterns and normalisation denominators held, without transcoders and without error nodes. The
    file has the JSON schema of circuit-tracer and Neuronpedia.
    """
    for path in (out, report):
        if path is not None:
            check_report(path, (model, *files_of(inputs), out if path is report else None))
    if out is not None:
        check_new(out)
    from rewriter.api.interpret.graph.tracing import attribution_graph
    from rewriter.report.report import plain_data, write_json

    found = attribution_graph(model, inputs, pair[0], minus=pair[1], **how)
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
    for line in lines:
        click.echo(line, err=report == STANDARD)
    return 0

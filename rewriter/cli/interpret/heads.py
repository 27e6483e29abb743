"""`rewrite heads MODEL`: the heads of a model, listed or written to a file; `rewriter.heads` does the work."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import click

from rewriter.cli.interpret.options import program_option
from rewriter.cli.options import check_report, report_options, write_report
from rewriter.cli.streams import STANDARD
from rewriter.errors import ExitStatus
from rewriter.text import one_line

_HELP_STATUS = """\b
Exit status:
  0  heads were found
  2  usage error, or the output cannot be written
  3  no heads were found
  4  the model is unreadable, malformed or unsafe
"""


@click.command(epilog=_HELP_STATUS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the tensors to FILE.safetensors or FILE.npz.",
)
@click.option("--fold-ln", is_flag=True, help="Fold the scale and bias of normalisations into the weights after them.")
@program_option
@click.option("--names", metavar="GLOB", multiple=True, help="Only tensors whose names match (repeatable).")
@report_options("the list of heads")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def heads(
    model: Path,
    *,
    output: Path | None,
    fold_ln: bool,
    program: str,
    names: tuple[str, ...],
    report: Path | None,
    quiet: bool,
    force: bool,
) -> int:
    """List every head of MODEL, original heads and the heads of its neurons; with -o also write their weights.

    MODEL is an original or a rewritten file. Names and shapes are those of TransformerLens. Whatever is not understood
    is listed with the node.
    """
    from rewriter.api.interpret.arrays import check_suffix
    from rewriter.api.interpret.index import heads as index
    from rewriter.files.save import check_output

    if report is not None:
        check_report(report, (model, output))
    if output is not None:
        check_suffix(output)
    found = index(model, fold_ln=fold_ln, program=program)
    if names:
        found = found.only(lambda name: any(fnmatchcase(name, glob) for glob in names))
    if output is not None:
        check_output(output, source=found.source, force=force)
        found.write(output)
    facts = found.to_json()
    write_report(report, lambda: facts)
    lines = [
        f"{one_line(each.name, 100):<24} {_told(facts['sublayers'][each.name])}  {one_line(each.module, 160)}"
        for each in found.sublayers
    ]
    lines += [f"not understood: {one_line(miss.reason, 160)} [{one_line(miss.node, 100)}]" for miss in found.missed]
    total = sum(each.sublayer.heads for each in found.sublayers)
    written = "" if output is None else f", written to {output}"
    last = f"{total} heads in {len(found.sublayers)} sublayers, {len(found)} tensors{written}"
    for line in (*([] if quiet else lines), last):
        click.echo(line.rstrip(), err=report == STANDARD)
    return int(ExitStatus.CONVERTED if found.sublayers else ExitStatus.NOTHING_TO_CONVERT)


def _told(facts: dict[str, object]) -> str:
    if facts["kind"] == "neurons":
        return f"{facts['heads']:>6} heads of {facts['neurons']} neurons, {facts['activation']} as {facts['program']}"
    extras = [word for word in ("rotary", "cross") if facts[word]]
    groups = [] if facts["groups"] == 1 else [f"{facts['groups']} per key and value"]
    return ", ".join([f"{facts['heads']:>6} heads", *groups, *extras])

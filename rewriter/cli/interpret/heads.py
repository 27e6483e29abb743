"""`rewrite heads MODEL`: the heads of a model, listed, written to a file or shown on a page.

`rewriter.heads` and `rewriter.head_pictures` do the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from rewriter.cli.declared import declared_options
from rewriter.cli.interpret.options import logits
from rewriter.cli.options import (
    MODEL,
    check_new,
    check_page,
    check_report,
    command,
    file_option,
    report_option,
    write_report,
)
from rewriter.cli.streams import STANDARD
from rewriter.errors import ExitStatus, UsageError
from rewriter.proof.settings import Settings
from rewriter.text import one_line


@command(
    MODEL,
    ok="heads were found",
    failed="with --html: the model cannot be run or evaluated on these inputs",
    usage="the output cannot be written",
    nothing="no heads were found",
)
@click.argument("model", type=click.Path(path_type=Path))
@file_option("-o", "--output", metavar="FILE", help="Write the tensors to FILE.safetensors or FILE.npz.")
@click.option("--fold-ln", is_flag=True, help="Fold the scale and bias of normalisations into the weights after them.")
@file_option(
    "--html",
    "page",
    metavar="FILE.html",
    help="Write a page with patterns, activations and tokens of heads on one sequence of --inputs.",
)
@declared_options(
    Settings, only=("inputs",), inputs={"metavar": "FILE.npz", "help": "With --html: the inputs, one case."}
)
@click.option("--logit", "pair", metavar="N[-M]", callback=logits, help="With --html: attribute entry N of the output.")
@file_option("--tokenizer", metavar="FILE.json", help="With --html: show tokens as text, by a tokenizer.json.")
@report_option("the list of heads")
def heads(
    model: Path,
    *,
    output: Path | None,
    fold_ln: bool,
    report: Path | None,
    page: Path | None,
    inputs: Path | None,
    pair: tuple[int | None, int | None],
    tokenizer: Path | None,
) -> int:
    """List every head of MODEL, original heads and the heads of its neurons; -o also writes their weights.

    MODEL is an original or a rewritten file. Names and shapes are those of TransformerLens. Whatever is not understood
    is listed with the node. A page (--html) shows heads on one sequence, and with --logit what they add to a logit.
    """
    from rewriter.api.interpret.arrays import check_suffix
    from rewriter.api.interpret.index import heads as index
    from rewriter.api.interpret.pictures.contents import head_pictures
    from rewriter.files.save import check_output
    from rewriter.report.html.heads import write_heads_page

    _check(page, {"inputs": inputs, "logit": pair[0], "tokenizer": tokenizer}, (model, output), report=report)
    check_report(report, (model, output, inputs))
    if output is not None:
        check_suffix(output)
        check_new(output)
    found = index(model, fold_ln=fold_ln)
    if output is not None:
        check_output(output, source=found.source, force=False)
        found.write(output)
    if page is not None and inputs is not None:
        write_heads_page(head_pictures(model, inputs, logit=pair[0], minus=pair[1], tokenizer=tokenizer), page)
    facts = found.to_json()
    write_report(report, lambda: facts)
    lines = [
        f"{one_line(each.name, 100):<24} {_told(facts['sublayers'][each.name])}  {one_line(each.module, 160)}"
        for each in found.sublayers
    ]
    lines += [f"not understood: {one_line(miss.reason, 160)} [{one_line(miss.node, 100)}]" for miss in found.missed]
    total = sum(each.sublayer.heads for each in found.sublayers)
    written = "" if output is None else f", written to {output}"
    written += "" if page is None else f", page written to {page}"
    last = f"{total} heads in {len(found.sublayers)} sublayers, {len(found)} tensors{written}"
    for line in (*lines, last):
        click.echo(line.rstrip(), err=report == STANDARD)
    return int(ExitStatus.CONVERTED if found.sublayers else ExitStatus.NOTHING_TO_CONVERT)


def _check(
    page: Path | None, given: Mapping[str, Any], others: tuple[Path | None, ...], *, report: Path | None
) -> None:
    """Refuse options of the page without a page, and a page that cannot be made, before the long work."""
    if page is None:
        first = next((name for name, value in given.items() if value is not None), None)
        if first is not None:
            raise UsageError(f"--{first} is for the page; add --html FILE.html")
        return
    if given["inputs"] is None:
        raise UsageError("--html shows heads on inputs; add --inputs FILE.npz")
    check_page(page, (*others, given["inputs"]), report=report, force=False)


def _told(facts: dict[str, object]) -> str:
    if facts["kind"] == "neurons":
        return f"{facts['heads']:>6} heads of {facts['neurons']} neurons, {facts['activation']} as {facts['program']}"
    extras = [word for word in ("rotary", "cross") if facts[word]]
    groups = [] if facts["groups"] == 1 else [f"{facts['groups']} per key and value"]
    return ", ".join([f"{facts['heads']:>6} heads", *groups, *extras])

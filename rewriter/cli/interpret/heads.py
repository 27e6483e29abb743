"""`rewrite heads MODEL`: the heads of a model, listed, written to a file or shown on a page.

`rewriter.heads` and `rewriter.head_pictures` do the work.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from rewriter.cli.declared import declared_options
from rewriter.cli.interpret.options import page_options, program_option
from rewriter.cli.options import MODEL, check_page, check_report, command, file_option, report_options, write_report
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
@program_option
@file_option(
    "--html",
    "page",
    metavar="FILE.html",
    help="Write a page with patterns, activations and tokens of heads on one sequence of --inputs.",
)
@declared_options(
    Settings, only=("inputs",), inputs={"metavar": "FILE.npz", "help": "With --html: the inputs, one case."}
)
@page_options
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
    page: Path | None,
    inputs: Path | None,
    **shown: Any,
) -> int:
    """List every head of MODEL, original heads and the heads of its neurons; with -o also write their weights.

    MODEL is an original or a rewritten file. Names and shapes are those of TransformerLens. Whatever is not understood
    is listed with the node. With --html heads are shown on one sequence, with --logit also what they add to a logit.
    """
    from rewriter.api.interpret.arrays import check_suffix
    from rewriter.api.interpret.index import heads as index
    from rewriter.files.save import check_output

    _check(page, inputs, shown, (model, output), report=report, force=force)
    check_report(report, (model, output, inputs))
    if output is not None:
        check_suffix(output)
    found = index(model, fold_ln=fold_ln, program=program)
    if names:
        found = found.only(lambda name: any(fnmatchcase(name, glob) for glob in names))
    if output is not None:
        check_output(output, source=found.source, force=force)
        found.write(output)
    if page is not None and inputs is not None:
        _write_page(model, inputs, page, {**shown, "program": program})
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
    for line in (*([] if quiet else lines), last):
        click.echo(line.rstrip(), err=report == STANDARD)
    return int(ExitStatus.CONVERTED if found.sublayers else ExitStatus.NOTHING_TO_CONVERT)


_PAGE_DEFAULTS = {"logit": None, "minus": None, "output_name": None, "position": -1, "sequence": 0, "tokenizer": None}


def _check(
    page: Path | None,
    inputs: Path | None,
    shown: dict[str, Any],
    others: tuple[Path | None, ...],
    *,
    report: Path | None,
    force: bool,
) -> None:
    """Refuse options of the page without a page, and a page that cannot be made, before the long work."""
    if page is None:
        given = [name for name, usual in _PAGE_DEFAULTS.items() if shown[name] != usual]
        if inputs is not None or given:
            option = "inputs" if inputs is not None else {"output_name": "output-name"}.get(given[0], given[0])
            raise UsageError(f"--{option} is for the page; add --html FILE.html")
        return
    if inputs is None:
        raise UsageError("--html shows heads on inputs; add --inputs FILE.npz")
    if shown["logit"] is None and (shown["minus"] is not None or shown["output_name"] is not None):
        raise UsageError("--minus and --output-name say which logit is attributed; add --logit N")
    check_page(page, (*others, inputs), report=report, force=force)


def _write_page(model: Path, inputs: Path, page: Path, shown: dict[str, Any]) -> None:
    from rewriter.api.interpret.pictures.contents import head_pictures
    from rewriter.report.html.heads import write_heads_page

    output, most = shown.pop("output_name"), shown.pop("max_neurons")
    write_heads_page(head_pictures(model, inputs, output=output, most=most, **shown), page)


def _told(facts: dict[str, object]) -> str:
    if facts["kind"] == "neurons":
        return f"{facts['heads']:>6} heads of {facts['neurons']} neurons, {facts['activation']} as {facts['program']}"
    extras = [word for word in ("rotary", "cross") if facts[word]]
    groups = [] if facts["groups"] == 1 else [f"{facts['groups']} per key and value"]
    return ", ".join([f"{facts['heads']:>6} heads", *groups, *extras])

"""`rewrite attribute MODEL`: which heads, tokens and biases a logit is made of; `rewriter.attribute` does the work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewriter.cli.interpret.options import files_of, logit_options
from rewriter.cli.options import MODEL, check_report, command, file_option, report_options, write_report
from rewriter.cli.streams import STANDARD
from rewriter.errors import UsageError
from rewriter.proof.inputs.given import Text

if TYPE_CHECKING:
    from rewriter.api.interpret.parts import Attribution


@command(
    MODEL,
    ok="the logit was attributed",
    failed="the model cannot be evaluated",
    usage="this output cannot be attributed",
)
@click.argument("model", type=click.Path(path_type=Path))
@logit_options
@click.option("--patching", is_flag=True, help="Also run the model without what each MLP writes at each token.")
@file_option(
    "--against", metavar="FILE.npz", help="--patching by what each MLP writes on these inputs, of the same shape."
)
@click.option("--against-text", metavar="TEXT", help="The same for a text with as many tokens as --text.")
@click.option("--top", type=click.IntRange(1), metavar="K", default=10, show_default=True, help="Rows of each table.")
@report_options("all contributions")
def attribute(
    model: Path,
    *,
    inputs: Path | Text,
    logit: int,
    minus: int | None,
    output: str | None,
    against: Path | None,
    against_text: str | None,
    top: int,
    report: Path | None,
    quiet: bool,
    **how: Any,
) -> int:
    """Attribute a logit to heads, tokens and biases: what writes it directly, and along all paths.

    Patterns and normalisation denominators are held at their values; both sums equal the logit, and the residual is
    printed.
    """
    other = _other(against, against_text, inputs)
    check_report(report, (model, *files_of(inputs), against))
    from rewriter.api.interpret.attribution import attribute as attributed

    found = attributed(model, inputs, logit, minus=minus, output=output, against=other, **how)
    sums = {"direct": found.direct, "paths": found.paths}
    write_report(report, lambda: _facts(found))
    lines = [f"logit {found.logit:.6g}" + _between(found.entries)]
    for name, parts in () if quiet else sums.items():
        lines += ["", f"{name}: the sum is off by {found.residuals[name]:.2g}"]
        lines += [f"  {value:+12.6f}  {part}" for part, value in _largest(found.by_neuron(parts), top, found.tokens)]
    if found.correlation is not None:
        lines += ["", f"correlation with patching, over MLPs and tokens: {found.correlation:.4f}"]
    click.echo("\n".join(lines), err=report == STANDARD)
    return 0


def _other(against: Path | None, text: str | None, inputs: Path | Text) -> Path | Text | None:
    if text is None:
        return against
    if against is not None or isinstance(inputs, Path):
        raise UsageError("--against-text goes with --text and --tokenizer; use --against FILE.npz with --inputs")
    return Text(text, inputs.tokenizer)


def _facts(found: Attribution) -> dict[str, Any]:
    """JSON-ready data: every contribution of both sums."""
    import numpy as np

    from rewriter.report.report import plain_data

    sums = {"direct": found.direct, "paths": found.paths}
    facts: dict[str, Any] = {
        name: {part: np.asarray(array).tolist() for part, array in parts.items()} for name, parts in sums.items()
    }
    if found.tokens:
        facts |= {"tokens": list(found.tokens), "entries": list(found.entries)}
    facts |= {"logit": found.logit, "residuals": dict(found.residuals), "correlation": found.correlation}
    return dict(plain_data(facts))


def _between(entries: tuple[str, ...]) -> str:
    """The tokens whose logits these are, where that is known."""
    return "".join(f"{mark}'{entry}'" for mark, entry in zip((" ", " - "), entries, strict=False))


def _largest(parts: Mapping[str, Any], top: int, tokens: tuple[str, ...]) -> list[tuple[str, float]]:
    """The contributions of largest size; those of heads and tokens with their number, of tokens with their text."""
    import numpy as np

    rows: list[tuple[str, float]] = []
    for name, part in parts.items():
        array = np.asarray(part)
        for place, value in enumerate(array.flat):
            said = f" '{tokens[place]}'" if tokens and name == "embed" and array.ndim else ""
            rows.append((f"{name}[{place}]{said}" if array.ndim else name, float(value)))
    return sorted(rows, key=lambda row: -abs(row[1]))[:top]

"""`rewrite attribute MODEL`: which heads, tokens and biases a logit is made of; `rewriter.attribute` does the work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rewriter.cli.interpret.options import files_of, logit_options, top_option
from rewriter.cli.options import MODEL, check_report, command, report_option, write_report
from rewriter.cli.streams import STANDARD
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
@top_option
@report_option("all contributions")
def attribute(
    model: Path,
    *,
    inputs: Path | Text,
    pair: tuple[int, int | None],
    top: int,
    report: Path | None,
    **how: Any,
) -> int:
    """Attribute a logit to heads, tokens and biases: what writes it directly, and along all paths.

    Patterns and normalisation denominators are held at their values; both sums equal the logit, and the residual is
    printed.
    """
    check_report(report, (model, *files_of(inputs)))
    from rewriter.api.interpret.attribution import attribute as attributed

    found = attributed(model, inputs, pair[0], minus=pair[1], **how)
    sums = {"direct": found.direct, "paths": found.paths}
    write_report(report, lambda: _facts(found))
    lines = [f"logit {found.logit:.6g}" + _between(found.entries)]
    for name, parts in sums.items():
        lines += ["", f"{name}: the sum is off by {found.residuals[name]:.2g}"]
        lines += [f"  {value:+12.6f}  {part}" for part, value in _largest(found.by_neuron(parts), top, found.tokens)]
    if found.correlation is not None:
        lines += ["", f"correlation with patching, over MLPs and tokens: {found.correlation:.4f}"]
    click.echo("\n".join(lines), err=report == STANDARD)
    return 0


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

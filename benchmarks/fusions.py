"""What of other tools' work `rewrite certify` can prove: `python -m benchmarks.fusions [-o docs/comparing.md]`.

Each tool changes each committed model, and the result is certified against the original, or else against what
onnxruntime makes of it at level basic, which only folds constants and drops nodes that pass on. Prints a table, or
puts it between its marks in a page.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import click
import onnx

import rewriter
from models.files import hints_of
from models.registry import COMMITTED, get
from models.tools import optimisers
from models.tools.common import Hints, quiet
from rewriter.report.certification import Certification

MODELS = {Path(each.file).stem: each.entry for each in COMMITTED}
"""Committed model to its entry."""
_MARKED = re.compile(r"(<!-- made by python -m benchmarks.fusions -->\n).*?(<!-- end -->)", re.DOTALL)


def _by_onnxscript(source: Path, target: Path, _: Hints) -> None:
    from onnxscript import optimizer

    onnx.save(optimizer.optimize(onnx.load(source)), target)


BASIC = "onnxruntime, basic"
TOOLS: dict[str, Callable[[Path, Path, Hints], None]] = {
    BASIC: optimisers.runtime_level("basic"),
    "onnxruntime, extended": optimisers.runtime_level("extended"),
    "onnxruntime, all": optimisers.runtime_level("all"),
    "onnxruntime, transformer optimiser": optimisers.transformers_optimizer(level=0),
    "the same with FastGelu for Gelu": optimisers.transformers_optimizer(level=0, approximate=True),
    "onnxslim": optimisers.slim,
    "onnxsim": optimisers.simplify,
    "onnxscript": _by_onnxscript,
}


def verdict(found: Certification) -> str:
    """Certified, refuted, or undecided with the first reason."""
    if found.certificate.certified:
        return "certified"
    return f"{'**refuted**' if found.certificate.refuted else 'undecided'} ({found.problems[0]})"


def judged(model: Path, folder: Path) -> dict[str, str]:
    """Tool to verdict."""
    found: dict[str, str] = {}
    hints = hints_of(get(MODELS[model.stem]))
    for tool, make in TOOLS.items():
        target = folder / f"{len(found)}.onnx"
        try:
            with quiet():
                make(model, target, hints)
        except Exception as error:  # noqa: BLE001 - tools raise anything
            found[tool] = f"— ({error})"
            continue
        found[tool] = verdict(rewriter.certify(model, target))
        if found[tool].startswith("undecided") and tool != BASIC:
            again = verdict(rewriter.certify(folder / "0.onnx", target))
            found[tool] = found[tool] if again.startswith("undecided") else f"{again}, from basic"
    return found


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The page. Default: print, with the reasons.")
def main(output: Path | None) -> None:
    """Certify what other tools make of the committed models."""
    warnings.simplefilter("ignore")
    folder = Path(__file__).resolve().parents[1] / "models"
    rows = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            rows[name] = judged(folder / f"{name}.onnx", Path(scratch))
    lines = [f"| tool | {' | '.join(MODELS)} |", f"| --- |{' --- |' * len(MODELS)}"]
    for tool in TOOLS:
        cells = [re.sub(r" \(.*\)", "", rows[name][tool]) for name in MODELS]
        lines.append(f"| {tool} | {' | '.join(cells)} |")
    if output is None:
        click.echo("\n".join(lines))
        for name, verdicts in rows.items():
            for tool, said in verdicts.items():
                click.echo(f"{name}, {tool}: {said}"[:200])
        return
    text = output.read_text(encoding="utf-8")
    made = "\n".join(lines)
    output.write_text(_MARKED.sub(lambda marks: f"{marks[1]}{made}\n{marks[2]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()

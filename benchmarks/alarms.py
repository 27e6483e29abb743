"""`python -m benchmarks.alarms`: false alarms of the proof, and how tight its tolerances are.

Every committed model is rewritten in every form and proved on inputs of many seeds. All of these rewritings are
correct, so each failure is a false alarm. Tightness is the allowed error of an output over its measured error, or over
the spacing of floats at the output's largest value if that is larger; the maximum over outputs and seeds is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from benchmarks.common import RESULTS, ROOT, print_table, write_json
from passes.forms import FORMS
from rewriter import Report, rewrite

MODELS = tuple(sorted((ROOT / "models").glob("*.onnx")))
EPS = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Row:
    """One model in one form, over all seeds.

    Attributes:
        model: file name.
        form: the form.
        seeds: number of proofs.
        alarms: how many of them failed.
        tightness: largest allowed error over the larger of measured error and spacing of floats.
        ratio: largest error against float64, rewritten over original.
        certified: largest bound from certified errors, as a fraction of an output's largest value.
        failures: the first lines of failed proofs.
    """

    model: str
    form: str
    seeds: int
    alarms: int
    tightness: float
    ratio: float
    certified: float
    failures: tuple[str, ...]


def measure(model: Path, form: str, seeds: int) -> Row:
    """Prove one model in one form with many seeds."""
    proofs = [rewrite(model, form=form, seed=seed) for seed in range(seeds)]
    failures = [each.validation.failures[0] for each in proofs if each.validation and each.validation.failures]
    figures = [figure for each in proofs for figure in _figures(each)]
    return Row(
        model=model.stem,
        form=form,
        seeds=seeds,
        alarms=len(failures),
        tightness=max(figure[0] for figure in figures),
        ratio=max(figure[1] for figure in figures),
        certified=max(figure[2] for figure in figures),
        failures=tuple(dict.fromkeys(failures)),
    )


def _figures(report: Report) -> Iterator[tuple[float, float, float]]:
    """(tightness, ratio of errors, certified share) of every output."""
    if report.validation is None:
        return
    for proof in report.validation.providers.values():
        for each in proof.allowances.values():
            tightness = each.allowed / max(each.rewritten, EPS * each.scale)
            yield tightness, proof.error_ratio or 0.0, each.certified / each.scale


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--seeds", default=200, help="Seeds of the inputs.")
@click.option("--form", "forms", multiple=True, type=click.Choice(list(FORMS)), default=list(FORMS))
@click.option("--model", "models", multiple=True, type=click.Path(path_type=Path, exists=True), default=list(MODELS))
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False), default=RESULTS / "alarms.json")
def main(seeds: int, forms: tuple[str, ...], models: tuple[Path, ...], path: Path) -> None:
    """Count false alarms of the proof over seeds, models and forms."""
    rows = [measure(model, form, seeds) for form in forms for model in models]
    write_json(path, "alarms", {"seeds": seeds}, [asdict(row) for row in rows])
    cells = [
        (
            row.form,
            row.model,
            str(row.seeds),
            str(row.alarms),
            f"{row.tightness:.1f}",
            f"{row.ratio:.2f}",
            f"{row.certified:.1e}",
        )
        for row in rows
    ]
    columns = ("form", "model", "seeds", "alarms", "allowed / measured", "error ratio", "certified / scale")
    print_table("False alarms, and how tight the allowances are", columns, cells)


if __name__ == "__main__":
    main()

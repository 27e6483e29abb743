"""`python -m benchmarks.alarms`: false alarms of the proof, and how tight its allowances are.

Every committed model is rewritten in every form and proved on inputs of many seeds. All of these rewritings are right,
so each failure is a false alarm. Tightness is the allowed error of an output over the larger of the error that was
measured and the spacing of floats at the output's largest value; the largest over outputs and seeds is reported.

A run of all models, forms and 200 seeds takes hours. `--minutes` ends a run early; the next run goes on where the
results end, so that the counts grow from run to run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
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
    """One model in one form, over the seeds 0 to `seeds` - 1.

    Attributes:
        model: file name.
        form: how heads become nodes.
        seeds: how many proofs were carried out.
        alarms: how many of them failed.
        tightness: allowed error over the larger of measured error and spacing of floats; largest.
        use: measured error over allowed error; largest. An alarm is above 1.
        ratio: error against float64, rewritten over original; largest.
        certified: what certified errors amount to, as a share of an output's largest value; largest.
        failures: the first lines of failed proofs.
    """

    model: str
    form: str
    seeds: int = 0
    alarms: int = 0
    tightness: float = 0.0
    use: float = 0.0
    ratio: float = 0.0
    certified: float = 0.0
    failures: tuple[str, ...] = ()

    def extended(self) -> Row:
        """The row with the next seed."""
        path = ROOT / "models" / f"{self.model}.onnx"
        proof = rewrite(path, form=self.form, seed=self.seeds)
        failures = proof.problems[:1]
        figures = [(self.tightness, self.use, self.ratio, self.certified), *_figures(proof)]
        tightness, use, ratio, certified = (max(each) for each in zip(*figures, strict=True))
        return replace(
            self,
            seeds=self.seeds + 1,
            alarms=self.alarms + len(failures),
            tightness=tightness,
            use=use,
            ratio=ratio,
            certified=certified,
            failures=tuple(dict.fromkeys((*self.failures, *failures))),
        )


def _figures(report: Report) -> Iterator[tuple[float, float, float, float]]:
    """(tightness, use, ratio of errors, certified share) of every output."""
    if report.proof is None:
        return
    for proof in report.validation.providers.values():
        for each in proof.compared.values():
            tightness = each.allowed / max(each.error, EPS)
            worst = report.validation.certificate.worst if report.validation.certificate is not None else 0.0
            yield tightness, each.error / (each.allowed or 1.0), proof.error_ratio or 0.0, worst


def _known(path: Path) -> dict[tuple[str, str], Row]:
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {(row["form"], row["model"]): Row(**{**row, "failures": tuple(row["failures"])}) for row in rows}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--seeds", default=200, help="Seeds of the inputs, those of earlier runs included.")
@click.option("--minutes", default=1e9, help="How long to go on, at most.")
@click.option("--form", "forms", multiple=True, type=click.Choice(list(FORMS)), default=list(FORMS))
@click.option("--model", "models", multiple=True, type=click.Path(path_type=Path, exists=True), default=list(MODELS))
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False), default=RESULTS / "alarms.json")
def main(seeds: int, minutes: float, forms: tuple[str, ...], models: tuple[Path, ...], path: Path) -> None:
    """Count false alarms of the proof over seeds, models and forms."""
    known = _known(path)
    wanted = [(form, model.stem) for form in forms for model in models]
    rows = {**known, **{key: known.get(key, Row(key[1], key[0])) for key in wanted}}
    end = time.monotonic() + 60.0 * minutes
    while time.monotonic() < end and (left := [key for key in wanted if rows[key].seeds < seeds]):
        # Round by round, so that all counts are alike whenever the run ends.
        key = min(left, key=lambda each: rows[each].seeds)
        rows[key] = rows[key].extended()
    write_json(
        path, "alarms", {"seeds": max(row.seeds for row in rows.values())}, [asdict(row) for row in rows.values()]
    )
    cells = [
        (
            row.form,
            row.model,
            str(row.seeds),
            str(row.alarms),
            f"{row.tightness:.1f}",
            f"{row.use:.2f}",
            f"{row.ratio:.2f}",
            f"{row.certified:.1e}",
        )
        for row in rows.values()
    ]
    columns = ("form", "model", "seeds", "alarms", "allowed / measured", "used", "error ratio", "certified / scale")
    print_table("False alarms, and how tight the allowances are", columns, cells)


if __name__ == "__main__":
    main()

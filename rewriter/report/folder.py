"""The result for a folder of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from rewriter.errors import ExitStatus
from rewriter.report.report import Report, Shape
from rewriter.text import counted


@dataclass(frozen=True, repr=False)
class FolderReport(Report):
    """The result of `rewrite` for a folder; it has the blocks of all models, and each model has its own proof.

    Attributes:
        models: ONNX file, relative to the folder, to its report; only planned if a proof before it failed.
        copied: the files other than models, which were copied unchanged.
    """

    models: Mapping[str, Report] = field(default_factory=dict)
    copied: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: str, output: str, models: Mapping[str, Report], copied: tuple[str, ...] = ()) -> Self:
        """The reports of a folder's models, at least one, as one."""
        reports = list(models.values())
        statuses = {each.exit_status for each in reports if each.converted}
        operators = sum((Counter(each.before.operators) for each in reports), Counter[str]())
        return cls(
            folder,
            output,
            reports[0].form,
            tuple(block for each in reports for block in each.blocks),
            Shape(operators, operators.total(), sum(each.before.bytes for each in reports)),
            made=None,
            proof=None,
            seconds={"total": sum(each.seconds["total"] for each in reports)},
            notes=(),
            exit_status=max(statuses, default=ExitStatus.NOTHING_TO_CONVERT),
            environment=reports[0].environment,
            options=reports[0].options,
            models=models,
            copied=copied,
        )

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(f"{name}: {problem}" for name, each in self.models.items() for problem in each.problems)

    @property
    def refuted(self) -> bool:
        return any(each.refuted for each in self.models.values())

    @property
    def what(self) -> str:
        return f"{counted(sum(bool(each.converted) for each in self.models.values()), 'model')}, {super().what}"

    @property
    def summary(self) -> str:
        if not self.output:
            return super().summary
        proofs = [each.proof for each in self.models.values() if each.converted]
        word, how = "PASSED", ""
        if None in proofs:
            word = "NOT PROVED"
        elif not all(proof.providers for proof in proofs if proof is not None):
            word, how = "CERTIFIED", ", certified, not run"
        return f"{word}  {self.what}{how}, written to {self.output}"

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "models": {name: each.to_json() for name, each in self.models.items()}}

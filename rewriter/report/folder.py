"""The result for a folder of models, as data and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewriter.errors import ExitStatus
from rewriter.report.environment import environment
from rewriter.report.report import Report, Result, plain_data
from rewriter.text import counted

SCHEMA_VERSION = 1
"""Incremented if a field changes its meaning or is removed; new fields may be added without that."""


@dataclass(frozen=True, repr=False)
class FolderReport(Result):
    """What became of a folder.

    Attributes:
        folder: path of the folder that was converted.
        output: path of the folder that was written, None if none was.
        models: ONNX file, relative to the folder, to its report; only planned where a proof before it failed.
        copied: the files that are no models, which were copied as they are.
        exit_status: the exit status of the command line.
    """

    folder: str
    output: str | None
    models: Mapping[str, Report]
    copied: tuple[str, ...]
    exit_status: ExitStatus

    @property
    def converted(self) -> Mapping[str, Report]:
        """The models with converted blocks."""
        return {name: each for name, each in self.models.items() if each.converted}

    @property
    def problems(self) -> tuple[str, ...]:
        """The checks of the proofs that failed."""
        return tuple(f"{name}: {problem}" for name, each in self.models.items() for problem in each.problems)

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        if self.exit_status is ExitStatus.NOTHING_TO_CONVERT:
            return f"NOTHING TO CONVERT  in {self.folder}"
        made = tuple(self.converted.values())
        blocks = counted(sum(len(each.converted) for each in made), "block")
        heads = sum(row.heads or 0 for each in made for row in each.converted)
        what = f"{counted(len(made), 'model')}, {blocks}, {heads:,} attention heads"
        if self.exit_status is ExitStatus.VALIDATION_FAILED:
            return f"FAILED  {what}: the proof failed, nothing was written"
        if self.output is None:
            return f"PLANNED  {what} in {self.folder}; nothing was written"
        proved = all(each.validation is not None for each in made)
        return f"{'PASSED' if proved else 'NOT PROVED'}  {what}, written to {self.output}"

    def to_json(self) -> dict[str, Any]:
        """The reports as JSON-ready data."""
        return {
            "version": SCHEMA_VERSION,
            "folder": self.folder,
            "output": self.output,
            "exit_status": int(self.exit_status),
            "models": {name: each.to_json() for name, each in self.models.items()},
            "copied": list(self.copied),
            "environment": plain_data(environment()),
        }

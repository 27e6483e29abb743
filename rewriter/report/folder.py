"""The result for a folder of models, as data, as JSON, and as the model card that goes into the folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rewriter.errors import ExitStatus
from rewriter.report.environment import environment
from rewriter.report.report import Report, Result, plain_data
from rewriter.report.sections import summary
from rewriter.text import counted, one_line

SCHEMA_VERSION = 1
"""Incremented if a field changes its meaning or is removed; new fields may be added without that."""

_LONGEST = 160


@dataclass(frozen=True, repr=False)
class FolderReport(Result):
    """What became of a folder.

    Attributes:
        folder: path of the folder that was converted.
        output: path of the folder that was written, None if none was.
        models: ONNX file, relative to the folder, to its report; without those that come after a failed proof.
        copied: the other files, which were copied as they are.
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

    def copied_lines(self) -> tuple[str, ...]:
        """What was copied, for the terminal."""
        return (f"copied    {', '.join(self.copied)}",) if self.copied else ()

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


def certificate(models: Mapping[str, Report], options: Mapping[str, Any]) -> str:
    """The part of the model card, in Markdown: what `rewrite` prints about each model."""
    return "\n".join(_certificate(models, options)) + "\n"


def _certificate(models: Mapping[str, Report], options: Mapping[str, Any]) -> Iterator[str]:
    yield from (
        "## Attention-only conversion",
        "",
        "The MLP blocks of these ONNX models are attention heads (Huben and Morris, 2023, arXiv 2309.08593). Inputs,",
        "outputs, tokenizer and configuration are those of the original; nothing was trained.",
        "",
    )
    for name, each in models.items():
        found = replace(each, model=name, output=name, files=())
        # No line but the last begins with a fence: names stand after a label or an indent.
        lines = summary(found, 100) if each.converted else [one_line(f"copied {each.copied}", 400)]
        yield from (f"**{_escaped(name)}**", "", "```", *lines, *[one_line(found.summary, 400)] * bool(each.converted))
        yield from ("```", "")
    yield "Both models ran with onnxruntime on generated inputs; `attnonly-report.json` has all figures."
    versions = ", ".join(f"{name} {value}" for name, value in environment().items() if name in _VERSIONS)
    given = " ".join(f"{name}={_value(value)}" for name, value in options.items())
    yield f"Made with {versions}" + (f"; options {_escaped(given)}." if given else ".")


_VERSIONS = ("attnonly", "onnx", "onnxruntime", "numpy", "Python")


def _value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _escaped(text: str) -> str:
    """Names from files become neither links nor HTML."""
    line = one_line(text, _LONGEST)
    return "".join(f"\\{char}" if char in "|<>[]`*_\\" else char for char in line)

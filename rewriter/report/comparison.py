"""The comparison of two models, as data and as JSON.

`comparison.schema.json` beside this file is the contract of the JSON. The command line prints a `Comparison`; the
Python API returns it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Literal

from rewriter.compare.graphs import GraphDifference
from rewriter.compare.parts import Part
from rewriter.errors import ExitStatus
from rewriter.proof.validate import Validation
from rewriter.report.report import Result
from rewriter.text import counted

Verdict = Literal["same", "agrees", "different"]


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """How B compares with A: true unless they differ.

    `graph` is there after `diff`, `validation` if both were run; otherwise reading them raises what `raise_for_status`
    raises, or UsageError. `files` and `proof` hold the same, or None.

    Attributes:
        a: path of A, the original.
        b: path of B.
        signature: the differences in inputs and outputs; if there are any, nothing was run.
        files: the differences between the files; None if they were not asked for.
        proof: the certificate, the runs and the tests of blocks; None if nothing was run.
        tolerance: atol and rtol that took the place of the rule; then errors are in an output's units.
        isolated: results for every part alone on A's values; empty if that was not asked for, or if nothing had failed.
        faults: the parts that are wrong.
        failures: the checks that failed, in words.
        notes: remarks.
        seconds: time by step.
    """

    a: str
    b: str
    signature: tuple[str, ...] = ()
    files: GraphDifference | None = field(default=None, metadata={"json": "graph"})
    proof: Validation | None = field(default=None, metadata={"json": "validation"})
    tolerance: tuple[float, float] | None = None
    isolated: tuple[Part, ...] = ()
    faults: tuple[Part, ...] = ()
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    also = ("error_ratio", "verdict", "exit_status")

    @property
    def graph(self) -> GraphDifference:
        """The differences between the files."""
        return self._there(self.files, "comparison of the files")

    @property
    def validation(self) -> Validation:
        """The certificate, the runs and the tests of blocks."""
        return self._there(self.proof, "run")

    @property
    def verdict(self) -> Verdict:
        """What was found.

        `same`: certified, and the run agrees (of graphs alone: they are the same); `agrees`: not proved, but B agrees
        with A on the inputs that were run; `different`.
        """
        if self.failures:
            return "different"
        return "same" if self.proof is None or self.proof.certified else "agrees"

    @property
    def exit_status(self) -> ExitStatus:  # type: ignore[override]
        """0 if B is the same or agrees, 1 if it differs."""
        return ExitStatus.VALIDATION_FAILED if self.failures else ExitStatus.CONVERTED

    @property
    def same(self) -> bool:
        """Whether B is proved to compute what A does, and does so where both were run."""
        return self.verdict == "same"

    @property
    def problems(self) -> tuple[str, ...]:
        """The checks that failed."""
        return self.failures

    @property
    def summary(self) -> str:
        """The verdict in one line: what was found, on what it rests, and where the fault lies."""
        return f"{self.verdict.upper()}  {self._told}"

    @property
    def _told(self) -> str:
        pair, proof = f"{self.a} and {self.b}", self.proof
        if self.signature:
            return f"{pair} have different inputs or outputs, so nothing was run"
        if proof is None:
            return f"{pair} are {'different graphs' if self.failures else 'the same graph with the same weights'}"
        if self.failures:
            judged = len({name for run in proof.providers.values() for name in run.compared})
            if judged and all("nothing could be compared" in each for each in self.failures):
                return f"{pair}: {'not every output' if len(self.failures) < judged else 'nothing'} could be compared"
            return f"{self.b} does not compute what {self.a} does{self._blame}"
        ratio = "" if isnan(self.error_ratio) else f", error ratio {self.error_ratio:.2f}"
        graph = "; their graphs differ" if self.files is not None and not self.files.same else ""
        where = ", ".join(proof.providers)
        if self.same:
            return f"{self.b} computes what {self.a} does for every input, and on {where}{ratio}{graph}"
        tested = f", {counted(len(proof.blocks), 'block')} tested" if proof.blocks else ""
        inputs = counted(len(proof.cases), "input")
        return f"{self.b} agrees with {self.a} on {inputs} on {where}{ratio}{tested}; not proved{graph}"

    @property
    def _blame(self) -> str:
        if self.faults:
            more = f" and {len(self.faults) - 1} more" if len(self.faults) > 1 else ""
            return f"; guilty: {self.faults[0].label}{more}"
        return "" if self.isolated else "; --bisect names the guilty block"

    @property
    def error_ratio(self) -> float:
        """The largest error of B over that of A, both against float64; NaN without such an evaluation."""
        return nan if self.proof is None else self.proof.error_ratio

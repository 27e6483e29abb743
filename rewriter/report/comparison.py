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
from rewriter.report.report import Result, reach
from rewriter.text import counted

Verdict = Literal["same", "agrees", "not proved", "different"]


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
        tolerance: atol and rtol that replaced the rule; then errors are in an output's units.
        isolated: results for every part alone on A's values; empty if that was not requested, or if nothing had failed.
        faults: the parts that are wrong.
        undecided: claims of B's plan that are not proved, and outputs that the run does not decide.
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
    undecided: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    also = ("failures", "error_ratio", "verdict", "exit_status")

    @property
    def graph(self) -> GraphDifference:
        return self._required(self.files, "comparison of the files")

    @property
    def validation(self) -> Validation:
        return self._required(self.proof, "run")

    @property
    def failures(self) -> tuple[str, ...]:
        """What differs, each with a counterexample: an input that was run, or a number that refutes a region."""
        if self.proof is not None:
            return self.proof.failures
        if self.signature or self.files is None:
            return tuple(f"the signatures differ: {text}" for text in self.signature)
        return () if self.files.same else ("the graphs differ",)

    @property
    def verdict(self) -> Verdict:
        """One of four words.

        `same`: certified, and the run agrees (of graphs alone: they are the same); `agrees`: not proved, but B agrees
        with A on the inputs that were run; `not proved`: the claims of B's plan are neither proved nor refuted, or the
        run does not decide; `different`: there is a counterexample.
        """
        if self.failures:
            return "different"
        if self.undecided:
            return "not proved"
        return "same" if self.proof is None or (self.proof.certified and self.proof.passed) else "agrees"

    @property
    def exit_status(self) -> ExitStatus:  # type: ignore[override]
        """0 if B is the same or agrees, otherwise 1."""
        return ExitStatus.VALIDATION_FAILED if self.problems else ExitStatus.CONVERTED

    @property
    def same(self) -> bool:
        """Whether B is proved to compute the same function as A, and agrees in the runs."""
        return self.verdict == "same"

    @property
    def problems(self) -> tuple[str, ...]:
        """Differences and undecided parts."""
        return (*self.failures, *self.undecided)

    @property
    def summary(self) -> str:
        """The verdict in one line: its basis, and the place of the fault."""
        return f"{self.verdict.upper()}  {self._finding}"

    @property
    def _finding(self) -> str:
        pair, proof = f"{self.a} and {self.b}", self.proof
        if self.signature:
            return f"{pair} have different inputs or outputs, so nothing was run"
        if proof is None:
            return f"{pair} are {'different graphs' if self.failures else 'the same graph with the same weights'}"
        if self.failures:
            return f"{self.b} does not compute what {self.a} does{self._guilty_part}"
        outputs = [each for run in proof.providers.values() for each in run.compared.values()]
        nothing = sum(each.startswith("nothing could be compared") for each in self.undecided)
        if nothing or not outputs:
            several = nothing < len({each.name for each in outputs})
            return f"{pair}: {'not every output' if several else 'nothing'} could be compared"
        if self.isolated and self.undecided:
            return f"{pair}: the outputs say little, and parts differ{self._guilty_part}"
        ratio = "" if isnan(self.error_ratio) else f", error ratio {self.error_ratio:.2f}"
        graph = "; their graphs differ" if self.files is not None and not self.files.same else ""
        where = ", ".join(proof.providers)
        if self.same:
            holds = "" if proof.certificate is None else f" {reach(proof.certificate)}"
            return f"{self.b} computes what {self.a} does{holds}, and on {where}{ratio}{graph}"
        tested = f", {counted(len(proof.blocks), 'block')} tested" if proof.blocks else ""
        inputs = counted(len(proof.cases), "input")
        largest = f"largest difference {max(each.max_abs for each in outputs):.2g}"
        claims = "what its plan claims is " if self.undecided else ""
        return (
            f"{self.b} agrees with {self.a} on {inputs} on {where}, {largest}{ratio}{tested}; {claims}not proved{graph}"
        )

    @property
    def _guilty_part(self) -> str:
        if self.faults:
            more = f" and {len(self.faults) - 1} more" if len(self.faults) > 1 else ""
            return f"; guilty: {self.faults[0].label}{more}"
        return "" if self.isolated else "; --bisect names the guilty block"

    @property
    def error_ratio(self) -> float:
        """The largest error of B over that of A, both against float64; NaN without such an evaluation."""
        return nan if self.proof is None else self.proof.error_ratio

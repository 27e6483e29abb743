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
from rewriter.errors import ExitStatus
from rewriter.proof.validate import Validation
from rewriter.report.report import Result, loud, reach
from rewriter.text import counted

Verdict = Literal["certified", "certified at the sizes tried", "agrees", "not proved", "different"]


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """How B compares with A: true if it is certified or agrees.

    `graph` is there after `diff`, `validation` unless the signatures differ; otherwise reading them raises what
    `raise_for_status` raises, or UsageError. `files` and `proof` hold the same, or None.

    Attributes:
        a: path of A, the original.
        b: path of B.
        signature: the differences in inputs and outputs; if there are any, nothing else was compared.
        files: the differences between the files; None if they were not asked for.
        proof: the certificate and the runs.
        tolerance: atol and rtol that took the place of the rule; then errors are in an output's units.
        undecided: outputs of which neither proof nor run shows anything.
        notes: remarks.
        seconds: time by step.
    """

    a: str
    b: str
    signature: tuple[str, ...] = ()
    files: GraphDifference | None = field(default=None, metadata={"json": "graph"})
    proof: Validation | None = field(default=None, metadata={"json": "validation"})
    tolerance: tuple[float, float] | None = None
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
        return tuple(f"the signatures differ: {text}" for text in self.signature)

    @property
    def verdict(self) -> Verdict:
        """One of four words.

        `certified`: proved for every size, and the run agrees; `certified at the sizes tried`: proved for these;
        `agrees`: not proved, but B agrees with A on the inputs that were run; `not proved`: nothing was run, or the run
        does not decide; `different`: there is a counterexample.
        """
        if self.proof is None or self.failures:
            return "different"
        if self.undecided:
            return "not proved"
        certificate = self.proof.certificate
        if certificate is not None and certificate.certified and self.proof.passed:
            return "certified at the sizes tried" if certificate.sizes else "certified"
        return "agrees" if self.proof.providers else "not proved"

    @property
    def exit_status(self) -> ExitStatus:  # type: ignore[override]
        """0 if B is certified or agrees, otherwise 1."""
        return ExitStatus.VALIDATION_FAILED if self.verdict in ("not proved", "different") else ExitStatus.CONVERTED

    @property
    def same(self) -> bool:
        """Whether B is proved to compute what A does, and does so where both were run."""
        return self.verdict.startswith("certified")

    @property
    def problems(self) -> tuple[str, ...]:
        """Differences and undecided parts."""
        return (*self.failures, *self.undecided)

    @property
    def summary(self) -> str:
        """The verdict in one line: what was found, on what it rests, and where the fault lies."""
        return f"{loud(self.verdict)}  {self._finding}"

    @property
    def _finding(self) -> str:
        pair, proof = f"{self.a} and {self.b}", self.proof
        if proof is None:
            return f"{pair} have different inputs or outputs; rename them with --map OLD=NEW"
        if self.failures:
            return f"{self.b} does not compute what {self.a} does"
        outputs = [each for run in proof.providers.values() for each in run.compared.values()]
        nothing = sum(each.startswith("nothing could be compared") for each in self.undecided)
        if nothing or (proof.providers and not outputs):
            several = nothing < len({each.name for each in outputs})
            return f"{pair}: {'not every output' if several else 'nothing'} could be compared"
        ratio = "" if isnan(self.error_ratio) else f", error ratio {self.error_ratio:.2f}"
        where = ", ".join(proof.providers)
        if self.same:
            holds = "" if proof.certificate is None else f" {reach(proof.certificate)}"
            return f"{self.b} computes what {self.a} does{holds}{where and f', and on {where}'}{ratio}"
        if not where:
            return f"{pair}: neither proved nor refuted, and not run"
        inputs = counted(len(proof.cases), "input")
        largest = f"largest difference {max(each.max_abs for each in outputs):.2g}"
        return f"{self.b} agrees with {self.a} on {inputs} on {where}, {largest}{ratio}; not proved"

    @property
    def error_ratio(self) -> float:
        """The largest error of B over that of A, both against float64; NaN without such an evaluation."""
        return nan if self.proof is None else self.proof.error_ratio

"""The comparison of two models, as data and as JSON.

`comparison.schema.json` beside this file is the contract of the JSON, versioned by `SCHEMA_VERSION`. The command line
prints a `Comparison`; the Python API returns it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rewriter.compare.depth import Fault, Measured
from rewriter.compare.generation import Generation
from rewriter.compare.graphs import GraphDifference
from rewriter.errors import ExitStatus
from rewriter.proof.validate import Validation
from rewriter.report.report import Result, plain_data

SCHEMA_VERSION = 1
"""Incremented if a field changes its meaning or is removed; new fields may be added without that."""

Verdict = Literal["same", "agrees", "different"]


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """How B compares with A.

    Attributes:
        a: path of A, the original.
        b: path of B.
        signature: the differences in inputs and outputs; if there are any, nothing was run.
        graph: the differences between the files; None if they were not asked for.
        validation: the certificate, the runs and the tests of blocks; None if nothing was run.
        tolerated: outputs that were judged by a given tolerance; their errors are in the output's units.
        blocks: head program of each block that the plan in B's metadata names, by the block's name.
        taps: B against A at each boundary, in order of depth; None if not asked for.
        isolated: results for every part alone on A's values; None if that was not asked for, or if nothing had failed.
        faults: the parts that are wrong.
        generation: tokens that both generate; None if that was not asked for.
        failures: the checks that failed, in words.
        notes: remarks.
        seconds: time by step.
    """

    a: str
    b: str
    signature: tuple[str, ...] = ()
    graph: GraphDifference | None = None
    validation: Validation | None = None
    tolerated: tuple[str, ...] = ()
    blocks: Mapping[str, str] = field(default_factory=dict)
    taps: tuple[Measured, ...] | None = None
    isolated: tuple[Measured, ...] | None = None
    faults: tuple[Fault, ...] = ()
    generation: Generation | None = None
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """What was found.

        `same`: certified, and the run agrees (of graphs alone: they are the same); `agrees`: not proved, but B agrees
        with A on the inputs that were run; `different`.
        """
        if self.failures:
            return "different"
        return "same" if self.validation is None or self.validation.certified else "agrees"

    @property
    def exit_status(self) -> ExitStatus:  # type: ignore[override]
        """0 if B is the same or agrees, 1 if it differs."""
        return ExitStatus.VALIDATION_FAILED if self.failures else ExitStatus.CONVERTED

    @property
    def same(self) -> bool:
        """Whether B is proved to compute what A does, and does so where both were run."""
        return self.verdict == "same"

    def __bool__(self) -> bool:
        return self.verdict != "different"

    @property
    def problems(self) -> tuple[str, ...]:
        """The checks that failed."""
        return self.failures

    @property
    def summary(self) -> str:
        """Whether B agrees with A, and how far the two are from float64."""
        ratio = "" if self.error_ratio is None else f", error ratio {self.error_ratio:.2f}"
        return f"{self.verdict.upper()} {self.a} and {self.b}{ratio}"

    @property
    def error_ratio(self) -> float | None:
        """The largest error of B over that of A, both against float64; None without such an evaluation."""
        runs = self.validation.providers.values() if self.validation else ()
        return max((each.error_ratio for each in runs if each.error_ratio is not None), default=None)

    @property
    def first_exceeding(self) -> Measured | None:
        """The first boundary at which the error of B exceeds its share."""
        return next((each for each in self.taps or () if each.exceeds), None)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data: numbers as numbers, infinite or missing ones as null."""
        first = self.first_exceeding
        taps, isolated = (
            None if found is None else [{**plain_data(each), "exceeds": each.exceeds} for each in found]
            for found in (self.taps, self.isolated)
        )
        return {
            "version": SCHEMA_VERSION,
            **plain_data(replace(self, graph=None, taps=None, isolated=None)),
            "verdict": self.verdict,
            "exit_status": int(self.exit_status),
            "error_ratio": plain_data(self.error_ratio),
            "graph": None if self.graph is None else {"same": self.graph.same, **plain_data(self.graph)},
            "taps": taps,
            "isolated": isolated,
            "first_exceeding": None if first is None else first.label,
            "seconds": {key: round(value, 6) for key, value in self.seconds.items()},
        }

"""The comparison of two models, as data and as JSON.

`comparison.schema.json` beside this file is the contract of the JSON, versioned by `SCHEMA_VERSION`. The command line
prints a `Comparison`; the Python API returns it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.compare.bisect import Isolated
from rewriter.compare.generation import Generation
from rewriter.compare.graphs import GraphDifference
from rewriter.compare.taps import Tap
from rewriter.compare.verdicts import PairProof
from rewriter.errors import ExitStatus
from rewriter.proof.blocks.activation import RegionProof
from rewriter.report.report import plain_data, write_json
from rewriter.report.result import Result

SCHEMA_VERSION = 1
"""Incremented if a field changes its meaning or is removed; new fields may be added without that."""


@dataclass(frozen=True)
class FaultRow:
    """A part of B that is wrong by itself.

    Attributes:
        block: the part between two boundaries: a block's name, or the tensor it ends in.
        part: the faulty part of a block: `the heads`, `the first linear operator` and so on; None outside of blocks.
        program: the faulty head program.
        tensor: the first tensor inside the part at which the error appears.
        error: largest error of the part, fed with A's values.
        allowed: the largest error that would have been allowed.
        causes: the differences between the files in this part.
    """

    block: str
    part: str | None
    program: str | None
    tensor: str
    error: float
    allowed: float
    causes: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """How B compares with A.

    Attributes:
        a: path of A, the original.
        b: path of B.
        signature: the differences in inputs and outputs; if there are any, nothing was run.
        graph: the differences between the files; None if they were not asked for.
        reference: what evaluated A in float64, or why nothing could; empty if nothing was run.
        cases: the inputs that were run.
        skipped: inputs that A refused, with the reason.
        providers: the verdicts on the outputs, by execution provider; empty if nothing was run.
        blocks: head program of each block that is attention heads in B, by the block's name.
        regions: results for the heads of these blocks alone, on adversarial points.
        taps: B against A at each boundary, in order of depth; None if not asked for.
        isolated: results for every part alone on A's values; None if that was not asked for, or if nothing had failed
            and rounding was not amplified.
        faults: the parts that are wrong.
        failures: the checks that failed, in words.
        notes: remarks.
        seconds: time by step.
        exit_status: 0 if the models agree, 1 if they differ.
        generation: tokens that both generate; None if that was not asked for.
    """

    a: str
    b: str
    signature: tuple[str, ...]
    graph: GraphDifference | None
    reference: str
    cases: tuple[str, ...]
    skipped: tuple[str, ...]
    providers: Mapping[str, PairProof]
    blocks: Mapping[str, str]
    regions: Mapping[str, RegionProof]
    taps: tuple[Tap, ...] | None
    isolated: tuple[Isolated, ...] | None
    faults: tuple[FaultRow, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: Mapping[str, float]
    exit_status: ExitStatus
    generation: Generation | None = None

    @property
    def same(self) -> bool:
        """Whether B agrees with A."""
        return self.exit_status is ExitStatus.CONVERTED

    def __bool__(self) -> bool:
        return self.same

    @property
    def problems(self) -> tuple[str, ...]:
        """The checks that failed."""
        return self.failures

    @property
    def summary(self) -> str:
        """Whether B agrees with A, and how far the two are from float64."""
        ratio = "" if self.error_ratio is None else f", error ratio {self.error_ratio:.2f}"
        return f"{'SAME' if self.same else 'DIFFERENT'} {self.a} and {self.b}{ratio}"

    @property
    def cells(self) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """The outputs, for a notebook."""
        rows = [
            (
                provider,
                name,
                "passed" if each.passed else "failed",
                f"{each.error_b:.1e}",
                f"{each.allowed:.1e}",
            )
            for provider, proof in self.providers.items()
            for name, each in proof.outputs.items()
        ]
        return ("provider", "output", "verdict", "error", "allowed"), tuple(rows)

    @property
    def error_ratio(self) -> float | None:
        """The largest error of B over that of A, both against float64; None without a reference."""
        return max((each.error_ratio for each in self.providers.values() if each.error_ratio is not None), default=None)

    @property
    def first_exceeding(self) -> Tap | None:
        """The first boundary at which the error of B exceeds its share."""
        return next((each for each in self.taps or () if each.exceeds), None)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data: numbers as numbers, infinite or missing ones as null."""
        first = self.first_exceeding
        return {
            "version": SCHEMA_VERSION,
            "a": self.a,
            "b": self.b,
            "exit_status": int(self.exit_status),
            "same": self.same,
            "signature": list(self.signature),
            "graph": None if self.graph is None else {"same": self.graph.same, **plain_data(self.graph)},
            "reference": self.reference,
            "error_ratio": plain_data(self.error_ratio),
            "cases": list(self.cases),
            "skipped": list(self.skipped),
            "providers": {
                name: {"error_ratio": plain_data(proof.error_ratio), **plain_data(proof)}
                for name, proof in self.providers.items()
            },
            "blocks": dict(self.blocks),
            "regions": plain_data(self.regions),
            "taps": None if self.taps is None else [_tap(each) for each in self.taps],
            "first_exceeding": None if first is None else first.boundary.label,
            "isolated": None if self.isolated is None else [_isolated(each) for each in self.isolated],
            "faults": plain_data(self.faults),
            "generation": None if self.generation is None else plain_data(self.generation),
            "failures": list(self.failures),
            "notes": list(self.notes),
            "seconds": {key: round(value, 6) for key, value in self.seconds.items()},
        }

    def write(self, path: Path) -> None:
        """Write the JSON to `path`, atomically."""
        write_json(path, self.to_json())


def _tap(each: Tap) -> dict[str, Any]:
    measured = {key: value for key, value in plain_data(each).items() if key != "boundary"}
    return {**_boundary(each), **measured, "relative": plain_data(each.relative), "exceeds": each.exceeds}


def _isolated(each: Isolated) -> dict[str, Any]:
    measured = {key: value for key, value in plain_data(each).items() if key != "boundary"}
    return {**_boundary(each), **measured, "guilty": each.guilty}


def _boundary(each: Tap | Isolated) -> dict[str, Any]:
    boundary = each.boundary
    return {"label": boundary.label, "tensor": boundary.tensor, "kind": boundary.kind}

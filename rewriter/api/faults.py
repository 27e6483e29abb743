"""Explains a faulty part of B by what differs there between the files.

Heads are compared with those that this tool would have written, everything else with A.
"""

from __future__ import annotations

import math

from rewriter.api.known import Known
from rewriter.compare.bisect import Fault
from rewriter.compare.graphs import GraphDifference, NodeChange, difference
from rewriter.compare.weights import TensorChange
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import upstream
from rewriter.report.comparison import FaultRow

_MOST_CAUSES = 6


def explain(fault: Fault, known: Known) -> FaultRow:
    """List the differences between the files at a fault."""
    ours, theirs = fault.pieces
    if fault.program is not None and known.expected is not None:
        ours = _expected(fault, known) or ours
    causes = _causes(difference(ours, theirs))
    if not math.isfinite(fault.isolated.error_b):
        causes = [fault.isolated.obstacle or f"{fault.tensor} {fault.isolated.reason}", *causes]
    return FaultRow(
        block=fault.isolated.boundary.label,
        part=fault.part,
        program=fault.program,
        tensor=fault.tensor,
        error=fault.isolated.error_b,
        allowed=fault.isolated.allowed,
        causes=tuple(causes[:_MOST_CAUSES]),
    )


def _expected(fault: Fault, known: Known) -> LoadedModel | None:
    """The same part with the heads that this tool would write for A."""
    side = known.expected
    if side is None or fault.tensor not in side.main.producer:
        return None
    stops = frozenset(value.name for value in fault.pieces[0].proto.graph.input)
    return side.piece(upstream(side.main, stops, [fault.tensor]))


def _causes(found: GraphDifference) -> list[str]:
    """The differences in words: first what changed, then what only one side has."""
    weights = [(change.status != "changed", _weight(change)) for change in found.tensors]
    nodes = [(change.status != "changed", _node(change)) for change in found.nodes]
    functions = [
        (False, f"the body of function {change.name} differs")
        for change in found.fields
        if change.what == "function" and change.a is not None and change.b is not None
    ]
    return [text for _, text in sorted([*weights, *functions, *nodes], key=lambda cause: cause[0])]


def _node(change: NodeChange) -> str:
    if change.status != "changed":
        return f"{change.a or change.b} is {change.status}"
    if change.a == change.b:
        return f"{change.a}: {', '.join(change.what)} changed"
    return f"{change.a} became {change.b}"


def _weight(change: TensorChange) -> str:
    if change.status != "changed":
        return f"weight {change.name} is {change.status}"
    if change.kind[0] != change.kind[1]:
        return f"weight {change.name}: {change.kind[0]} in A, {change.kind[1]} in B"
    if change.elements is None:
        return f"weight {change.name} differs"
    where = "" if not change.index else f" at {list(change.index)}"
    count = f"{change.elements:,} element{'s' if change.elements != 1 else ''}"
    return f"weight {change.name} differs in {count}, by up to {change.max_difference:.3g}{where}"

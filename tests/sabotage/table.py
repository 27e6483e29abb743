"""The table of all sabotages, and the sample that always runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tests.sabotage.coefficients import COEFFICIENTS
from tests.sabotage.harness import Attempt
from tests.sabotage.lengths import LENGTHS
from tests.sabotage.magnitudes import VALUES
from tests.sabotage.mixing import MIXING
from tests.sabotage.neighbourhoods import NEIGHBOURHOODS
from tests.sabotage.neighbours import NEIGHBOURS
from tests.sabotage.networks import NETWORKS
from tests.sabotage.plans import PLANS
from tests.sabotage.sabotages import Sabotage, measured
from tests.sabotage.squares import SQUARES
from tests.sabotage.subjects import Subject, on, square
from tests.sabotage.ways import WAYS
from tests.sabotage.written import WRITTEN

FAMILIES: Mapping[str, tuple[Sabotage, ...]] = {
    "Heads that read other tokens, sequences or neurons": MIXING,
    "Heads that are wrong for some sizes or positions": LENGTHS,
    "Heads that are wrong for some pre-activations": VALUES,
    "Heads with a wrong number": COEFFICIENTS,
    "Masks, positions, chunks and projections of square patterns": SQUARES,
    "Keys, values, patterns and chunks of form compact": NEIGHBOURHOODS,
    "Rows, columns, masks and heads of form whole": NETWORKS,
    "Damage beside the heads": NEIGHBOURS,
    "Plans, lowerings and models on which errors hide": PLANS,
    "Other ways to prove, and other element types": WAYS,
    "Files that are not the model that was made": WRITTEN,
}
"""Kind to sabotages."""

TABLE = tuple(sabotage for family in FAMILIES.values() for sabotage in family)


def measured_at(place: tuple[int, int]) -> tuple[Attempt, float | None]:
    """One trial, by the numbers of its sabotage and subject: those themselves cannot be sent to another process."""
    sabotage = TABLE[place[0]]
    return measured(sabotage, sabotage.subjects[place[1]])


_SAMPLED: tuple[tuple[str, tuple[Subject, ...]], ...] = (
    ("the largest activation of all tokens, in the heads' function", on("gelu")),
    ("two neurons swapped", on("silu")),
    ("off by 1e-3 beyond 48 tokens", on("silu")),
    ("the first sequence's activations, float16", on("half")),
    ("off by 1e-3 between |y| = 2e4 and 1e15", on("relu")),
    ("clip offset times 1 + 1e-5", on("relu6")),
    ("an approximation with a certificate of 1/2, in the plan", on("gelu")),
    ("the last of several chunks is zero, form masked", square("masked", "silu")),
    ("heads rolled by one, form compact", square("compact", "silu")),
    ("bias values off by 1e-5, form compact", square("compact", "gelu")),
    ("chunks of tokens repeated, form compact", (Subject("silu", {"form": "compact", "max_pattern_mb": 0.0001}),)),
    ("positions 60 and 61 are the same, form maskless", square("maskless", "silu")),
    (
        "neurons see a neighbour at the last position, form whole",
        (Subject("silu", {"form": "whole", "max_tokens": 90}),),
    ),
    ("the outputs of a branch exchanged", on("branches")),
    ("a computed scale replaced by an initializer", on("computed-scale")),
    ("a fused bias subtracted", on("bias-gelu")),
    ("one rare token leaves the domain of a gate", on("rare-token")),
    ("all outputs are NaN", on("nan")),
    ("external data is read from another place", on("external")),
)
_BY_NAME = {sabotage.name: sabotage for sabotage in TABLE}

SAMPLE = tuple(replace(_BY_NAME[name], subjects=subjects) for name, subjects in _SAMPLED)
"""One or two of each kind, on models that take a fraction of a second."""

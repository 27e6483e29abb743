"""The same errors where the proof goes another way: in segments, in a process of its own, in other element types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.sabotage.edits import Edit, applied, heads, inner
from tests.sabotage.lengths import length
from tests.sabotage.mixing import FIRST_SEQUENCE, LEAK
from tests.sabotage.pieces import constant, operand, scaled
from tests.sabotage.sabotages import Expect, Sabotage
from tests.sabotage.subjects import on

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "in segments": {"proof": "blocks"},
    "inlined": {"inline": True},
}
"""How it is proved or written, and the options for that."""

ERRORS: tuple[tuple[str, Edit, Expect], ...] = (
    ("a thousandth of the mean over tokens", heads(LEAK), Expect.BLOCK),
    ("the first sequence's activations", heads(FIRST_SEQUENCE), Expect.BLOCK),
    ("off by 1e-3 beyond 17 tokens", heads(length("Greater(t, #17)")), Expect.BLOCK),
    ("silu key times 1 + 1e-5", constant("key", scaled(1 + 1e-5)), Expect.BLOCK),
    ("W2 negated", operand("W2", scaled(-1.0)), Expect.MODEL),
)

_SINGLE = "n = Cast<to = 1>(own) out = Cast<to = 11>(n)"

TYPES: tuple[tuple[str, Edit, tuple[str, ...]], ...] = (
    ("silu key times 1 + 1e-3, float16", constant("key", scaled(1.001)), ("half",)),
    ("silu key times 1 + 1e-10, float64", constant("key", scaled(1 + 1e-10)), ("double",)),
    ("off by 1e-10, float64", heads("out = Mul(own, $1.0000000001)"), ("double",)),
    ("rounded to float32, float64", heads(_SINGLE), ("double",)),
)
"""What is wrong in which element type."""

GATES: tuple[tuple[str, Edit], ...] = (
    ("logits of a gate rounded to float32", inner("*_shifted", _SINGLE)),
    ("weights of a gate rounded to float32", inner("*_share", _SINGLE)),
)
"""What is wrong with gates in float64."""

WAYS = (
    *(
        Sabotage(f"{what}, {how}", applied(edit), on("silu-decoder", "silu", **options), expect)
        for how, options in OPTIONS.items()
        for what, edit, expect in ERRORS
    ),
    *(Sabotage(what, applied(edit), on(*models)) for what, edit, models in TYPES),
    *(Sabotage(what, applied(edit), on("gated-decoder", "swiglu", precision="double")) for what, edit in GATES),
    Sabotage(
        "an activation that is no MLP's negated",
        applied(heads("out = Neg(own)", 2)),
        on("gelu-encoder", scope="all"),
        block=2,
    ),
)

"""Form `compact`: wrong keys, values, patterns, chunks and projections."""

from __future__ import annotations

from tests.sabotage.edits import Edit, applied, inner
from tests.sabotage.pieces import attribute, constant, maker, scaled
from tests.sabotage.sabotages import Sabotage
from tests.sabotage.squares import chunked, in_last_chunk, rolled
from tests.sabotage.subjects import square

_NOTHING = "out = Sub(own, own)"
_EXACT = square("compact", "silu-decoder", "silu")
_BOTH, _VALUES = square("compact", "silu-decoder", "gelu-vision"), square("compact", "gelu-vision", "gelu")

ATTENTION: tuple[tuple[str, Edit], ...] = (
    ("self key swapped with the bias tokens' keys", inner("*/heads/k", rolled(2))),
    ("self key times 1 + 1e-3", inner("*/heads/k_self", "out = Mul(own, $1.001)")),
    ("softmax over the heads", maker("*/heads/pattern", attribute("axis", 2))),
    ("softmax over the tokens", maker("*/heads/pattern", attribute("axis", 1))),
    ("heads rolled by one", inner("*/heads/pattern", rolled(2))),
    ("queries rolled by one token", inner("*/heads/unbounded_q", rolled(1))),
    ("queries rolled by one head", inner("*/heads/unbounded_q", rolled(2))),
    ("W_Q without b1", inner("*/heads/W_Q*_on_tokens", _NOTHING)),
    ("W_O without b2", inner("*/heads/b_O_bias_0", _NOTHING)),
    ("rows of W_O rolled by one", inner("*/heads/W_O_flat", rolled(0))),
)
"""What is wrong in blocks whose pattern is a tensor of the graph."""

FLOAT32: tuple[tuple[str, Edit], ...] = (
    ("scores scaled as if d_head were 2", inner("*/heads/scores", "out = Mul(own, $0.70710678)")),
    ("b2 times 1 + 1e-5", inner("*/heads/b_O_bias_0", "out = Mul(own, $1.00001)")),
    # No run sees it, and no certificate can read it.
)
"""What is wrong in blocks whose scores have the model's type."""

BIAS_VALUES: tuple[tuple[str, Edit], ...] = (
    ("bias values off by 1e-5", constant("v_bias", lambda values: values + 1e-5)),
    ("bias values rolled by one", constant("v_bias", lambda values: [*values[1:], values[0]])),
    ("one bias key times 1 + 1e-4", constant("k_bias", scaled(1.0001, 3))),
)
"""What is wrong with the bias tokens of GELU."""

CHUNKS: tuple[tuple[str, Edit], ...] = (
    ("the last of several chunks is zero", inner("part", in_last_chunk("0.0"))),
    ("the last of several chunks is off by 1e-3", inner("part", in_last_chunk("1.001"))),
    ("chunks of tokens repeated", inner("first_row", "out = Mul(own, #0)")),
)
"""What is wrong where the pattern is computed in chunks."""

NEIGHBOURHOODS = (
    *(Sabotage(f"{what}, form compact", applied(edit), _BOTH) for what, edit in ATTENTION),
    *(Sabotage(f"{what}, form compact", applied(edit), _EXACT) for what, edit in FLOAT32),
    *(Sabotage(f"{what}, form compact", applied(edit), _VALUES) for what, edit in BIAS_VALUES),
    *(
        Sabotage(f"{what}, form compact", applied(edit), chunked(*square("compact", "silu-decoder", "relu-decoder")))
        for what, edit in CHUNKS
    ),
)

"""Forms with square patterns: a wrong mask, wrong positions, wrong chunks or wrong projections."""

from __future__ import annotations

from tests.sabotage.edits import Edit, applied, inner
from tests.sabotage.pieces import attribute, constant, maker, scaled, turned
from tests.sabotage.sabotages import Expect, Sabotage
from tests.sabotage.subjects import Subject, square


def rolled(axis: int, start: int = 0) -> str:
    """A text that moves one entry of an axis behind those after it."""
    return (
        f"a = Slice(own, #0, #{start}, #{axis}) b = Slice(own, #{start}, #{start + 1}, #{axis}) "
        f"c = Slice(own, #{start + 1}, #end, #{axis}) out = Concat<axis = {axis}>(a, c, b)"
    )


def same_slot(position: int) -> str:
    """A text that gives two neighbouring positions the same one-hot row."""
    return (
        f"a = Slice(own, #0, #{position + 1}, #0) b = Slice(own, #{position}, #{position + 1}, #0) "
        f"c = Slice(own, #{position + 2}, #end, #0) out = Concat<axis = 0>(a, b, c)"
    )


def in_last_chunk(wrong: str) -> str:
    """A text that is wrong in the last of several chunks."""
    return (
        "l = Sub(steps, #1) last = Equal(step, l) several = Greater(steps, #1) wrong = And(last, several) "
        f"z = Mul(own, ${wrong}) out = Where(wrong, z, own)"
    )


_FRONT = "a = Slice(own, #0, #4, #0) b = Slice(own, #4, #end, #0)"
_NOTHING = "out = Mul(own, $0.0)"

MASKS: tuple[tuple[str, Edit], ...] = (
    ("the mask's diagonal is off by one", inner("own", "out = Add(own, #1)")),
    ("the mask has no diagonal", inner("diagonal", "a = Not(own) out = And(own, a)")),
    ("the mask shows the last token to all", inner("before_bias", "t = Sub(tokens, #1) out = Less(positions, t)")),
    ("the mask shows the first token to all", inner("mask", "first = Equal(positions, #0) out = Or(own, first)")),
    ("the mask hides the last bias token", inner("end_bias", "out = Sub(own, #1)")),
    ("no mask at all", inner("mask", "a = Not(own) out = Or(own, a)")),
    ("forbidden scores are -10", constant("z_forbidden", lambda _: -10.0)),
    ("softmax over the queries", maker("pattern", attribute("axis", 2))),
    ("softmax over the heads", maker("pattern", attribute("axis", 1))),
    ("scores negated", inner("scores", "out = Neg(own)")),
    ("scores scaled as if d_head were 2", inner("scores", "out = Mul(own, $0.70710678)")),
    ("heads and tokens transposed", maker("*/heads/z_by_token", attribute("perm", [0, 3, 1, 2]))),
    ("W_Q without b1", inner("*/heads/W_Q*_on_tokens", _NOTHING)),
    ("W_O without b2", inner("*/heads/b_O_bias_0", _NOTHING)),
    ("W_O negated", inner("*/heads/W_O_flat", "out = Neg(own)")),
    ("rows of W_O rolled by one", inner("*/heads/W_O_flat", rolled(0))),
    (
        "one row of W_O off by 1e-3",
        inner(
            "*/heads/W_O_flat",
            "a = Slice(own, #0, #1, #0) c = Mul(a, $1.001) b = Slice(own, #1, #end, #0) out = Concat<axis = 0>(c, b)",
        ),
    ),
    ("b2 times 1 + 1e-5", inner("*/heads/b_O_bias_0", "out = Mul(own, $1.00001)")),
    ("bias tokens in front of the tokens", maker("*/heads/stream", turned)),
    ("the first token is dropped instead of the bias token", inner("*/heads/attn_out_biased", rolled(1))),
)
"""Form `masked`: what is wrong, and the edit."""

CHUNKS: tuple[tuple[str, Edit], ...] = (
    ("the first chunk of heads repeated", inner("first_head", "out = Mul(own, #0)")),
    ("the last of several chunks is zero", inner("part", in_last_chunk("0.0"))),
    ("the last of several chunks is off by 1e-3", inner("part", in_last_chunk("1.001"))),
    (
        "the first two chunks swapped",
        inner(
            "head_step",
            "two = Less(own, #2) several = Greater(head_steps, #1) both = And(two, several) other = Sub(#1, own) "
            "out = Where(both, other, own)",
        ),
    ),
    (
        "a chunk of fewer heads is off by 1e-3",
        inner("part", "whole = Equal(missing_heads, #0) z = Mul(own, $1.001) out = Where(whole, own, z)"),
    ),
    ("an uneven chunk is padded in front", inner("pads", f"{_FRONT} out = Concat<axis = 0>(b, a)")),
    (
        "one chunk too few",
        inner(
            "trips",
            "several = Greater(steps, #1) less = Cast<to = 7>(several) few = Sub(steps, less) "
            "out = Reshape(few, scalar)",
        ),
    ),
    ("chunks of queries repeated", inner("first_row", "out = Mul(own, #0)")),
)
"""Forms `masked` and `maskless`: what is wrong only where there are several chunks; the last for chunks of queries."""

_ONE_HOT, _TAKEN = "*/heads/one_hot_positions", "*/heads/token_positions"

POSITIONS: tuple[tuple[str, Edit], ...] = (
    ("omega is 10", constant("*minus_omega", lambda _: -10.0)),
    ("omega is 30", constant("*minus_omega", lambda _: -30.0)),
    (
        "all tokens have the first position",
        inner(_TAKEN, "a = Gather<axis = 0>(own, #0) n = Shape(own) out = Expand(a, n)"),
    ),
    ("positions 5 and 6 are the same", inner(_ONE_HOT, same_slot(5))),
    ("positions 60 and 61 are the same", inner(_ONE_HOT, same_slot(60))),
    ("the last two positions are the same", inner(_ONE_HOT, same_slot(68))),
    ("omega has the wrong sign", constant("*minus_omega", scaled(-1.0))),
    ("slots rolled by one", inner(_ONE_HOT, rolled(1))),
    ("all pairs are allowed", inner("*scores_allowed", "a = Not(own) out = Or(own, a)")),
)
"""Forms `maskless` and `staged`: what is wrong with positions, some of it only from a position on."""

STAGES: tuple[tuple[str, Edit], ...] = (
    ("the first sublayer drops b1", inner("*/heads/W_V_linear_1*_on_tokens", _NOTHING)),
    ("the third sublayer drops b2", inner("*/heads/W_V_linear_2*_on_tokens", _NOTHING)),
    ("heads of the first sublayer rolled by one", inner("*/heads/linear_1_split", rolled(2))),
    ("the first sublayer's heads see all tokens", inner("*/heads/self_scores_same", "a = Not(own) out = Or(own, a)")),
)
"""Form `staged`: what is wrong with its linear sublayers."""


def chunked(*subjects: Subject) -> tuple[Subject, ...]:
    """The same with patterns of at most a hundredth of a megabyte, which take several chunks."""
    return tuple(Subject(subject.model, {**subject.options, "max_pattern_mb": 0.01}) for subject in subjects)


_PAIR, _TEXTS = ("silu-decoder", "gelu-vision"), ("silu", "gelu")
_MASKED, _MASKLESS, _STAGED = (square(form, *_PAIR) for form in ("masked", "maskless", "staged"))

SQUARES = (
    *(Sabotage(f"{what}, form masked", applied(edit), _MASKED) for what, edit in MASKS),
    Sabotage(
        "no mask beyond 32 tokens, form masked",
        applied(inner("mask", "far = Less(#32, tokens) out = Or(own, far)")),
        square("masked", "silu-decoder", "gelu-encoder"),
    ),
    Sabotage(
        "the pattern transposed, form masked",
        applied(inner("pattern", "out = Transpose<perm = [0, 1, 3, 2]>(own)")),
        square("masked", "gelu-vision", "gelu-encoder"),
    ),
    *(Sabotage(f"{what}, form masked", applied(edit), _MASKED) for what, edit in CHUNKS),
    *(Sabotage(f"{what}, form masked, small chunks", applied(edit), chunked(*_MASKED)) for what, edit in CHUNKS[:3]),
    *(Sabotage(f"{what}, form maskless", applied(edit), _MASKLESS) for what, edit in CHUNKS[:3]),
    *(Sabotage(f"{what}, form maskless", applied(edit), _MASKLESS) for what, edit in POSITIONS),
    Sabotage(
        "bias tokens have no slots, form maskless",
        applied(inner("*/heads/bias_positions_each", _NOTHING)),
        square("maskless", "gelu-vision", "gelu-encoder"),
    ),
    *(Sabotage(f"{what}, form staged", applied(edit), square("staged", *_TEXTS)) for what, edit in POSITIONS[:6]),
    *(Sabotage(f"{what}, form staged", applied(edit), _STAGED) for what, edit in STAGES),
    Sabotage(
        "hidden columns are not cleared, form staged",
        applied(inner("*/heads/cleared_columns", _NOTHING)),
        _STAGED,
        Expect.HARMLESS,
        below=2e-6,
    ),
)

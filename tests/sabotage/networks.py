"""Form `whole`: wrong rows, columns, masks and heads of the one stream.

The model whose blocks are proved one by one stays right, so that only what is said of the network can catch these.
"""

from __future__ import annotations

import numpy as np

from passes.forms.whole import BIAS_ROWS, POSITION_ROWS, PREFIX
from tests.sabotage.edits import Array, Edit, anywhere, applied, inner
from tests.sabotage.mixing import BATCH_LEAK, FIRST_SEQUENCE, NEXT_SEQUENCE
from tests.sabotage.pieces import Change, becomes, constant, maker, scaled, weight
from tests.sabotage.sabotages import Expect, Sabotage
from tests.sabotage.squares import rolled
from tests.sabotage.subjects import Subject

LONGEST = 64
"""The positions that the committed decoders have."""
WIDTH = 32
"""D of the committed models."""

_NOTHING = "out = Sub(own, own)"
_HEADS, _NEURONS = f"{PREFIX}/W_QK_positions_0", f"{PREFIX}/W_QK_neurons_*"


def network(*models: str) -> tuple[Subject, ...]:
    """Models in form whole, for sequences as long as its positions."""
    return tuple(Subject(model, {"form": "whole", "max_tokens": LONGEST}) for model in models)


def allowed(query: int, key: int) -> Change:
    """A pair of positions of tokens that W_QK allows."""

    def change(values: Array) -> Array:
        bias = len(values) - LONGEST
        values[bias + query, bias + key] = 0.0
        return values

    return change


def off_by_one(values: Array) -> Array:
    """Every token sees the one behind it."""
    for query in range(LONGEST - 1):
        values = allowed(query, query + 1)(values)
    return values


def last_pair(values: Array) -> Array:
    """The last but one token sees the last."""
    values[-2, -1] = 0.0
    return values


def sees_bias_token(*tokens: int) -> Change:
    """Tokens that see the first bias token; all without numbers."""

    def change(values: Array) -> Array:
        bias = len(values) - LONGEST
        values[[bias + token for token in tokens] if tokens else slice(bias, None), 0] = 0.0
        return values

    return change


def row(number: int, fill: float) -> Change:
    """A bias token that is the same number in all columns."""

    def change(values: Array) -> Array:
        values[0, number] = fill
        return values

    return change


def slope(values: Array) -> Array:
    """A bias token with content; a constant would be 0 behind a LayerNormalization."""
    values[0, 0, :WIDTH] = [1e-3 * place for place in range(WIDTH)]
    return values


def is_token(values: Array) -> Array:
    """Bias tokens that count as tokens, so that they get biases."""
    values[0, :, WIDTH] = 1.0
    return values


def same_positions(first: int) -> Change:
    """Two positions with one one-hot row."""

    def change(values: Array) -> Array:
        values[0, first + 1] = values[0, first]
        return values

    return change


def exchanged(first: int) -> Change:
    """Two positions exchanged."""

    def change(values: Array) -> Array:
        values[0, [first, first + 1]] = values[0, [first + 1, first]]
        return values

    return change


def one_less(values: Array) -> Array:
    """One position's row without its one."""
    values[0, 4, 1:] = 0.0
    return values


def rest_on_another(values: Array) -> Array:
    """Bias tokens that attend to one whose value is not 0."""
    bias = len(values) - LONGEST
    values[:bias, [2, bias - 1]] = values[:bias, [bias - 1, 2]]
    return values


def omega(number: float) -> Change:
    """Another omega."""
    return lambda values: np.where(values == 0.0, 0.0, -number)


def beginning(number: float) -> Change:
    """The first entry that is not 0 times a factor."""

    def change(values: Array) -> Array:
        flat = values.reshape(-1)
        flat[np.flatnonzero(flat)[0]] *= number
        return values

    return change


def written(column: int, number: str) -> str:
    """A text that writes to one further column."""
    return (
        f"a = Slice(own, #0, #{column}, #2) b = Slice(own, #{column}, #{column + 1}, #2) "
        f"c = Slice(own, #{column + 1}, #end, #2) d = Add(b, ${number}) out = Concat<axis = 2>(a, d, c)"
    )


_LOST = (
    f"a = Slice(own, #0, #{WIDTH}, #2) b = Slice(own, #{WIDTH}, #end, #2) c = Mul(b, $0.0) out = Concat<axis = 2>(a, c)"
)

ROWS: tuple[tuple[str, Edit], ...] = (
    ("no position of the first bias token", weight(BIAS_ROWS, row(0, 0.0))),
    ("a bias token with content of 1e-3", weight(BIAS_ROWS, slope)),
    ("bias tokens get biases", weight(BIAS_ROWS, is_token)),
    ("positions 5 and 6 are the same", weight(POSITION_ROWS, same_positions(5))),
    ("one token without a position", weight(POSITION_ROWS, one_less)),
    ("neurons see a neighbour at one pair of positions", weight(_NEURONS, allowed(3, 4))),
    ("omega is 3", weight(_NEURONS, omega(3.0))),
    ("an original head sees a bias token", weight(_HEADS, sees_bias_token())),
    ("an original head sees a bias token at one position", weight(_HEADS, sees_bias_token(4))),
    ("a sublayer writes 1e-3 to the column of tokens", anywhere("*/written_wide", written(WIDTH, "0.001"))),
    ("a sublayer writes to a column of positions", anywhere("*/written_wide", written(WIDTH + 12, "1.0"))),
    ("a sum loses the further columns", anywhere("*Add*/wide", _LOST)),
    ("biases dropped", anywhere("*/bias", _NOTHING)),
    ("queries of heads rolled by one", anywhere("*/query_joined", rolled(1))),
    ("keys have no positions", anywhere("*/key_positions_each", _NOTHING)),
    ("heads of neurons rolled by one", inner("*/heads/z", rolled(1))),
    ("scores of neurons off by 1e-3", inner("*/heads/attn_scores", "out = Mul(own, $1.001)")),
    ("one coefficient of the keys off by 1e-3", constant("W_K", beginning(1.001))),
    ("what neurons write off by 1e-3", inner("*/heads/z_side_by_side", "out = Mul(own, $1.001)")),
    ("what neurons write off by 1e-5", inner("*/heads/z_side_by_side", "out = Mul(own, $1.00001)")),
    ("the first token is dropped instead of a bias token", anywhere("*/tokens_-2", rolled(1))),
)
"""What is wrong, and the edit, for any architecture."""

TEXTS: tuple[tuple[str, Edit], ...] = (
    ("the causal mask is off by one", weight(_HEADS, off_by_one)),
    ("one pair of the causal mask is missing", weight(_HEADS, allowed(3, 5))),
    ("one late pair of the causal mask is missing", weight(_HEADS, allowed(61, 63))),
    ("neurons see a neighbour at one late pair", weight(_NEURONS, allowed(62, 63))),
    ("the last two positions are the same", weight(POSITION_ROWS, same_positions(LONGEST - 2))),
    ("positions 5 and 6 exchanged", weight(POSITION_ROWS, exchanged(5))),
    ("padding forbids nothing", anywhere(f"*/data/sequence_longer_than_max_tokens_{LONGEST}", _NOTHING)),
    (
        "padding forbids by -3",
        anywhere(f"*/data/sequence_longer_than_max_tokens_{LONGEST}", "a = Sign(own) out = Mul(a, $3.0)"),
    ),
)
"""Of decoders, whose sequences are as long as their positions."""

FITTED: tuple[tuple[str, Edit], ...] = (
    ("bias tokens rest on one with a value", weight(_NEURONS, rest_on_another)),
    ("bias values off by 1e-3", constant("W_V_constants", scaled(1.001))),
    ("bias values off by 1e-5", constant("W_V_constants", scaled(1.00001))),
    ("one coefficient of the keys off by 1e-5", constant("W_K", beginning(1.00001))),
)
"""Of GELU, whose bias tokens have values."""

MERGED: tuple[tuple[str, Edit], ...] = (
    ("neurons read the next sequence", inner("*/heads/in_batches", NEXT_SEQUENCE)),
    ("neurons read a thousandth of the first sequence", inner("*/heads/in_batches", BATCH_LEAK)),
    (
        "sequences are interleaved on the way in",
        inner("*/heads/in_batches", "n = Shape(own) t = Transpose<perm = [1, 0, 2]>(own) out = Reshape(t, n)"),
    ),
    ("neurons write to the next sequence", inner("*/heads/z_side_by_side", NEXT_SEQUENCE)),
    ("all sequences write what the first does", inner("*/heads/z_side_by_side", FIRST_SEQUENCE)),
)
"""Of MLPs that read the tokens of all sequences as one axis; none does anything to a single sequence."""

_TEXTS, _FITTED = network("silu-decoder", "relu-decoder"), network("gelu-vision", "gelu-encoder")
_MIXED = network("silu-decoder", "gelu-vision")
_FURTHER = tuple(
    Subject(model, {"form": "whole", "max_tokens": longest}) for model, longest in (("gated-decoder", 80), ("silu", 90))
)

FURTHER: tuple[tuple[str, Edit], ...] = (("neurons see a neighbour at the last position", weight(_NEURONS, last_pair)),)
"""Of models that take longer sequences than the usual inputs of the proof."""

NETWORKS = (
    *(
        Sabotage(f"{what}, form whole", applied(edit, only_carried=True), subjects, Expect.MODEL)
        for edits, subjects in (
            (ROWS, _MIXED),
            (TEXTS, _TEXTS),
            (FITTED, _FITTED),
            (FURTHER, _FURTHER),
            (MERGED, network("relu-decoder")),
        )
        for what, edit in edits
    ),
    Sabotage(
        "the rows of bias tokens are not dropped, form whole",
        applied(maker("*/tokens_-2", becomes("Identity", 1)), only_carried=True),
        network("silu-decoder", "gated-decoder"),
        Expect.MODEL,
    ),
    Sabotage(
        "the last pair of the causal mask is missing, form whole",
        applied(weight(_HEADS, last_pair), only_carried=True),
        _FURTHER[:1],
        Expect.MODEL,
    ),
)

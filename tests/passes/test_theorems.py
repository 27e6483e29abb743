"""Each form computes the statement of the sources that it implements, written here in plain numpy.

An MLP as matrices and a head program as numbers become attention heads, applied to a residual stream [N, D] by
`tests.attention.attend` from queries, keys, values, outputs and a mask alone. Sources: Huben and Morris 2023 (arXiv
2309.08593), theorems 3, 7, 8 and 9, and the earlier post (P1), which has three sublayers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from passes.forms import FORMS
from passes.options import Options
from passes.plan import apply, make_plan
from rewriter.ort.sessions import open_session
from tests.attention import (
    Array,
    AttentionHead,
    BiasNumbers,
    HeadNumbers,
    Mlp,
    ProgramNumbers,
    Slots,
    attend,
    neuron_mask,
    with_indicators,
    with_positions,
)
from tests.textmodels import ERF_GELU, SILU, text_model

TOKENS, WIDTH, D_FF, OMEGA = 20, 30, 60, 1000.0
"""n_ctx, d_model and Omega of the post's own code."""

BOUND = 1e-12


# -- theorem 3: neurons as heads -------------------------------------------------------------------------------


def neuron_heads(program: ProgramNumbers, y: Array, z: Array, write: Array, slots: Slots) -> list[AttentionHead]:
    """The heads of one neuron: y [D'] and z [D'] read the pre-activation and the value, write [D'] is its output row.

    The internal dimension is 1, and 2 where logits differ by a constant.
    """
    return [_neuron_head(head, y, z, write, slots) for head in program.heads]


def _neuron_head(head: HeadNumbers, y: Array, z: Array, write: Array, slots: Slots) -> AttentionHead:
    dtype = write.dtype
    tokens, share = _padded(head.bias_tokens, len(slots.bias))
    slope, offset, value = (
        np.array([getattr(token, name) for token in tokens]) @ slots.bias for name in ("slope", "offset", "value")
    )
    offset = offset + share @ slots.bias
    # Softmax depends only on differences of logits. With beta and gamma subtracted from the bias tokens, the logits
    # between two tokens are 0, so a pseudo-mask need not outweigh them, however steep the program is.
    present = slots.bias.sum(axis=0)
    keys = [slope - head.beta * present, offset - head.gamma * present]
    queries = [y, slots.one]
    # The queries of bias tokens are 0, because y and `one` are 0 there.
    used = 2 if np.any(keys[1]) else 1
    return AttentionHead(
        np.stack(queries[:used], axis=1).astype(dtype),
        np.stack(keys[:used], axis=1).astype(dtype),
        (head.c * z + head.d * slots.one + value)[:, None].astype(dtype),
        write[None, :],
    )


def _padded(tokens: Sequence[BiasNumbers], m: int) -> tuple[list[BiasNumbers], Array]:
    """The bias tokens of a head that has fewer than the stream: copies of the first one share its weight.

    Returns m tokens, and the terms to add to their logits: -log of the number of copies.
    """
    copies = 1 + m - len(tokens)
    share = np.zeros(m)
    share[[0, *range(len(tokens), m)]] = -np.log(copies)
    return [*tokens, *[tokens[0]] * (m - len(tokens))], share


def _read(stream: int, weights: Array, bias: Array, slots: Slots) -> Array:
    """Columns [D', out] that compute `x weights + bias` from a widened row; bias rides on `one`."""
    columns = np.zeros((stream, weights.shape[1]), weights.dtype)
    columns[: len(weights)] = weights
    columns += slots.one[:, None] * bias
    return columns


def _mlp_heads(mlp: Mlp, program: ProgramNumbers, slots: Slots) -> tuple[list[AttentionHead], list[AttentionHead]]:
    """The heads of all neurons, under `neuron_mask`, and the heads for the linear part and b2, under the identity."""
    stream, width = len(slots.one), mlp.w2.shape[1]
    y = _read(stream, mlp.w1, mlp.b1, slots)
    z = y if mlp.v1 is None or mlp.c1 is None else _read(stream, mlp.v1, mlp.c1, slots)
    write = np.zeros((len(mlp.w2), stream), mlp.w2.dtype)
    write[:, :width] = mlp.w2
    heads = [head for j in range(len(write)) for head in neuron_heads(program, y[:, j], z[:, j], write[j], slots)]
    rest = slots.one[:, None] * (mlp.b2 + program.constant * mlp.w2.sum(axis=0)) + program.linear * z @ mlp.w2
    into = np.eye(width, stream, dtype=mlp.w2.dtype)
    return heads, linear_heads(rest, into, width)


def mlp_as_masked_heads(x: Array, mlp: Mlp, program: ProgramNumbers) -> Array:
    """T3: the MLP's output [N, D] as a sum of masked heads over N + m tokens."""
    m = _most(program)
    wide, slots = with_indicators(x, m)
    heads, alone = _mlp_heads(mlp, program, slots)
    out = attend(wide, heads, neuron_mask(len(x), m)) + attend(wide, alone, np.eye(len(wide), dtype=bool))
    return out[m:, : x.shape[1]]


# -- theorems 7 and 8: linear maps and activations -------------------------------------------------------------


def linear_heads(matrix: Array, into: Array, d_head: int) -> list[AttentionHead]:
    """T7: `x matrix into`, split by rank; under a mask that is the identity. matrix [D', r], into [r, D']."""
    nothing = np.zeros((len(matrix), 1), matrix.dtype)
    starts = range(0, matrix.shape[1], d_head)
    return [AttentionHead(nothing, nothing, matrix[:, s : s + d_head], into[s : s + d_head]) for s in starts]


def activation_heads(
    program: ProgramNumbers, columns: Sequence[int], slots: Slots, values: Sequence[int] | None = None
) -> list[AttentionHead]:
    """T8: heads that add f(v) - v, without its linear part, to every entry v of the columns.

    In a gated block the self values are read from the columns `values`.
    """
    basis = np.eye(len(slots.one), dtype=slots.one.dtype)
    pairs = zip(columns, columns if values is None else values, strict=True)
    return [head for i, j in pairs for head in neuron_heads(program, basis[i], basis[j], basis[i], slots)]


def _replace(program: ProgramNumbers, columns: int, slots: Slots, start: int = 0, values: int | None = None) -> Array:
    """The part of `f(v) - v` that the heads do not compute, linear z + constant - v, as a matrix [D', columns].

    v stands for the columns from `start` on, z for those from `values` on.
    """
    rest = np.zeros((len(slots.one), columns), slots.one.dtype)
    source = start if values is None else values
    rest[source : source + columns] += program.linear * np.eye(columns)
    rest[start : start + columns] -= np.eye(columns)
    return rest + slots.one[:, None] * program.constant


# -- theorem 9: the mask in the weights ------------------------------------------------------------------------


def pseudo_masked(head: AttentionHead, allowed: Array, omega: float) -> AttentionHead:
    """T9: the head with `allowed` [N', N'] written into W_Q and W_K; the last N' columns are one-hot positions.

    Forbidden pairs get -omega.
    """
    size, stream = len(allowed), len(head.w_q)
    logits = np.where(allowed, 0.0, -omega)
    positions = np.eye(stream)[:, stream - size :]
    dtype = head.w_q.dtype
    return AttentionHead(
        np.concatenate([head.w_q, positions.astype(dtype)], axis=1),
        np.concatenate([head.w_k, (positions @ logits.T).astype(dtype)], axis=1),
        head.w_v,
        head.w_o,
    )


def mlp_as_pseudo_masked_heads(x: Array, mlp: Mlp, program: ProgramNumbers) -> Array:
    """T9 applied to T3: the MLP's output [N, D] from heads without a mask."""
    m = _most(program)
    wide, slots = with_positions(x, m)
    heads, alone = _mlp_heads(mlp, program, slots)
    mask, diagonal = neuron_mask(len(x), m), np.eye(len(wide), dtype=bool)
    every = [pseudo_masked(head, mask, OMEGA) for head in heads]
    every += [pseudo_masked(head, diagonal, OMEGA) for head in alone]
    return attend(wide, every)[m:, : x.shape[1]]


# -- the post: three sublayers ---------------------------------------------------------------------------------


def three_sublayers(
    mlp: Mlp, program: ProgramNumbers, slots: Slots, tokens: int, d_head: int
) -> tuple[list[AttentionHead], list[AttentionHead], list[AttentionHead]]:
    """P1: linear, activation, linear, each to be added to the stream of D + hidden + positions columns; no masks.

    There are d_ff hidden columns; a gate, which the post does not have, needs d_ff more. The third sublayer also clears
    the hidden columns, so the rank of its matrix is their number.
    """
    d_ff, width = mlp.w2.shape
    m, stream = _most(program), len(slots.one)
    diagonal = np.eye(tokens + m, dtype=bool)
    hidden = np.eye(stream, dtype=mlp.w1.dtype)[width : width + hidden_columns(mlp)]
    first = _read(stream, mlp.w1, mlp.b1, slots)
    values = None
    if mlp.v1 is not None and mlp.c1 is not None:
        first = np.concatenate([first, _read(stream, mlp.v1, mlp.c1, slots)], axis=1)
        values = width + d_ff
    sources = None if values is None else range(values, values + d_ff)
    second = activation_heads(program, range(width, width + d_ff), slots, sources)
    rest = linear_heads(_replace(program, d_ff, slots, width, values), hidden[:d_ff], d_head)
    out = np.concatenate([np.zeros((len(hidden), width)), -np.eye(len(hidden), stream - width)], axis=1)
    out[:d_ff, :width] = mlp.w2
    last = linear_heads(hidden.T, out.astype(mlp.w2.dtype), d_head)
    last += linear_heads(slots.one[:, None], np.pad(mlp.b2, (0, stream - width))[None, :], d_head)
    paired = [pseudo_masked(head, neuron_mask(tokens, m), OMEGA) for head in second]
    linear, kept, cleared = (
        [pseudo_masked(head, diagonal, OMEGA) for head in heads if np.any(head.w_v)]
        for heads in (linear_heads(first, hidden, d_head), rest, last)
    )
    return linear, [*paired, *kept], cleared


def hidden_columns(mlp: Mlp) -> int:
    """Columns that the three sublayers need in addition to the D data columns and the positions."""
    return len(mlp.w2) * (1 if mlp.v1 is None else 2)


def mlp_as_three_sublayers(x: Array, mlp: Mlp, program: ProgramNumbers) -> Array:
    """P1: the MLP's output [N, D], as three maskless sublayers add it to the data columns."""
    wide, slots = with_positions(x, _most(program), hidden=hidden_columns(mlp))
    stream = wide
    for heads in three_sublayers(mlp, program, slots, len(x), d_head=10):
        stream = stream + attend(stream, heads)
    if np.abs(stream[:, x.shape[1] :] - wide[:, x.shape[1] :]).max() > 1e-9:
        raise AssertionError("the hidden columns were not cleared")
    return stream[_most(program) :, : x.shape[1]] - x


def _most(program: ProgramNumbers) -> int:
    return max(len(head.bias_tokens) for head in program.heads)


THEOREMS: Mapping[str, Callable[[Array, Mlp, ProgramNumbers], Array]] = {
    "local": mlp_as_masked_heads,
    "compact": mlp_as_masked_heads,
    "masked": mlp_as_masked_heads,
    "maskless": mlp_as_pseudo_masked_heads,
    "staged": mlp_as_three_sublayers,
    "whole": mlp_as_pseudo_masked_heads,
}
"""Form to the statement that it implements: a function of stream [N, D], MLP and program that returns the MLP's output
[N, D]."""


# -- the statements hold, and the forms compute them ------------------------------------------------------------


def sigmoid(y: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-y)))


def silu(y: Array) -> Array:
    return y * sigmoid(y)


def matrices(seed: int, *shape: int) -> Array:
    """Normal numbers, divided by the square root of the number of rows for a matrix."""
    scale = shape[0] ** -0.5 if len(shape) == 2 else 0.3
    return np.random.default_rng(seed).normal(0.0, scale, shape)


def an_mlp(*, gated: bool = False, seed: int = 0) -> Mlp:
    first = (matrices(seed + 1, WIDTH, D_FF) * 1.5, matrices(seed + 2, D_FF))
    second = (matrices(seed + 3, D_FF, WIDTH), matrices(seed + 4, WIDTH))
    gate = (matrices(seed + 5, WIDTH, D_FF), matrices(seed + 6, D_FF)) if gated else (None, None)
    return Mlp(*first, *second, *gate)


def stream(seed: int = 9) -> Array:
    return np.random.default_rng(seed).normal(0.0, 1.0, (TOKENS, WIDTH))


def gap(left: Array, right: Array) -> float:
    return float(np.abs(left - right).max())


ACTIVATIONS: tuple[tuple[str, str, Callable[[Array], Array], dict[str, Any]], ...] = (
    ("silu", SILU, silu, {}),
    ("relu", "h = Relu(y)", lambda y: np.maximum(y, 0.0), {}),
    ("tanh", "h = Tanh(y)", np.tanh, {}),
    ("gelu", ERF_GELU, lambda y: 0.5 * y * (1.0 + np.vectorize(math.erf)(y / math.sqrt(2.0))), {}),
    ("mish", "p = Softplus(y) t = Tanh(p) h = Mul(y, t)", lambda y: y * np.tanh(np.log1p(np.exp(y))), {}),
    ("glu", "s = Sigmoid(y) g = MatMul(x, V1) u = Add(g, c1) h = Mul(s, u)", sigmoid, {"gated": True}),
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("text", "f", "more"), [a[1:] for a in ACTIVATIONS], ids=[a[0] for a in ACTIVATIONS])
def test_each_form_computes_its_theorem_in_float64(form: str, text: str, f: Any, more: dict[str, Any]) -> None:
    mlp, x = an_mlp(**more), stream()
    names = {"W1": mlp.w1, "b1": mlp.b1, "W2": mlp.w2, "b2": mlp.b2}
    if mlp.v1 is not None and mlp.c1 is not None:
        names |= {"V1": mlp.v1, "c1": mlp.c1}
    model = text_model(
        f"first = MatMul(x, W1) y = Add(first, b1) {text} second = MatMul(h, W2) out = Add(second, b2)",
        inputs=f"float[batch, tokens, {WIDTH}] x",
        outputs=f"float[batch, tokens, {WIDTH}] out",
        elem="double",
        constants=names,
    )
    plan = make_plan(model, Options(form=form))
    (conversion,) = plan.conversions
    assert conversion.form == form
    session = open_session(apply(plan), "cpu")
    got = session.run({"x": x[None]})["out"][0]
    theorem = THEOREMS[form](x, mlp, conversion.program)
    assert gap(got, theorem) <= BOUND
    # 1e-12, plus the certified error of the head program (GELU is fitted), in the same direction at every neuron.
    hidden = np.maximum(1.0, np.abs(f(x @ mlp.w1 + mlp.b1)))
    carried = conversion.max_error * hidden @ np.abs(mlp.w2)
    assert np.all(np.abs(theorem - mlp.plain(x, f)) <= BOUND + carried)

"""The sources' statements hold in plain numpy, in the sources' own setting, and the forms compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from passes.forms import FORMS
from passes.options import Options
from passes.plan import apply, make_plan
from passes.programs.head import BiasToken, Head
from passes.programs.program import Program
from rewriter.ort.sessions import open_session
from tests.attention import Array, AttentionHead, Mlp, attend, neuron_mask, with_indicators, with_positions
from tests.textmodels import ERF_GELU, SILU, text_model
from tests.theorems import (
    THEOREMS,
    Layer,
    activation_on_matrix,
    attention_only_transformer,
    linear_heads,
    mlp_as_masked_heads,
    mlp_as_pseudo_masked_heads,
    mlp_as_three_sublayers,
    neuron_heads,
    plain_transformer,
    pseudo_masked,
    three_sublayers,
)

TOKENS, WIDTH, D_FF, OMEGA = 20, 30, 60, 1000.0
"""n_ctx, d_model and Omega of the post's own code."""

BOUND = 1e-12
LN2 = float(np.log(2.0))
SILU_HEAD = Program("silu", (Head(beta=1.0),))


def sigmoid(y: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-y)))


def silu(y: Array) -> Array:
    return y * sigmoid(y)


EVERYTHING = Program(
    "everything",
    (
        Head(0.7, (BiasToken(0.3, -0.2, 0.5), BiasToken(-0.4, 0.1, -0.8)), gamma=0.2, c=1.1, d=-0.3),
        Head(-0.6, (BiasToken(0.2, 0.3, -0.4),), c=0.5),
    ),
    linear=0.4,
    constant=0.25,
)
"""Heads with different numbers of bias tokens too."""

PROGRAMS: tuple[tuple[str, Callable[[Array], Array], Program], ...] = (
    ("silu", silu, SILU_HEAD),
    # the post's spelling: the head writes -y sigma(-y) on top of y
    ("silu-residual", silu, Program("silu", (Head(beta=-1.0, c=-1.0),), linear=1.0)),
    ("relu", lambda y: np.maximum(y, 0.0), Program("relu", (Head(beta=2.0**80),))),
    ("tanh", np.tanh, Program("tanh", (Head(beta=2.0, c=0.0, d=2.0),), constant=-1.0)),
    (
        "mish",
        lambda y: y * np.tanh(np.log1p(np.exp(y))),
        Program("mish", (Head(0.0, (BiasToken(2.0), BiasToken(1.0, LN2)), gamma=LN2, c=-1.0),), linear=1.0),
    ),
    # Not an activation in use: it has a nonzero value for every coefficient of a head.
    ("everything", EVERYTHING.evaluate, EVERYTHING),
)
EACH = pytest.mark.parametrize(("f", "program"), [p[1:] for p in PROGRAMS], ids=[p[0] for p in PROGRAMS])


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


def a_head(seed: int, width: int, d_head: int) -> AttentionHead:
    w_q, w_k, w_v = (matrices(seed + part, width, d_head) for part in range(3))
    return AttentionHead(w_q, w_k, w_v, matrices(seed + 3, d_head, width))


def gap(left: Array, right: Array) -> float:
    return float(np.abs(left - right).max())


@EACH
@pytest.mark.parametrize("statement", [mlp_as_masked_heads, mlp_as_pseudo_masked_heads, mlp_as_three_sublayers])
def test_an_mlp_is_a_sum_of_heads(statement: Any, f: Callable[[Array], Array], program: Program) -> None:
    mlp, x = an_mlp(), stream()
    expected = mlp.plain(x, f)
    assert np.abs(expected).max() > 1.0
    assert gap(statement(x, mlp, program), expected) <= BOUND


@pytest.mark.parametrize("statement", [mlp_as_masked_heads, mlp_as_pseudo_masked_heads, mlp_as_three_sublayers])
def test_a_gate_is_the_value_of_the_heads(statement: Any) -> None:
    mlp, x = an_mlp(gated=True), stream()
    gate = Program("sigmoid", (Head(beta=1.0),))
    assert gap(statement(x, mlp, gate), mlp.plain(x, sigmoid)) <= BOUND


def test_theorem_3_heads_have_internal_dimension_1_and_two_keys() -> None:
    wide, slots = with_indicators(stream(), 1)
    y = np.concatenate([matrices(1, WIDTH), [0.3, 0.0]])
    (head,) = neuron_heads(SILU_HEAD, y, y, np.zeros(len(y)), slots)
    assert head.dimension == 1
    assert neuron_mask(TOKENS, 1).sum(axis=1).tolist() == [1, *[2] * TOKENS]
    assert wide.shape == (TOKENS + 1, WIDTH + 2)


def test_a_wrong_coefficient_is_seen() -> None:
    mlp, x = an_mlp(), stream()
    bent = Program("bent", (Head(beta=1.001),))
    assert gap(mlp_as_masked_heads(x, mlp, bent), mlp.plain(x, silu)) > 4e-4  # measured: 8.5e-4


@pytest.mark.parametrize("seed", [0, 1])
def test_theorem_6_a_transformer_is_attention_only(seed: int) -> None:
    x = stream(seed)
    layers = [layer(10 * seed + number) for number in range(3)]
    expected = plain_transformer(x, layers, silu)
    assert gap(attention_only_transformer(x, layers, SILU_HEAD), expected) <= BOUND * np.abs(expected).max()


def test_theorem_6_needs_bias_tokens_without_values() -> None:
    with pytest.raises(ValueError, match="would change in every layer"):
        attention_only_transformer(stream(), [layer(0)], EVERYTHING)


def layer(seed: int) -> Layer:
    d_head = 10
    heads = tuple(a_head(100 * seed + 10 * number, WIDTH, d_head) for number in range(3))
    return Layer(heads, np.tri(TOKENS, dtype=bool), an_mlp(seed=seed))


@pytest.mark.parametrize("d_head", [1, 7, 30, 64])
def test_theorem_7_a_linear_map_is_heads_of_bounded_rank(d_head: int) -> None:
    x, matrix = stream(), matrices(2, WIDTH, WIDTH)
    heads = linear_heads(matrix, np.eye(WIDTH), d_head)
    assert len(heads) == -(-WIDTH // d_head)
    assert all(head.w_v.shape[1] <= d_head for head in heads)
    assert gap(attend(x, heads, np.eye(TOKENS, dtype=bool)), x @ matrix) <= BOUND


@EACH
def test_theorem_8_an_activation_on_every_entry_is_one_head_per_column(
    f: Callable[[Array], Array], program: Program
) -> None:
    x = 3.0 * stream()
    assert gap(activation_on_matrix(x, program), f(x)) <= BOUND


def test_theorem_9_any_mask_can_stand_in_the_weights() -> None:
    rng = np.random.default_rng(4)
    allowed = rng.random((TOKENS, TOKENS)) < 0.3
    np.fill_diagonal(allowed, val=True)
    wide, _ = with_positions(stream(), 0)
    heads = [a_head(0, wide.shape[1], 5)]
    written = [pseudo_masked(head, allowed, OMEGA) for head in heads]
    assert gap(attend(wide, written), attend(wide, heads, allowed)) <= BOUND


def test_theorem_9_the_error_falls_as_omega_grows() -> None:
    mlp, x = an_mlp(), stream()
    expected = mlp.plain(x, silu)
    errors = [gap(mlp_as_pseudo_masked_heads(x, mlp, SILU_HEAD, omega), expected) for omega in (5, 10, 20, 40, 80)]
    assert all(later < 1e-2 * earlier for earlier, later in pairwise(errors[:4]))
    assert errors[-1] <= BOUND


def test_plus_two_omega_loses_digits_that_minus_omega_keeps() -> None:
    mlp, x = an_mlp(), stream()
    expected = mlp.plain(x, silu)
    narrow = Mlp(*(part.astype(np.float32) for part in (mlp.w1, mlp.b1, mlp.w2, mlp.b2)))
    for where, part, kept in ((x, mlp, BOUND), (x.astype(np.float32), narrow, 1.9e-6)):
        minus, plus = (
            gap(mlp_as_pseudo_masked_heads(where, part, SILU_HEAD, OMEGA, plus=plus), expected)
            for plus in (False, True)
        )
        assert minus <= kept
        assert plus > 10 * minus


def test_the_posts_sublayers_have_its_head_counts() -> None:
    mlp, d_head = an_mlp(), 10
    _, slots = with_positions(stream(), 1, hidden=D_FF)
    program = PROGRAMS[1][2]
    counts = [len(heads) for heads in three_sublayers(mlp, program, slots, TOKENS, d_head, OMEGA)]
    # W1 by rank, one per neuron; W2 with the hidden columns' clearing has rank d_ff, and b2 is one more.
    assert counts == [D_FF // d_head, D_FF, D_FF // d_head + 1]


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

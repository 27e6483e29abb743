"""Each form computes the statement of the sources that it implements, written here in plain numpy.

The stream, heads and masks are those of `tests.whole`, applied to one MLP [N, D]. Sources: Huben and Morris 2023 (arXiv
2309.08593), theorems 3, 7, 8 and 9, and the earlier post (P1), which has three sublayers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from passes.forms import FORMS
from passes.options import Options
from passes.plan import apply, make_plan
from rewriter.ort.sessions import open_session
from tests.attention import Array, ProgramNumbers
from tests.textmodels import ERF_GELU, SILU, text_model
from tests.whole import OMEGA, Linear, Mlp, Stream, heads_of_neurons, most_bias_tokens, neurons

TOKENS, WIDTH, D_FF = 20, 30, 60
"""n_ctx and d_model of the post's own code."""

BOUND = 1e-12


def masked_heads(x: Array, mlp: Mlp, program: ProgramNumbers) -> Array:
    """T3: the MLP's output [N, D] as a sum of masked heads over N + m tokens."""
    stream = Stream(x, most_bias_tokens(program), masked=True)
    return neurons(stream, stream.x, mlp, program)[: len(x)]


def maskless_heads(x: Array, mlp: Mlp, program: ProgramNumbers) -> Array:
    """T9 applied to T3: the MLP's output [N, D] from heads without a mask."""
    stream = Stream(x, most_bias_tokens(program))
    return neurons(stream, stream.x, mlp, program)[: len(x)]


def three_sublayers(x: Array, mlp: Mlp, program: ProgramNumbers) -> Array:
    """P1: the MLP's output [N, D] by sublayers on a stream of D + hidden columns; linear, activation, linear; no masks.

    There are d_ff hidden columns; a gate, which the post does not have, needs d_ff more. The second sublayer adds
    f(v) - v to every hidden entry v (T8). The third also clears the hidden columns.
    """
    d_ff, width = mlp.down.weight.shape
    first = [mlp.gate, mlp.up][: 1 if mlp.up is mlp.gate else 2]
    hidden = d_ff * len(first)
    stream = Stream(np.pad(x, ((0, 0), (0, hidden))), most_bias_tokens(program))
    y, z = slice(width, width + d_ff), slice(width + hidden - d_ff, width + hidden)
    alone, nothing = OMEGA * (np.eye(len(stream.x)) - 1.0), np.zeros((len(stream.x), 1))

    def linear(*entries: tuple[slice, slice, Array]) -> Array:
        """T7: heads under a mask that is the identity. Rows, columns and values of a matrix's parts; 1-d are biases."""
        made = Linear(np.zeros((stream.width, stream.width)), np.zeros(stream.width))
        for rows, columns, values in entries:
            (made.bias if values.ndim == 1 else made.weight[rows])[..., columns] += values
        return stream.attend(stream.x, nothing, nothing, stream.x @ stream.on(made), alone)

    every, data, into = slice(None), slice(0, width), slice(width, None)
    weights, biases = (np.concatenate([getattr(each, part) for each in first], axis=-1) for part in ("weight", "bias"))
    stream.x[:, : stream.width] += linear((data, into, weights), (every, into, biases))
    rest = linear(
        (z, y, program.linear * np.eye(d_ff)), (y, y, -np.eye(d_ff)), (every, y, np.full(d_ff, program.constant))
    )
    rest[:, y] += heads_of_neurons(stream, stream.x, stream.x[:, y], stream.x[:, z], program)
    stream.x[:, : stream.width] += rest
    cleared = (into, into, -np.eye(hidden))
    stream.x[:, : stream.width] += linear((y, data, mlp.down.weight), (every, data, mlp.down.bias), cleared)
    assert np.abs(stream.x[:, width : stream.width]).max() <= 1e-9, "the hidden columns are cleared"
    return stream.x[: len(x), :width] - x


THEOREMS: Mapping[str, Callable[[Array, Mlp, ProgramNumbers], Array]] = {
    "local": masked_heads,
    "compact": masked_heads,
    "masked": masked_heads,
    "maskless": maskless_heads,
    "staged": three_sublayers,
    "whole": maskless_heads,
}
"""Form to the statement that it implements: a function of stream [N, D], MLP and program that returns the MLP's output
[N, D]."""


def sigmoid(y: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-y)))


def linear_map(seed: int, rows: int, columns: int, scale: float = 1.0) -> Linear:
    """Normal weights divided by the square root of the number of rows, and smaller biases."""
    rng = np.random.default_rng(seed)
    return Linear(rng.normal(0.0, scale * rows**-0.5, (rows, columns)), rng.normal(0.0, 0.3, columns))


ACTIVATIONS: tuple[tuple[str, str, Callable[[Array], Array]], ...] = (
    ("silu", SILU, lambda y: y * sigmoid(y)),
    ("relu", "h = Relu(y)", lambda y: np.maximum(y, 0.0)),
    ("tanh", "h = Tanh(y)", np.tanh),
    ("gelu", ERF_GELU, lambda y: 0.5 * y * (1.0 + np.vectorize(math.erf)(y / math.sqrt(2.0)))),
    ("mish", "p = Softplus(y) t = Tanh(p) h = Mul(y, t)", lambda y: y * np.tanh(np.log1p(np.exp(y)))),
    ("glu", "s = Sigmoid(y) g = MatMul(x, V1) u = Add(g, c1) h = Mul(s, u)", sigmoid),
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("text", "f"), [a[1:] for a in ACTIVATIONS], ids=[a[0] for a in ACTIVATIONS])
def test_each_form_computes_its_theorem_in_float64(form: str, text: str, f: Any) -> None:
    gate, down = linear_map(1, WIDTH, D_FF, 1.5), linear_map(3, D_FF, WIDTH)
    mlp = Mlp(gate, linear_map(5, WIDTH, D_FF) if "V1" in text else gate, down)
    x = np.random.default_rng(9).normal(size=(TOKENS, WIDTH))
    names = {"W1": gate.weight, "b1": gate.bias, "W2": down.weight, "b2": down.bias}
    if "V1" in text:
        names |= {"V1": mlp.up.weight, "c1": mlp.up.bias}
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
    assert np.abs(got - theorem).max() <= BOUND
    # 1e-12, plus the certified error of the head program (GELU is fitted), in the same direction at every neuron.
    activated = f(gate(x))
    carried = conversion.max_error * np.maximum(1.0, np.abs(activated)) @ np.abs(down.weight)
    plain = down(activated if mlp.up is gate else activated * mlp.up(x))
    assert np.all(np.abs(theorem - plain) <= BOUND + carried)

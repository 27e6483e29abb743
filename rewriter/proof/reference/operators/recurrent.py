"""RNN, GRU and LSTM in numpy.

Source: the ONNX specifications, opset 7 to 22, and onnxruntime where they are vague. Shapes: X [steps, batch, inputs],
W [directions, gates * hidden, inputs], R [directions, gates * hidden, hidden], B [directions, 2 * gates * hidden],
states [directions, batch, hidden], Y [steps, directions, batch, hidden]. Like onnxruntime, this refuses `layout` 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewriter.arrays import Array
from rewriter.proof.reference.operators.activations import ACTIVATIONS

States = tuple[Array, ...]
Function = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class _Cell:
    """The weights of one direction; `bias` is [2, gates * hidden], for the inputs and for the state."""

    w: Array
    r: Array
    bias: Array
    peepholes: Array
    functions: tuple[Function, ...]
    attributes: Mapping[str, Any]

    def gates(self, x: Array, h: Array, count: int) -> list[Array]:
        return np.split(x @ self.w.T + h @ self.r.T + self.bias.sum(0), count, -1)


def _functions(attributes: Mapping[str, Any], defaults: Sequence[str], directions: int) -> Iterator[Function]:
    """The activation functions of all directions; each takes its parameters from the lists in order."""
    names = [name.decode() for name in attributes.get("activations") or []] or list(defaults) * directions
    alphas, betas = (iter(attributes.get(f"activation_{name}") or []) for name in ("alpha", "beta"))
    bound = attributes.get("clip")
    for place, name in enumerate(names):
        stated, form = ACTIVATIONS[name.lower()]
        numbers = [next(source, default) for source, default in zip((alphas, betas), stated, strict=False)]
        if None in numbers:
            raise NotImplementedError(f"{name} without parameters")
        # The third function of an LSTM shows the cell, which is not clipped.
        clipped = None if place % len(defaults) == 2 else bound
        yield _clipped(form, tuple(float(np.float32(number)) for number in numbers if number is not None), clipped)


def _clipped(form: Callable[..., Any], numbers: tuple[float, ...], bound: float | None) -> Function:
    return lambda x: np.asarray(form(x if bound is None else np.clip(x, -bound, bound), *numbers))


def _rnn_step(cell: _Cell, x: Array, states: States) -> States:
    (h,), (f,) = states, cell.functions
    return (f(cell.gates(x, h, 1)[0]),)


def _gru_step(cell: _Cell, x: Array, states: States) -> States:
    (h,), (f, g) = states, cell.functions
    size = h.shape[-1]
    z, r, _ = cell.gates(x, h, 3)
    z, r = f(z), f(r)
    ahead = x @ cell.w[2 * size :].T + cell.bias[0, 2 * size :]
    behind, offset = cell.r[2 * size :].T, cell.bias[1, 2 * size :]
    reset = r * (h @ behind + offset) if cell.attributes.get("linear_before_reset") else (r * h) @ behind + offset
    return (((1 - z) * g(ahead + reset) + z * h),)


def _lstm_step(cell: _Cell, x: Array, states: States) -> States:
    (h, c), (f, g, k) = states, cell.functions
    i, o, forget, new = cell.gates(x, h, 4)
    p_i, p_o, p_f = cell.peepholes
    i = f(i + p_i * c)
    forget = 1 - i if cell.attributes.get("input_forget") else f(forget + p_f * c)
    c = forget * c + i * g(new)
    return f(o + p_o * c) * k(c), c


_Step = Callable[[_Cell, Array, States], States]


def _run(step: _Step, gates: int, count: int, defaults: Sequence[str]) -> Callable[..., tuple[Array, ...]]:
    """Run an operator with `count` states: Y, and the last value of each state."""

    def operator(
        attributes: Mapping[str, Any],
        x: Array,
        w: Array,
        r: Array,
        bias: Array | None = None,
        lengths: Array | None = None,
        *more: Array | None,
    ) -> tuple[Array, ...]:
        if attributes.get("layout"):
            raise NotImplementedError("layout 1")
        directions, hidden = w.shape[0], r.shape[-1]
        steps, batch = x.shape[:2]
        bias = np.zeros((directions, 2 * gates * hidden)) if bias is None else bias
        lengths = np.full(batch, steps) if lengths is None else lengths
        given = [*more, *[None] * (count + 1 - len(more))]
        empty = np.zeros((directions, batch, hidden))
        starts = [empty if state is None else state for state in given[:count]]
        peepholes = np.zeros((directions, 3 * hidden)) if given[count] is None else np.asarray(given[count])
        functions = tuple(_functions(attributes, defaults, directions))
        each = len(defaults)
        results = []
        for d in range(directions):
            cell = _Cell(
                w[d], r[d], bias[d].reshape(2, -1), peepholes[d].reshape(3, -1), functions[d * each : (d + 1) * each],
                attributes,
            )  # fmt: skip
            backwards = d == 1 or attributes.get("direction") in {b"reverse", "reverse"}
            results.append(_direction(step, cell, x, lengths, tuple(s[d] for s in starts), backwards=backwards))
        return tuple(
            np.stack(arrays, 1 if place == 0 else 0) for place, arrays in enumerate(zip(*results, strict=True))
        )

    return operator


def _direction(
    step: _Step, cell: _Cell, x: Array, lengths: Array, states: States, *, backwards: bool
) -> tuple[Array, ...]:
    """Y of one direction, and its last states. Steps beyond the end of a sequence give 0 and leave the states alone."""
    y = np.zeros((*x.shape[:2], cell.r.shape[-1]))
    for time in reversed(range(x.shape[0])) if backwards else range(x.shape[0]):
        inside = (time < lengths)[:, None]
        made = step(cell, x[time], states)
        states = tuple(np.where(inside, new, old) for new, old in zip(made, states, strict=True))
        y[time] = np.where(inside, states[0], 0)
    return y, *states


rnn = _run(_rnn_step, 1, 1, ("Tanh",))
gru = _run(_gru_step, 3, 1, ("Sigmoid", "Tanh"))
lstm = _run(_lstm_step, 4, 2, ("Sigmoid", "Tanh", "Tanh"))

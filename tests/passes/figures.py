"""Figures that proofs rest on, as they are: a bound that grows lets more pass, and one that shrinks is not proved.

That these bounds hold, and are not far above what is seen, is tested beside ball arithmetic. A change of any of their
terms, with intent or without, changes a figure: `python -m tests.passes.figures` writes `figures.json` anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from passes.certificates.certify import _bounds, _head, _one_tail, certify
from passes.certificates.changes import largest_change
from passes.certificates.curves import CURVES
from passes.certificates.intervals import largest
from passes.programs.activations import ACTIVATIONS
from passes.programs.arithmetic import ARITHMETIC
from passes.programs.fitted import bounded_programs, fitted_programs, gate_programs, lines, power_programs
from passes.programs.gates import limit_error, line
from passes.programs.head import BiasToken, Head
from passes.programs.line import Line
from passes.programs.powers import Powers
from passes.programs.program import Program
from passes.programs.softmax import Array, Keys
from tests.passes.programs.test_programs import PARAMETERS

Figures = Mapping[str, list[float]]

STORED = Path(__file__).with_name("figures.json")

Y = np.array([-9.0, -2.5, -0.3, 0.0, 0.7, 4.0, 30.0])
Z = np.array([0.5, -3.0, 0.0, 2.0, -0.1, 40.0, 1.0])
KEYS = Keys(np.array([3.0, -7.0, -1.0, 0.7, 2.0**70]), np.array([0.3, 9.0, 5.0, -0.2, -(2.0**71)]))
VALUES = np.stack([1.5 * Y, *(np.full_like(Y, value) for value in (2.0, -40.0, 11.0, 0.25))])
HEAD = Head(beta=1.0, bias_tokens=(BiasToken(0.0, 0.0, 0.5), BiasToken(-1.5, 0.2, -2.0)), c=2.0, d=0.25)
OTHER = Head(beta=-2.0, bias_tokens=(BiasToken(0.0, 1.0, 0.0), BiasToken(1.0, 0.0, -1.0)), c=1.0)


@cache
def gated(name: str, elem_type: int, *, quick: bool) -> Program:
    entry = next(entry for entry in ACTIVATIONS if entry.name == name)
    make = entry.quick_program_for if quick else entry.program_for
    made = make(PARAMETERS[name], ARITHMETIC[elem_type], gated=True)
    assert made is not None
    return made


def of_keys() -> Figures:
    parabola = {sign: replace(KEYS, alpha=sign * 0.3) for sign in (1, -1)}
    low, high = np.array([-5.0, -1.0, 1.9, 3.0]), np.array([-4.5, -0.5, 2.1, 8.0])
    least, most = KEYS.enclosed(low, high)
    return {
        "shifted": KEYS.rounding(Y, VALUES, shifted=True, steps=1).tolist(),
        "as it is": KEYS.rounding(Y, VALUES, shifted=False, steps=1).tolist(),
        "with further steps": KEYS.rounding(Y, VALUES, shifted=False, steps=100).tolist(),
        "a parabola": parabola[1].rounding(Y, VALUES, shifted=True, steps=2).tolist(),
        "a parabola downwards": parabola[-1].rounding(Y, VALUES, shifted=True, steps=2).tolist(),
        "far out": KEYS.rounding(np.array([1e200, -1e200]), VALUES[:, :2], shifted=False, steps=1).tolist(),
        "the logit of a parabola": parabola[1].logits(Y)[0].tolist(),
        "of a parabola downwards": parabola[-1].logits(Y)[0].tolist(),
        "crossings": KEYS.crossings.tolist(),
        "the least weights": least[:4].ravel().tolist(),
        "the largest weights": most[:4].ravel().tolist(),
    }


def of_lines() -> Figures:
    found: dict[str, list[float]] = {}
    for kind in ("single", "half", "double", "double pairs"):
        one = lines(kind)[0]
        found[f"{kind}: rounding"] = one.float64_rounding(Y).tolist()
        found[f"{kind}: far out"] = one.float64_rounding(np.array([-1e5, -700.0, 700.0, 1e5])).tolist()
        found[f"{kind}: ends"] = [one.lowest, one.largest, one.domain, float(len(one.keys))]
    small = Line("small", -0.5, 0.3, ((0.2, 0.1),), 0.4, 100.0, 1e-3)
    found["its keys"] = [number for key in small.keys for number in key]
    pairs = small.pairs_with(HEAD)
    found["pairs with a head"] = [number for pair in pairs for number in pair]
    found["heads of a gate"] = [
        number
        for head in small.heads(HEAD)
        for number in (head.beta, head.gamma, head.c, head.d, float(len(head.bias_tokens)))
    ]
    found["without a middle"] = replace(small, middle=0.0).float64_rounding(Y).tolist()
    return found


def of_powers() -> Figures:
    powers = Powers(0.7, (3.0, 2.0, -0.5), (4.0, 5.0, 0.5), 1, 1.0, 1.5)
    (_, program), *_ = power_programs()
    assert program.powers is not None
    return {
        "rounding": powers.float64_rounding(Y).tolist(),
        "of the table": program.powers.float64_rounding(Y).tolist(),
        "a negative factor": replace(powers, factor=-1.5).float64_rounding(Y).tolist(),
        "change": [powers.change(replace(powers, step=0.71)), powers.change(replace(powers, factor=1.6))],
        "heads": [number for head in powers.heads for number in (head.beta, head.gamma, head.c)],
    }


def of_programs() -> Figures:
    both = Program("both", (HEAD, OTHER), linear=0.75, constant=-3.0)
    shared = Head(beta=0.0, gamma=0.2, bias_tokens=(BiasToken(1.0, 0.0),), c=3.0)
    swapped = Head(beta=1.0, gamma=0.0, bias_tokens=(BiasToken(0.0, 0.2),), c=-2.0)
    (_, powers), *_ = power_programs()
    found = {
        "heads": both,
        "one head": replace(both, heads=(HEAD,)),
        "a multiple": Program("one", (shared,), linear=-1.0),
        "over the same keys": Program("two", (shared, swapped), linear=0.5),
        "powers": powers,
        "with a line": gated("silu", 1, quick=True),
        "with a line and powers": gated("gelu", 1, quick=True),
        "in pairs": gated("silu", 11, quick=False),
        "split": gated("mish", 1, quick=False),
    }
    return {
        **{name: program.float64_rounding(Y).tolist() for name, program in found.items()},
        **{f"{name}, times z": program.float64_rounding(Y, Z).tolist() for name, program in found.items()},
        "beyond the clip": found["split"].float64_rounding(np.array([1e140, -1e160])).tolist(),
        "rounded": [
            found[name].scaled(inner=1.1, outer=0.3).rounded(np.float32).coefficient_error
            for name in ("heads", "one head", "over the same keys", "powers")
        ],
    }


def of_gates() -> Figures:
    found: dict[str, list[float]] = {}
    for name in ("silu", "relu", "gelu", "mish", "relu6", "elu", "leaky_relu", "clip"):
        for elem_type in (1, 10, 11):
            quick = gated(name, elem_type, quick=True)
            assert quick.line is not None
            # In float64 errors are rounding, which depends on the processor's exponential.
            certain = elem_type != 11
            found[f"{name} {elem_type}, quick"] = [
                *(quick.max_error * certain, quick.rounding, quick.domain),
                *(quick.line.step, float(len(quick.line.keys))),
            ]
            if (name, elem_type) != ("gelu", 11):  # takes a second
                made = gated(name, elem_type, quick=False)
                found[f"{name} {elem_type}"] = [
                    *(made.max_error * certain, made.rounding, made.domain),
                    *(float(len(made.heads)), float(made.bias_tokens)),
                ]
    for elem_type in (1, 10, 11):
        made = line(-1.3, ARITHMETIC[elem_type], "line")
        found[f"line {elem_type}"] = [made.max_error * (elem_type != 11), made.rounding, made.domain]
    constants = replace(HEAD, c=0.0)
    found["limits"] = [
        limit_error(head, linear, 2.0**-10, domain, enough=1e-15)
        for head in (HEAD, constants, replace(HEAD, beta=0.0, d=0.0, bias_tokens=(BiasToken(1.0, 0.3),)))
        for linear in (0.0, -0.5)
        for domain in (3.0, 50.0)
    ]
    return found


NEURON = Head(0.7, (BiasToken(-1.0, 0.5, 2.0), BiasToken(0.25, -1.0, -3.0)), gamma=0.2, c=1.5, d=-0.25)
STEEP = Head(0.0, (BiasToken(2.0**40, -3.0 * 2.0**40, 6.0), BiasToken(-1.0, 0.5, 2.0)), c=1.0)
LEFT = Head(0.0, (BiasToken(-(2.0**40), -3.0 * 2.0**40, -6.0), BiasToken(1.0, 0.5, 2.0)), c=1.0)
ONE, TWO = Program("one", (NEURON,), linear=0.1, constant=0.3), Program("two", (NEURON, STEEP), constant=-1.0)


def of_certificates() -> Figures:
    found: dict[str, list[float]] = {}
    for activation, program in (*fitted_programs(), *bounded_programs(), *gate_programs()):
        if program.max_error > 1e-6:
            made = certify(program, activation, domain=program.domain)
            found[f"{activation} {program.name}"] = [made.bound, made.seen, float(made.cells), made.tail, made.reach]
    return found


def of_tails() -> Figures:
    curve = CURVES["gelu"]
    _, program = next(each for each in fitted_programs() if each[0] == "gelu")
    return {
        "left": [_one_tail(program, curve.left, -start) for start in (6.0, 8.0, 16.0)],
        "right": [_one_tail(program, curve.right, start) for start in (6.0, 8.0, 16.0)],
    }


def of_cells() -> Figures:
    low, high = np.array([-3.0, -0.5, 0.25, 2.0]), np.array([-2.75, 0.25, 0.5, 6.0])
    found: dict[str, list[float]] = {}
    for name in ("gelu", "softplus"):
        for program in (ONE, replace(ONE, heads=(replace(NEURON, c=0.0), NEURON), linear=-2.0)):
            upper, seen = _bounds(program, CURVES[name], low, high)
            found[f"{name} {program.linear}"] = [*upper.tolist(), *seen.tolist()]
    middle, radius = (low + high) / 2.0, (high - low) / 2.0
    for name, head in (("neuron", NEURON), ("without a line", replace(NEURON, c=0.0))):
        jet, third, rounding, rough = _head(head, middle, radius)
        found[name] = [number for each in (*jet, third, rounding, rough) for number in each.tolist()]
    return found


def of_changes() -> Figures:
    token, other = NEURON.bias_tokens
    steep, last = STEEP.bias_tokens
    changed = {
        "slope": replace(NEURON, bias_tokens=(replace(token, slope=-1.001), other)),
        "offset": replace(NEURON, bias_tokens=(token, replace(other, offset=-1.3))),
        "value": replace(NEURON, bias_tokens=(replace(token, value=2.5), other)),
        "the own key": replace(NEURON, beta=0.71, gamma=0.1),
        "the own value": replace(NEURON, c=1.4, d=0.0),
        "much": replace(NEURON, bias_tokens=(replace(token, offset=9.0), other)),
    }
    kinks = {
        "a kink": replace(STEEP, bias_tokens=(replace(steep, offset=-3.01 * 2.0**40), last)),
        "by little": replace(STEEP, bias_tokens=(replace(steep, offset=-(3.0 * 2.0**40) - 512.0), last)),
        "beside a kink": replace(STEEP, bias_tokens=(steep, replace(last, value=2.001))),
    }
    found = {
        **{name: (ONE, replace(ONE, heads=(head,))) for name, head in changed.items()},
        "the line": (ONE, replace(ONE, linear=0.1001)),
        "the constant": (ONE, replace(ONE, constant=0.31)),
        **{name: (TWO, replace(TWO, heads=(NEURON, head))) for name, head in kinks.items()},
        "a kink on the left": (TWO, replace(TWO, heads=(NEURON, LEFT))),
        "a kink on the left that moves": tuple(
            replace(TWO, heads=(replace(LEFT, bias_tokens=(replace(LEFT.bias_tokens[0], offset=at), last)),))
            for at in (-3.0 * 2.0**40, -3.01 * 2.0**40)
        ),
        "multiples": tuple(
            Program("m", (Head(0.0, (BiasToken(0.5, offset),), c=2.0),), domain=6.0) for offset in (0.0, 1e-3)
        ),
        "on a domain": tuple(replace(ONE, linear=linear, domain=0.3) for linear in (0.1, 0.101)),
    }
    return {name: [largest_change(*pair, enough=1e-14)] for name, pair in found.items()}


def of_intervals() -> Figures:
    def bounds(low: Array, high: Array) -> tuple[Array, Array]:
        return np.maximum(np.abs(low), np.abs(high)) ** 3, np.abs((low + high) / 2.0) ** 3

    edges = np.array([-2.0, 0.0, 1.0])
    return {
        f"{tight} {enough} {most}": [*map(float, largest(bounds, edges, tight=tight, enough=enough, most=most))]
        for tight, enough, most in ((1.01, 0.0, 10_000), (1.5, 0.0, 10_000), (1.01, 7.0, 10_000), (1.001, 0.0, 20))
    }


FIGURES: Mapping[str, Callable[[], Figures]] = {
    "keys": of_keys,
    "lines": of_lines,
    "powers": of_powers,
    "programs": of_programs,
    "gates": of_gates,
    "certificates": of_certificates,
    "tails": of_tails,
    "cells": of_cells,
    "changes": of_changes,
    "intervals": of_intervals,
}


def main() -> None:
    """Write all figures, a line each."""
    lines_of = {
        room: ",\n".join(
            f"    {json.dumps(name)}: {json.dumps([float(f'{x:.8g}') for x in numbers])}"
            for name, numbers in make().items()
        )
        for room, make in FIGURES.items()
    }
    STORED.write_text(
        "{\n" + ",\n".join(f"  {json.dumps(room)}: {{\n{text}\n  }}" for room, text in lines_of.items()) + "\n}\n"
    )


if __name__ == "__main__":
    main()

"""Control flow: If, Loop, Scan, and calls of local functions, given functions that run their bodies.

Source: the ONNX specifications, opset 1 to 25 (Scan from 9).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import helper

from rewriter.arrays import Array
from rewriter.proof.reference.scope import CALL, Node, Value
from rewriter.proof.reference.widen import NoReference
from rewriter.text import one_line

Body = Callable[[Sequence[Value]], list[Value]]
"""Runs a body: maps its inputs to its outputs."""


def _if(_: Node, bodies: Mapping[str, Body], operands: Sequence[Value]) -> list[Value]:
    return bodies["then_branch" if _holds(operands[0]) else "else_branch"]([])


def _loop(node: Node, bodies: Mapping[str, Body], operands: Sequence[Value]) -> list[Value]:
    # Trip count and condition are both optional: without a count the condition ends the loop, without a condition the
    # count does.
    limit, go, *states = [*operands, None, None][: max(len(operands), 2)]
    steps = itertools.count() if limit is None else range(int(np.asarray(limit).reshape(-1)[0]))
    go = np.asarray(True) if go is None else go
    slices: list[list[Array]] = []
    for step in steps:
        if not _holds(go):
            break
        go, *made = bodies["body"]([np.asarray(step, np.int64), go, *states])
        states, more = made[: len(states)], made[len(states) :]
        slices.append(more)
    return [*states, *(np.stack(column) for column in _columns(node, slices, len(states)))]


def _scan(node: Node, bodies: Mapping[str, Body], operands: Sequence[Value]) -> list[Value]:
    if node.opset < 9:
        raise NoReference(f"{one_line(node, 120)} is of opset 8")
    stated = {item.name: helper.get_attribute_value(item) for item in node.proto.attribute}
    count = int(stated["num_scan_inputs"])
    states, given = list(operands[: len(operands) - count]), operands[len(operands) - count :]
    backwards = stated.get("scan_input_directions") or [0] * count
    axes = stated.get("scan_input_axes") or [0] * count
    # One slice per iteration along each operand's own axis, from the end if its direction is 1.
    rows = [
        np.moveaxis(array, axis, 0)[:: -1 if b else 1] for array, axis, b in zip(given, axes, backwards, strict=True)
    ]
    slices: list[list[Array]] = []
    for row in zip(*rows, strict=True):
        made = bodies["body"]([*states, *row])
        states, more = made[: len(states)], made[len(states) :]
        slices.append(more)
    columns = _columns(node, slices, len(states))
    backwards = stated.get("scan_output_directions") or [0] * len(columns)
    axes = stated.get("scan_output_axes") or [0] * len(columns)
    return [*states, *(_stacked(column, axis, b) for column, axis, b in zip(columns, axes, backwards, strict=True))]


def _stacked(slices: Sequence[Array], axis: int, backwards: int) -> Array:
    return np.asarray(np.moveaxis(np.stack(slices)[:: -1 if backwards else 1], 0, axis))


def _columns(node: Node, slices: Sequence[Sequence[Array]], states: int) -> list[Sequence[Array]]:
    """The results of all iterations, output by output."""
    if not slices and len(node.proto.output) > states:
        raise NoReference(f"{one_line(node, 120)} runs no iteration, so the shape of what it collects is unknown")
    return list(zip(*slices, strict=True))


def _holds(condition: Any) -> bool:
    return bool(np.asarray(condition).reshape(-1)[0])


def _call(_: Node, bodies: Mapping[str, Body], operands: Sequence[Value]) -> list[Value]:
    return bodies[CALL](operands)


_CONTROL: Mapping[str, Callable[[Node, Mapping[str, Body], Sequence[Value]], list[Value]]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
}


def control_of(node: Node) -> Callable[[Mapping[str, Body], Sequence[Value]], list[Value]]:
    """The function that runs a node with bodies. Raises NoReference."""
    form = _call if CALL in node.bodies else _CONTROL.get(node.proto.op_type)
    if form is None:
        raise NoReference(f"{one_line(node, 120)} has a body that cannot be evaluated")
    return lambda bodies, operands: form(node, bodies, operands)

"""If, Loop and Scan: their bodies are evaluated as often as conditions and trip counts say, which must be known."""

from __future__ import annotations

import functools
import math
from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import Unsupported, Value
from rewriter.evaluate.moves import concatenated
from rewriter.evaluate.table import Call

CONTROL = {"If", "Loop", "Scan"}
_MAX_ITERATIONS = 10_000


def control(call: Call, operands: Sequence[Any], environment: MutableMapping[str, Any]) -> tuple[Any, ...]:
    """The outputs of a node that has bodies. Raises Unsupported where data decides what is evaluated."""
    return {"If": _if, "Loop": _loop, "Scan": _scan}[call.kind](call, list(operands), environment)


def _known(x: Any, what: str) -> Array:
    if isinstance(x, Value):
        raise Unsupported(f"data decides {what}")
    return np.asarray(x).reshape(())


def _if(call: Call, operands: list[Any], environment: MutableMapping[str, Any]) -> tuple[Any, ...]:
    branch = call.get("then_branch" if _known(operands[0], "a branch") else "else_branch")
    made = call.evaluator.body(branch, environment)
    _spread(call, branch)
    return tuple(made)


def _loop(call: Call, operands: list[Any], environment: MutableMapping[str, Any]) -> tuple[Any, ...]:
    limit, condition, *state = operands
    body: onnx.GraphProto = call.get("body")
    times = math.inf if limit is None else int(_known(limit, "how often a loop runs"))
    going = condition is None or bool(_known(condition, "whether a loop runs"))
    _mark(call, body.input[2:], call.node.input[2:])
    rounds: list[list[Any]] = []
    while going and len(rounds) < times:
        number, more = np.array(len(rounds), np.int64), np.array(going)
        going, state, row = _round(call, body, [number, more, *state], environment, len(state))
        _count(rounds, row)
    _spread(call, body, skipped=1)
    count = len(body.output) - 1 - len(state)
    return (*state, *_stacked(call, body, rounds, [0] * count, [0] * count))


def _round(
    call: Call, body: onnx.GraphProto, given: list[Any], environment: MutableMapping[str, Any], states: int
) -> tuple[bool, list[Any], list[Any]]:
    inner = environment | dict(zip((value.name for value in body.input), given, strict=True))
    going, *made = call.evaluator.body(body, inner)
    return bool(_known(going, "when a loop ends")), made[:states], made[states:]


def _scan(call: Call, operands: list[Any], environment: MutableMapping[str, Any]) -> tuple[Any, ...]:
    if call.opset < 9:
        raise Unsupported("a scan of operator set 8")
    body: onnx.GraphProto = call.get("body")
    scanned = call.get("num_scan_inputs")
    states = len(operands) - scanned
    state, inputs = operands[:states], operands[states:]
    axes, backward = (call.get(f"scan_input_{name}", [0] * scanned) for name in ("axes", "directions"))
    lengths = {each.shape[axis] for each, axis in zip(inputs, axes, strict=True)}
    if len(lengths) != 1:
        raise ValueError(f"scanned axes have {sorted(lengths)} entries")
    length = lengths.pop()
    _mark(call, body.input, call.node.input)
    rounds: list[list[Any]] = []
    for step in range(length):
        places = [length - 1 - step if each else step for each in backward]
        taken = [_taken(call, *each) for each in zip(inputs, places, axes, strict=True)]
        inner = environment | dict(zip((value.name for value in body.input), [*state, *taken], strict=True))
        made = call.evaluator.body(body, inner)
        state = made[:states]
        _count(rounds, made[states:])
    _spread(call, body)
    count = len(body.output) - states
    axes, backward = (call.get(f"scan_output_{name}", [0] * count) for name in ("axes", "directions"))
    return (*state, *_stacked(call, body, rounds, axes, backward))


def _taken(call: Call, x: Any, place: int, axis: int) -> Any:
    return call.move(x, lambda t: np.take(t, place, axis))


def _count(rounds: list[list[Any]], row: list[Any]) -> None:
    rounds.append(row)
    if len(rounds) > _MAX_ITERATIONS:
        raise Unsupported(f"more than {_MAX_ITERATIONS:,} iterations")


def _stacked(
    call: Call, body: onnx.GraphProto, rounds: list[list[Any]], axes: Sequence[int], backward: Sequence[int]
) -> list[Any]:
    """What the iterations yield, along a new axis."""
    made = []
    for place, (axis, turned) in enumerate(zip(axes, backward, strict=True)):
        slices = [row[place] for row in rounds]
        if not slices:
            made.append(_nothing(body.output[len(body.output) - len(axes) + place], axis))
            continue
        rank = slices[0].ndim + 1
        wide = [call.move(each, functools.partial(np.expand_dims, axis=axis % rank)) for each in slices]
        made.append(concatenated(call, wide[::-1] if turned else wide, axis % rank))
    return made


def _nothing(info: onnx.ValueInfoProto, axis: int) -> Array:
    """What no iteration yields."""
    kind = info.type.tensor_type
    dims = [each.dim_value if each.HasField("dim_value") else -1 for each in kind.shape.dim]
    if not kind.HasField("shape") or -1 in dims:
        raise Unsupported("a loop that never runs yields a tensor of unknown shape")
    dims.insert(axis % (len(dims) + 1), 0)
    return np.zeros(dims, helper.tensor_dtype_to_np_dtype(kind.elem_type))


# -- what depends on the values of integer inputs


def _mark(call: Call, formals: Sequence[onnx.ValueInfoProto], names: Sequence[str]) -> None:
    """Inputs of a body depend on the values of integer inputs like the operands."""
    decided = call.evaluator.decided
    decided |= {formal.name for formal, name in zip(formals, names, strict=False) if name in decided}


def _spread(call: Call, body: onnx.GraphProto, skipped: int = 0) -> None:
    """Outputs depend on the values of integer inputs like those of the body."""
    decided, inner = call.evaluator.decided, body.output[skipped:]
    decided |= {name for formal, name in zip(inner, call.node.output, strict=False) if formal.name in decided}

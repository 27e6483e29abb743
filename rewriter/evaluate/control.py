"""If and Loop: their bodies are evaluated as often as conditions and trip counts say, which must be known."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import Unsupported, Value
from rewriter.evaluate.moves import concatenated
from rewriter.evaluate.table import Call

CONTROL = {"If", "Loop"}
_MAX_ITERATIONS = 10_000


def control(call: Call, operands: Sequence[Any], environment: MutableMapping[str, Any]) -> tuple[Any, ...]:
    """The outputs of a node that has bodies. Raises Unsupported where data decides what is evaluated."""
    if call.kind == "Loop":
        return _loop(call, operands, environment)
    branch = call.get("then_branch" if _known(operands[0], "a branch") else "else_branch")
    made = call.evaluator.body(branch, environment)
    _spread(call, branch)
    return tuple(made)


def _known(x: Any, what: str) -> Array:
    if isinstance(x, Value):
        raise Unsupported(f"data decides {what}")
    return np.asarray(x).reshape(())


def _loop(call: Call, operands: Sequence[Any], environment: MutableMapping[str, Any]) -> tuple[Any, ...]:
    limit, condition, *state = operands
    body: onnx.GraphProto = call.get("body")
    times = math.inf if limit is None else int(_known(limit, "how often a loop runs"))
    going = condition is None or bool(_known(condition, "whether a loop runs"))
    decided, loop_carried = call.evaluator.decided, zip(body.input[2:], call.node.input[2:], strict=False)
    decided |= {formal.name for formal, name in loop_carried if name in decided}
    rounds: list[list[Any]] = []
    while going and len(rounds) < times:
        number, more = np.array(len(rounds), np.int64), np.array(going)
        given = dict(zip((value.name for value in body.input), (number, more, *state), strict=True))
        goes_on, *made = call.evaluator.body(body, ChainMap(given, environment))
        going, state, yielded = bool(_known(goes_on, "when a loop ends")), made[: len(state)], made[len(state) :]
        rounds.append(yielded)
        if len(rounds) > _MAX_ITERATIONS:
            raise Unsupported(f"more than {_MAX_ITERATIONS:,} iterations")
    _spread(call, body, skipped=1)
    infos = enumerate(body.output[1 + len(state) :])
    return (*state, *(_stacked(call, info, [each[place] for each in rounds]) for place, info in infos))


def _stacked(call: Call, info: onnx.ValueInfoProto, slices: Sequence[Any]) -> Any:
    """What the iterations yield, along a new first axis."""
    if slices:
        return concatenated(call, [call.move(each, lambda t: t[None]) for each in slices], 0)
    kind = info.type.tensor_type
    dims = [each.dim_value if each.HasField("dim_value") else -1 for each in kind.shape.dim]
    if not kind.HasField("shape") or -1 in dims:
        raise Unsupported("a loop that never runs yields a tensor of unknown shape")
    return np.zeros([0, *dims], helper.tensor_dtype_to_np_dtype(kind.elem_type))


def _spread(call: Call, body: onnx.GraphProto, skipped: int = 0) -> None:
    """Outputs depend on the values of integer inputs like those of the body."""
    decided, inner = call.evaluator.decided, body.output[skipped:]
    decided |= {name for formal, name in zip(inner, call.node.output, strict=False) if formal.name in decided}

"""Elementwise operators on float64, by the table of operators: small constants, and activation regions on a grid."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import Floats, Value
from rewriter.evaluate.moves import CASTS
from rewriter.evaluate.scalar import NONLINEAR
from rewriter.evaluate.table import ELEMENTWISE, MICROSOFT, Call, row, tuple_of
from rewriter.graph.view import attributes, key_of

__all__ = ["MICROSOFT", "NONLINEAR", "OPERATORS", "evaluate", "outputs"]

OPERATORS = frozenset(ELEMENTWISE)
_REALS: Any = SimpleNamespace(arithmetic=Floats(), opsets={"": onnx.defs.onnx_opset_version()})


def evaluate(node: onnx.NodeProto, args: Sequence[Array | None]) -> Array:
    """Apply an elementwise node to float64 inputs, in float64; truth values are 0 and 1. Raises KeyError for others."""
    if key_of(node) not in OPERATORS:
        raise KeyError(node.op_type)
    if node.op_type in CASTS:  # exact: the proof measures rounding
        return np.asarray(args[0], np.float64)
    made = outputs(node, [None if arg is None else Value(np.asarray(arg, np.float64)) for arg in args])[0]
    return np.asarray(made.entries if isinstance(made, Value) else made, np.float64)


def outputs(node: onnx.NodeProto, operands: Sequence[Any]) -> Sequence[Any]:
    """The outputs of a node on arrays, if it moves data, or on values. Raises KeyError for an unknown operator."""
    found = row(*key_of(node))
    if found is None:
        raise KeyError(node.op_type)
    with np.errstate(all="ignore"):
        return tuple_of(found(Call(node, node.op_type, attributes(node), _REALS), *operands))

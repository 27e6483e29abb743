"""Find the operator at which rounding decides what a model computes.

A float64 evaluation may be far from the model although all of its operators are right: somewhere rounding decides
something discrete, such as the bucket of a relative position. `decided_by_rounding` finds the first such operator. The
result is meaningless if `rewriter.proof.reference.audit` finds an operator that is computed wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.graph.types import FLOATS
from rewriter.graph.view import attributes
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.reference.engine import Values, Ways, float64_ways, needed, plain_ways, plan
from rewriter.proof.reference.operators.table import Operator
from rewriter.proof.reference.scope import Key, Node, Scope, read_model, twins
from rewriter.proof.reference.widen import widened

DISCONTINUOUS = frozenset(
    """
    ArgMax ArgMin Ceil DynamicQuantizeLinear Equal Floor Greater GreaterOrEqual Hardmax IsInf IsNaN Less LessOrEqual
    MaxRoiPool Mod NonMaxSuppression NonZero QuantizeLinear Round Shrink Sign ThresholdedRelu TopK Unique
    """.split()  # noqa: SIM905 - more readable
)
"""Operators whose result may change altogether when an operand changes by a rounding."""

_BY_MODE = {"Resize": b"nearest", "Upsample": b"nearest", "GridSample": b"linear"}
"""Operators that are discontinuous in mode nearest, and their default mode."""

_WHOLE = frozenset({"Ceil", "Floor", "Hardmax", "Round", "Sign"})
"""Discontinuous operators whose float results are whole numbers."""


def discontinuous(node: Node) -> bool:
    """Whether a rounding of its operands may decide the result of an operator."""
    kind, stated = node.proto.op_type, attributes(node.proto)
    if kind in _BY_MODE:
        return bool(stated.get("mode", _BY_MODE[kind]) == b"nearest")
    return kind in DISCONTINUOUS or kind == "CastLike" or (kind == "Cast" and stated.get("to") not in FLOATS)


def decided_by_rounding(
    model: onnx.ModelProto,
    base_dir: Path | None,
    feeds: Mapping[str, Array],
    own: Mapping[Key, Operator] | None = None,
) -> str | None:
    """Find the first discontinuous operator whose result in float64 differs from that in the model's own run.

    Booleans, integers and whole numbers are compared; in loops, iteration by iteration.

    Args:
        model: the model.
        base_dir: directory of its external data.
        feeds: inputs to run it on.
        own: the caller's operators, as in `rewriter.proof.reference.float64.open_reference`.

    Returns:
        The operator's name in messages, or None.

    Raises:
        NoReference: the model has no float64 evaluation.
        ValidationError: onnxruntime cannot run it.
    """
    plain, wide = (read_model(model, base_dir, wide=wide, held=False) for wide in (False, True))
    pairs = twins(plain, wide)
    ours = _decisions(plain, plain_ways(own or {}, keep=discontinuous), feeds)
    truth = _decisions(wide, float64_ways(own or {}, keep=discontinuous), {k: widened(v) for k, v in feeds.items()})
    for (node, made), (twin, exact) in zip_longest(ours, truth, fillvalue=(None, ())):
        if node is None:
            return str(twin)
        # A different operator comes next if the runs took different branches or numbers of iterations.
        if pairs[node] is not twin or any(map(_differ, made, exact)):
            return str(node)
    return None


def _decisions(scope: Scope, ways: Ways, feeds: Mapping[str, Array]) -> list[tuple[Node | None, list[Array]]]:
    """The discontinuous operators in the order in which they ran, each with its discrete results."""
    found: list[tuple[Node | None, list[Array]]] = []

    def watch(node: Node, values: Values) -> None:
        if discontinuous(node):
            made = [np.asarray(values[name]) for name in node.gives]
            whole = node.proto.op_type in _WHOLE
            found.append((node, [array for array in made if whole or not is_float(array.dtype)]))

    # Nothing has to be computed that no such operator depends on, which in most networks is nearly everything.
    decide = tuple(name for node in needed(scope) if _decides(node) for name in node.gives)
    plan(replace(scope, outputs=decide), ways).run(feeds, {}, watch)
    return found


def _decides(node: Node) -> bool:
    """Whether a node is a discontinuous operator or has one in its bodies."""
    return discontinuous(node) or any(_decides(inner) for body in node.bodies.values() for inner in body.nodes)


def _differ(made: Array, exact: Array) -> bool:
    if is_float(made.dtype):
        made, exact = np.rint(made.astype(np.float64)), np.rint(exact)
    return not np.array_equal(made, exact, equal_nan=made.dtype.kind == "f")

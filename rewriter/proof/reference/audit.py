"""Check the truth itself: compare each operator of the float64 evaluation with the model's own.

The model is run in its own precision by onnxruntime, without optimisation, a few operators at a time. Each operator is
then computed in float64 on the operands of that run, so that errors do not accumulate, and may differ from the run's
result by rounding alone (`rewriter.proof.reference.tolerance`). The first operator that differs by more is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.reference.decisions import discontinuous
from rewriter.proof.reference.engine import Program, Values, Ways, float64_ways, plain_ways, plan
from rewriter.proof.reference.operators.table import Operator
from rewriter.proof.reference.scope import Key, Node, Scope, Value, read_model, twins
from rewriter.proof.reference.tolerance import Operands, Trial, allowances
from rewriter.proof.reference.widen import widened
from rewriter.text import one_line

_TOGETHER = 16
"""Number of operators that run at a time; all of their outputs are in memory together."""

_REPEATS = 3
"""How often an operator in a loop is compared: there may be thousands of iterations."""


@dataclass(frozen=True)
class Disagreement:
    """An operator whose float64 evaluation differs from the model's result.

    Attributes:
        node: its name in messages.
        op_type: its operator.
        output: the output that differs.
        error: the distance where it exceeds the allowance most; infinite for another shape, NaN, or infinities.
        allowed: the allowance there.
        discontinuous: whether rounding may decide the result of such an operator.
    """

    node: str
    op_type: str
    output: str
    error: float
    allowed: float
    discontinuous: bool


class _FoundError(Exception):
    """Ends the run at the first finding."""

    def __init__(self, found: Disagreement) -> None:
        super().__init__()
        self.found = found


def audit(
    model: onnx.ModelProto,
    base_dir: Path | None,
    feeds: Mapping[str, Array],
    own: Mapping[Key, Operator] | None = None,
) -> Disagreement | None:
    """Find the first operator whose float64 evaluation differs from the model's result by more than rounding.

    Args:
        model: the model.
        base_dir: directory of its external data.
        feeds: inputs to run it on.
        own: the caller's operators, as in `rewriter.proof.reference.float64.open_reference`; they are not compared.

    Raises:
        NoReference: the model has no float64 evaluation.
        ValidationError: onnxruntime cannot run it.
    """
    plain, wide = (read_model(model, base_dir, wide=wide, held=False) for wide in (False, True))
    auditor = _Auditor(twins(plain, wide), plain_ways(own or {}), float64_ways(own or {}), frozenset(own or ()))
    # Every output is kept, so that each operator's operands and results can be seen after the part ran.
    ways = plain_ways(own or {}, keep=lambda _: True, longest=_TOGETHER)
    try:
        plan(plain, ways).run(feeds, {}, auditor.look)
    except _FoundError as end:
        return end.found
    return None


def in_pieces(model: onnx.ModelProto, base_dir: Path | None, feeds: Mapping[str, Array]) -> dict[str, Any]:
    """The outputs of a model in its own precision, computed operator by operator.

    Raises:
        NoReference: an operator has no float64 form either.
        ValidationError: onnxruntime cannot run an operator.
    """
    return plan(read_model(model, base_dir, wide=False, held=False), plain_ways({}, longest=1)).run(feeds, {})


@dataclass(frozen=True, eq=False)
class _Auditor:
    """Compares operators as they run."""

    pairs: Mapping[Node, Node]
    plain: Ways
    wide: Ways
    own: frozenset[Key]
    seen: Counter[Node] = field(default_factory=Counter)
    programs: dict[Node, Program] = field(default_factory=dict)

    def look(self, node: Node, values: Values) -> None:
        """Compare one operator. Raises _FoundError."""
        self.seen[node] += 1
        if node.key in self.own or self.seen[node] > _REPEATS:
            return
        # Those of other operators would take a gigabyte in a model of 400 MB: what lives on between float64 copies of
        # weights keeps their memory from going back to the system.
        self.programs.clear()
        operands = {name: values[name] for name in node.reads}
        made = [values[name] for name in node.gives]
        twin = self.pairs[node]
        truths = self.exact(twin, operands)
        trial = Trial(twin, operands, truths, self.exact, lambda changed: self.computed(node, changed, self.plain))
        with np.errstate(all="ignore"):
            excess = next(_excesses(node.gives, made, trial), None)
        if excess is not None:
            raise _FoundError(Disagreement(one_line(node, 120), node.proto.op_type, *excess, discontinuous(node)))

    def exact(self, node: Node, operands: Operands) -> list[Value]:
        """The outputs of an operator in float64."""
        return self.computed(node, {name: _wide(value) for name, value in operands.items()}, self.wide)

    def computed(self, node: Node, operands: Operands, ways: Ways) -> list[Value]:
        """The outputs of an operator."""
        if node not in self.programs:
            self.programs[node] = plan(Scope((), node.gives, {}, (node,)), ways)
        made = self.programs[node].run({}, operands)
        return [made[name] for name in node.gives]


def _wide(value: Value) -> Value:
    return [_wide(each) for each in value] if isinstance(value, list) else None if value is None else widened(value)


def _excesses(names: Sequence[str], made: Sequence[Value], trial: Trial) -> Iterator[tuple[str, float, float]]:
    """The outputs that differ by more than rounding, each with error and allowance."""
    kinds = [ml_dtypes.finfo(each.dtype) for value in made for each in _arrays(value) if is_float(each.dtype)]
    eps = max((float(kind.eps) for kind in kinds), default=0.0)
    # Most operators move data or agree exactly; only the others pay for the extra evaluations of the allowance.
    if all(map(_equal, made, trial.truths)):
        return
    for name, value, truth, allowed in zip(names, made, trial.truths, allowances(trial, eps), strict=True):
        if len(_arrays(value)) != len(_arrays(truth)):
            yield name, np.inf, 0.0
        for got, exact in zip(_arrays(value), _arrays(truth), strict=False):
            error, limit = _worst(got, exact, allowed, overflows=_may_overflow(trial.operands, got.dtype))
            if not error <= limit:
                yield name, error, limit


def _arrays(value: Value) -> list[Array]:
    return [np.asarray(each) for each in value] if isinstance(value, list) else [np.asarray(value)]


def _equal(made: Value, truth: Value) -> bool:
    pairs = zip(_arrays(made), _arrays(truth), strict=False)
    return len(_arrays(made)) == len(_arrays(truth)) and all(
        a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b)))) for a, b in pairs
    )


def _worst(made: Array, truth: Array, allowed: Array, *, overflows: bool) -> tuple[float, float]:
    """Error and allowance at the entry where the error exceeds its allowance most."""
    if made.shape != truth.shape or is_float(made.dtype) != is_float(truth.dtype):
        return np.inf, 0.0
    if not is_float(made.dtype):
        return (0.0 if np.array_equal(made, truth) else np.inf), 0.0
    wide, rounded = made.astype(np.float64), truth.astype(made.dtype).astype(np.float64)
    # Overflow is a matter of the type: float64 stays finite where the model's type does not.
    same = (wide == rounded) | (np.isnan(wide) & np.isnan(truth)) | (overflows & ~np.isfinite(wide))
    errors = np.where(same, 0.0, np.nan_to_num(np.abs(wide - truth), nan=np.inf, posinf=np.inf))
    # Below the smallest normal number, results may be flushed to zero.
    limits = np.where(np.isfinite(truth), allowed + float(ml_dtypes.finfo(made.dtype).tiny), 0.0)
    if not errors.size:
        return 0.0, 0.0
    place = np.argmax(np.where(np.isinf(errors), np.inf, errors - limits))
    return float(errors.flat[place]), float(limits.flat[place])


def _may_overflow(operands: Operands, dtype: np.dtype[Any]) -> bool:
    """Whether squares of operands exceed the range of the element type, so that infinities are not a disagreement."""
    if not is_float(dtype):
        return False
    bound = float(ml_dtypes.finfo(dtype).max) ** 0.5
    floats = [
        each for value in operands.values() if value is not None for each in _arrays(value) if is_float(each.dtype)
    ]
    return any(not bool(np.all(np.abs(each.astype(np.float64)) < bound)) for each in floats)

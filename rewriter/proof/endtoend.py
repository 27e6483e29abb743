"""Proof end to end: the whole rewritten model against the whole original, on one execution provider.

Comes in: both models, cases, and float64 evaluations of both. Goes out: `ProviderProof`. With e(model) the largest
distance from the float64 evaluation of the original,

    e(rewritten) <= 4 max(e(original), eps max|output|) + c,

where c is what the certified program errors amount to at that output: the distance of a float64 evaluation of the
*rewritten* model from that of the original. It scales with the model, and tells rounding from bugs. Where there is no
float64 evaluation the original stands in for it, and the distance may be the share of max|output| that `_ALLOWANCES`
gives for the coarsest arithmetic in the model, or four times what the original's own optimisation changes, whichever is
more, plus ten times the certified errors. The blocks' own proofs are not loosened by that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx

from rewriter.files.walk import iter_nodes
from rewriter.proof.cases import Case
from rewriter.proof.claims import Side
from rewriter.proof.compare import OutputStats, compare, merge
from rewriter.proof.distance import FACTOR, Array, gap, largest, magnitude, ratio, setting
from rewriter.proof.roles import is_float
from rewriter.proof.sessions import Session, open_session

_ALLOWANCES = {
    onnx.TensorProto.DOUBLE: 256 * 2.0**-52,
    onnx.TensorProto.FLOAT: 256 * 2.0**-23,
    onnx.TensorProto.FLOAT16: 8 * 2.0**-10,
    onnx.TensorProto.BFLOAT16: 8 * 2.0**-7,
}
_QUANTISED_ALLOWANCE = 4 * 2.0**-8
"""Activations quantised to 8 bits: a difference in the last place may move a value by a step."""

_QUANTISERS = {"QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm"}
_CARRY = 10.0

Results = Sequence[Mapping[str, Array]]


@dataclass(frozen=True)
class Truth:
    """Float64 evaluations of both models, case by case."""

    original: Results
    rewritten: Results


@dataclass(frozen=True)
class ProviderProof:
    """What was measured on one execution provider.

    Attributes:
        outputs: output name to statistics of rewritten against original, both optimised, over all cases.
        error_ratio: largest error against float64, rewritten over original, worst over outputs and optimisation
            levels; None where there is no float64 evaluation.
        load_seconds: how long onnxruntime took to load original and rewritten, optimised.
        cpu_nodes: new nodes that fell back to the CPU.
        failures: what did not hold.
    """

    outputs: Mapping[str, OutputStats]
    error_ratio: float | None
    load_seconds: tuple[float, float]
    cpu_nodes: tuple[str, ...]
    failures: tuple[str, ...]


@dataclass(frozen=True)
class _Pair:
    """The results of both models in one setting."""

    old: Results
    new: Results
    where: str


def prove_end_to_end(
    original: Side, rewritten: Side, cases: Sequence[Case], truth: Truth | None, certified: float, provider: str
) -> ProviderProof:
    """Run both models without and with graph optimisation, and apply the pass rule to every output.

    Args:
        original: the original model.
        rewritten: the rewritten model.
        cases: inputs that the original accepts.
        truth: float64 evaluations, None where there is none.
        certified: the certified errors of all blocks, added up; used only without truth.
        provider: execution provider.
    """
    failures: list[str] = []
    ratios: list[float] = []
    coarse = coarsest_allowance(original.model.proto)
    pairs: list[_Pair] = []
    for optimise in (False, True):
        old, new = (_open(side, provider, optimise=optimise) for side in (original, rewritten))
        runs = [[session.run(case.feeds) for case in cases] for session in (old, new)]
        pairs.append(_Pair(runs[0], runs[1], setting(provider, optimise=optimise)))
    for pair in pairs:
        for name in pair.old[0]:
            failures += _disparities(name, pair)
            if is_float(pair.old[0][name].dtype):
                found, failure = _three_way(name, pair, pairs[0], truth, (coarse, _CARRY * certified))
                ratios += [] if found is None else [found]
                failures += [] if failure is None else [failure]
    stats = {
        name: merge([compare(name, b[name], a[name]) for b, a in zip(pairs[-1].old, pairs[-1].new, strict=True)])
        for name in old.outputs
    }
    fallen = tuple(name for name in new.cpu_nodes or () if "/heads/" in name)
    loads = (old.load_seconds, new.load_seconds)
    return ProviderProof(stats, max(ratios, default=None), loads, fallen, tuple(failures))


def coarsest_allowance(model: onnx.ModelProto) -> float:
    """The allowance of the coarsest arithmetic in the model: its weights' types, its casts, its quantisers."""
    types = {tensor.data_type for tensor in model.graph.initializer}
    types |= {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    found = [_ALLOWANCES[onnx.TensorProto.FLOAT]]
    for node in iter_nodes(model.graph.node):
        types.update(attribute.i for attribute in node.attribute if node.op_type == "Cast" and attribute.name == "to")
        if node.op_type in _QUANTISERS:
            found.append(_QUANTISED_ALLOWANCE)
    return max(found + [_ALLOWANCES[kind] for kind in types if kind in _ALLOWANCES])


def _open(side: Side, provider: str, *, optimise: bool) -> Session:
    model = side.model
    if model.path is not None:
        return open_session(model.path, provider, optimise=optimise)
    return open_session(model.proto, provider, optimise=optimise, base_dir=model.base_dir)


def _disparities(name: str, pair: _Pair) -> list[str]:
    """What no tolerance forgives: shapes, types, NaN, infinities, and integers that differ."""
    found: dict[str, None] = {}
    for old, new in zip(pair.old, pair.new, strict=True):
        stats = compare(name, old[name], new[name])
        if not (stats.same_shape and stats.same_dtype):
            found[f"output {name}: shape or element type differs on {pair.where}"] = None
        elif not (stats.nan_parity and stats.inf_parity):
            found[f"output {name}: NaN or infinite at other places than the original on {pair.where}"] = None
        elif not is_float(old[name].dtype) and stats.max_abs > 0.0:
            found[f"output {name}: its values are no floats and differ on {pair.where}"] = None
    return list(found)


def _three_way(
    name: str, pair: _Pair, plain: _Pair, truth: Truth | None, untrue: tuple[float, float]
) -> tuple[float | None, str | None]:
    """The ratio of errors of one output, and what is wrong with it.

    `untrue` is what is allowed without truth: a share of the largest output, and an absolute error.
    """
    right = [case[name] for case in (pair.old if truth is None else truth.original)]
    old, new = (_distance([case[name] for case in results], right) for results in (pair.old, pair.new))
    floor = float(ml_dtypes.finfo(pair.old[0][name].dtype).eps) * max(magnitude(value) for value in right)
    if truth is not None:
        allowed = FACTOR * max(old, floor) + _distance([case[name] for case in truth.rewritten], right)
    else:
        noise = _distance([case[name] for case in plain.old], right)
        largest_output = max(magnitude(value) for value in right)
        allowed = max(untrue[0] * largest_output, FACTOR * noise) + untrue[1]
    failure = None
    if not new <= allowed:
        failure = f"output {name}: off by {new:.3g} on {pair.where}, allowed are {allowed:.3g}"
    return (None if truth is None else ratio(new, old, 0.5 * floor)), failure


def _distance(values: Sequence[Array], truth: Sequence[Array]) -> float:
    """Largest distance over the cases; a wrong shape is infinitely far."""
    pairs = zip(values, truth, strict=True)
    return max(largest(gap(v, t)) if v.shape == t.shape else float(np.inf) for v, t in pairs)

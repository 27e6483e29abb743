"""Proof end to end: the whole rewritten model against the whole original, on one execution provider.

Comes in: the runs of both models, and float64 evaluations of both. Goes out: `ProviderProof`. With e(model) the largest
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
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx

from rewriter.files.walk import iter_nodes
from rewriter.proof.compare import OutputStats, against_truth, compare, merge
from rewriter.proof.distance import FACTOR, Array, gap, largest, magnitude, ratio
from rewriter.proof.providers import parse_provider
from rewriter.proof.roles import is_float
from rewriter.proof.runs import ModelRuns, Ran, Results, Way
from rewriter.proof.verdicts import believable

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

CPU = Way("cpu", optimise=True)
"""What another provider is compared with, as a control."""


@dataclass(frozen=True)
class Truth:
    """Float64 evaluations, case by case: of both models, and of the original with the new weights if some are others.

    What certified errors amount to is the distance of the rewritten model from the last one: a wrong weight must not
    pass for a certified error.
    """

    original: Results
    rewritten: Results
    reweighted: Results | None = None

    def carried(self, name: str) -> float:
        """What the certified errors amount to at an output."""
        certain = self.original if self.reweighted is None else self.reweighted
        return _distance([case[name] for case in self.rewritten], [case[name] for case in certain])


@dataclass(frozen=True)
class ProviderProof:
    """What was measured on one execution provider.

    Attributes:
        outputs: output name to statistics of rewritten against original, both optimised, over all cases.
        error_ratio: largest error against float64, rewritten over original, worst over outputs and optimisation
            levels; None where there is no float64 evaluation.
        load_seconds: how long onnxruntime took to load original and rewritten, optimised.
        cpu_nodes: nodes that fell back to the CPU, where the original has no such node.
        failures: what did not hold.
        distrusted: outputs for which float64 computes something else than rounding could explain, so that the original
            was the measure: somewhere a rounding decides (buckets of relative positions).
        cpu_nodes_of_original: how many nodes of the original fell back to the CPU; None where onnxruntime cannot say.
        control: on another provider than the CPU, the noise between the two: statistics of the *original* there against
            the original on the CPU, both optimised.
    """

    outputs: Mapping[str, OutputStats]
    error_ratio: float | None
    load_seconds: tuple[float, float]
    cpu_nodes: tuple[str, ...]
    failures: tuple[str, ...]
    cpu_nodes_of_original: int | None = 0
    control: Mapping[str, OutputStats] = field(default_factory=dict)
    distrusted: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Pair:
    """The results of both models in one setting."""

    old: Results
    new: Results
    where: str


def judge_end_to_end(
    original: onnx.ModelProto,
    runs: tuple[ModelRuns, ModelRuns],
    reweighted: Results | None,
    certified: float,
    provider: str,
) -> ProviderProof:
    """Apply the pass rule to every output, without and with graph optimisation.

    Args:
        original: the original model.
        runs: its runs, on the provider in both ways, and on the CPU, optimised, too; those of the rewritten model, on
            the same cases.
        reweighted: float64 evaluation of the original with the rewritten model's weights, where these are others.
        certified: the certified errors of all blocks, added up; used only without truth.
        provider: execution provider.
    """
    old, new = runs
    failures: list[str] = []
    ratios: list[float] = []
    coarse = coarsest_allowance(original)
    truth = None if old.truth is None or new.truth is None else Truth(old.truth, new.truth, reweighted)
    ways = [Way(provider, optimise) for optimise in (False, True)]
    pairs = [_Pair(old.ways[way].results, new.ways[way].results, str(way)) for way in ways]
    for pair in pairs:
        for name in pair.old[0]:
            failures += _disparities(name, pair)
            if is_float(pair.old[0][name].dtype):
                found, failure = _three_way(name, pair, pairs[0], truth, (coarse, _CARRY * certified))
                ratios += [] if found is None else [found]
                failures += [] if failure is None else [failure]
    before, after = old.ways[ways[-1]], new.ways[ways[-1]]
    fallen, there = _fallen(before, after)
    stats = _statistics(pairs[-1].old, pairs[-1].new)
    if truth is not None:
        stats = {name: against_truth(found, *_three(name, pairs[-1], truth)) for name, found in stats.items()}
    return ProviderProof(
        outputs=stats,
        error_ratio=max(ratios, default=None),
        load_seconds=(before.load_seconds, after.load_seconds),
        cpu_nodes=fallen,
        failures=tuple(failures),
        cpu_nodes_of_original=there,
        control={} if parse_provider(provider).name == "cpu" else _statistics(old.ways[CPU].results, before.results),
        distrusted=() if truth is None else _distrusted(pairs[0], truth, coarse),
    )


def _distrusted(plain: _Pair, truth: Truth, coarse: float) -> tuple[str, ...]:
    floats = [name for name, value in plain.old[0].items() if is_float(value.dtype)]
    return tuple(name for name in floats if not _believed(name, plain, truth, coarse))


def _statistics(old: Results, new: Results) -> dict[str, OutputStats]:
    return {name: merge([compare(name, b[name], a[name]) for b, a in zip(old, new, strict=True)]) for name in old[0]}


def _fallen(before: Ran, after: Ran) -> tuple[tuple[str, ...], int | None]:
    """The nodes of the rewritten model on the CPU that the original has not there, and how many it has there."""
    if before.cpu_nodes is None or after.cpu_nodes is None:
        return (), None
    there = set(before.cpu_nodes)
    return tuple(node for node in after.cpu_nodes if node not in there), len(before.cpu_nodes)


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

    `untrue` is what is allowed without truth: a share of the largest output, and an absolute error. Where float64
    computes something else (`_believed`), the ratio is still told, but the original stands in to judge by.
    """
    told = None
    if truth is not None and not _believed(name, plain, truth, untrue[0]):
        told, _ = _judged(name, pair, plain, truth, untrue)
        truth = None
    found, failure = _judged(name, pair, plain, truth, untrue)
    return (told if found is None else found), failure


def _believed(name: str, plain: _Pair, truth: Truth, coarse: float) -> bool:
    """Whether the float64 evaluation is of the same function: the original, not optimised, is off by rounding only."""
    right = [case[name] for case in truth.original]
    off = _distance([case[name] for case in plain.old], right)
    return believable(off, max(magnitude(value) for value in right), coarse)


def _judged(
    name: str, pair: _Pair, plain: _Pair, truth: Truth | None, untrue: tuple[float, float]
) -> tuple[float | None, str | None]:
    right = [case[name] for case in (pair.old if truth is None else truth.original)]
    old, new = (_distance([case[name] for case in results], right) for results in (pair.old, pair.new))
    floor = float(ml_dtypes.finfo(pair.old[0][name].dtype).eps) * max(magnitude(value) for value in right)
    if truth is not None:
        allowed = FACTOR * max(old, floor) + truth.carried(name)
    else:
        noise = _distance([case[name] for case in plain.old], right)
        largest_output = max(magnitude(value) for value in right)
        allowed = max(untrue[0] * largest_output, FACTOR * noise) + untrue[1]
    failure = None
    if not new <= allowed:
        failure = f"output {name}: off by {new:.3g} on {pair.where}, allowed are {allowed:.3g}"
    return (None if truth is None else ratio(new, old, 0.5 * floor)), failure


def _three(name: str, pair: _Pair, truth: Truth) -> tuple[list[Array], list[Array], list[Array]]:
    """One output of the original, of the rewritten model and in float64, case by case."""
    old, new, right = ([case[name] for case in results] for results in (pair.old, pair.new, truth.original))
    return old, new, right


def _distance(values: Sequence[Array], truth: Sequence[Array]) -> float:
    """Largest distance over the cases; a wrong shape is infinitely far."""
    pairs = zip(values, truth, strict=True)
    return max(largest(gap(v, t)) if v.shape == t.shape else float(np.inf) for v, t in pairs)

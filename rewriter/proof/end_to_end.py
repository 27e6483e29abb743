"""Proof end to end: the whole rewritten model against the whole original, on one execution provider.

Three float64 evaluations decide: of the original (the truth), of the original with the plan's numbers as activations
(`rewriter.proof.planned`), and of the rewritten model. Per output and channel:

1. the rewritten model is the planned one up to rounding: in float64 to float64's rounding, on the provider by the pass
   rule (`rewriter.proof.pass_rule`), without and with onnxruntime's optimisation;
2. the planned model is close to the original: what certified errors amount to is measured there, printed and capped;
3. what else should be the original, such as its lowered form, is it up to rounding.

Where there is no float64 evaluation, or none that is a measure (`rewriter.proof.diagnosis.doubt`), the original stands
in for it: the rewritten model may be four times as far away as rounding moves the original by itself
(`rewriter.proof.sensitivity`). The blocks' own proofs are not loosened by that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import ml_dtypes
import numpy as np
import onnx

from rewriter.files.load import LoadedModel
from rewriter.files.walk import iter_nodes
from rewriter.ort.providers import parse_provider
from rewriter.proof.claims import Claim
from rewriter.proof.diagnosis.doubt import Doubt
from rewriter.proof.distance import Array, ratio
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.judging import believed
from rewriter.proof.pass_rule import CAP, FACTOR, Channels, Wide, exact_rounding, worst
from rewriter.proof.run.whole import ModelRuns, Ran, Results, Way
from rewriter.proof.sensitivity import Sensitivity, rounding, sensitivity
from rewriter.proof.settings import LARGE
from rewriter.proof.statistics import OutputStats, against_truth, compare, merge, uncompared

_ALLOWANCES = {
    onnx.TensorProto.DOUBLE: 256 * 2.0**-52,
    onnx.TensorProto.FLOAT: 256 * 2.0**-23,
    onnx.TensorProto.FLOAT16: 8 * 2.0**-10,
    onnx.TensorProto.BFLOAT16: 8 * 2.0**-7,
}
_QUANTISED_ALLOWANCE = 4 * 2.0**-8
"""Activations quantised to 8 bits: a difference in the last place may move a value by a step."""

_QUANTISERS = {"QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm"}
_SUSPICIOUS = 64.0
"""An original this many times the spacing of floats away from float64 is worth a look at every operator."""

CPU = Way("cpu", optimise=True)
"""What another provider is compared with, as a control."""


@dataclass(frozen=True)
class Allowance:
    """One output against float64, where the rewritten model is worst off; all in output units.

    Attributes:
        original: largest error of the original.
        rewritten: largest error of the rewritten model.
        allowed: what that may be: rounding, and what certified errors amount to.
        certified: what certified errors of the head programs amount to at this output.
        scale: largest |value| of the output.
    """

    original: float
    rewritten: float
    allowed: float
    certified: float
    scale: float


@dataclass(frozen=True)
class ProviderProof:
    """What was measured on one execution provider.

    Attributes:
        outputs: by output name, rewritten against original, both optimised, over all cases.
        error_ratio: largest error against float64, rewritten over original, worst over outputs and optimisation
            levels; None where there is no float64 evaluation.
        load_seconds: how long onnxruntime took to load original and rewritten, optimised.
        cpu_nodes: nodes that fell back to the CPU, where the original has no such node.
        failures: what did not hold.
        distrusted: outputs for which float64 computes something else than rounding could explain, so that the original
            was the measure.
        doubt: why float64 is not the measure of those, with the operator; empty where no output gave reason to ask.
        stand_in: where the original was the measure, by output, how far rounding moves it by itself; as a share of its
            channel's scale.
        allowances: by output, its errors against float64 and what they may be; worst of both optimisation levels.
            Without the outputs that float64 is no measure of.
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
    doubt: str = ""
    stand_in: Mapping[str, float] = field(default_factory=dict)
    allowances: Mapping[str, Allowance] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Evaluations:
    """The runs of both models, and float64 evaluations, on the same cases.

    Attributes:
        before: the original; its truth is the truth.
        after: the rewritten model.
        planned: the original with the plan's numbers as activations, in float64; None without a truth.
        shaken: the same, every activation off by its float64 rounding; None where that is not worth knowing.
        lowered: the original with fused operators taken apart, in float64; None where none were.
        merged: the original with fewer neurons, in float64; None where none were merged.
    """

    before: ModelRuns
    after: ModelRuns
    planned: Results | None = None
    shaken: Results | None = None
    lowered: Results | None = None
    merged: Results | None = None


@dataclass(frozen=True, eq=False)
class _Truth:
    """One output in float64, case by case."""

    channels: Channels
    right: Sequence[Array]
    planned: Sequence[Array]
    rebuilt: Sequence[Array]
    granted: Wide
    carried: Wide


@dataclass(eq=False)
class _Aside:
    """The original by itself, looked at only where an output asks for it."""

    original: LoadedModel
    runs: Evaluations
    claims: Sequence[Claim]
    provider: str
    why: Callable[[], Doubt]
    asked: bool = False

    @cached_property
    def doubt(self) -> Doubt:
        """Why it is far from its float64 evaluation."""
        self.asked = True
        return self.why()

    @cached_property
    def sensitivity(self) -> Sensitivity | None:
        """How far rounding moves its outputs; None where the model is too large to be run with noise."""
        if self.original.size > LARGE:
            return None
        plain = self.runs.before.ways[Way(self.provider, optimise=False)].results
        known = {name for node in self.original.proto.graph.node for name in node.output}
        claims = [claim for claim in self.claims if not claim.path and {claim.gate, claim.output} <= known]
        return sensitivity(self.original, self.runs.before.cases, plain, self.provider, claims=claims)


def judge_end_to_end(
    original: LoadedModel, runs: Evaluations, claims: Sequence[Claim], provider: str, why: Callable[[], Doubt]
) -> ProviderProof:
    """Apply the pass rule to every output, without and with graph optimisation.

    Args:
        original: the original model.
        runs: its runs, on the provider in both ways, and on the CPU, optimised, too; those of the rewritten model.
        claims: all that was replaced.
        provider: execution provider.
        why: finds out why the original is far from its float64 evaluation.
    """
    before, after = runs.before, runs.after
    ways = [Way(provider, optimise) for optimise in (False, True)]
    plain = before.ways[ways[0]].results
    coarse, aside = coarsest_allowance(original.proto), _Aside(original, runs, claims, provider, why)
    asked = _AMPLIFIED * max((claim.accuracy for claim in claims), default=0.0)
    failures: list[str] = []
    ratios: list[float] = []
    distrusted: list[str] = []
    allowances: dict[str, Allowance] = {}
    stand_in: dict[str, float] = {}
    for name in plain[0]:
        if not is_float(plain[0][name].dtype):
            continue
        truth = _truth(runs, name)
        judge = _Judge(name, [case[name] for case in plain], truth, coarse, aside)
        if truth is not None:
            failures += judge.exact(runs, max(CAP, 4.0 * judge.eps, asked), _advice(claims))
            distrusted += [] if judge.trusted else [name]
        for way in ways:
            old, new = ([case[name] for case in run.ways[way].results] for run in (before, after))
            found, allowance, failure = judge.on(way, old, new)
            ratios += [] if found is None else [found]
            failures += [] if failure is None else [failure]
            if not judge.trusted:
                stand_in[name] = max(stand_in.get(name, 0.0), Channels.of(old).share(judge.noise(old)))
            if allowance is not None:
                allowances[name] = _worse(allowances.get(name), allowance)
    for way in ways:
        failures += _disparities(before.ways[way].results, after.ways[way].results, str(way))
    optimised = before.ways[ways[-1]], after.ways[ways[-1]]
    fallen, there = _fallen(*optimised)
    outputs = _statistics(optimised[0].results, optimised[1].results, before.truth)
    for name, reason in ((name, uncompared(stats)) for name, stats in outputs.items()):
        failures += [] if reason is None else [f"output {name}: nothing could be compared: {reason}"]
    return ProviderProof(
        outputs=outputs,
        error_ratio=max(ratios, default=None),
        load_seconds=(optimised[0].load_seconds, optimised[1].load_seconds),
        cpu_nodes=fallen,
        failures=tuple(dict.fromkeys(failures)),
        cpu_nodes_of_original=there,
        control={}
        if parse_provider(provider).name == "cpu"
        else _statistics(before.ways[CPU].results, optimised[0].results),
        distrusted=tuple(distrusted),
        doubt=aside.doubt.why if aside.asked else "",
        stand_in=stand_in,
        allowances=allowances,
    )


def _truth(runs: Evaluations, name: str) -> _Truth | None:
    truth, rebuilt, planned = runs.before.truth, runs.after.truth, runs.planned
    if truth is None or rebuilt is None or planned is None:
        return None
    right, made, plan = ([case[name] for case in results] for results in (truth, rebuilt, planned))
    channels = Channels.of(right)
    granted = np.zeros(())
    if runs.shaken is not None:
        granted = channels.errors([case[name] for case in runs.shaken], plan)
    return _Truth(channels, right, plan, made, granted, channels.errors(plan, right) + granted)


@dataclass(eq=False)
class _Judge:
    """One output of the rewritten model.

    Attributes:
        name: the output.
        plain: what the original gives, not optimised, case by case.
        truth: its float64 evaluations, None where there are none.
        coarse: the rounding of the coarsest arithmetic in the model, as a share of each channel's scale.
        aside: the original by itself.
    """

    name: str
    plain: Sequence[Array]
    truth: _Truth | None
    coarse: float
    aside: _Aside

    @property
    def eps(self) -> float:
        """The spacing of floats in the output's type."""
        return float(ml_dtypes.finfo(self.plain[0].dtype).eps)

    @cached_property
    def trusted(self) -> bool:
        """Whether there is a float64 evaluation that is a measure: of the same function as the original's."""
        if self.truth is None:
            return False
        channels, right = self.truth.channels, self.truth.right
        if channels.share(channels.errors(self.plain, right, self.plain)) <= _SUSPICIOUS * self.eps:
            return believed(self.plain, right, self.coarse)
        if self.aside.doubt.wrong:
            return False
        return believed(self.plain, right, self.coarse) or self.aside.doubt.trusted

    def noise(self, old: Sequence[Array]) -> Wide:
        """[channels] how far rounding moves the original, where it stands in for float64."""
        channels = Channels.of(old)
        told = channels.errors(self.plain, old)
        moved = self.aside.sensitivity
        if moved is None:
            return np.maximum(told, channels.scale * self.coarse / FACTOR)
        return rounding(channels, np.maximum(told, moved.errors(self.name, channels)), self.eps)

    def exact(self, runs: Evaluations, cap: float, advice: str) -> list[str]:
        """What is wrong in float64, where rounding hides nothing."""
        if self.truth is None:
            return []
        truth, channels = self.truth, self.truth.channels
        noise = channels.rounding(channels.errors(self.plain, truth.right, self.plain), self.eps)
        if not self.trusted:
            noise = channels.scale * self.eps
        failures = []
        found = worst(channels.errors(truth.rebuilt, truth.planned), exact_rounding(noise, self.eps), truth.granted)
        if not found.holds:
            failures.append(
                f"output {self.name}: in float64 the rewritten model is {found.error:.3g} away from its plan, more "
                f"than the {found.allowed:.3g} that rounding explains"
            )
        # Lowering changes no number, so float64 sees nothing but its own rounding; merged weights are rounded anew.
        forms = (
            ("the lowered original", runs.lowered, exact_rounding(noise, self.eps)),
            ("the original with fewer neurons", runs.merged, noise),
        )
        for what, results, rounding_there in forms:
            if results is None:
                continue
            found = worst(channels.errors([case[self.name] for case in results], truth.right), rounding_there)
            if not found.holds:
                failures.append(f"output {self.name}: {what} computes something else, {found.text}")
        share = channels.share(truth.carried)
        if not share <= cap:
            failures.append(
                f"output {self.name}: the certified errors of the head programs amount to {share:.2g} of the output's "
                f"scale, more than the {cap:.2g} allowed; {advice}"
            )
        return failures

    def on(
        self, way: Way, old: Sequence[Array], new: Sequence[Array]
    ) -> tuple[float | None, Allowance | None, str | None]:
        """The ratio of errors in one way to run the models, the allowance, and what is wrong there.

        Where float64 computes something else the ratio is still told, but the original stands in to judge by.
        """
        if self.truth is None:
            return None, None, self._against_original(way, old, new)
        truth, channels = self.truth, self.truth.channels
        old_errors, new_errors = (channels.errors(values, truth.right, old) for values in (old, new))
        scale, error, own = (float(np.max(each, initial=0.0)) for each in (channels.scale, new_errors, old_errors))
        found = ratio(error, own, 0.5 * self.eps * scale)
        if not self.trusted:
            return found, None, self._against_original(way, old, new)
        excess = worst(channels.errors(new, truth.planned, old), channels.rounding(old_errors, self.eps), truth.granted)
        certified = float(np.max(truth.carried, initial=0.0))
        allowance = Allowance(own, error, excess.allowed + certified, certified, scale)
        return found, allowance, None if excess.holds else f"output {self.name}: {excess.text} on {way}"

    def _against_original(self, way: Way, old: Sequence[Array], new: Sequence[Array]) -> str | None:
        channels = Channels.of(old)
        granted = np.zeros(()) if self.truth is None else self.truth.carried
        excess = worst(channels.errors(new, old), self.noise(old), granted)
        return None if excess.holds else f"output {self.name}: {excess.text} on {way}"


def _worse(one: Allowance | None, other: Allowance) -> Allowance:
    """The one of two with the larger error."""
    return one if one is not None and one.rewritten >= other.rewritten else other


_AMPLIFIED = 32.0
"""Where the user asked for a coarse program, its error may grow by this much on the way to the outputs."""


def _advice(claims: Sequence[Claim]) -> str:
    """What the user can do about certified errors that amount to too much."""
    if not claims:
        return ""
    helps = "ask for closer programs with --accuracy, or leave the block with --skip"
    if any(claim.unstable for claim in claims):
        helps = f"keep gates' products in the graph with --gate product, {helps}"
    largest = max(claims, key=lambda claim: claim.max_error)
    return f"the largest certificate is that of {largest.name}, {largest.max_error:.2g}; {helps}"


def _statistics(old: Results, new: Results, truth: Results | None = None) -> dict[str, OutputStats]:
    found = {name: merge([compare(name, b[name], a[name]) for b, a in zip(old, new, strict=True)]) for name in old[0]}
    if truth is None:
        return found
    return {
        name: against_truth(stats, *([case[name] for case in results] for results in (old, new, truth)))
        for name, stats in found.items()
    }


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


def _disparities(before: Results, after: Results, where: str) -> list[str]:
    """What no tolerance forgives: shapes, types, NaN, infinities, and integers that differ."""
    found: dict[str, None] = {}
    for name in before[0]:
        for old, new in zip(before, after, strict=True):
            stats = compare(name, old[name], new[name])
            if not (stats.same_shape and stats.same_dtype):
                found[f"output {name}: shape or element type differs on {where}"] = None
            elif not (stats.nan_parity and stats.inf_parity):
                found[f"output {name}: NaN or infinite at other places than the original on {where}"] = None
            elif not is_float(old[name].dtype) and stats.max_abs > 0.0:
                found[f"output {name}: its values are not floating-point and differ on {where}"] = None
    return list(found)

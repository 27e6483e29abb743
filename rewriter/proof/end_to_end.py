"""Prove the whole rewritten model against the whole original, on one execution provider.

Three float64 evaluations decide: of the original (the truth), of the planned model (`rewriter.proof.planned`), and of
the rewritten model. Per output and channel:

1. The rewritten model equals the planned one up to rounding: to float64's rounding in float64, and by the pass rule
   (`rewriter.proof.pass_rule`) on the provider, without and with onnxruntime's optimisation.
2. The planned model is close to the original. Their distance, the effect of the certified errors, is reported and
   capped.
3. Other forms of the original, such as the lowered one, equal it up to rounding.

If there is no float64 evaluation, or none that can serve as the truth (`rewriter.proof.diagnosis.doubt`), the original
stands in: the rewritten model may differ by four times as much as rounding moves the original by itself
(`rewriter.proof.sensitivity`). This does not loosen the proofs of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import ml_dtypes
import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.files.load import LoadedModel
from rewriter.files.walk import iter_nodes
from rewriter.ort.providers import parse_provider
from rewriter.proof.claims import Claim
from rewriter.proof.diagnosis.doubt import Doubt
from rewriter.proof.distance import ratio
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.judging import believed
from rewriter.proof.pass_rule import CAP, FACTOR, Channels, Excess, Wide, against_rounding, exact_rounding, worst
from rewriter.proof.run.whole import ModelRuns, Ran, Results, Way
from rewriter.proof.sensitivity import Sensitivity, own_rounding, rounding, sensitivity
from rewriter.proof.settings import LARGE
from rewriter.proof.statistics import OutputStats, compare, merge, uncompared

# By element type, what rounding may amount to at the outputs of a whole model, as a share of their scale. Half
# precision gets fewer eps, because 256 eps of float16 would be a quarter of the scale.
_ALLOWANCES = {
    onnx.TensorProto.DOUBLE: 256 * 2.0**-52,
    onnx.TensorProto.FLOAT: 256 * 2.0**-23,
    onnx.TensorProto.FLOAT16: 8 * 2.0**-10,
    onnx.TensorProto.BFLOAT16: 8 * 2.0**-7,
}
_QUANTISED_ALLOWANCE = 4 * 2.0**-8
"""For activations quantised to 8 bits: a difference in the last place may move a value by a whole step."""

_QUANTISERS = {"QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm"}
_SUSPICIOUS = 64.0
"""If the original is further from float64 than this many eps, every operator of the evaluation is checked."""

CPU = Way("cpu", optimise=True)
"""The control that other providers are compared with."""


@dataclass(frozen=True)
class Allowance:
    """Errors of one output against float64 and their allowance, in output units.

    Attributes:
        original: largest error of the original.
        rewritten: largest error of the rewritten model.
        allowed: the allowance for that error: rounding plus the effect of certified errors.
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
    """Measurements on one execution provider.

    Attributes:
        outputs: maps an output to statistics of rewritten against original, both optimised, over all cases.
        error_ratio: largest error against float64, rewritten over original, the worst over outputs and optimisation
            levels; None without a float64 evaluation.
        load_seconds: how long onnxruntime took to load the original and the rewritten model, optimised.
        cpu_nodes: nodes that fell back to the CPU, but for those that do in the original too.
        failures: what did not hold.
        distrusted: outputs whose float64 evaluation differs by more than rounding explains, so that the original stood
            in for it.
        doubt: the reason, with the operator; empty if no output required the search for one.
        stand_in: for outputs where the original stood in, how far rounding moves it, as a share of its channel's scale.
        allowances: for the other outputs, errors against float64 and their allowance; the worse of both optimisation
            levels.
        cpu_nodes_of_original: how many nodes of the original fell back to the CPU; None where onnxruntime cannot tell.
        control: on a provider other than the CPU, the noise between the two: statistics of the *original* there against
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
    """Runs and float64 evaluations of both models, on the same cases.

    Attributes:
        before: the original; its float64 evaluation is the truth.
        after: the rewritten model.
        planned: the planned model in float64; None without a truth.
        shaken: the same with every activation perturbed by its float64 rounding; None where that rounding is ordinary.
        lowered: the original with fused operators taken apart, in float64; None where none were.
    """

    before: ModelRuns
    after: ModelRuns
    planned: Results | None = None
    shaken: Results | None = None
    lowered: Results | None = None


@dataclass(frozen=True, eq=False)
class _Truth:
    """One output in float64, case by case.

    Attributes:
        channels: its channels, by the truth.
        right: the original, which is the truth.
        planned: the planned model.
        rebuilt: the rewritten model.
        granted: [channels] the effect of the programs' float64 rounding.
        carried: [channels] the effect of the certified errors, and `granted`.
    """

    channels: Channels
    right: Sequence[Array]
    planned: Sequence[Array]
    rebuilt: Sequence[Array]
    granted: Wide
    carried: Wide


@dataclass(eq=False)
class _Aside:
    """Expensive facts about the original, computed once and only if an output needs them."""

    original: LoadedModel
    runs: Evaluations
    claims: Sequence[Claim]
    provider: str
    why: Callable[[], Doubt]
    asked: bool = False

    @cached_property
    def doubt(self) -> Doubt:
        """Why the original is far from its float64 evaluation."""
        self.asked = True
        return self.why()

    @cached_property
    def own_rounding(self) -> Sensitivity | None:
        """How far noise of the size of rounding moves the outputs; None if the model is too large for it."""
        if self.original.size > LARGE:
            return None
        plain = self.runs.before.ways[Way(self.provider, optimise=False)].results
        return own_rounding(self.original, self.runs.before.cases, plain, self.provider)

    def moved(self, name: str, channels: Channels) -> Wide | None:
        """[channels] The same for one output."""
        return None if self.own_rounding is None else self.own_rounding.errors(name, channels)

    @cached_property
    def sensitivity(self) -> Sensitivity | None:
        """How far rounding moves the outputs; None if the model is too large to be run with noise."""
        if self.original.size > LARGE:
            return None
        plain = self.runs.before.ways[Way(self.provider, optimise=False)].results
        # The claims may be about a lowered form, whose tensors the original does not all have.
        known = {name for node in self.original.proto.graph.node for name in node.output}
        claims = [claim for claim in self.claims if not claim.path and {claim.gate, claim.output} <= known]
        return sensitivity(self.original, self.runs.before.cases, plain, self.provider, claims=claims)


def judge_end_to_end(
    original: LoadedModel, runs: Evaluations, claims: Sequence[Claim], provider: str, why: Callable[[], Doubt]
) -> ProviderProof:
    """Apply the pass rule to every output, without and with graph optimisation.

    Args:
        original: the original model.
        runs: runs of both models on the provider in both ways, and of the original on the CPU, optimised, as well.
        claims: one for every replaced block.
        provider: execution provider.
        why: finds out why the original is far from its float64 evaluation.
    """
    before, after = runs.before, runs.after
    # Both ways are judged: without optimisation the arithmetic is that of the file, with it that of deployment, where
    # fusion may treat the two models differently.
    ways = [Way(provider, optimise) for optimise in (False, True)]
    plain = before.ways[ways[0]].results
    coarse, aside = coarsest_allowance(original.proto), _Aside(original, runs, claims, provider, why)
    # A user who asks for coarse programs accepts their effect; the cap protects everyone else.
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
            # In float16 and coarser types four roundings exceed the usual cap.
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
    outputs = _statistics(optimised[0].results, optimised[1].results)
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
        granted = channels.not_by_luck(channels.errors([case[name] for case in runs.shaken], plan))
    return _Truth(channels, right, plan, made, granted, channels.errors(plan, right) + granted)


@dataclass(eq=False)
class _Judge:
    """The pass rule for one output of the rewritten model.

    Attributes:
        name: the output.
        plain: values of the original, not optimised, case by case.
        truth: its float64 evaluations; None if there are none.
        coarse: rounding of the coarsest arithmetic in the model, as a share of each channel's scale.
        aside: expensive facts about the original.
    """

    name: str
    plain: Sequence[Array]
    truth: _Truth | None
    coarse: float
    aside: _Aside

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger number in the output's type."""
        return float(ml_dtypes.finfo(self.plain[0].dtype).eps)

    @cached_property
    def trusted(self) -> bool:
        """Whether there is a float64 evaluation that can serve as the truth: of the same function as the original.

        From `_SUSPICIOUS` on, the operators are audited too: a wrong one could be less far off than the coarsest
        rounding in the model explains.
        """
        if self.truth is None:
            return False
        channels, right = self.truth.channels, self.truth.right
        if channels.share(channels.errors(self.plain, right, self.plain)) <= _SUSPICIOUS * self.eps:
            return believed(self.plain, right, self.coarse)
        if self.aside.doubt.wrong:
            return False
        return believed(self.plain, right, self.coarse) or self.aside.doubt.trusted

    def noise(self, old: Sequence[Array]) -> Wide:
        """[channels] How far rounding moves the original, where it stands in for float64."""
        channels = Channels.of(old)
        # What optimisation changes in the original is one sample of its rounding, and costs nothing.
        told = channels.errors(self.plain, old)
        moved = self.aside.sensitivity
        if moved is None:
            # Divided by the factor that the pass rule multiplies by.
            return np.maximum(told, channels.scale * self.coarse / FACTOR)
        return rounding(channels, np.maximum(told, moved.errors(self.name, channels)), self.eps)

    def judged(self, truth: _Truth, own: Wide, rule: Callable[[Wide], Excess]) -> Excess:
        """Apply a rule to the rounding of the original.

        Args:
            truth: `self.truth`.
            own: [channels] errors of the original against it.
            rule: from [channels] rounding to the channel with the least room.
        """
        channels = truth.channels
        if not self.trusted:
            # The original's distance from float64 is not rounding then. But rewritten and planned model are both
            # evaluated in float64 and decide alike, so their comparison stays as sharp as for an exact original.
            return rule(channels.scale * self.eps)
        return against_rounding(
            channels, own, self.eps, rule, lambda: self.aside.moved(self.name, channels), self.coarse
        )

    def exact(self, runs: Evaluations, cap: float, advice: str) -> list[str]:
        """Failures in float64, where rounding hides nothing."""
        if self.truth is None:
            return []
        truth, channels = self.truth, self.truth.channels
        own = channels.errors(self.plain, truth.right, self.plain)
        sharp = exact_rounding(np.ones(()), self.eps)

        failures = []
        off = channels.errors(truth.rebuilt, truth.planned)
        found = self.judged(truth, own, lambda noise: worst(off, sharp * noise, truth.granted))
        if not found.holds:
            failures.append(
                f"output {self.name}: in float64 the rewritten model differs from its plan by {found.error:.3g}, more "
                f"than the {found.allowed:.3g} that rounding explains"
            )
        if runs.lowered is not None:
            # Lowering changes no number, so float64 sees nothing but its own rounding.
            moved = channels.errors([case[self.name] for case in runs.lowered], truth.right)
            found = self.judged(truth, own, lambda noise: worst(moved, sharp * noise))
            if not found.holds:
                failures.append(
                    f"output {self.name}: the lowered original does not compute what the original does, {found.text}"
                )
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
        """The ratio of errors, the allowance and the failure in one way of running the models; None for what is absent.

        If the float64 evaluation is not trusted the ratio is still reported, but the original stands in for the truth.
        """
        if self.truth is None:
            return None, None, self._against_original(way, old, new)
        truth, channels = self.truth, self.truth.channels
        old_errors, new_errors = (channels.errors(values, truth.right, old) for values in (old, new))
        scale, error, own = (float(np.max(each, initial=0.0)) for each in (channels.scale, new_errors, old_errors))
        found = ratio(error, own, 0.5 * self.eps * scale)
        if not self.trusted:
            return found, None, self._against_original(way, old, new)
        far = channels.errors(new, truth.planned, old)
        excess = self.judged(truth, old_errors, lambda noise: worst(far, noise, truth.granted))
        certified = float(np.max(truth.carried, initial=0.0))
        allowance = Allowance(own, error, excess.allowed + certified, certified, scale)
        return found, allowance, None if excess.holds else f"output {self.name}: {excess.text} on {way}"

    def _against_original(self, way: Way, old: Sequence[Array], new: Sequence[Array]) -> str | None:
        channels = Channels.of(old)
        # Both sides of this comparison round on the provider, and the rewritten model has its certified errors besides.
        granted = np.zeros(()) if self.truth is None else self.truth.carried
        excess = worst(channels.errors(new, old), self.noise(old), granted)
        return None if excess.holds else f"output {self.name}: {excess.text} on {way}"


def _worse(one: Allowance | None, other: Allowance) -> Allowance:
    """The allowance with the larger error."""
    return one if one is not None and one.rewritten >= other.rewritten else other


_AMPLIFIED = 32.0
"""How much the error of a program that the user asked for may grow on the way to the outputs."""


def _advice(claims: Sequence[Claim]) -> str:
    """What the user can do if the effect of certified errors is too large."""
    if not claims:
        return ""
    helps = "ask for closer programs with --accuracy, or leave the block with --skip"
    if any(claim.unstable for claim in claims):
        helps = f"keep gates' products in the graph with --gate product, {helps}"
    largest = max(claims, key=lambda claim: claim.max_error)
    return f"the largest certificate is that of {largest.name}, {largest.max_error:.2g}; {helps}"


def _statistics(old: Results, new: Results) -> dict[str, OutputStats]:
    return {name: merge([compare(name, b[name], a[name]) for b, a in zip(old, new, strict=True)]) for name in old[0]}


def _fallen(before: Ran, after: Ran) -> tuple[tuple[str, ...], int | None]:
    """CPU nodes of the rewritten model that are not CPU nodes of the original, and the number of the latter."""
    if before.cpu_nodes is None or after.cpu_nodes is None:
        return (), None
    there = set(before.cpu_nodes)
    return tuple(node for node in after.cpu_nodes if node not in there), len(before.cpu_nodes)


def coarsest_allowance(model: onnx.ModelProto) -> float:
    """Rounding of the coarsest arithmetic in the model, by the types of its weights, its casts and its quantisers."""
    types = {tensor.data_type for tensor in model.graph.initializer}
    types |= {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    found: list[float] = []
    for node in iter_nodes(model.graph.node):
        types.update(attribute.i for attribute in node.attribute if node.op_type == "Cast" and attribute.name == "to")
        if node.op_type in _QUANTISERS:
            found.append(_QUANTISED_ALLOWANCE)
    known = [_ALLOWANCES[kind] for kind in types if kind in _ALLOWANCES]
    return max(found + known, default=_ALLOWANCES[onnx.TensorProto.FLOAT])


def _disparities(before: Results, after: Results, where: str) -> list[str]:
    """What no tolerance can excuse: differences in shape, type, NaN, infinities and integers."""
    found: dict[str, None] = {}
    for name in before[0]:
        for old, new in zip(before, after, strict=True):
            stats = compare(name, old[name], new[name])
            if not (stats.same_shape and stats.same_dtype):
                found[f"output {name}: shape or element type differs on {where}"] = None
            elif not (stats.nan_parity and stats.inf_parity):
                found[f"output {name}: NaN or infinite at other places than in the original on {where}"] = None
            elif not is_float(old[name].dtype) and stats.max_abs > 0.0:
                found[f"output {name}: its values are not floating-point and differ on {where}"] = None
    return list(found)

"""Proof of one replaced block, by itself.

Comes in: the original and the rewritten model, and what is claimed of a block (`Claim`). Goes out: `BlockProof`.
Four questions, each against a float64 evaluation of the *original's* own nodes:

1. exact: in float64, does the new region compute the original function within the certified error, on adversarial
   pre-activations?
2. region: in the model's own type, on the same points, is the new region as accurate as the old one?
3. block: on real inputs of the block, is the new block (W1, heads, W2) as accurate as the old one?
4. parity: NaN where the original gives NaN, and nowhere else.

Blocks are cut out with their weights one at a time, so a model of any size is proved in the memory of one block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.extract import cut, extract
from rewriter.graph.view import GraphView
from rewriter.proof.float64 import NoReference, open_reference
from rewriter.proof.points import adversarial, largest, machine_epsilon
from rewriter.proof.sessions import open_session

Array = NDArray[Any]
Feeds = Mapping[str, Array]

FACTOR = 4.0
"""A conversion may be this many times as far from float64 as the original is (plus its certified error)."""

_EXACT_SLACK = 1e-12
"""Rounding of the float64 evaluations themselves, relative to max(1, |f|)."""


@dataclass(frozen=True)
class Claim:
    """What is claimed of one replaced block.

    Attributes:
        name: the block's name.
        inputs: the tensors that the replaced region reads: the pre-activation, for a gated block also the value.
        output: the tensor that it makes.
        block_inputs: data inputs of the first linear operators.
        block_outputs: outputs of the second ones.
        max_error: certified largest error against the original function in exact arithmetic, absolute.
        rounding: what float32 arithmetic may add, relative to max(1, |f|).
        elem_type: element type of `output`.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    block_inputs: tuple[str, ...]
    block_outputs: tuple[str, ...]
    max_error: float
    rounding: float
    elem_type: int


@dataclass(frozen=True)
class Side:
    """One of the two models: where its bytes are, and its index."""

    model: LoadedModel
    view: GraphView

    def part(self, inputs: Sequence[str], outputs: Sequence[str], elem_type: int) -> onnx.ModelProto:
        """The nodes between two sets of tensors as a model, weights inline."""
        return extract(
            self.model.proto, self.view, cut(self.view, inputs, outputs), self._read, elem_type=elem_type
        )

    def _read(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return tensor
        return onnx.numpy_helper.from_array(
            np.ascontiguousarray(read_tensor(self.model, tensor)), tensor.name
        )


@dataclass(frozen=True)
class BlockProof:
    """What was measured of one block; errors are absolute, ratios are new over old.

    Attributes:
        name: the block.
        exact_error: largest error in float64, over max(1, |f|); None where there is no float64 evaluation.
        region_error: largest error of the new region in the model's type, over max(1, |f|).
        region_ratio: that over the original region's.
        block_error: largest error of the new block on real inputs, absolute.
        block_ratio: that over the original block's.
        failures: what did not hold; empty when the block is proved.
    """

    name: str
    exact_error: float | None = None
    region_error: float = 0.0
    region_ratio: float | None = None
    block_error: float = 0.0
    block_ratio: float | None = None
    failures: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether everything held."""
        return not self.failures


def prove_block(
    original: Side, rewritten: Side, claim: Claim, inputs: Sequence[Feeds], providers: Sequence[str]
) -> BlockProof:
    """Answer the four questions for one block.

    Args:
        original: the original model.
        rewritten: the rewritten model.
        claim: what is claimed.
        inputs: values of `claim.block_inputs` (and whatever else the block reads), one mapping per case.
        providers: execution providers, each tried with and without graph optimisation.
    """
    failures: list[str] = []
    exact, region, region_ratio = _prove_region(original, rewritten, claim, providers, failures)
    block, block_ratio = _prove_whole(original, rewritten, claim, inputs, providers, failures)
    return BlockProof(claim.name, exact, region, region_ratio, block, block_ratio, tuple(failures))


def _region_feeds(view: GraphView, claim: Claim) -> dict[str, Array]:
    points = adversarial(view.type_of(claim.inputs[0]).elem_type or claim.elem_type)
    rank = view.type_of(claim.inputs[0]).rank or 1
    shaped = points.reshape((1,) * (rank - 1) + (-1,))
    feeds = {claim.inputs[0]: shaped}
    for other in claim.inputs[1:]:
        values = np.random.default_rng(0).normal(0.0, 2.0, points.size)
        feeds[other] = values.astype(points.dtype).reshape(shaped.shape)
    return feeds


def _prove_region(
    original: Side, rewritten: Side, claim: Claim, providers: Sequence[str], failures: list[str]
) -> tuple[float | None, float, float | None]:
    before = original.part(claim.inputs, [claim.output], claim.elem_type)
    after = rewritten.part(claim.inputs, [claim.output], claim.elem_type)
    feeds = _region_feeds(original.view, claim)
    try:
        truth = open_reference(before).run(feeds)[claim.output]
        rebuilt = open_reference(after).run(feeds)[claim.output]
    except NoReference:
        truth = rebuilt = None
    exact = None
    if truth is not None and rebuilt is not None:
        exact = _largest(_relative(rebuilt, truth))
        scale = max(
            (float(np.nanmax(np.abs(feeds[name].astype(np.float64)))) for name in claim.inputs[1:]),
            default=1.0,
        )
        if exact > claim.max_error * scale + _EXACT_SLACK:
            failures.append(
                f"{claim.name}: in float64 the heads are off by {exact:.3g}, certified are {claim.max_error:.3g}"
            )
        if not np.array_equal(np.isnan(truth), np.isnan(rebuilt)):
            failures.append(f"{claim.name}: in float64 the heads give NaN at other points than the original")
    error, ratio = 0.0, None
    for provider in providers:
        for optimise in (True, False):
            old = open_session(before, provider, optimise=optimise).run(feeds)[claim.output]
            new = open_session(after, provider, optimise=optimise).run(feeds)[claim.output]
            target = old.astype(np.float64) if truth is None else truth
            finite = np.abs(target) <= largest(claim.elem_type)
            old_error = _largest(_relative(old, target)[finite])
            new_error = _largest(_relative(new, target)[finite])
            floor = machine_epsilon(claim.elem_type)
            allowed = FACTOR * max(old_error, floor) + claim.max_error + claim.rounding
            error = max(error, new_error)
            ratio = max(ratio or 0.0, new_error / max(old_error, floor))
            where = _where(provider, optimise=optimise)
            if not new_error <= allowed:
                failures.append(
                    f"{claim.name}: the heads are off by {new_error:.3g} on {where}, allowed are {allowed:.3g}"
                )
            nan_before, nan_after = np.isnan(old.astype(np.float64)), np.isnan(new.astype(np.float64))
            if not np.array_equal(nan_before, nan_after):
                failures.append(f"{claim.name}: NaN at other points than the original's on {where}")
    return exact, error, ratio


def _prove_whole(
    original: Side,
    rewritten: Side,
    claim: Claim,
    inputs: Sequence[Feeds],
    providers: Sequence[str],
    failures: list[str],
) -> tuple[float, float | None]:
    worst, ratio = 0.0, None
    if not inputs:
        return worst, ratio
    names = tuple(inputs[0])
    before = original.part(names, claim.block_outputs, claim.elem_type)
    after = rewritten.part(names, claim.block_outputs, claim.elem_type)
    sessions = [
        (
            open_session(before, provider, optimise=optimise),
            open_session(after, provider, optimise=optimise),
            where,
        )
        for provider in providers
        for optimise in (True, False)
        for where in [_where(provider, optimise=optimise)]
    ]
    wanted = set(sessions[0][0].inputs)
    cases = [{name: value for name, value in feeds.items() if name in wanted} for feeds in inputs]
    try:
        truth, rebuilt = open_reference(before), open_reference(after)
        expected = [truth.run(given) for given in cases]
        remade = [rebuilt.run(given) for given in cases]
    except NoReference:
        return worst, ratio
    errors: dict[str, list[float]] = {where: [0.0, 0.0] for *_, where in sessions}
    carried = largest_value = 0.0
    for given, right, again in zip(cases, expected, remade, strict=True):
        for name in claim.block_outputs:
            carried = max(carried, _gap(again[name], right[name]))
            largest_value = max(largest_value, _gap(right[name], np.zeros(())))
        for old, new, where in sessions:
            for slot, session in enumerate((old, new)):
                results = session.run(given, claim.block_outputs)
                gap = max(_gap(results[name], right[name]) for name in claim.block_outputs)
                errors[where][slot] = max(errors[where][slot], gap)
    floor = machine_epsilon(claim.elem_type) * largest_value
    for where, (old_error, new_error) in errors.items():
        allowed = FACTOR * max(old_error, floor) + carried
        worst = max(worst, new_error)
        ratio = max(ratio or 0.0, new_error / max(old_error, floor, np.finfo(np.float64).tiny))
        if not new_error <= allowed:
            failures.append(
                f"{claim.name}: on real inputs the block is off by {new_error:.3g} on {where}, allowed are {allowed:.3g}"
            )
    return worst, ratio


def tap_inputs(original: Side, claims: Sequence[Claim]) -> dict[str, tuple[str, ...]]:
    """Block name to the tensors whose values its proof needs: the block's inputs, and shapes computed elsewhere."""
    return {
        claim.name: cut(original.view, claim.block_inputs, claim.block_outputs).inputs for claim in claims
    }


def _relative(values: Array, truth: Array) -> Array:
    """|values - truth| over max(1, |truth|); NaN or infinite where the truth is finite counts as infinite."""
    with np.errstate(all="ignore"):
        gap = np.abs(values.astype(np.float64) - truth) / np.maximum(1.0, np.abs(truth))
    return np.where(np.isfinite(truth), np.where(np.isnan(gap), np.inf, gap), 0.0)


def _gap(values: Array, truth: Array) -> float:
    """Largest |values - truth| where the truth is finite."""
    with np.errstate(all="ignore"):
        gap = np.abs(values.astype(np.float64) - truth)
    return _largest(
        np.where(np.isfinite(truth) & np.ones(gap.shape, bool), np.where(np.isnan(gap), np.inf, gap), 0.0)
    )


def _largest(values: Array) -> float:
    return float(np.max(values)) if values.size else 0.0


def _where(provider: str, *, optimise: bool) -> str:
    return f"{provider}, {'default optimisation' if optimise else 'no optimisation'}"

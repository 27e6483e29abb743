"""Test one block that is not certified: cut out of both models, run on inputs of many sizes, judged by the rule.

This is no proof, and reports call such a block *tested*, with the sizes that were run. Its inputs are random, so that
mixed-up tokens, sequences or neurons show, of several batches and lengths, and from 1e-6 to 1e3, so that
pre-activations and values reach every part of the activation; or what the model itself gives the block, times these
numbers, where it also reads shapes that are computed elsewhere. Both blocks are run in the model's own type, and
evaluated in float64, where errors far below its rounding show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import cut
from rewriter.graph.view import GraphView
from rewriter.proof.claims import Claim, Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.specs import is_float
from rewriter.proof.nudge import Point, nudged, rounded
from rewriter.proof.reference import NoReference, open_reference
from rewriter.proof.rule import Judgement, Results, compared, magnitude
from rewriter.proof.run import Way, run_model
from rewriter.text import quoted

SIZES = ((2, 67), (6, 19), (1, 131))
"""Batch and tokens of the inputs, where the model fixes neither."""

SCALES = (1.0, 1e-6, 1e-2, 8.0, 1e3)
"""Standard deviations of the inputs."""

_LONG = max(tokens for _, tokens in SIZES)
_MOST_SLOTS = 4096
"""The longest sequence that is tried: attention patterns grow with its square."""

_STEADY, _UNSTABLE = 1e-13, 1e-10
"""What float64 arithmetic may add at an activation, over max(1, |f|): a head program with steep keys rounds coarsely,
since its exponentials differ by many orders of magnitude."""


@dataclass(frozen=True)
class BlockTest:
    """The test of one block.

    Attributes:
        name: name of the block.
        sizes: the shapes of its input that were run, as batch x tokens.
        error: largest error of the block, as a share of its output's norm, in float64; None without an evaluation.
        allowed: the largest error that was allowed there.
        failures: what did not hold; empty if the test passed.
    """

    name: str
    sizes: tuple[str, ...]
    error: float | None
    allowed: float | None
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether everything held."""
        return not self.failures


def tested_block(
    original: Side, rewritten: Side, claim: Claim, ways: Sequence[Way], seed: int, own: Sequence[Case], by_blocks: bool
) -> BlockTest:
    """Test one block of the original, in the form whose tensors the claim names. `own` are inputs of the model.

    Raises:
        ValidationError: the block cannot be cut out of both models, or there are no inputs for it.
    """
    view, limit, outputs = original.views[claim.path], claim.longest or _LONG, claim.block_outputs
    names = cut(view, claim.block_inputs, outputs).inputs
    parts = [cut(side.views[claim.path], names, outputs) for side in (original, rewritten)]
    foreign = next((name for name in parts[1].inputs if name not in names), None)
    if foreign is not None:
        # It cannot be fed the original's values; and a leak is a fault however close its numbers come.
        raise ValidationError(f"its heads read {quoted(foreign)}, which the original's block does not")
    before, after = (
        Side.of(side.extracted(part, claim.path, claim.elem_type))
        for side, part in zip((original, rewritten), parts, strict=True)
    )
    if claim.output not in before.main.producer:
        raise ValidationError("its activation is not part of it")
    sizes = dict.fromkeys((batch, min(tokens, limit)) for batch, tokens in SIZES)
    further = set(names) - set(claim.block_inputs)
    if further:
        drawn = recorded(original, claim, names, ways[0], own, by_blocks=by_blocks)
    else:
        drawn = [drawn_case(view, claim, *size, scale, seed) for scale in SCALES for size in sizes]
    cases, plain = _accepted(claim, before, drawn, ways[0])
    point = replace(point_of(claim), path=())
    advice = "; keep its product in the graph with --gate product, or leave it with --skip" if claim.gated else ""
    failures: list[str] = []

    def judge(plain: Results, cases: Sequence[Case], ways: Sequence[Way], where: str) -> None:
        noise, found = rounded(before.model, cases, plain, ways[0].provider, [point]), run_model(after, cases, ways)
        for way in ways:
            judged = (compared(name, plain, noise, found.ways[way].results) for name in outputs)
            failures.extend(
                f"{claim.name}: its output {each.reason} {where or f'on {way}'}{advice}"
                for each in judged
                if not each.holds
            )

    judge(plain, cases, ways, "")
    if _LONG < (claim.longest or 0) <= _MOST_SLOTS and not further:
        # One sequence as long as the block has position slots, if no static shape fixes its length.
        full = [drawn_case(view, claim, 1, limit, 1.0, seed)]
        runs = run_model(before, full, ways[:1], may_refuse=True)
        if runs.cases:
            judge(runs.ways[ways[0]].results, full, ways[:1], f"on {limit} tokens")
    exact = _in_float64(claim, before.model, after.model, point, cases)
    failures += [f"{claim.name}: in float64 its output {each.reason}" for each in exact if not each.holds]
    return BlockTest(
        claim.name,
        tuple(dict.fromkeys("x".join(map(str, _sizes(claim, case))) for case in cases)),
        max((each.error for each in exact), default=None),
        max((each.allowed for each in exact), default=None),
        tuple(dict.fromkeys(failures)),
    )


def point_of(claim: Claim) -> Point:
    """The activation of a block, where the original gets noise."""
    value = claim.value if claim.gated else ""
    return Point(claim.output, claim.path, claim.elem_type, claim.max_error, claim.gate, value)


def recorded(
    original: Side, claim: Claim, names: Sequence[str], way: Way, own: Sequence[Case], *, by_blocks: bool
) -> list[Case]:
    """What the model itself gives a block that also reads shapes computed elsewhere; its inputs are scaled."""
    if claim.path or set(names) - set(original.main.producer) - set(original.main.inputs):
        raise ValidationError("it reads what is made elsewhere, so no inputs can be made for it")
    results = run_model(original, own, [way], outputs=names, by_blocks=by_blocks).ways[way].results

    def scaled(name: str, value: Array, scale: float) -> Array:
        floats = name in claim.block_inputs and is_float(value.dtype)
        return np.asarray(value * value.dtype.type(scale)) if floats else value

    return [
        Case(f"{case.name}, times {scale:g}", {name: scaled(name, value, scale) for name, value in found.items()})
        for scale in SCALES
        for case, found in zip(own, results, strict=True)
    ]


def drawn_case(view: GraphView, claim: Claim, batch: int, tokens: int, scale: float, seed: int) -> Case:
    """Random inputs of a block; an axis whose size the model declares has that size."""
    rng = np.random.default_rng([seed, batch, tokens])
    made = {}
    for name in claim.block_inputs:
        kind = view.type_of(name)
        declared = kind.shape or (None,) * max(3, -claim.axis)
        channels = claim.axis % len(declared)
        if claim.width is None and not isinstance(declared[channels], int):
            raise ValidationError(f"nothing tells how many channels {quoted(name)} has")
        others = [batch, *(1,) * (len(declared) - 3), tokens][-len(declared) + 1 :] if len(declared) > 1 else []
        own = [*others[:channels], claim.width or 1, *others[channels:]]
        shape = [dim if isinstance(dim, int) and dim > 0 else size for dim, size in zip(declared, own, strict=True)]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type or claim.elem_type)
        values = rng.normal(0.0, scale, shape) if is_float(dtype) else rng.integers(0, 128, shape)
        made[name] = values.astype(dtype)
    return Case(f"batch {batch}, {tokens} tokens, times {scale:g}", made)


def _accepted(claim: Claim, block: Side, drawn: Sequence[Case], way: Way) -> tuple[list[Case], Results]:
    """The cases that the original's block accepts (a static shape may fix sizes), within the domain; its results."""
    runs = run_model(block, drawn, [way], outputs=(*claim.block_outputs, claim.gate), may_refuse=True)
    kept, results = [], []
    for case, found in zip(runs.cases, runs.ways[way].results, strict=True):
        finite = all(np.isfinite(value.astype(np.float64)).all() for value in found.values())
        if finite and magnitude(found[claim.gate]) <= claim.domain:
            kept.append(case)
            results.append({name: found[name] for name in claim.block_outputs})
    if not kept:
        why = f" ({runs.skipped[0]})" if runs.skipped else ""
        raise ValidationError(f"the original's block gives finite results on none of the inputs tried{why}")
    return kept, results


def _in_float64(
    claim: Claim, before: LoadedModel, after: LoadedModel, point: Point, cases: Sequence[Case]
) -> list[Judgement]:
    """The rule on float64 evaluations, where what is claimed counts as noise; nothing if there are none."""
    error = claim.max_error + (_UNSTABLE if claim.unstable else _STEADY)
    noisy, draws = nudged(before.proto, [replace(point, error=error, elem_type=onnx.TensorProto.DOUBLE)])
    try:
        models = before.proto, noisy, after.proto
        reference, moved, heads = (open_reference(proto, before.base_dir) for proto in models)
        truth = [reference.run(case.feeds) for case in cases]
        rebuilt = [heads.run(case.feeds) for case in cases]
        others = [[moved.run({**case.feeds, **draw}) for case in cases] for draw in draws]
    except NoReference:
        return []
    return [compared(name, truth, others, rebuilt) for name in claim.block_outputs]


def _sizes(claim: Claim, case: Case) -> tuple[int, ...]:
    """The sizes of a case but for the channels: batch and tokens, or batch, height and width."""
    shape = list(case.feeds[claim.block_inputs[0]].shape)
    del shape[claim.axis % len(shape)]
    return tuple(shape)

"""Test one block that is not certified: cut out of both models, run on inputs of many sizes, judged by the rule.

This is no proof, and reports call such a block *tested*, with the sizes that were run. From the values that the block
receives in the model, inputs of other batches and lengths are drawn, each row scaled at random, so that mixed-up
tokens, batches or neurons show; then all are scaled, from 1e-6 to 1e3, so that pre-activations and values reach every
part of the activation. Both blocks are run in the model's own type, and evaluated in float64, where errors far below
its rounding show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import onnx

from rewriter.arrays import Array, magnitude
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import cut
from rewriter.proof.claims import Claim, Side
from rewriter.proof.exposed import exposed_failures, wanted
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.nudge import DRAWS, Point, feeds, nudged
from rewriter.proof.reference.float64 import NoReference, open_reference
from rewriter.proof.rule import Judgement, Results, compared
from rewriter.proof.run import Way, open_part
from rewriter.text import quoted

SCALES = (1.0, 1e-6, 1e-2, 8.0, 1e3)
"""What inputs are multiplied by."""

_STEADY, _UNSTABLE = 1e-13, 1e-10
"""What float64 arithmetic may add at an activation, over max(1, |f|): a head program with steep keys rounds coarsely,
since its exponentials differ by many orders of magnitude."""

Feeds = Mapping[str, Array]


@dataclass(frozen=True)
class BlockTest:
    """The test of one block.

    Attributes:
        name: the block.
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


def needs(original: Side, claim: Claim) -> tuple[str, ...]:
    """The tensors whose values the test needs: the block's inputs, and shapes that are computed elsewhere."""
    return cut(original.views[claim.path], claim.block_inputs, claim.block_outputs).inputs


def tested_block(
    original: Side, rewritten: Side, claim: Claim, seen: Sequence[Feeds], ways: Sequence[Way], seed: int
) -> BlockTest:
    """Test one block.

    Args:
        original: the original, in the form whose tensors the claim names.
        rewritten: the rewritten model, in a form whose blocks can be cut out.
        claim: where the block is, and the error that is claimed.
        seen: values of the tensors of `needs` in the model; where there are none, inputs are made.
        ways: providers, with and without optimisation.
        seed: of the inputs that are made.
    """
    seen = list(seen) or _made(original, claim, seed)
    if not seen:
        return _untested(claim, "it reads shapes that are made elsewhere, so no inputs can be made for it")
    names = tuple(seen[0])
    ours, theirs = (cut(s.views[claim.path], names, claim.block_outputs).inputs for s in (original, rewritten))
    foreign = next((name for name in theirs if name not in ours), None)
    if foreign is not None:
        # It cannot be fed the original's values; and a leak is a fault however close its numbers come.
        return _untested(claim, f"its heads read {quoted(foreign)}, which the original's block does not")
    before, after = (side.part(claim, names, claim.block_outputs) for side in (original, rewritten))
    if claim.output not in {name for node in before.proto.graph.node for name in node.output}:
        return _untested(claim, "its activation is not part of it")
    try:
        return _tested(original, rewritten, claim, _Parts(before, after), list(seen), ways)
    except ValidationError as error:
        return _untested(claim, str(error))


@dataclass(frozen=True, eq=False)
class _Parts:
    before: LoadedModel
    after: LoadedModel


def _tested(
    original: Side, rewritten: Side, claim: Claim, parts: _Parts, seen: Sequence[Feeds], ways: Sequence[Way]
) -> BlockTest:
    gated = original.part(claim, tuple(seen[0]), [*claim.block_outputs, claim.gate])
    cases, plain = _accepted(claim, gated, seen)
    sizes = tuple(dict.fromkeys("x".join(map(str, sizes_of(claim, case))) for case in cases))
    failures: list[str] = []
    noisy = _noisy(parts.before, claim, claim.max_error)
    moved = [_run(noisy[0], ways[0], cases, claim, {**feeds(noisy[0].proto, noisy[1], draw)}) for draw in DRAWS]
    optimised = _run(parts.before, Way(ways[0].provider, optimise=True), cases, claim)
    exact, truth = _in_float64(claim, parts, cases)
    own: list[Results] = [optimised, *moved, *truth]
    for way in ways:
        failures += _failures(claim, plain, own, _run(parts.after, way, cases, claim), f"on {way}")
    for case in longest(claim, cases):
        with suppress(ValidationError):
            ours = _run(parts.before, ways[0], [case], claim)
            others = [
                _run(noisy[0], ways[0], [case], claim, {**feeds(noisy[0].proto, noisy[1], draw)}) for draw in DRAWS
            ]
            found = _run(parts.after, ways[0], [case], claim)
            failures += _failures(claim, ours, others, found, f"on {claim.longest} tokens")
    failures += [f"{claim.name}: in float64 its output {each.reason}" for each in exact if not each.holds]
    if claim.exposed:
        failures += exposed_failures(original, rewritten, claim, seen, spread(claim, seen))
    return BlockTest(
        claim.name,
        sizes,
        max((each.error for each in exact), default=None),
        max((each.allowed for each in exact), default=None),
        tuple(dict.fromkeys(failures)),
    )


def _untested(claim: Claim, why: str) -> BlockTest:
    return BlockTest(claim.name, (), None, None, (f"{claim.name} could not be tested: {why}",))


def _failures(claim: Claim, plain: Results, variants_: Sequence[Results], found: Results, where: str) -> list[str]:
    judged = (compared(name, plain, variants_, found) for name in claim.block_outputs)
    return [f"{claim.name}: its output {each.reason} {where}{_advice(claim)}" for each in judged if not each.holds]


def _advice(claim: Claim) -> str:
    return "; keep its product in the graph with --gate product, or leave it with --skip" if claim.gated else ""


def _accepted(claim: Claim, before: LoadedModel, seen: Sequence[Feeds]) -> tuple[list[Case], Results]:
    """The cases that the original's block accepts (a static shape may fix sizes), within the domain; its results."""
    drawn = [Case(f"seen {number}", each) for number, each in enumerate(seen)]
    drawn += spread(claim, seen)
    cases = [_scaled(case, claim, scale) for scale in SCALES for case in drawn]
    session = open_part(before, "cpu", optimise=False, prepack=False)
    kept, results = [], []
    for case in cases:
        with suppress(ValidationError):
            found = session.run(wanted(case.feeds, before), [*claim.block_outputs, claim.gate])
            finite = all(np.isfinite(value.astype(np.float64)).all() for value in found.values())
            if finite and magnitude(found[claim.gate]) <= claim.domain:
                kept.append(case)
                results.append({name: found[name] for name in claim.block_outputs})
    if not kept:
        raise ValidationError("the original's block gives finite results on none of the inputs tried")
    return kept, results


def _scaled(case: Case, claim: Claim, scale: float) -> Case:
    """The block's inputs times a number, but not shapes and the like."""
    if scale == 1.0:
        return case
    with np.errstate(over="ignore"):
        values = {
            name: (value * scale).astype(value.dtype) if name in claim.block_inputs and is_float(value.dtype) else value
            for name, value in case.feeds.items()
        }
    return Case(f"{case.name}, times {scale:g}", values)


def _noisy(before: LoadedModel, claim: Claim, error: float) -> tuple[LoadedModel, str]:
    made = {name for node in before.proto.graph.node for name in node.output}
    gate = claim.gate if claim.gate in made else ""
    point = Point(claim.output, (), claim.elem_type, error, gate, claim.value if claim.gated else "")
    proto, prefix = nudged(before.proto, [point])
    return LoadedModel(proto, None, before.base_dir, (), 0), prefix


def _run(
    part: LoadedModel, way: Way, cases: Sequence[Case], claim: Claim, further: Mapping[str, Array] | None = None
) -> Results:
    session = open_part(part, way.provider, optimise=way.optimise, prepack=True)
    return [session.run({**wanted(case.feeds, part), **(further or {})}, list(claim.block_outputs)) for case in cases]


def _in_float64(claim: Claim, parts: _Parts, cases: Sequence[Case]) -> tuple[list[Judgement], list[Results]]:
    """The rule on float64 evaluations, where what is claimed counts as noise; and the original's evaluation.

    Its own run differs from that by rounding. Both are empty if there are none.
    """
    rounding = _UNSTABLE if claim.unstable else _STEADY
    noisy, prefix = _noisy(parts.before, claim, claim.max_error + rounding)
    try:
        before, after, moved = (
            open_reference(part.proto, part.base_dir) for part in (parts.before, parts.after, noisy)
        )
        truth = [before.run(wanted(case.feeds, parts.before)) for case in cases]
        rebuilt = [after.run(wanted(case.feeds, parts.after)) for case in cases]
        others = [
            [moved.run({**wanted(case.feeds, noisy), **feeds(noisy.proto, prefix, draw)}) for case in cases]
            for draw in DRAWS
        ]
    except NoReference:
        return [], []
    return [compared(name, truth, others, rebuilt) for name in claim.block_outputs], [truth]


def _made(original: Side, claim: Claim, seed: int) -> list[Feeds]:
    """Inputs for a block in a control-flow body, whose real inputs cannot be observed; none if it needs shapes too."""
    if claim.width is None or set(needs(original, claim)) != set(claim.block_inputs):
        return []
    rng = np.random.default_rng(seed)
    made = {}
    for name in claim.block_inputs:
        kind = original.views[claim.path].type_of(name)
        lead = (2, *(1,) * ((kind.rank or 2) - 3)) if (kind.rank or 2) > 2 else ()
        values = rng.normal(0.0, 1.0, (*lead, 19, claim.width))
        made[name] = values.astype(_dtype(kind.elem_type or claim.elem_type))
    return [made]


def _dtype(elem_type: int) -> np.dtype[np.generic]:
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem_type))


# -- inputs of other sizes -----------------------------------------------------------------------------------------

_BATCH, _TOKENS, _MANY, _LONG = 2, 67, 6, 131
_SMALL = 19
_MOST_SLOTS = 4096  # attention patterns grow with the square of the sequence


def spread(claim: Claim, inputs: Sequence[Feeds]) -> list[Case]:
    """Inputs of other sizes than the real ones; none if the block also reads shapes or has no token axis."""
    first = next(iter(inputs), {})
    if set(first) != set(claim.block_inputs):
        return []
    if any(not is_float(value.dtype) or value.ndim < max(2, -claim.axis) for value in first.values()):
        return []
    if not all(sum(feeds[name].size for feeds in inputs) for name in first):
        return []
    limit = claim.longest or _LONG
    sizes = [(_BATCH, min(_TOKENS, limit)), (_MANY, min(_SMALL, limit)), (1, min(_LONG, limit))]
    return [_case(claim, inputs, *size) for size in dict.fromkeys(sizes)]


def longest(claim: Claim, cases: Sequence[Case]) -> list[Case]:
    """One sequence as long as the block has position slots."""
    if not cases or set(cases[0].feeds) != set(claim.block_inputs):
        return []
    if claim.longest is None or claim.longest > _MOST_SLOTS:
        return []
    return [_case(claim, [case.feeds for case in cases], 1, claim.longest)]


def _case(claim: Claim, inputs: Sequence[Feeds], batch: int, tokens: int) -> Case:
    return Case(f"batch {batch}, {tokens} tokens", _drawn(claim, inputs, batch, tokens))


def _drawn(claim: Claim, inputs: Sequence[Feeds], batch: int, tokens: int) -> Feeds:
    rng = np.random.default_rng(batch * tokens)
    drawn = {}
    for name, like in next(iter(inputs)).items():
        width = like.shape[claim.axis]
        rows = np.concatenate([np.moveaxis(feeds[name], claim.axis, -1).reshape(-1, width) for feeds in inputs])
        lead = (batch, *(1,) * (like.ndim - 3), tokens) if like.ndim > 2 else (tokens,)
        chosen = rows[rng.integers(0, len(rows), int(np.prod(lead)))].astype(np.float64)
        scaled = chosen * rng.uniform(0.5, 1.5, (len(chosen), 1))
        drawn[name] = np.moveaxis(scaled.astype(rows.dtype).reshape(*lead, width), -1, claim.axis)
    return drawn


def sizes_of(claim: Claim, case: Case) -> tuple[int, ...]:
    """The sizes of a case but for the channels: batch and tokens, or batch, height and width."""
    shape = list(case.feeds[claim.block_inputs[0]].shape)
    if len(shape) >= -claim.axis:
        del shape[claim.axis]
    return tuple(shape)

"""Test one block that is not certified: cut out of both models, run on inputs of many sizes, judged by the rule.

This is no proof, and reports call such a block *tested*, with the sizes that were run. From the values that the block
receives in the model, inputs of other batches and lengths are drawn, each row scaled at random, so that mixed-up
tokens, batches or neurons show; then all are scaled, from 1e-6 to 1e3, so that pre-activations and values reach every
part of the activation. Both blocks are run in the model's own type, and evaluated in float64, where errors far below
its rounding show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx

from rewriter.arrays import Array
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.extract import cut
from rewriter.ort.sessions import open_session
from rewriter.proof.claims import Claim, Side
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.roles import is_float
from rewriter.proof.nudge import DRAWS, Point, feeds, nudged
from rewriter.proof.reference.float64 import NoReference, open_reference
from rewriter.proof.rule import Judgement, Results, compared, magnitude
from rewriter.proof.run import Way, open_model
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
    try:
        return _tested(original, rewritten, claim, list(seen) or _made(original, claim, seed), ways)
    except ValidationError as error:
        return BlockTest(claim.name, (), None, None, (f"{claim.name} could not be tested: {error}",))


def _tested(original: Side, rewritten: Side, claim: Claim, seen: Sequence[Feeds], ways: Sequence[Way]) -> BlockTest:
    if not seen:
        raise ValidationError("it reads shapes that are made elsewhere, so no inputs can be made for it")
    names, outputs = tuple(seen[0]), claim.block_outputs
    ours, theirs = (cut(side.views[claim.path], names, outputs).inputs for side in (original, rewritten))
    foreign = next((name for name in theirs if name not in ours), None)
    if foreign is not None:
        # It cannot be fed the original's values; and a leak is a fault however close its numbers come.
        raise ValidationError(f"its heads read {quoted(foreign)}, which the original's block does not")
    before, after = (side.part(claim, names, outputs) for side in (original, rewritten))
    if claim.output not in {name for node in before.proto.graph.node for name in node.output}:
        raise ValidationError("its activation is not part of it")
    cases, plain = _accepted(claim, original.part(claim, names, [*outputs, claim.gate]), seen)
    point = Point(claim.output, (), claim.elem_type, claim.max_error, claim.gate, claim.value if claim.gated else "")
    advice = "; keep its product in the graph with --gate product, or leave it with --skip" if claim.gated else ""
    failures: list[str] = []

    def judge(plain: Results, cases: Sequence[Case], ways: Sequence[Way], where: str) -> None:
        fed = [Case(case.name, wanted(case.feeds, before)) for case in cases]
        own = rounded(before, fed, plain, ways[0].provider, [point])
        for way in ways:
            found = _run(after, way, cases)
            judged = (compared(name, plain, own, found) for name in outputs)
            failures.extend(
                f"{claim.name}: its output {each.reason} {where or f'on {way}'}{advice}"
                for each in judged
                if not each.holds
            )

    judge(plain, cases, ways, "")
    for case in longest(claim, cases):
        try:
            own = _run(before, ways[0], [case])
        except ValidationError:
            continue  # a static shape fixes the sizes
        judge(own, [case], ways[:1], f"on {claim.longest} tokens")
    exact = _in_float64(claim, before, after, point, cases)
    failures += [f"{claim.name}: in float64 its output {each.reason}" for each in exact if not each.holds]
    return BlockTest(
        claim.name,
        tuple(dict.fromkeys("x".join(map(str, sizes_of(claim, case))) for case in cases)),
        max((each.error for each in exact), default=None),
        max((each.allowed for each in exact), default=None),
        tuple(dict.fromkeys(failures)),
    )


def _accepted(claim: Claim, before: LoadedModel, seen: Sequence[Feeds]) -> tuple[list[Case], Results]:
    """The cases that the original's block accepts (a static shape may fix sizes), within the domain; its results."""
    drawn = [Case(f"seen {number}", each) for number, each in enumerate(seen)]
    drawn += spread(claim, seen)
    cases = [_scaled(case, claim, scale) for scale in SCALES for case in drawn]
    session = open_model(before, "cpu", optimise=False, prepack=False)
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


def wanted(values: Feeds, part: LoadedModel) -> dict[str, Array]:
    """Those of the values that a part reads."""
    names = {value.name for value in part.proto.graph.input}
    return {name: value for name, value in values.items() if name in names}


def _run(part: LoadedModel, way: Way, cases: Sequence[Case]) -> Results:
    session = open_model(part, way.provider, optimise=way.optimise)
    return [session.run(wanted(case.feeds, part)) for case in cases]


def rounded(
    model: LoadedModel, cases: Sequence[Case], plain: Results, provider: str, points: Sequence[Point]
) -> list[Results]:
    """Results of a model, or of a part of one, that differ from `plain` by rounding alone.

    With graph optimisation; with noise, draw by draw; and in float64, but for outputs where an operator decides
    something by rounding, which makes another function of it there. What does not run in some way says nothing.

    Args:
        model: the model; a part of one may begin behind the argument of an activation, or behind the value of a gate.
        cases: exactly what it reads.
        plain: its results without optimisation.
        provider: execution provider.
        points: where noise is added.
    """

    def runs(proto: onnx.ModelProto, further: Feeds, *, optimise: bool) -> list[Results]:
        with suppress(ValidationError):
            session = open_session(proto, provider, optimise=optimise, base_dir=model.base_dir)
            return [[session.run({**case.feeds, **further}, list(plain[0])) for case in cases]]
        return []

    found = runs(model.proto, {}, optimise=True)
    noisy, prefix = nudged(model.proto, points)
    for draw in DRAWS if prefix else ():
        found += runs(noisy, feeds(noisy, prefix, draw), optimise=False)
    with suppress(NoReference):
        reference = open_reference(model.proto, model.base_dir)
        exact = [reference.run(case.feeds) for case in cases]
        near = {name for name in plain[0] if _only_rounds(name, plain, exact)}
        found.append([{**own, **{name: each[name] for name in near}} for own, each in zip(plain, exact, strict=True)])
    return found


def _only_rounds(name: str, plain: Results, exact: Results) -> bool:
    dtype = plain[0][name].dtype
    if not is_float(dtype):
        return False
    moved = compared(name, plain, [], [{name: each[name].astype(dtype)} for each in exact])
    return moved.error < math.sqrt(float(ml_dtypes.finfo(dtype).eps))


def _in_float64(
    claim: Claim, before: LoadedModel, after: LoadedModel, point: Point, cases: Sequence[Case]
) -> list[Judgement]:
    """The rule on float64 evaluations, where what is claimed counts as noise; nothing if there are none."""
    error = claim.max_error + (_UNSTABLE if claim.unstable else _STEADY)
    noisy, prefix = nudged(before.proto, [replace(point, error=error, elem_type=onnx.TensorProto.DOUBLE)])
    try:
        reference, moved = (open_reference(proto, before.base_dir) for proto in (before.proto, noisy))
        heads = open_reference(after.proto, after.base_dir)
        fed = [wanted(case.feeds, before) for case in cases]
        truth = [reference.run(each) for each in fed]
        rebuilt = [heads.run(wanted(case.feeds, after)) for case in cases]
        draws = [feeds(noisy, prefix, draw) for draw in DRAWS if prefix]
        others = [[moved.run({**each, **draw}) for each in fed] for draw in draws]
    except NoReference:
        return []
    return [compared(name, truth, others, rebuilt) for name in claim.block_outputs]


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
        made[name] = values.astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type or claim.elem_type))
    return [made]


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
    return [_drawn(claim, inputs, *size) for size in dict.fromkeys(sizes)]


def longest(claim: Claim, cases: Sequence[Case]) -> list[Case]:
    """One sequence as long as the block has position slots."""
    if not cases or set(cases[0].feeds) != set(claim.block_inputs):
        return []
    if claim.longest is None or claim.longest > _MOST_SLOTS:
        return []
    return [_drawn(claim, [case.feeds for case in cases], 1, claim.longest)]


def _drawn(claim: Claim, inputs: Sequence[Feeds], batch: int, tokens: int) -> Case:
    rng = np.random.default_rng(batch * tokens)
    drawn = {}
    for name, like in inputs[0].items():
        width = like.shape[claim.axis]
        rows = np.concatenate([np.moveaxis(feeds[name], claim.axis, -1).reshape(-1, width) for feeds in inputs])
        lead = (batch, *(1,) * (like.ndim - 3), tokens) if like.ndim > 2 else (tokens,)
        chosen = rows[rng.integers(0, len(rows), int(np.prod(lead)))].astype(np.float64)
        scaled = chosen * rng.uniform(0.5, 1.5, (len(chosen), 1))
        drawn[name] = np.moveaxis(scaled.astype(rows.dtype).reshape(*lead, width), -1, claim.axis)
    return Case(f"batch {batch}, {tokens} tokens", drawn)


def sizes_of(claim: Claim, case: Case) -> tuple[int, ...]:
    """The sizes of a case but for the channels: batch and tokens, or batch, height and width."""
    shape = list(case.feeds[claim.block_inputs[0]].shape)
    if len(shape) >= -claim.axis:
        del shape[claim.axis]
    return tuple(shape)

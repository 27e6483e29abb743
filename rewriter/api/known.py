"""Finds the MLP blocks of model A and those of them that are attention heads in model B.

B's description of itself is not trusted: its metadata only say which blocks to look for, and which of them were
replaced as a whole. The effect of certified errors is computed from A, with the coefficients that this tool plans for
those blocks; no emitted node takes part.

The forms have different programs, and B need not say which it has. So each block is planned for A in every form, and
what B's heads compute in float64 picks the program that they are held to. If they compute none of them, the first
counts, and they fail. Whatever is picked, this tool chose the program and certified it for A.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

import onnx

from passes.conversion import Conversion
from passes.fit.unnamed import domains_of
from passes.match.blocks import Block
from passes.match.marks import has_projections, made_for, program_of
from passes.options import Options
from passes.plan import Plan, alternatives, apply, make_plan
from rewriter.api.rows import claim_of
from rewriter.api.run import checked_options
from rewriter.compare.boundaries import Landmark
from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.proof.blocks.activation import apart, regions_of
from rewriter.proof.claims import Claim, Side
from rewriter.proof.planned import planned_side, shaken

Measure = Callable[[LoadedModel, Sequence[str]], Mapping[str, float]]
"""[A, tensors] The largest |entry| of each tensor on the inputs of the comparison."""


_CLEARLY = 0.25
"""Heads this close to a program, in units of its certified error, compute no other one."""


@dataclass(frozen=True)
class Known:
    """The blocks of a pair of models.

    Attributes:
        a: A, or its lowered form if B was made from it: the form whose tensors name the blocks.
        b: B.
        landmarks: A's blocks.
        claims: the claims about the blocks that are heads in B and can be tested there.
        programs: block name to head program, for all blocks that are heads in B.
        unknown: blocks that are heads in B according to its metadata, but that A does not have.
        unfitted: blocks whose program was fitted, but on a domain or with an accuracy that this tool would not choose.
            Nothing is allowed for their errors.
        whole: the blocks that heads with projections of their own replace in B, linear operators included.
        made: the claims about all blocks that are heads in B, including those that cannot be tested there.
        _plan: this tool's plan for A, restricted to those blocks.
    """

    a: Side
    b: Side
    landmarks: tuple[Landmark, ...]
    claims: tuple[Claim, ...]
    programs: Mapping[str, str]
    unknown: tuple[str, ...]
    unfitted: tuple[str, ...]
    whole: frozenset[str]
    made: tuple[Claim, ...]
    _plan: Plan

    @cached_property
    def planned(self) -> tuple[Side, ...]:
        """A with its activations as planned, in float64; if a program is unstable, also a shaken copy.

        Empty if all programs are exact.
        """
        if not any(claim.max_error > 0.0 for claim in self.made):
            return ()
        side = planned_side(self.a, self.made)
        return (side, shaken(side)) if any(claim.unstable for claim in self.made) else (side,)

    @cached_property
    def expected(self) -> Side | None:
        """A with the heads that this tool writes, to compare those in B with; None if B has none."""
        return Side.of(replace(self.a.model, proto=apply(self._plan), path=None)) if self.made else None


def know(a: LoadedModel, b: LoadedModel, measure: Measure) -> Known:
    """Find A's blocks, and those of them that are heads in B; `measure` is called only for activations to be fitted."""
    programs = _programs(b.proto)
    whole = frozenset(replaces_whole(b.proto))
    theirs = Side.of(b)
    found = _found(a, theirs, checked_options(), programs, whole, measure)
    if not found.holds and any(each.block.gate != each.block.value for each in found.plan.conversions):
        other = _found(a, theirs, checked_options(gate="product"), programs, whole, measure)
        # Blocks that B does not hold as that plan has them say nothing for it.
        found = other if other.holds and other.tried >= found.tried else found
    plan, side = found.plan, found.a
    known = {block.name for block in found.blocks}
    landmarks = [_landmark(block, programs.get(block.name)) for block in found.blocks if not block.path]
    claims = [claim_of(each) for each in plan.conversions]
    return Known(
        a=side,
        b=theirs,
        landmarks=tuple(mark for mark in landmarks if _stands_in(mark, side)),
        claims=tuple(claim for claim in claims if _can_be_tried(claim, side, theirs)),
        programs={each.block.name: programs[each.block.name] for each in plan.conversions},
        whole=whole,
        unknown=tuple(name for name in programs if name not in known),
        unfitted=found.unfitted,
        made=tuple(claims),
        _plan=plan,
    )


@dataclass(frozen=True)
class _Found:
    """The heads of B, as this tool plans them for A.

    Attributes:
        a: A, or its lowered form.
        plan: the plan, restricted to the blocks that are heads in B, with the programs that B's heads compute.
        blocks: all blocks of A.
        tried: the blocks whose heads can be tested alone.
        holds: whether these heads compute what is planned.
        unfitted: as in `Known`.
    """

    a: Side
    plan: Plan
    blocks: tuple[Block, ...]
    tried: frozenset[str]
    holds: bool
    unfitted: tuple[str, ...]


def _found(
    a: LoadedModel, b: Side, options: Options, programs: Mapping[str, str], whole: frozenset[str], measure: Measure
) -> _Found:
    plan = make_plan(a.proto, options)
    fitted = {block.name: block.gate for block in plan.undetermined if block.name in programs}
    reached: Mapping[str, float] = {}
    if fitted:
        reached = measure(replace(a, proto=plan.model, path=None), tuple(fitted.values()))
        options = replace(options, accuracy=replace(options.accuracy, reached=reached))
        plan = make_plan(a.proto, options)
    made = tuple(each for each in plan.conversions if each.block.name in programs)
    side = Side.of(replace(a, proto=plan.model, path=None) if made and plan.model is not a.proto else a)
    chosen, holds = list[Conversion](), True
    for conversion in made:
        name = conversion.block.name
        domains = domains_of(reached[fitted[name]]) if name in fitted else (None,)
        settings = [replace(options, accuracy=replace(options.accuracy, domain=domain)) for domain in domains]
        found = (_picked(side, b, conversion, alternatives(plan, conversion, each), whole) for each in settings)
        picked = next((each for each in found if each is not None), None)
        if picked is not None or name not in fitted:
            chosen.append(picked or conversion)
            holds = holds and picked is not None
    blocks = [each.block for each in plan.conversions] + [left.block for left in plan.left if left.block is not None]
    names = {each.block.name for each in chosen}
    return _Found(
        a=side,
        plan=replace(plan, conversions=tuple(chosen)),
        blocks=tuple(blocks),
        tried=frozenset(each.block.name for each in made if _can_be_tried(claim_of(each), side, b)),
        holds=holds,
        unfitted=tuple(name for name in fitted if name not in names),
    )


def _picked(
    a: Side, b: Side, default: Conversion, every: Iterator[Conversion], whole: frozenset[str]
) -> Conversion | None:
    """The conversion whose program B's heads compute in float64; None if there is none.

    Heads that cannot be tested alone get the program of the forms that replace whole blocks if they did that, and
    otherwise the default.
    """
    if not _can_be_tried(claim_of(default), a, b):
        replaced = default.block.name in whole
        return next((each for each in every if (each.projections is not None) == replaced), default)
    closest, least = None, float("inf")
    for each in every:
        distance = _apart(claim_of(each), a, b)
        if distance < least:
            closest, least = each, distance
        # Programs in float64 may be so accurate that rounding explains what they differ by; others are told apart, and
        # none is stricter than an exact one.
        if distance <= _CLEARLY * each.max_error or (each.program.exact and isfinite(distance)):
            break
    return closest


def _apart(claim: Claim, a: Side, b: Side) -> float:
    try:
        return apart(regions_of(a, b, claim), claim)
    except ValidationError:
        return float("inf")


def _programs(model: onnx.ModelProto) -> dict[str, str]:
    """The blocks that an earlier run converted, bodies of control flow included: name to program, in graph order."""
    from rewriter.files.walk import iter_nodes

    programs: dict[str, str] = {}
    for node in iter_nodes(model.graph.node):
        name = made_for(node)
        if name is not None:
            programs.setdefault(name, program_of(node) or "unnamed")
    return programs


def replaces_whole(model: onnx.ModelProto) -> Iterator[str]:
    """The blocks whose linear operators became projections of the heads, by the metadata of their nodes."""
    from rewriter.files.walk import iter_nodes

    for node in iter_nodes(model.graph.node):
        if has_projections(node):
            yield made_for(node) or ""


def _landmark(block: Block, program: str | None) -> Landmark:
    return Landmark(
        name=block.name,
        inputs=tuple(dict.fromkeys(operator.data for operator in block.first)),
        outputs=tuple(operator.output for operator in block.second) or (block.output,),
        starts=tuple(dict.fromkeys((block.gate, block.value))),
        end=block.output,
        program=program,
    )


def _stands_in(mark: Landmark, a: Side) -> bool:
    return all(name in a.main.producer for name in (*mark.outputs, *mark.starts, mark.end))


def _can_be_tried(claim: Claim, a: Side, b: Side) -> bool:
    """Whether both models have the tensors that a claim names: another tool may have renamed them in B."""
    views = [side.views.get(claim.path) for side in (a, b)]
    names = [name for name in claim.inputs if views[0] is not None and name in views[0].producer]
    return all(view is not None and claim.output in view.producer for view in views) and all(
        name in view.producer for view in views if view is not None for name in names
    )

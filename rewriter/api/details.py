"""What the HTML page shows of a plan: head programs as curves, the head counts as rows.

`Details` holds plain numbers, which `rewriter.report.html` draws. The programs are evaluated in float64 with the
coefficients in the graph, so a drawn error is that of exact arithmetic up to float64's own rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from passes.accounting import BlockAccount, account
from passes.conversion import Conversion
from passes.plan import Plan
from passes.programs.head import Head
from passes.programs.program import Program
from rewriter.report.details import Curve, Details, Drawing, DrawnHead, HeadCount, Key

Array = NDArray[np.float64]

_POINTS = 161
_REACH = 6.0
"""Largest |y| at which activations are drawn: beyond it they are straight lines."""

_STEEP = 64.0
"""From this slope of a logit difference upwards, a head looks like a step on |y| <= `_REACH` and is drawn closer up."""

_NEAR = 12.0
"""Largest logit difference in the drawing of a steep head; the smaller weight is 6e-6 there."""


def details_of(plan: Plan) -> Details:
    """Draw the programs of a plan and count its heads."""
    accounting = account(plan)
    return Details(
        drawings=_drawings(plan.conversions),
        counts=tuple(_count(block) for block in accounting.blocks),
        share=accounting.share,
        head_dimension=accounting.head_dimension,
        attention_heads=accounting.attention_heads,
        remaining=", ".join(f"{count} {name}" for name, count in accounting.remaining.items()),
    )


def _count(block: BlockAccount) -> HeadCount:
    return HeadCount(**{field.name: getattr(block, field.name) for field in fields(HeadCount)})


def _drawings(conversions: Iterable[Conversion]) -> tuple[Drawing, ...]:
    """One drawing per program and activation."""
    groups: dict[tuple[Program, str], list[Conversion]] = {}
    for conversion in conversions:
        groups.setdefault((conversion.program, conversion.block.identified.label), []).append(conversion)
    return tuple(_drawing(group) for group in groups.values())


def _drawing(group: Sequence[Conversion]) -> Drawing:
    first = group[0]
    program, identified = first.program, first.block.identified
    points = np.linspace(-_REACH, _REACH, _POINTS)
    near = points * min(1.0, _near(program) / _REACH)
    # A gate's program multiplies the other projection u; with u = 1 it is the gate itself.
    ones = None if identified.gated is None else np.ones(_POINTS)

    def target(y: Array) -> Array:
        return identified.activation.function(y, identified.parameters)

    return Drawing(
        program=program.name,
        activation=identified.label,
        blocks=len(group),
        example=first.block.name,
        exact=program.exact,
        certified=max(conversion.max_error for conversion in group),
        points=_plain(points),
        target=Curve("activation", _plain(target(points))),
        values=Curve("heads", _plain(program.evaluate(points, ones))),
        near=_plain(near),
        error=Curve("heads minus activation", _plain(_error(program.evaluate(near, ones), target(near)))),
        count=len(program.attention),
        tokens=program.bias_tokens,
        heads=_drawn_heads(program, near, "y" if ones is None else "u"),
        measured=program.measured,
    )


def _error(values: Array, target: Array) -> Array:
    """The signed error over max(1, |f|), the quantity that certified errors bound."""
    return np.asarray((values - target) / np.maximum(1.0, np.abs(target)))


def _near(program: Program) -> float:
    """Largest |y| at which the attention weights still change visibly."""
    slopes = (abs(head.beta - token.slope) for head in program.heads for token in head.bias_tokens)
    steepest = max(slopes, default=0.0)
    return _NEAR / steepest if steepest > _STEEP else _REACH


def _drawn_heads(program: Program, points: Array, source: str) -> tuple[DrawnHead, ...]:
    """The heads of a program; those over the same equally spaced keys, and those of a line alone, as one."""
    if program.powers is not None:
        first, *others = program.heads
        multiples = {head.beta: head.c for head in (first, *others)}
        rows = [(slope, offset, multiples.get(slope, 0.0)) for slope, offset in sorted(first.logits)]
    elif program.line is not None and not program.heads:
        rows = [(slope, offset, program.linear * value) for slope, offset, value in sorted(program.line.keys)]
    else:
        # The self values of a gate's program read the line.
        own = source if program.line is None else f"line(y) {source}"
        return tuple(_drawn_head(head, points, own) for head in program.heads)
    read = source if program.line is None or not program.heads else f"line(y) {source}"
    keys = [
        Key(f"key {number}", (0.0, slope, offset), f"{value:.6g} {read}" if value else "0")
        for number, (slope, offset, value) in enumerate(rows, start=1)
    ]
    return (_drawn(keys, points, shared=True),)


def _drawn_head(head: Head, points: Array, source: str) -> DrawnHead:
    keys = [Key("self", (head.alpha, head.beta, head.gamma), _self_value(head, source))]
    for number, token in enumerate(head.bias_tokens, start=1):
        name = "bias token" if len(head.bias_tokens) == 1 else f"bias token {number}"
        keys.append(Key(name, (0.0, token.slope, token.offset), f"{token.value:.6g}"))
    return _drawn(keys, points)


def _drawn(keys: Sequence[Key], points: Array, *, shared: bool = False) -> DrawnHead:
    """Keys with their softmax weights."""
    logits = np.stack([(a * points + b) * points + c for a, b, c in (key.logit for key in keys)])
    weights = np.exp(logits - logits.max(axis=0))
    weights /= weights.sum(axis=0)
    curves = tuple(Curve(key.label, _plain(row)) for key, row in zip(keys, weights, strict=True))
    return DrawnHead(tuple(keys), curves, shared)


def _self_value(head: Head, source: str) -> str:
    """`y`, `2 y`, `y + 1` or a number; in a gated block with `u` in place of `y`."""
    factor = "" if head.c == 1.0 else f"{head.c:.6g} "
    if head.c == 0.0:
        return f"{head.d:.6g}"
    return f"{factor}{source}" if head.d == 0.0 else f"{factor}{source} {'+' if head.d > 0 else '-'} {abs(head.d):.6g}"


def _plain(values: Array) -> tuple[float, ...]:
    return tuple(map(float, values))

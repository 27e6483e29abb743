"""What the HTML page shows of a plan: head programs as keys with their coefficients, the head counts as rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from passes.accounting import BlockAccount, account
from passes.conversion import Conversion
from passes.plan import Plan
from passes.programs.head import Head
from passes.programs.program import Program
from rewriter.report.details import Details, HeadCount, Key, ProgramDetails


def details_of(plan: Plan) -> Details:
    """The programs of a plan, and its heads counted."""
    accounting = account(plan)
    return Details(
        programs=_programs(plan.conversions),
        counts=tuple(_count(block) for block in accounting.blocks),
        share=accounting.share,
        head_dimension=accounting.head_dimension,
        attention_heads=accounting.attention_heads,
        remaining=", ".join(f"{count} {name}" for name, count in accounting.remaining.items()),
    )


def _count(block: BlockAccount) -> HeadCount:
    return HeadCount(**{field.name: getattr(block, field.name) for field in fields(HeadCount)})


def _programs(conversions: Iterable[Conversion]) -> tuple[ProgramDetails, ...]:
    """One entry per program and activation."""
    groups: dict[tuple[Program, str], list[Conversion]] = {}
    for conversion in conversions:
        groups.setdefault((conversion.program, conversion.block.identified.label), []).append(conversion)
    return tuple(
        ProgramDetails(
            program=program.name,
            activation=activation,
            blocks=len(group),
            certified=max(conversion.max_error for conversion in group),
            measured=program.measured,
            count=len(program.attention),
            tokens=program.bias_tokens,
            heads=_heads(program, "y" if group[0].block.identified.gated is None else "u"),
        )
        for (program, activation), group in groups.items()
    )


def _heads(program: Program, source: str) -> tuple[tuple[Key, ...], ...]:
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
        return tuple(_head(head, own) for head in program.heads)
    read = source if program.line is None or not program.heads else f"line(y) {source}"
    shared = (
        Key(f"key {number}", (slope, offset), f"{value:.6g} {read}" if value else "0")
        for number, (slope, offset, value) in enumerate(rows, start=1)
    )
    return (tuple(shared),)


def _head(head: Head, source: str) -> tuple[Key, ...]:
    keys = [Key("self", (head.beta, head.gamma), _self_value(head, source))]
    for number, token in enumerate(head.bias_tokens, start=1):
        name = "bias token" if len(head.bias_tokens) == 1 else f"bias token {number}"
        keys.append(Key(name, (token.slope, token.offset), f"{token.value:.6g}"))
    return tuple(keys)


def _self_value(head: Head, source: str) -> str:
    """`y`, `2 y`, `y + 1` or a number; in a gated block with `u` in place of `y`."""
    factor = "" if head.c == 1.0 else f"{head.c:.6g} "
    if head.c == 0.0:
        return f"{head.d:.6g}"
    return f"{factor}{source}" if head.d == 0.0 else f"{factor}{source} {'+' if head.d > 0 else '-'} {abs(head.d):.6g}"

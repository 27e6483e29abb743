"""A plan of `passes` in the engine's own terms, which report and proof see: `BlockRow`, `Shape` and `Claim`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from math import inf, isfinite

import onnx

from passes.conversion import Conversion
from passes.match.blocks import Left, kinds
from passes.plan import Plan
from rewriter.errors import ExitStatus
from rewriter.files.load import LoadedModel
from rewriter.graph.view import operator_of
from rewriter.graph.walk import iter_nodes
from rewriter.options import values_of
from rewriter.proof.records import Claim, Claimed
from rewriter.report.report import BlockRow, Report, Shape
from rewriter.text import counted, first_of


def planned_report(name: str, source: LoadedModel, plan: Plan) -> Report:
    """The report after planning; `name` is the model's path as the caller gave it."""
    return Report(
        model=name,
        output="",
        form=plan.options.form,
        blocks=(*map(_converted, plan.conversions), *map(_left, plan.left)),
        before=shape_of(source.proto, source.size),
        made=None,
        proof=None,
        seconds={},
        notes=(*source.notes, *plan.notes),
        exit_status=ExitStatus.CONVERTED if plan.conversions else ExitStatus.NOTHING_TO_CONVERT,
        options=values_of(plan.options),
    )


def domain_notes(plan: Plan, *, run: bool) -> tuple[str, ...]:
    """A note on blocks whose heads are valid up to some pre-activation, which an input may exceed."""
    domains = {each.block.name: each.program.domain for each in plan.conversions if isfinite(each.program.domain)}
    where = "is checked only on the inputs of the run" if run else "is not checked, since nothing was run"
    note = (
        f"the heads of {counted(len(domains), 'block')} ({first_of(list(domains))}) hold for |pre-activation| up to "
        f"{min(domains.values(), default=0.0):.3g}; that the model stays there {where}"
    )
    return (note,) if domains else ()


def claim_of(conversion: Conversion, accuracy: float | None = None, added: Collection[str] = ()) -> Claim:
    """The claim about one block; `accuracy` is the error that the user asked for, `added` are outputs of the model."""
    block, whole = conversion.block, conversion.projections
    held = held_by(conversion, accuracy)
    return Claim(
        name=block.name,
        path=block.path,
        output=block.output,
        reads=held.leaves if whole is None else (whole.query.data,),
        makes=(block.output,) if whole is None else (whole.result, *whole.shapes),
        held=held,
        elem_type=block.coarsest,
        exposed=tuple(sorted(name for name in added if name.startswith(f"{block.name}/heads/"))),
    )


def held_by(conversion: Conversion, accuracy: float | None, narrowest: float = 0.0) -> Claimed:
    """What the heads of a block are held to, on a domain of at least `narrowest`."""
    block, domain = conversion.block, conversion.program.domain
    leaves = tuple(dict.fromkeys((block.gate, block.value)))
    known = domain if narrowest <= domain < inf else None
    return Claimed(conversion.max_error, known, leaves, accuracy or 0.0)


def longest_of(conversions: Iterable[Conversion]) -> int | None:
    """The longest sequence that all blocks accept; None for any."""
    return min((each.longest for each in conversions if each.longest), default=None)


def _converted(conversion: Conversion) -> BlockRow:
    """The row of a block that is converted."""
    block, program = conversion.block, conversion.program
    return BlockRow(
        name=block.name,
        status="converted",
        activation=block.identified.label,
        first=kinds(block.first),
        second=kinds(block.second),
        program=program.name,
        exact=program.max_error == 0.0,
        heads=conversion.heads,
        bias_tokens=program.bias_tokens,
        experts=next((operator.experts for operator in block.first if operator.experts), None),
        type=onnx.helper.tensor_dtype_to_np_dtype(block.coarsest).name,
        max_error=conversion.max_error,
        measured=program.measured,
        domain=program.domain if isfinite(program.domain) else None,
        part_of=block.part_of,
    )


def _left(left: Left) -> BlockRow:
    about = (left.activation, left.first, left.second)
    return BlockRow(left.name, "left", *about, reason=left.miss.reason, node=left.miss.node)


def shape_of(model: onnx.ModelProto, size: int) -> Shape:
    """Operator counts over the main graph and the bodies of control flow, and the size on disk."""
    operators = Counter(map(operator_of, iter_nodes(model.graph.node)))
    return Shape(dict(sorted(operators.items())), operators.total(), size)

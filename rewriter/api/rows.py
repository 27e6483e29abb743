"""A plan of `passes` in the engine's own terms, which report and proof see: `BlockRow`, `Shape` and `Claim`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

import onnx

from passes.conversion import Conversion
from passes.match.blocks import Left, kinds
from passes.options import Options
from passes.plan import Plan
from rewriter.errors import ExitStatus
from rewriter.files.load import LoadedModel
from rewriter.graph.view import operator_of
from rewriter.graph.walk import iter_nodes
from rewriter.options import values_of
from rewriter.proof.claims import Claim
from rewriter.report.report import BlockRow, Report, Shape
from rewriter.text import counted, first_of


def planned_report(name: str, source: LoadedModel, plan: Plan, options: Options) -> Report:
    """The report after planning; `name` is the model's path as the caller gave it."""
    return Report(
        model=name,
        output="",
        form=options.form,
        blocks=(*map(_converted, plan.conversions), *map(_left, plan.left)),
        before=shape_of(source.proto, source.size),
        made=None,
        proof=None,
        seconds={},
        notes=(*source.notes, *plan.notes),
        exit_status=ExitStatus.CONVERTED if plan.conversions else ExitStatus.NOTHING_TO_CONVERT,
        options=values_of(options),
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


def claims_of(plan: Plan, accuracy: float | None, added: Sequence[str]) -> tuple[Claim, ...]:
    """The claims of a plan; `accuracy` is the error that the user asked for, `added` are outputs for its heads."""
    whole = [each for each in plan.conversions if each.projections is not None]
    gone = {each.block.output for each in whole} - {name for each in whole for name in each.inputs}
    claims = (claim_of(each, accuracy, added) for each in plan.conversions)
    # A first operator that is also the last one of a whole block reads a tensor that no longer exists.
    return tuple(
        replace(claim, block_inputs=claim.inputs) if gone.intersection(claim.block_inputs) else claim
        for claim in claims
    )


def claim_of(conversion: Conversion, accuracy: float | None = None, added: Sequence[str] = ()) -> Claim:
    """The claim of a conversion about its block."""
    block = conversion.block
    return Claim(
        name=block.name,
        inputs=tuple(dict.fromkeys((block.gate, block.value))),
        output=block.output,
        elem_type=block.coarsest,
        path=block.path,
        block_inputs=conversion.inputs,
        block_outputs=conversion.outputs,
        max_error=conversion.max_error,
        domain=conversion.program.domain,
        heads=conversion.heads_tensor,
        shapes=() if conversion.projections is None else conversion.projections.shapes,
        longest=conversion.longest,
        accuracy=accuracy or 0.0,
        exposed=tuple(sorted(name for name in added if name.startswith(f"{block.name}/heads/"))),
    )


def _converted(conversion: Conversion) -> BlockRow:
    block, program = conversion.block, conversion.program
    return BlockRow(
        name=block.name,
        status="converted",
        activation=block.identified.label,
        first=kinds(block.first),
        second=kinds(block.second),
        program=program.name,
        exact=program.exact,
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

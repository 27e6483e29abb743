"""A plan of `passes` in the engine's own terms, which report and proof see; and `inspect`, which stops there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import Any

import onnx

from passes.accounting import DEFAULT_TOKENS, Accounting, account
from passes.conversion import Conversion
from passes.match.blocks import kinds
from passes.plan import Plan, make_plan
from rewriter.api.run import Run, checked_options, name_of
from rewriter.errors import ExitStatus
from rewriter.files.load import LoadedModel, Source, load_model, read_tensor
from rewriter.graph.view import operator_of
from rewriter.graph.walk import iter_nodes
from rewriter.options import values_of
from rewriter.proof.records import Claim, Claimed
from rewriter.report.report import BlockRow, Report, Result, Shape, plain_data
from rewriter.text import counted, first_of


@dataclass(frozen=True, repr=False)
class Inspection(Result):
    """What `inspect` found: true if some block can be converted."""

    report: Report
    accounting: Accounting

    @property
    def exit_status(self) -> ExitStatus:  # type: ignore[override]
        """0 if some block can be converted, 3 if none can."""
        return self.report.exit_status

    @property
    def summary(self) -> str:
        return self.report.summary

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data: that of the report, plus `accounting` and `purity`."""
        found = {"accounting": self.accounting, "purity": self.accounting.purity}
        return {**self.report.to_json(), **plain_data(found)}


def inspect(model: Source, *, scope: str = "mlp", gate: str = "heads", tokens: int = DEFAULT_TOKENS) -> Inspection:
    """Find the blocks of a model and account for them; write nothing.

    Args:
        model: path of an ONNX file, or a model in memory.
        scope: `mlp` or `all`, as for `rewrite`.
        gate: `heads` or `product`, as for `rewrite`.
        tokens: sequence length for which the costs of the forms are computed.

    Raises:
        UsageError: an option is invalid.
        ModelError: the model is unreadable, malformed or unsafe.
    """
    run = Run()
    with run.step("load", "loading"):
        source = load_model(model)
    options = checked_options({"scope": scope, "gate": gate})
    with run.step("plan", "finding the MLP blocks"):
        plan = make_plan(source.proto, options, partial(read_tensor, source))
    accounting = account(plan, tokens)
    return Inspection(run.finish(planned_report(name_of(model), source, plan)), accounting)


def planned_report(name: str, source: LoadedModel, plan: Plan) -> Report:
    """The report after planning; `name` is the model's path as the caller gave it."""
    about = ((each, (each.activation, each.first, each.second)) for each in plan.left)
    left = (BlockRow(x.name, "left", *of, reason=x.miss.reason, node=x.miss.node) for x, of in about)
    return Report(
        model=name,
        output="",
        form=plan.options.form,
        blocks=(*map(_converted, plan.conversions), *left),
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


def shape_of(model: onnx.ModelProto, size: int) -> Shape:
    """Operator counts over the main graph and the bodies of control flow, and the size on disk."""
    operators = Counter(map(operator_of, iter_nodes(model.graph.node)))
    return Shape(dict(sorted(operators.items())), operators.total(), size)

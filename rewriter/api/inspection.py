"""`inspect`: the blocks of a model, their size, and the nonlinearities that would remain; nothing is written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from passes.accounting import DEFAULT_TOKENS, Accounting, account
from passes.plan import make_plan
from rewriter.api.rows import planned_report
from rewriter.api.run import Run, checked_options, name_of
from rewriter.errors import ExitStatus
from rewriter.files.load import Source, load_model, read_tensor
from rewriter.report.report import Report, Result, plain_data


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

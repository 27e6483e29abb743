"""`inspect`: the blocks of a model, their size, and the nonlinearities that would remain; nothing is written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from passes.accounting import TOKENS, Accounting, account
from passes.plan import make_plan
from rewriter.api.rows import planned_report
from rewriter.api.run import Run, checked_options, name_of, silent
from rewriter.files.load import Source, load_model, read_tensor
from rewriter.report.report import Report, write_json


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        report: the report of a dry run.
        accounting: weights, heads, and the nonlinearities that would remain.
    """

    report: Report
    accounting: Accounting

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data: that of the report, plus `accounting` and `purity`."""
        return {**self.report.to_json(), "accounting": asdict(self.accounting), "purity": self.accounting.purity}

    def write(self, path: Path) -> None:
        """Write the JSON to `path`, atomically."""
        write_json(path, self.to_json())


def inspect(
    model: Source,
    *,
    scope: str = "mlp",
    gate: str = "heads",
    head_dimension: int | None = None,
    tokens: int = TOKENS,
) -> Inspection:
    """Find the blocks of a model and account for them; write nothing.

    Args:
        model: path of an ONNX file, or a model in memory.
        scope: `mlp` or `all`, as for `rewrite`.
        gate: `heads` or `product`, as for `rewrite`.
        head_dimension: d_head for the head accounting; default: that of the model's own attention.
        tokens: sequence length for which the costs of the forms are computed.

    Raises:
        UsageError: an option is invalid.
        ModelError: the model is unreadable, malformed or unsafe.
    """
    run = Run(silent)
    with run.step("load", "loading"):
        source = load_model(model)
    options = checked_options(scope=scope, gate=gate)
    with run.step("plan", "finding the MLP blocks"):
        plan = make_plan(source.proto, options, partial(read_tensor, source))
    accounting = account(plan, head_dimension, tokens)
    return Inspection(run.finish(planned_report(name_of(model), source, plan, options)), accounting)

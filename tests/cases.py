"""What tests do with a model: plan, run, rewrite and break it; models are written with `tests.textmodels`."""

from pathlib import Path
from typing import Any

import onnx
import pytest
from numpy.typing import NDArray

from passes.conversion import Conversion
from passes.options import Options
from passes.plan import Plan, make_plan
from rewriter import ExitStatus, Report, rewrite
from rewriter.api import rewriting
from rewriter.ort import open_session
from tests.changes import Change, copied


def planned(model: onnx.ModelProto, blocks: int = 1, **options: Any) -> Plan:
    """The plan for a model in which this many blocks are converted."""
    plan = make_plan(model, Options(**options))
    assert len(plan.conversions) == blocks, [left.miss.reason for left in plan.left]
    return plan


def result_of(conversion: Conversion) -> str:
    """The output of a block's second operator, or of its activation."""
    block, whole = conversion.block, conversion.projections
    return next((each.output for each in block.second), block.output) if whole is None else whole.result


def run(model: onnx.ModelProto, **feeds: Any) -> dict[str, NDArray[Any]]:
    """All outputs on the CPU, without graph optimisation."""
    return open_session(model, "cpu", optimise=False).run(feeds)


def proved(model: onnx.ModelProto, **options: Any) -> Report:
    """The report of a rewrite that leaves nothing and passes the proof."""
    report = rewrite(model, **options)
    assert report.exit_status is ExitStatus.CONVERTED, (report.left, report.problems)
    assert report.problems == ()
    return report


def departed(found: Any) -> Any:
    """Where two models depart, by the `Comparison` of them."""
    return found.validation.certificate.departure


def plant(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let the rewriter make models that are changed like this, from here on."""
    right = rewriting.with_heads

    def wrong(plan: Plan) -> tuple[onnx.ModelProto, list[str]]:
        made, added = right(plan)
        model = copied(made)
        change(model)
        return model, added

    monkeypatch.setattr(rewriting, "with_heads", wrong)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}

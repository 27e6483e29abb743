"""The pipeline: order, invariants after each pass, passes of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from passes.options import Options
from passes.plan import apply, make_plan
from rewriter import ExitStatus, UsageError, ValidationError, rewrite
from rewriter.pipeline import Unit, pipeline, run_passes, split
from tests.changes import bypass, change_values, changed, copied, reads, weight
from tests.textmodels import SILU, mlp, text_model


@dataclass(frozen=True)
class Change:
    """A pass that changes a copy of the model."""

    change: Callable[[onnx.ModelProto], object] = lambda _: None
    name: str = "change"
    broken: str = ""

    def run(self, unit: Unit) -> Unit:
        return replace(unit, model=changed(unit.model, self.change))

    def ensures(self, unit: Unit) -> None:
        assert unit.model.graph.node
        assert not self.broken, self.broken


def unit_of(model: onnx.ModelProto) -> Unit:
    return Unit(model, onnx.numpy_helper.to_array)


def test_the_passes() -> None:
    passes = pipeline(Options())
    assert [each.name for each in passes] == ["lower", "mlp-to-attention"]
    assert split(passes) == (passes[:1], passes[1:])


def test_the_passes_make_what_plan_and_apply_make() -> None:
    model = mlp(SILU)
    unit = run_passes(pipeline(Options()), unit_of(model))
    assert unit.model == apply(make_plan(model, Options()))
    assert unit.plan.model == model
    assert unit.heads is unit.model


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Change(lambda m: setattr(m.graph.input[0], "name", "other")), "pass 'change' changed the model's inputs"),
        (Change(lambda m: reads(m, "first", 0, "nowhere")), "pass 'change' produced an invalid model.*nowhere"),
        (Change(lambda m: m.graph.node.append(m.graph.node[-1])), "pass 'change' produced an invalid model"),
        (Change(broken="one block is gone"), "pass 'change' broke its promise: one block is gone"),
    ],
)
def test_a_broken_invariant_names_the_pass(made: Change, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        run_passes([made], unit_of(mlp(SILU)))


def test_order_is_checked() -> None:
    with pytest.raises(UsageError, match="'mlp-to-attention' must come after 'lower', which has not run"):
        rewrite(mlp(SILU), passes=lambda passes: passes[::-1])


def test_heads_that_are_not_there_break_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.pipeline.apply", lambda plan: copied(plan.model))
    with pytest.raises(ValidationError, match="mlp has no nodes in the result"):
        run_passes(pipeline(Options()), unit_of(mlp(SILU)))


def drop_identities(model: onnx.ModelProto) -> None:
    """Readers of an Identity read its operand."""
    for node in [each for each in model.graph.node if each.op_type == "Identity"]:
        bypass(model, node)


def with_identity() -> onnx.ModelProto:
    return text_model(f"i = Identity(x) f = MatMul(i, W1) y = Add(f, b1) {SILU} g = MatMul(h, W2) out = Add(g, b2)")


@pytest.mark.parametrize("first", [True, False])
def test_a_pass_of_ones_own_before_and_behind_ours(first: bool, tmp_path: Path) -> None:
    own = Change(drop_identities, "drop-identities")
    out = tmp_path / "out.onnx"
    onnx.save(with_identity(), tmp_path / "model.onnx")
    report = rewrite(tmp_path / "model.onnx", out, passes=lambda passes: (own, *passes) if first else (*passes, own))
    assert report.exit_status is ExitStatus.CONVERTED, report.problems
    assert not any(node.op_type == "Identity" for node in onnx.load(out).graph.node)


@pytest.mark.parametrize("first", [True, False])
def test_a_wrong_pass_of_ones_own_fails_the_proof(first: bool, tmp_path: Path) -> None:
    own = Change(lambda model: change_values(weight(model, "b2"), "v *= 0.5"))
    out = tmp_path / "out.onnx"
    report = rewrite(mlp(SILU), out, passes=lambda passes: (own, *passes) if first else (*passes, own))
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert not out.exists()


@pytest.mark.parametrize("options", [{}, {"form": "whole", "max_tokens": 64}])
def test_a_model_that_changes_after_its_plan_is_refused(options: Any) -> None:
    own = Change(drop_identities)
    with pytest.raises(UsageError, match="the model was changed between its plan and"):
        rewrite(mlp(SILU), passes=lambda passes: (passes[0], own, *passes[1:]), **options)


def test_a_pipeline_must_convert() -> None:
    with pytest.raises(UsageError, match="the pipeline has no pass 'mlp-to-attention'"):
        rewrite(mlp(SILU), passes=lambda passes: passes[:-1])


def test_a_pass_sees_the_model_after_those_before() -> None:
    model = mlp("h = com.microsoft.BiasGelu(first, b1)", first="first = MatMul(x, W1)", domains={"com.microsoft": 1})
    unit = run_passes(pipeline(Options()), unit_of(model))
    assert [node.op_type for node in unit.plan.model.graph.node] == ["MatMul", "Add", "Gelu", "MatMul", "Add"]

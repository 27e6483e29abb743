"""Passes of one's own around the rewriting: functions from a model to another one."""

from pathlib import Path
from typing import Any

import onnx
import pytest

from rewriter import ExitStatus, UsageError, ValidationError, rewrite
from rewriter.api import rewriting
from tests.changes import Change, bypass, change_values, changed, copied, reads, weight
from tests.textmodels import SILU, mlp, text_model


def step(change: Change) -> rewriting.Pass:
    def change_a_copy(model: onnx.ModelProto) -> onnx.ModelProto:
        return changed(model, change)

    return change_a_copy


def drop_identities(model: onnx.ModelProto) -> None:
    """Readers of an Identity read its operand."""
    for node in [each for each in model.graph.node if each.op_type == "Identity"]:
        bypass(model, node)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.graph.input[0], "name", "other"), "changed the model's inputs"),
        (lambda m: reads(m, "first", 0, "nowhere"), "produced an invalid model.*nowhere"),
        (lambda m: m.graph.node.append(m.graph.node[-1]), "produced an invalid model"),
    ],
)
def test_a_broken_rule_names_the_pass(change: Change, message: str) -> None:
    with pytest.raises(ValidationError, match=f"pass 'change_a_copy' {message}"):
        rewrite(mlp(SILU), before=[step(change)])


def test_planned_heads_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "apply", lambda plan: copied(plan.model))
    with pytest.raises(ValidationError, match="mlp has no nodes in the result"):
        rewrite(mlp(SILU))


PLACES = ("before", "after")


@pytest.mark.parametrize("place", PLACES)
def test_a_pass(place: str, tmp_path: Path) -> None:
    model = text_model(f"i = Identity(x) f = MatMul(i, W1) y = Add(f, b1) {SILU} g = MatMul(h, W2) out = Add(g, b2)")
    onnx.save(model, tmp_path / "model.onnx")
    given: Any = {place: [step(drop_identities)]}
    report = rewrite(tmp_path / "model.onnx", tmp_path / "out.onnx", **given)
    assert report.exit_status is ExitStatus.CONVERTED, report.problems
    assert not any(node.op_type == "Identity" for node in onnx.load(tmp_path / "out.onnx").graph.node)


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_wrong_pass_fails_the_proof(place: str, tmp_path: Path) -> None:
    given: Any = {place: [step(lambda model: change_values(weight(model, "b2"), "v *= 0.5"))]}
    out = tmp_path / "out.onnx"
    assert rewrite(mlp(SILU), out, **given).exit_status is ExitStatus.VALIDATION_FAILED
    assert not out.exists()


def test_passes_are_for_one_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="before is for one model, not for a folder"):
        rewrite(tmp_path, tmp_path.with_name("out"), before=[step(lambda _: None)])

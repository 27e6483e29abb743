"""Tensors that become outputs: what they hold, and that wrong ones fail the proof although the model is right."""

from typing import Any

import numpy as np
import onnx
import pytest

from rewriter import ExitStatus, Report, UsageError, ValidationError, rewrite
from rewriter.ort import open_session
from tests.cases import plant
from tests.changes import add_weight, insert, maker, rename
from tests.passes.test_apply import TWO_BLOCKS
from tests.textmodels import ERF_GELU, SILU, mlp, text_model, values

EACH = pytest.mark.parametrize("form", ["compact", "masked"])
PATTERN = "mlp/heads/pattern"


def sigmoid(y: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-y))


def exposing(model: onnx.ModelProto, form: str, *expose: str, **options: Any) -> Report:
    return rewrite(model, form=form, expose=expose, **options)


@EACH
def test_the_pattern_of_silu_is_sigma_and_what_is_left(form: str) -> None:
    report = exposing(mlp(SILU), form, "q,pattern,z")
    names = [value.name for value in report.rewritten.graph.output]
    assert names == ["out", "mlp/heads/q", PATTERN, "mlp/heads/z_side_by_side"]
    onnx.checker.check_model(report.rewritten, full_check=True)
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    got = open_session(report.rewritten).run({"x": x})
    y = x.astype(np.float64) @ values("W1").astype(np.float32) + values("b1").astype(np.float32)
    if form == "compact":
        own, bias = got[PATTERN][..., 0], got[PATTERN][..., 1]
        q = got["mlp/heads/q"][..., 0]
    else:
        pattern = got[PATTERN]
        assert pattern.shape == (2, 8, 6, 6)
        own = np.swapaxes(np.diagonal(pattern, axis1=2, axis2=3)[..., :5], 1, 2)
        bias = np.swapaxes(pattern[:, :, :5, 5], 1, 2)
        q = np.swapaxes(got["mlp/heads/q"][:, :, :5, 0], 1, 2)
    np.testing.assert_allclose(own, sigmoid(y), atol=1e-6)
    np.testing.assert_allclose(bias, sigmoid(-y), atol=1e-6)
    np.testing.assert_allclose(q, y, atol=2e-6)
    np.testing.assert_allclose(got["mlp/heads/z_side_by_side"][:, :5], y * sigmoid(y), atol=2e-6)


@pytest.mark.sample(0)
@pytest.mark.parametrize("text", [SILU, ERF_GELU, "h = Relu(y)"], ids=["silu", "gelu", "relu"])
@pytest.mark.parametrize(("form", "first"), [("compact", "Add"), ("masked", "Add"), ("compact", "Sub")])
def test_every_tensor_passes(form: str, text: str, first: str) -> None:
    """Also of a block whose own linear operators stay, since one subtracts its bias."""
    report = exposing(mlp(text, first=f"m = MatMul(x, W1) y = {first}(m, b1)"), form, "q,scores,pattern,z")
    assert (report.problems, len(report.rewritten.graph.output)) == ((), 5)


def test_a_glob_chooses_blocks() -> None:
    report = exposing(text_model(TWO_BLOCKS), "compact", "pattern:*_2", "q:mlp")
    names = [value.name for value in report.rewritten.graph.output]
    assert names == ["out", "mlp/heads/q", "mlp_2/heads/pattern"]


def test_a_glob_without_a_match_is_said() -> None:
    report = exposing(mlp(SILU), "compact", "pattern:h.*")
    note = "--expose: no converted block of the main graph matches"
    assert (report.notes, len(report.rewritten.graph.output)) == ((note,), 1)


REFUSED = (
    ("compact", "values", "unknown tensor 'values'"),
    ("compact", "", "unknown tensor ''"),
    ("compact", "pattern:", "no blocks behind the colon"),
    ("local", "pattern", "only the forms compact and masked"),
    ("staged", "pattern", "only the forms compact and masked"),
)


@pytest.mark.parametrize(("form", "text", "reason"), REFUSED)
def test_what_cannot_be_exposed_is_refused(form: str, text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        exposing(mlp(SILU), form, text)


# -- wrong outputs of a right model ---------------------------------------------------------------------------------


def shown_instead(tensor: str, operator: str, *operands: Any, **attributes: Any) -> Any:
    """The output `tensor` becomes another one; what the model computes from the right one stays."""

    def change(model: onnx.ModelProto) -> None:
        right = f"{tensor}_right"
        rename(model.graph.node, {tensor: right})
        for number, operand in enumerate(operands):
            add_weight(model, f"{tensor}_{number}", operand)
        names = [right, *(f"{tensor}_{number}" for number in range(len(operands)))]
        insert(model, right, operator, " ".join(names), tensor, **attributes)
        maker(model, tensor).metadata_props.extend(maker(model, right).metadata_props)

    return change


SCALE = np.float32(1.001)
WRONG: tuple[tuple[str, str, Any], ...] = (
    ("compact", "pattern", shown_instead(PATTERN, "Gather", np.roll(np.arange(8), 1), axis=2)),
    ("compact", "pattern", shown_instead(PATTERN, "Mul", SCALE)),
    ("compact", "q", shown_instead("mlp/heads/q", "Mul", SCALE)),
    ("compact", "scores", shown_instead("mlp/heads/scores", "Mul", SCALE)),
    ("masked", "pattern", shown_instead(PATTERN, "Transpose", perm=[0, 1, 3, 2])),
    ("masked", "z", shown_instead("mlp/heads/z_side_by_side", "Mul", SCALE)),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("form", "what", "change"), WRONG)
def test_wrong_outputs_fail(form: str, what: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, change)
    report = exposing(mlp(SILU), form, what)
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert any("is not what its heads compute with" in text for text in report.problems)


def test_an_output_that_nobody_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    further = onnx.helper.make_tensor_value_info("mlp/heads/z", onnx.TensorProto.FLOAT, [None] * 4)
    plant(monkeypatch, lambda model: model.graph.output.append(further))
    with pytest.raises(ValidationError, match="changed inputs, outputs"):
        exposing(mlp(SILU), "compact", "pattern")

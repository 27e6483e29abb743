"""Heads that this tool made are recognised without names and metadata; originals are not."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from passes.forms import FORMS
from passes.made import ALREADY
from passes.options import FormOptions, Options
from passes.plan import make_plan
from rewriter import ExitStatus, inspect, rewrite
from tests.committed import FOLDER
from tests.conftest import slow
from tests.textmodels import ERF_GELU, SILU, mlp


def stripped(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without metadata, and with other names for all nodes and tensors but its inputs and outputs."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    names = {value.name: value.name for value in (*result.graph.input, *result.graph.output)}

    def renamed(name: str) -> str:
        return names.setdefault(name, f"t{len(names)}") if name else name

    def strip(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.ClearField("name")
            del node.metadata_props[:]
            node.input[:] = [renamed(name) for name in node.input]
            node.output[:] = [renamed(name) for name in node.output]
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    for value in (*attribute.g.input, *attribute.g.output):
                        value.name = renamed(value.name)
                    strip(attribute.g)
        for tensor in graph.initializer:
            tensor.name = renamed(tensor.name)
        del graph.value_info[:]

    strip(result.graph)
    return result


def reasons(model: onnx.ModelProto) -> list[str]:
    plan = make_plan(model, Options())
    assert plan.conversions == ()
    return [left.miss.reason.removeprefix(ALREADY) for left in plan.left]


ONE, MANY = "{self, bias token}", "{self, bias tokens}"
SPELLINGS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (SILU, {}, f"fused softmax over {ONE}"),
    ("h = Relu(y)", {}, f"fused softmax over {ONE}"),
    (ERF_GELU, {}, "softmax over 11 keys from one exponential"),
    ("p = Softplus(y) t = Tanh(p) h = Mul(y, t)", {}, "softmax over 3 keys from one exponential"),
    ("h = LeakyRelu<alpha = 0.1>(y)", {}, "softmax over 2 keys from one exponential"),
    ("h = LeakyRelu<alpha = -0.3>(y)", {}, "sum of exponentials over 2 keys"),
    ("h = Clip(y, $0.0, $6.0)", {}, "sum of exponentials over {self, 2 bias tokens}"),
    ("h = Clip(y, $-1.0, $6.0)", {}, "sum of exponentials over {self, 2 bias tokens}"),
    (SILU, {"spelling": "softmax"}, f"softmax over {MANY}"),
    (ERF_GELU, {"spelling": "softmax"}, f"softmax over {MANY}"),
    ("h = Tanh(y)", {"form": "compact"}, f"softmax over {MANY}"),
    (ERF_GELU, {"form": "compact"}, f"softmax over {MANY}"),
    (ERF_GELU, {"form": "compact", "max_pattern_mb": 1e-4}, f"softmax over {MANY}"),
    (SILU, {"form": "masked"}, f"softmax under a mask over {MANY}"),
    (SILU, {"form": "masked", "expose": "pattern"}, f"softmax under a mask over {MANY}"),
    (SILU, {"form": "maskless"}, f"softmax with positions over {MANY}"),
)


@pytest.mark.parametrize(("text", "options", "what"), SPELLINGS)
def test_heads_that_are_written_out_are_recognised(text: str, options: dict[str, Any], what: str) -> None:
    result = rewrite(mlp(text), inline=True, validate=False, **options).rewritten
    assert result is not None
    assert reasons(stripped(result)) == [what]
    assert rewrite(stripped(result)).exit_status is ExitStatus.NOTHING_TO_CONVERT


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "calls"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "file", ["silu-decoder", *(pytest.param(f, marks=slow) for f in ("gelu-vision", "gated-decoder"))]
)
def test_committed_models_are_recognised(file: str, form: str, inline: bool) -> None:
    result = rewrite(FOLDER / f"{file}.onnx", form=form, inline=inline, validate=False).rewritten
    assert result is not None
    found = inspect(stripped(result)).report
    assert found.converted == ()
    assert len([row for row in found.left if (row.reason or "").startswith(ALREADY)]) == (
        2 if form != "staged" else len(found.left)
    )


HAND_WRITTEN = (
    SILU,
    "n = Neg(y) e = Exp(n) a = Add(e, $1.0) h = Div(y, a)",
    "k = Mul(y, $1.702) s = Sigmoid(k) h = Mul(y, s)",
    ERF_GELU,
)


@pytest.mark.parametrize("text", HAND_WRITTEN)
def test_an_original_is_no_attention(text: str) -> None:
    """Not even one with the operators of a softmax, as long as it has no product with a key."""
    plan = make_plan(mlp(text), Options())
    assert len(plan.conversions) == 1


def test_a_run_whose_nodes_do_not_lead_to_its_end() -> None:
    """The operators of the fused softmax in a row, but the exponential is of another tensor."""
    text = "k = Mul(y, $1.0) n = Neg(y) e = Exp(n) a = Add(e, $1.0) h = Div(k, a)"
    assert len(make_plan(mlp(text), Options()).conversions) == 1


def test_inspect_counts_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rewriter.cli import run

    monkeypatch.setenv("COLUMNS", "200")
    result = rewrite(FOLDER / "silu-decoder.onnx", inline=True, validate=False).rewritten
    assert result is not None
    onnx.save(stripped(result), tmp_path / "stripped.onnx")
    assert run(["inspect", str(tmp_path / "stripped.onnx")]) == 3
    assert "2 MLPs are attention already: fused softmax over {self, bias token}" in capsys.readouterr().out


# -- form local with an operator Softmax ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", [SILU, ERF_GELU, "h = Relu(y)", "h = Tanh(y)"], ids=["silu", "gelu", "relu", "tanh"])
def test_softmax_spelling_is_proved(text: str) -> None:
    model = mlp(text)
    report = rewrite(model, spelling="softmax")
    assert report.validation is not None
    assert report.validation.failures == ()
    assert report.rewritten is not None
    kinds = [node.op_type for node in report.rewritten.graph.node]
    assert "Softmax" in kinds
    assert "Exp" not in kinds
    kept = {(node.op_type, tuple(node.input)) for node in report.rewritten.graph.node}
    linear = {(node.op_type, tuple(node.input)) for node in model.graph.node if node.op_type in ("MatMul", "Gemm")}
    assert linear <= kept


def test_softmax_spelling_needs_its_opset_and_form() -> None:
    plan = make_plan(mlp("h = Relu(y)", opset=10, ir=5), Options(forms=FormOptions(spelling="softmax")))
    assert "--option spelling=softmax needs opset 11, and the model has 10" in plan.left[0].miss.reason
    with pytest.raises(Exception, match="spelling is for form local"):
        rewrite(mlp(SILU), form="masked", spelling="softmax")

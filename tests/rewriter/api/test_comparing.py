"""`rewriter.validate` and `rewriter.diff`: planted differences are found and their places named, equal pairs pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from benchmarks.decoder import Shape, decoder, random_weights
from rewriter import Comparison, ExitStatus, UsageError, ValidationError, diff, rewrite, validate
from rewriter.api import comparing
from rewriter.files.load import load_model
from rewriter.files.mapped import MIN_MAPPED_BYTES
from rewriter.proof.rule import Judgement
from tests.changes import Change, becomes, change_values, changed, insert, maker, weight
from tests.committed import FOLDER
from tests.conftest import slow
from tests.textmodels import ERF_GELU, SILU, mlp, text_model

TINY = Shape(layers=3, width=16, hidden=32, heads=2, vocabulary=40, positions=64)

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A decoder of three layers, and the same with attention heads."""
    folder = tmp_path_factory.mktemp("pair")
    original, rewritten = folder / "original.onnx", folder / "rewritten.onnx"
    onnx.save(decoder(TINY, random_weights()), original)
    assert len(rewrite(original, rewritten, validate=False).converted) == 3
    return original, rewritten


def output_of(found: Comparison, name: str) -> Judgement:
    """The rule on the CPU."""
    return found.validation.providers["cpu"].compared[name]


def shifted(name: str, delta: float) -> Change:
    return lambda model: change_values(weight(model, name), f"v.flat[-1] += {delta}")


def without_mask(model: onnx.ModelProto) -> None:
    """Layer 1 sees the future."""
    node = maker(model, "/h.1/attn/masked/output")
    becomes(node, "Identity")


def transposed_output(model: onnx.ModelProto) -> None:
    node = maker(model, "logits")
    node.output[0] = "logits_before"
    model.graph.node.append(helper.make_node("Transpose", ["logits_before"], ["logits"], "turned", perm=[0, 2, 1]))
    del model.graph.output[0].type.tensor_type.shape.dim[2:]
    model.graph.output[0].type.tensor_type.shape.dim.add()


def transposed_weight(model: onnx.ModelProto) -> None:
    change_values(weight(model, "h.1.attn.c_proj.weight"), "v = v.T")


def half_precision(model: onnx.ModelProto) -> None:
    """The first linear operator of layer 2's MLP multiplies in float16."""
    node = maker(model, "/h.2/mlp/c_fc/MatMul/output")
    (data, matrix), output = node.input, node.output[0]
    insert(model, data, "Cast", data, "half_data", to=TensorProto.FLOAT16)
    insert(model, "", "Cast", matrix, "half_matrix", to=TensorProto.FLOAT16)
    node = maker(model, output)
    node.input[:], node.output[:] = ["half_data", "half_matrix"], ["half_out"]
    insert(model, "half_out", "Cast", "half_out", output, to=TensorProto.FLOAT)


FIRST = ", first linear operator"

PLANTED = {
    "a weight of W1": (shifted("h.1.mlp.c_fc.weight", 1e-2), "h.1.mlp" + FIRST, "h.1.mlp.c_fc.weight"),
    "a bias of the attention": (
        shifted("h.1.attn.c_attn.bias", 1e-2),
        "/h.1/attn/residual/output",
        "h.1.attn.c_attn.bias",
    ),
    "a dropped mask": (without_mask, "/h.1/attn/residual/output", "/h.1/attn/masked"),
    "a transposed weight": (transposed_weight, "/h.1/attn/residual/output", "h.1.attn.c_proj.weight"),
    "a transposed output": (transposed_output, "output logits", "turned"),
    "a type change": (half_precision, "h.2.mlp" + FIRST, "MatMul '/h.2/mlp/c_fc/MatMul' became"),
    "the final norm": (shifted("ln_f.weight", 1e-2), "output logits", "ln_f.weight"),
}


def planted(source: Path, change: Change) -> onnx.ModelProto:
    return changed(onnx.load(source), change)


@pytest.mark.parametrize("side", [pytest.param("another model", marks=slow), "a rewritten model"])
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_difference_is_found_and_named(pair: Pair, what: str, side: str) -> None:
    plant, part, cause = PLANTED[what]
    bad = planted(pair[0] if side == "another model" else pair[1], plant)
    found = validate(pair[0], bad, bisect=True)
    assert found.exit_status is ExitStatus.VALIDATION_FAILED
    assert found.failures
    assert [fault.label for fault in found.faults] == [part]
    assert any(cause in each for each in found.faults[0].causes)


def test_a_planted_coefficient_is_found(pair: Pair) -> None:
    bad = planted(pair[1], shifted("h.1.mlp/heads/key", 1e-3))
    found = validate(pair[0], bad, bisect=True)
    assert found.exit_status is ExitStatus.VALIDATION_FAILED
    (fault,) = found.faults
    assert fault.label == "h.1.mlp, activation"
    assert "differs by 4.52e-06 at y = " in fault.causes[0]
    assert "weight h.1.mlp/heads/key is only in B" in fault.causes
    assert found.failures[0].startswith("h.1.mlp: refuted: ")
    assert found.failures[0].endswith("(the activation /h.1/mlp/act/Mul/output)")
    assert not any("h.0.mlp" in failure or "h.2.mlp" in failure for failure in found.failures)
    labels = [each.label for each in found.isolated]
    assert [label for label in labels if label.endswith("mlp") and " " not in label] == [
        "h.0.mlp", "h.1.mlp", "h.2.mlp",
    ]  # fmt: skip
    assert labels[-1] == "output logits"
    assert "input of h.1.mlp" in labels
    assert all(each.found.rounding > 0 for each in found.isolated)


def test_a_rewritten_model_passes(pair: Pair) -> None:
    found = validate(*pair, bisect=True)
    assert found.same
    assert found.failures == ()
    assert found.error_ratio < 2
    assert found.validation.certificate is not None
    assert len(found.validation.certificate.regions) == 3
    assert found.isolated == (), "there is nothing to look for"
    assert output_of(found, "logits").holds


def test_onnxruntimes_own_optimisation_passes(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "optimised.onnx"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(pair[0], options, providers=["CPUExecutionProvider"])
    found = diff(pair[0], path)
    assert found.verdict == "same", "fused operators are taken apart"
    assert not found.graph.same
    assert found.graph.operators["com.microsoft::QuickGelu"] == (0, 3)
    bad = diff(pair[0], planted(path, shifted("h.1.mlp.c_proj.weight", 1e-2)), bisect=True)
    assert len(bad.isolated) > 6
    assert [fault.label for fault in bad.faults] == ["h.1.mlp"]


@pytest.mark.parametrize("tool", ["onnxslim", "onnxsim"])
def test_other_optimisers_pass(pair: Pair, tool: str) -> None:
    module = pytest.importorskip(tool)
    model = onnx.load(pair[0])
    smaller = module.slim(model) if tool == "onnxslim" else module.simplify(model)[0]
    found = diff(pair[0], smaller)
    assert found.exit_status is ExitStatus.CONVERTED
    assert found.graph.same_nodes > 50
    shifted("h.1.mlp.c_proj.bias", 1e-2)(smaller)
    assert [fault.label for fault in diff(pair[0], smaller, bisect=True).faults] == ["h.1.mlp"]


def test_large_weights_stay_in_their_files(tmp_path: Path) -> None:
    weights = {"large": np.random.default_rng(0).normal(size=(4, MIN_MAPPED_BYTES // 4))}
    paths = [tmp_path / name for name in ("a.onnx", "b.onnx", "c.onnx")]
    for path in paths:
        model = text_model("out = MatMul(x, large)", constants=weights, outputs="float[batch, tokens, wide] out")
        if path.name == "c.onnx":
            shifted("large", 1e-3)(model)
        onnx.save(model, path)
    assert load_model(paths[0], mapped=True).mapped
    assert diff(paths[0], paths[1]).same
    found = diff(paths[0], paths[2], bisect=True)
    assert [each.name for each in found.graph.tensors] == ["large"]
    assert found.verdict == "different"
    assert any("weight large differs in 1 element" in each for each in found.faults[0].causes)


def test_without_a_float64_reference_the_original_stands_in(tmp_path: Path) -> None:
    """An operator of onnxruntime's own that is written down nowhere else: no float64 form."""
    model = mlp(SILU, second="second = MatMul(h, W2) t = com.microsoft.Trilu(second) out = Add(t, b2)")
    rewritten = rewrite(model, validate=False).rewritten
    good = validate(model, rewritten)
    assert good.same
    assert np.isnan(good.error_ratio)
    shifted("b2", 1e-2)(rewritten)
    bad = validate(model, rewritten, bisect=True)
    assert not bad.same
    assert bad.verdict == "different"


def test_a_rounding_that_decides(tmp_path: Path) -> None:
    """As in T5's buckets of relative positions: float64 falls into another bucket, which cannot serve as a reference.

    25 times float32's 0.04 is 1 in float32, and below 1 in float64.
    """
    body = f"p = Mul($25.0, part) f = Floor(p) z = Add(x, f) first = MatMul(z, W1) y = Add(first, b1) {SILU} "
    constants = {"part": np.asarray([0.04])}
    model = text_model(f"{body} second = MatMul(h, W2) out = Add(second, b2)", constants=constants)
    part = np.float32(0.04)
    assert np.floor(part * np.float32(25)) != np.floor(np.float64(part) * 25), "the premise"
    heads = rewrite(model, validate=False).rewritten
    good = validate(model, heads, bisect=True)
    assert good.same
    shifted("W1", 1e-2)(heads)
    bad = validate(model, heads, bisect=True)
    assert not bad.same
    assert [fault.label for fault in bad.faults] == ["mlp" + FIRST]


def test_other_signatures(pair: Pair) -> None:
    other = mlp(SILU)
    found = diff(pair[0], other)
    assert found.exit_status is ExitStatus.VALIDATION_FAILED
    assert found.graph.regions
    assert found.proof is None
    with pytest.raises(ValidationError, match="the signatures differ: input 'input_ids' is only in A"):
        _ = found.validation
    assert found.signature[0] == "input 'input_ids' is only in A"
    assert validate(pair[0], other).failures[0] == "the signatures differ: input 'input_ids' is only in A"


def test_parts_leave_out_inputs_that_the_original_refuses() -> None:
    body = "axis = Constant<value = int64[1] {0}>() one = Squeeze(x, axis) y = Relu(one) out = Neg(y)"
    model = text_model(body, outputs="float[tokens, 4] out")
    bad = text_model(body.replace("Neg", "Abs"), outputs="float[tokens, 4] out")
    found = validate(model, bad, bisect=True)
    assert any(each.startswith("batch 3, sequence 17") for each in found.validation.skipped)
    assert [(each.label, each.found.holds) for each in found.isolated] == [
        ("one", True), ("y", True), ("output out", False),
    ]  # fmt: skip


def test_what_needs_a_run(pair: Pair) -> None:
    with pytest.raises(UsageError, match="bisect needs the models to be run"):
        diff(*pair, outputs=False, bisect=True)


def test_faults_are_explained_only_so_often(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_MOST_FAULTS", 1)

    def plant(model: onnx.ModelProto) -> None:
        for layer in range(3):
            shifted(f"h.{layer}.mlp.c_fc.bias", 1e-2)(model)

    found = validate(pair[0], planted(pair[1], plant), bisect=True)
    assert len(found.faults) == 1
    assert [each.label for each in found.isolated if not each.found.holds] == [f"h.{n}.mlp{FIRST}" for n in range(3)]


def test_a_certified_error_is_no_fault() -> None:
    """The activation is off by ten times what rounding alone would allow, as its certificate says."""
    rewritten = rewrite(mlp(ERF_GELU), accuracy=1e-3, validate=False).rewritten
    shifted("b2", 1e-2)(rewritten)
    _, activation, end = validate(mlp(ERF_GELU), rewritten, accuracy=1e-3, bisect=True).isolated
    assert (activation.label, activation.found.holds) == ("mlp, activation", True)
    assert activation.found.error > 1e-5
    assert (end.label, end.found.holds) == ("mlp", False)


@pytest.mark.parametrize(("form", "verdict"), [("masked", "same"), ("whole", "agrees")])
def test_heads_of_a_network(form: str, verdict: str) -> None:
    """Form whole is cut at the tensors that it shares with the original, as every other form is."""
    model, name = FOLDER / "silu-decoder.onnx", "model.transformer.h.1.mlp.c_proj.bias"
    made = rewrite(model, form=form, max_tokens=64, validate=False).rewritten
    found = validate(model, made)
    assert (found.verdict, found.failures, found.validation.blocks) == (verdict, (), ())
    shifted(name, 1e-2)(made)
    found = validate(model, made, bisect=True)
    assert [fault.label for fault in found.faults] == ["model.transformer.h.1.mlp"]
    assert any(f"weight {name} differs in 1 element" in each for each in found.faults[0].causes)


@pytest.mark.parametrize("command", [validate, diff])
def test_only_inputs_that_the_heads_of_a_network_take_are_tried(command: Callable[..., Comparison]) -> None:
    """Form whole keeps its longest sequence in the plan of the network; 17 tokens, the usual length, do not run."""
    model = FOLDER / "silu-decoder.onnx"
    found = command(model, rewrite(model, form="whole", max_tokens=16, validate=False).rewritten)
    assert (found.verdict, found.failures) == ("agrees", ())
    assert any("sequence 16" in case for case in found.validation.cases)

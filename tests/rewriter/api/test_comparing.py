"""`rewriter.validate` and `rewriter.diff`: planted differences are found and their places named, equal pairs pass."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.decoder import Shape, decoder, random_weights
from rewriter import ExitStatus, UsageError, ValidationError, certify, diff, rewrite, validate
from rewriter.files.load import load_model
from rewriter.files.tensors import MIN_MAPPED_BYTES
from rewriter.ort import write_optimised
from tests.cases import departed
from tests.changes import Change, becomes, change_values, changed, maker, rename, weight
from tests.committed import FOLDER
from tests.textmodels import SILU, mlp, text_model

TINY = Shape(layers=2, width=16, hidden=32, heads=2, vocabulary=40, positions=64)

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A decoder of two layers, and the same with attention heads."""
    folder = tmp_path_factory.mktemp("pair")
    original, rewritten = folder / "original.onnx", folder / "rewritten.onnx"
    onnx.save(decoder(TINY, random_weights()), original)
    assert len(rewrite(original, rewritten, validate=False).converted) == 2
    return original, rewritten


def shifted(name: str, delta: float) -> Change:
    return lambda model: change_values(weight(model, name), f"v.flat[-1] += {delta}")


PLANTED: dict[str, tuple[Change, str]] = {
    "a weight of W1": (shifted("h.1.mlp.c_fc.weight", 1e-2), "MatMul '/h.1/mlp/c_fc/MatMul'"),
    "a bias of the attention": (shifted("h.1.attn.c_attn.bias", 1e-2), "Add '/h.1/attn/c_attn/Add'"),
    "a dropped mask": (
        lambda model: becomes(maker(model, "/h.1/attn/masked/output"), "Identity"),
        "Softmax '/h.1/attn/pattern'",
    ),
    "a transposed weight": (
        lambda model: change_values(weight(model, "h.1.attn.c_proj.weight"), "v = v.T"),
        "MatMul '/h.1/attn/c_proj/MatMul'",
    ),
    "the final norm": (shifted("ln_f.weight", 1e-2), "LayerNormalization '/ln_f/LayerNormalization'"),
}


def planted(source: Path, change: Change) -> onnx.ModelProto:
    return changed(onnx.load(source), change)


@pytest.mark.sample(0)
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_difference_is_found_and_named(pair: Pair, what: str) -> None:
    plant, node = PLANTED[what]
    found = diff(pair[0], planted(pair[0], plant))
    assert found.exit_status is ExitStatus.VALIDATION_FAILED
    assert found.failures
    departure = departed(found)
    assert (departure.node, departure.regions[0].same) == (node, False)
    rewritten = departed(diff(pair[0], planted(pair[1], plant), outputs=False))
    assert rewritten.first, "the heads around it are not a difference"


@pytest.mark.slow
def test_several_differences_are_regions(pair: Pair) -> None:
    def plant(model: onnx.ModelProto) -> None:
        for layer in range(2):
            shifted(f"h.{layer}.mlp.c_fc.bias", 1e-2)(model)

    found = departed(diff(pair[0], planted(pair[0], plant)))
    assert [each.ends for each in found.regions if not each.same] == [
        (f"/h.{layer}/mlp/c_fc/Add/output",) for layer in range(2)
    ]


def renamed(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    rename(model.graph.node, names)
    return model


def test_other_names_of_inputs_and_outputs() -> None:
    """Swapped too, which is another function unless it is said."""
    text, swapped = "p = MatMul(x, W1) out = Sigmoid(p) q = Add(x, z) end = Neg(q)", {"x": "z", "z": "x"}
    side = "float[batch, tokens, 4]"
    ends: dict[str, Any] = {"inputs": f"{side} x, {side} z", "outputs": f"float[batch, tokens, 8] out, {side} end"}
    a, names = text_model(text, **ends), {**swapped, "out": "end", "end": "out"}
    b = renamed(text_model(text, **ends), names)
    found = diff(a, b, names=names)
    assert (found.verdict, found.failures, found.graph.fields) == ("certified", (), ())
    assert certify(a, b, names=names).verdict == "certified"
    wrong = renamed(text_model(text, **ends), swapped)
    assert validate(a, wrong, names=swapped).same
    assert validate(a, wrong).verdict == "different"
    with pytest.raises(UsageError, match="the first model has no input or output 'q'"):
        validate(a, b, names={"q": "x"})


def test_other_names_of_sequences() -> None:
    a = text_model("out = SplitToSequence<axis = 1>(x)", outputs="seq(float[batch, t, 4]) out")
    b = renamed(onnx.ModelProto.FromString(a.SerializeToString()), {"out": "parts"})
    assert validate(a, b, names={"out": "parts"}).verdict in ("certified", "certified at the sizes tried", "agrees")


@pytest.mark.slow
def test_a_rewritten_model_passes(pair: Pair) -> None:
    found = validate(*pair)
    assert (found.same, found.failures) == (True, ())
    assert found.error_ratio < 2
    assert found.validation.certified
    assert found.validation.providers["cpu"].compared["logits"].holds


@pytest.mark.slow
def test_onnxruntimes_own_optimisation_passes(pair: Pair, tmp_path: Path) -> None:
    path = write_optimised(load_model(pair[0]), "extended", tmp_path)
    found = diff(pair[0], path)
    assert (found.same, found.graph.operators["com.microsoft::QuickGelu"]) == (True, (0, 2))
    bad = departed(diff(pair[0], planted(path, shifted("h.1.mlp.c_proj.weight", 1e-2))))
    assert bad.constants == ("h.1.mlp.c_proj.weight",)


@pytest.mark.sample(0)
@pytest.mark.parametrize("tool", ["onnxslim", "onnxsim"])
def test_other_optimisers_pass(pair: Pair, tool: str) -> None:
    module = pytest.importorskip(tool)
    model = onnx.load(pair[0])
    smaller = module.slim(model) if tool == "onnxslim" else module.simplify(model)[0]
    found = diff(pair[0], smaller)
    assert (found.exit_status, found.same) == (ExitStatus.CONVERTED, True)
    shifted("h.1.mlp.c_proj.bias", 1e-2)(smaller)
    assert departed(diff(pair[0], smaller)).constants == ("h.1.mlp.c_proj.bias",)


@pytest.mark.slow
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
    found = diff(paths[0], paths[2])
    assert [each.name for each in found.graph.tensors] == ["large"]
    assert found.verdict == "different"


def test_without_a_float64_reference_the_original_stands_in(tmp_path: Path) -> None:
    """An operator of onnxruntime's own that is written down nowhere else: no float64 form."""
    model = mlp(SILU, second="second = MatMul(h, W2) t = com.microsoft.Trilu(second) out = Add(t, b2)")
    rewritten = rewrite(model, validate=False).rewritten
    good = validate(model, rewritten)
    assert good.verdict == "agrees", "nor do values decide"
    assert np.isnan(good.error_ratio)
    shifted("b2", 1e-2)(rewritten)
    bad = validate(model, rewritten)
    assert (bad.same, bad.verdict) == (False, "different")


@pytest.mark.slow
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
    good = validate(model, heads)
    assert good.same
    shifted("W1", 1e-2)(heads)
    assert validate(model, heads).verdict == "different"


def test_other_signatures(pair: Pair) -> None:
    other = mlp(SILU)
    found = diff(pair[0], other)
    assert (found.exit_status, found.proof) == (ExitStatus.VALIDATION_FAILED, None)
    assert found.graph.tensors
    with pytest.raises(ValidationError, match="the signatures differ: input 'input_ids' is only in A"):
        _ = found.validation
    assert found.signature[0] == "input 'input_ids' is only in A"
    assert validate(pair[0], other).failures[0] == "the signatures differ: input 'input_ids' is only in A"


@pytest.mark.slow
def test_nothing_is_run_where_that_is_not_wanted(pair: Pair) -> None:
    found = diff(*pair, outputs=False)
    assert (found.verdict, found.validation.cases) == ("certified", ())
    assert found.summary.endswith("computes what " + str(pair[0]) + " does for every input")
    other = text_model("y = Relu(x) out = Neg(y)"), text_model("y = Relu(x) z = Add(y, x) out = Neg(z)")
    found = diff(*other, outputs=False)
    assert (found.verdict, int(found.exit_status)) == ("not proved", 1)


def test_heads_that_take_so_many_tokens() -> None:
    """No size beyond the longest sequence that the file states is tried, and the verdict says so."""
    heads = rewrite(mlp(SILU), form="maskless", max_tokens=8, validate=False).rewritten
    found: Any = validate(mlp(SILU), heads)
    assert found.same
    assert [each.tokens for each in found.validation.certificate.regions] == [8]
    assert not any("sequence 61" in each for each in found.validation.certificate.sizes)


@pytest.mark.slow
def test_only_inputs_that_the_heads_of_a_network_take_are_tried() -> None:
    """Form whole keeps its longest sequence in the plan, and reads padding as a mask, also where all is masked."""
    model = FOLDER / "silu-decoder.onnx"
    found = validate(model, rewrite(model, form="whole", max_tokens=6, validate=False).rewritten)
    assert (found.verdict, found.failures) == ("certified at the sizes tried", ())
    assert any("sequence 6" in case for case in found.validation.cases)


@pytest.mark.parametrize(("entry", "verdict"), [(0.0, "not proved"), (0.1, "different")])
def test_a_model_that_takes_fewer_tokens_and_does_not_say_so(entry: float, verdict: str) -> None:
    """Both are compared up to the longest sequence that it takes."""
    table = np.zeros((1, 16, 4), np.float32)
    table[0, 9] = entry
    body = "zero = Constant<value_ints = [0]>() one = Constant<value_ints = [1]>() s = Shape<start = 1, end = 2>(x)"
    body += " p = Slice(table, zero, s, one) out = Add(x, p)"
    found = validate(text_model("out = Identity(x)"), text_model(body, constants={"table": table}))
    assert (found.verdict, int(found.exit_status)) == (verdict, 1)
    assert any("sequences of at most 16" in problem for problem in found.problems + found.validation.uncompared)
    assert any("sequence 16" in case for case in found.validation.cases)

"""Local functions under names of onnxruntime's operators: it runs its kernel, and never the body.

Every body here computes something else than the operator, a + 1000, so that a body that is run or read shows.
"""

from pathlib import Path

import numpy as np
import onnx
import pytest

from rewriter import certify, rewrite
from rewriter.errors import ModelError
from rewriter.files.load import load_model
from rewriter.ort import open_session
from tests.oracle import evaluate
from tests.textmodels import text_model

IMPORTS = '"": 20, "com.microsoft": 1'
WRONG = '<opset_import: ["": 20], domain: "{}"> {} (a) => (b) {{ k = Constant<value_float = 1000.0>() b = Add(a, k) }} '

CALLS = {
    "main": ("y = MatMul(x, W1) h = {0}(y) out = MatMul(h, W2)", ""),
    "body": (
        "m = ReduceMax<keepdims = 0>(x) c = Greater(m, $100.0) out = If<"
        "then_branch = t () => (float[batch, tokens, 4] p) {{ p = Neg(x) }}, else_branch = e () => "
        "(float[batch, tokens, 4] q) {{ y = MatMul(x, W1) h = {0}(y) q = MatMul(h, W2) }}>(c)",
        "",
    ),
    "function": (
        "y = MatMul(x, W1) h = local.Outer(y) out = MatMul(h, W2)",
        '<opset_import: [{1}], domain: "local"> Outer (a) => (b) {{ b = {0}(a) }} ',
    ),
}
"""Where the operator is called: text of the nodes, and of a further function."""


def network(place: str, operator: str, domain: str, body: str = WRONG) -> onnx.ModelProto:
    """An MLP whose activation is an operator, beside a function of its name."""
    nodes, outer = (text.format(operator, IMPORTS) for text in CALLS[place])
    functions = body.format(domain, operator.rpartition(".")[2]) + outer
    return text_model(nodes, opset=20, domains={"com.microsoft": 1, "local": 1}, functions=functions)


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", CALLS)
@pytest.mark.parametrize(
    ("operator", "domain", "meaning"),
    [("com.microsoft.Gelu", "com.microsoft", "Gelu"), ("Relu", "", "Relu"), ("Relu", "ai.onnx", "Relu")],
)
def test_the_kernel_counts(tmp_path: Path, place: str, operator: str, domain: str, meaning: str) -> None:
    source, out = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(network(place, operator, domain), source)
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    wanted = evaluate(text_model(CALLS["main"][0].format(meaning), opset=20), {"x": x})["out"]
    report = rewrite(source, out)
    assert report.validation.certified
    assert [row.activation for row in report.converted] == [meaning.lower()]
    assert any("are ignored, as it ignores them" in note for note in report.notes)
    assert onnx.load(source).functions[0] in onnx.load(out).functions
    for path in (source, out):
        for optimise in (True, False):
            np.testing.assert_allclose(open_session(path, optimise=optimise).run({"x": x})["out"], wanted, rtol=1e-4)


def test_a_model_in_memory_keeps_its_functions() -> None:
    model = network("main", "com.microsoft.Gelu", "com.microsoft")
    before = model.SerializeToString(deterministic=True)
    rewritten = rewrite(model, validate=False).rewritten
    assert model.SerializeToString(deterministic=True) == before
    assert model.functions[0] in rewritten.functions
    assert not load_model(model).proto.functions


def test_bodies_that_are_not_run_make_no_difference_and_a_kernel_does() -> None:
    a = network("main", "com.microsoft.Gelu", "com.microsoft")
    other = network("main", "com.microsoft.Gelu", "com.microsoft", WRONG.replace("1000", "7"))
    assert certify(a, other).certificate.certified
    body_only = network("main", "local.Gelu", "local")
    assert not certify(body_only, a).certificate.certified


def test_a_name_that_onnxruntime_does_not_know_is_a_function() -> None:
    model = network("main", "com.microsoft.Mine", "com.microsoft", WRONG.replace("Add(a, k)", "Gelu(a)"))
    report = rewrite(model, validate=False)
    assert [row.activation for row in report.converted] == ["gelu"]
    assert not any("ignored" in note for note in report.notes)


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_onnxruntime_finds_no_function_in_the_domain_of_onnx(domain: str) -> None:
    model = network("main", "Mine", domain)
    with pytest.raises(ModelError, match="'Mine' is in the domain of ONNX"):
        load_model(model)


def test_packed_weights_stay_packed() -> None:
    """A body of MatMulNBits, whose MatMul and DequantizeLinear look like parts of a block, is not inlined."""
    model = text_model(
        "y = com.microsoft.MatMulNBits<K = 4, N = 8, bits = 4, block_size = 16>(x, w, s) h = Relu(y) "
        "out = MatMul(h, W2)",
        domains={"com.microsoft": 1},
        functions='<opset_import: ["": 17], domain: "com.microsoft"> MatMulNBits (a, w, s) => (b) '
        "{ f = Cast<to = 1>(w) b = MatMul(a, f) }",
        constants={
            "w": onnx.numpy_helper.from_array(np.arange(64, dtype=np.uint8).reshape(8, 1, 8), "w"),
            "s": np.linspace(0.1, 0.2, 8),
        },
    )
    report = rewrite(model)
    assert report.validation.certified
    assert [node.op_type for node in report.rewritten.graph.node].count("MatMulNBits") == 1

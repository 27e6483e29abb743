from __future__ import annotations

import onnx
import pytest

from rewriter.errors import ModelError
from rewriter.files.soundness import operators
from rewriter.files.soundness.operators import check_operators
from rewriter.files.soundness.structure import check_structure
from tests.committed import EACH_FILE, FILES

NEWEST = onnx.defs.onnx_opset_version()


def parse(body: str, opset: int = 17, functions: str = "") -> onnx.ModelProto:
    imports = f'"": {opset}, "local": 1, "com.microsoft": 1'
    header = f"<ir_version: 8, opset_import: [{imports}]>"
    return onnx.parser.parse_model(f"{header} g (float[2, 2] x, bool c) => (float[2, 2] y) {{ {body} }} {functions}")


def function(body: str, opset: int, domain: str = "local", name: str = "f") -> str:
    return f'<domain: "{domain}", opset_import: ["": {opset}]> {name} (p) => (q) {{ {body} }}'


SOUND = {
    "optional input left out": parse("y = Gemm(x, x)"),
    "optional input empty": parse("y = Clip(x, , x)"),
    "optional output empty": parse("y, = Dropout(x)"),
    "variadic": parse("y = Sum(x, x, x, x, x)"),
    "variadic outputs": parse("a, b, y = Split(x)", 13),
    "inputs of an earlier opset": parse("y = Squeeze <axes = [0]> (x)", 11),
    "attribute of an earlier opset": parse("y = Clip <min = 0.0> (x)", 6),
    "no inputs": parse("y = Constant <value_float = 1.0> ()"),
    "another domain": parse("y = local.Add(x)"),
    "unknown operator": parse("y = SimplifiedLayerNormalization(x)"),
    "operator that is younger than the opset": parse("y, a, b, d = LayerNormalization <epsilon = [1.0]> (x, x)", 12),
    "opset of the future": parse("y, z = Add <alpha = 1.0> (x, x, x)", NEWEST + 1),
    "undeclared attribute": parse("y = Softmax <scale = 1.0> (x)"),
    "operator of onnxruntime": parse("y = com.microsoft.BiasGelu(x, x)"),
    "operator of onnxruntime that nothing reads": parse("y = com.microsoft.Unheard()"),
    "operator of that name in another domain": parse("y = local.BiasGelu(x)"),
    "local function called like one of onnxruntime": parse(
        "y = com.microsoft.BiasGelu(x)", functions=function("q = Neg(p)", 17, "com.microsoft", "BiasGelu")
    ),
    "local function called like an operator": parse("y = Add(x)", functions=function("q = Neg(p)", 17, "", "Add")),
    "function of an earlier opset": parse("y = local.f(x)", functions=function("q = Squeeze <axes = [0]> (p)", 11)),
}


@pytest.mark.parametrize("name", SOUND)
def test_nodes_that_suit_their_schemas_pass(name: str) -> None:
    check_operators(SOUND[name])


UNSOUND = {
    "no input": (parse("y = Relu()"), "node '' ('Relu') has 0 inputs where opset 17 allows 1;"),
    "one input of two": (parse("y = MatMul(x)"), "('MatMul') has 1 input where opset 17 allows 2"),
    "too many inputs": (parse("y = Gemm(x, x, x, x)"), "('Gemm') has 4 inputs where opset 17 allows 2 to 3"),
    "no input of any number": (parse("y = Sum()"), "('Sum') has 0 inputs where opset 17 allows at least 1"),
    "too many outputs": (parse("y, z = Relu(x)"), "('Relu') has 2 outputs where opset 17 allows 1"),
    "required input empty": (parse("y = MatMul(, x)"), "('MatMul') lacks its input 0, which opset 17 requires"),
    "inputs of a later opset": (parse("y = Squeeze(x, x)", 11), "has 2 inputs where opset 11 allows 1"),
    "younger than the opset": (parse("y = LayerNormalization(x)", 12), "has 1 input where opset 12 allows at least 2"),
    "opset of the future": (parse("y = Add(x)", NEWEST + 1), f"has 1 input where opset {NEWEST + 1} allows at least 2"),
    "no attribute": (parse("y = Cast(x)"), "('Cast') lacks the attribute 'to', which opset 17 requires"),
    "type of an attribute": (
        parse("y = Transpose <perm = 1.5> (x)"),
        "('Transpose') has the attribute 'perm' of type FLOAT where opset 17 has INTS",
    ),
    "operator of onnxruntime": (
        parse("y = com.microsoft.BiasGelu(x)"),
        "node '' ('BiasGelu') has 1 input where onnxruntime needs at least 2",
    ),
    "the first opset": (parse("y = Neg(x, x, x)", 1), "has 3 inputs where opset 1 allows 1"),
    "type of the second attribute": (
        parse("y = Transpose <other = 1, perm = 1.5> (x)"),
        "('Transpose') has the attribute 'perm' of type FLOAT where opset 17 has INTS",
    ),
    "a reference outside of functions": (
        parse("y = Transpose <perm: ints = @order> (x)"),
        "('Transpose') refers with 'perm' to an attribute of a function, but is in none",
    ),
    "behind a call of a function": (
        parse("a = local.f(x) y = Add(a)", functions=function("q = Neg(p)", 17)),
        "('Add') has 1 input",
    ),
    "behind an operator of another domain": (parse("a = local.Other(x) y = Add(a)"), "('Add') has 1 input"),
    "behind an operator of onnxruntime": (parse("a = com.microsoft.Gelu(x) y = Add(a)"), "('Add') has 1 input"),
    "behind an unknown operator": (parse("a = SimplifiedLayerNormalization(x) y = Add(a)"), "('Add') has 1 input"),
    "in a branch": (
        parse("y = If(c) <then_branch = t () => (z) { z = Add(x) }, else_branch = e () => (z) { z = Neg(x) }>"),
        "('Add') has 1 input",
    ),
    "in a function": (parse("y = local.f(x)", functions=function("q = Add(p)", 17)), "('Add') has 1 input"),
    "for the function's opset": (
        parse("y = local.f(x)", 17, function("q = Squeeze(p, p)", 11)),
        "has 2 inputs where opset 11 allows 1",
    ),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_nodes_that_do_not_are_named(name: str) -> None:
    model, message = UNSOUND[name]
    with pytest.raises(ModelError) as caught:
        check_structure(model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_output_that_is_missing() -> None:
    model = parse("z = Relu(x) y = Neg(x)")
    del model.graph.node[0].output[:]
    with pytest.raises(ModelError, match=r"\('Relu'\) has 0 outputs where opset 17 allows 1"):
        check_structure(model)


def test_attributes_of_ir_version_1_have_no_type() -> None:
    model = parse("y = Transpose <perm = [1, 0]> (x)")
    model.graph.node[0].attribute[0].type = onnx.AttributeProto.UNDEFINED
    check_operators(model)


def test_two_attributes_of_one_name() -> None:
    model = parse("y = Transpose <perm = [1, 0]> (x)")
    model.graph.node[0].attribute.append(model.graph.node[0].attribute[0])
    with pytest.raises(ModelError, match="two attributes of one name"):
        check_operators(model)


def test_operators_of_onnxruntime_need_as_many_inputs_as_it_says() -> None:
    from onnxruntime.capi._pybind_state import get_all_operator_schema

    schemas = {each.name: each for each in get_all_operator_schema() if each.domain == "com.microsoft"}
    assert {name: schemas[name].min_input for name in operators._MICROSOFT} == dict(operators._MICROSOFT)
    assert {schemas[name].min_output for name in operators._MICROSOFT} == {1}


@EACH_FILE
def test_committed_models_pass(path: object) -> None:
    assert path in FILES
    check_operators(onnx.load(str(path)))


@pytest.mark.parametrize("outputs", [[], [""], ["", "z"]])
def test_operators_of_onnxruntime_have_a_first_output(outputs: list[str]) -> None:
    model = parse("y = com.microsoft.Gelu(x)")
    model.graph.node[0].output[:] = outputs
    with pytest.raises(ModelError, match=r"^node '' \('Gelu'\) has no output; export the model again$"):
        check_operators(model)

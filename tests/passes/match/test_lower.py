"""Fused operators taken apart, node by node and in a model; which local functions are inlined."""

from typing import Any

import onnx
import pytest
from onnx import helper

from passes.plan import lower
from rewriter.graph.fused import FUSED


@pytest.mark.parametrize(("operator", "inputs", "attributes", "parts"), [
    ("GemmFastGelu", ["x", "w", ""], {}, ["n/matmul", "n/fastgelu"]),
    ("FusedConv", ["x", "k"], {"activation": "HardSigmoid", "activation_params": [0.25]}, ["n/conv", "n/hardsigmoid"]),
    ("FusedConv", ["x", "k", "b", "z"], {"activation": "Relu"}, None),  # adds a tensor before the activation
    ("FusedConv", ["x", "k"], {"activation": "Softmax"}, None),
    ("FusedGemm", ["x", "w"], {}, None),
    ("FastGelu", ["x", ""], {}, None),  # without a bias there is nothing to do
    ("QLinearAdd", ["x", "s", "z"], {}, None),
])  # fmt: skip
def test_parts(operator: str, inputs: list[str], attributes: dict[str, Any], parts: list[str] | None) -> None:
    made = FUSED["com.microsoft", operator](helper.make_node(operator, inputs, ["y"], "n", **attributes))
    assert (None if made is None else [node.name for node in made]) == parts


def model_of(body: str, functions: str = "", outputs: str = "float[n, 4] out") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1, "d": 1, "e": 1, "attnonly": 1]> '
        f"g (float[n, 4] x, bool c) => ({outputs}) <float[4] b = {{1, 2, 3, 4}}> {{ {body} }} {functions}"
    )


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_a_model_with_nothing_to_lower_is_the_same_object() -> None:
    model = model_of("h = Relu(x) out = com.microsoft.FastGelu(h)")
    lowered, fused, inlined = lower(model)
    assert lowered is model
    assert (fused, inlined) == (frozenset(), ())


def test_a_lowered_model_is_a_copy() -> None:
    model = model_of(
        "p = com.microsoft.BiasGelu(x, b) q = Abs(p) out = If (c) "
        "<then_branch = t () => (float[n, 4] r) { r = com.microsoft.BiasGelu(q, b) }, "
        "else_branch = e () => (float[n, 4] s) { s = Neg(q) }>"
    )
    model.graph.node[0].metadata_props.add(key="scope", value="mlp")
    before = model.SerializeToString(deterministic=True)
    lowered, fused, inlined = lower(model)
    assert model.SerializeToString(deterministic=True) == before
    assert (operators(lowered), {*fused}, inlined) == (["Add", "Gelu", "Abs", "If"], {"p", "r"}, ())
    for node in lowered.graph.node[:2]:
        assert [(entry.key, entry.value) for entry in node.metadata_props] == [("scope", "mlp")]
    assert not lowered.graph.node[2].metadata_props
    bodies = [attribute.g for attribute in lowered.graph.node[3].attribute]
    assert [[node.op_type for node in body.node] for body in bodies] == [["Add", "Gelu"], ["Neg"]]


def test_what_is_kept_is_not_taken_apart() -> None:
    model = model_of("p = com.microsoft.BiasGelu(x, b) out = com.microsoft.BiasGelu(p, b)")
    lowered, fused, _ = lower(model, frozenset({"p"}))
    assert (operators(lowered), {*fused}) == (["BiasGelu", "Add", "Gelu"], {"out"})
    assert lower(model, frozenset({"p", "out"}))[0] is model


BRANCHES = """
z = ReduceMax(a) t = Cast<to = 9>(z) r = If (t) <
  then_branch = p () => (float[n, 4] q) { q = Relu(a) }, else_branch = p () => (float[n, 4] q) { q = Abs(a) }
>
"""


def function(domain: str, name: str, body: str) -> str:
    imports = '<opset_import: ["": 17, "com.microsoft": 1, "d": 1, "e": 1]'
    return f'{imports}, domain: "{domain}"> {name} (a) => (r) {{ {body} }} '


@pytest.mark.parametrize(
    ("functions", "inlined"),
    [
        (function("d", "f", "r = Relu(a)"), ("d::f",)),
        (function("d", "f", "r = Neg(a)"), ()),
        (function("d", "f", 'r = Einsum<equation = "nd,df->nf">(a, a)'), ("d::f",)),
        (function("d", "f", "n = Neg(a) r = Exp(n)"), ("d::f",)),
        (function("d", "f", "r = com.microsoft.QuickGelu(a)"), ("d::f",)),
        (function("d", "f", "r = e.Relu(a)"), ()),  # of another domain
        (function("attnonly", "f", "r = Relu(a)"), ("attnonly::f",)),  # a name says nothing
        # Through calls, however deep, in any order.
        (
            function("d", "f", "r = e.g(a)") + function("e", "g", "r = e.h(a)") + function("e", "h", "r = Tanh(a)"),
            ("d::f", "e::g", "e::h"),
        ),
        (
            function("d", "f", "r = e.g(a)") + function("e", "g", "r = Neg(a)") + function("e", "h", "r = Tanh(a)"),
            ("e::h",),
        ),
        # In a body.
        (function("d", "f", BRANCHES), ("d::f",)),
    ],
    ids=["activation", "another", "einsum", "exp", "microsoft", "domain", "heads", "calls", "other-calls", "body"],
)
def test_functions_with_parts_of_blocks_are_inlined(functions: str, inlined: tuple[str, ...]) -> None:
    domain = "attnonly" if '"attnonly"> f' in functions else "d"
    model = model_of(f"out = {domain}.f(x)", functions)
    before = model.SerializeToString(deterministic=True)
    lowered, _, found = lower(model)
    assert found == inlined
    assert ("f" in operators(lowered)) is not any(name.endswith("::f") for name in inlined)
    assert model.SerializeToString(deterministic=True) == before


def test_functions_of_heads_stay() -> None:
    model = model_of("out = d.f(x)", function("d", "f", "r = Relu(a)"))
    assert lower(model, whole=frozenset([("d", "f")]))[0] is model


def test_functions_of_another_opset_are_left() -> None:
    """onnx does not inline them, since their nodes would get another meaning."""
    model = model_of("out = d.f(x)", '<opset_import: ["": 13], domain: "d"> f (a) => (r) { r = Relu(a) }')
    lowered, _, inlined = lower(model)
    assert lowered is model
    assert inlined == ()

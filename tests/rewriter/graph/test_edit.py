"""Splicing: what goes, what stays, in a graph that a replacement is put into."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from rewriter import certify
from rewriter.graph.edit import Replacement, drop_dead, inlined, splice
from rewriter.graph.view import GraphView, all_views, graph_at
from rewriter.ort import open_session


def model_of(body: str, weights: str = "", outputs: str = "") -> onnx.ModelProto:
    header = f'<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] out{outputs})'
    return onnx.parser.parse_model(f"{header} <{weights}> {{ {body} }}")


def replaced(model: onnx.ModelProto, output: str, operator: str, *inputs: str) -> onnx.ModelProto:
    """The model with the maker of `output` replaced by one new node."""
    view = all_views(model)[0]
    splice(model, view, [by(view, output, onnx.helper.make_node(operator, list(inputs), [output], "new"))])
    return model


def by(view: GraphView, output: str, *nodes: onnx.NodeProto, **further: Any) -> Replacement:
    """New nodes in the place of the one that makes a tensor."""
    return Replacement(output, nodes, **{"initializers": (), **further})


def made(model: onnx.ModelProto) -> list[str]:
    return [name for node in model.graph.node for name in node.output]


@pytest.mark.parametrize(
    ("body", "outputs", "left"),
    [
        ("a = Exp(x) b = Neg(a) out = Abs(b)", "", ["b", "out"]),
        ("a = Exp(x) b = Neg(a) c = Abs(a) out = Add(b, c)", "", ["a", "b", "c", "out"]),
        ("a = Exp(x) b = Neg(a) out = Abs(b)", ", float[2] a", ["a", "b", "out"]),
        ("a = Exp(x) dead = Sin(x) b = Neg(a) out = Abs(b)", "", ["dead", "b", "out"]),
        ("a = Exp(x) dead = Sin(a) b = Neg(a) out = Abs(b)", "", ["a", "dead", "b", "out"]),
        ("z = Sin(x) a = Exp(z) b = Neg(a) out = Abs(b)", "", ["b", "out"]),
        ("z = Sin(x) a = Exp(z) b = Neg(a) out = Add(b, z)", "", ["z", "b", "out"]),
        ("a, spare = Split<axis = 0>(x) b = Neg(a) out = Concat<axis = 0>(b, spare)", "", ["a", "spare", "b", "out"]),
        ("a = Exp(x) p, q = Split(a) b = Concat<axis = 0>(p, q) out = Add(b, a)", "", ["a", "b", "out"]),
        ("a = Exp(x) c = Neg(a) b = Mul(c, c) out = Add(b, a)", "", ["a", "b", "out"]),
        (
            "a = Exp(x) b = Neg(a) c = If (yes) <then_branch = t () => (float[2] p) { p = Sin(a) }, "
            "else_branch = e () => (float[2] q) { q = Cos(b) }> out = Add(b, c)",
            "",
            ["a", "b", "c", "out"],
        ),
    ],
)
def test_only_what_became_dead_goes(body: str, outputs: str, left: list[str]) -> None:
    assert made(replaced(model_of(body, "bool yes = {1}", outputs), "b", "Identity", "x")) == left


def test_new_nodes_stand_where_the_old_one_stood() -> None:
    model = replaced(model_of("a = Exp(x) b = Neg(a) c = Abs(x) out = Add(b, c)"), "b", "Sin", "x")
    assert [node.op_type for node in model.graph.node] == ["Sin", "Abs", "Add"]
    onnx.checker.check_model(model)


@pytest.mark.parametrize("version", [3, 4, 8])
def test_new_constants_change_no_signature(version: int) -> None:
    """Before IR version 4 every initializer is an input too, so a new constant becomes a node there."""
    model = model_of("a = Exp(x) b = Neg(a) out = Abs(b)")
    model.ir_version = version
    view = all_views(model)[0]
    new = onnx.helper.make_node("Mul", ["x", "k"], ["b"], "new")
    constant = onnx.helper.make_tensor("k", onnx.TensorProto.FLOAT, [2], [3.0, 4.0])
    splice(model, view, [by(view, "b", new, initializers=(constant,))])
    assert [value.name for value in model.graph.input] == ["x"]
    if version >= 4:
        assert list(model.graph.initializer) == [constant]
        assert [node.op_type for node in model.graph.node] == ["Mul", "Abs"]
    else:
        assert not model.graph.initializer
        assert [node.op_type for node in model.graph.node] == ["Constant", "Mul", "Abs"]
        made_by = model.graph.node[0]
        assert (made_by.name, list(made_by.output), list(made_by.input)) == ("k/constant", ["k"], [])
        assert [(entry.name, entry.t) for entry in made_by.attribute] == [("value", constant)]
    onnx.checker.check_model(model)


def test_what_the_new_nodes_read_stays() -> None:
    model = model_of("k = Sin(x) l = Cos(x) m = Add(k, l) b = Neg(m) out = Abs(b)", "float[2] w = {1, 2}")
    view = all_views(model)[0]
    holder = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[2] k, bool c) => (float[2] b) { b = If (c) '
        "<then_branch = t () => (float[2] p) { p = Exp(l) }, else_branch = e () => (float[2] q) { q = Exp(l) }> }"
    ).graph.node[0]
    holder.input[0] = "w"
    splice(model, view, [Replacement("b", (holder,), ())])
    assert made(model) == ["l", "b", "out"]
    assert [tensor.name for tensor in model.graph.initializer] == ["w"]


def test_replacements_that_belong_together() -> None:
    exposed = onnx.helper.make_tensor_value_info("a2", onnx.TensorProto.FLOAT, [2])
    body = "z = Sin(x) a = Exp(z) b = Neg(a) y = Cos(x) c = Abs(y) out = Add(b, c)"
    model = model_of(body)
    view = all_views(model)[0]
    first = onnx.helper.make_node("Relu", ["x"], ["b"])
    copies = (onnx.helper.make_node("Identity", ["x"], ["a2"]), onnx.helper.make_node("Tanh", ["a2"], ["c"]))
    other = by(view, "c", *copies, exposed=(exposed,))
    splice(model, view, [by(view, "b", first, further=(other,))])
    assert made(model) == ["b", "a2", "c", "out"]
    assert [value.name for value in model.graph.output] == ["out", "a2"]
    onnx.checker.check_model(model)


def test_replaced_nodes_that_read_each_other() -> None:
    model = model_of("z = Sin(x) a = Exp(z) b = Neg(a) c = Add(b, z) out = Abs(c)")
    view = all_views(model)[0]
    parts = [
        by(view, name, onnx.helper.make_node(operator, [given], [name]))
        for name, operator, given in (("b", "Relu", "x"), ("c", "Tanh", "b"))
    ]
    splice(model, view, parts)
    assert made(model) == ["b", "c", "out"]


def test_a_body_is_spliced_in_place() -> None:
    model = model_of(
        "out = If (yes) <then_branch = t () => (float[2] p) { r = Sin(x) p = Exp(r) }, "
        "else_branch = e () => (float[2] q) { q = Cos(x) }>",
        "bool yes = {1}",
    )
    inner = next(view for view in all_views(model) if view.where.endswith("then_branch"))
    exposed = onnx.helper.make_tensor_value_info("p2", onnx.TensorProto.FLOAT, [2])
    new = onnx.helper.make_node("Neg", ["x"], ["p"])
    splice(model, inner, [Replacement("p", (new,), (), exposed=(exposed,))])
    graph = graph_at(model, inner.path)
    assert graph.name == "t"
    assert [(node.op_type, list(node.output)) for node in graph.node] == [("Neg", ["p"])]
    assert [value.name for value in graph.output] == ["p"]
    assert [value.name for value in model.graph.output] == ["out"]


CALLED = onnx.parser.parse_function('<opset_import: ["": 17], domain: "d"> f (p) => (q) { q = Neg(p) }')
OTHER = onnx.parser.parse_function('<opset_import: ["": 17], domain: "e"> f (p) => (q) { q = Abs(p) }')


def test_functions_come_once_with_their_domains() -> None:
    model = model_of("a = Exp(x) b = Neg(a) c = Sin(b) out = Abs(c)")
    model.functions.append(CALLED)
    model.functions[0].doc_string = "was there"
    model.opset_import.append(onnx.helper.make_opsetid("d", 7))
    view = all_views(model)[0]
    replacements = [
        by(view, output, onnx.helper.make_node("f", ["x"], [output], domain=domain), functions=given)
        for output, domain, given in (("b", "d", (CALLED, OTHER)), ("c", "e", (OTHER,)))
    ]
    splice(model, view, replacements)
    assert [(each.domain, each.name, each.doc_string) for each in model.functions] == [
        ("d", "f", "was there"),
        ("e", "f", ""),
    ]
    assert [(each.domain, each.version) for each in model.opset_import] == [("", 17), ("d", 7), ("e", 1)]


@pytest.mark.parametrize(
    ("body", "outputs", "nodes", "weights"),
    [
        ("k = Neg(w) m = Abs(k) out = Exp(x)", "", ["out"], ["u"]),
        ("k = Neg(w) m = Abs(k) out = Add(x, k)", "", ["k", "out"], ["w", "u"]),
        ("k = Neg(w) m = Abs(k) out = Add(x, m)", "", ["k", "m", "out"], ["w", "u"]),
        ("k = Neg(w) m = Abs(k) out = Exp(x)", ", float[2] k", ["k", "out"], ["w", "u"]),
        ("k = Neg(w) m = Abs(k) out = Add(x, w)", "", ["out"], ["w", "u"]),
        ("k = Neg(w) m = Abs(k) l = Sin(u) out = Exp(x)", "", ["l", "out"], ["u"]),
        ("m, n = Split(w) k = Neg(u) out = Add(x, n)", "", ["m", "n", "k", "out"], ["w", "u"]),
    ],
    ids=["chain", "shared", "read", "output", "weight", "another", "second-output"],
)
def test_constants_that_nothing_reads_any_more(body: str, outputs: str, nodes: list[str], weights: list[str]) -> None:
    model = model_of(body, "float[2] w = {1, 2}, float[2] u = {1, 2}", outputs)
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("m", onnx.TensorProto.FLOAT, [2]))
    drop_dead(model.graph, frozenset({"m"}))
    assert made(model) == nodes
    assert [tensor.name for tensor in model.graph.initializer] == weights
    assert [value.name for value in model.graph.value_info] == (["m"] if "m" in nodes else [])


@pytest.mark.parametrize("reader", ["body", "output", "input", "nobody"])
def test_what_else_reads_an_initializer(reader: str) -> None:
    body = "p = Abs(w)" if reader == "body" else "p = Abs(x)"
    model = model_of(
        "a = Add(x, w) c = Constant<value = bool {1}>() "
        f"b = If(c) <then_branch = t () => (float[2] p) {{ {body} }}, else_branch = e () => (float[2] q) "
        "{ q = Neg(x) }> out = Add(a, b)",
        "float[2] w = {1, 2}",
    )
    value = onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [2])
    if reader in ("output", "input"):
        getattr(model.graph, reader).append(value)
    replaced(model, "a", "Neg", "x")
    assert [tensor.name for tensor in model.graph.initializer] == ([] if reader == "nobody" else ["w"])


X = np.array([[0.5, -1.5, 0.25]], np.float32)
HEAD = '<domain: "local", opset_import: ["": 17, "local": 1]>'
LEAKY = f"{HEAD} f <alpha: float = 0.9> (a) => (b) {{ b = LeakyRelu<alpha: float = @alpha>(a) }}"
OUTER = f"{HEAD} g (a) => (b) {{ b = local.f(a) }} {LEAKY}"
PASSED_ON = f"{HEAD} g <alpha: float = 0.4> (a) => (b) {{ b = local.f<alpha: float = @alpha>(a) }} {LEAKY}"
MAYBE = f"{HEAD} g <alpha> (a) => (b) {{ b = local.f<alpha: float = @alpha>(a) }} {LEAKY}"
BODY = (
    f"{HEAD} g (a) => (b) {{ t = Constant<value = bool {{1}}>() b = If(t) <then_branch = p () => (float[1, 3] r) "
    f"{{ r = local.f(a) }}, else_branch = q () => (float[1, 3] s) {{ s = Identity(a) }}> }} {LEAKY}"
)


def model(call: str, functions: str) -> onnx.ModelProto:
    versions = '<ir_version: 9, opset_import: ["": 17, "local": 1]>'
    return parser.parse_model(f"{versions} g (float[1, 3] x) => (float[1, 3] y) {{ {call} }} {functions}")


@pytest.mark.parametrize(
    ("call", "functions"),
    [
        ("y = local.f(x)", LEAKY),
        ("y = local.f<alpha = 0.3>(x)", LEAKY),
        ("z = local.f(x) y = local.f<alpha = 0.3>(z)", LEAKY),
        ("y = local.g(x)", OUTER),
        ("y = local.g(x)", PASSED_ON),
        ("y = local.g<alpha = 0.2>(x)", PASSED_ON),
        ("y = local.g(x)", BODY),
        ("y = local.g<alpha = 0.2>(x)", MAYBE),
    ],
)
@pytest.mark.parametrize("only", [None, [("local", "f"), ("local", "g")]])
def test_defaults_hold(call: str, functions: str, only: list[tuple[str, str]] | None) -> None:
    before = model(call, functions)
    stated = before.SerializeToString()
    if functions == MAYBE and only:
        with pytest.raises(RuntimeError, match="may be absent"):
            inlined(before, only)
        return
    after = inlined(before, only)
    assert before.SerializeToString() == stated
    assert bool(after.functions) is (functions == MAYBE)
    expected, made = (open_session(each, optimise=False).run({"x": X})["y"] for each in (before, after))
    np.testing.assert_array_equal(made, expected)


def test_another_default_is_another_function() -> None:
    before, after = model("y = local.g(x)", OUTER), model("y = local.g(x)", OUTER.replace("0.9", "0.5"))
    assert certify(before, before).certificate.certified
    assert not certify(before, after).certificate.certified

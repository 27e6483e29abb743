"""What a sound model is: names, order, tensors, functions, operators; and unsorted graphs, which are put in order."""

import re
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from passes.match.linear import LINEAR_OPERATORS
from rewriter.errors import ModelError, ValidationError
from rewriter.evaluate.table import ELEMENTWISE, MICROSOFT
from rewriter.files.load import _operators, check_structure, load_model, sort_main_graph
from rewriter.graph.fused import FUSED
from rewriter.graph.walk import MAX_DEPTH
from rewriter.ort import open_session
from tests.changes import Change as Edit
from tests.changes import changed, set_nodes
from tests.counting import grows_linearly


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 17, "local": 1]> ' + text)


IF = "If(c) <then_branch = t () => (float[2] o) { %s }, else_branch = e () => (float[2] o) { o = Neg(x) }>"

SOUND = {
    "chain": "g (float[2] x) => (float[2] y) { a = Relu(x) y = Neg(a) }",
    "output behind one without a name": "g (float[2] x) => (float[2] y) { , h = Split(x) y = Neg(h) }",
    "outputs without names": "g (float[2] x) => (float[2] y) { h, = Dropout(x) y, = Dropout(h) }",
    "optional input and output": "g (float[2] x) => (float[2] y) { a = Clip(x, , x) y, = Dropout(a) }",
    "input is output": "g (float[2] x) => (float[2] x) {}",
    "initializer is default of input": "g (float[2] x) => (float[2] y) <float[2] x = {1, 2}> { y = Neg(x) }",
    "branches share names": f"g (float[2] x, bool c) => (float[2] y) {{ y = {IF % 'o = Neg(x)'} }}",
    "branch reads outer": f"g (float[2] x, bool c) => (float[2] y) {{ a = Neg(x) y = {IF % 'o = Neg(a)'} }}",
    "branch output has the name of the node's": (
        "g (float[2] x, bool c) => (float[2] y) { y = If(c) "
        "<then_branch = t () => (float[2] y) { y = Neg(x) }, "
        "else_branch = e () => (float[2] y) { y = Relu(x) }> }"
    ),
    "local function": (
        "g (float[2] x) => (float[2] y) { y = local.f(x) } "
        '<domain: "local", opset_import: ["": 17]> f (p) => (q) { r = Neg(p) q = Relu(r) }'
    ),
}


FUNCTION = ' <domain: "local", opset_import: ["": 17, "local": 1]> '
CALL = "y = local.f(x)"
CALLED = f"g (float[2] x) => (float[2] y) {{ {CALL} }}{FUNCTION}"

ORDER, SSA = "must be topologically sorted, however input", "must be in single static assignment (SSA) form, however"

UNSOUND = {
    "undefined input": ("y = Add(x, z)", f"{ORDER} 'z'"),
    "out of order": ("y = Neg(a) a = Relu(x)", f"{ORDER} 'a'"),
    "branch reads later name": (f"y = {IF % 'o = Neg(a)'} a = Relu(x)", f"{ORDER} 'a'"),
    "cycle through a branch": (f"y = {IF % 'o = Neg(a)'} a = Relu(y)", f"{ORDER} 'a'"),
    "output twice": ("y = Neg(x) y = Relu(x)", f"{SSA} 'y'"),
    "output behind one without a name": (", x = Split(x) y = Neg(x)", f"{SSA} 'x'"),
    "branch output shadows": (f"a = Neg(x) y = {IF % 'a = Neg(x) o = Neg(a)'}", f"{SSA} 'a'"),
    "branch returns outer name": (f"y = {IF.replace('[2] o', '[2] x', 1) % ''}", "Graph output 'x' is not an output"),
    "function twice": (CALL + 2 * (FUNCTION + "f (p) => (q) { q = Neg(p) }"), "local function 'f' is defined twice"),
    "operands that a function lacks": (
        CALL.replace("(x)", "(x, x)") + FUNCTION + "f (p) => (q) { q = Neg(p) }",
        "more operands or outputs than the",
    ),
    "function calls itself": (CALL + FUNCTION + "f (p) => (q) { q = local.f(p) }", "local function 'f' calls itself"),
    "mutual recursion": (
        CALL + FUNCTION + "f (p) => (q) { q = local.h(p) }" + FUNCTION + "h (p) => (q) { q = local.f(p) }",
        "calls itself",
    ),
    "recursion in a branch": (
        CALL + FUNCTION + "f (x, c) => (q) { q = " + IF % "o = local.f(x, c)" + " }",
        "local function 'f' calls itself",
    ),
    "function reads unknown": (CALL + FUNCTION + "f (p) => (q) { q = Neg(x) }", f"{ORDER} 'x'"),
    "function output unknown": (
        CALL + FUNCTION + "f (p) => (q) { r = Neg(p) }",
        "local function 'f' breaks a rule of ONNX (opset 17): Graph output 'q' is not an output",
    ),
}


EDITS: dict[str, tuple[Edit, str]] = {
    "no graph": (lambda m: m.ClearField("graph"), "has no graph"),
    "no IR version": (lambda m: m.ClearField("ir_version"), "has no IR version"),
    "no operator set": (lambda m: m.ClearField("opset_import"), "names no operator set"),
    "operator set twice": (lambda m: m.opset_import.add(domain="ai.onnx", version=9), "domain '' is named twice"),
    "operator set without version": (
        lambda m: m.opset_import.add(domain="new"),
        "domain 'new' is named twice or has no",
    ),
    "operator set beyond 32 bits": (lambda m: m.opset_import.add(domain="new", version=2**40), "domain 'new' is named"),
    "operator set of a function beyond 32 bits": (
        lambda m: m.functions.add(name="f", domain="l").opset_import.add(version=2**40),
        "domain '' is named",
    ),
    "no outputs": (lambda m: m.graph.ClearField("output"), "the model has no outputs"),
    "empty input name": (lambda m: m.graph.input.add(), "'name' of 'value_info' is required"),
    "empty initializer name": (lambda m: m.graph.initializer.add(data_type=1, dims=[0]), "must have a non-empty name"),
    "sparse initializer repeats": (
        lambda m: m.graph.sparse_initializer.add(
            values=TensorProto(name="w", data_type=1, dims=[0]), indices=TensorProto(data_type=7, dims=[0])
        ),
        "w initializer name is not unique",
    ),
    "sparse dims": (
        lambda m: m.graph.sparse_initializer.add(
            values=TensorProto(name="s", data_type=1, dims=[0]), indices=TensorProto(data_type=7, dims=[0]), dims=[-1]
        ),
        "tensor 's' has the negative dimension -1",
    ),
    "no operator": (lambda m: m.graph.node.add(output=["z"]), "'op_type' of 'node' is required"),
    "reference": (
        lambda m: m.graph.node[0].attribute.add(name="alpha", type=1, ref_attr_name="alpha"),
        "node '' ('Add') refers with 'alpha' to an attribute of a function, but is in none",
    ),
    "function in the domain of ONNX": (
        lambda m: m.functions.add(name="Mine", domain="ai.onnx"),
        "local function 'Mine' is in the domain of ONNX, where onnxruntime finds no function",
    ),
    "unnamed function": (lambda m: m.functions.add(domain="local"), "unusable name ''"),
}


@pytest.mark.parametrize("place", ["initializer", "attribute", "function"])
def test_tensors_that_do_not_hold_what_they_say(place: str) -> None:
    model = parse(CALLED + "f (p) => (q) { q = Neg(p) }")
    named = TensorProto(name="w\n", data_type=1, dims=[2], raw_data=bytes(7))
    if place == "initializer":
        model.graph.initializer.append(named)
    else:
        nodes = model.graph.node if place == "attribute" else model.functions[0].node
        nodes.add(op_type="Constant", output=["k"]).attribute.add(name="value", t=named)
    with pytest.raises(ModelError, match=r"tensor 'w\\n' .*holds 7 bytes of raw data where its dimensions need 8"):
        check_structure(model)


@pytest.mark.parametrize(
    "text",
    [
        "g (float[2] NAME) => (float[2] y) { y = Neg(NAME) }",
        "g (float[2] x) => (float[2] NAME) { NAME = Neg(x) }",
        "g (float[2] x) => (float[2] y) { y = NAME(x) }",
        "g (float[2] x) => (float[2] y) { y = NAME.f(x) }",
        "g (float[2] x) => (float[2] y) <float NAME = {1}> { y = Neg(x) }",
        "g (float[2] x) => (float[2] y) { y = Neg(NAME) }",
        "g (float[2] x) => (float[2] y) { y = Elu<NAME = 1>(x) }",
        "g (float[NAME] x) => (float[2] y) { y = Neg(x) }",
        "g (float[2] x) => (float[NAME] y) { y = Neg(x) }",
        CALLED + "f (NAME) => (q) { q = Neg(NAME) }",
        CALLED + "NAME (p) => (q) { q = Neg(p) }",
        f"g (float[2] x) => (float[2] y) {{ y = {IF % 'o = Add(NAME, x)'} }}",
    ],
)
def test_names_that_are_not_utf8_are_refused(text: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(parse(text).SerializeToString().replace(b"NAME", b"\xff\xfeAB"))
    assert str(caught.value).isprintable()
    assert r"\\xff\\xfe" in str(caught.value)


def nested(depth: int) -> onnx.ModelProto:
    model = parse("g (bool x) => (bool x) {}")
    graph = model.graph
    for _ in range(depth):
        node = graph.node.add(op_type="If", input=["x"], output=[""])
        node.attribute.add(name="else_branch", type=onnx.AttributeProto.GRAPH).g.SetInParent()
        graph = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
        graph.SetInParent()
    return model


@pytest.mark.parametrize("fault", [None, "topologically sorted"])
def test_time_is_linear(fault: str | None) -> None:
    def chain(length: int) -> Callable[[], None]:
        model = parse(f"g (float[2] t0) => (float[2] t{length}) {{}}")
        nodes = [onnx.NodeProto(op_type="Relu", input=[f"t{i}"], output=[f"t{i + 1}"]) for i in range(length)]
        model.graph.node.extend(nodes[::-1] if fault else nodes)

        def checked() -> None:
            with nullcontext() if fault is None else pytest.raises(ModelError, match=fault):
                check_structure(model)

        return checked

    grows_linearly(chain, 200, 400, 1600)


def doubling(count: int, calls: int) -> onnx.ModelProto:
    """Each function has two nodes and calls the one before it twice: 2 (2^n - 1), and so on for each call."""
    steps = " ".join(f"t{i + 1} = local.f{count - 1}(t{i})" for i in range(calls))
    model = parse(f"g (float[2] t0) => (float[2] t{calls}) {{ {steps} }}")
    for index in range(count):
        inner = f"local.f{index - 1}" if index else "Neg"
        body = onnx.parser.parse_function(f"{FUNCTION} f{index} (p) => (q) {{ r = {inner}(p) q = {inner}(r) }}")
        model.functions.append(body)
    return model


def chain(count: int) -> onnx.ModelProto:
    model = parse("g (float[2] x) => (float[2] y) { y = local.f0(x) }")
    for index in range(count):
        inner = f"local.f{index + 1}" if index < count - 1 else "Neg"
        model.functions.append(onnx.parser.parse_function(f"{FUNCTION} f{index} (p) => (q) {{ q = {inner}(p) }}"))
    return model


def test_a_chain_of_functions_is_as_long_as_onnxruntime_takes() -> None:
    open_session(chain(100))
    with pytest.raises(ValidationError):
        open_session(chain(101))


# Unsorted graphs, as onnxruntime's float16 converter writes them ---------------------------------------------

SORTED = "g (float[n] x) => (float[n] d) { a = Neg(x) b = Exp(a) c = Add(a, b) d = Mul(c, x) }"


def test_a_file_is_sorted_and_a_graph_in_memory_refused_rather_than_changed() -> None:
    model = parse(SORTED)
    sort_main_graph(model)
    assert model == parse(SORTED)
    set_nodes(model.graph.node, reversed(model.graph.node))
    loaded = load_model(model.SerializeToString())
    assert [node.op_type for node in loaded.proto.graph.node] == ["Neg", "Exp", "Add", "Mul"]
    with pytest.raises(ModelError, match="topologically sorted"):
        load_model(model)


def test_a_cycle_is_named() -> None:
    model = parse(SORTED)
    model.graph.node[0].input[0] = "c"
    with pytest.raises(ModelError, match=r"cycle through node '' \('(Neg|Exp|Add)'\)"):
        load_model(model.SerializeToString())


def test_body_that_reads_a_later_name_is_sorted_with_its_node() -> None:
    body = "then_branch = t () => (float[n] u) { u = Neg(a) }, else_branch = e () => (float[n] v) { v = Exp(a) }"
    model = parse(f"g (bool c, float[n] x) => (float[n] out) {{ out = If<{body}>(c) a = Neg(x) }}")
    sort_main_graph(model)
    assert [node.op_type for node in model.graph.node] == ["Neg", "If"]


NEWEST = onnx.defs.onnx_opset_version()


def made(body: str, opset: int = 17, functions: str = "") -> onnx.ModelProto:
    imports = f'"": {opset}, "local": 1, "com.microsoft": 1'
    header = f"<ir_version: 8, opset_import: [{imports}]>"
    return onnx.parser.parse_model(f"{header} g (float[2, 2] x, bool c) => (float[2, 2] y) {{ {body} }} {functions}")


def function(body: str, opset: int, domain: str = "local", name: str = "f") -> str:
    return f'<domain: "{domain}", opset_import: ["": {opset}]> {name} (p) => (q) {{ {body} }}'


SUITED = {
    **{name: parse(text) for name, text in SOUND.items()},
    "bodies as deep as is allowed": nested(MAX_DEPTH),
    "as many nodes as are allowed": doubling(22, 1),
    "a chain of functions as long as is allowed": chain(100),
    "optional input left out": made("y = Gemm(x, x)"),
    "optional input empty": made("y = Clip(x, , x)"),
    "optional output empty": made("y, = Dropout(x)"),
    "variadic": made("y = Sum(x, x, x, x, x)"),
    "variadic outputs": made("a, b, y = Split(x)", 13),
    "inputs of an earlier opset": made("y = Squeeze <axes = [0]> (x)", 11),
    "attribute of an earlier opset": made("y = Clip <min = 0.0> (x)", 6),
    "no inputs": made("y = Constant <value_float = 1.0> ()"),
    "another domain": made("y = local.Add(x)"),
    "unknown operator": made("y = SimplifiedLayerNormalization(x)"),
    "operator that is younger than the opset": made("y, a, b, d = LayerNormalization <epsilon = [1.0]> (x, x)", 12),
    "opset of the future": made("y, z = Add <alpha = 1.0> (x, x, x)", NEWEST + 1),
    "operator of onnxruntime": made("y = com.microsoft.BiasGelu(x, x)"),
    "operator of onnxruntime that nothing reads": made("y = com.microsoft.Unheard()"),
    "operator of that name in another domain": made("y = local.BiasGelu(x)"),
    "function of an earlier opset": made("y = local.f(x)", functions=function("q = Squeeze <axes = [0]> (p)", 11)),
}


@pytest.mark.parametrize("name", SUITED)
def test_sound_models_pass(name: str) -> None:
    check_structure(SUITED[name])


ADD = "breaks a rule of ONNX (opset 17): Node with schema(::Add:14) has input size 1"

UNSUITED = {
    "no input": (
        made("y = Relu()"),
        "the graph breaks a rule of ONNX (opset 17): Node with schema(::Relu:14) has input size 0 not in range",
    ),
    "required input empty": (made("y = MatMul(, x)"), "input 0 is marked single but has an empty string"),
    "inputs of a later opset": (made("y = Squeeze(x, x)", 11), "has input size 2 not in range [min=1, max=1]"),
    "younger than the opset": (made("y = LayerNormalization(x)", 12), "has 1 input and needs at least 2"),
    "opset of the future": (made("y = Add(x)", NEWEST + 1), "has 1 input and needs at least 2"),
    "type of an attribute": (made("y = Transpose <perm = 1.5> (x)"), "Expected: 'INTS', actual: 'FLOAT'"),
    "operator of onnxruntime": (
        made("y = com.microsoft.BiasGelu(x)"),
        "node '' ('BiasGelu') has 1 input and needs at least 2",
    ),
    "operator of onnxruntime with two inputs": (made("y = com.microsoft.SkipLayerNormalization(x, x)"), "at least 3"),
    "a reference outside of functions": (
        made("y = Transpose <perm: ints = @order> (x)"),
        "('Transpose') refers with 'perm' to an attribute of a function, but is in none",
    ),
    **{
        f"behind {call}": (made(f"a = {call}(x) y = Add(a)", functions=function("q = Neg(p)", 17)), ADD)
        for call in ("local.f", "local.Other", "com.microsoft.Gelu", "SimplifiedLayerNormalization")
    },
    "in a branch": (
        made("y = If(c) <then_branch = t () => (z) { z = Add(x) }, else_branch = e () => (z) { z = Neg(x) }>"),
        ADD,
    ),
    "in a function": (made("y = local.f(x)", functions=function("q = Add(p)", 17)), ADD),
    "for the function's opset": (
        made("y = local.f(x)", 17, function("q = Squeeze(p, p)", 11)),
        "has input size 2 not in range [min=1, max=1]",
    ),
}


TURNED = made("z = Transpose <perm = [1, 0]> (x) y = Neg(x)")
PLAIN = parse("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }")
SPOILED: dict[str, tuple[Edit, str]] = {
    "no output": (lambda m: m.graph.node[0].ClearField("output"), "has output size 0 not in range"),
    "no type": (lambda m: setattr(m.graph.node[0].attribute[0], "type", 0), "mismatch in attribute perm"),
    "twice": (lambda m: m.graph.node[0].attribute.append(m.graph.node[0].attribute[0]), "appeared multiple times"),
}
"""What text cannot say of a node."""


def with_header(text: str) -> onnx.ModelProto:
    main, mark, rest = text.partition(FUNCTION)
    return parse(f"g (float[2] x, bool c) => (float[2] y) <float[2] w = {{1, 2}}> {{ {main} }} {mark}{rest}")


REFUSED = {
    **{name: (with_header(text), reason) for name, (text, reason) in UNSOUND.items()},
    **{name: (changed(PLAIN, edit), reason) for name, (edit, reason) in EDITS.items()},
    **{f"an attribute or output: {name}": (changed(TURNED, edit), said) for name, (edit, said) in SPOILED.items()},
    **{f"a node: {name}": case for name, case in UNSUITED.items()},
    **{f"{depth} bodies": (nested(depth), "nest deeper than 30 levels") for depth in (MAX_DEPTH + 1, 10_000)},
    **{
        f"{count} functions, {calls} calls": (doubling(count, calls), "yields more than 10,000,000 nodes")
        for count, calls in ((23, 1), (22, 2), (60, 1))
    },
    **{
        f"a chain of {count} functions": (chain(count), "local functions call each other more than 100 deep")
        for count in (101, 5000)  # the second is deeper than Python recurses
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsound_models_are_refused(name: str) -> None:
    model, reason = REFUSED[name]
    with pytest.raises(ModelError, match=re.escape(reason)) as caught:
        check_structure(model)
    assert "\n" not in str(caught.value)


def test_an_output_that_nobody_reads_needs_no_name() -> None:
    """Nor do tensors, graphs and types in attributes trouble onnx's checker, which is shown none of them."""
    model = made(
        "z, = TopK(x, k) t = Constant <value = float[1] {3.0}> () o = Optional <type = float[2]> () y = Neg(x)"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.int64), "k"))
    model.graph.node[0].output[:] = ["", "i"]
    check_structure(model)


def test_onnxruntime_knows_every_operator_that_is_read() -> None:
    read = {key for table in (LINEAR_OPERATORS, FUSED, ELEMENTWISE) for key in table if key[0] == MICROSOFT}
    assert read <= _operators().keys()


@pytest.mark.parametrize("outputs", [[], [""], ["", "z"]])
def test_operators_of_onnxruntime_have_a_first_output(outputs: list[str]) -> None:
    model = made("w = com.microsoft.Gelu(x) y = Neg(x)")
    model.graph.node[0].output[:] = outputs
    with pytest.raises(ModelError, match=r"^node '' \('Gelu'\) has no output; export the model again$"):
        check_structure(model)


def test_an_attribute_that_a_function_passes_on_without_its_type() -> None:
    """onnxruntime runs it, and `onnx.parser` writes it so."""
    body = '<domain: "local", opset_import: ["": 17]> act <alpha> (p) => (q) { q = LeakyRelu<alpha = @alpha>(p) }'
    model = parse(f"g (float[2] x) => (float[2] y) {{ y = local.act<alpha = 0.1>(x) }} {body}")
    assert not model.functions[0].node[0].attribute[0].type
    check_structure(model)
    model.functions[0].node[0].attribute[0].name = "beta"
    with pytest.raises(ModelError, match="of 'attr' is required but missing"):
        check_structure(model)

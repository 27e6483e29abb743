"""What no block claims must be unchanged: a model with one block, and around it all that a model may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from passes.forms.builder import BLOCK_KEY, DOMAIN
from passes.options import Options
from passes.plan import Plan, apply, make_plan
from rewriter import ExitStatus, rewrite, validate
from rewriter.api.rows import claim_of
from rewriter.errors import RewriteError
from rewriter.files.load import load_model
from rewriter.proof.prove import prove
from rewriter.proof.records import Claimed
from tests import changes
from tests.changes import body, copied, insert, maker
from tests.committed import EACH_FILE, FOLDER
from tests.conftest import slow
from tests.textmodels import SILU, mlp, text_model

# -- a small model with one block, and around it an example of everything that a model may hold -----------------------

SHAPE = "float[batch, tokens, 4]"
BLOCK = (
    "first = MatMul(x, W1) y = Add(first, b1) s = Sigmoid(y) h = Mul(y, s) second = MatMul(h, W2) m = Add(second, b2)"
)
AROUND = f"""
  gone = Identity(z) nobody = Add(z, spare) unread = Abs(nobody)
  n = d.scale<factor = 2.0>(m) t, u = Split<axis = 2>(n) joined = Concat<axis = 2>(u, t) top = Mul(gain, joined)
  p, q = If (flag) <
    then_branch = g1 () => ({SHAPE} b, {SHAPE} c) {{ b = Sub(top, z) c = Div(top, w) }},
    else_branch = g2 () => ({SHAPE} b, {SHAPE} c) {{ b = Sub(z, top) c = Mul(w, v) }}>
  r = Loop (trips, , p) <body = g3 (int64 step, bool going, {SHAPE} one) => (bool on, {SHAPE} two) {{
    on = Identity(going) two = Sub(one, w) }}>
  shifted = Add(r, v) out = Sub(shifted, q) other = Sub(q, gone)
"""
FUNCTIONS = """
<opset_import: ["": 17, "d": 1], domain: "d"> scale <factor: float = 1.0> (a) => (b) {
  k = Constant<value_float: float = @factor>() e = d.inner(a) b = Mul(e, k)
}
<opset_import: ["": 17], domain: "d"> inner (a) => (b) { b = Sin(a) }
<opset_import: ["": 17], domain: "d"> uncalled (a) => (b) { b = Cos(a) }
"""
GIVEN = {"spare": np.ones(4), "w": np.asarray([1, 2, 3, 4.0]), "v": np.asarray([4, 3, 2, 1.0]), "gain": np.asarray(0.5)}


@cache
def house() -> onnx.ModelProto:
    """One block, and around it an example of everything that a model may hold."""
    model = text_model(
        BLOCK + AROUND,
        inputs=f"{SHAPE} x, {SHAPE} z, bool flag, int64 trips, float idle, float gain",
        outputs=f"{SHAPE} out, {SHAPE} other, {SHAPE} m",
        constants=GIVEN,
        domains={"d": 1},
        functions=FUNCTIONS,
    )
    entry = model.graph.quantization_annotation.add(tensor_name="top")
    entry.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w")
    for node in model.graph.node:
        node.name = f"n_{node.output[0]}"
    return model


@cache
def planned(form: str) -> Plan:
    plan = make_plan(house(), Options(form=form))
    assert len(plan.conversions) == 1
    return plan


def refusals(plan: Plan, rewritten: onnx.ModelProto) -> list[str]:
    """What a rewritten model has that the plan does not explain."""
    claims = [claim_of(conversion) for conversion in plan.conversions]
    held = {each.place: Claimed(1e-6, each.held.domain) for each in claims}
    try:
        pair = [load_model(each) for each in (plan.model, rewritten)]
    except RewriteError as error:
        return [str(error)]
    return [each.text for each in prove(*pair, claims=held, blocks=claims).refusals]


# -- changes -----------------------------------------------------------------------------------------------------------

CHANGES: dict[str, str] = {
    "a body more": 'maker(m, "r").attribute.append(helper.make_attribute("more", body(m, "body")))',
    "an attribute more": 'attribute(maker(m, "joined"), more=1)',
    "operands": 'turn(maker(m, "other"))',
    "operator": 'maker(m, "other").op_type = "Mul"',
    "domain": 'maker(m, "other").domain = "d"',
    "overload": 'maker(m, "n").overload = "second"',
    "another tensor is read": 'maker(m, "joined").input[1] = "u"',
    "an empty input": 'maker(m, "other").input[1] = ""',
    "outputs of a node": 'swap_names(m, "t", "u")',
    "outputs of an If": 'swap_names(m, "p", "q")',
    "a node that is gone": 'without("gone")(m)',
    "a weight for a node": 'freeze(m, maker(m, "gone"), np.ones((1, 1, 4), np.float32))',
    "a weight for an output": 'freeze(m, maker(m, "out"), np.ones((1, 1, 4), np.float32))',
    "a weight for a node of several outputs": 'freeze(m, maker(m, "t"), np.ones((1, 1, 4), np.float32))',
    "value of an attribute": 'attribute(maker(m, "joined"), axis=1)',
    "type of an attribute": 'attribute(maker(m, "joined"), axis=2.0)',
    "type of an attribute alone": 'maker(m, "joined").attribute[0].type = onnx.AttributeProto.FLOAT',
    "name of an attribute": 'maker(m, "joined").attribute[0].name = "axes"',
    "no attribute": 'del maker(m, "joined").attribute[:]',
    "attribute of a call": 'attribute(maker(m, "n"), factor=2.001)',
    "reference to another attribute": 'function(m, "scale").node[0].attribute[0].ref_attr_name = "other"',
    "branches": "swap_branches(m)",
    "a node of a body": 'maker(m, "on").input[0] = "one"',
    "a tensor that a body captures": 'maker(m, "two").input[1] = "v"',
    "outputs of a branch": 'swap(body(m, "then_branch").output, 0, 1)',
    "an output of a branch less": 'body(m, "else_branch").output.pop()',
    "inputs of a loop": 'swap(body(m, "body").input, 0, 2)',
    "a captured tensor made inside": 'body(m, "then_branch").node.insert(0, helper.make_node("Relu", ["z"], ["top"]))',
    "body of a function": 'function(m, "inner").node[0].op_type = "Cos"',
    "opset of a function": 'function(m, "inner").opset_import[0].version = 16',
    "outputs of a function": 'function(m, "inner").output[0] = "a"',
    "a function that is called is gone": 'm.functions.remove(function(m, "scale"))',
    "a function that a function calls is gone": 'm.functions.remove(function(m, "inner"))',
    "an activation's function elsewhere": 'node, heads = maker(m, "other"), call(m); node.op_type = heads.op_type; '
    'node.domain = heads.domain; node.input[:] = ["q", heads.input[1], "gone"]',
    "a node more": 'maker(m, "out").output[0] = "raw"; insert(m, "raw", "Mul", "raw factor", "out"); '
    'add_weight(m, "factor", np.float32(1.001))',
    "an output of another name": 'm.graph.output[0].name = maker(m, "out").output[0] = "renamed"',
    "shape of an input": "m.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 7",
    "a weight": 'scale(weight(m, "w"))',
    "a weight that only a body reads": 'scale(weight(m, "v"))',
    "a weight of the block": 'nudge(weight(m, "W1"))',
    "type of a weight": 'weight(m, "w").data_type = onnx.TensorProto.INT32',
    "a weight that is gone": 'm.graph.initializer.remove(weight(m, "w"))',
    "a default": 'scale(weight(m, "gain"))',
    "no default": 'm.graph.initializer.remove(weight(m, "gain"))',
    "an input that is fixed": 'm.graph.input.remove(next(each for each in m.graph.input if each.name == "gain"))',
    "who makes an output": 'swap_names(m, "out", "other")',
    "type of an output": "m.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE",
    "opset": 'next(each for each in m.opset_import if each.domain == "").version = 18',
    "opset of another domain": 'next(each for each in m.opset_import if each.domain == "d").version = 2',
}
"""What is changed, and how, of the converted house `m`."""

ALL_NODES = "nodes = [node for graph in graphs(m.graph) for node in graph.node]"
HARMLESS: dict[str, str] = {
    "a function for an operator in a function": 'shadowing("", "Sin", 1)(m)',
    "a function for an operator in a body": 'shadowing("ai.onnx", "Div", 2)(m)',
    "a function for an operator": 'shadowing("", "Concat", 2)(m)',
    "shape of a weight": 'weight(m, "w").dims.insert(0, 1)',
    "a default for an input": 'add_weight(m, "trips", 1)',
    "order of inputs": "swap(m.graph.input, 0, 1)",
    "order of outputs": "swap(m.graph.output, 0, 1)",
    "a node put in": 'maker(m, "out").output[0] = "almost"; insert(m, "almost", "Identity", "almost", "out")',
    "a node that nothing reads": 'insert(m, "", "Neg", "x", "nobody_reads")',
    "reference to an attribute": 'node = function(m, "scale").node[0]; del node.attribute[:]; '
    "attribute(node, value_float=2.0)",
    "a captured weight inside": 'body(m, "then_branch").initializer.append(weight(m, "w"))',
    "default of a function": 'function(m, "scale").attribute_proto[0].f = 3.0',
    "attributes of a function": 'function(m, "scale").attribute.append("extra")',
    "a weight more": 'add_weight(m, "extra", np.ones(4, np.float32))',
    "a default for an input that nothing reads": 'add_weight(m, "idle", np.float32(1))',
    "an annotation more": 'm.graph.quantization_annotation.add(tensor_name="joined")',
    "an annotation": 'm.graph.quantization_annotation[0].quant_parameter_tensor_names[0].value = "v"',
    "names of nodes": f"""{ALL_NODES}; nodes += [node for each in m.functions for node in each.node]
for number, node in enumerate(nodes): node.name = f"other_{{number}}"
m.graph.name = "other" """,
    "metadata": f"""{ALL_NODES}; m.producer_name = m.producer_version = "other"
for part in (m, *m.functions, *graphs(m.graph), *nodes, *m.graph.input, *m.graph.initializer):
    part.metadata_props.add(key="made.by", value="someone")""",
    "doc strings": f"""{ALL_NODES}; parts = [m, *m.functions, *graphs(m.graph), *m.graph.output, *m.graph.initializer]
parts += [*nodes, *(each for node in nodes for each in node.attribute)]
for part in parts: part.doc_string = "Why it is so." """,
    "value_info": 'm.graph.value_info.append(helper.make_tensor_value_info("joined", 1, ["b", "t", 4])); '
    'body(m, "body").value_info.append(helper.make_tensor_value_info("two", 1, None))',
    "order of nodes": "latest_first(m)",
    "a dead node is gone": 'without("unread")(m)',
    "dead nodes one after the other are gone": 'without("unread")(m); without("nobody")(m); '
    'm.graph.initializer.remove(weight(m, "spare"))',
    "order of attributes": 'swap(maker(m, "p").attribute, 0, 1)',
    "order of functions": "swap(m.functions, 0, len(m.functions) - 1)",
    "order of initializers": "swap(m.graph.initializer, 0, len(m.graph.initializer) - 1)",
    "weights in typed fields": """
for tensor in m.graph.initializer:
    if tensor.data_type == onnx.TensorProto.FLOAT:
        values = numpy_helper.to_array(tensor).reshape(-1)
        tensor.CopyFrom(helper.make_tensor(tensor.name, tensor.data_type, tensor.dims, values))""",
    "the default domain by its other name": 'maker(m, "other").domain = "ai.onnx"',
    "a domain that no node uses": 'm.opset_import.add(domain="nobody.uses.it", version=3)',
    "a function that no node calls": 'shadowing("elsewhere", "Concat", 2)(m)',
    "a function that no node called is gone": "m.functions.pop(2)",
}


def scale(tensor: onnx.TensorProto) -> None:
    changes.change_values(tensor, "v *= 1.001")


def call(model: onnx.ModelProto) -> onnx.NodeProto:
    """The node that is the heads of the house, or a part of them."""
    found: onnx.NodeProto = next(node for node in model.graph.node if node.domain == DOMAIN)
    return found


def original_nodes(model: onnx.ModelProto) -> None:
    """The heads make way for the nodes that they replaced."""
    nodes = list(model.graph.node)
    place = nodes.index(maker(model, "h"))
    nodes[place : place + 1] = [maker(house(), "s"), maker(house(), "h")]
    changes.set_nodes(model.graph.node, nodes)


def one_original_node(model: onnx.ModelProto, operator: str = "Sigmoid") -> None:
    """The heads come after one of the nodes that they replaced."""
    insert(model, "y", operator, "y", "s")
    call(model).input[2] = "s"


def computes(model: onnx.ModelProto, text: str) -> None:
    """The function of the heads is another."""
    new = onnx.parser.parse_function(f'<opset_import: ["": 17], domain: "{DOMAIN}"> NeuronAttention {text}')
    model.functions.remove(next(each for each in model.functions if each.domain == DOMAIN))
    model.functions.append(new)


def defines(model: onnx.ModelProto, domain: str, name: str, operator: str) -> None:
    node, imports = helper.make_node(operator, ["a"], ["b"]), [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function(domain, name, ["a"], ["b"], [node], imports))


@cache
def nested() -> onnx.ModelProto:
    """A block, and another one in the body of an If behind it."""
    inner = "f2 = MatMul(m, W1) y2 = Add(f2, b1) r = Relu(y2) s2 = MatMul(r, W2) b = Add(s2, b2)"
    return text_model(
        f"{BLOCK} out = If (flag) <then_branch = g1 () => ({SHAPE} b) {{ {inner} }}, "
        f"else_branch = g2 () => ({SHAPE} b) {{ b = Neg(m) }}>",
        inputs=f"{SHAPE} x, bool flag",
    )


BLOCKS: dict[str, str] = {
    "the original's nodes": "original_nodes(m)",
    "one of the original's nodes, changed": 'one_original_node(m, "Tanh")',
    "a node that is no attention": 'becomes(call(m), "HardSigmoid")',
    "a function that is no attention": 'computes(m, "(query, key, value) => (output) { output = Tanh(query) }")',
    "an exponential that nothing is divided by": (
        'computes(m, "(query, key, value) => (o) { e = Exp(query) o = Div(e, value) }")'),
    "an exponential that nothing reads": (
        'computes(m, "(query, key, value) => (o) { e = Exp(query) d = Div(key, e) o = Neg(value) }")'),
    "a softmax of constants": 'computes(m, "(query, key, value) => (o) { s = Softmax(key) o = Mul(s, query) }")',
    "another input": 'call(m).input[2] = "z"',
    "another input by a new node": 'insert(m, "", "Neg", "z", "mlp/heads/z"); call(m).input[2] = "mlp/heads/z"',
}  # fmt: skip
"""What is wrong with the heads."""

WHOLE: dict[str, str] = {
    "another tensor is added": 'node = maker(m, "m"); node.op_type = "Add"; node.input.append("z")',
    "a function by the name of Softmax": 'defines(m, "ai.onnx", "Softmax", "Identity")',
    # onnxruntime would refuse them, and this does not hang
    "functions that call each other": 'defines(m, "", "Softmax", "Other"); defines(m, "", "Other", "Softmax")',
}


COMMUTE = ("Add", "Mul", "And", "Or", "Equal", "Max", "Min")

EACH_FORM = pytest.mark.parametrize("form", ["local", "masked"])


def changed(form: str, statement: str) -> list[str]:
    plan = planned(form)
    rewritten = apply(plan)
    before = rewritten.SerializeToString()
    local = {each.__name__: each for each in (call, scale, original_nodes, one_original_node, computes, defines)}
    changes.run(statement, m=rewritten, **local)
    assert rewritten.SerializeToString() != before
    return refusals(plan, rewritten)


def cases(changes: Mapping[str, str]) -> list[Any]:
    """In form local, and slowly in form masked."""
    return [
        pytest.param(form, name, marks=[slow] * (form == "masked"), id=f"{form}: {name}")
        for form in ("local", "masked")
        for name in changes
        if form == "local" or "activation's" not in name
    ]


@pytest.mark.parametrize(("form", "name"), cases(CHANGES))
def test_what_no_block_explains_is_refused(form: str, name: str) -> None:
    assert changed(form, CHANGES[name])


@pytest.mark.parametrize(("form", "name"), cases(HARMLESS))
def test_what_changes_no_result_is_not(form: str, name: str) -> None:
    assert changed(form, HARMLESS[name]) == []


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_no_attention(name: str) -> None:
    found = changed("local", BLOCKS[name])
    assert found
    assert name != "the original's nodes" or "the original's activation is still there" in found[0]


@pytest.mark.parametrize("name", WHOLE)
def test_whole_blocks_that_are_no_attention(name: str) -> None:
    assert changed("masked", WHOLE[name])


@slow
@EACH_FILE
def test_committed_files(path: Path) -> None:
    """Weights by one unit in the last place and nodes with their operands turned, anywhere in a real model."""
    plan = make_plan(onnx.load(path), Options())
    rewritten = apply(plan)
    assert refusals(plan, rewritten) == []
    read = {name for node in rewritten.graph.node for name in node.input}
    known = {tensor.name for tensor in plan.model.graph.initializer if tensor.data_type == TensorProto.FLOAT}
    weights = [tensor.name for tensor in rewritten.graph.initializer if tensor.name in known & read][::7]
    inferred = onnx.shape_inference.infer_shapes(rewritten).graph.value_info
    floats = {value.name for value in inferred if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    turns = [
        node.output[0]
        for node in rewritten.graph.node
        if len(set(node.input)) > 1
        and node.domain != DOMAIN
        and not any(entry.key == BLOCK_KEY for entry in node.metadata_props)
        and node.op_type not in COMMUTE
        and node.output[0] in floats
    ][::5]
    assert min(len(weights), len(turns)) > 3
    statements = [f"nudge(weight(m, {name!r}))" for name in weights]
    statements += [f"node = maker(m, {name!r}); node.input[:] = reversed(node.input)" for name in turns]
    for statement in statements:
        copy = copied(rewritten)
        changes.run(statement, m=copy)
        assert refusals(plan, copy)


@slow
@EACH_FORM
@EACH_FILE
def test_a_run_that_converts_nothing(path: Path, form: str) -> None:
    """Whatever the report says, the file is the original."""
    plan = make_plan(onnx.load(path), Options(form=form))
    assert len(plan.conversions) > 1
    failures = refusals(plan, plan.model)
    assert len(failures) == len(plan.conversions)
    assert all("the original's activation is still there" in failure for failure in failures)
    (other, *converted) = plan.conversions
    (failure,) = refusals(plan, apply(replace(plan, conversions=tuple(converted))))
    assert failure.startswith(f"{other.block.name}: ")


def test_a_run_that_converts_nothing_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(f"{rewrite.__module__}.made", lambda unit: unit.plan.model)
    report = rewrite(mlp(SILU), tmp_path / "out.onnx")
    assert [row.heads for row in report.converted] == [8]
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert report.validation is not None
    assert any("is still there" in failure for failure in report.problems)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("inline", [False, True], ids=["calls", "inline"])
@EACH_FORM
def test_blocks_in_bodies(form: str, inline: bool) -> None:
    plan = make_plan(nested(), Options(form=form, inline=inline))
    assert [conversion.block.path for conversion in plan.conversions] == [(), (("out", "then_branch"),)]
    rewritten = apply(plan)
    assert refusals(plan, rewritten) == []
    inside = body(rewritten, "then_branch")
    inside.initializer.append(numpy_helper.from_array(np.ones(4, np.float32) * 2, "own"))
    inside.node.append(helper.make_node("Mul", ["b", "own"], ["c"], "n_c"))
    inside.output[0].name = "c"
    assert refusals(plan, rewritten)


@slow
@pytest.mark.parametrize(
    ("form", "made"),
    [("local", "gelu"), ("compact", "model.encoder.layer.0/heads/z_side_by_side")],
    ids=["local", "compact"],
)
def test_heads_that_fail_where_nothing_runs_are_refused(form: str, made: str, tmp_path: Path) -> None:
    """0 beyond |y| = 12."""
    original, path = FOLDER / "gelu-encoder.onnx", tmp_path / "out.onnx"
    rewrite(original, path, form=form)
    model = onnx.load(path)
    (place,) = (i for i, node in enumerate(model.graph.node) if made in node.output)
    model.graph.node[place].output[0] = "before"
    added = onnx.parser.parse_graph(
        "g (float[b, n] before) => (float[b, n] made) { k = Constant<value = float {12}>() a = Abs(before) "
        "at = Greater(a, k) off = Not(at) f = Cast<to = 1>(off) made = Mul(before, f) }"
    )
    for node in reversed(added.node):
        node.output[0] = made if node.output[0] == "made" else f"added/{node.output[0]}"
        node.input[:] = [name if name == "before" else f"added/{name}" for name in node.input]
        model.graph.node.insert(place + 1, node)
    onnx.save(model, path)
    assert validate(original, path).exit_status != 0

"""What no block claims must be unchanged, bit for bit: differences that the measuring part of a proof would excuse."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from passes.match.marks import BLOCK_KEY, DOMAIN
from passes.options import FormOptions, Options
from passes.plan import Plan, apply, make_plan
from rewriter import ExitStatus, rewrite, validate
from tests.committed import EACH_FILE, FOLDER
from tests.rewriter.compare.edits import (
    Change,
    body,
    graphs,
    latest_first,
    maker,
    nudge,
    reads,
    shadowing,
    swap,
    swap_branches,
    swap_names,
    weight,
    without,
)
from tests.rewriter.proof.certificate.house import BLOCK, SHAPE, house, planned, refusals
from tests.textmodels import ERF_GELU, SILU, mlp, text_model


def swapped_operands(tensor: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node = maker(model, tensor)
        node.input[:] = reversed(node.input)

    return change


def weight_in_place_of(tensor: str) -> Change:
    """The node that made a tensor is gone, and a weight has its name."""

    def change(model: onnx.ModelProto) -> None:
        model.graph.node.remove(maker(model, tensor))
        model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 4), np.float32), tensor))

    return change


def attribute(tensor: str, **values: Any) -> Change:
    """The node that makes a tensor has other attributes."""

    def change(model: onnx.ModelProto) -> None:
        node = maker(model, tensor)
        del node.attribute[:]
        node.attribute.extend(helper.make_attribute(name, value) for name, value in values.items())

    return change


def inserted(model: onnx.ModelProto) -> None:
    maker(model, "out").output[0] = "almost"
    model.graph.node.append(helper.make_node("Identity", ["almost"], ["out"], "n_new"))


def dead_node(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Neg", ["x"], ["nobody_reads"], "n_new"))


def inside_body(model: onnx.ModelProto) -> None:
    """A tensor of the graph around a body is made inside it, under the same name."""
    body(model, "then_branch").node.insert(0, helper.make_node("Relu", ["z"], ["top"], "n_new"))


def weight_inside_body(model: onnx.ModelProto) -> None:
    body(model, "then_branch").initializer.append(weight(model, "w"))


def sparse_instead(model: onnx.ModelProto) -> None:
    tensor = weight(model, "w")
    indices = numpy_helper.from_array(np.arange(4), "w_indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(tensor, indices, [4]))
    model.graph.initializer.remove(tensor)


def function(model: onnx.ModelProto, name: str) -> onnx.FunctionProto:
    found: onnx.FunctionProto = next(each for each in model.functions if each.name == name)
    return found


def referenced(model: onnx.ModelProto) -> None:
    """An attribute is a number instead of the caller's."""
    function(model, "scale").node[0].attribute[0].CopyFrom(helper.make_attribute("value_float", 2.0))


def other_heads_elsewhere(model: onnx.ModelProto) -> None:
    """An activation function stands where the original adds."""
    node = maker(model, "other")
    call = next(node for node in model.graph.node if node.domain == "attnonly")
    node.op_type, node.domain = call.op_type, call.domain
    node.input[:] = ["q", call.input[1], "gone"]


def drop(name: str) -> Change:
    return lambda model: model.functions.remove(function(model, name))


def no_default(model: onnx.ModelProto) -> None:
    model.graph.initializer.remove(weight(model, "gain"))


def no_input(model: onnx.ModelProto) -> None:
    model.graph.input.remove(next(value for value in model.graph.input if value.name == "gain"))


def sparse_weight(model: onnx.ModelProto) -> onnx.SparseTensorProto:
    found: onnx.SparseTensorProto = model.graph.sparse_initializer[0]
    return found


def sparse_indices(model: onnx.ModelProto) -> None:
    sparse_weight(model).indices.CopyFrom(numpy_helper.from_array(np.asarray([3]), "sparse_indices"))


def dims_of_sparse(model: onnx.ModelProto) -> None:
    sparse_weight(model).dims[0] = 8


def other_type(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE


def opset(domain: str, version: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        next(entry for entry in model.opset_import if entry.domain == domain).version = version

    return change


def extra_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "extra"))


def other_names(model: onnx.ModelProto) -> None:
    for nodes in [*(graph.node for graph in graphs(model.graph)), *(each.node for each in model.functions)]:
        for number, node in enumerate(nodes):
            node.name = f"other_{number}"
    model.graph.name = "other"


def other_metadata(model: onnx.ModelProto) -> None:
    parts = [model, *model.functions, *graphs(model.graph), *(n for graph in graphs(model.graph) for n in graph.node)]
    for part in (*parts, *model.graph.input, *model.graph.initializer):
        part.metadata_props.add(key="made.by", value="someone")
    model.producer_name, model.producer_version = "other", "2"


def doc_strings(model: onnx.ModelProto) -> None:
    nodes = [node for graph in graphs(model.graph) for node in graph.node]
    tensors = [*model.graph.initializer, model.graph.sparse_initializer[0].values]
    for part in (model, *model.functions, *nodes, *graphs(model.graph), *model.graph.output, *tensors):
        part.doc_string = "What it is for."
    for node in nodes:
        for item in node.attribute:
            item.doc_string = "Why it is so."


def other_value_info(model: onnx.ModelProto) -> None:
    model.graph.value_info.append(helper.make_tensor_value_info("joined", TensorProto.FLOAT, ["b", "t", 4]))
    body(model, "body").value_info.append(helper.make_tensor_value_info("two", TensorProto.FLOAT, None))


def attributes_turned(model: onnx.ModelProto) -> None:
    swap(maker(model, "p").attribute, 0, 1)


def functions_turned(model: onnx.ModelProto) -> None:
    swap(model.functions, 0, len(model.functions) - 1)


def initializers_turned(model: onnx.ModelProto) -> None:
    swap(model.graph.initializer, 0, len(model.graph.initializer) - 1)


def typed_fields(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(helper.make_tensor(tensor.name, tensor.data_type, tensor.dims, values.reshape(-1)))
            assert not tensor.HasField("raw_data")


def domain_spelled_out(model: onnx.ModelProto) -> None:
    maker(model, "other").domain = "ai.onnx"


def another_domain(model: onnx.ModelProto) -> None:
    model.opset_import.add(domain="nobody.uses.it", version=3)


def another_function(model: onnx.ModelProto) -> None:
    """Nobody calls it."""
    shadowing("elsewhere", "Concat", 2)(model)


def no_dead_end(model: onnx.ModelProto) -> None:
    """What nothing reads is gone, one after the other, and the weight that it read."""
    for name in ("unread", "nobody"):
        without(name)(model)
    model.graph.initializer.remove(weight(model, "spare"))


CHANGES: dict[str, Change] = {
    "operands": swapped_operands("other"),
    "operator": lambda m: setattr(maker(m, "other"), "op_type", "Mul"),
    "domain": lambda m: setattr(maker(m, "other"), "domain", "d"),
    "overload": lambda m: setattr(maker(m, "n"), "overload", "second"),
    "another tensor is read": lambda m: reads(m, "joined", 1, "u"),
    "an empty input": lambda m: reads(m, "other", 1, ""),
    "outputs of a node": lambda m: swap_names(m, "t", "u"),
    "outputs of an If": lambda m: swap_names(m, "p", "q"),
    "a node that is gone": without("gone"),
    "a weight for a node": weight_in_place_of("gone"),
    "a weight for an output": weight_in_place_of("out"),
    "a weight for a node of several outputs": weight_in_place_of("t"),
    "value of an attribute": attribute("joined", axis=1),
    "type of an attribute": attribute("joined", axis=2.0),
    "type of an attribute alone": lambda m: setattr(maker(m, "joined").attribute[0], "type", onnx.AttributeProto.FLOAT),
    "name of an attribute": attribute("joined", axes=2),
    "an attribute more": attribute("joined", axis=2, more=1),
    "no attribute": attribute("joined"),
    "attribute of a call": attribute("n", factor=np.float32(2.0000002)),
    "reference to another attribute": lambda m: setattr(
        function(m, "scale").node[0].attribute[0], "ref_attr_name", "other"
    ),
    "branches": swap_branches,
    "a node of a body": lambda m: reads(m, "on", 0, "one"),
    "a tensor that a body captures": lambda m: reads(m, "two", 1, "v"),
    "outputs of a branch": lambda m: swap(body(m, "then_branch").output, 0, 1),
    "an output of a branch less": lambda m: body(m, "else_branch").output.pop(),
    "inputs of a loop": lambda m: swap(body(m, "body").input, 0, 2),
    "a captured tensor made inside": inside_body,
    "a body more": lambda m: maker(m, "r").attribute.append(helper.make_attribute("more", body(m, "body"))),
    "body of a function": lambda m: setattr(function(m, "inner").node[0], "op_type", "Cos"),
    "opset of a function": lambda m: setattr(function(m, "inner").opset_import[0], "version", 16),
    "outputs of a function": lambda m: function(m, "inner").output.__setitem__(0, "a"),
    "a function that is called is gone": drop("scale"),
    "a function that a function calls is gone": drop("inner"),
    "a function for an operator": shadowing("", "Concat", 2),
    "a function for an operator in a body": shadowing("ai.onnx", "Div", 2),
    "a function for an operator in a function": shadowing("", "Sin", 1),
    "an activation's function elsewhere": other_heads_elsewhere,
    "a weight": lambda m: nudge(weight(m, "w")),
    "a weight that only a body reads": lambda m: nudge(weight(m, "v")),
    "a weight of the block": lambda m: nudge(weight(m, "W1")),
    "shape of a weight": lambda m: weight(m, "w").dims.insert(0, 1),
    "type of a weight": lambda m: setattr(weight(m, "w"), "data_type", TensorProto.INT32),
    "a weight that is gone": lambda m: m.graph.initializer.remove(weight(m, "w")),
    "values of a sparse weight": lambda m: nudge(sparse_weight(m).values),
    "indices of a sparse weight": sparse_indices,
    "dims of a sparse weight": dims_of_sparse,
    "a default": lambda m: nudge(weight(m, "gain")),
    "no default": no_default,
    "a default for an input": lambda m: m.graph.initializer.append(numpy_helper.from_array(np.asarray(1), "trips")),
    "an input that is fixed": no_input,
    "order of inputs": lambda m: swap(m.graph.input, 0, 1),
    "order of outputs": lambda m: swap(m.graph.output, 0, 1),
    "who makes an output": lambda m: swap_names(m, "out", "other"),
    "type of an output": other_type,
    "opset": opset("", 18),
    "opset of another domain": opset("d", 2),
}

HARMLESS: dict[str, Change] = {
    "a node put in": inserted,
    "a node that nothing reads": dead_node,
    "reference to an attribute": referenced,
    "a captured weight inside": weight_inside_body,
    "default of a function": lambda m: setattr(function(m, "scale").attribute_proto[0], "f", 3.0),
    "attributes of a function": lambda m: function(m, "scale").attribute.append("extra"),
    "a weight more": extra_weight,
    "a sparse weight for a dense one": sparse_instead,
    "a default for an input that nothing reads": lambda m: m.graph.initializer.append(
        numpy_helper.from_array(np.asarray(1, np.float32), "idle")
    ),
    "an annotation more": lambda m: m.graph.quantization_annotation.add(tensor_name="joined"),
    "an annotation": lambda m: setattr(
        m.graph.quantization_annotation[0].quant_parameter_tensor_names[0], "value", "v"
    ),
    "names of nodes": other_names,
    "metadata": other_metadata,
    "doc strings": doc_strings,
    "value_info": other_value_info,
    "order of nodes": latest_first,
    "a dead node is gone": without("unread"),
    "dead nodes one after the other are gone": no_dead_end,
    "order of attributes": attributes_turned,
    "order of functions": functions_turned,
    "order of initializers": initializers_turned,
    "weights in typed fields": typed_fields,
    "the default domain by its other name": domain_spelled_out,
    "a domain that no node uses": another_domain,
    "a function that no node calls": another_function,
    "a function that no node called is gone": lambda m: m.functions.pop(2),
}


def call(model: onnx.ModelProto) -> onnx.NodeProto:
    """The node that is the heads of the house, or a part of them."""
    found: onnx.NodeProto = next(node for node in model.graph.node if node.domain == "attnonly")
    return found


def original_nodes(model: onnx.ModelProto) -> None:
    """The heads make way for the nodes that they replaced."""
    place = list(model.graph.node).index(maker(model, "h"))
    nodes = list(model.graph.node)
    nodes[place : place + 1] = [maker(house(), "s"), maker(house(), "h")]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def one_original_node(model: onnx.ModelProto) -> None:
    """The heads come after one of the nodes that they replaced."""
    node = onnx.NodeProto.FromString(maker(house(), "s").SerializeToString())
    model.graph.node.insert(list(model.graph.node).index(maker(model, "h")), node)
    call(model).input[2] = "s"


def one_changed_node(model: onnx.ModelProto) -> None:
    one_original_node(model)
    maker(model, "s").op_type = "Tanh"


def other_function(text: str) -> Change:
    """The function of the heads computes something else."""

    def change(model: onnx.ModelProto) -> None:
        new = onnx.parser.parse_function(f'<opset_import: ["": 17], domain: "attnonly"> {text}')
        model.functions.remove(next(each for each in model.functions if each.domain == "attnonly"))
        model.functions.append(new)

    return change


def plain_node(model: onnx.ModelProto) -> None:
    node = call(model)
    del node.input[1:]
    node.op_type, node.domain = "HardSigmoid", ""


def reads_elsewhere(model: onnx.ModelProto) -> None:
    call(model).input[2] = "z"


def reads_new_node(model: onnx.ModelProto) -> None:
    """A new node beside the block, which looks as if it belonged to the heads."""
    node = helper.make_node("Neg", ["z"], ["mlp/heads/z"], "mlp/heads/z")
    model.graph.node.insert(0, node)
    call(model).input[2] = "mlp/heads/z"


def ends_in_more(model: onnx.ModelProto) -> None:
    """What the block ends in is not only what its heads write."""
    node = maker(model, "m")
    node.op_type = "Add"
    node.input.append("z")


def ends_in_input(model: onnx.ModelProto) -> None:
    node = maker(model, "m")
    node.op_type = "Add"
    node.input.append("x")


def false_softmax(model: onnx.ModelProto) -> None:
    """A local function by the name of the operator, which does something else."""
    node = helper.make_node("Identity", ["a"], ["b"])
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("ai.onnx", "Softmax", ["a"], ["b"], [node], imports))


def endless(model: onnx.ModelProto) -> None:
    """Local functions that call each other: onnxruntime would refuse them, and this does not hang."""
    for name, other in (("Softmax", "Other"), ("Other", "Softmax")):
        node = helper.make_node(other, ["a"], ["b"])
        imports = [helper.make_opsetid("", 17)]
        model.functions.append(helper.make_function("", name, ["a"], ["b"], [node], imports))


def in_loop(tensor: str, place: int, name: str) -> Change:
    """A node in the loop over chunks of heads reads something else."""

    def change(model: onnx.ModelProto) -> None:
        function = next(each for each in model.functions if each.domain == "attnonly")
        holder = next(node for node in function.node if "parts" in node.output)
        loop = next(item.g for item in holder.attribute if item.name == "body")
        next(node for node in loop.node if tensor in node.output).input[place] = name

    return change


@cache
def nested() -> onnx.ModelProto:
    """A block, and another one in the body of an If behind it."""
    inner = "f2 = MatMul(m, W1) y2 = Add(f2, b1) r = Relu(y2) s2 = MatMul(r, W2) b = Add(s2, b2)"
    return text_model(
        f"{BLOCK} out = If (flag) <then_branch = g1 () => ({SHAPE} b) {{ {inner} }}, "
        f"else_branch = g2 () => ({SHAPE} b) {{ b = Neg(m) }}>",
        inputs=f"{SHAPE} x, bool flag",
    )


BLOCKS: dict[str, Change] = {
    "the original's nodes": original_nodes,
    "one of the original's nodes": one_original_node,
    "one of the original's nodes, changed": one_changed_node,
    "a node that is no attention": plain_node,
    "a function that is no attention": other_function(
        "NeuronAttention (query, key, value) => (output) { output = Tanh(query) }"
    ),
    "an exponential that nothing is divided by": other_function(
        "NeuronAttention (query, key, value) => (o) { e = Exp(query) o = Div(e, value) }"
    ),
    "an exponential that nothing reads": other_function(
        "NeuronAttention (query, key, value) => (o) { e = Exp(query) d = Div(key, e) o = Neg(value) }"
    ),
    "a softmax of constants": other_function(
        "NeuronAttention (query, key, value) => (o) { s = Softmax(key) o = Mul(s, query) }"
    ),
    "another input": reads_elsewhere,
    "another input by a new node": reads_new_node,
}

REASONS = {
    "the original's nodes": "mlp: reported as converted, but the original's activation is still there",
    "a softmax of constants": "mlp: cannot be certified: ",
    "another input": "its heads read 'z', which is not an input of its block",
    "another input by a new node": "its heads read 'z', which is not an input of its block",
}

WHOLE: dict[str, Change] = {
    "another tensor is added": ends_in_more,
    "a function by the name of Softmax": false_softmax,
    "functions that call each other": endless,
}


COMMUTE = ("Add", "Mul", "And", "Or", "Equal", "Max", "Min")

EACH_FORM = pytest.mark.parametrize("form", ["local", "masked"])


def changed(form: str, change: Change) -> list[str]:
    """What is refused of the house once it is changed."""
    plan = planned(form)
    rewritten = apply(plan)
    before = rewritten.SerializeToString()
    change(rewritten)
    assert rewritten.SerializeToString() != before
    return refusals(plan, rewritten)


@EACH_FORM
@pytest.mark.parametrize("name", CHANGES)
def test_what_no_block_explains_is_refused(form: str, name: str) -> None:
    assert changed(form, CHANGES[name])


@EACH_FORM
@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_result_is_not(form: str, name: str) -> None:
    assert changed(form, HARMLESS[name]) == []


@pytest.mark.parametrize(("name", "reason"), [(name, REASONS.get(name, "")) for name in BLOCKS])
def test_what_is_no_attention(name: str, reason: str) -> None:
    found = changed("local", BLOCKS[name])
    assert found
    assert reason in found[0]


@pytest.mark.parametrize("name", WHOLE)
def test_whole_blocks_that_are_no_attention(name: str) -> None:
    assert changed("masked", WHOLE[name])


MORE: dict[str, tuple[onnx.ModelProto, dict[str, Any]]] = {
    "relu": (mlp("h = Relu(y)"), {}),
    "gelu": (mlp(ERF_GELU), {}),
    "tanh": (mlp("h = Tanh(y)"), {}),
    "glu": (
        mlp("s = Sigmoid(y) h = Mul(s, u)", first="m = MatMul(x, W1wide) y, u = Split<axis = -1>(m)", opset=13),
        {},
    ),
    "spelled with Exp": (mlp("n = Neg(y) e = Exp(n) p = Add(e, $1.0) h = Div(y, p)"), {}),
    "float16": (mlp(SILU, elem="float16"), {}),
    "no functions": (mlp(SILU, opset=11, ir=6), {}),
    "weights are inputs": (mlp(SILU, opset=11, ir=3), {}),
    "activation read elsewhere": (mlp(SILU + " z = Neg(s)", outputs=f"{SHAPE} out, {SHAPE} z, {SHAPE} y"), {}),
    "gate alone": (
        mlp(
            "s = Sigmoid(y) a = Mul(y, s) h = Mul(a, u)",
            first="m = MatMul(x, W1wide) y, u = Split<axis = -1>(m)",
            opset=13,
        ),
        {"gate": "product"},
    ),
}


@pytest.mark.parametrize("inline", [False, True], ids=["calls", "inline"])
@pytest.mark.parametrize("form", ["local", "masked", "maskless", "staged"])
@pytest.mark.parametrize("name", MORE)
def test_what_the_pass_writes_is_explained(name: str, form: str, inline: bool) -> None:
    model, options = MORE[name]
    choices = Options(form=form, inline=inline, forms=FormOptions(max_tokens=40), **options)
    plan = make_plan(model, choices)
    assert len(plan.conversions) == 1
    assert refusals(plan, apply(plan)) == []
    assert refusals(plan, plan.model) != []


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
    changes: list[Change] = [lambda m, name=name: nudge(weight(m, name)) for name in weights]  # type: ignore[misc]
    for change in (*changes, *map(swapped_operands, turns)):
        copy = onnx.ModelProto()
        copy.CopyFrom(rewritten)
        change(copy)
        assert refusals(plan, copy)


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
    monkeypatch.setattr(f"{rewrite.__module__}.made", lambda unit: unit.fact(Plan).model)
    report = rewrite(mlp(SILU), tmp_path / "out.onnx")
    assert [row.heads for row in report.converted] == [8]
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert report.validation is not None
    assert any("is still there" in failure for failure in report.validation.failures)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("inline", [False, True], ids=["calls", "inline"])
@EACH_FORM
def test_blocks_in_bodies(form: str, inline: bool) -> None:
    """Heads that are written out hold a Loop, which comes before the If."""
    plan = make_plan(nested(), Options(form=form, inline=inline))
    assert [conversion.block.path for conversion in plan.conversions] == [(), (("out", "then_branch"),)]
    rewritten = apply(plan)
    assert refusals(plan, rewritten) == []
    inside = body(rewritten, "then_branch")
    inside.initializer.append(numpy_helper.from_array(np.ones(4, np.float32) * 2, "own"))
    inside.node.append(helper.make_node("Mul", ["b", "own"], ["c"], "n_c"))
    inside.output[0].name = "c"
    assert refusals(plan, rewritten)


def test_weights_copied_to_another_directory_are_the_same(tmp_path: Path) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    source.mkdir()
    other.mkdir()
    model = source / "model.onnx"
    onnx.save(mlp(SILU), model, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert rewrite(model, other / "out.onnx").exit_status is ExitStatus.CONVERTED


@pytest.mark.parametrize(
    "condition",
    [
        "s = Shape(before) one = Constant<value = int64 {1}>() n = Gather(s, one) k = Constant<value = int64 {41}>() "
        "at = Equal(n, k)",
        "k = Constant<value = float {12}>() a = Abs(before) at = Greater(a, k)",
        "k = Constant<value = float {0.5}>() e = Exp(before) l = Sin(e) at = Equal(l, k)",
    ],
    ids=["at 41 tokens", "beyond 12", "at a point that cannot be found"],
)
def test_heads_that_fail_where_nothing_runs_are_refused(condition: str, tmp_path: Path) -> None:
    original, path = FOLDER / "gelu-encoder.onnx", tmp_path / "out.onnx"
    rewrite(original, path)
    model = onnx.load(path)
    (place,) = (i for i, node in enumerate(model.graph.node) if "gelu" in node.output)
    model.graph.node[place].output[0] = "before"
    added = onnx.parser.parse_graph(
        f"g (float[b, n] before) => (float[b, n] gelu) {{ {condition} off = Not(at) f = Cast<to = 1>(off) "
        "gelu = Mul(before, f) }"
    )
    for node in reversed(added.node):
        node.output[0] = node.output[0] if node.output[0] == "gelu" else f"added/{node.output[0]}"
        node.input[:] = [name if name == "before" else f"added/{name}" for name in node.input]
        model.graph.node.insert(place + 1, node)
    onnx.save(model, path)
    found = validate(original, path)
    assert found.exit_status != 0
    assert any("model.encoder.layer.0: " in failure for failure in found.failures)

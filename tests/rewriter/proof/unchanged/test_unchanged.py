"""What no block claims must be unchanged, bit for bit: differences that the measuring part of a proof would excuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from passes.match.marks import BLOCK_KEY, DOMAIN
from passes.options import Options
from passes.plan import apply, make_plan
from rewriter import ExitStatus, rewrite
from rewriter.api.rewriting import made
from rewriter.pipeline import Unit
from tests.committed import EACH_FILE
from tests.rewriter.compare.edits import (
    Change,
    body,
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
from tests.rewriter.proof.unchanged.house import NODE, WEIGHT, found_in, planned
from tests.textmodels import ERF_GELU, SILU, mlp


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


THEN, ELSE, LOOP, SCALE, INNER = (
    f" (in {where})"
    for where in ("n_p/then_branch", "n_p/else_branch", "n_r/body", "function d::scale", "function d::inner")
)

CHANGES: dict[str, tuple[Change, set[str]]] = {
    # nodes
    "operands": (swapped_operands("other"), {NODE.format("Sub 'n_other'")}),
    "operator": (lambda m: setattr(maker(m, "other"), "op_type", "Mul"), {NODE.format("Mul 'n_other'")}),
    "domain": (lambda m: setattr(maker(m, "other"), "domain", "d"), {NODE.format("d::Sub 'n_other'")}),
    "overload": (lambda m: setattr(maker(m, "n"), "overload", "second"), {NODE.format("d::scale 'n_n'")}),
    "another tensor is read": (lambda m: reads(m, "joined", 1, "u"), {NODE.format("Concat 'n_joined'")}),
    "an empty input": (lambda m: reads(m, "other", 1, ""), {NODE.format("Sub 'n_other'")}),
    "outputs of a node": (lambda m: swap_names(m, "t", "u"), {NODE.format("Split 'n_t'")}),
    "outputs of an If": (lambda m: swap_names(m, "p", "q"), {NODE.format("If 'n_p'")}),
    "a node put in": (inserted, {NODE.format("Sub 'n_out'"), NODE.format("Identity 'n_new'")}),
    "a node that nothing reads": (dead_node, {NODE.format("Neg 'n_new'")}),
    "a node that is gone": (without("gone"), {"'gone' is missing, but computed in the original"}),
    "a weight for a node": (weight_in_place_of("gone"), {"'gone' is a weight, but computed in the original"}),
    "a weight for an output": (weight_in_place_of("out"), {"'out' is a weight, but computed in the original"}),
    "a weight for a node of several outputs": (
        weight_in_place_of("t"),
        {"'t' is a weight, but computed in the original", "'u' is missing, but computed in the original"},
    ),
    # attributes
    "value of an attribute": (attribute("joined", axis=1), {NODE.format("Concat 'n_joined'")}),
    "type of an attribute": (attribute("joined", axis=2.0), {NODE.format("Concat 'n_joined'")}),
    "type of an attribute alone": (
        lambda m: setattr(maker(m, "joined").attribute[0], "type", onnx.AttributeProto.FLOAT),
        {NODE.format("Concat 'n_joined'")},
    ),
    "name of an attribute": (attribute("joined", axes=2), {NODE.format("Concat 'n_joined'")}),
    "an attribute more": (attribute("joined", axis=2, more=1), {NODE.format("Concat 'n_joined'")}),
    "no attribute": (attribute("joined"), {NODE.format("Concat 'n_joined'")}),
    "attribute of a call": (attribute("n", factor=np.float32(2.0000002)), {NODE.format("d::scale 'n_n'")}),
    "reference to an attribute": (referenced, {NODE.format("Constant 'k'") + SCALE}),
    "reference to another attribute": (
        lambda m: setattr(function(m, "scale").node[0].attribute[0], "ref_attr_name", "other"),
        {NODE.format("Constant 'k'") + SCALE},
    ),
    # bodies of control flow
    "branches": (
        swap_branches,
        {
            NODE.format("Sub 'b'") + THEN,
            NODE.format("Mul 'c'") + THEN,
            NODE.format("Sub 'b'") + ELSE,
            NODE.format("Div 'c'") + ELSE,
        },
    ),
    "a node of a body": (lambda m: reads(m, "on", 0, "one"), {NODE.format("Identity 'on'") + LOOP}),
    "a tensor that a body captures": (lambda m: reads(m, "two", 1, "v"), {NODE.format("Sub 'two'") + LOOP}),
    "outputs of a branch": (
        lambda m: swap(body(m, "then_branch").output, 0, 1),
        {"output 0 is 'c', but 'b' in the original" + THEN, "output 1 is 'b', but 'c' in the original" + THEN},
    ),
    "an output of a branch less": (
        lambda m: body(m, "else_branch").output.pop(),
        {"output 'c' is in one of the models only" + ELSE},
    ),
    "inputs of a loop": (
        lambda m: swap(body(m, "body").input, 0, 2),
        {"input 0 is 'one', but 'step' in the original" + LOOP, "input 2 is 'step', but 'one' in the original" + LOOP},
    ),
    "a captured tensor made inside": (
        inside_body,
        {NODE.format("Relu 'n_new'") + THEN, "'top' is defined in another graph than in the original" + THEN},
    ),
    "a captured weight inside": (
        weight_inside_body,
        {"'w' is defined in another graph than in the original" + THEN},
    ),
    "a body more": (
        lambda m: maker(m, "r").attribute.append(helper.make_attribute("more", body(m, "body"))),
        {NODE.format("Loop 'n_r'")},
    ),
    # local functions
    "body of a function": (
        lambda m: setattr(function(m, "inner").node[0], "op_type", "Cos"),
        {NODE.format("Cos 'b'") + INNER},
    ),
    "default of a function": (
        lambda m: setattr(function(m, "scale").attribute_proto[0], "f", 3.0),
        {"function 'scale' does not have the attributes and opsets of the original's"},
    ),
    "attributes of a function": (
        lambda m: function(m, "scale").attribute.append("extra"),
        {"function 'scale' does not have the attributes and opsets of the original's"},
    ),
    "opset of a function": (
        lambda m: setattr(function(m, "inner").opset_import[0], "version", 16),
        {"function 'inner' does not have the attributes and opsets of the original's"},
    ),
    "outputs of a function": (
        lambda m: function(m, "inner").output.__setitem__(0, "a"),
        {"output 0 is 'a', but 'b' in the original" + INNER},
    ),
    "a function that is called is gone": (drop("scale"), {"function 'scale' is missing"}),
    "a function that a function calls is gone": (drop("inner"), {"function 'inner' is missing"}),
    "a function for an operator": (
        shadowing("", "Concat", 2),
        {"Concat 'n_joined' calls a local function that the original does not have"},
    ),
    "a function for an operator in a body": (
        shadowing("ai.onnx", "Div", 2),
        {"Div 'c' calls a local function that the original does not have" + THEN},
    ),
    "a function for an operator in a function": (
        shadowing("", "Sin", 1),
        {"Sin 'b' calls a local function that the original does not have" + INNER},
    ),
    "an activation's function elsewhere": (other_heads_elsewhere, {NODE.format("attnonly::NeuronAttention 'n_other'")}),
    # weights, inputs and outputs
    "a weight": (lambda m: nudge(weight(m, "w")), {WEIGHT.format("w")}),
    "a weight that only a body reads": (lambda m: nudge(weight(m, "v")), {WEIGHT.format("v")}),
    "a weight of the block": (lambda m: nudge(weight(m, "W1")), {WEIGHT.format("W1")}),
    "shape of a weight": (lambda m: weight(m, "w").dims.insert(0, 1), {WEIGHT.format("w")}),
    "type of a weight": (lambda m: setattr(weight(m, "w"), "data_type", TensorProto.INT32), {WEIGHT.format("w")}),
    "a weight that is gone": (
        lambda m: m.graph.initializer.remove(weight(m, "w")),
        {"'w' is missing, but a weight in the original"},
    ),
    "a weight more": (extra_weight, {"weight 'extra' is in the rewritten model only"}),
    "a sparse weight for a dense one": (sparse_instead, {"'w' is a sparse weight, but a weight in the original"}),
    "values of a sparse weight": (lambda m: nudge(sparse_weight(m).values), {WEIGHT.format("sparse")}),
    "indices of a sparse weight": (sparse_indices, {WEIGHT.format("sparse")}),
    "dims of a sparse weight": (dims_of_sparse, {WEIGHT.format("sparse")}),
    "a default": (lambda m: nudge(weight(m, "gain")), {WEIGHT.format("gain")}),
    "no default": (no_default, {"'gain' is an input, but a weight in the original"}),
    "a default for an input": (
        lambda m: m.graph.initializer.append(numpy_helper.from_array(np.asarray(1), "trips")),
        {"'trips' is a weight, but an input in the original"},
    ),
    "a default for an input that nothing reads": (
        lambda m: m.graph.initializer.append(numpy_helper.from_array(np.asarray(1, np.float32), "idle")),
        {"'idle' is a weight, but an input in the original"},
    ),
    "an input that is fixed": (no_input, {"input 'gain' is in one of the models only"}),
    "order of inputs": (
        lambda m: swap(m.graph.input, 0, 1),
        {"input 0 is 'z', but 'x' in the original", "input 1 is 'x', but 'z' in the original"},
    ),
    "order of outputs": (
        lambda m: swap(m.graph.output, 0, 1),
        {"output 0 is 'other', but 'out' in the original", "output 1 is 'out', but 'other' in the original"},
    ),
    "who makes an output": (
        lambda m: swap_names(m, "out", "other"),
        {NODE.format("Sub 'n_out'"), NODE.format("Sub 'n_other'")},
    ),
    "type of an output": (other_type, {"output 'out' is not declared with the original's type and shape"}),
    # the model
    "opset": (opset("", 18), {"the opset of 'ai.onnx' is 18, but 17 in the original"}),
    "opset of another domain": (opset("d", 2), {"the opset of 'd' is 2, but 1 in the original"}),
    "an opset less": (
        lambda m: m.opset_import.remove(next(entry for entry in m.opset_import if entry.domain == "d")),
        {"the opset of 'd' is missing, but 1 in the original"},
    ),
    "IR version": (lambda m: setattr(m, "ir_version", 9), {"the IR version is 9, but 8 in the original"}),
    "an annotation more": (
        lambda m: m.graph.quantization_annotation.add(tensor_name="joined"),
        {"the quantisation annotation of 'joined' is not the original's"},
    ),
    "an annotation": (
        lambda m: setattr(m.graph.quantization_annotation[0].quant_parameter_tensor_names[0], "value", "v"),
        {"the quantisation annotation of 'top' is not the original's"},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_no_block_explains_is_named(name: str) -> None:
    change, expected = CHANGES[name]
    plan = planned("local")
    rewritten = apply(plan)
    assert found_in(plan, rewritten) == []
    change(rewritten)
    assert set(found_in(plan, rewritten)) == expected


def _made(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN or any(entry.key == BLOCK_KEY for entry in node.metadata_props)


@EACH_FILE
def test_committed_files(path: Path) -> None:
    """Weights by one unit in the last place and nodes with their operands turned, anywhere in a real model."""
    plan = make_plan(onnx.load(path), Options())
    rewritten = apply(plan)
    assert found_in(plan, rewritten) == []
    read = {name for node in rewritten.graph.node for name in node.input}
    known = {tensor.name for tensor in plan.model.graph.initializer if tensor.data_type == TensorProto.FLOAT}
    weights = [tensor for tensor in rewritten.graph.initializer if tensor.name in known & read][::5]
    nodes = [node for node in rewritten.graph.node if len(set(node.input)) > 1 and not _made(node)][::9]
    assert min(len(weights), len(nodes)) > 3
    for tensor in weights:
        nudge(tensor)
    for node in nodes:
        node.input[:] = reversed(node.input)
    expected = {WEIGHT.format(tensor.name) for tensor in weights}
    expected |= {NODE.format(f"{node.op_type} '{node.name}'") for node in nodes}
    assert set(found_in(plan, rewritten)) == expected


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        (lambda m: nudge(weight(m, "b2")), WEIGHT.format("b2")),
        (swapped_operands("out"), NODE.format("Add 'out'")),
        (inserted, NODE.format("Add 'almost'")),
    ],
    ids=["weight", "operands", "node"],
)
@pytest.mark.parametrize("activation", [SILU, ERF_GELU], ids=["silu", "gelu"])
def test_a_planted_difference_fails_the_proof(
    activation: str, change: Change, failure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of them computes what the original does, or differs by less than rounding."""

    def planted(unit: Unit) -> onnx.ModelProto:
        result = made(unit)
        change(result)
        return result

    monkeypatch.setattr(f"{rewrite.__module__}.made", planted)
    report = rewrite(mlp(activation), tmp_path / "out.onnx")
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert report.validation is not None
    assert failure in report.validation.failures
    assert not (tmp_path / "out.onnx").exists()


def test_weights_copied_to_another_directory_are_the_same(tmp_path: Path) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    source.mkdir()
    other.mkdir()
    model = source / "model.onnx"
    onnx.save(mlp(SILU), model, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert rewrite(model, other / "out.onnx").exit_status is ExitStatus.CONVERTED

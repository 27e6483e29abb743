"""Blocks that are reported as converted, and are not, or not by attention."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from passes.options import Options
from passes.plan import Plan, apply, make_plan
from rewriter import ExitStatus, rewrite
from rewriter.api.rows import claim_of
from rewriter.files.load import LoadedModel
from rewriter.graph.view import view_model
from rewriter.proof.claims import Claim
from rewriter.proof.unchanged.is_attention import not_attention
from rewriter.proof.unchanged.model import unexplained_changes
from tests.committed import EACH_FILE
from tests.rewriter.compare.edits import Change, body, maker, reads
from tests.rewriter.proof.unchanged.house import (
    BLOCK,
    NO_SOFTMAX,
    NODE,
    SHAPE,
    STILL_THERE,
    found_in,
    house,
    planned,
    side,
)
from tests.textmodels import SILU, mlp, text_model

EACH_FORM = pytest.mark.parametrize("form", ["local", "masked"])


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


KEY = "weight 'mlp/heads/key' is in the rewritten model only"

BLOCKS: dict[str, tuple[Change, set[str]]] = {
    "the original's nodes": (
        original_nodes,
        {STILL_THERE.format("mlp", "Sigmoid 'n_s', Mul 'n_h'"), NO_SOFTMAX.format("mlp"), KEY},
    ),
    "one of the original's nodes": (one_original_node, {STILL_THERE.format("mlp", "Sigmoid 'n_s'")}),
    "one of the original's nodes, changed": (
        one_changed_node,
        {NODE.format("Tanh 'n_s'")},
    ),
    "a node that is no attention": (plain_node, {NO_SOFTMAX.format("mlp"), KEY}),
    "a function that is no attention": (
        other_function("NeuronAttention (query, key, value) => (output) { output = Tanh(query) }"),
        {NO_SOFTMAX.format("mlp")},
    ),
    "an exponential that nothing is divided by": (
        other_function("NeuronAttention (query, key, value) => (o) { e = Exp(query) o = Div(e, value) }"),
        {NO_SOFTMAX.format("mlp")},
    ),
    "an exponential that nothing reads": (
        other_function("NeuronAttention (query, key, value) => (o) { e = Exp(query) d = Div(key, e) o = Neg(value) }"),
        {NO_SOFTMAX.format("mlp")},
    ),
    "a softmax of constants": (
        other_function("NeuronAttention (query, key, value) => (o) { s = Softmax(key) o = Mul(s, query) }"),
        {NO_SOFTMAX.format("mlp")},
    ),
    "another input": (reads_elsewhere, {"mlp: its heads read 'z', which is not an input of its block"}),
    "another input by a new node": (
        reads_new_node,
        {
            "mlp: its heads read 'mlp/heads/z', which is not an input of its block",
            NODE.format("Neg 'mlp/heads/z'"),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(("count", "more"), [(1, ""), (3, ""), (4, " and 1 more"), (6, " and 3 more")])
def test_three_nodes_of_the_original_are_named(count: int, more: str) -> None:
    """A message stays short, whatever the activation consists of."""
    steps = [helper.make_node("Neg", [f"t{number}"], [f"t{number + 1}"]) for number in range(count)]
    model = onnx.ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", 17)])
    model.graph.CopyFrom(helper.make_graph(steps, "g", [helper.make_tensor_value_info("t0", 1, None)], []))
    model.graph.output.append(helper.make_tensor_value_info(f"t{count}", 1, None))
    claim = Claim("mlp", ("t0",), f"t{count}", ("t0",), (f"t{count}",), 0.0, 1)
    loaded = LoadedModel(model, None, None, (), 0)
    found = list(not_attention(claim, view_model(model), steps, (loaded, loaded), {}))
    named = ", ".join(f"Neg 't{number + 1}'" for number in range(min(count, 3)))
    assert found == [STILL_THERE.format("mlp", named + more), NO_SOFTMAX.format("mlp")]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_that_are_no_attention(name: str) -> None:
    change, expected = BLOCKS[name]
    plan = planned("local")
    rewritten = apply(plan)
    change(rewritten)
    assert set(found_in(plan, rewritten)) == expected


@EACH_FORM
@EACH_FILE
def test_a_run_that_converts_nothing(path: Path, form: str) -> None:
    """Whatever the report says, the file is the original."""
    plan = make_plan(onnx.load(path), Options(form=form))
    claims = [claim_of(conversion) for conversion in plan.conversions]
    assert len(claims) > 1
    failures = unexplained_changes(side(plan.model), side(plan.model), claims)
    for claim in claims:
        assert NO_SOFTMAX.format(claim.name) in failures
        assert any(failure.startswith(f"{claim.name}: ") and "is still there: " in failure for failure in failures)
    (other, *converted) = plan.conversions
    failures = unexplained_changes(side(plan.model), side(apply(replace(plan, conversions=tuple(converted)))), claims)
    assert failures
    assert all(failure.startswith(f"{other.block.name}: ") for failure in failures)


# -- whole blocks, and blocks in bodies of control flow ---------------------------------------------------------------


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


WHOLE: dict[str, tuple[Change, set[str]]] = {
    "another tensor is added": (
        ends_in_more,
        {
            "mlp: its heads read 'z', which is not an input of its block",
            NODE.format("Add 'mlp/heads/result'"),
        },
    ),
    "the block's input is added": (ends_in_input, {NODE.format("Add 'mlp/heads/result'")}),
    "a function by the name of Softmax": (false_softmax, {NO_SOFTMAX.format("mlp")}),
    "functions that call each other": (endless, {NO_SOFTMAX.format("mlp")}),
    "a softmax without use": (in_loop("chunk_output", 0, "query_chunk"), {NO_SOFTMAX.format("mlp")}),
    "a softmax of a loop's counter": (in_loop("pattern", 0, "step"), {NO_SOFTMAX.format("mlp")}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_blocks_that_are_no_attention(name: str) -> None:
    change, expected = WHOLE[name]
    plan = planned("masked")
    rewritten = apply(plan)
    assert found_in(plan, rewritten) == []
    change(rewritten)
    assert set(found_in(plan, rewritten)) == expected


def test_a_tensor_inside_a_whole_block_that_others_read_stays() -> None:
    """The pre-activation is an output too: heads may not write it, though it lies between the ends."""
    plan = make_plan(mlp(SILU, outputs=f"{SHAPE} out, float[batch, tokens, 8] y"), Options(form="masked"))
    rewritten = apply(plan)
    assert found_in(plan, rewritten) == []
    (result,) = (node for node in rewritten.graph.node if "out" in node.output)
    maker(rewritten, "y").output[0] = "old"
    place = list(rewritten.graph.node).index(result)
    rewritten.graph.node.insert(place, helper.make_node("Identity", [result.input[0]], ["y"], "n_y"))
    reads(rewritten, "out", 0, "y")
    nodes = ("Add 'old'", "Identity 'n_y'", "Identity 'mlp/heads/result'")
    assert found_in(plan, rewritten) == [NODE.format(node) for node in nodes]


@cache
def nested() -> onnx.ModelProto:
    """A block, and another one in the body of an If behind it."""
    inner = "f2 = MatMul(m, W1) y2 = Add(f2, b1) r = Relu(y2) s2 = MatMul(r, W2) b = Add(s2, b2)"
    return text_model(
        f"{BLOCK} out = If (flag) <then_branch = g1 () => ({SHAPE} b) {{ {inner} }}, "
        f"else_branch = g2 () => ({SHAPE} b) {{ b = Neg(m) }}>",
        inputs=f"{SHAPE} x, bool flag",
    )


@pytest.mark.parametrize("inline", [False, True], ids=["calls", "inline"])
@EACH_FORM
def test_blocks_in_bodies(form: str, inline: bool) -> None:
    """Heads that are written out hold a Loop, which comes before the If."""
    plan = make_plan(nested(), Options(form=form, inline=inline))
    assert [conversion.block.path for conversion in plan.conversions] == [(), (("out", "then_branch"),)]
    rewritten = apply(plan)
    assert found_in(plan, rewritten) == []
    reads(rewritten, "out", 0, "other_flag")
    gone = plan.conversions[1].block.name
    assert set(found_in(plan, rewritten)) == {
        NODE.format("If 'out'"),
        f"{gone}: the graph that contains it is not in the rewritten model",
    }


@EACH_FORM
def test_differences_in_a_body_with_a_block(form: str) -> None:
    plan = make_plan(nested(), Options(form=form))
    rewritten = apply(plan)
    inside = body(rewritten, "then_branch")
    inside.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "own"))
    inside.node.append(helper.make_node("Mul", ["b", "own"], ["c"], "n_c"))
    inside.output[0].name = "c"
    where = " (in If/then_branch)"
    assert set(found_in(plan, rewritten)) == {
        NODE.format("Mul 'n_c'") + where,
        f"output 0 is 'c', but 'b' in the original{where}",
        f"weight 'own' is in the rewritten model only{where}",
    }


def test_a_run_that_converts_nothing_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(f"{rewrite.__module__}.made", lambda unit: unit.fact(Plan).model)
    report = rewrite(mlp(SILU), tmp_path / "out.onnx")
    assert [row.heads for row in report.converted] == [8]
    assert report.exit_status is ExitStatus.VALIDATION_FAILED
    assert report.validation is not None
    assert NO_SOFTMAX.format("mlp") in report.validation.failures
    assert not (tmp_path / "out.onnx").exists()

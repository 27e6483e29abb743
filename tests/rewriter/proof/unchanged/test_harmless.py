"""What the comparison with the original must not report: what the pass writes, and what changes no result."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from passes.options import FormOptions, Options
from passes.plan import apply, make_plan
from tests.rewriter.compare.edits import (
    Change,
    body,
    graphs,
    latest_first,
    maker,
    shadowing,
    swap,
    weight,
    without,
)
from tests.rewriter.proof.unchanged.house import SHAPE, found_in, planned
from tests.textmodels import ERF_GELU, SILU, mlp


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


HARMLESS: dict[str, Change] = {
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


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_variations(name: str) -> None:
    plan = planned("local")
    rewritten = apply(plan)
    before = rewritten.SerializeToString()
    HARMLESS[name](rewritten)
    assert rewritten.SerializeToString() != before
    assert found_in(plan, rewritten) == []


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
    assert found_in(plan, apply(plan)) == []
    assert found_in(plan, plan.model) != []

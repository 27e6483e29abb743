"""Damage beside the heads: weights, nodes, bodies of control flow, outputs and the model's own fields."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from passes.plan import Plan
from tests.sabotage.edits import Array, Edit, anywhere, applied, heads
from tests.sabotage.harness import SabotageError
from tests.sabotage.lengths import LAST as LAST_ROW
from tests.sabotage.pieces import (
    attribute,
    becomes,
    next_number,
    nodes_of,
    nth,
    operand,
    renamed,
    replace_values,
    rows_swapped,
    scaled,
    turned,
    weight,
)
from tests.sabotage.sabotages import Expect, Sabotage
from tests.sabotage.subjects import on


def bypassed(operator: str, number: int) -> Edit:
    """A node is gone, and what read it reads its first input."""

    def edit(model: onnx.ModelProto, _: Plan) -> None:
        gone = nodes_of(model, operator)[number]
        model.graph.node.remove(gone)
        renamed(model.graph.node, {gone.output[0]: gone.input[0]})

    return edit


def frozen(operator: str, number: int, values: Array) -> Edit:
    """A computed tensor is replaced by an initializer of the same name."""

    def edit(model: onnx.ModelProto, _: Plan) -> None:
        gone = nodes_of(model, operator)[number]
        model.graph.node.remove(gone)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, gone.output[0]))

    return edit


def residual(model: onnx.ModelProto, _: Plan) -> None:
    """The last sum of two computed tensors becomes the second of them."""
    made = {name for node in model.graph.node for name in node.output if node.op_type != "Constant"}
    last = [node for node in nodes_of(model, "Add") if made.issuperset(node.input)][-1]
    last.op_type = "Identity"
    del last.input[0]


def constant_node(model: onnx.ModelProto, _: Plan) -> None:
    """A float in a Constant node, one unit in the last place larger."""
    for node in nodes_of(model, "Constant"):
        for entry in node.attribute:
            if entry.t.data_type == onnx.TensorProto.FLOAT and not entry.t.dims:
                replace_values(entry.t, next_number(0))
                return
    raise SabotageError("no Constant node with a float")


# -- outputs and fields ----------------------------------------------------------------------------------------------


def an_output_for_another(model: onnx.ModelProto, _: Plan) -> None:
    """The first output is made by an Identity of the second."""
    first, second = (value.name for value in model.graph.output[:2])
    renamed(model.graph.node, {first: f"{first}/gone"})
    model.graph.node.append(onnx.helper.make_node("Identity", [second], [first]))


def outputs_exchanged(model: onnx.ModelProto, _: Plan) -> None:
    """The nodes that make the first two outputs write each other's."""
    first, second = (value.name for value in model.graph.output[:2])
    renamed(model.graph.node, {first: second, second: first})


def _reversed(outputs: onnx.GraphProto) -> None:
    copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in reversed(outputs.output)]
    del outputs.output[:]
    outputs.output.extend(copies)


def _renamed_output(model: onnx.ModelProto) -> None:
    old = model.graph.output[0].name
    renamed(model.graph.node, {old: f"{old}2"})
    model.graph.output[0].name = f"{old}2"


def _stripped(model: onnx.ModelProto) -> None:
    """Everything lost that no runtime reads."""
    del model.metadata_props[:]
    del model.graph.value_info[:]
    model.producer_name = model.producer_version = model.doc_string = ""
    for node in (*model.graph.node, *(inner for function in model.functions for inner in function.node)):
        del node.metadata_props[:]
        node.doc_string = ""


def _unread_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "unread"))


def _half_output(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


def _newer_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version += 1


def _newer_ir(model: onnx.ModelProto) -> None:
    model.ir_version += 1


def _another_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info("more", onnx.TensorProto.FLOAT, [1]))


def _another_function(model: onnx.ModelProto) -> None:
    (function,) = (function for function in model.functions if function.domain == "other")
    function.node[0].op_type = "Add"


def fields(change: Callable[[onnx.ModelProto], object]) -> Edit:
    """Anything of the model itself."""

    def edit(model: onnx.ModelProto, _: Plan) -> None:
        change(model)

    return edit


# -- branches --------------------------------------------------------------------------------------------------------


def bodies(change: Callable[[onnx.GraphProto, onnx.GraphProto], object]) -> Edit:
    """The two branches of the first If."""

    def edit(model: onnx.ModelProto, _: Plan) -> None:
        by_name = {entry.name: entry.g for entry in nodes_of(model, "If")[0].attribute}
        change(by_name["then_branch"], by_name["else_branch"])

    return edit


def _exchanged(then: onnx.GraphProto, otherwise: onnx.GraphProto) -> None:
    copy = onnx.GraphProto()
    copy.CopyFrom(then)
    then.CopyFrom(otherwise)
    otherwise.CopyFrom(copy)


def _sum_instead(_: onnx.GraphProto, otherwise: onnx.GraphProto) -> None:
    (difference,) = (node for node in otherwise.node if node.op_type == "Sub")
    difference.op_type = "Add"


BRANCHES: tuple[tuple[str, Edit], ...] = (
    ("the branches of an If exchanged", bodies(_exchanged)),
    ("the outputs of a branch exchanged", bodies(lambda then, _: _reversed(then))),
    ("the last node of a branch is an Identity", bodies(lambda then, _: becomes("Identity", 1)(then.node[-1]))),
    (
        "a constant in a branch one unit larger",
        bodies(lambda _, otherwise: replace_values(otherwise.initializer[0], next_number(0))),
    ),
    ("a subtraction in a branch becomes an addition", bodies(_sum_instead)),
    ("the condition of an If is another", nth("If", 0, lambda node: node.input.__setitem__(0, "never"))),
)

# -- the table -------------------------------------------------------------------------------------------------------

_PAIR = ("silu-decoder", "gelu-vision")
_OTHER = ("relu-decoder", "gelu-encoder")

WEIGHTS: tuple[tuple[str, Edit, tuple[str, ...]], ...] = (
    ("W2 negated", operand("W2", scaled(-1.0)), ("silu-decoder", "gelu-encoder", "gated-decoder")),
    ("W1 without its bias", operand("b1", scaled(0.0)), _PAIR),
    ("W2 without its bias", operand("b2", scaled(0.0)), _PAIR),
    ("rows of W2 swapped", operand("W2", rows_swapped), _OTHER),
    ("one entry of W1 one unit larger", operand("W1", next_number(5)), _OTHER),
    ("one entry of W2 one unit larger, in the second block", operand("W2", next_number(7), 1), _PAIR),
    ("b2 times 1 + 1e-3", operand("b2", scaled(1.001)), _PAIR),
    (
        "one entry of the position table one unit larger",
        weight("*position*", next_number(3)),
        ("gelu-vision", *_OTHER),
    ),
    ("rows of the token table swapped", weight("*w[ot][re]*.weight", rows_swapped), ("silu-decoder", "gelu-encoder")),
    (
        "a normalisation's scale one unit larger",
        weight("*norm*.weight", next_number(0)),
        ("gated-decoder", "gelu-vision"),
    ),
    ("the output projection one unit larger", weight("*lm_head.weight", next_number(11)), ("relu-decoder",)),
    ("a constant node one unit larger", constant_node, ("conformer-encoder", "gelu-vision")),
)
"""Weights of the original that are no part of heads in form `local`; units are those of the last place."""

NODES: tuple[tuple[str, Edit, tuple[str, ...]], ...] = (
    ("a residual connection dropped", residual, ("silu-decoder", "gelu-encoder", "gated-decoder")),
    ("another epsilon of a normalisation", nth("LayerNormalization", 1, attribute("epsilon", 1e-4)), _OTHER),
    ("the model's softmax over another axis", nth("Softmax", 0, attribute("axis", -2)), _PAIR),
    ("a normalisation bypassed", bypassed("LayerNormalization", 2), ("silu-decoder", "relu-decoder")),
    (
        "a normalisation replaced by an initializer",
        frozen("LayerNormalization", -1, np.full((1, 1, 32), 0.5, np.float32)),
        ("conformer-encoder", "gelu-vision"),
    ),
    ("positions replaced by an initializer", frozen("CumSum", 0, np.ones((1, 1), np.int64)), ("relu-decoder",)),
    (
        "a computed scale replaced by an initializer",
        frozen("ReduceMax", 0, np.ones((1, 1, 1), np.float32)),
        ("computed-scale",),
    ),
    ("a difference turned round", nth("Sub", 0, turned), ("conformer-encoder", "relu-decoder")),
    ("the last sum is a difference", nth("Add", -1, becomes("Sub")), ("relu-decoder", "conformer-encoder")),
    ("the last product is a sum", nth("Mul", -1, becomes("Add")), ("gated-decoder", "conformer-encoder")),
)

FIELDS: tuple[tuple[str, Edit, tuple[str, ...]], ...] = (
    ("outputs listed in another order", fields(lambda model: _reversed(model.graph)), ("gelu-encoder", "outputs")),
    ("an output renamed", fields(_renamed_output), _PAIR),
    ("two outputs exchanged", outputs_exchanged, ("outputs",)),
    ("an output is an Identity of another", an_output_for_another, ("outputs",)),
    ("another opset", fields(_newer_opset), _PAIR),
    ("another IR version", fields(_newer_ir), _PAIR),
    ("an output's type is declared float16", fields(_half_output), _PAIR),
    ("an input added", fields(_another_input), _PAIR),
)

NEIGHBOURS = (
    *(Sabotage(name, applied(edit), on(*models), Expect.MODEL) for name, edit, models in (*WEIGHTS, *NODES, *FIELDS)),
    *(Sabotage(name, applied(edit), on("branches"), Expect.MODEL) for name, edit in BRANCHES),
    Sabotage(
        "a function of the model's own is another", applied(fields(_another_function)), on("function"), Expect.MODEL
    ),
    Sabotage(
        "the last row of an output is off by 1e-3",
        applied(anywhere("logits", LAST_ROW)),
        on("silu-decoder", "relu-decoder"),
        Expect.MODEL,
    ),
    Sabotage(
        "heads in one branch are off by 1e-3", applied(heads("out = Mul(own, $1.001)", 1)), on("branches"), block=1
    ),
    Sabotage(
        "metadata, types and texts lost",
        applied(fields(_stripped)),
        on("silu-decoder", "gelu-encoder"),
        Expect.HARMLESS,
        below=2e-6,
    ),
    Sabotage("a weight that nothing reads", applied(fields(_unread_weight)), on(*_PAIR), Expect.HARMLESS, below=2e-6),
)

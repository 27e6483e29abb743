"""Conversions that are none, wrong lowerings, bias tokens that leak, models that cannot be proved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import onnx

from passes.match.lower import Lowered
from passes.plan import Plan, apply
from rewriter.pipeline import Unit
from tests.sabotage.edits import applied, heads, inner, places
from tests.sabotage.harness import Part, Patch
from tests.sabotage.lengths import length
from tests.sabotage.mixing import FIRST_SEQUENCE, FIRST_TOKEN
from tests.sabotage.pieces import NodeChange, attribute, becomes, nodes_of, operand, scaled
from tests.sabotage.sabotages import Expect, Sabotage
from tests.sabotage.subjects import on, square

# -- conversions that are none ---------------------------------------------------------------------------------------


def replaced(make: Callable[[Plan], onnx.ModelProto]) -> Patch:
    """The whole result is another model."""

    def wrapper(_: Part) -> Part:
        def wrong(unit: Unit) -> onnx.ModelProto:
            result = onnx.ModelProto()
            result.CopyFrom(make(unit.fact(Plan)))
            return result

        return wrong

    return {"made": wrapper}


def first_only(plan: Plan) -> onnx.ModelProto:
    """Only the first of the planned blocks is converted."""
    return apply(replace(plan, conversions=plan.conversions[:1]))


def unused_heads(model: onnx.ModelProto, plan: Plan) -> None:
    """The heads are there, and the original's activation is what the model uses."""
    conversion = plan.conversions[0]
    view, made = plan.view_of(conversion.block), conversion.block.output
    (place,) = places(model, made)
    place.node.output[place.slot] = f"{made}/unused"
    present = {name for node in model.graph.node for name in node.output}
    region = [view.nodes[index] for index in conversion.block.region.nodes]
    back = [node for node in region if not present.issuperset(node.output)]
    nodes = [*model.graph.node[: place.index], *back, *model.graph.node[place.index :]]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    known = {tensor.name for tensor in model.graph.initializer}
    model.graph.initializer.extend(tensor for tensor in plan.model.graph.initializer if tensor.name not in known)


_PAIR = ("silu-decoder", "gelu-encoder")

CONVERSIONS = (
    Sabotage("nothing is converted", replaced(lambda plan: plan.model), on(*_PAIR, "gated-decoder")),
    Sabotage("only the first block is converted", replaced(first_only), on(*_PAIR), block=1),
    Sabotage("the heads are there, and the activation too", applied(unused_heads), on("silu-decoder", "relu-decoder")),
)

# -- lowering --------------------------------------------------------------------------------------------------------


def lowered(op_type: str, change: NodeChange) -> Patch:
    """A fused operator is taken apart, and the parts of one type are something else."""

    def wrapper(right: Part) -> Part:
        def wrong(*arguments: Any, **options: Any) -> Lowered:
            found: Lowered = right(*arguments, **options)
            model = onnx.ModelProto()
            model.CopyFrom(found.model)
            for node in nodes_of(model, op_type):
                change(node)
            return replace(found, model=model)

        return wrong

    return {"lower": wrapper}


LOWERINGS: tuple[tuple[str, Patch, tuple[str, ...]], ...] = (
    ("a fused bias subtracted", lowered("Add", becomes("Sub")), ("bias-gelu", "fast-gelu")),
    ("a fused bias lost", lowered("Gelu", lambda node: node.input.__setitem__(0, "first")), ("bias-gelu",)),
    ("a fused activation is another", lowered("Gelu", becomes("QuickGelu")), ("bias-gelu",)),
    ("a fused activation with another alpha", lowered("LeakyRelu", attribute("alpha", 0.2)), ("fused-leaky",)),
    ("a fused alpha times 1 + 1e-5", lowered("LeakyRelu", attribute("alpha", 0.100001)), ("fused-leaky",)),
    ("a fused alpha times 1 + 1e-4", lowered("LeakyRelu", attribute("alpha", 0.10001)), ("fused-leaky",)),
    ("a fused product off by 1e-3", lowered("Gemm", attribute("alpha", 1.001)), ("fused-leaky",)),
)

# -- models that no right rewriter can prove -------------------------------------------------------------------------

NONE: Patch = {}
"""Nothing is wrong with the rewriter."""

NEGATED = applied(heads("out = Neg(own)"))

HONEST: tuple[Sabotage, ...] = (
    Sabotage("a gate of 1e-10 with W2 times 1e20", NONE, on("amplified"), words=("--accuracy", "--gate"), honest=True),
    Sabotage(
        "one rare token leaves the domain of a gate", NONE, on("rare-token"), words=("--option domain",), honest=True
    ),
    Sabotage("all outputs are NaN", NONE, on("nan"), Expect.MODEL, honest=True),
    Sabotage("all outputs are NaN, heads negated", NEGATED, on("nan"), Expect.MODEL, honest=True),
    Sabotage("no tokens", NONE, on("silu", dims={"tokens": 0}), Expect.REFUSED, honest=True),
    Sabotage("no sequences", NONE, on("silu-decoder", dims={"batch": 0}), Expect.REFUSED, honest=True),
    Sabotage(
        "no sequences, heads negated",
        NEGATED,
        on("silu-decoder", "gelu-vision", dims={"batch": 0}),
        Expect.REFUSED,
        honest=True,
    ),
)

# -- models on which errors hide -------------------------------------------------------------------------------------


def first_neuron(limit: str) -> str:
    """A text that is off by a thousandth for tokens whose first neuron exceeds a limit."""
    return (
        f"f = Gather<axis = -1>(y, #0) wrong = Greater(f, ${limit}) bad = Mul(own, $1.001) out = Where(wrong, bad, own)"
    )


_LONGER = length("Greater(t, #17)")

HIDDEN = (
    Sabotage("off by 1e-3 for a token of one case", applied(heads(first_neuron("8.0"))), on("rare-word")),
    Sabotage(
        "off by 1e-3 where the first neuron exceeds 1",
        applied(heads(first_neuron("1.0"))),
        on("silu-decoder", "gelu-vision"),
    ),
    Sabotage(
        "W2 negated beside an output of -1e9, form masked",
        applied(inner("*/heads/W_O_flat", "out = Neg(own)")),
        square("masked", "outlier"),
    ),
    Sabotage("W2 negated beside an output of -1e9", applied(operand("W2", scaled(-1.0))), on("outlier"), Expect.MODEL),
    Sabotage("off by 1e-3 beyond 17 tokens beside an output of -1e9", applied(heads(_LONGER)), on("outlier")),
    Sabotage("heads negated beside an output of -1e9", NEGATED, on("outlier")),
    Sabotage("the first token's activation, quantised", applied(heads(FIRST_TOKEN)), on("quantised")),
    Sabotage("off by 1e-3, quantised", applied(heads("out = Mul(own, $1.001)")), on("quantised")),
    Sabotage("off by 1e-3 beyond 17 tokens, quantised", applied(heads(_LONGER)), on("quantised")),
    Sabotage("off by 1e-2 beyond 17 tokens, float16", applied(heads(_LONGER.replace("1.001", "1.01"))), on("half")),
    Sabotage("the first sequence's activations, float16", applied(heads(FIRST_SEQUENCE)), on("half")),
)

PLANS = (
    *CONVERSIONS,
    *(Sabotage(what, patch, on(*models), Expect.MODEL) for what, patch, models in LOWERINGS),
    *HONEST,
    *HIDDEN,
)

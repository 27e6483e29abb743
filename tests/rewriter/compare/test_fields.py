"""What models declare: each kind of entry, on either side or on both."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx
import pytest
from onnx import TensorProto, helper

from rewriter.compare.graphs import FieldChange, _declared, difference, signature_differences
from rewriter.files.load import LoadedModel
from tests.textmodels import text_model

Change = Callable[[onnx.ModelProto], object]


def model() -> onnx.ModelProto:
    return text_model("h = d.f(x) out = Abs(h)", domains={"d": 1}, functions=FUNCTION)


FUNCTION = '<opset_import: ["": 17], domain: "d"> f (a) => (b) { c = Neg(a) b = e.Inner(c) }'


def entries_of(found: Iterable[FieldChange]) -> list[tuple[str, str, str | None, str | None]]:
    return [(change.what, change.name, change.a, change.b) for change in found]


def both(change: Change) -> tuple[LoadedModel, LoadedModel]:
    ours, theirs = model(), model()
    change(theirs)
    return tuple(LoadedModel(each, None, None, (), 0) for each in (ours, theirs))  # type: ignore[return-value]


def overload(model: onnx.ModelProto) -> None:
    model.functions[0].overload = "v"


def opset(domain: str, version: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        kept = [entry for entry in model.opset_import if entry.domain != domain]
        del model.opset_import[:]
        model.opset_import.extend([*kept, helper.make_opsetid(domain, version)])

    return change


@pytest.mark.parametrize(
    ("change", "expected", "said"),
    [
        (str, [], []),  # no change
        (opset("", 18), [("opset", "ai.onnx", "17", "18")], []),
        (opset("d", 2), [("opset", "d", "1", "2")], []),
        (opset("e", 5), [("opset", "e", None, "5")], []),  # only a function uses it
        (opset("unused", 5), [], [("opset", "unused", None, "5")]),
        (lambda m: m.functions.pop(), [("function", "d::f", "2 nodes", None)], []),
        (overload, [("function", "d::f", "2 nodes", None), ("function", "d::f:v", None, "2 nodes")], []),
        (lambda m: m.functions[0].node.pop(), [("function", "d::f", "2 nodes", "1 nodes")], []),
        (lambda m: setattr(m, "ir_version", 9), [], [("model", "IR version", "8", "9")]),
        (lambda m: setattr(m, "producer_name", "p"), [], [("model", "producer", None, "p")]),
        (lambda m: setattr(m, "producer_version", "2"), [], [("model", "producer", None, "2")]),
        (lambda m: setattr(m.graph, "name", "h"), [], [("model", "graph", "g", "h")]),
        (lambda m: setattr(m.graph, "name", ""), [], [("model", "graph", "g", None)]),
        (lambda m: m.metadata_props.add(key="k", value="v"), [], [("metadata", "k", None, "v")]),
    ],
)
def test_models(change: Change, expected: list[object], said: list[object]) -> None:
    a, b = both(change)
    found = difference(a, b)
    assert entries_of(found.fields) == expected
    assert entries_of(found.remarks) == said
    assert [(what, name, right, left) for what, name, left, right in entries_of(difference(b, a).fields)] == expected


def value(name: str, dims: list[str | int | None] | None, elem: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, dims)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (value("v", [2, "n", None, 0]), "float32[2, n, ?, 0]"),
        (value("v", []), "float32[]"),
        (value("v", None), "float32"),
        (value("v", None, TensorProto.INT64), "int64"),
        (value("v", [1], 999), "?[1]"),
        (helper.make_tensor_sequence_value_info("v", TensorProto.FLOAT, None), "sequence"),
        (helper.make_value_info("v", helper.make_optional_type_proto(value("e", None).type)), "optional"),
        (onnx.ValueInfoProto(name="v"), "of unknown type"),
    ],
)
def test_types(given: onnx.ValueInfoProto, text: str) -> None:
    ours = onnx.GraphProto(output=[given], input=[given])
    assert entries_of(list(_declared(ours, onnx.GraphProto()))) == [
        ("input", "v", text, None),
        ("output", "v", text, None),
    ]
    assert entries_of(list(_declared(onnx.GraphProto(), ours))) == [
        ("input", "v", None, text),
        ("output", "v", None, text),
    ]
    assert entries_of(list(_declared(ours, ours))) == []


def test_order_counts_if_names_agree() -> None:
    entries = [value("p", [1]), value("q", [1])]
    ours, theirs = onnx.GraphProto(input=entries), onnx.GraphProto(input=entries[::-1])
    assert entries_of(list(_declared(ours, theirs))) == [("order", "inputs", "p, q", "q, p")]
    del theirs.input[0]
    assert entries_of(list(_declared(ours, theirs))) == [("input", "q", "float32[1]", None)]


# -- what must agree before both are run -----------------------------------------------------------------------------

PLAIN = {"inputs": "float[batch, tokens, 4] x", "outputs": "float[batch, tokens, 4] out"}


@pytest.mark.parametrize(
    ("other", "differences"),
    [
        ({}, ()),
        ({"inputs": "float[b, 7, 4] x"}, ()),
        ({"outputs": "float[b, 7, 4] out"}, ()),
        (
            {"inputs": "float16[batch, tokens, 4] x"},
            ("input 'x': float32[batch, tokens, 4] in A, float16[batch, tokens, 4] in B",),
        ),
        ({"inputs": "float[batch, 4] x"}, ("input 'x': float32[batch, tokens, 4] in A, float32[batch, 4] in B",)),
        (
            {"outputs": "float[batch, tokens, 5] out"},
            ("output 'out': float32[batch, tokens, 4] in A, float32[batch, tokens, 5] in B",),
        ),
        ({"inputs": "float[batch, tokens, 4] x, float[4] z"}, ("input 'z' is only in B",)),
    ],
)
def test_signatures(other: dict[str, str], differences: tuple[str, ...]) -> None:
    a, b = (
        text_model("out = Relu(x)", inputs=given["inputs"], outputs=given["outputs"])
        for given in (PLAIN, {**PLAIN, **other})
    )
    assert signature_differences(a, b) == differences


def test_an_initializer_that_is_an_input_too_is_none() -> None:
    """IR version 3 lists all of them as inputs."""
    a = text_model("out = Add(x, b2)")
    b = text_model("out = Add(x, b2)", inputs="float[batch, tokens, 4] x, float[4] b2")
    assert signature_differences(a, b) == ()
    assert signature_differences(b, a) == ()

"""A string that is not UTF-8 in every field that can hold one, where protobuf gives bytes instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from onnx import helper

from rewriter import diff
from rewriter.errors import ExitStatus, ModelError
from tests.conftest import slow
from tests.fuzz.trial import WAYS, tried
from tests.textmodels import FIRST, SECOND, SILU, text_model

_TOKEN, _BROKEN = b"QQQQQQQQ", b"\xff\xfe\x80QQQQQ"


def _model() -> onnx.ModelProto:
    """An MLP in a function that is called in a branch, and an entry of everything that has strings."""
    call = "local.mlp(x)"
    model = text_model(
        f"k = Constant<value_ints = [1]>() c = Cast<to = 9>(k) "
        f"out = If(c) <then_branch = t () => (float[b, t, 4] a) {{ a = {call} }}, "
        f"else_branch = e () => (float[b, t, 4] a) {{ a = Identity(x) }}>",
        domains={"local": 1},
        constants={},
    )
    block = text_model(f"{FIRST} {SILU} {SECOND}")
    nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in block.graph.initializer]
    opsets = [helper.make_opsetid("", 17)]
    made = helper.make_function("local", "mlp", ["x"], ["out"], [*nodes, *block.graph.node], opsets)
    model.functions.append(made)
    model.functions[0].value_info.add(name="h").type.tensor_type.elem_type = 1
    model.graph.value_info.append(helper.make_tensor_value_info("k", 7, [1]))
    model.graph.quantization_annotation.add(tensor_name="x").quant_parameter_tensor_names.add(key="k", value="v")
    for holder in (model, model.graph, model.graph.node[0], model.functions[0]):
        holder.metadata_props.add(key="key", value="value")
    model.graph.initializer.append(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(block.graph.initializer[0])))
    model.graph.initializer[0].name = "unused"
    return model


def _strings(message: Any, path: str = "") -> Iterator[tuple[Any, FieldDescriptor, str]]:
    """Every message of a model with every string field that it could have."""
    for field in message.DESCRIPTOR.fields:
        if field.type == field.TYPE_STRING:
            yield message, field, f"{path}.{field.name}"
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for number, each in enumerate(value if field.is_repeated else [value]):
                yield from _strings(each, f"{path}.{field.name}[{number}]")


def _broken() -> Iterator[tuple[str, bytes]]:
    """A name of the field, and the file."""
    for number, (_, field, path) in enumerate(_strings(_model())):
        model = _model()
        message, _, _ = list(_strings(model))[number]
        if field.is_repeated:
            values = getattr(message, field.name)
            if values:
                values[0] = _TOKEN.decode()
            else:
                values.append(_TOKEN.decode())
        else:
            setattr(message, field.name, _TOKEN.decode())
        yield path, model.SerializeToString().replace(_TOKEN, _BROKEN)


def test_the_model_is_converted(tmp_path: Path) -> None:
    assert tried(_model().SerializeToString(), WAYS[0], tmp_path).status == ExitStatus.CONVERTED
    kinds = {path.rsplit(".", 1)[-1] for _, _, path in _strings(_model())}
    assert {"op_type", "domain", "name", "dim_param", "denotation", "key", "ref_attr_name", "doc_string"} <= kinds


@slow
@pytest.mark.parametrize("way", WAYS[:1] + WAYS[-4:], ids=str)
def test_strings_that_are_not_utf8(way: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for path, data in _broken():
        outcome = tried(data, way, tmp_path)
        if outcome.finding:
            found.append(f"{path}: {outcome.message}")
    assert not found, "\n".join(found)


@slow
def test_differences_of_strings_that_are_not_utf8(tmp_path: Path) -> None:
    plain, path = tmp_path / "plain.onnx", tmp_path / "broken.onnx"
    plain.write_bytes(_model().SerializeToString())
    shown = 0
    for where, data in _broken():
        path.write_bytes(data)
        try:
            found = diff(plain, path, outputs=False)
        except ModelError:
            continue
        text = json.dumps(found.to_json())
        assert text.isprintable(), where
        shown += 1
    assert shown > 20

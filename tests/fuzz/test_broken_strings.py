"""A string that is not UTF-8 in every field that can hold one, where protobuf gives bytes instead."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from rewriter import diff
from rewriter.errors import ExitStatus, ModelError
from tests.textmodels import FIRST, SECOND, SILU, text_model
from tools.fuzz.damage import messages, repeated
from tools.fuzz.trial import WAYS, tried

_TRIED = WAYS[:1] + WAYS[-4:]
_TOKEN, _BROKEN = "QQQQQQQQ", b"\xff\xfe\x80QQQQQ"


def _model() -> onnx.ModelProto:
    """An MLP in a function that is called in a branch, and an entry of everything that has strings."""
    block = text_model(f"{FIRST} {SILU} {SECOND}")
    model = text_model(
        "k = Constant<value_ints = [1]>() c = Cast<to = 9>(k) "
        "out = If(c) <then_branch = t () => (float[b, t, 4] a) { a = local.mlp(x) }, "
        "else_branch = e () => (float[b, t, 4] a) { a = Identity(x) }>",
        domains={"local": 1},
        constants={"unused": onnx.numpy_helper.to_array(block.graph.initializer[0])},
    )
    nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in block.graph.initializer]
    opsets = [helper.make_opsetid("", 17)]
    made = helper.make_function("local", "mlp", ["x"], ["out"], [*nodes, *block.graph.node], opsets)
    made.value_info.append(helper.make_tensor_value_info("h", 1, None))
    model.functions.append(made)
    model.graph.value_info.append(helper.make_tensor_value_info("k", 7, [1]))
    model.graph.quantization_annotation.add(tensor_name="x").quant_parameter_tensor_names.add(key="k", value="v")
    for holder in (model, model.graph, model.graph.node[0], model.functions[0]):
        holder.metadata_props.add(key="key", value="value")
    return model


def _broken() -> Iterator[tuple[str, bytes]]:
    """A name of the field, and the file."""
    model = _model()
    for place, message in enumerate(messages(model)):
        for field in message.DESCRIPTOR.fields:
            if field.type == field.TYPE_STRING:
                copy = deepcopy(model)
                target: Any = list(messages(copy))[place]
                if repeated(field):
                    getattr(target, field.name)[:1] = [_TOKEN]
                else:
                    setattr(target, field.name, _TOKEN)
                yield field.full_name, copy.SerializeToString().replace(_TOKEN.encode(), _BROKEN)


def test_the_model_is_converted(tmp_path: Path) -> None:
    assert tried(_model().SerializeToString(), WAYS[0], tmp_path).status == ExitStatus.CONVERTED
    kinds = {name.rpartition(".")[2] for name, _ in _broken()}
    assert {"op_type", "domain", "name", "dim_param", "denotation", "key", "ref_attr_name", "doc_string"} <= kinds


@pytest.mark.sample(0)
@pytest.mark.parametrize("place", range(5), ids=lambda place: str(_TRIED[place]))
def test_strings_that_are_not_utf8(place: int, tmp_path: Path) -> None:
    """Every field where a model is rewritten; each other command, which loads as that one does, gets a quarter."""
    some = slice(place - 1, None, 4) if place else slice(None)
    outcomes = ((name, tried(data, _TRIED[place], tmp_path)) for name, data in [*_broken()][some])
    assert [(name, outcome.message) for name, outcome in outcomes if outcome.finding] == []


@pytest.mark.slow
def test_differences_of_strings_that_are_not_utf8(tmp_path: Path) -> None:
    plain, path = tmp_path / "plain.onnx", tmp_path / "broken.onnx"
    plain.write_bytes(_model().SerializeToString())
    shown = 0
    for name, data in [*_broken()][::2]:
        path.write_bytes(data)
        try:
            found = diff(plain, path, outputs=False)
        except ModelError:
            continue
        assert json.dumps(found.to_json()).isprintable(), name
        shown += 1
    assert shown > 20

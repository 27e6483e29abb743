"""No emitted constant is one that onnxruntime deletes for being almost 1 (docs/decisions/0009)."""

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from passes.forms import FORMS
from rewriter import rewrite
from rewriter.errors import NothingToConvertError, UsageError
from rewriter.graph.walk import iter_tensors
from tests.spellings import SPELLINGS
from tests.textmodels import mlp

GATED = "y = MatMul(x, W1) u = MatMul(x, V1)"
ACTIVATIONS = {label.partition("(")[0]: text for _, label, text in reversed(SPELLINGS)}
"""One spelling per activation, the plain one where there is one."""


def constants(model: onnx.ModelProto) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Every float64 constant, in bodies and functions too: name and values."""
    for tensor in iter_tensors(model):
        if tensor.data_type == onnx.TensorProto.DOUBLE:
            yield tensor.name, numpy_helper.to_array(tensor)


def endangered(model: onnx.ModelProto) -> list[tuple[str, float]]:
    """Constants that are 1 as float32 but not as float64."""
    return [
        (name, float(value))
        for name, values in constants(model)
        for value in np.atleast_1d(values).ravel()
        if 0.5 < value < 2.0 and value != 1.0 and np.float32(value) == 1.0
    ]


def converted(text: str, form: str, *, gate: bool, double: bool) -> onnx.ModelProto | None:
    elem = "double" if double else "float"
    body = f"{text.replace('h = ', 'k = ')} h = Mul(k, u)" if gate else text
    model = mlp(body, first=GATED, elem=elem) if gate else mlp(body, elem=elem)
    try:
        return rewrite(model, form=form, fit=False, validate=False).rewritten
    except (NothingToConvertError, UsageError):
        return None


@pytest.mark.sample(0)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gated"])
def test_emitted_constants(form: str, gate: bool) -> None:
    """Every second in double: the other ones are so as gates."""
    made = 0
    for place, (label, text) in enumerate(ACTIVATIONS.items(), [*FORMS].index(form)):
        model = converted(text, form, gate=gate, double=bool(place % 2) is gate)
        if model is not None:
            made += any(True for _ in constants(model))
            assert endangered(model) == [], label
    assert made >= 5, "hardly any program was looked at"


def test_a_planted_constant_is_seen() -> None:
    model = converted(ACTIVATIONS["silu"], "local", gate=True, double=False)
    assert model is not None
    assert endangered(model) == []
    planted = np.asarray([1.0, 1.0 + 2.0**-24, 1.0 + 2.0**-23, 0.5])
    for node in model.functions[0].node:
        if node.op_type == "Constant" and node.attribute[0].t.data_type == onnx.TensorProto.DOUBLE:
            node.attribute[0].t.CopyFrom(numpy_helper.from_array(planted, "planted"))
            break
    else:
        model.graph.initializer.append(numpy_helper.from_array(planted, "planted"))
    assert endangered(model) == [("planted", 1.0 + 2.0**-24)]

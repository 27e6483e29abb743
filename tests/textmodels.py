"""Small models written as text: W1, an activation, W2.

The text is that of `onnx.parser`, with two shorthands. `$0.5` is a scalar constant of the model's element type. The
names of `SHAPES` are weights with fixed random values, declared where the text mentions them. By convention `x` is
the input, `y` the pre-activation, `h` the activation's output and `out` the output:

    mlp("s = Sigmoid(y) h = Mul(y, s)")
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from passes.match.blocks import Block, Finder, Left, Namer
from passes.options import Options
from rewriter.graph.view import all_views

Array = NDArray[Any]

SHAPES: Mapping[str, tuple[int, ...]] = {
    "W1": (4, 8),
    "W1t": (8, 4),
    "W1wide": (4, 16),
    "V1": (4, 8),
    "b1": (8,),
    "c1": (8,),
    "b1wide": (16,),
    "W2": (8, 4),
    "W2t": (4, 8),
    "b2": (4,),
    "K1": (8, 4, 1),
    "K2": (4, 8, 1),
    "K3": (8, 4, 3),
    "A1": (4, 2),
    "B1": (2, 8),
}

ELEMENTS: Mapping[str, int] = {
    "float": onnx.TensorProto.FLOAT,
    "double": onnx.TensorProto.DOUBLE,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "int32": onnx.TensorProto.INT32,
}

FIRST = "first = MatMul(x, W1) y = Add(first, b1)"
SECOND = "second = MatMul(h, W2) out = Add(second, b2)"
SILU = "s = Sigmoid(y) h = Mul(y, s)"
ERF_GELU = "d = Div(y, $1.4142135623730951) e = Erf(d) p = Add(e, $1.0) q = Mul(y, p) h = Mul(q, $0.5)"


def values(name: str) -> Array:
    """The float64 values of one of the weights: the same at every call, spread enough to bend an activation."""
    shape = SHAPES[name]
    rng = np.random.default_rng(sum(name.encode()))
    return rng.normal(0.0, 1.5, shape)


def tensor(name: str, array: Array | Sequence[float] | float, elem: str = "float") -> onnx.TensorProto:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(ELEMENTS[elem])
    return onnx.numpy_helper.from_array(np.asarray(array).astype(dtype), name)


def integers(**given: Any) -> dict[str, onnx.TensorProto]:
    return {name: onnx.numpy_helper.from_array(np.array(value, np.int64), name) for name, value in given.items()}


def filled(model: onnx.ModelProto, numbers: Callable[..., Any] = np.zeros) -> onnx.ModelProto:
    """The model with the weights that its text declares without numbers."""
    for value in model.graph.value_info:
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        model.graph.initializer.append(tensor(value.name, numbers(dims)))
    return model


def text_model(
    body: str,
    *,
    inputs: str = "float[batch, tokens, 4] x",
    outputs: str = "float[batch, tokens, 4] out",
    elem: str = "float",
    opset: int = 17,
    ir: int = 8,
    domains: Mapping[str, int] | None = None,
    constants: Mapping[str, Array | Sequence[float] | onnx.TensorProto] | None = None,
    functions: str = "",
) -> onnx.ModelProto:
    """A model from the text of its nodes; `constants` adds weights, or takes the place of those of `SHAPES`."""
    numbers: dict[str, str] = {}

    def named(match: re.Match[str]) -> str:
        return numbers.setdefault(match[1], f"number_{len(numbers)}")

    body = re.sub(r"\$(-?[0-9.]+(?:e-?[0-9]+)?)", named, body)
    imports = ", ".join(f'"{domain}": {version}' for domain, version in {"": opset, **(domains or {})}.items())
    header = f"<ir_version: {ir}, opset_import: [{imports}]>"
    if elem != "float":
        inputs, outputs = (re.sub(r"\bfloat\[", f"{elem}[", part) for part in (inputs, outputs))
    model = onnx.parser.parse_model(f"{header} g ({inputs}) => ({outputs}) {{ {body} }} {functions}")
    given = dict(constants or {})
    mentioned = set(re.findall(r"\w+", body))
    for name, value in given.items():
        model.graph.initializer.append(value if isinstance(value, onnx.TensorProto) else tensor(name, value, elem))
    for name in SHAPES:
        if name in mentioned and name not in given:
            model.graph.initializer.append(tensor(name, values(name), elem))
    for number, name in numbers.items():
        model.graph.initializer.append(tensor(name, float(number), elem))
    return model


def mlp(activation: str, *, first: str = FIRST, second: str = SECOND, **options: Any) -> onnx.ModelProto:
    """A model of one MLP: `first` makes `y` of `x`, `activation` makes `h` of `y`, `second` makes `out` of `h`."""
    return text_model(f"{first} {activation} {second}", **options)


def word_tokenizer(words: Sequence[str]) -> Any:
    """A tokenizer of the package tokenizers whose tokens are words; the first one represents all others."""
    tokenizers = pytest.importorskip("tokenizers")
    table = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, words[0]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return made


class Findings(NamedTuple):
    blocks: tuple[Block, ...]
    left: tuple[Left, ...]


def findings(model: onnx.ModelProto) -> Findings:
    """What the matcher finds in the main graph of a model."""
    return Findings(*Finder(all_views(model)[0], Namer(), Options(fit=False)).run())


def only_block(model: onnx.ModelProto) -> Block:
    """The one block of a model in which there is nothing else to find."""
    found = findings(model)
    assert [left.miss.reason for left in found.left] == []
    assert len(found.blocks) == 1
    return found.blocks[0]


def only_left(model: onnx.ModelProto) -> Left:
    """The one candidate of a model that is not a block."""
    found = findings(model)
    assert [block.identified.label for block in found.blocks] == []
    assert len(found.left) == 1, [left.miss for left in found.left]
    return found.left[0]

"""A GPT-2-shaped decoder, and one MLP block of it, written with onnx.helper: no PyTorch needed.

A weight source is a function from (name, dims, standard deviation) to an initializer; some benchmarks bring their own.
Random weights are scaled so that the pre-activations of the MLP blocks spread over about -3 to 3: after a
LayerNormalization their standard deviation is that of the weights times sqrt(width).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

WeightSource = Callable[[str, tuple[int, ...], float], onnx.TensorProto]

OPSET = 17
_FLOAT, _INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
_PREACTIVATION_STD = 1.5
_BIAS_STD = 0.3
_MASKED = -6e4


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; the defaults are those of GPT-2 small.

    Attributes:
        activation: a key of `ACTIVATIONS` or `GATED`.
        half: whether weights and activations are float16.
    """

    layers: int = 12
    width: int = 768
    hidden: int = 3072
    heads: int = 12
    vocabulary: int = 50257
    positions: int = 1024
    activation: str = "silu"
    half: bool = False

    @property
    def elem_type(self) -> int:
        """The element type of weights and activations."""
        return int(onnx.TensorProto.FLOAT16 if self.half else onnx.TensorProto.FLOAT)


class _Builder:
    """Collects nodes and initializers, one scope after another."""

    def __init__(self, weights: WeightSource, elem_type: int = onnx.TensorProto.FLOAT) -> None:
        self.elem_type = elem_type
        self.dtype = helper.tensor_dtype_to_np_dtype(elem_type)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.scope = ""
        self._weights = weights

    def node(
        self,
        operator: str,
        inputs: list[str],
        name: str,
        outputs: list[str] | None = None,
        **attributes: Any,
    ) -> str:
        path = f"{self.scope}/{name}"
        made = outputs or [f"{path}/output"]
        self.nodes.append(helper.make_node(operator, inputs, made, name=path, **attributes))
        return made[0]

    def weight(self, name: str, dims: tuple[int, ...], std: float) -> str:
        path = f"{self.scope}/{name}".strip("/").replace("/", ".")
        made = self._weights(path, dims, std)
        if made.data_type != self.elem_type:
            made = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(made).astype(self.dtype), path)
        self.initializers[path] = made
        return path

    def scalar(self, value: float) -> str:
        return self._shared(f"scalar_{value:.9g}_{self.dtype.name}", np.asarray(value, self.dtype))

    def integers(self, *values: int) -> str:
        return self._shared("integers_" + "_".join(map(str, values)), np.asarray(values, np.int64))

    def _shared(self, name: str, values: np.ndarray) -> str:
        self.initializers.setdefault(name, onnx.numpy_helper.from_array(values, name))
        return name

    def linear(self, x: str, name: str, size: tuple[int, int], std: float) -> str:
        product = self.node("MatMul", [x, self.weight(f"{name}/weight", size, std)], f"{name}/MatMul")
        return self.node("Add", [self.weight(f"{name}/bias", size[1:], _BIAS_STD), product], f"{name}/Add")

    def normed(self, x: str, name: str, width: int) -> str:
        # A standard deviation of 0 asks for ones.
        scale, bias = self.weight(f"{name}/weight", (width,), 0.0), self.weight(f"{name}/bias", (width,), 0.1)
        return self.node("LayerNormalization", [x, scale, bias], f"{name}/LayerNormalization", axis=-1, epsilon=1e-5)


def _silu(b: _Builder, y: str) -> str:
    return b.node("Mul", [y, b.node("Sigmoid", [y], "act/Sigmoid")], "act/Mul")


def _gelu(b: _Builder, y: str) -> str:
    scaled = b.node("Div", [y, b.scalar(2.0**0.5)], "act/Div")
    total = b.node("Add", [b.node("Erf", [scaled], "act/Erf"), b.scalar(1.0)], "act/Add")
    return b.node("Mul", [b.node("Mul", [y, total], "act/Mul"), b.scalar(0.5)], "act/Mul_1")


def _relu(b: _Builder, y: str) -> str:
    return b.node("Relu", [y], "act/Relu")


def _mish(b: _Builder, y: str) -> str:
    softplus = b.node("Softplus", [y], "act/Softplus")
    return b.node("Mul", [y, b.node("Tanh", [softplus], "act/Tanh")], "act/Mul")


def _relu6(b: _Builder, y: str) -> str:
    return b.node("Min", [b.node("Relu", [y], "act/Relu"), b.scalar(6.0)], "act/Min")


def _hard_swish(b: _Builder, y: str) -> str:
    clipped = b.node("Clip", [b.node("Add", [y, b.scalar(3.0)], "act/Add"), b.scalar(0.0), b.scalar(6.0)], "act/Clip")
    return b.node("Div", [b.node("Mul", [y, clipped], "act/Mul"), b.scalar(6.0)], "act/Div")


def _gelu_new(b: _Builder, y: str) -> str:
    """GPT-2's GELU: 0.5 y (1 + tanh(sqrt(2 / pi) (y + 0.044715 y^3)))."""
    cube = b.node("Pow", [y, b.scalar(3.0)], "act/Pow")
    inner = b.node("Add", [y, b.node("Mul", [cube, b.scalar(0.044715)], "act/Mul")], "act/Add")
    tanh = b.node("Tanh", [b.node("Mul", [inner, b.scalar((2.0 / math.pi) ** 0.5)], "act/Mul_1")], "act/Tanh")
    half = b.node("Mul", [y, b.scalar(0.5)], "act/Mul_2")
    return b.node("Mul", [half, b.node("Add", [tanh, b.scalar(1.0)], "act/Add_1")], "act/Mul_3")


def _gelu_bloom(b: _Builder, y: str) -> str:
    """Bloom's GELU: 0.5 y (1 + tanh(0.79788456 y (1 + 0.044715 y y)))."""
    square = b.node("Mul", [b.node("Mul", [y, b.scalar(0.044715)], "act/Mul"), y], "act/Mul_1")
    scaled = b.node("Mul", [y, b.scalar(0.79788456)], "act/Mul_2")
    inner = b.node("Mul", [scaled, b.node("Add", [square, b.scalar(1.0)], "act/Add")], "act/Mul_3")
    total = b.node("Add", [b.node("Tanh", [inner], "act/Tanh"), b.scalar(1.0)], "act/Add_1")
    return b.node("Mul", [b.node("Mul", [y, b.scalar(0.5)], "act/Mul_4"), total], "act/Mul_5")


def _gelu_between_casts(b: _Builder, y: str) -> str:
    """GELU in float32, as exports of float16 models have it."""
    inner, b.elem_type, b.dtype = (b.elem_type, b.dtype), _FLOAT, np.dtype(np.float32)
    wide = _gelu(b, b.node("Cast", [y], "act/Cast", to=_FLOAT))
    b.elem_type, b.dtype = inner
    return b.node("Cast", [wide], "act/Cast_1", to=b.elem_type)


GATED = {"swiglu": _silu, "geglu": _gelu}
"""Name to the activation h of a gate h(g) u."""

ACTIVATIONS: dict[str, Callable[[_Builder, str], str]] = {"silu": _silu, "gelu": _gelu, "relu": _relu}
"""Name to the nodes that exporters emit."""

UNFUSED: dict[str, Callable[[_Builder, str], str]] = {
    "mish": _mish,
    "relu6": _relu6,
    "hard_swish": _hard_swish,
    "gelu_between_casts": _gelu_between_casts,
    "gelu_new": _gelu_new,
    "gelu_bloom": _gelu_bloom,
}
"""Further ones, which onnxruntime does not fuse into one operator."""


def random_weights(seed: int = 0) -> WeightSource:
    """Normally distributed float32 weights, inline."""
    generator = np.random.default_rng(seed)

    def source(name: str, dims: tuple[int, ...], std: float) -> onnx.TensorProto:
        values = np.ones(dims, np.float32)
        if std:
            values = generator.standard_normal(dims, np.float32) * np.float32(std)
        return onnx.numpy_helper.from_array(values, name)

    return source


def decoder(shape: Shape, weights: WeightSource) -> onnx.ModelProto:
    """A decoder: input_ids [batch, sequence] int64 to logits [batch, sequence, vocabulary].

    Embeddings, `layers` times (LayerNorm, causal attention, LayerNorm, MLP), LayerNorm, tied head.
    """
    b = _Builder(weights, shape.elem_type)
    table = b.weight("wte", (shape.vocabulary, shape.width), 3.0 / shape.width**0.5)
    size = b.node("Shape", ["input_ids"], "Shape")
    length = b.node("Gather", [size, b.integers(1)], "length")
    mask = _causal_mask(b, length)
    where = b.node("Slice", [b.weight("wpe", (shape.positions, shape.width), 0.1), b.integers(0), length], "positions")
    x = b.node("Add", [b.node("Gather", [table, "input_ids"], "tokens"), where], "embedded")
    for layer in range(shape.layers):
        b.scope = f"/h.{layer}"
        x = _attention(b, x, mask, shape)
        b.scope = f"/h.{layer}/mlp"
        x = b.node("Add", [x, _mlp(b, b.normed(x, "ln_2", shape.width), shape)], "residual")
    b.scope = ""
    rows = b.node("Reshape", [b.normed(x, "ln_f", shape.width), b.integers(-1, shape.width)], "rows")
    scores = b.node("Gemm", [rows, table], "lm_head", transB=1)
    target = b.node("Concat", [size, b.integers(shape.vocabulary)], "logits_shape", axis=0)
    b.node("Reshape", [scores, target], "logits", ["logits"])
    ids = helper.make_tensor_value_info("input_ids", _INT64, ["batch", "sequence"])
    logits = helper.make_tensor_value_info("logits", shape.elem_type, ["batch", "sequence", shape.vocabulary])
    return _model(b, "decoder", ids, logits)


def mlp(shape: Shape, weights: WeightSource) -> onnx.ModelProto:
    """One MLP block: hidden_states [batch, sequence, width] to the same shape."""
    b = _Builder(weights, shape.elem_type)
    b.scope = "/mlp"
    b.node("Identity", [_mlp(b, "hidden_states", shape)], "output", ["output"])
    dims: list[str | int | None] = ["batch", "sequence", shape.width]
    x = helper.make_tensor_value_info("hidden_states", shape.elem_type, dims)
    y = helper.make_tensor_value_info("output", shape.elem_type, dims)
    return _model(b, "mlp", x, y)


def _mlp(b: _Builder, x: str, shape: Shape) -> str:
    y = b.linear(x, "c_fc", (shape.width, shape.hidden), _PREACTIVATION_STD / shape.width**0.5)
    if shape.activation in GATED:
        value = b.linear(x, "c_up", (shape.width, shape.hidden), 1.0 / shape.width**0.5)
        hidden = b.node("Mul", [GATED[shape.activation](b, y), value], "gated/Mul")
    else:
        hidden = {**ACTIVATIONS, **UNFUSED}[shape.activation](b, y)
    return b.linear(hidden, "c_proj", (shape.hidden, shape.width), 0.5 / shape.hidden**0.5)


def _attention(b: _Builder, x: str, mask: str, shape: Shape) -> str:
    """Causal self-attention with a residual."""
    std = 1.0 / shape.width**0.5
    stacked = b.linear(b.normed(x, "ln_1", shape.width), "attn/c_attn", (shape.width, 3 * shape.width), std)
    names = [f"{b.scope}/attn/{part}" for part in "qkv"]
    b.node("Split", [stacked, b.integers(shape.width, shape.width, shape.width)], "attn/Split", names, axis=-1)
    split = b.integers(0, 0, shape.heads, shape.width // shape.heads)
    query, key, value = (
        b.node(
            "Transpose",
            [b.node("Reshape", [name, split], f"attn/{part}_heads")],
            f"attn/{part}_first",
            perm=perm,
        )
        for name, part, perm in zip(names, "qkv", ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
    )
    scores = b.node("MatMul", [query, key], "attn/scores")
    scaled = b.node("Div", [scores, b.scalar((shape.width / shape.heads) ** 0.5)], "attn/scaled")
    pattern = b.node("Softmax", [b.node("Add", [scaled, mask], "attn/masked")], "attn/pattern", axis=-1)
    mixed = b.node("Transpose", [b.node("MatMul", [pattern, value], "attn/mixed")], "attn/merged", perm=[0, 2, 1, 3])
    joined = b.node("Reshape", [mixed, b.integers(0, 0, shape.width)], "attn/joined")
    return b.node("Add", [x, b.linear(joined, "attn/c_proj", (shape.width, shape.width), std)], "attn/residual")


def _causal_mask(b: _Builder, length: str) -> str:
    """[sequence, sequence]: 0 where a token may attend, a large negative number above the diagonal."""
    square = b.node("Concat", [length, length], "square", axis=0)
    filler = onnx.numpy_helper.from_array(np.asarray([_MASKED], b.dtype))
    full = b.node("ConstantOfShape", [square], "masked", value=filler)
    above = onnx.numpy_helper.from_array(np.asarray(1, np.int64), "above_diagonal")
    b.initializers["above_diagonal"] = above
    return b.node("Trilu", [full, "above_diagonal"], "causal_mask", upper=1)


def _model(b: _Builder, name: str, x: onnx.ValueInfoProto, y: onnx.ValueInfoProto) -> onnx.ModelProto:
    graph = helper.make_graph(b.nodes, name, [x], [y], list(b.initializers.values()))
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="attnonly-benchmarks")

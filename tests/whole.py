"""A whole network as the theorems write it, in plain numpy and float64: one stream, heads, and no mask.

Theorem 6 gives every row of the stream columns that say what it is; Theorem 9 puts every mask into W_QK between these
columns. Here the stream is X = [model's columns | 1 on tokens | one-hot position], with the bias tokens behind the
tokens. A head of the network and a neuron are both `softmax(Q K^T) V W_O` with matrices on X whose model columns are
normalised, and nothing else. `layers_of` reads the weights of an exported model in the order of its graph.
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from tests.attention import Array, HeadNumbers, ProgramNumbers
from tests.oracle_operators import softmax

ARCHITECTURES = {
    "silu-decoder": "gpt2",
    "relu-decoder": "opt",
    "gelu-encoder": "bert",
    "gelu-vision": "vit",
    "gated-decoder": "llama",
}
"""Committed models to their architectures. GPT-NeoX, the sixth, is in tests/exports/test_forms_exports.py."""

OMEGA = 1e6
"""Scores of at most a few hundred, and exp(-1e6) is 0."""


@dataclass(frozen=True)
class Norm:
    """A normalisation over the model's columns: by mean and variance, or by the root of the mean square."""

    gain: Array
    bias: Array | None
    epsilon: float

    def __call__(self, x: Array) -> Array:
        centred = x if self.bias is None else x - x.mean(axis=-1, keepdims=True)
        scaled = self.gain * centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.epsilon)
        return np.asarray(scaled if self.bias is None else scaled + self.bias)


@dataclass(frozen=True)
class Linear:
    """x W + b, W [in, out]."""

    weight: Array
    bias: Array

    def __call__(self, x: Array) -> Array:
        return np.asarray(x @ self.weight + self.bias)

    def part(self, columns: Array) -> "Linear":
        return Linear(self.weight[:, columns], self.bias[columns])


@dataclass(frozen=True)
class Mlp:
    """`down(f(gate(x)))`, or with a gate `down(f(gate(x)) * up(x))`; without one, `up` is `gate`."""

    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Layer:
    """`query`, `key`, `value` have one Linear for each head."""

    norms: tuple[Norm, Norm]
    query: Sequence[Linear]
    key: Sequence[Linear]
    value: Sequence[Linear]
    output: Linear
    mlp: Mlp


@dataclass(frozen=True)
class Network:
    """Layers in an order, "pre", "post" or "parallel": where the norms are, and what the MLP reads.

    A position turns each pair of a query's first entries by `angles`, in radians; there are none without rotation.
    """

    layers: Sequence[Layer]
    order: str
    causal: bool
    angles: Array


class Stream:
    """N tokens, m bias tokens, and one more on which they rest; masks are in W_QK."""

    def __init__(self, x: Array, bias_tokens: int, *, causal: bool = False) -> None:
        count, self.width = x.shape
        self.count = count
        rows = count + bias_tokens + 1
        self.x = np.zeros((rows, self.width + 1 + rows))
        self.x[:count, : self.width] = x
        self.x[:count, self.width] = 1.0
        self.x[:, self.width + 1 :] = np.eye(rows)
        future = np.triu(np.ones((count, count), np.bool_), 1) if causal else np.zeros((count, count), np.bool_)
        self.w_heads = np.full((rows, rows), -OMEGA)
        self.w_heads[:count, :count] = np.where(future, -OMEGA, 0.0)
        self.w_heads[count:, -1] = 0.0

    def w_neurons(self, bias_tokens: int) -> Array:
        """W_QK between positions: a token attends to itself and to the first bias tokens."""
        weight = np.full(self.w_heads.shape, -OMEGA)
        np.fill_diagonal(weight[: self.count, : self.count], 0.0)
        weight[: self.count, self.count : self.count + bias_tokens] = 0.0
        weight[self.count :, -1] = 0.0
        return weight

    def read(self, columns: Array) -> Array:
        """The stream with other model columns, such as normalised ones; bias tokens have zeros there."""
        return np.concatenate([columns * self.x[:, self.width, None], self.x[:, self.width :]], axis=1)

    def on(self, linear: Linear) -> Array:
        """W [D', out] of a linear map, its bias on the column of tokens."""
        rest = np.zeros((self.x.shape[1] - self.width - 1, linear.weight.shape[1]))
        return np.concatenate([linear.weight, linear.bias[None], rest])

    def attend(self, read: Array, query: Array, key: Array, value: Array, pseudo: Array) -> Array:
        """softmax([q, p W] [k, p]^T) v for queries, keys and values [rows, ...] that were read."""
        positions = read[:, self.width + 1 :]
        logits = np.concatenate([query, positions @ pseudo], axis=1) @ np.concatenate([key, positions], axis=1).T
        return np.asarray(softmax(logits) @ value)


def network(x: Array, net: Network, programs: Sequence[ProgramNumbers]) -> Array:
    """The tokens' model columns [N, D] behind the last residual addition; `x` are those of the embeddings."""
    most = max(len(head.bias_tokens) for program in programs for head in program.heads)
    stream = Stream(np.asarray(x, np.float64), most, causal=net.causal)
    width = stream.width
    for layer, program in zip(net.layers, programs, strict=True):
        before = stream.x[:, :width].copy()
        for number, sublayer in enumerate((_heads, _neurons)):
            columns = before if net.order == "parallel" else stream.x[:, :width]
            read = stream.read(columns if net.order == "post" else layer.norms[number](columns))
            written = sublayer(stream, read, layer, net, program)
            stream.x[:, :width] += written
            if net.order == "post":
                is_token = stream.x[:, width, None]
                normed = layer.norms[number](stream.x[:, :width]) * is_token
                if number == 0 or layer is not net.layers[-1]:
                    stream.x[:, :width] = normed
    return stream.x[: stream.count, :width]


def _heads(stream: Stream, read: Array, layer: Layer, net: Network, _: ProgramNumbers) -> Array:
    total = np.zeros((len(read), stream.width))
    size = layer.query[0].weight.shape[1]
    for number, (q, k, v) in enumerate(zip(layer.query, layer.key, layer.value, strict=True)):
        query, key, value = (read @ stream.on(each) for each in (q, k, v))
        query, key = (_turned(each, net.angles, stream.count) for each in (query, key))
        query = query * float(np.float32(size**-0.5))
        z = stream.attend(read, query, key, value, stream.w_heads)
        total += z @ layer.output.weight[number * size : (number + 1) * size]
    return np.asarray(total + read[:, stream.width, None] * layer.output.bias)


def _turned(rows: Array, angles: Array, count: int) -> Array:
    """Rotary positions on the first entries of queries or keys; bias tokens are zeros, which nothing turns."""
    half = len(angles)
    if not half:
        return rows
    turn = np.concatenate([np.arange(count), np.zeros(len(rows) - count)])[:, None] * angles
    first, second, rest = rows[:, :half], rows[:, half : 2 * half], rows[:, 2 * half :]
    cos, sin = np.cos(turn), np.sin(turn)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=1)


def _neurons(stream: Stream, read: Array, layer: Layer, _: Network, program: ProgramNumbers) -> Array:
    return neurons(stream, read, layer.mlp, program)


def neurons(stream: Stream, read: Array, mlp: Mlp, program: ProgramNumbers) -> Array:
    """Theorem 3: one head per neuron and head of the program; Theorem 7 for its linear part and for b2."""
    y, z = read @ stream.on(mlp.gate), read @ stream.on(mlp.up)
    ones = read[:, stream.width, None]
    sums = program.linear * z + program.constant * ones
    for head in program.heads:
        for i in range(y.shape[1]):
            sums[:, i : i + 1] += _neuron(stream, read, y[:, i : i + 1], z[:, i : i + 1], head)
    return np.asarray(sums @ mlp.down.weight + ones * mlp.down.bias)


def _neuron(stream: Stream, read: Array, y: Array, z: Array, head: HeadNumbers) -> Array:
    ones, tokens = read[:, stream.width, None], head.bias_tokens
    slots = read[:, stream.width + 1 + stream.count :][:, : len(tokens)]
    # Softmax depends on differences of logits. With beta and gamma subtracted, those between tokens are 0, which OMEGA
    # outweighs however steep the program is.
    slope, offset, value = (
        slots @ (np.array([[getattr(token, name)] for token in tokens]).reshape(-1, 1) - own)
        for name, own in (("slope", head.beta), ("offset", head.gamma), ("value", 0.0))
    )
    keys = np.concatenate([slope, offset], axis=1)
    queries = np.concatenate([y, ones], axis=1)
    values = head.c * z + head.d * ones + value
    return stream.attend(read, queries, keys, values, stream.w_neurons(len(tokens)))


LAYOUTS: dict[str, tuple[str, bool]] = {
    "gpt2": ("pre", True),
    "opt": ("pre", True),
    "llama": ("pre", True),
    "pythia": ("parallel", True),
    "bert": ("post", False),
    "vit": ("pre", False),
}
"""Architecture to the order of its norms, and whether it is causal."""

_IN_LAYER = re.compile(r"\.(h|layers?)\.\d+\..*(norm|ln_)", re.IGNORECASE)


def layers_of(model: onnx.ModelProto, architecture: str, heads: int = 4) -> Network:
    """The network of an exported model, its weights in the order of the graph."""
    constants = {each.name: numpy_helper.to_array(each).astype(np.float64) for each in model.graph.initializer}
    linears = list(_linears(model, constants))
    norms = _norms(model, constants)
    each = {"gpt2": 4, "pythia": 4, "llama": 7}.get(architecture, 6)
    parts = [linears[start : start + each] for start in range(0, each * (len(norms) // 2), each)]
    layers = [
        _layer(part, architecture, heads, (a, b)) for part, a, b in zip(parts, norms[::2], norms[1::2], strict=True)
    ]
    order, causal = LAYOUTS[architecture]
    angles = np.zeros(0)
    if architecture == "pythia":
        angles = np.ones(1)  # a quarter of eight entries is one pair
    if architecture == "llama":
        angles = (1.0 / np.float32(10000.0) ** (np.arange(0, 8, 2, dtype=np.float32) / 8)).astype(np.float64)
    return Network(layers, order, causal, angles)


def _layer(part: list[Linear], architecture: str, heads: int, norms: tuple[Norm, Norm]) -> Layer:
    if architecture in ("gpt2", "pythia"):
        stacked, output, gate, down = part
        up, size = gate, stacked.weight.shape[1] // 3 // heads
        by_head = np.arange(stacked.weight.shape[1])
        # GPT-2 stacks the queries of all heads, then keys, then values; GPT-NeoX stacks them head by head.
        order = by_head.reshape((3, heads, size) if architecture == "gpt2" else (heads, 3, size))
        order = order if architecture == "gpt2" else order.transpose(1, 0, 2)
        query, key, value = ([stacked.part(columns) for columns in kind] for kind in order)
    else:
        query_all, key_all, value_all, output, gate, *more = part
        up, down = (gate, more[0]) if len(more) == 1 else (more[0], more[1])
        size = query_all.weight.shape[1] // heads
        query, key, value = (_split(each, size, heads) for each in (query_all, key_all, value_all))
    return Layer(norms, query, key, value, output, Mlp(gate, up, down))


def _split(linear: Linear, size: int, heads: int) -> list[Linear]:
    """One part for each head; where there are fewer, each serves several heads that follow each other."""
    parts = [linear.part(np.arange(start, start + size)) for start in range(0, linear.weight.shape[1], size)]
    return [parts[head * len(parts) // heads] for head in range(heads)]


def _linears(model: onnx.ModelProto, constants: dict[str, Array]) -> list[Linear]:
    found = []
    for node in model.graph.node:
        if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in constants:
            continue
        weight = constants[node.input[1]]
        if node.op_type == "Gemm":
            turned = any(each.name == "transB" and each.i for each in node.attribute)
            found.append(Linear(weight.T if turned else weight, constants[node.input[2]]))
            continue
        names = [set(other.input) - {node.output[0]} for other in model.graph.node if node.output[0] in other.input]
        biases = [constants[name] for each in names for name in each if name in constants and constants[name].ndim == 1]
        same = [bias for bias in biases if bias.shape == weight.shape[1:]]
        found.append(Linear(weight, same[0] if same else np.zeros(weight.shape[1])))
    return found


def _norms(model: onnx.ModelProto, constants: dict[str, Array]) -> list[Norm]:
    """The norms of the layers, in the order of the initializers, which is that of the modules."""
    epsilon = float(np.float32(1e-6))
    for node in model.graph.node:
        if node.op_type == "LayerNormalization":
            epsilon = next(each.f for each in node.attribute if each.name == "epsilon")
    gains = [name for name in constants if _IN_LAYER.search(name) and name.endswith("weight")]
    return [Norm(constants[name], constants.get(name.removesuffix("weight") + "bias"), epsilon) for name in gains]


def without_padding(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without its attention mask, if it has one: all ones, of the shape of the tokens."""
    masks = [value for value in model.graph.input if value.name == "attention_mask"]
    if not masks:
        return model
    result = deepcopy(model)
    result.graph.input.remove(masks[0])
    one = numpy_helper.from_array(np.ones(1, np.int64))
    made = onnx.helper.make_node("ConstantOfShape", ["mask_shape"], ["attention_mask"], value=one)
    result.graph.node.insert(0, made)
    result.graph.node.insert(0, onnx.helper.make_node("Shape", ["input_ids"], ["mask_shape"]))
    return result

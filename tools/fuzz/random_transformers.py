"""Random transformers: sublayers in any order, in functions, branches and loops, in every shape that is written here.

`transformer(rng)` is a sound model and the number of MLPs in it. Every choice comes from `rng`, so that a number names
a model and hypothesis can make it smaller. Weights spread pre-activations over +-3 with outliers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.attention import Array
from tests.errors import feeds_of
from tests.spellings import SPELLINGS
from tests.textmodels import ELEMENTS, text_model

Feeds = dict[str, Array]

_CALLED = "tools.fuzz"
"""Domain of the functions."""

_GATES = [name for name, _, _ in SPELLINGS if name not in ("square", "exp-itself")]


@dataclass(frozen=True)
class Transformer:
    """A model, and what is known of it.

    Attributes:
        model: inputs `x`, and `taken` if a branch depends on it; outputs `out`, and perhaps a tensor from inside.
        mlps: its number of MLPs, gated ones included.
        rank: of `x`: [tokens, width] or [batch, tokens, width].
        drawn: its parts, in words.
    """

    model: onnx.ModelProto
    mlps: int
    rank: int
    drawn: tuple[str, ...]

    def feeds(self, seed: int) -> Feeds:
        """Inputs of any length up to 7."""
        rng = np.random.default_rng(seed)
        return feeds_of(self.model, rng, batch=int(rng.integers(1, 4)), tokens=int(rng.integers(1, 8)))


def transformer(rng: Random) -> Transformer:
    """A model of one to three layers of one to three sublayers."""
    writer = _Writer(rng, rng.choice(("float", "float", "float", "double", "float16")), rng.choice((13, 17, 18, 21)))
    rank, heads = rng.choice((2, 3, 3)), rng.choice((1, 2))
    size = _Size(rank, heads * rng.choice((2, 4)), heads)
    kind = ELEMENTS[writer.elem]
    lead: list[str | int] = ["batch", "tokens"] if rng.random() < 0.8 else [2, 5]
    stated = helper.make_tensor_value_info("x", kind, [*lead[3 - rank :], size.width])
    stream, mlps, drawn = "x", 0, [f"{writer.elem}, opset {writer.opset}, rank {rank}, width {size.width}"]
    for _ in range(rng.randint(1, 3)):
        stream, more, words = _layer(writer, stream, size)
        mlps, drawn = mlps + more, [*drawn, words]
    outputs = [writer.op("Identity", stream, out="out")]
    if rng.random() < 0.3:
        outputs.append(rng.choice(writer.inner or outputs))
    infos = [helper.make_tensor_value_info(name, kind, [None] * rank) for name in dict.fromkeys(outputs)]
    inputs = [stated, *([helper.make_tensor_value_info("taken", TensorProto.BOOL, [])] if writer.asked else [])]
    graph = helper.make_graph(writer.nodes, "transformer", inputs, infos, writer.weights)
    opsets = [helper.make_opsetid("", writer.opset)]
    opsets += [helper.make_opsetid(_CALLED, 1)] if writer.functions else []
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10 if writer.opset == 21 else 8)
    model.functions.extend(writer.functions)
    onnx.checker.check_model(model)
    return Transformer(model, mlps, rank, tuple(drawn))


@dataclass(frozen=True)
class _Size:
    rank: int
    width: int
    heads: int


@dataclass
class _Writer:
    """A graph under construction; those of bodies share names, functions and weights with the main graph."""

    rng: Random
    elem: str
    opset: int
    numbers: Any = field(default_factory=count)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)
    """Tensors of the main graph that may become outputs."""
    asked: bool = False
    """Whether a branch depends on the input `taken`."""
    constants: bool = False
    """Whether weights are nodes, as a function needs them."""

    def body(self, *, constants: bool) -> "_Writer":
        """A writer of a body: weights other than nodes are in the main graph or in the body."""
        around = self.rng.random() < 0.5 and not constants
        weights = self.weights if around else []
        return _Writer(
            self.rng, self.elem, self.opset, self.numbers, [], weights, self.functions, [], constants=constants
        )

    def name(self) -> str:
        return f"t{next(self.numbers)}"

    def op(self, operator: str, *inputs: str, out: str = "", domain: str = "", **attributes: Any) -> str:
        made = out or self.name()
        self.nodes.append(helper.make_node(operator, list(inputs), [made], domain=domain, **attributes))
        return made

    def tensor(self, array: Array) -> str:
        name = self.name()
        tensor = numpy_helper.from_array(np.asarray(array), name)
        if self.constants or self.rng.random() < 0.2:
            return self.op("Constant", out=name, value=tensor)
        self.weights.append(tensor)
        return name

    def real(self, array: Array | float) -> str:
        return self.tensor(np.asarray(array).astype(helper.tensor_dtype_to_np_dtype(ELEMENTS[self.elem])))

    def either(self, operator: str, a: str, b: str) -> str:
        """A commutative operator, in either order."""
        return self.op(operator, *((a, b) if self.rng.random() < 0.5 else (b, a)))

    def matrix(self, rows: int, columns: int) -> Array:
        """Weights that keep the size of a vector, times 1.5, and a column five times larger."""
        made = np.random.default_rng(self.rng.randrange(2**32)).normal(size=(rows, columns)) * 1.5 / np.sqrt(rows)
        made[:, self.rng.randrange(columns)] *= 5.0 if self.rng.random() < 0.3 else 1.0
        return np.asarray(made)

    def mean(self, x: str) -> str:
        if self.opset < 18:
            return self.op("ReduceMean", x, axes=[-1])
        return self.op("ReduceMean", x, self.tensor(np.array([-1])))


# -- layers --------------------------------------------------------------------------------------------------


def _layer(writer: _Writer, x: str, size: _Size) -> tuple[str, int, str]:
    """Sublayers one behind the other or side by side, residual or not, normalised before or behind or not at all."""
    rng = writer.rng
    kinds = rng.choices(tuple(_SUBLAYERS), weights=(4, 2, 2, 1), k=rng.randint(1, 3))
    norm, place = rng.choice(_NORMS), rng.choice(("before", "behind"))
    residual, beside = rng.random() < 0.8, rng.random() < 0.25
    mlps, words, sums = 0, [], []
    for kind in kinds:
        given = norm(writer, x, size.width) if place == "before" else x
        container = rng.choice(_CONTAINERS)
        made, label = container(writer, given, size, _SUBLAYERS[kind])
        mlps += kind in ("mlp", "gated")
        words.append(f"{label} in {container.__name__[1:]}")
        writer.inner.append(made)
        if beside:
            sums.append(made)
            continue
        x = writer.either("Add", x, made) if residual else made
        x = norm(writer, x, size.width) if place == "behind" else x
    for made in sums:
        x = writer.either("Add", x, made)
    told = f"{norm.__name__[1:]} {place}, {'residual' if residual else 'no residual'}{', side by side' * beside}"
    return x, mlps, f"{told}: {'; '.join(words)}"


def _no_norm(_writer: _Writer, x: str, _width: int) -> str:
    return x


def _layer_norm(writer: _Writer, x: str, width: int) -> str:
    scale, shift = writer.real(1.0 + 0.2 * writer.matrix(1, width)[0]), writer.real(0.2 * writer.matrix(1, width)[0])
    if writer.opset >= 17 and writer.rng.random() < 0.5:
        return writer.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=1e-5)
    centred = writer.op("Sub", x, writer.mean(x))
    return writer.op("Add", writer.either("Mul", _scaled(writer, centred), scale), shift)


def _rms_norm(writer: _Writer, x: str, width: int) -> str:
    return writer.either("Mul", _scaled(writer, x), writer.real(1.0 + 0.2 * writer.matrix(1, width)[0]))


def _scaled(writer: _Writer, x: str) -> str:
    """Over the root of the mean square."""
    square = writer.op("Mul", x, x) if writer.rng.random() < 0.5 else writer.op("Pow", x, writer.real(2.0))
    root = writer.op("Sqrt", writer.op("Add", writer.mean(square), writer.real(1e-3)))
    if writer.rng.random() < 0.5:
        return writer.op("Div", x, root)
    return writer.either("Mul", x, writer.op("Reciprocal", root))


_NORMS: Sequence[Callable[[_Writer, str, int], str]] = (_no_norm, _layer_norm, _layer_norm, _rms_norm)


# -- sublayers -----------------------------------------------------------------------------------------------


def _mlp(writer: _Writer, x: str, size: _Size) -> tuple[str, str]:
    neurons = writer.rng.choice((2, 5, 8))
    name, _, text = writer.rng.choice(SPELLINGS)
    h = _activation(writer, _linear(writer, x, size.width, neurons, size.rank), name, text)
    return _linear(writer, h, neurons, size.width, size.rank), name


def _gated(writer: _Writer, x: str, size: _Size) -> tuple[str, str]:
    neurons = writer.rng.choice((2, 5))
    name = writer.rng.choice(_GATES)
    text = next(text for each, _, text in SPELLINGS if each == name)
    if writer.rng.random() < 0.5:
        wide = _linear(writer, x, size.width, 2 * neurons, size.rank)
        y, u = writer.name(), writer.name()
        sizes = [writer.tensor(np.array([neurons, neurons]))] if writer.rng.random() < 0.5 or writer.opset >= 18 else []
        writer.nodes.append(helper.make_node("Split", [wide, *sizes], [y, u], axis=-1))
    else:
        y, u = (_linear(writer, x, size.width, neurons, size.rank) for _ in range(2))
    h = writer.either("Mul", _activation(writer, y, name, text), u)
    return _linear(writer, h, neurons, size.width, size.rank), f"{name} gate"


def _attention(writer: _Writer, x: str, size: _Size) -> tuple[str, str]:
    lead, deep = size.rank - 2, size.width // size.heads
    swap = list(range(size.rank + 1))
    swap[-3], swap[-2] = swap[-2], swap[-3]

    def split(t: str) -> str:
        if size.heads == 1:
            return t
        shape = writer.tensor(np.array([0] * (lead + 1) + [size.heads, deep]))
        return writer.op("Transpose", writer.op("Reshape", t, shape), perm=swap)

    q, k, v = (split(_linear(writer, x, size.width, size.width, size.rank)) for _ in range(3))
    rank = size.rank + (size.heads > 1)
    perm = [*range(rank - 2), rank - 1, rank - 2]
    scores = writer.op("MatMul", q, writer.op("Transpose", k, perm=perm))
    scores = writer.either("Mul", scores, writer.real(deep**-0.5))
    causal = writer.rng.random() < 0.5
    if causal:
        length = writer.op("Gather", writer.op("Shape", x), writer.tensor(np.array(lead)), axis=0)
        positions = writer.op("Range", writer.tensor(np.array(0)), length, writer.tensor(np.array(1)))
        rows, columns = (writer.op("Unsqueeze", positions, writer.tensor(np.array([axis]))) for axis in (1, 0))
        scores = writer.op("Where", writer.op("LessOrEqual", columns, rows), scores, writer.real(-1e4))
    z = writer.op("MatMul", writer.op("Softmax", scores, axis=-1), v)
    if size.heads > 1:
        shape = writer.tensor(np.array([0] * (lead + 1) + [size.width]))
        z = writer.op("Reshape", writer.op("Transpose", z, perm=swap), shape)
    return _linear(writer, z, size.width, size.width, size.rank), f"{size.heads} {'causal ' * causal}heads"


def _projection(writer: _Writer, x: str, size: _Size) -> tuple[str, str]:
    return _linear(writer, x, size.width, size.width, size.rank), "linear"


_SUBLAYERS = {"mlp": _mlp, "gated": _gated, "attention": _attention, "linear": _projection}


def _activation(writer: _Writer, y: str, name: str, text: str) -> str:
    """The nodes of a spelling, with separate names."""
    if name == "mask" and writer.elem != "float":
        text = "h = Relu(y)"  # a Cast to float32
    stated = "float[n] y"
    part = text_model(text, inputs=stated, outputs="float[n] h", elem=writer.elem, opset=writer.opset)
    names: dict[str, str] = {"y": y} | {
        tensor.name: writer.tensor(numpy_helper.to_array(tensor)) for tensor in part.graph.initializer
    }
    for node in part.graph.node:
        for output in node.output:
            names[output] = writer.name()
        made = [names[output] for output in node.output]
        copy = helper.make_node(node.op_type, [names[given] for given in node.input], made, domain=node.domain)
        copy.attribute.extend(node.attribute)
        writer.nodes.append(copy)
    return names["h"]


def _linear(writer: _Writer, x: str, rows: int, columns: int, rank: int) -> str:
    """x W, or x W + b, in one of the spellings of exporters."""
    rng = writer.rng
    weights, bias = writer.matrix(rows, columns), 0.3 * writer.matrix(1, columns)[0]
    kind = rng.choice(("MatMul", "MatMul", "transposed", "Einsum", "Gemm"))
    if kind == "Gemm" and rank == 2:
        turned = rng.random() < 0.5
        given = [x, writer.real(weights.T if turned else weights), *([writer.real(bias)] if rng.random() < 0.7 else [])]
        return writer.op("Gemm", *given, transB=int(turned))
    if kind == "transposed":
        made = writer.op("MatMul", x, writer.op("Transpose", writer.real(weights.T), perm=[1, 0]))
    elif kind == "Einsum":
        axes = "bt"[2 - (rank - 1) :]
        made = writer.op("Einsum", x, writer.real(weights), equation=f"{axes}d,df->{axes}f")
    else:
        made = writer.op("MatMul", x, writer.real(weights))
    return writer.either("Add", made, writer.real(bias)) if rng.random() < 0.7 else made


# -- containers ----------------------------------------------------------------------------------------------

_Sublayer = Callable[[_Writer, str, _Size], tuple[str, str]]


def _place(writer: _Writer, x: str, size: _Size, sublayer: _Sublayer) -> tuple[str, str]:
    return sublayer(writer, x, size)


def _function(writer: _Writer, x: str, size: _Size, sublayer: _Sublayer) -> tuple[str, str]:
    body = writer.body(constants=True)
    made, label = sublayer(body, "given", size)
    name = f"f{len(writer.functions)}"
    opsets = [helper.make_opsetid("", writer.opset)]
    writer.functions.append(helper.make_function(_CALLED, name, ["given"], [made], body.nodes, opsets))
    return writer.op(name, x, domain=_CALLED), label


def _branch(writer: _Writer, x: str, size: _Size, sublayer: _Sublayer) -> tuple[str, str]:
    """The sublayer in one branch of an If, the input itself in the other."""
    body = writer.body(constants=False)
    made, label = sublayer(body, x, size)
    own = [] if body.weights is writer.weights else body.weights
    other = writer.body(constants=False)
    same = other.op("Identity", x)
    kind = ELEMENTS[writer.elem]
    graphs = [
        helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info(out, kind, None)], weights)
        for nodes, out, weights in ((body.nodes, made, own), (other.nodes, same, []))
    ]
    if writer.rng.random() < 0.5:
        graphs.reverse()
    if writer.constants or writer.rng.random() < 0.5:
        condition = writer.tensor(np.array(writer.rng.random() < 0.5))
    else:
        condition, writer.asked = "taken", True
    return writer.op("If", condition, then_branch=graphs[0], else_branch=graphs[1]), label


def _loop(writer: _Writer, x: str, size: _Size, sublayer: _Sublayer) -> tuple[str, str]:
    """The sublayer one or two times, on its own output."""
    body = writer.body(constants=False)
    state, step, going = writer.name(), writer.name(), writer.name()
    made, label = sublayer(body, state, size)
    kept = body.op("Identity", going)
    own = [] if body.weights is writer.weights else body.weights
    kind = ELEMENTS[writer.elem]
    graph = helper.make_graph(
        body.nodes,
        "body",
        [
            helper.make_tensor_value_info(step, TensorProto.INT64, []),
            helper.make_tensor_value_info(going, TensorProto.BOOL, []),
            helper.make_tensor_value_info(state, kind, None),
        ],
        [helper.make_tensor_value_info(kept, TensorProto.BOOL, []), helper.make_tensor_value_info(made, kind, None)],
        own,
    )
    trips, condition = writer.tensor(np.array(writer.rng.randint(1, 2))), writer.tensor(np.array(True))
    return writer.op("Loop", trips, condition, x, body=graph), label


_CONTAINERS = (_place, _place, _place, _place, _function, _branch, _loop)

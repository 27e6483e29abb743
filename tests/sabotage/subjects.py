"""The models that sabotages are tried on: committed ones, and small ones that have what those lack."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from rewriter.inputs.cases import Maker
from tests.committed import FOLDER as COMMITTED
from tests.textmodels import ERF_GELU, FIRST, SILU, mlp, text_model, values


@dataclass(frozen=True)
class Subject:
    """A committed model by its name without suffix, or a key of `SMALL`, and the options of `rewrite`."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the table shows: the model, then the options that matter."""
        shown = [
            str(value) if key == "form" else f"{key}={value}"
            for key, value in self.options.items()
            if key not in ("only", "max_tokens")
        ]
        return " ".join([self.model, *shown])

    def path(self, folder: Path) -> Path:
        """The model's file; a small one is written to `folder`."""
        committed = COMMITTED / f"{self.model}.onnx"
        if committed.exists():
            return committed
        path = folder / f"{self.model}.onnx"
        external = self.model == "external"
        onnx.save(SMALL[self.model](), path, save_as_external_data=external, location="weights.bin", size_threshold=64)
        return path


def on(*models: str, **options: Any) -> tuple[Subject, ...]:
    return tuple(Subject(model, options) for model in models)


SWIGLU = "u = MatMul(x, V1) s = Sigmoid(y) g = Mul(y, s) h = Mul(g, u)"
_OTHER = "f2 = MatMul(z, V1) y2 = Add(f2, c1) s2 = Sigmoid(y2) h2 = Mul(s2, y2) out = MatMul(h2, W2)"
_TWO_OUTPUTS = "float[batch, tokens, 4] out, float[batch, tokens, 4] more"
_MICROSOFT = {"com.microsoft": 1}


def _two_outputs() -> onnx.ModelProto:
    return text_model(f"{FIRST} {SILU} more = MatMul(h, W2) z = Add(more, x) {_OTHER}", outputs=_TWO_OUTPUTS)


def _mixed_first() -> onnx.ModelProto:
    """Two matrices of the same shape in front of the block."""
    first = "a = MatMul(z, A) x = MatMul(a, B) first = MatMul(x, W1) y = Add(first, b1)"
    inputs = "float[batch, tokens, 4] z"
    return mlp(
        ERF_GELU, first=first, inputs=inputs, constants={"A": np.diag([1.0, 2.0, 0.5, 1.0]), "B": np.eye(4)[::-1]}
    )


def _branches() -> onnx.ModelProto:
    then = f"{FIRST} {SILU} p = MatMul(h, W2) p2 = Add(p, x)"
    otherwise = (
        "f2 = MatMul(x, V1) y2 = Add(f2, c1) s2 = Sigmoid(y2) h2 = Mul(s2, y2) n = MatMul(h2, W2) "
        "q = Add(n, bias) q2 = Sub(q, x)"
    )
    shape = "float[batch, tokens, 4]"
    bias = "float[4] bias = {0.5, -1.0, 2.0, 0.25}"
    bodies = (
        f"then_branch = a () => ({shape} p, {shape} p2) {{ {then} }}, "
        f"else_branch = b () => ({shape} q, {shape} q2) <{bias}> {{ {otherwise} }}"
    )
    model = text_model(
        f"out, more = If (use_cache_branch) <{bodies}> never = Not(yes)",
        inputs="float[batch, tokens, 4] x, bool[1] use_cache_branch",
        outputs=_TWO_OUTPUTS,
        constants={"yes": onnx.numpy_helper.from_array(np.array([True]), "yes")},
    )
    # `never` is dead until a sabotage reads it, and a reader must come later
    never = model.graph.node.pop()
    model.graph.node.insert(0, never)
    return model


def _quantised() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    constants = {
        name: onnx.numpy_helper.from_array(rng.integers(-127, 128, shape).astype(np.int8), name)
        for name, shape in (("Q1", (4, 8)), ("Q2", (8, 4)))
    }
    linear = (
        "{0}q, {0}s, {0}z = DynamicQuantizeLinear({1}) {0}i = MatMulInteger({0}q, {2}, {0}z) {0}f = Cast<to = 1>({0}i) "
        "{0}c = Mul({0}s, $0.01) {0}m = Mul({0}f, {0}c)"
    )
    first, second = linear.format("one", "x", "Q1"), linear.format("two", "h", "Q2")
    return text_model(f"{first} y = Add(onem, b1) {SILU} {second} out = Add(twom, b2)", constants=constants)


def _outlier() -> onnx.ModelProto:
    """One output of -1e9 beside three of ordinary size."""
    return mlp(ERF_GELU, constants={"b2": np.array([0.1, 0.2, 0.3, -1e9])})


def _amplified() -> onnx.ModelProto:
    """A gate so small that its certified error is a large part of the output."""
    tiny, huge = 1e-10, 1e20
    scaled = {"W1": values("W1") * tiny, "b1": values("b1") * tiny, "W2": values("W2") * huge}
    return mlp(SWIGLU, second="out = MatMul(h, W2)", constants=scaled)


def _embedded(activation: str, row: Callable[[int], np.ndarray[Any, Any]], **weights: Any) -> onnx.ModelProto:
    """A table of 2000 tokens; one that occurs in the last case of the proof alone has another row."""

    def model(rare: int) -> onnx.ModelProto:
        table = np.clip(np.random.default_rng(0).normal(size=(2000, 4)), -3.0, 3.0)
        table[rare] = row(rare)
        return mlp(
            activation,
            first=f"x = Gather<axis = 0>(table, ids) {FIRST}",
            inputs="int64[batch, tokens] ids",
            constants={"table": table, **weights},
        )

    *others, last = (case.feeds["ids"] for case in Maker(model(0)).usual())
    return model(int(np.setdiff1d(last, np.concatenate([ids.reshape(-1) for ids in others]))[0]))


def _rare_word() -> onnx.ModelProto:
    """The first neuron reads the first channel, which exceeds 8 for one token only."""
    first, biases = values("W1").copy(), values("b1").copy()
    first[:, 0], biases[0] = [1.0, 0.0, 0.0, 0.0], 0.0
    return _embedded(SILU, lambda _: np.array([9.0, 0.5, -0.5, 1.0]), W1=first, b1=biases)


SMALL: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "silu": lambda: mlp(SILU),
    "gelu": lambda: mlp(ERF_GELU),
    "wide-gelu": lambda: mlp(ERF_GELU.replace("1.4142135623730951", "2.0")),
    "narrow-gelu": lambda: mlp(ERF_GELU.replace("1.4142135623730951", "1.0")),
    "relu": lambda: mlp("h = Relu(y)"),
    "relu6": lambda: mlp("h = Clip(y, $0.0, $6.0)"),
    "tanh": lambda: mlp("h = Tanh(y)"),
    "elu": lambda: mlp("h = Elu(y)"),
    "swiglu": lambda: mlp(SWIGLU),
    "half": lambda: mlp(SILU, elem="float16"),
    "double": lambda: mlp(SILU, elem="double"),
    "opset-23": lambda: mlp(SILU, opset=23, ir=10),
    "function": lambda: mlp(
        SILU,
        second="second = MatMul(h, W2) out = other.Moved(second, b2)",
        domains={"other": 1},
        functions='<domain: "other", opset_import: ["": 17]> Moved (a, b) => (c) { c = Sub(a, b) }',
    ),
    "external": _mixed_first,
    "computed-scale": lambda: mlp(
        SILU,
        first=f"q = Abs(z) r = ReduceMax<keepdims = 1>(q) x = Div(z, r) {FIRST}",
        inputs="float[batch, tokens, 4] z",
    ),
    "outputs": _two_outputs,
    "branches": _branches,
    "quantised": _quantised,
    "bias-gelu": lambda: mlp(
        "h = com.microsoft.BiasGelu(first, b1)", first="first = MatMul(x, W1)", domains=_MICROSOFT
    ),
    "fast-gelu": lambda: mlp(
        "h = com.microsoft.FastGelu(first, b1)", first="first = MatMul(x, W1)", domains=_MICROSOFT
    ),
    "fused-leaky": lambda: mlp(
        'h = com.microsoft.FusedGemm<activation = "LeakyRelu", activation_alpha = 0.1, transB = 1>(x, W1t, b1)',
        first="",
        domains=_MICROSOFT,
        inputs="float[tokens, 4] x",
        outputs="float[tokens, 4] out",
    ),
    "outlier": _outlier,
    "amplified": _amplified,
    "rare-token": lambda: _embedded(SWIGLU, lambda _: np.full(4, 1e5)),
    "rare-word": _rare_word,
    "nan": lambda: mlp(SILU, constants={"b2": np.full(4, np.nan)}),
}
"""Name to a function that makes the model; `x` is float32 [batch, tokens, 4] unless the model says otherwise."""

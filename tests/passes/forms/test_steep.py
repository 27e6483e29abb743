"""Steep heads: onnxruntime's Exp takes ten times as long where a result is not a normal number, so none may be so."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from passes.options import Options
from passes.plan import apply, make_plan
from passes.programs.activations import ACTIVATIONS as TABLE
from passes.programs.program import ARITHMETIC, BiasToken, Head, Program, lines
from rewriter.ort import open_session
from tests.attention import Array
from tests.oracle import evaluate
from tests.textmodels import text_model

(CLIP,) = (entry for entry in TABLE if entry.name == "clip")
FLOAT = ARITHMETIC[onnx.TensorProto.FLOAT]
ACTIVATIONS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "relu": ("h = Relu(y)", lambda y: np.maximum(y, 0.0)),
    "leaky_relu": ("h = LeakyRelu<alpha = 0.1>(y)", lambda y: np.where(y > 0.0, y, 0.1 * y)),
    "leaky_relu_down": ("h = LeakyRelu<alpha = -0.3>(y)", lambda y: np.where(y > 0.0, y, -0.3 * y)),
    "least": ("n = Neg(y) a = LeakyRelu<alpha = 0.1>(n) h = Neg(a)", lambda y: np.where(y > 0.0, 0.1 * y, y)),
    "mish": ("p = Softplus(y) t = Tanh(p) h = Mul(y, t)", lambda y: y * np.tanh(np.logaddexp(0.0, y))),
    "relu6": ("h = Clip(y, $0.0, $6.0)", lambda y: np.clip(y, 0.0, 6.0)),
    "half_open": ("h = Min(y, $2.0)", lambda y: np.minimum(y, 2.0)),
    "elu": ("h = Elu(y)", lambda y: np.where(y > 0.0, y, np.expm1(np.minimum(y, 0.0)))),
    "hard_swish": ("c = Add(y, $3.0) d = Clip(c, $0.0, $6.0) e = Mul(y, d) h = Div(e, $6.0)",
                   lambda y: y * (np.clip(y + 3.0, 0.0, 6.0) / 6.0)),
}  # fmt: skip
"""Nodes, and what they compute."""
FAR = np.array([6.0, 40.0, 300.0, 1e4, 1e9, 1e18, 1e25, 1e30, 1e35, 3e38])
POINTS = np.concatenate([np.linspace(-8.0, 8.0, 4001), -FAR, FAR]).astype(np.float32)


def model_of(body: str) -> onnx.ModelProto:
    """A block whose linear operators are the identity, with the result between them shown."""
    constants, outputs = {"E": np.ones((1, 1))}, "float[n, 1] out, float[n, 1] h"
    body = f"y = MatMul(x, E) {body} out = MatMul(h, E)"
    return text_model(body, inputs="float[n, 1] x", outputs=outputs, constants=constants)


def heads(body: str) -> onnx.ModelProto:
    plan = make_plan(model_of(body), Options(inline=True))
    assert [left.miss.reason for left in plan.left] == []
    return apply(plan)


@pytest.mark.parametrize("optimised", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_far_values_are_right(name: str, optimised: bool) -> None:
    body, truth = ACTIVATIONS[name]
    found = open_session(heads(body), optimise=optimised).run({"x": POINTS[:, None]})["h"][:, 0]
    wanted = truth(POINTS.astype(np.float64))
    assert np.all(np.abs(found - wanted) <= 1e-6 * np.maximum(1.0, np.abs(wanted)))


@pytest.mark.parametrize("name", ["relu", "relu6", "half_open", "hard_swish", "leaky_relu", "least"])
def test_no_exponential_is_denormal(name: str) -> None:
    near = POINTS[np.abs(POINTS) <= 100.0]
    model = heads(ACTIVATIONS[name][0])
    exponentials = [node.output[0] for node in model.graph.node if node.op_type == "Exp"]
    assert exponentials
    for tensor in exponentials:
        model.graph.output.append(onnx.helper.make_tensor_value_info(tensor, onnx.TensorProto.FLOAT, None))
    results = open_session(model, optimise=False).run({"x": near[:, None]})
    for tensor in exponentials:
        assert results[tensor].min() >= np.finfo(np.float32).tiny, tensor


NODES = {
    "relu6": 16,  # as written; onnxruntime removes three that add 0 or multiply by 1
    "leaky_relu": 7,
    "least": 7,
    "mish": 7,
    "leaky_relu_down": 16,
}


@pytest.mark.parametrize("name", NODES)
def test_the_number_of_nodes(name: str) -> None:
    model = heads(ACTIVATIONS[name][0])
    assert sum(node.op_type not in ("Gather", "MatMul") for node in model.graph.node) == NODES[name]


def test_a_head_that_is_not_steep_is_not_clipped() -> None:
    model = heads("s = Sigmoid(y) h = Mul(y, s)")
    assert "Clip" not in {node.op_type for node in model.graph.node}


def test_clipped_exponentials_are_nothing_beside_factors() -> None:
    """A head with a steep key and a large offset: e^-87, where its exponentials end, times e^58 would be seen."""
    tokens = (BiasToken(-40.0, 70.0, 3.0), BiasToken(0.0, 58.0, -20.0), BiasToken(4.0, -15.0, 5.0))
    program = Program("made", (Head(beta=0.0, c=0.0, d=1.0, bias_tokens=tokens),)).rounded(np.float32)
    plan = make_plan(model_of("h = Relu(y)"), Options(inline=True))
    (conversion,) = plan.conversions
    model = apply(replace(plan, conversions=(replace(conversion, program=program),)))
    y = np.linspace(-30.0, 30.0, 601)
    found = np.asarray(evaluate(model, {"x": y[:, None]})["h"])[:, 0]
    assert np.abs(found - program.evaluate(y)).max() <= 1e-13


@pytest.mark.parametrize(
    ("parameters", "narrow"),
    [((1.0, 0.0, -1.0, 1.0), True), ((1.0, 0.0, -6.5, 6.5), False), ((1.0, 0.0, -1.0, np.inf), False)],
)
def test_a_clip_between_near_kinks_needs_a_narrow_line(parameters: tuple[float, ...], narrow: bool) -> None:
    """Where self has weight beyond the line's domain, the line would be off; the bound sees it."""
    program: Any = CLIP.program_for(parameters, FLOAT, gated=True, quick=True)
    assert (program.line in lines("narrow single")) == narrow
    g = np.concatenate([np.linspace(-500.0, 500.0, 20001), [-1e30, -1e9, 1e9, 1e30]])
    g = g[np.abs(g) <= program.domain]
    assert (g.size > 20001) == narrow
    h = np.clip(g, parameters[2], parameters[3])
    error = np.abs(program.evaluate(g, np.ones_like(g)) - h) / np.maximum(1.0, np.abs(h))
    assert error.max() <= program.max_error + 1e-12

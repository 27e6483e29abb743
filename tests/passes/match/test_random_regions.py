"""Random regions are never mistaken for an activation that they are not."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from passes.options import Options
from passes.plan import make_plan
from tests.attention import Array, neurons
from tests.errors import EVALUATED
from tests.oracle import tensors
from tests.textmodels import text_model

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@dataclass
class Builder:
    """A graph under construction, with every choice drawn at random."""

    draw: Callable[[st.SearchStrategy[int]], int]
    nodes: list[str] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)

    def choose(self, count: int) -> int:
        return self.draw(st.integers(0, count - 1))

    def node(self, operator: str, *inputs: str) -> str:
        output = f"t{len(self.nodes)}"
        self.nodes.append(f"{output} = {operator}({', '.join(inputs)})")
        if self.choose(8) == 7 and operator != "Identity":
            return self.node("Identity", output)
        return output

    def constant(self, value: float) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.full([(), (1,), (1, 1)][self.choose(3)], value)
        if self.choose(2):
            return name
        output = f"t{len(self.nodes)}"
        self.nodes.append(f"{output} = Identity({name})")
        return output

    def add(self, a: str, b: str) -> str:
        return self.node("Add", *((a, b) if self.choose(2) else (b, a)))

    def mul(self, a: str, b: str) -> str:
        return self.node("Mul", *((a, b) if self.choose(2) else (b, a)))

    def times(self, a: str, factor: float) -> str:
        if self.choose(2):
            return self.mul(a, self.constant(factor))
        return self.node("Div", a, self.constant(1.0 / factor))


def mlp(b: Builder, body: Callable[[Builder, str], str]) -> onnx.ModelProto:
    """x -> W1 -> body -> W2, with or without biases."""
    y = b.node("MatMul", "x", "W1")
    if b.choose(2):
        y = b.add(y, "b1")
    region = body(b, y)
    out = b.node("MatMul", region, "W2")
    out = b.add(out, "b2") if b.choose(2) else out
    nodes = " ".join([*b.nodes, f"out = Identity({out})"])
    model = text_model(nodes, inputs="float[n, 4] x", outputs="float[n, 4] out", constants=b.constants)
    onnx.checker.check_model(model)
    return model


UNARY = ("Sigmoid", "Tanh", "Relu", "Erf", "Exp", "Neg", "Abs", "Sqrt", "Softplus", "Reciprocal")


def random_region(b: Builder, y: str) -> str:
    known = [y]
    for _ in range(1 + b.choose(5)):
        kind = b.choose(4)
        left = known[b.choose(len(known))]
        if kind == 0:
            known.append(b.node(UNARY[b.choose(len(UNARY))], left))
        elif kind == 1:
            known.append(b.mul(left, known[b.choose(len(known))]))
        elif kind == 2:
            known.append(b.times(left, (0.5, 0.7, 1.702, 2.0, 0.0447)[b.choose(5)]))
        else:
            known.append(b.add(left, b.constant((1.0, 0.5, -1.0)[b.choose(3)])))
    return known[-1]


@pytest.mark.slow
@SETTINGS
@given(data=st.data())
def test_whatever_is_converted_computes_the_region(data: st.DataObject) -> None:
    """An identification is correct or is not made: the program is within its certified error of the region."""
    model = mlp(Builder(data.draw), random_region)
    plan = make_plan(model, Options())
    for conversion in plan.conversions:
        block, program = conversion.block, conversion.program
        points = np.linspace(-12.0, 12.0, 481)
        points = points[np.abs(points) <= program.domain]
        # The pre-activation itself is planted, so that W1 and b1 do not matter.
        columns = np.repeat(points[:, None], 8, axis=1)
        values = tensors(plan.model, {"x": columns[:, :4]}, {block.gate: lambda _: columns})  # noqa: B023 - called at once
        expected = values[block.output][:, 0]
        error = np.abs(neurons(program.as_heads, points, points) - expected) / np.maximum(1.0, np.abs(expected))
        assert error.max() <= conversion.max_error + EVALUATED, block.identified.label

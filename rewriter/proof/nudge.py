"""A copy of a model with noise at chosen tensors: how far rounding, or a certified error, moves its outputs.

At an activation x = f(y) the noise is s (eps max(|x|, |y|) + error max(1, |x|)), at a gate x = h(g) u it is
s (eps max(|x|, |g u|) + error max(|u|, |x|)), where eps is one unit in the last place, `error` the certified bound, and
s in [-1, 1]: sin(FREQUENCY x + phase), which is uncorrelated between values, or 1 everywhere, since errors of one sign
may add up. Rounding is in units of the argument, since activations are y times a weight that is computed to so many
digits. Phase and kind are inputs of the model, so that one session serves all draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from rewriter.arrays import Array
from rewriter.graph.edit import inlined, set_nodes
from rewriter.graph.view import Path, graph_at, integer_of

_STEPS = 2.0**10
"""Units of noise where operators round activations to 8 bits: one unit flips one such rounding in 1e5, which moves the
outputs by 1e-3 and more, and in a small model no draw may show it."""

FREQUENCY = 12345.678
"""Makes the noise of values that differ by 1e-3 or more uncorrelated."""

_WIDE: Mapping[int, int] = {
    TensorProto.FLOAT: TensorProto.FLOAT,
    TensorProto.FLOAT16: TensorProto.FLOAT,
    TensorProto.DOUBLE: TensorProto.DOUBLE,
}
"""Types that get noise, and the type that it is computed in: onnxruntime has no float16 kernel of Sin."""

DRAWS: Sequence[Mapping[str, float]] = (
    {"phase": 0.0, "steady": 0.0},
    {"phase": 1.0, "steady": 0.0},
    {"phase": 0.0, "steady": 1.0},
)
"""What the models are run with: two patterns of signs, and one sign."""


@dataclass(frozen=True)
class Point:
    """A tensor that gets noise.

    Attributes:
        tensor: its name.
        path: the graph that makes it.
        elem_type: its element type.
        error: certified bound, over max(1, |x|).
        argument: the tensor y, or g of a gate; empty if unknown.
        value: the tensor u of a gate; empty for an activation.
    """

    tensor: str
    path: Path
    elem_type: int
    error: float = 0.0
    argument: str = ""
    value: str = ""


def nudged(model: onnx.ModelProto, points: Sequence[Point]) -> tuple[onnx.ModelProto, str]:
    """A copy with noise at those points that it has, and the prefix of the names of its further inputs."""
    copy = inlined(model)
    taken = {name for node in copy.graph.node for name in (*node.input, *node.output)}
    prefix = "noise/"
    while any(name.startswith(prefix) for name in taken):
        prefix = f"_{prefix}"
    kinds, units = set(), _STEPS if any(map(_rounds_to_bytes, copy.graph.node)) else 1.0
    # Bodies before what holds them: a path is followed by names of nodes, which noise does not change.
    for point in sorted(points, key=lambda each: -len(each.path)):
        graph = _graph(copy, point.path)
        if graph is not None and point.elem_type in _WIDE and _inject(graph, point, prefix, units):
            kinds.add(_WIDE[point.elem_type])
    for kind in sorted(kinds):
        for name in ("phase", "steady"):
            copy.graph.input.append(helper.make_tensor_value_info(f"{prefix}{name}_{kind}", kind, []))
    return copy, prefix if kinds else ""


def _rounds_to_bytes(node: onnx.NodeProto) -> bool:
    """Whether an operator rounds its activations to 8 bits."""
    return node.op_type == "MatMulNBits" and integer_of(node, "accuracy_level", 0) == 4


def feeds(model: onnx.ModelProto, prefix: str, draw: Mapping[str, float]) -> dict[str, Array]:
    """The further inputs of a model with noise, for one of `DRAWS`."""
    found = {}
    for value in model.graph.input:
        if value.name.startswith(prefix):
            name = value.name.removeprefix(prefix).split("_")[0]
            kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            found[value.name] = np.asarray(draw[name], kind)
    return found


def _graph(model: onnx.ModelProto, path: Path) -> onnx.GraphProto | None:
    try:
        return graph_at(model, path)
    except (StopIteration, KeyError):
        return None  # a part of the model, without that body


def _inject(graph: onnx.GraphProto, point: Point, prefix: str, units: float) -> bool:
    """Let the producer write to another name, and the noise to the old one, so that nothing has to be renamed."""
    for place, node in enumerate(graph.node):
        if point.tensor in node.output:
            output = list(node.output).index(point.tensor)
            node.output[output] = f"{prefix}{point.tensor}/raw"
            nodes = [*graph.node[: place + 1], *_noise(point, prefix, units), *graph.node[place + 1 :]]
            set_nodes(graph, nodes)
            return True
    return False


def _noise(point: Point, prefix: str, units: float) -> Iterator[onnx.NodeProto]:
    own, wide = f"{prefix}{point.tensor}/", _WIDE[point.elem_type]
    phase, steady = (f"{prefix}{name}_{wide}" for name in ("phase", "steady"))
    numbers = {
        "frequency": FREQUENCY,
        "one": 1.0,
        "eps": units * float(ml_dtypes.finfo(helper.tensor_dtype_to_np_dtype(point.elem_type)).eps),
        "error": point.error,
    }
    for name, number in numbers.items():
        value = helper.make_tensor(f"{own}{name}", wide, [], [number])
        yield helper.make_node("Constant", [], [f"{own}{name}"], value=value)

    def node(operator: str, inputs: Sequence[str], output: str) -> onnx.NodeProto:
        names = [each if "/" in each else f"{own}{each}" for each in inputs]
        return helper.make_node(operator, names, [f"{own}{output}"])

    yield helper.make_node("Cast", [f"{own}raw"], [f"{own}x"], to=wide)
    yield node("Mul", ["x", "frequency"], "turns")
    yield helper.make_node("Add", [f"{own}turns", phase], [f"{own}angle"])
    yield node("Sin", ["angle"], "sine")
    yield helper.make_node("Sub", [f"{own}one", steady], [f"{own}mixed"])
    yield node("Mul", ["sine", "mixed"], "part")
    yield helper.make_node("Add", [f"{own}part", steady], [f"{own}sign"])
    yield node("Abs", ["x"], "size")
    for name, tensor in (("unit", point.value), ("argument", point.argument)):
        if tensor:
            yield helper.make_node("Cast", [tensor], [f"{own}{name}/wide"], to=wide)
            yield helper.make_node("Abs", [f"{own}{name}/wide"], [f"{own}{name}"])
        else:
            yield helper.make_node("Identity", [f"{own}one" if name == "unit" else f"{own}size"], [f"{own}{name}"])
    yield node("Mul", ["argument", "unit"] if point.value and point.argument else ["argument", "one"], "product")
    yield node("Max", ["product", "size"], "digits")
    yield node("Mul", ["digits", "eps"], "rounding")
    yield node("Max", ["unit", "size"], "scale")
    yield node("Mul", ["scale", "error"], "certified")
    yield node("Add", ["rounding", "certified"], "most")
    yield node("Mul", ["most", "sign"], "noise")
    yield node("Add", ["x", "noise"], "noisy")
    yield helper.make_node("Cast", [f"{own}noisy"], [point.tensor], to=point.elem_type)

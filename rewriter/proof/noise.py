"""A copy of a model with noise on the tensors that its linear operators and quantisers read.

The noise of a value x is x size sin(FREQUENCY x + draw): at most `size`, relative, unrelated from one value to the
next, and the same in every run. It needs no random numbers and no shapes, so it reaches bodies of control flow too. Its
size and phase are further inputs of the model, so that one session serves all draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import DTypeLike
from onnx import TensorProto, helper

from rewriter.files.walk import iter_nodes
from rewriter.graph.constants import Constants
from rewriter.graph.types import TensorType
from rewriter.graph.view import GraphView, all_views, graph_at
from rewriter.proof.claims import Claim
from rewriter.proof.distance import Array

FREQUENCY = 12345.678
"""Values that differ by 1e-3 or more get unrelated noise."""

_HALF_STEPS = 2.0
"""The most units in the last place in half precision: they are coarse themselves."""

QUANTISERS = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})
"""Operators that round floats to few bits."""

_MIXERS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "RNN", "GRU", "LSTM", *QUANTISERS}
"""Operators of ai.onnx that add up many values, or round them; so do most operators of other domains."""

_WIDE: Mapping[int, int] = {
    TensorProto.FLOAT: TensorProto.FLOAT,
    TensorProto.DOUBLE: TensorProto.DOUBLE,
    TensorProto.FLOAT16: TensorProto.FLOAT,
}
"""Element types that get noise, and the type that it is computed in: onnxruntime has no Sin in float16."""

_OPSET = 7
"""The first in which elementwise operators broadcast by themselves."""


@dataclass(frozen=True, eq=False)
class _Point:
    """A tensor that gets noise.

    Attributes:
        kind: its element type.
        claim: what is claimed of it, where it is an activation.
    """

    kind: int
    claim: Claim | None


@dataclass(frozen=True, eq=False)
class NoisyModel:
    """A model in which tensors have noise.

    Attributes:
        proto: the model, with further scalar inputs.
        points: the tensors.
        prefix: what the names of the further inputs begin with.
    """

    proto: onnx.ModelProto
    points: Sequence[_Point]
    prefix: str

    def feeds(self, steps: float, draw: int) -> dict[str, Array]:
        """The values of the further inputs, for noise of so many units in the last place."""
        given: dict[str, Array] = {}
        for kind in {point.kind for point in self.points}:
            size = relative_size(helper.tensor_dtype_to_np_dtype(kind), steps)
            for what, value in (("size", size), ("phase", draw), ("frequency", FREQUENCY), ("one", 1.0)):
                given[f"{self.prefix}{what}_{kind}"] = _scalar(value, kind)
        for point in self.points:
            if point.claim is not None:
                error = point.claim.max_error + point.claim.rounding
                given[f"{self.prefix}{point.claim.output}/error"] = _scalar(error, point.kind)
        return given


def with_noise(
    model: onnx.ModelProto,
    claims: Sequence[Claim] = (),
    ends: Sequence[str] = (),
    types: Mapping[str, int] | None = None,
) -> NoisyModel:
    """A copy in which every tensor that a mixing operator reads has noise.

    Args:
        model: the model.
        claims: about activations of it: what is granted to their programs is noise too.
        ends: further tensors of the main graph that have noise.
        types: element types of tensors of the main graph that inference does not know (`untyped`).
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    prefix = _unused(model)
    points: list[_Point] = []
    for view in all_views(model):
        known = {} if view.path else {name: TensorType(kind, None) for name, kind in (types or {}).items()}
        typed = replace(view, types={**view.types, **known})
        there = {claim.output: claim for claim in claims if claim.path == view.path}
        found = _points(typed, there, () if view.path else ends)
        _inject(graph_at(result, view.path), found, prefix)
        points += found.values()
    noisy = NoisyModel(result, points, prefix)
    result.graph.input.extend(
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), [])
        for name, value in noisy.feeds(1.0, 0).items()
    )
    return noisy


def untyped(view: GraphView) -> list[str]:
    """The tensors that a mixing operator reads, of unknown element type: what operators of other domains make."""
    return [name for name in _read(view) if not view.type_of(name).elem_type]


def moved(array: Array, steps: float, draw: int) -> Array:
    """The same noise on an input. Whole numbers stay: they are masks, flags and positions, and exact."""
    wide = array.astype(np.float64)
    with np.errstate(all="ignore"):
        noisy = wide + wide * np.sin(FREQUENCY * wide + draw) * relative_size(array.dtype, steps)
        exact = ~np.isfinite(wide) | (wide == np.floor(wide))
        return np.asarray(np.where(exact, array, noisy.astype(array.dtype)), dtype=array.dtype)


def relative_size(dtype: DTypeLike, steps: float) -> float:
    """So many units in the last place of an element type, over the value."""
    info = ml_dtypes.finfo(dtype)
    return (min(steps, _HALF_STEPS) if info.bits == 16 else steps) * float(info.eps)


def _scalar(value: float, kind: int) -> Array:
    return np.asarray(value, helper.tensor_dtype_to_np_dtype(_WIDE[kind]))


def _points(view: GraphView, claims: Mapping[str, Claim], ends: Sequence[str]) -> dict[str, _Point]:
    """The tensors of a graph that get noise."""
    if view.opsets.get("", 0) < _OPSET:
        return {}
    names = dict.fromkeys((*(name for name in (*claims, *ends) if name in view.producer), *_read(view)))
    kinds = {name: view.type_of(name).elem_type for name in names}
    return {name: _Point(kind, claims.get(name)) for name, kind in kinds.items() if kind in _WIDE}


def _read(view: GraphView) -> list[str]:
    """The tensors that a mixing operator reads, constants and inputs apart."""
    constants = Constants(view)
    names = dict.fromkeys(name for node in view.nodes if _mixes(view, node) for name in node.input)
    return [name for name in names if name in view.producer and name not in constants]


def _mixes(view: GraphView, node: onnx.NodeProto) -> bool:
    return not view.is_onnx(node) or node.op_type in _MIXERS


def _unused(model: onnx.ModelProto) -> str:
    """A prefix that no name in the model has."""
    names = {name for node in iter_nodes(model.graph.node) for name in (*node.input, *node.output)}
    names.update(value.name for value in (*model.graph.input, *model.graph.initializer))
    prefix = "noise/"
    while any(name.startswith(prefix) for name in names):
        prefix = f"_{prefix}"
    return prefix


def _inject(graph: onnx.GraphProto, points: Mapping[str, _Point], prefix: str) -> None:
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        nodes.append(copy)
        for place, name in enumerate(node.output):
            if name in points:
                copy.output[place] = f"{prefix}{name}/raw"
                nodes.extend(_noise(name, points[name], prefix))
    del graph.node[:]
    graph.node.extend(nodes)


def _noise(name: str, point: _Point, prefix: str) -> Iterator[onnx.NodeProto]:
    """The nodes of x + size x sin(frequency x + phase), for a claimed activation with its error beside `size x`."""
    kind, claim = point.kind, point.claim
    size, phase, frequency = (f"{prefix}{what}_{kind}" for what in ("size", "phase", "frequency"))
    own, wide = f"{prefix}{name}/", _WIDE[kind]
    x, most, noisy = f"{own}x", f"{own}rounding", f"{own}noisy"
    yield helper.make_node("Cast", [f"{own}raw"], [x], to=wide)
    yield helper.make_node("Mul", [x, frequency], [f"{own}turns"])
    yield helper.make_node("Add", [f"{own}turns", phase], [f"{own}angle"])
    yield helper.make_node("Sin", [f"{own}angle"], [f"{own}sine"])
    yield helper.make_node("Mul", [x, size], [most])
    if claim is not None:
        yield from _granted(claim, kind, prefix)
        yield helper.make_node("Add", [most, f"{own}granted"], [f"{own}most"])
        most = f"{own}most"
    yield helper.make_node("Mul", [most, f"{own}sine"], [f"{own}noise"])
    yield helper.make_node("Add", [x, f"{own}noise"], [noisy])
    yield helper.make_node("Cast", [noisy], [name], to=kind)


def _granted(claim: Claim, kind: int, prefix: str) -> Iterator[onnx.NodeProto]:
    """The nodes of error max(1, |x|), of a gate h(g) u error max(1, |x|, |u|): certified errors are over these."""
    own = f"{prefix}{claim.output}/"
    units = [f"{prefix}one_{kind}", f"{own}size"]
    yield helper.make_node("Abs", [f"{own}x"], [f"{own}size"])
    if claim.gated:
        yield helper.make_node("Cast", [claim.value], [f"{own}value"], to=_WIDE[kind])
        yield helper.make_node("Abs", [f"{own}value"], [f"{own}value_size"])
        units.append(f"{own}value_size")
    yield helper.make_node("Max", units, [f"{own}unit"])
    yield helper.make_node("Mul", [f"{own}unit", f"{own}error"], [f"{own}granted"])

"""Copy a model and add noise to the operands of its linear operators and quantisers.

The noise of a value x is x size sin(FREQUENCY x + draw): at most `size` in relative terms, uncorrelated between values,
and the same in every run. It needs neither random numbers nor shapes, so it works in control-flow bodies too. Its size
and phase are additional inputs of the model, so that one session serves all draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import DTypeLike
from onnx import TensorProto, helper

from rewriter.arrays import Array
from rewriter.files.walk import iter_nodes
from rewriter.graph.types import TensorType
from rewriter.graph.view import GraphView, all_views, graph_at
from rewriter.proof.claims import Claim

FREQUENCY = 12345.678
"""Makes the noise of values that differ by 1e-3 or more uncorrelated."""

_HALF_STEPS = 2.0
"""Maximum size of the noise in half precision, in units in the last place: these are coarse by themselves."""

QUANTISERS = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})
"""Operators that round floats to a few bits."""

_MIXERS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "RNN", "GRU", "LSTM", *QUANTISERS}
"""Operators of ai.onnx that sum many values or quantise them. Every operator of another domain counts as one."""

_WIDE: Mapping[int, int] = {
    TensorProto.FLOAT: TensorProto.FLOAT,
    TensorProto.DOUBLE: TensorProto.DOUBLE,
    TensorProto.FLOAT16: TensorProto.FLOAT,
}
"""Element types that receive noise, and the type that it is computed in: onnxruntime has no float16 kernel of Sin."""

_OPSET = 7
"""First opset in which elementwise operators broadcast without an attribute; older graphs receive no noise."""


@dataclass(frozen=True, eq=False)
class _Point:
    """A tensor that receives noise.

    Attributes:
        kind: its element type.
        claim: the claim about it, if it is a claimed activation.
    """

    kind: int
    claim: Claim | None


@dataclass(frozen=True, eq=False)
class NoisyModel:
    """A model with noise.

    Attributes:
        proto: the model, with additional scalar inputs.
        points: the tensors that receive noise.
        prefix: prefix of the names of the additional inputs.
    """

    proto: onnx.ModelProto
    points: Sequence[_Point]
    prefix: str

    def feeds(self, steps: float, draw: int) -> dict[str, Array]:
        """Values of the additional inputs, for noise of `steps` units in the last place."""
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
    """A copy in which every operand of a mixing operator has noise.

    Args:
        model: the model.
        claims: claims about its activations; the errors that they grant count as noise.
        ends: further tensors of the main graph that receive noise.
        types: element types of tensors of the main graph that inference does not know (`untyped`).
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    prefix = _unused(model)
    points: list[_Point] = []
    # Bodies before the graphs around them: a body is found by the place of its node, which noise in front of it moves.
    for view in reversed(list(all_views(model))):
        # Types, claims and ends are named for the main graph; a body may use the same names for other tensors.
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
    """Operands of mixing operators whose element type inference does not know: results of custom operators."""
    return [name for name in _read(view) if not view.type_of(name).elem_type]


def moved(array: Array, steps: float, draw: int) -> Array:
    """The same noise on an input array. Whole numbers are exact and stay as they are: masks, flags, positions."""
    wide = array.astype(np.float64)
    with np.errstate(all="ignore"):
        noisy = wide + wide * np.sin(FREQUENCY * wide + draw) * relative_size(array.dtype, steps)
        exact = ~np.isfinite(wide) | (wide == np.floor(wide))
        return np.asarray(np.where(exact, array, noisy.astype(array.dtype)), dtype=array.dtype)


def relative_size(dtype: DTypeLike, steps: float) -> float:
    """The relative size of `steps` units in the last place of an element type."""
    info = ml_dtypes.finfo(dtype)
    return (min(steps, _HALF_STEPS) if info.bits == 16 else steps) * float(info.eps)


def _scalar(value: float, kind: int) -> Array:
    return np.asarray(value, helper.tensor_dtype_to_np_dtype(_WIDE[kind]))


def _points(view: GraphView, claims: Mapping[str, Claim], ends: Sequence[str]) -> dict[str, _Point]:
    """The tensors of a graph that receive noise."""
    if view.opsets.get("", 0) < _OPSET:
        return {}
    names = dict.fromkeys((*(name for name in (*claims, *ends) if name in view.producer), *_read(view)))
    # Integers, booleans and types without a kernel of Sin get none.
    kinds = {name: view.type_of(name).elem_type for name in names}
    return {name: _Point(kind, claims.get(name)) for name, kind in kinds.items() if kind in _WIDE}


def _read(view: GraphView) -> list[str]:
    """The operands of mixing operators that nodes compute."""
    # Weights are the same in both models and would double in size; inputs receive their noise in numpy (`moved`).
    names = dict.fromkeys(name for node in view.nodes if _mixes(view, node) for name in node.input)
    return [name for name in names if name in view.producer and name not in view.constants]


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
    # The producer writes to a new name and the noise restores the old one, so that no graph output and no consumer, in
    # whatever body, has to be renamed.
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
    """The nodes of x + size x sin(frequency x + phase); for a claimed activation, its error is added to `size x`."""
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
    """The nodes of error max(1, |x|), or error max(1, |x|, |u|) for a gate h(g) u: the unit of certified errors."""
    # With x = h(g) u, the unit max(1, |h|) |u| of a gated block is the larger of |u| and |x|.
    own = f"{prefix}{claim.output}/"
    units = [f"{prefix}one_{kind}", f"{own}size"]
    yield helper.make_node("Abs", [f"{own}x"], [f"{own}size"])
    if claim.gated:
        yield helper.make_node("Cast", [claim.value], [f"{own}value"], to=_WIDE[kind])
        yield helper.make_node("Abs", [f"{own}value"], [f"{own}value_size"])
        units.append(f"{own}value_size")
    yield helper.make_node("Max", units, [f"{own}unit"])
    yield helper.make_node("Mul", [f"{own}unit", f"{own}error"], [f"{own}granted"])

"""What the nodes of heads compute, on some hundred numbers, against what the plan in the file says.

The nodes are run by onnx's reference implementation, in the types of the file; what is claimed is computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops.op_expand import Expand as _Expand
from onnx.reference.ops.op_range import Range as _Range

from passes.forms.whole import ROWS
from passes.record import Stream
from rewriter.graph.types import TensorType

Array = NDArray[Any]
Function = Callable[[Array], Array]

_POINTS = 512
_FAR = 30.0
_MOST_ELEMENTS = 2**22
_MOST_RUNS = 64

_UNITS = 64.0
"""Units of a type's precision that heads may be off by, beyond their bound: those of gates are off by some 20."""

_STEP = 2.0**-12
"""Half the distance between the points that a slope is computed from."""

_PRECISION: dict[int, float] = {
    onnx.TensorProto.DOUBLE: 2.0**-52,
    onnx.TensorProto.FLOAT: 2.0**-23,
    onnx.TensorProto.FLOAT16: 2.0**-10,
    onnx.TensorProto.BFLOAT16: 2.0**-7,
}


_LARGE: dict[int, float] = {onnx.TensorProto.FLOAT16: 2.0**12}
"""Numbers that a type holds with room to spare."""


class NotRunError(Exception):
    """The nodes cannot be run; the message is the reason."""


class Expand(_Expand):  # type: ignore[misc]
    """The operator, for tensors of a size that tests need."""

    def _run(self, data: Array, shape: Array) -> tuple[Array]:
        if prod(int(each) for each in shape) > _MOST_ELEMENTS * 16:
            raise NotRunError("a tensor is too large")
        return (np.array(np.broadcast_to(data, np.broadcast_shapes(data.shape, tuple(shape)))),)


class Range(_Range):  # type: ignore[misc]
    """The operator, for so many numbers as tests need."""

    def _run(self, starts: Array, ends: Array, steps: Array, **_: Any) -> tuple[Array]:
        if not abs(ends - starts) <= _MOST_ELEMENTS * abs(steps):
            raise NotRunError("a range is too long")
        return (np.arange(starts.item(), ends.item(), steps.item(), dtype=starts.dtype),)


@dataclass(frozen=True, eq=False)
class Part:
    """The nodes of some heads, to be run.

    Attributes:
        model: the nodes as a model; its inputs are the data and the weights.
        weights: the weights, by name.
        types: the types of tensors.
    """

    model: onnx.ModelProto
    weights: Mapping[str, Array]
    types: Callable[[str], TensorType]

    def run(self, feeds: Mapping[str, Array]) -> Array:
        """The output. Raises NotRunError."""
        wanted = {value.name for value in self.model.graph.input}
        given = {name: array for name, array in {**self.weights, **feeds}.items() if name in wanted}
        try:
            with np.errstate(all="ignore"):
                return np.asarray(ReferenceEvaluator(self.model, new_ops=[Expand, Range]).run(None, given)[0])
        except Exception as error:  # numpy and onnx raise all kinds for a graph that no runtime would run
            raise NotRunError(" ".join(str(error).split())[:200] or type(error).__name__) from error

    def dtype(self, name: str) -> np.dtype[Any]:
        """The element type of a tensor; float32 where it is not known."""
        elem_type = self.types(name).elem_type or onnx.TensorProto.FLOAT
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem_type))

    def units(self, *names: str) -> float:
        """What rounding explains in the least precise of the types of some tensors."""
        known = [self.types(name).elem_type or onnx.TensorProto.FLOAT for name in names if name]
        return _UNITS * max(_PRECISION.get(each, 1.0) for each in known)

    def shape(self, name: str, tokens: int) -> list[int]:
        """A shape of a tensor: the sizes that are known, and for others one sequence of so many tokens."""
        known = self.types(name).shape
        if known is None:
            return [1, tokens, tokens]
        shape = [each if isinstance(each, int) else tokens for each in known]
        if len(known) > 2 and not isinstance(known[0], int):
            shape[0] = 1
        for axis in range(len(shape) - 1):  # batches first, then whatever else is too many
            if prod(shape) > _MOST_ELEMENTS:
                shape[axis] = 1
        return shape


def activation_error(part: Part, function: Function, names: tuple[str, str, str], domain: float, tokens: int) -> float:
    """The largest |nodes - f(y) u| / (max(1, |f(y)|) |u|) on |y| <= domain, beyond what rounding explains.

    Args:
        part: the nodes.
        function: f.
        names: y, u (empty: 1) and the output.
        domain: how far y may go.
        tokens: sizes that the model leaves open.

    Raises:
        NotRunError: the nodes cannot be run.
    """
    y_name, u_name, _ = names
    rng = np.random.default_rng(0)
    reach = min(domain, _FAR)
    points = np.concatenate(
        [np.linspace(-reach, reach, _POINTS // 2), np.clip(rng.normal(0, 2, _POINTS // 2), -reach, reach)]
    )
    points = rng.permutation(points)
    others = rng.normal(0.0, 3.0, _POINTS) if u_name else np.ones(_POINTS)
    shape = part.shape(y_name, tokens)
    count = max(1, prod(shape))
    worst = 0.0
    for start in range(0, min(_POINTS, _MOST_RUNS * count), count):
        place = np.arange(start, start + count) % _POINTS
        y, u = (
            each[place].reshape(shape).astype(part.dtype(name or y_name))
            for name, each in ((y_name, points), (u_name, others))
        )
        got = part.run({y_name: y, **({u_name: u} if u_name else {})}).astype(np.float64)
        y, u = y.astype(np.float64), u.astype(np.float64)
        f = function(y)
        if got.shape != f.shape:
            raise NotRunError("its result has another shape than its pre-activation")
        unit = np.maximum(1.0, np.abs(f)) * np.abs(u)
        rounding = part.units(*names) * (unit + np.abs(y * u) * _slope(function, y))
        finite = unit < _LARGE.get(part.types(names[2]).elem_type, inf)
        if 2 * np.count_nonzero(finite) < finite.size:
            raise NotRunError("what it should compute is beyond its type")
        beyond = np.maximum(0.0, np.abs(got - f * u) - rounding)[finite]
        worst = max(worst, _worst(beyond, np.zeros_like(beyond), unit[finite]))
    return worst


def _slope(function: Function, y: Array) -> Array:
    return np.asarray(np.abs(function(y + _STEP) - function(y - _STEP)) / (2.0 * _STEP))


@dataclass(frozen=True, eq=False)
class Affine:
    """`x weight + bias` in float64: [in, out] and [out], or one number."""

    weight: Array
    bias: Array

    def __call__(self, x: Array) -> Array:
        """The values, [rows, out]."""
        return np.asarray(x @ self.weight + self.bias)

    def size(self, x: Array) -> Array:
        """The sum of the magnitudes of what is added up."""
        return np.asarray(np.abs(x) @ np.abs(self.weight) + np.abs(self.bias))


def block_error(
    part: Part,
    function: Function,
    affine: tuple[Affine, Affine | None, Affine],
    names: tuple[str, str],
    stream: Stream | None,
    tokens: int,
) -> float:
    """How far the nodes of a whole block are from f(gate(x)) first(x) W2 + b2, on random x, beyond rounding.

    It is in units of what an error of 1 over max(1, |f|) makes of the output: |first(x)| max(1, |f|) |W2|.

    Args:
        part: the nodes.
        function: f.
        affine: first, gate (None: the block is f(first(x)) W2 + b2), and second.
        names: the block's input and its result.
        stream: the network's stream, if that carries bias tokens for the block.
        tokens: sizes that the model leaves open.

    Raises:
        NotRunError: the nodes cannot be run.
    """
    first, gate, second = affine
    data, _ = names
    extra = 0 if stream is None else stream.bias_tokens
    shape = part.shape(data, tokens)
    if len(shape) < 2:
        raise NotRunError(f"'{data}' has less than two axes")
    if extra and isinstance((part.types(data).shape or (None, None))[-2], int):
        shape[-2] -= extra
    shape[-1] = first.weight.shape[0]
    if min(shape) < 1:
        raise NotRunError(f"'{data}' has no tokens")
    x = np.random.default_rng(0).normal(0.0, 1.0, shape).astype(part.dtype(data))
    got = part.run(_feeds(x, data, stream, part)).astype(np.float64)
    count = x.shape[-2]
    if got.size != prod(shape[:-2]) * (count + extra) * second.weight.shape[1]:
        raise NotRunError("its result has another size than the plan says")
    got = got.reshape(-1, count + extra, second.weight.shape[1])[:, :count].reshape(-1, second.weight.shape[1])
    x = x.astype(np.float64).reshape(-1, shape[-1])
    pre = first if gate is None else gate
    y, u = pre(x), np.ones(1) if gate is None else first(x)
    f = function(y)
    off = np.maximum(1.0, np.abs(f)) * (np.abs(u) if gate is None else first.size(x))
    off = off + _slope(function, y) * pre.size(x) * np.abs(u)
    rounding = part.units(*names) * (off @ np.abs(second.weight) + np.abs(second.bias))
    beyond = np.maximum(0.0, np.abs(got - second(f * u)) - rounding)
    unit = (np.maximum(1.0, np.abs(f)) * np.abs(u)) @ np.abs(second.weight)
    return _worst(beyond, np.zeros_like(beyond), unit)


def _feeds(x: Array, data: str, stream: Stream | None, part: Part) -> dict[str, Array]:
    """The block's input; in form `whole` also what heads read of the network's stream: rows and columns."""
    if stream is None:
        return {data: x}
    m, count = stream.bias_tokens, x.shape[-2]
    rows = np.concatenate([x, np.zeros((*x.shape[:-2], m, x.shape[-1]), x.dtype)], axis=-2)
    slots = m + stream.max_tokens
    positions = np.concatenate([np.eye(count, slots, m), np.eye(m, slots)])
    columns = np.concatenate([np.arange(count + m)[:, None] < count, positions], axis=1)
    wide = rows.reshape(-1, count + m, rows.shape[-1])
    further = np.broadcast_to(columns, (len(wide), *columns.shape))
    whole = np.concatenate([wide, further], axis=2).astype(part.dtype(stream.tensor))
    return {data: rows, ROWS: np.array([count + m], np.int64), stream.tensor: whole}


def _worst(got: Array, want: Array, unit: Array) -> float:
    """The largest |got - want| / unit; infinite where it is no number."""
    if got.shape != want.shape:
        return float("inf")
    with np.errstate(all="ignore"):
        apart = np.where(got == want, 0.0, np.abs(got - want) / unit)
    return float(np.max(np.where(np.isfinite(apart), apart, np.inf), initial=0.0))

"""Infer sizes of float inputs from the weights of a model's first layers.

Some axes are dynamic in name but fixed by the weights: the channels of a convolution, the features of a matrix product,
and the image size or audio length that a position table after the convolutions implies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isqrt

import onnx

from rewriter.graph.view import integer_of, integers_of
from rewriter.proof.inputs.static_shapes import Scope

_ELEMENTWISE = {
    "Cast", "Identity", "Sub", "Div", "Mul", "Add", "Gelu", "Erf", "Relu", "Tanh", "Sigmoid", "Pow", "Clip",
    "Dropout",
}  # fmt: skip
_STEPS = 60
"""Maximum number of tensors that are followed from one input; only its first layers matter."""


@dataclass(frozen=True)
class _Axes:
    """How the axes of a tensor relate to those of the input.

    Attributes:
        axes: the input axis behind each axis of the tensor; None for a new one, and for all after a convolution.
        stride: product of the strides of the convolutions passed; 0 before the first one.
        spatial: the input axes that the convolutions ran over.
        extra: number of tokens that were prepended to the sequence (a class token).
    """

    axes: tuple[int | None, ...]
    stride: int = 0
    spatial: tuple[int, ...] = ()
    extra: int = 0


def find_hints(scope: Scope) -> Mapping[tuple[str, int], int]:
    """Maps (input, axis) to the size that the weights imply."""
    hints: dict[tuple[str, int], int] = {}
    for name in scope.view.inputs:
        shape = scope.shapes.get(name)
        if shape is not None and len(shape) > 1 and any(not isinstance(dim, int) for dim in shape):
            for axis, size in _follow(scope, name, len(shape)):
                hints.setdefault((name, axis), size)
    return hints


def _follow(scope: Scope, name: str, rank: int) -> Iterator[tuple[int, int]]:
    # Breadth first, so that the layers nearest to the input take precedence.
    pending = [(name, _Axes(tuple(range(rank))))]
    for _ in range(_STEPS):
        if not pending:
            return
        tensor, place = pending.pop(0)
        for index in dict.fromkeys(scope.view.consumers.get(tensor, ())):
            node = scope.view.nodes[index]
            if not scope.view.is_onnx(node) or not node.output:
                continue
            yield from _demands(scope, node, tensor, place)
            after = _after(scope, node, tensor, place)
            if after is not None:
                pending.append((node.output[0], after))


def _demands(scope: Scope, node: onnx.NodeProto, tensor: str, place: _Axes) -> Iterator[tuple[int, int]]:
    """Sizes of input axes that `node`, a consumer of `tensor`, implies."""
    other = next((name for name in node.input if name != tensor and name in scope.constants), None)
    shape = scope.shapes.get(other, ()) if other is not None else ()
    size: object = None
    axis = place.axes[-1]
    if node.op_type == "Add" and place.stride and len(shape) >= 2:
        yield from _positions(place, shape[-2])
    # Behind the first convolution, axis 1 counts its outputs and no longer the channels of the input.
    if node.op_type == "Conv" and len(shape) > 2 and not place.stride:
        group = integer_of(node, "group", 1)
        size, axis = (shape[1] * group if isinstance(shape[1], int) else None), place.axes[1]
    elif node.op_type == "MatMul" and node.input[0] == tensor and len(shape) >= 2:
        size = shape[-2]
    elif node.op_type == "Gemm" and node.input[0] == tensor and len(shape) == 2:
        size = shape[1 if integer_of(node, "transB", 0) else 0]
    elif node.op_type in {"LayerNormalization", "Add", "Mul", "Sub", "Div"} and shape and shape[-1] != 1:
        size = shape[-1]
    if isinstance(size, int) and axis is not None:
        yield axis, size


def _positions(place: _Axes, rows: object) -> Iterator[tuple[int, int]]:
    if not isinstance(rows, int) or rows - place.extra < 1:
        return
    # Each token covers `stride` entries along every axis; an image is taken to be square.
    tokens = rows - place.extra
    if len(place.spatial) == 1:
        yield place.spatial[0], tokens * place.stride
    elif len(place.spatial) == 2 and isqrt(tokens) ** 2 == tokens:
        yield from ((axis, isqrt(tokens) * place.stride) for axis in place.spatial)


def _after(scope: Scope, node: onnx.NodeProto, tensor: str, place: _Axes) -> _Axes | None:
    """The axes of the output of `node`; None if the walk ends there."""
    if node.op_type in _ELEMENTWISE:
        return place
    if node.op_type == "Transpose":
        order = integers_of(node, "perm") or []
        known = len(order) == len(place.axes) and all(0 <= axis < len(order) for axis in order)
        return replace(place, axes=tuple(place.axes[axis] for axis in order)) if known else None
    if node.op_type == "Unsqueeze":
        axes = scope.constants.value(node.input[1]) if len(node.input) > 1 else None
        if axes is None or axes.size != 1:
            return None
        at = int(axes.reshape(-1)[0]) % (len(place.axes) + 1)
        return replace(place, axes=(*place.axes[:at], None, *place.axes[at:]))
    if node.op_type == "Conv" and node.input[0] == tensor and len(place.axes) > 2:
        strides = integers_of(node, "strides") or [1]
        spatial = place.spatial or tuple(axis for axis in place.axes[2:] if axis is not None)
        blank: tuple[int | None, ...] = (None,) * len(place.axes)
        return replace(place, axes=blank, stride=(place.stride or 1) * max(strides[0], 1), spatial=spatial)
    # Patches become tokens: [batch, tokens, channels].
    if place.stride and node.op_type in {"Reshape", "Flatten"}:
        return replace(place, axes=(None, None, None))
    if place.stride and node.op_type == "Concat":
        return replace(place, extra=place.extra + len(node.input) - 1)
    return None

"""A number for every dimension: shapes at made-up sizes of batch and tokens, by which a layout can be followed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import onnx

from passes.heads.values import UNFIT, LostError, Values
from passes.match.operands import Read
from rewriter.graph.types import forget_symbols, shapes_in_numbers, skeleton_of
from rewriter.graph.view import GraphView

Shape = tuple[int, ...]

BATCH = 2
"""The made-up batch size: 1 could not be told from axes that broadcast."""

_SMALLEST = 3
_ROUNDS = 4
"""Inferences at most: each one may tell the length of further ranges."""


def concrete_shapes(model: onnx.ModelProto, view: GraphView, read: Read) -> Mapping[str, Shape]:
    """The shapes of the main graph's tensors at made-up sizes, as far as onnx infers them.

    The first axis of the inputs is the batch, of size `BATCH`; other symbolic dimensions get different odd sizes.
    """
    skeleton = _sized(model)
    found: dict[str, Shape] = {}
    for _ in range(_ROUNDS):
        inferred = _inferred(skeleton)
        if inferred is None:
            break
        found = inferred
        counted = _ranges(view, read, found)
        if not counted:
            break
        skeleton.graph.value_info.extend(counted)
    return found


def _sized(model: onnx.ModelProto) -> onnx.ModelProto:
    """A skeleton of the model whose inputs have numbers for all dimensions."""
    skeleton = skeleton_of(model)
    sizes: dict[str, int] = {}
    further = count(_SMALLEST, 2)
    for value in skeleton.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                name = dim.dim_param or f"{value.name}[{axis}]"
                if name not in sizes:
                    sizes[name] = BATCH if axis == 0 else next(further)
                dim.dim_value = sizes[name]
    forget_symbols(skeleton)
    return skeleton


def _inferred(skeleton: onnx.ModelProto) -> dict[str, Shape] | None:
    try:
        typed = onnx.shape_inference.infer_shapes(skeleton, check_type=False, strict_mode=False, data_prop=True)
    except Exception:  # noqa: BLE001 - the C++ inference raises bare exceptions on odd models; then nothing is known
        return None
    return shapes_in_numbers(typed.graph)


def _ranges(view: GraphView, read: Read, found: Mapping[str, Shape]) -> list[onnx.ValueInfoProto]:
    """The lengths of Range nodes, which inference does not compute from shapes."""
    values = Values(view, read, found.get)
    declared = []
    for node in view.nodes:
        if node.op_type == "Range" and view.is_onnx(node) and node.output[0] not in found:
            try:
                start, limit, step = (values.numbers(name)[0] for name in node.input)
            except (LostError, *UNFIT):
                continue
            kind = view.type_of(node.output[0]).elem_type or onnx.TensorProto.INT64
            length = max(-((start - limit) // (step or 1)), 0)
            declared.append(onnx.helper.make_tensor_value_info(node.output[0], kind, [length]))
    return declared

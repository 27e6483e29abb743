"""The values of the small constants of a graph (`GraphView.constants`).

They are computed on demand and only for small inline tensors: weights are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from rewriter.graph import elementwise
from rewriter.graph.view import GraphView, constant_of, integer_of

AnyArray = NDArray[Any]
Read = Callable[[onnx.TensorProto], AnyArray]
"""Gives the values of a tensor, inline or external, in its own element type."""

_SMALL = 1024
"""Maximum number of elements of a constant whose values are read."""

_RESHAPING = {"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Expand"}
_TYPES: dict[int, type[np.generic]] = {
    onnx.TensorProto.FLOAT: np.float32,
    onnx.TensorProto.DOUBLE: np.float64,
    onnx.TensorProto.FLOAT16: np.float16,
    onnx.TensorProto.INT32: np.int32,
    onnx.TensorProto.INT64: np.int64,
}


class Constants:
    """Constness and small constant values of one view. Values are cached; the graph must not change meanwhile."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._values: dict[tuple[str, bool], NDArray[np.generic] | None] = {}

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._view.constants

    def scalar(self, tensor: str) -> float | None:
        """The value of a constant with exactly one element; None for anything else.

        A number that nodes compute from others, such as Sqrt(2) in float16, is not rounded to its type: the float64
        evaluation of the model, which is the truth of every proof, does not round it either.
        """
        value = self._known(tensor, wide=True)
        return float(np.asarray(value, dtype=np.float64).reshape(())) if value is not None and value.size == 1 else None

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """Dimensions of a constant, from its initializer, its value, or type inference."""
        if tensor in self._view.initializers:
            return tuple(self._view.initializers[tensor].dims)
        value = self.value(tensor)
        if value is not None:
            return value.shape
        inferred = self._view.type_of(tensor).shape
        if inferred is None or not all(isinstance(dim, int) for dim in inferred):
            return None
        return tuple(dim for dim in inferred if isinstance(dim, int))

    def value(self, tensor: str) -> NDArray[np.generic] | None:
        """The value of a small constant in its own type, or None when it is large, external or not foldable."""
        return self._known(tensor, wide=False)

    def _known(self, tensor: str, *, wide: bool) -> NDArray[np.generic] | None:
        # The caller may replace the default of an overridable input at run time.
        if tensor not in self._view.constants or tensor in self._view.overridable:
            return None
        key = tensor, wide
        if key not in self._values:
            self._values[key] = None  # guards against cycles in hostile graphs
            self._values[key] = self._compute(tensor, wide)
        return self._values[key]

    def _compute(self, tensor: str, wide: bool) -> NDArray[np.generic] | None:
        initializer = self._view.initializers.get(tensor)
        if initializer is not None:
            return _small_array(initializer)
        node = self._view.made_by(tensor)
        if node is None or not self._view.is_onnx(node):
            return None
        constant = constant_of(node)
        if constant is not None:
            return _small_array(constant)
        if node.op_type in _RESHAPING:
            return self._reshaped(node, tensor, wide)
        if node.op_type == "CastLike":
            return self._cast_like(node, wide)
        return self._folded(node, wide)

    # The target shape comes from type inference, which already reads the shape operand or axes.
    def _reshaped(self, node: onnx.NodeProto, tensor: str, wide: bool) -> NDArray[np.generic] | None:
        value = self._known(node.input[0], wide=wide)
        shape = self._view.type_of(tensor).shape
        if value is None or shape is None or not all(isinstance(dim, int) for dim in shape):
            return None
        target = tuple(dim for dim in shape if isinstance(dim, int))
        if prod(target) > _SMALL:
            return None
        return np.broadcast_to(value, target) if node.op_type == "Expand" else value.reshape(target)

    def _cast_like(self, node: onnx.NodeProto, wide: bool) -> NDArray[np.generic] | None:
        """A number of a function by onnxscript, `CastLike(constant, data)`; the data's type must be known."""
        value = self._known(node.input[0], wide=wide)
        target = _TYPES.get(self._view.type_of(node.input[1]).elem_type)
        return None if value is None or target is None else _typed(value, np.dtype(target), wide)

    def _folded(self, node: onnx.NodeProto, wide: bool) -> NDArray[np.generic] | None:
        if elementwise.lookup(node) is None:
            return None
        args = [self._known(name, wide=wide) for name in node.input]
        known = [arg for arg in args if arg is not None]
        if len(known) != len(args):
            return None
        if known[0].dtype.kind in "iu" and node.op_type in ("Identity", "Neg"):
            return known[0] if node.op_type == "Identity" else np.negative(known[0])
        target = _result_type(node, known)
        if target is None:
            return None
        try:
            result = elementwise.evaluate(node, [np.asarray(arg, dtype=np.float64) for arg in known])
        except ValueError:  # shapes that do not go together: nothing that runs
            return None
        return _typed(result, target, wide)


def elem_type_of(values: AnyArray) -> int:
    """The TensorProto.DataType of an array; text has several kinds in numpy."""
    text = values.dtype.kind in "OUS"
    return int(onnx.TensorProto.STRING if text else onnx.helper.np_dtype_to_tensor_dtype(values.dtype))


def computed(
    nodes: Sequence[onnx.NodeProto],
    values: Mapping[str, AnyArray],
    outputs: Sequence[str],
    versions: Mapping[str, int],
    constants: Sequence[onnx.TensorProto] = (),
) -> list[Any]:
    """What nodes make of known tensors, by onnx's reference evaluator.

    Args:
        nodes: in an order in which they can be run.
        values: the tensors that they read.
        outputs: the tensors that are asked for.
        versions: operator sets by domain.
        constants: initializers that they read as well.

    Raises:
        Exception: of any kind, for nodes that nothing would run.
    """
    from onnx.reference import ReferenceEvaluator  # slow to import

    helper = onnx.helper
    given = [helper.make_tensor_value_info(name, elem_type_of(value), None) for name, value in values.items()]
    graph = helper.make_graph(nodes, "nodes", given, [onnx.ValueInfoProto(name=name) for name in outputs], constants)
    imports = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    with np.errstate(all="ignore"):
        model = helper.make_model(graph, opset_imports=imports)
        return list(ReferenceEvaluator(model).run(None, dict(values)))


def _typed(value: NDArray[np.generic], target: np.dtype[np.generic], wide: bool) -> NDArray[np.generic]:
    """A computed value in its type; in float64, if `wide`, where the type is a floating-point one."""
    return value.astype(np.float64 if wide and target.kind == "f" else target)


def _result_type(node: onnx.NodeProto, args: list[NDArray[np.generic]]) -> np.dtype[np.generic] | None:
    """The element type of the operator's result; None where folding in float64 would change the value."""
    if node.op_type == "Cast":
        target = integer_of(node, "to", 0)
        numpy_type = _TYPES.get(target)
        return None if numpy_type is None else np.dtype(numpy_type)
    # Integer division truncates, and int64 exceeds the 53 bits of float64: float64 cannot stand in for integers.
    return None if args[0].dtype.kind in "iub" else args[0].dtype


def _small_array(tensor: onnx.TensorProto) -> NDArray[np.generic] | None:
    if prod(tensor.dims) > _SMALL or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return None
    if tensor.data_type == onnx.TensorProto.STRING:
        return None
    return numpy_helper.to_array(tensor)

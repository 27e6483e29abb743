"""The values of the constants of a graph, computed lazily by onnx's reference implementation; shapes at chosen sizes.

Constants are parameters of activations, weights that nodes transpose or dequantise, and values computed from shapes.
Unless the caller provides a reader, only small inline tensors are read: weights are never touched.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from rewriter.arrays import Array
from rewriter.evaluate.arithmetic import Floats, Value
from rewriter.evaluate.moves import CASTS, NOT_LARGER
from rewriter.evaluate.scalar import BROADCAST
from rewriter.evaluate.table import ELEMENTWISE, Call, row, tuple_of
from rewriter.graph.types import Dim, terms_of, type_of
from rewriter.graph.view import GraphView, LostError, attributes, constant_of, integer_of, key_of, label

Read = Callable[[onnx.TensorProto], Array]
"""Reads the values of a tensor, inline or external, in its own element type."""

Sizes = tuple[int | None, ...]  # a shape; None for a size that is not known

_MAX_KEPT, _MAX_COMPUTED = 1024, 2**31
"""Maximum elements of a value that is kept, or read without the caller's reader; and of one that is computed."""

_MAX_DEPTH = 64  # maximum number of nodes in a chain

COMPUTED = NOT_LARGER | {name for domain, name in ELEMENTWISE if not domain}
"""Operators of ONNX whose output is not larger than their operands."""

UNFIT = (ValueError, IndexError, KeyError, TypeError, StopIteration, OverflowError, MemoryError)
"""Exceptions raised while evaluating an invalid graph."""


def small(tensor: onnx.TensorProto) -> Array:
    """The values of a small inline tensor. Raises LostError for any other."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL or prod(tensor.dims) > _MAX_KEPT:
        raise LostError("it is a weight", tensor.name)
    return numpy_helper.to_array(tensor)


class Constants:
    """Computes constants of one view, which must not change meanwhile; only small ones are kept."""

    def __init__(
        self, view: GraphView, read: Read = small, sizes: Callable[[str], Sequence[int | None] | None] = lambda _: None
    ) -> None:
        self._view, self._read, self._sizes = view, read, sizes
        self._kept: dict[tuple[str, bool], Array | LostError] = {}

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._view.constants

    def scalar(self, tensor: str) -> float | None:
        """The value of a constant with exactly one element; None for anything else.

        A number that nodes compute from others, such as Sqrt(2) in float16, is not rounded to its type: the float64
        evaluation of the model, which is the truth of every proof, does not round it either.
        """
        value = self.value(tensor, wide=True)
        return float(np.asarray(value, dtype=np.float64).reshape(())) if value is not None and value.size == 1 else None

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """Dimensions of a constant, from its initializer, from type inference, or from its value."""
        inferred = self._view.type_of(tensor).shape
        if inferred is not None and all(isinstance(dim, int) for dim in inferred):
            return tuple(dim for dim in inferred if isinstance(dim, int))
        value = self.value(tensor)
        return None if value is None else value.shape

    def value(self, tensor: str, *, wide: bool = False) -> Array | None:
        """The numbers of a small constant in its own type, or None if unknown or not numeric."""
        try:
            value = self.of(tensor, wide=wide)
        except Exception:  # noqa: BLE001 - onnx's evaluator raises any exception; they are then unknown
            return None
        return value if value.size <= _MAX_KEPT and value.dtype.kind not in "OUS" else None

    def numbers(self, tensor: str) -> list[int] | None:
        """The elements of a tensor as integers; None if they depend on more than constants and known sizes."""
        value = self.value(tensor)
        known = value is not None and np.isfinite(value.astype(np.float64)).all()
        return [int(number) for number in value.reshape(-1)] if value is not None and known else None

    def of(self, tensor: str, depth: int = 0, *, wide: bool = False) -> Array:
        """The value of a constant; floating-point results of nodes are float64 if `wide`.

        Raises LostError if it depends on the inputs, on an unknown size, or on an operator that is not in `COMPUTED`,
        and any exception for nodes that no runtime would run.
        """
        if (known := self._kept.get((tensor, wide))) is None:
            try:
                known = self._computed(tensor, depth, wide=wide)
            except LostError as lost:
                known = lost
            except RuntimeError as error:  # unknown sizes are not integers
                known = LostError(str(error), tensor)
            if isinstance(known, LostError) or known.size <= _MAX_KEPT:
                self._kept[tensor, wide] = known
        if isinstance(known, LostError):
            raise known
        return known

    def _computed(self, tensor: str, depth: int, *, wide: bool) -> Array:
        if tensor in self._view.overridable:
            raise LostError("a caller may override it", tensor)
        node = self._view.made_by(tensor)
        held = self._view.initializers.get(tensor) if node is None else constant_of(node)
        if held is not None:
            return self._read(held)
        if node is None or depth > _MAX_DEPTH:
            raise LostError("it is not constant", tensor)
        if not self._view.is_onnx(node):
            raise LostError("it is computed by an unknown operator", label(node))
        if node.op_type == "Shape":
            return self._shape(node)
        if node.op_type not in (*COMPUTED, "ConstantOfShape", "Expand"):
            raise LostError("it is not constant", label(node))
        names = node.input[:1] if node.op_type in CASTS else node.input  # another operand only gives the type
        operands = {name: self.of(name, depth + 1, wide=wide) for name in names if name}
        if node.op_type in ("ConstantOfShape", "Expand", "Transpose"):  # a view of a weight, which onnx would copy
            made = np.asarray(outputs(node, [*operands.values()])[0])
            if made.size > _MAX_COMPUTED:
                raise LostError("it is larger than any weight", label(node))
            return made
        if node.op_type in CASTS:
            return self._cast(node, next(iter(operands.values())), wide=wide)
        if wide and key_of(node) in ELEMENTWISE and all(each.dtype.kind == "f" for each in operands.values()):
            return evaluate(node, [operands[name] for name in node.input if name])
        opset = self._view.opsets.get("", 1)
        if node.op_type == "DequantizeLinear":
            opset = max(opset, 19)  # onnx's evaluator lacks the earlier versions, which computed the same
            operands = {name: _widened(value) if wide else value for name, value in operands.items()}
        return np.asarray(computed([node], operands, [tensor], {"": opset})[0])

    def _cast(self, node: onnx.NodeProto, value: Array, *, wide: bool) -> Array:
        kind = integer_of(node, "to", None) or self._view.type_of(node.input[1]).elem_type
        target = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        if np.isnan(value).any():
            return value  # an unknown size, which integers cannot represent
        made = value.astype(target)
        return value.astype(np.float64) if wide and _widened(made) is not made else made

    def _shape(self, node: onnx.NodeProto) -> Array:
        if (sizes := self._sizes(node.input[0])) is None:
            raise LostError("the shape of its input is not known", label(node))
        # Unknown sizes are NaN, which propagates.
        known = np.array(sizes, np.float64)[integer_of(node, "start", 0) : integer_of(node, "end", None)]
        return known if np.isnan(known).any() else known.astype(np.int64)


def _widened(value: Array) -> Array:
    """Floating-point numbers in float64; others unchanged. bfloat16 is not a native numpy dtype."""
    return value.astype(np.float64) if value.dtype.kind == "f" or value.dtype.name == "bfloat16" else value


def elem_type_of(values: Array) -> int:
    """The TensorProto.DataType of an array; numpy has several dtypes for text."""
    text = values.dtype.kind in "OUS"
    return int(onnx.TensorProto.STRING if text else onnx.helper.np_dtype_to_tensor_dtype(values.dtype))


def model_of(
    nodes: Sequence[onnx.NodeProto], values: Mapping[str, Array], outputs: Sequence[str],
    versions: Mapping[str, int], **further: Any,
) -> onnx.ModelProto:  # fmt: skip
    """Nodes, in topological order, as a model whose inputs are like `values`."""
    helper = onnx.helper
    given = [helper.make_tensor_value_info(name, elem_type_of(value), value.shape) for name, value in values.items()]
    graph = helper.make_graph(nodes, "nodes", given, [onnx.ValueInfoProto(name=name) for name in outputs])
    imports = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    return helper.make_model(graph, opset_imports=imports, **further)


def computed(nodes: Sequence[onnx.NodeProto], values: Mapping[str, Array], *how: Any) -> list[Any]:
    """Evaluate nodes as `model_of` takes them, by onnx's evaluator. Raises any Exception."""
    from onnx.reference import ReferenceEvaluator  # slow to import

    with np.errstate(all="ignore"):
        return list(ReferenceEvaluator(model_of(nodes, values, *how)).run(None, dict(values)))


# -- shapes at chosen sizes --------------------------------------------------------------------------------------------


class Shapes:
    """The shapes of a main graph where symbolic dimensions of the inputs have the sizes `size_of(axis, name)`.

    Exporters compute the shape operand of a Reshape from other shapes; evaluated at these sizes (`values`), it shows
    which axis holds the tokens. onnx infers shapes one node at a time, from such operands; where it cannot, they are as
    the file declares.
    """

    def __init__(self, view: GraphView, size_of: Callable[[int, str], int], read: Read) -> None:
        self._view, self._symbols = view, {"": 1}
        shapes = {name: kind.shape for name, kind in view.types.items() if kind.shape is not None}
        for tensor in filter(shapes.__contains__, view.inputs):
            shapes[tensor] = tuple(dim or f"{tensor}[{axis}]" for axis, dim in enumerate(shapes[tensor]))
            for axis, dim in enumerate(shapes[tensor]):
                if isinstance(dim, str):
                    self._symbols.setdefault(dim, size_of(axis, dim))
        self._found: dict[str, Sizes] = {name: tuple(map(self._size, shape)) for name, shape in shapes.items()}
        self.of = self._found.get  # None where the rank is unknown
        self.values = Constants(view, read, self.of)
        for node in view.nodes:
            found = self._inferred(node)
            # Operands that do not fit at these sizes, such as a mask that broadcasts at batch 1 only.
            wide = max((self.of(name) or () for name in node.input if node.op_type in BROADCAST), key=len, default=None)
            for name in node.output:
                dims = shapes.get(name)
                declared = None if dims is None else tuple(map(self._size, dims))
                stated = [sizes for sizes in (found.get(name), declared, wide) if sizes is not None]
                if stated:
                    alike = zip(*(sizes for sizes in stated if len(sizes) == len(stated[0])), strict=True)
                    made = tuple(next((size for size in axis if size is not None), None) for axis in alike)
                    self._found[name] = made
                    # Names from inference over the whole model, which knows more operators, resolve later tensors.
                    for dim, size in zip(dims or (), made, strict=False):
                        if isinstance(dim, str) and size:
                            self._symbols.setdefault(dim, size)

    def _size(self, dim: Dim) -> int | None:
        """The size of a dimension, which may be a sum of names, such as `past_sequence_length + 1`."""
        if dim is None or isinstance(dim, int):
            return dim
        terms = {dim: 1} if dim in self._symbols else terms_of(dim)
        known = terms.keys() <= self._symbols.keys()
        return sum(count * self._symbols[name] for name, count in terms.items()) if known else None

    def _inferred(self, node: onnx.NodeProto) -> Mapping[str, Sizes]:
        types, values = {}, {}
        for name in filter(None, node.input):
            elem_type, sizes = self._view.type_of(name).elem_type, self.of(name)
            types[name] = onnx.helper.make_tensor_type_proto(elem_type or onnx.TensorProto.FLOAT, sizes)
            known = self.values.value(name) if elem_type in (onnx.TensorProto.INT64, 0) else None
            if known is not None and known.dtype == np.int64:  # unknown sizes are not
                values[name] = numpy_helper.from_array(known, name)
        try:
            schema = onnx.defs.get_schema(node.op_type, self._view.opsets.get("", 1), node.domain)
            inferred = onnx.shape_inference.infer_node_outputs(schema, node, types, values)
        except Exception:  # noqa: BLE001 - the C++ inference raises bare exceptions on unusual nodes
            return {}
        shapes = ((name, type_of(kind).shape) for name, kind in inferred.items())
        found = {name: tuple(map(self._size, shape)) for name, shape in shapes if shape is not None}
        sides = found.get(node.output[0]), *map(self.of, node.input[:1])
        entries = [prod(size or 0 for size in sizes or ()) for sizes in sides]
        fits = entries[0] == entries[-1] if node.op_type == "Reshape" else node.op_type != "Expand" or entries[0]
        return found if fits else {}


# -- the table of operators on float64: small constants, and activation regions on a grid ------------------------------

_REALS: Any = SimpleNamespace(arithmetic=Floats(), opsets={"": onnx.defs.onnx_opset_version()})


def evaluate(node: onnx.NodeProto, args: Sequence[Array | None]) -> Array:
    """Apply an elementwise node to float64 inputs, in float64; truth values are 0 and 1."""
    if node.op_type in CASTS:  # exact: the proof measures rounding
        return np.asarray(args[0], np.float64)
    made = outputs(node, [None if arg is None else Value(np.asarray(arg, np.float64)) for arg in args])[0]
    return np.asarray(made.entries if isinstance(made, Value) else made, np.float64)


def outputs(node: onnx.NodeProto, operands: Sequence[Any]) -> Sequence[Any]:
    """The outputs of a node on arrays, if it moves data, or on values. Raises KeyError for an unknown operator."""
    if (found := row(*key_of(node))) is None:
        raise KeyError(node.op_type)
    with np.errstate(all="ignore"):
        return tuple_of(found(Call(node, node.op_type, attributes(node), _REALS), *operands))

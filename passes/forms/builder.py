"""A builder of nodes in the arithmetic of one conversion: tensors, shapes, and the softmax of attention.

Shapes are computed at run time, so any batch and any number of tokens work. Operators are those of opset 11; methods
take care of attributes that later opsets turned into inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike

from passes.conversion import Conversion
from passes.programs.program import LARGEST_QUERY
from rewriter.graph.edit import Replacement
from rewriter.graph.surgeon import Constant, Fragment, Tensor, Variable
from rewriter.graph.view import GraphView, needed

SMALLEST_OPSET = 11  # of Slice with computed bounds, and Range
_AXES_ARE_INPUTS = 13
DOMAIN = "attnonly"  # of the model-local functions; prefix of the metadata keys
BLOCK_KEY = f"{DOMAIN}.block"  # metadata key of a node's block
LARGEST_FLOAT32_QUERY = 2.0**60  # queries are clipped: beyond it every weight is 0 or 1


class Builder(Fragment):
    """A fragment whose numbers have the type `compute_type`; the members `wanted` of `EXPOSED` become outputs."""

    def __init__(self, prefix: str, *, opset: int, compute_type: int, wanted: Sequence[str] = ()) -> None:
        super().__init__(prefix)
        self.compute_type = compute_type
        self.exposed: list[onnx.ValueInfoProto] = []
        self.opset = opset
        self._wanted = wanted
        self._known: dict[tuple[str, np.dtype[Any]], Constant] = {}

    @classmethod
    def of(cls, view: GraphView, conversion: Conversion) -> Builder:
        name, opset = conversion.block.name, view.opsets.get("", 1)
        wanted = conversion.options.exposed(name)
        return cls(f"{name}/heads", opset=opset, compute_type=conversion.compute_type, wanted=wanted)

    def typed(self, compute_type: int) -> Builder:
        other = copy(self)
        other.compute_type = compute_type
        return other

    def within(self, name: str) -> Builder:
        inner = copy(self)
        inner.prefix = self.qualified(name) if name else self.prefix
        return inner

    @property
    def dtype(self) -> type[np.floating]:
        return np.float64 if self.compute_type == onnx.TensorProto.DOUBLE else np.float32

    def expose(self, kind: str, tensor: Tensor, sizes: Sequence[int | None]) -> None:
        """Expose a tensor of this builder's type if the user wants its kind, a member of `EXPOSED`."""
        if kind in self._wanted:
            self.exposed.append(onnx.helper.make_tensor_value_info(str(tensor.name), self.compute_type, sizes))

    def numbers(self, name: str, values: ArrayLike) -> Constant:
        """A constant in the type of the arithmetic, created once per name."""
        return self._once(name, np.asarray(values, dtype=self.dtype))

    def integers(self, *values: int) -> Constant:
        name = "integers_" + "_".join(str(value).replace("-", "minus") for value in values)
        return self._once(name, np.asarray(values, dtype=np.int64))

    def _once(self, name: str, values: np.ndarray) -> Constant:
        key = self.qualified(name), values.dtype
        if key not in self._known:
            self._known[key] = self.constant(name, values)
        return self._known[key]

    def renamed(self, tensor: Variable, name: str) -> Variable:
        tensor.name = self.qualified(name)
        return tensor

    def read(self, tensor: str, elem_type: int, name: str) -> Tensor:
        return self.cast(self.tensor(tensor), elem_type, name)

    def add(self, x: Tensor, y: Tensor, name: str) -> Variable:
        return self.node("Add", [x, y], name)

    def sub(self, x: Tensor, y: Tensor, name: str) -> Variable:
        return self.node("Sub", [x, y], name)

    def mul(self, x: Tensor, y: Tensor, name: str) -> Variable:
        return self.node("Mul", [x, y], name)

    def div(self, x: Tensor, y: Tensor, name: str) -> Variable:
        return self.node("Div", [x, y], name)

    def cast(self, tensor: Tensor, elem_type: int, name: str) -> Tensor:
        same = elem_type == self.compute_type
        return tensor if same else self.node("Cast", [tensor], name, to=int(self.compute_type))

    def write(self, tensor: Tensor, output: str, elem_type: int) -> None:
        given: dict[str, Any] = {} if elem_type == self.compute_type else {"to": int(elem_type)}
        self.node("Cast" if given else "Identity", [tensor], "result", output=output, **given)

    @property
    def has_allowzero(self) -> bool:
        """Whether a 0 in the shape of a Reshape can be a size."""
        return self.opset >= 14

    def reshape(self, tensor: Tensor, shape: Tensor | Sequence[int], name: str, *, zeros: bool = False) -> Variable:
        """Reshape to a computed shape, or to numbers; 0 keeps an axis unless `zeros` are sizes, -1 is inferred."""
        given: dict[str, Any] = {"allowzero": 1} if zeros and self.has_allowzero else {}
        made = self.integers(*shape) if isinstance(shape, Sequence) else shape
        return self.node("Reshape", [tensor, made], name, **given)

    def unsqueeze(self, tensor: Tensor, axis: int, name: str) -> Variable:
        if self.opset < _AXES_ARE_INPUTS:
            return self.node("Unsqueeze", [tensor], name, axes=[axis])
        return self.node("Unsqueeze", [tensor, self.integers(axis)], name)

    def transpose(self, tensor: Tensor, order: Sequence[int], name: str) -> Variable:
        return self.node("Transpose", [tensor], name, perm=list(order))

    def concat(self, tensors: Sequence[Tensor], axis: int, name: str) -> Variable:
        return self.node("Concat", tensors, name, axis=axis)

    def rows(self, tensor: Tensor, start: int, stop: int | Tensor, axis: int, name: str) -> Variable:
        """A slice of one axis; `stop` may be a 1-D tensor of one integer."""
        end = self.integers(stop) if isinstance(stop, int) else stop
        return self.node("Slice", [tensor, self.integers(start), end, self.integers(axis)], name)

    def total(self, terms: Sequence[Tensor], name: str, last: str = "") -> Tensor:
        """The sum of terms, called `last`, or `name`."""
        # Not Sum: onnxruntime's CPU kernel is single-threaded and copies, so a sum of three takes three times as long.
        made = terms[0]
        for number, term in enumerate(terms[1:], start=1):
            made = self.add(made, term, f"{name}_{number}" if number < len(terms) - 1 else last or name)
        return made

    def split(self, tensor: Tensor, sizes: tuple[int, int], names: tuple[str, str]) -> tuple[Variable, Variable]:
        """The last axis of a tensor of four axes in two parts."""
        given: dict[str, Any] = {"split": list(sizes)} if self.opset < _AXES_ARE_INPUTS else {}
        inputs = [tensor] if given else [tensor, self.integers(*sizes)]
        first = self.node("Split", inputs, names[0], further=names[1:], axis=3, **given)
        return first, self.tensor(self.qualified(names[1]))

    def sizes(self, tensor: Tensor, start: int, stop: int, name: str) -> Variable:
        """Some of the sizes of a tensor, as a 1-D tensor."""
        return self.rows(self.node("Shape", [tensor], f"{name}_of"), start, stop, 0, name)

    def entry(self, inputs: Mapping[str, Tensor], name: str, j: int) -> Variable:
        index = self.constant(f"{name}_index_{j}", np.asarray(j, dtype=np.int64))
        return self.node("Gather", [inputs[name], index], f"{name}_{j}", axis=0)

    def clipped(self, tensor: Tensor, ends: tuple[float, float], name: str) -> Variable:
        if self.opset < 11:
            return self.node("Clip", [tensor], name, min=ends[0], max=ends[1])
        bounds = [self.numbers(f"{end}_{name}", value) for end, value in zip(("lowest", "highest"), ends, strict=True)]
        return self.node("Clip", [tensor, *bounds], name)

    def bounded(self, query: Tensor, name: str) -> Variable:
        """A query clipped to +-2^60 (float64: 2^500), where weights are 0 or 1: infinite logits would give NaN."""
        limit = LARGEST_QUERY if self.dtype == np.float64 else LARGEST_FLOAT32_QUERY
        return self.clipped(query, (-limit, limit), name)

    def paired(self, query: Tensor, name: str, *, one_first: bool = False) -> Variable:
        """The query (y, 1), or (1, y), whose 1 multiplies the offsets of the keys."""
        shape = self.node("Shape", [query], f"{name}_shape")
        pair = [query, self.node("Expand", [self.numbers(f"{name}_one", 1.0), shape], f"{name}_ones")]
        return self.concat(pair[::-1] if one_first else pair, 3, name)

    def padded(self, tensor: Tensor, before: int, after: int, name: str) -> Variable:
        """Columns of zeros before and after a tensor of three axes."""
        return self.node("Pad", [tensor, self.integers(0, 0, before, 0, 0, after)], name)

    def scores(self, query: Tensor, key: Tensor, suffix: str, kind: str = "") -> Variable:
        """query key^T, [batch, heads, queries, keys]."""
        turned = self.transpose(key, (0, 1, 3, 2), f"key_transposed{suffix}")
        return self.node("MatMul", [query, turned], f"{kind}scores{suffix}")

    def pattern(self, scores: Tensor, suffix: str, sizes: Sequence[int | None] = (None, None, None, None)) -> Variable:
        """The softmax of scores of `sizes`."""
        self.expose("scores", scores, sizes)
        result = self.node("Softmax", [scores], f"pattern{suffix}", axis=3)
        self.expose("pattern", result, sizes)
        return result


def replacement(b: Builder, conversion: Conversion, functions: Sequence[onnx.FunctionProto] = ()) -> Replacement:
    """The built nodes, and the functions that they call, in place of the nodes that compute the same output."""
    whole = conversion.projections
    output = conversion.block.output if whole is None else whole.result
    metadata = {
        BLOCK_KEY: conversion.block.name,
        f"{DOMAIN}.form": conversion.form,
        f"{DOMAIN}.activation": conversion.block.identified.label,
        f"{DOMAIN}.program": conversion.program.name,
        f"{DOMAIN}.max_error": f"{conversion.max_error:.3g}",
    }
    every = b.nodes(metadata)
    # The values of heads with constant values are built but never read.
    nodes = tuple(every[place] for place in needed(every, [output]))
    read = {name for node in nodes for name in node.input}
    initializers = tuple(tensor for tensor in b.initializers() if tensor.name in read)
    shapes = list[Replacement]()
    if whole is not None:
        for name in whole.shapes:
            part = Builder(b.qualified(f"shape_{len(shapes)}"), opset=b.opset, compute_type=b.compute_type)
            shape = part.node("Shape", [part.tensor(whole.query.data)], "input_shape")
            sizes = [part.rows(shape, 0, -1, 0, "leading"), part.integers(whole.query.out_features)]
            part.concat(sizes, 0, "shape").name = name
            shapes.append(Replacement(name, tuple(part.nodes(metadata)), tuple(part.initializers())))
    return Replacement(output, nodes, initializers, tuple(functions), tuple(shapes), tuple(b.exposed))

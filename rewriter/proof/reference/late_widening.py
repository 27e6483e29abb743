"""Evaluate a part of a model in float64 without widening a very large weight as a whole.

Segments bound the weights of a part, but a single weight may exceed any bound: an embedding table, the projection to
the vocabulary. Such a part is one operator on that weight, and the operators in `_CHUNKED` widen it in chunks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewriter.arrays import Array
from rewriter.files.load import LoadedModel, read_tensor
from rewriter.graph.segments import bytes_of
from rewriter.graph.types import FLOATS
from rewriter.graph.view import ONNX_DOMAINS, attributes
from rewriter.proof.reference.float64 import Reference, open_reference, widened
from rewriter.proof.reference.operators.table import Operator

_CHUNK = 2**22
"""Number of entries of a very large weight that are widened at a time; 32 MiB in float64."""

Feeds = Mapping[str, Array]


def open_wide(part: LoadedModel, large: int, own: Mapping[tuple[str, str], Operator] | None = None) -> Reference:
    """Load the float64 evaluation of a part.

    Args:
        part: a part of a model; it is not changed.
        large: size in bytes above which a weight is widened in chunks, if its operator allows that.
        own: the caller's operators, as in `open_reference`.

    Raises:
        NoReference: the part has no float64 evaluation.
        ModelError: a weight cannot be read.
    """
    chunked = _chunked(part, large)
    # No limit on the size: the caller cut the part so that it fits.
    return Reference(chunked) if chunked else open_reference(part.proto, part.base_dir, own, largest=sys.maxsize)


def _product(left: Array, weight: Array) -> Array:
    """`left @ weight` for a weight [in, out] in its own type, a block of columns at a time."""
    # As one matrix: numpy would read a block once for every sequence of a batch.
    rows = left.reshape(-1, weight.shape[0])
    result = np.empty((len(rows), weight.shape[1]), np.float64)
    step = max(_CHUNK // weight.shape[0], 1)
    for start in range(0, weight.shape[1], step):
        result[:, start : start + step] = rows @ weight[:, start : start + step].astype(np.float64)
    return result.reshape(*left.shape[:-1], weight.shape[1])


def _matmul(_options: Mapping[str, Any], left: Array, weight: Array) -> Array:
    return _product(left, weight)


def _gemm(options: Mapping[str, Any], left: Array, weight: Array, bias: Array | None = None) -> Array:
    left = left.T if options.get("transA") else left
    result = _product(left, weight.T if options.get("transB") else weight)
    result *= options.get("alpha", 1.0)
    return result if bias is None else result + options.get("beta", 1.0) * bias


def _gather(_options: Mapping[str, Any], table: Array, rows: Array) -> Array:
    return table[rows].astype(np.float64)  # only the selected rows are widened


_CHUNKED: Mapping[str, tuple[int, Callable[..., Array]]] = {
    "MatMul": (1, _matmul),
    "Gemm": (1, _gemm),
    "Gather": (0, _gather),
}
"""Maps an operator to the index of its weight operand, and to a function that takes the weight in its own type."""


@dataclass(frozen=True, eq=False)
class _Chunked:
    """One operator on one very large weight."""

    name: str
    operator: Callable[..., Array]
    options: Mapping[str, Any]
    operands: tuple[str, ...]
    constants: Feeds
    output: str

    def by(self) -> Iterable[tuple[str, str]]:
        return [("numpy, in chunks,", self.name)]

    def run(self, feeds: Feeds) -> dict[str, Array]:
        known = {**self.constants, **feeds}
        with np.errstate(all="ignore"):
            return {self.output: self.operator(self.options, *(known[name] for name in self.operands if name))}


def _chunked(part: LoadedModel, large: int) -> _Chunked | None:
    """The part as one operator on a float matrix larger than `large`; None if it is anything else.

    A Transpose of the weight may precede the operator: PyTorch exports a linear layer, and tied embeddings, that way.
    """
    graph = part.proto.graph
    if not graph.node:  # it gives inputs or constants as they are
        return None
    *before, node = graph.node
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    if node.op_type not in _CHUNKED or node.domain not in ONNX_DOMAINS:
        return None
    slot, operator = _CHUNKED[node.op_type]
    options = attributes(node)
    # `_gather` selects rows only.
    if len(node.output) != 1 or [value.name for value in graph.output] != list(node.output) or options.get("axis"):
        return None
    name, transposed = node.input[slot], False
    if len(before) == 1 and before[0].op_type == "Transpose" and before[0].output[0] == name:
        name, transposed = before[0].input[0], True
    elif before:
        return None
    tensor = initializers.get(name)
    if tensor is None or len(tensor.dims) != 2 or tensor.data_type not in FLOATS or bytes_of(tensor) <= large:
        return None
    # The weight stays in its own type; everything else is small and widened as usual.
    weight = read_tensor(part, tensor)
    constants = {other: widened(read_tensor(part, found)) for other, found in initializers.items() if other != name}
    constants[node.input[slot]] = weight.T if transposed else weight
    return _Chunked(node.op_type, operator, options, tuple(node.input), constants, node.output[0])

"""Equality of nodes and tensors across two models.

Node names, doc strings, metadata and the order of attributes do not matter. Control-flow bodies are compared as graphs
of their own (`rewriter.proof.unchanged.model`). Tensors must agree bit for bit, wherever their bytes are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx

from rewriter.files.load import LoadedModel, read_tensor
from rewriter.files.walk import is_external
from rewriter.graph.view import ONNX_DOMAINS, subgraphs

Models: TypeAlias = tuple[LoadedModel, LoadedModel]
"""The models that the two sides of a comparison belong to."""

OperatorKey: TypeAlias = tuple[str, str, str]

Functions: TypeAlias = Mapping[OperatorKey, onnx.FunctionProto]
"""The local functions of a model, keyed by the operators that they define."""

_PIECE = 2**24

_BODIES = {onnx.AttributeProto.GRAPH: "g", onnx.AttributeProto.GRAPHS: "graphs"}


def operator_key(thing: onnx.NodeProto | onnx.FunctionProto) -> OperatorKey:
    """Domain, name and overload of a node's operator, or of the operator that a local function defines."""
    name = thing.op_type if isinstance(thing, onnx.NodeProto) else thing.name
    return "" if thing.domain in ONNX_DOMAINS else thing.domain, name, thing.overload


def same_node(old: onnx.NodeProto, new: onnx.NodeProto, models: Models) -> bool:
    """Whether two nodes apply the same operator to the same tensors; control-flow bodies are not compared."""
    return (
        operator_key(old) == operator_key(new)
        and list(old.input) == list(new.input)
        and list(old.output) == list(new.output)
        and dict(subgraphs(old)).keys() == dict(subgraphs(new)).keys()
        and same_attributes(old.attribute, new.attribute, models)
    )


def same_attributes(old: Sequence[onnx.AttributeProto], new: Sequence[onnx.AttributeProto], models: Models) -> bool:
    """Whether both lists hold the same attributes: names, types, values, references to a function's attributes."""
    pairs = list(zip(*(sorted(each, key=lambda attribute: attribute.name) for each in (old, new)), strict=False))
    return len(old) == len(new) and all(
        _bare(left) == _bare(right) and same_tensors(_tensors(left), _tensors(right), models) for left, right in pairs
    )


def same_tensors(old: Sequence[onnx.TensorProto], new: Sequence[onnx.TensorProto], models: Models) -> bool:
    """Whether tensors are pairwise equal. References to the same bytes of one file are equal without being read.

    Raises:
        ModelError: external data cannot be read.
    """
    return len(old) == len(new) and all(_same_tensor(*pair, models) for pair in zip(old, new, strict=True))


def _same_tensor(old: onnx.TensorProto, new: onnx.TensorProto, models: Models) -> bool:
    if list(old.dims) != list(new.dims) or old.data_type != new.data_type:
        return False
    # Equal references mean equal bytes only if they are resolved in the same directory.
    if old == new and (not is_external(old) or models[0].base_dir == models[1].base_dir):
        return True
    if old.data_type == onnx.TensorProto.STRING:
        return list(old.string_data) == list(new.string_data)
    # As bytes: NaN payloads and the sign of zero count, and inline and external storage compare alike.
    left, right = (
        np.ascontiguousarray(read_tensor(model, tensor)) for model, tensor in zip(models, (old, new), strict=True)
    )
    return left.nbytes == right.nbytes and all(map(np.array_equal, _pieces(left), _pieces(right)))


def _pieces(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """The bytes of an array, some at a time: a copy of the largest weights would be the peak of the proof's memory."""
    flat = array.ravel().view(np.uint8)
    return (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))


def _tensors(attribute: onnx.AttributeProto) -> list[onnx.TensorProto]:
    plain = [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
    return [*plain, *(part for sparse in _sparse(attribute) for part in (sparse.values, sparse.indices))]


def _sparse(attribute: onnx.AttributeProto) -> list[onnx.SparseTensorProto]:
    return [*([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []), *attribute.sparse_tensors]


def _bare(attribute: onnx.AttributeProto) -> bytes:
    """All but doc string, bodies and tensor values, as bytes: NaN then equals NaN, and -0.0 differs from 0.0."""
    bare = onnx.AttributeProto()
    bare.CopyFrom(attribute)
    for sparse in _sparse(bare):
        sparse.ClearField("values")
        sparse.ClearField("indices")
    for field in ("doc_string", "t", "tensors", *filter(None, [_BODIES.get(attribute.type)])):
        bare.ClearField(field)
    data: bytes = bare.SerializeToString(deterministic=True)
    return data

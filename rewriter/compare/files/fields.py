"""Compare what two models declare: opsets, inputs, outputs, local functions, metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from rewriter.compare.files.tensors import digest, kind_of
from rewriter.files.load import LoadedModel
from rewriter.files.walk import is_external, iter_nodes, iter_tensors
from rewriter.text import decoded


@dataclass(frozen=True)
class FieldChange:
    """One entry that differs.

    Attributes:
        what: the kind of entry: `opset`, `input`, `metadata` and so on.
        name: its name.
        a: its value in A; None if A lacks it.
        b: its value in B; None if B lacks it.
    """

    what: str
    name: str
    a: str | None
    b: str | None


def fields(a: LoadedModel, b: LoadedModel) -> Iterator[FieldChange]:
    """Opsets and local functions that differ.

    Raises:
        ModelError: external data cannot be read.
    """
    used = _used(a.proto) | _used(b.proto)
    yield from (change for change in _opsets(a.proto, b.proto) if change.name in used)
    ours, theirs = ({_function_name(item): item for item in m.proto.functions} for m in (a, b))
    for name in sorted(ours.keys() | theirs.keys()):
        sides = (a, ours.get(name)), (b, theirs.get(name))
        values = [None if item is None else _function_value(model, item) for model, item in sides]
        if values[0] != values[1]:
            counts = (None if item is None else f"{len(item.node)} nodes" for _, item in sides)
            yield FieldChange("function", name, *counts)


def declared(scope: str, a: onnx.GraphProto, b: onnx.GraphProto) -> Iterator[FieldChange]:
    """Inputs and outputs that differ, and shapes of sparse weights that differ.

    In the main graph, whose `scope` is empty, inputs and outputs are identified by name, and their order counts. In a
    control-flow body they are identified by position, so only their number can differ.
    """
    for what in ("input", "output"):
        ours, theirs = (_types(graph, what) for graph in (a, b))
        if scope:
            yield from _changes(f"{what}s", *({scope: str(len(side))} for side in (ours, theirs)))
        else:
            yield from _changes(what, ours, theirs)
            if ours.keys() == theirs.keys():
                yield from _changes("order", *({f"{what}s": ", ".join(side)} for side in (ours, theirs)))
    yield from _changes("sparse weight", *(_sparse_dims(scope, graph) for graph in (a, b)))


def _types(graph: onnx.GraphProto, what: str) -> dict[str, str]:
    if what == "output":
        return {value.name: _type_text(value) for value in graph.output}
    given = {tensor.name for tensor in graph.initializer} | {tensor.values.name for tensor in graph.sparse_initializer}
    defaults = {value.name: " with a default" if value.name in given else "" for value in graph.input}
    return {value.name: _type_text(value) + defaults[value.name] for value in graph.input}


def _sparse_dims(scope: str, graph: onnx.GraphProto) -> dict[str, str]:
    prefix = f"{scope}/" if scope else ""
    return {f"{prefix}{tensor.values.name}": str(list(tensor.dims)) for tensor in graph.sparse_initializer}


def _function_name(function: onnx.FunctionProto) -> str:
    return f"{_domain(function.domain)}::{function.name}{f':{function.overload}' if function.overload else ''}"


def _function_value(model: LoadedModel, function: onnx.FunctionProto) -> bytes:
    """A function with all of its data, external data included."""
    tensors = (tensor for tensor in iter_tensors(onnx.ModelProto(functions=[function])) if is_external(tensor))
    stated: bytes = function.SerializeToString(deterministic=True)
    return stated + b"".join(digest(model, tensor) for tensor in tensors)


def remarks(a: onnx.ModelProto, b: onnx.ModelProto) -> Iterator[FieldChange]:
    """Differences that do not affect the computation: metadata, producer, IR version, annotations, unused opsets."""
    used = _used(a) | _used(b)
    yield from (change for change in _opsets(a, b) if change.name not in used)
    yield from _changes("annotation", *(_annotations(m.graph) for m in (a, b)))
    yield from _changes("metadata", *({item.key: item.value for item in m.metadata_props} for m in (a, b)))
    yield from _changes("model", *(_about(m) for m in (a, b)))


def _opsets(a: onnx.ModelProto, b: onnx.ModelProto) -> list[FieldChange]:
    versions = [{_domain(item.domain): str(item.version) for item in model.opset_import} for model in (a, b)]
    return list(_changes("opset", *versions))


def _used(model: onnx.ModelProto) -> set[str]:
    """The operator domains of all nodes."""
    nodes = [*iter_nodes(model.graph.node), *iter_nodes(node for item in model.functions for node in item.node)]
    return {_domain(node.domain) for node in nodes}


def _annotations(graph: onnx.GraphProto) -> dict[str, str]:
    """Quantisation annotations of tensors, which no operator reads."""
    said = {
        entry.tensor_name: sorted(f"{item.key}: {item.value}" for item in entry.quant_parameter_tensor_names)
        for entry in graph.quantization_annotation
    }
    return {name: ", ".join(parameters) for name, parameters in said.items()}


def _about(model: onnx.ModelProto) -> dict[str, str]:
    producer = f"{decoded(model.producer_name)} {decoded(model.producer_version)}".strip()
    said = {"IR version": str(model.ir_version), "producer": producer, "graph": model.graph.name}
    return {name: value for name, value in said.items() if value}


def _changes(what: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[FieldChange]:
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            sides = (None if name not in side else decoded(side[name]) for side in (ours, theirs))
            yield FieldChange(what, decoded(name), *sides)


def _domain(domain: str) -> str:
    return domain or "ai.onnx"


def _type_text(value: onnx.ValueInfoProto) -> str:
    held = value.type.WhichOneof("value")
    if held != "tensor_type":
        return (held or "of unknown type").removesuffix("_type")
    kind = value.type.tensor_type
    dims: Sequence[str] = [
        decoded(dim.dim_param) or (str(dim.dim_value) if dim.HasField("dim_value") else "?") for dim in kind.shape.dim
    ]
    name = kind_of(onnx.TensorProto(data_type=kind.elem_type)).partition("[")[0]
    return f"{name}[{', '.join(dims)}]" if kind.HasField("shape") else name

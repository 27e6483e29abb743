"""What two models say of themselves: opsets, inputs, outputs, local functions, metadata.

Comes in: two models. Goes out: `FieldChange`s. Used by `rewriter.differences.models`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from rewriter.differences.tensors import kind_of
from rewriter.files.walk import iter_nodes


@dataclass(frozen=True)
class FieldChange:
    """One entry that differs; the side that lacks it has None.

    Attributes:
        what: the kind of entry: `opset`, `input`, `metadata` and so on.
        name: which one.
        a: as A has it.
        b: as B has it.
    """

    what: str
    name: str
    a: str | None
    b: str | None


def fields(a: onnx.ModelProto, b: onnx.ModelProto) -> Iterator[FieldChange]:
    """Opsets, inputs, outputs and local functions that differ."""
    used = _used(a) | _used(b)
    yield from (change for change in _opsets(a, b) if change.name in used)
    yield from _changes("input", *({value.name: _type_text(value) for value in m.graph.input} for m in (a, b)))
    yield from _changes("output", *({value.name: _type_text(value) for value in m.graph.output} for m in (a, b)))
    texts = [
        {
            f"{item.domain}::{item.name}": (item.SerializeToString(deterministic=True), len(item.node))
            for item in m.functions
        }
        for m in (a, b)
    ]
    for name in sorted(texts[0].keys() | texts[1].keys()):
        ours, theirs = (side.get(name) for side in texts)
        if ours != theirs:
            yield FieldChange("function", name, *(None if it is None else f"{it[1]} nodes" for it in (ours, theirs)))


def remarks(a: onnx.ModelProto, b: onnx.ModelProto) -> Iterator[FieldChange]:
    """Metadata, producer, IR version, and opsets of domains that no node uses, where they differ."""
    used = _used(a) | _used(b)
    yield from (change for change in _opsets(a, b) if change.name not in used)
    yield from _changes("metadata", *({item.key: item.value for item in m.metadata_props} for m in (a, b)))
    yield from _changes("model", *(_about(m) for m in (a, b)))


def _opsets(a: onnx.ModelProto, b: onnx.ModelProto) -> list[FieldChange]:
    versions = [{_domain(item.domain): str(item.version) for item in model.opset_import} for model in (a, b)]
    return list(_changes("opset", *versions))


def _used(model: onnx.ModelProto) -> set[str]:
    """The operator domains of all nodes."""
    nodes = [*iter_nodes(model.graph.node), *iter_nodes(node for item in model.functions for node in item.node)]
    return {_domain(node.domain) for node in nodes}


def _about(model: onnx.ModelProto) -> dict[str, str]:
    producer = f"{model.producer_name} {model.producer_version}".strip()
    said = {"IR version": str(model.ir_version), "producer": producer, "graph": model.graph.name}
    return {name: value for name, value in said.items() if value}


def _changes(what: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[FieldChange]:
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            yield FieldChange(what, name, ours.get(name), theirs.get(name))


def _domain(domain: str) -> str:
    return domain or "ai.onnx"


def _type_text(value: onnx.ValueInfoProto) -> str:
    held = value.type.WhichOneof("value")
    if held != "tensor_type":
        return (held or "of unknown type").removesuffix("_type")
    kind = value.type.tensor_type
    dims: Sequence[str] = [
        dim.dim_param or (str(dim.dim_value) if dim.HasField("dim_value") else "?") for dim in kind.shape.dim
    ]
    name = kind_of(onnx.TensorProto(data_type=kind.elem_type)).partition("[")[0]
    return f"{name}[{', '.join(dims)}]" if kind.HasField("shape") else name

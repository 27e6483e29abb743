"""Load a model without trusting it: its structure, on which all other code relies, and its external references.

The path may be a symbolic link, because the Hugging Face cache consists of links. External data is then resolved beside
the link, and the data files themselves may only be links inside such a cache.

onnx's checker sees names, operators and small attributes, no types and no weights; the rest is checked here:

- It has a graph with at least one output, an IR version, and one operator set per domain.
- Dims are non-negative and amount to less than 2**63 bytes, and inline data has exactly the length that they need.
- Operators that onnx does not know for the operator set have the inputs that they need.
- Subgraphs nest at most `walk.MAX_DEPTH` deep. Local functions are unique, not recursive, and bounded in depth and
  size: onnxruntime inlines them, and n functions that each call the previous one twice grow to 2**n nodes.
"""

import difflib
import math
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from rewriter.errors import ModelError, UsageError
from rewriter.files.tensors import (
    ExternalRef,
    byte_count,
    check_inline,
    collect_external,
    count_elements,
    element_type,
    malformed,
    open_inside,
    read_external,
    through_cache,
    without_weights,
)
from rewriter.graph.edit import bytes_of, inlined, set_nodes
from rewriter.graph.view import ONNX_DOMAINS, GraphView, all_views, key_of, opsets
from rewriter.graph.view import Path as GraphPath
from rewriter.graph.walk import is_external, iter_all, iter_nodes, iter_sparse, iter_tensors, reads, subgraphs
from rewriter.text import counted, one_line, quoted

MAX_FILE = 2**31 - 1  # protobuf cannot read a message of 2 GiB or more
SMALL_TENSOR = 2**13  # bytes: 1,024 numbers of 64 bits; an external tensor as small is read with the model
_MAX_SMALL_BYTES = 2**28  # of all of them: ranges may overlap, so that a small file names gigabytes
_MAX_DENSE = 2**30  # of all sparse tensors once they are expanded

_BESIDE = "with external data (onnx.save(..., save_as_external_data=True))"
TOO_LARGE = f"the model holds 2 GiB or more inline, which protobuf cannot write; save it {_BESIDE} and rewrite that"
_EXPORT = "export the model to ONNX first: optimum-cli export onnx --model FOLDER NEW_FOLDER"

# Signatures of files that people pass by mistake: (offset, bytes, what it is and what to do).
_SIGNATURES = (
    (0, b"version https://git-lfs", "a Git LFS pointer, not the model; run `git lfs pull` in its repository"),
    (0, b"PK\x03\x04", "a zip archive (or a PyTorch checkpoint); extract or export the .onnx model from it"),
    (0, b"\x1f\x8b", "gzip-compressed; decompress it first"),
    (4, b"ORTM", "in the ORT format, which cannot be rewritten; pass the .onnx model it was made from"),
    (4, b"TFL3", "a TensorFlow Lite model; convert it to ONNX first"),
    (0, b"\x89HDF", "an HDF5 file; export the model to ONNX first"),
    (8, b'{"', f"a safetensors file, weights without a graph; {_EXPORT}"),
)


@dataclass(frozen=True)
class LoadedModel:
    """A checked model and where it came from."""

    proto: onnx.ModelProto
    path: Path | None  # absolute path as given (a link is not followed); None for a proto in memory
    base_dir: Path | None  # of external data, `path.parent` or the cache directory that its links stay in
    external: tuple[ExternalRef, ...]  # all references to other files, wherever a model may have a tensor
    file_size: int  # in bytes; for a proto in memory the size that it would have
    mapped: bool = False  # whether `proto` is not the file's: changed, or referring to weights in it or behind links
    fallbacks: tuple[onnx.FunctionProto, ...] = ()  # functions that onnxruntime never runs (`overridden`)
    lazy: bool = False  # whether `read_tensor` maps external data instead of copying it

    @cached_property
    def views(self) -> Mapping[GraphPath, GraphView]:
        """The indices of its graphs; that of the main one is at ()."""
        return {view.path: view for view in all_views(self.proto)}

    @cached_property
    def inlined(self) -> "LoadedModel":
        """The model without its local functions; itself without any. Raises as onnx's inliner."""
        return self.with_proto(inlined(self.proto)) if self.proto.functions else self

    def with_proto(self, proto: onnx.ModelProto) -> "LoadedModel":
        """A changed model beside the same external data; itself if that is its own proto."""
        return self if proto is self.proto else replace(self, proto=proto, mapped=True)

    def complete(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """A model built from this one, as written: a copy with the fallbacks, if any."""
        if self.fallbacks:
            proto = deepcopy(proto)
            proto.functions.extend(self.fallbacks)
        return proto

    @property
    def size(self) -> int:
        """In bytes, with the external ranges."""
        return self.file_size + external_bytes(self.external)


class IrModel(Protocol):
    """A model of the onnx_ir package."""

    @property
    def opset_imports(self) -> Any: ...


Source = str | os.PathLike[str] | bytes | onnx.ModelProto | IrModel  # a path, the bytes of a file, or a model


def load_model(source: Source, *, mapped: bool = False) -> LoadedModel:
    """Load and check a model. Raises ModelError.

    A proto in memory is used without a copy unless it has fallbacks, and may not have external data, since there is no
    directory to resolve it in. The main graph of a file is sorted; an unsorted proto in memory is refused, because it
    belongs to the caller. If `mapped`, the large weights of a file stay there, unless the rules for external data
    refuse that (a link, a strange name).
    """
    if not isinstance(source, (str, os.PathLike)):
        proto = _in_memory(source)
        check_structure(proto)
        collect_external(proto, None)
        if proto is source and (any(iter_sparse(proto)) or any(map(overridden, proto.functions))):
            proto = deepcopy(proto)
        _write_out_sparse(proto, None)
        try:
            size = int(proto.ByteSize())
        except (EncodeError, ValueError) as error:
            raise ModelError(TOO_LARGE) from error
        return LoadedModel(proto, None, None, (), size, fallbacks=_without_fallbacks(proto))
    # Neither resolved nor normalised: either could change the directory in which external data is looked up.
    path = Path(source).absolute()
    if mapped:
        try:  # whether the rules for external data allow a model to refer to its own file
            open_inside(path.parent, path.name, "").close()
        except ModelError:
            mapped = False
    data = _read(path)
    proto = _parse_model(data, quoted(path), (without_weights(data, path.name) if mapped else None) or data)
    file_size = len(data)
    del data  # up to 2 GiB
    check_structure(proto)
    base_dir = through_cache(proto, path.parent)
    external = collect_external(proto, base_dir)
    _read_small(proto, base_dir)
    _write_out_sparse(proto, base_dir)
    others = tuple(ref for ref in external if ref.path != path) if mapped else external
    elsewhere = len(others) < len(external) or base_dir != path.parent
    return LoadedModel(proto, path, base_dir, others, file_size, elsewhere, _without_fallbacks(proto))


def _without_fallbacks(proto: onnx.ModelProto) -> tuple[onnx.FunctionProto, ...]:
    """Remove, in place, the functions whose bodies onnxruntime never runs."""
    found = tuple(deepcopy(function) for function in proto.functions if overridden(function))
    for function in found:
        proto.functions.remove(function)
    return found


def _read_small(proto: onnx.ModelProto, base_dir: Path) -> None:
    """Read small external tensors, keeping their references, which `as_stored` restores."""
    left = _MAX_SMALL_BYTES
    for tensor in iter_tensors(proto):
        if not is_external(tensor):
            tensor.ClearField("external_data")  # meaningless for inline data
        elif byte_count(tensor) <= min(SMALL_TENSOR, left):
            left -= byte_count(tensor)
            tensor.raw_data = read_external(tensor, base_dir).tobytes()
            tensor.data_location = onnx.TensorProto.DEFAULT


def as_stored(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with references instead of the small tensors that `load_model` read from other files."""
    if not any(tensor.external_data and not is_external(tensor) for tensor in iter_tensors(proto)):
        return proto
    stored = deepcopy(proto)
    for tensor in iter_tensors(stored):
        if tensor.external_data and not is_external(tensor):
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
    return stored


def _write_out_sparse(proto: onnx.ModelProto, base_dir: Path | None) -> None:
    """Replace sparse initializers and Constants by dense ones, as runtimes do. Raises ModelError."""
    every = [*iter_sparse(proto)]
    if sum(bytes_of(onnx.TensorProto(dims=each.dims, data_type=each.values.data_type)) for each in every) > _MAX_DENSE:
        fault = f"the sparse tensors of the model have more than {_MAX_DENSE / 2**30:.0f} GiB when they are written out"
        raise ModelError(f"{fault}; save it with dense weights as external data")
    for thing in iter_all(proto) if every else ():
        if isinstance(thing, onnx.GraphProto):
            thing.initializer.extend(_dense(each, base_dir) for each in thing.sparse_initializer)
            thing.ClearField("sparse_initializer")
        elif isinstance(thing, onnx.NodeProto) and key_of(thing) == ("", "Constant"):
            for attribute in (each for each in thing.attribute if each.name == "sparse_value"):
                attribute.CopyFrom(onnx.helper.make_attribute("value", _dense(attribute.sparse_tensor, base_dir)))


def _dense(sparse: onnx.SparseTensorProto, base_dir: Path | None) -> onnx.TensorProto:
    """A sparse tensor as a runtime loads it. Raises ModelError for indices outside the tensor."""
    values, indices = (_values(each, base_dir) for each in (sparse.values, sparse.indices))
    name, dims, number = sparse.values.name, tuple(sparse.dims), values.size
    bounds = dims if indices.ndim == 2 else (math.prod(dims),)
    fits = indices.dtype == np.int64 and values.ndim == 1 and indices.shape in ((number,), (number, len(dims)))
    places = indices.reshape(number, len(bounds)) if fits else None
    known = places is not None and not ((places < 0) | (places >= bounds)).any()
    strides = np.array([math.prod(bounds[axis + 1 :]) for axis in range(len(bounds))], np.int64)
    flat = np.empty(0, np.int64) if places is None or not known else places @ strides
    if len(np.unique(flat)) < number or not known:
        fault = f"are not one place in {list(dims)} for each of its values"
        raise malformed(f"the indices of sparse tensor {quoted(name)} {fault}")
    full = np.zeros(dims, values.dtype)
    full.reshape(-1)[flat] = values
    return onnx.numpy_helper.from_array(full, name)


def _in_memory(source: bytes | onnx.ModelProto | IrModel) -> onnx.ModelProto:
    if isinstance(source, onnx.ModelProto):
        return source
    if isinstance(source, bytes):
        return _parse_model(source, "the model in memory")
    if type(source).__module__.partition(".")[0] != "onnx_ir":
        kind = type(source).__name__
        raise ModelError(f"a model must be a path, bytes, an onnx.ModelProto or an onnx_ir.Model, not {kind}")
    import onnx_ir

    known: Any = source
    made: onnx.ModelProto = onnx_ir.to_proto(known)
    return made


def like(source: Source, proto: onnx.ModelProto) -> Any:
    """`proto` as the kind of model in memory that `source` is; a ModelProto if that is a path."""
    if isinstance(source, bytes):
        return proto.SerializeToString()
    if isinstance(source, (str, os.PathLike, onnx.ModelProto)):
        return proto
    import onnx_ir

    return onnx_ir.from_proto(proto)


def external_bytes(references: tuple[ExternalRef, ...]) -> int:
    """Count the bytes that references cover; tied weights share theirs."""
    return sum(length for *_, length in {(ref.path, ref.offset, ref.length) for ref in references})


def read_tensor(model: LoadedModel, tensor: onnx.TensorProto) -> np.ndarray:
    """Read a tensor, inline or external, after checking it again. Raises ModelError."""
    return _values(tensor, model.base_dir, mapped=model.lazy)


def _values(tensor: onnx.TensorProto, base_dir: Path | None, *, mapped: bool = False) -> np.ndarray:
    name = quoted(tensor.name)
    if is_external(tensor):
        if base_dir is None:
            raise ModelError(f"tensor {name} has external data; pass the path of the model instead of a proto")
        raw = read_external(tensor, base_dir, mapped=mapped)
        # A view of the bytes where the type allows it: `to_array` would hold large weights twice.
        if element_type(tensor).bits % 8 == 0:
            dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
            return raw.view(dtype.newbyteorder("<")).reshape(tuple(tensor.dims))
        tensor = onnx.TensorProto(dims=tensor.dims, data_type=tensor.data_type, raw_data=raw.tobytes())
    check_inline(tensor)
    try:
        return onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, OverflowError) as error:  # such as a string that is not valid UTF-8
        raise malformed(f"tensor {name} holds values outside its element type") from error


def self_contained(source: LoadedModel) -> onnx.ModelProto:
    """A copy of a model with all weights inline. Raises UsageError for 2 GiB or more, ModelError for bad data."""
    if source.size > MAX_FILE:
        raise UsageError(f"the model has {source.size / 2**30:.1f} GiB; a model in memory can have less than 2")
    result = deepcopy(source.complete(source.proto))
    for tensor in iter_tensors(result):
        if is_external(tensor) and source.base_dir is not None:
            tensor.raw_data = read_external(tensor, source.base_dir).tobytes()
            tensor.ClearField("data_location")
        tensor.ClearField("external_data")  # those of small tensors, too
    return result


def _parse_model(data: bytes, what: str, content: bytes = b"") -> onnx.ModelProto:
    """Parse the bytes of a model file, or `content` in their place, and sort it. The ModelError names the format."""
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(content or data)
    except DecodeError as error:
        reason = "its subgraphs nest too deep" if "MaxDepth" in str(error) else "truncated or damaged"
        raise ModelError(f"{what} is {_described(data, reason)}") from error
    # Some text parses as an empty protobuf message by accident.
    if not proto.HasField("graph"):
        raise ModelError(f"{what} is {_described(data, 'it has no graph')}")
    sort_main_graph(proto)
    return proto


def _read(path: Path) -> bytes:
    try:
        # Before it is opened, which can have side effects; non-blocking, since a FIFO would wait for a writer.
        _check_regular(path.stat(), path)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(handle, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
            status = os.fstat(handle)
            _check_regular(status, path)
            data = file.read(status.st_size + 1)  # one byte more, to notice a file that grows
    except FileNotFoundError as error:
        advice = "check the path (a link may point to nothing)"
        for name in difflib.get_close_matches(path.name, [each.name for each in path.parent.glob("*.onnx")], 1, 0.8):
            advice = f"did you mean {quoted(path.parent / name)}?"
        raise ModelError(f"{quoted(path)} does not exist; {advice}") from error
    except PermissionError as error:
        raise ModelError(f"{quoted(path)} may not be read: permission denied; change its mode or copy it") from error
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "the name cannot be used"
        raise ModelError(f"{quoted(path)} cannot be read: {reason}; check the path and the disk") from error
    if len(data) != status.st_size:
        raise ModelError(f"{quoted(path)} changed while it was read; run again when nothing writes to it")
    return data


def _check_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise ModelError(f"{quoted(path)} is a directory; pass the .onnx file in it")
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{quoted(path)} is not a regular file; save the model to a file and pass that")
    if not status.st_size:
        raise ModelError(f"{quoted(path)} is empty; download or export the model again")
    if status.st_size > MAX_FILE:
        fault = f"{quoted(path)} has {status.st_size} bytes, and protobuf reads at most {MAX_FILE}"
        raise ModelError(f"{fault}; save the model {_BESIDE}")


def _described(data: bytes, reason: str) -> str:
    for offset, start, what in _SIGNATURES:
        if data.startswith(start, offset):
            return what
    # A serialised model has control bytes near its start (field tags and lengths); text does not.
    text = data[:512].decode("latin-1")
    if text.isascii() and all(char.isprintable() or char in "\t\r\n" for char in text):
        return f"a text file, not an ONNX model (it starts with {quoted(text[:40])}); pass the .onnx file"
    return f"not a readable ONNX model ({reason}); download or export it again"


# -- structure ---------------------------------------------------------------------------------------------------------

MAX_INLINED = 10_000_000  # nodes of a model once its functions are inlined
MAX_CALLS = 100  # of functions inside each other: onnxruntime loads no more, and onnx does not inline them
_Key = tuple[str, str, str]
_TYPE = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, ())
_EMPTY_TENSOR = onnx.TensorProto(data_type=onnx.TensorProto.FLOAT, dims=[0])
_INDICES = onnx.TensorProto(data_type=onnx.TensorProto.INT64, dims=[0])
_SPARSE = onnx.SparseTensorProto(values=_EMPTY_TENSOR, indices=_INDICES, dims=[1])
# In outlines, of values that may be large or not UTF-8; tensors are checked here.
_PLACEHOLDERS: dict[str, Any] = {"t": _EMPTY_TENSOR, "tensors": [_EMPTY_TENSOR], "sparse_tensor": _SPARSE, "tp": _TYPE}
_PLACEHOLDERS |= {"sparse_tensors": (), "type_protos": (), "doc_string": ""}
_OTHER_DOMAIN = "other"  # of the operators without a schema in an outline


def check_structure(model: onnx.ModelProto) -> None:
    """Check that a model is structurally sound. Raises ModelError for the first fault."""
    if not model.HasField("graph"):
        raise ModelError("the model has no graph; the file is truncated or not ONNX: download or export it again")
    if model.ir_version < 1:
        raise ModelError("the model has no IR version; the file is truncated or damaged: download or export it again")
    _check_opsets(model)
    # First, because the checks below recurse and rely on the bound on nesting that this walk enforces.
    for tensor in iter_tensors(model):
        if not is_external(tensor):
            check_inline(tensor)
    for sparse in iter_sparse(model):
        count_elements(sparse.dims, sparse.values.name)
    if not model.graph.output:
        raise ModelError("the model has no outputs, so there is nothing to compare; export it with its outputs")
    if (odd := next((text for text in _texts(model) if not isinstance(text, str)), None)) is not None:
        raise malformed(f"the name {quoted(odd)} is not UTF-8")
    _check_functions(model)
    opset = opsets(model.opset_import).get("", 0)
    for node in iter_nodes(model.graph.node):
        if name := next((attribute.name for attribute in node.attribute if attribute.ref_attr_name), None):
            raise malformed(f"{_title(node)} refers with {quoted(name)} to an attribute of a function, but is in none")
    _check_graph(model.graph, "the graph", opset)
    for function in model.functions:
        named = ([onnx.ValueInfoProto(name=name) for name in names] for names in (function.input, function.output))
        body = onnx.GraphProto(node=function.node, input=next(named), output=next(named))
        _check_graph(body, f"local function {quoted(function.name)}", opsets(function.opset_import).get("", opset))


def _texts(model: onnx.ModelProto) -> Iterator[str | bytes]:
    for function in model.functions:
        yield from (function.name, function.domain, function.overload, *function.input, *function.output)
    for thing in iter_all(model):
        if isinstance(thing, onnx.NodeProto):
            yield from (thing.op_type, thing.domain, thing.name, *thing.input, *thing.output)
        elif isinstance(thing, onnx.AttributeProto):
            yield from (thing.name, thing.ref_attr_name)
        else:
            yield from (value.name for value in (*thing.input, *thing.output, *thing.initializer))
            yield from (sparse.values.name for sparse in thing.sparse_initializer)
            for value in (*thing.input, *thing.output, *thing.value_info):
                yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)


def _check_opsets(model: onnx.ModelProto) -> None:
    if not model.opset_import:
        raise malformed("the model names no operator set (opset_import is empty)")
    named = Counter("" if each.domain in ONNX_DOMAINS else each.domain for each in model.opset_import)
    for each in (*model.opset_import, *(each for function in model.functions for each in function.opset_import)):
        domain = "" if each.domain in ONNX_DOMAINS else each.domain
        if named[domain] > 1 or not isinstance(domain, str) or not 0 < each.version < 2**31:
            raise malformed(f"the operator set of domain {quoted(domain)} is named twice or has no version")


def sort_main_graph(model: onnx.ModelProto) -> None:
    """Sort the main graph in place. Raises ModelError for a cycle."""
    # ONNX requires the order, but onnxruntime loads unsorted graphs, and its float16 converter writes them.
    nodes = model.graph.node
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    read = ({producer[name] for name in reads(node) if name in producer} for node in nodes)
    sources = {index: sorted(each) for index, each in enumerate(read)}
    if all(source < index for index, each in sources.items() for source in each):
        return
    try:
        order = list(TopologicalSorter(sources).static_order())
    except CycleError as error:
        looping = _title(nodes[error.args[1][0]])
        raise malformed(f"the graph has a cycle through {looping}, so it has no meaning") from error
    set_nodes(model.graph, [nodes[index] for index in order])


def _check_graph(graph: onnx.GraphProto, what: str, opset: int) -> None:
    checker: Any = onnx.checker  # its stubs lack the module in C++
    context = checker.C.CheckerContext()
    context.ir_version, context.opset_imports = onnx.IR_VERSION, {"": opset or 1, _OTHER_DOMAIN: 1}
    try:
        checker.check_graph(_outline(graph, opset), context)
    except onnx.checker.ValidationError as error:
        reason = one_line(str(error).replace("==> Context: Bad node spec for node.", "in")).rstrip(".")
        raise malformed(f"{what} breaks a rule of ONNX (opset {opset}): {reason}") from error


def _outline(graph: onnx.GraphProto, opset: int) -> onnx.GraphProto:
    """The graph for onnx's checker: small, and without operators that it does not know well."""
    weights = (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))
    return onnx.GraphProto(
        name="graph",
        node=[_outlined(node, opset) for node in graph.node],
        input=[onnx.ValueInfoProto(name=value.name, type=_TYPE) for value in graph.input],
        output=[onnx.ValueInfoProto(name=value.name, type=_TYPE) for value in graph.output],
        initializer=[onnx.TensorProto(name=tensor.name, data_type=1, dims=[0]) for tensor in weights],
    )


def _outlined(node: onnx.NodeProto, opset: int) -> onnx.NodeProto:
    schema = _schema(node, opset)
    made = onnx.NodeProto(op_type=node.op_type, name=node.name, input=node.input)
    # onnx's checker requires a name for each output; no model reads these.
    made.output.extend(name or f"unread {secrets.token_hex(8)}" for name in [*node.output] or [""] * (schema is None))
    if schema is None:
        made.domain = _OTHER_DOMAIN
        for place, (_, graph) in enumerate(subgraphs(node)):
            made.attribute.add(name=f"body {place}", type=onnx.AttributeProto.GRAPH, g=_outline(graph, opset))
        return made
    for attribute in node.attribute:
        given = {field.name: _PLACEHOLDERS.get(field.name, value) for field, value in attribute.ListFields()}
        if "g" in given:
            given["g"] = _outline(attribute.g, opset)
        if "graphs" in given:
            given["graphs"] = [_outline(graph, opset) for graph in attribute.graphs]
        if attribute.ref_attr_name and not attribute.type and attribute.name in schema.attributes:
            # Attributes that a function passes on need not state their type: onnx.parser does not write it.
            given["type"] = int(schema.attributes[attribute.name].type)
        made.attribute.add(**given)
    return made


def _schema(node: onnx.NodeProto, opset: int) -> Any:
    """The schema of an operator; None (after the checks here) if onnx has none for the opset."""
    domain = key_of(node)[0]
    if not domain and (found := _of_opset(node.op_type, opset)) is not None:
        return found
    least = _operators().get((domain, node.op_type)) if domain == "com.microsoft" else None
    if not domain and onnx.defs.has(node.op_type):
        # onnx knows neither the operator sets of the future nor operators that onnxruntime added to older ones,
        # such as LayerNormalization; they may have more than the latest schema.
        least = onnx.defs.get_schema(node.op_type).min_input
    if least is not None and (len(node.input) < least or not any(node.output[:1])):
        few = f"has {counted(len(node.input), 'input')} and needs at least {least}"
        raise malformed(f"{_title(node)} {few if len(node.input) < least else 'has no output'}")
    return None


@cache
def _of_opset(name: str, opset: int) -> Any:
    known = 0 < opset <= onnx.defs.onnx_opset_version() and onnx.defs.has(name, opset)
    return onnx.defs.get_schema(name, opset) if known else None


def overridden(function: onnx.FunctionProto) -> bool:
    """Whether onnxruntime has an operator of this name: it then never runs the body."""
    return ("" if function.domain in ONNX_DOMAINS else function.domain, function.name) in _operators()


@cache
def _operators() -> Mapping[tuple[str, str], int]:
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    return {(schema.domain, schema.name): schema.min_input for schema in get_all_operator_schema()}


def _title(node: onnx.NodeProto) -> str:
    return f"node {quoted(node.name)} ({quoted(node.op_type)})"


def _check_functions(model: onnx.ModelProto) -> None:
    functions: dict[_Key, onnx.FunctionProto] = {}
    for function in model.functions:
        key = ("" if function.domain in ONNX_DOMAINS else function.domain, function.name, function.overload)
        if not function.name:
            raise malformed(f"a local function has the unusable name {quoted(function.name)}")
        if key in functions:
            raise malformed(f"local function {quoted(function.name)} is defined twice")
        if not key[0] and not overridden(function):
            fault = "is in the domain of ONNX, where onnxruntime finds no function; move it to another domain"
            raise ModelError(f"local function {quoted(function.name)} {fault}")
        functions[key] = function
    calls = {key: _calls(function.node, functions) for key, function in functions.items()}
    inlined, deep = dict[_Key, int](), dict[_Key, int]()
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        fault = f"local function {quoted(error.args[1][0][1])} calls itself, directly or through others"
        raise malformed(f"{fault}, which ONNX forbids") from error
    for key in order:
        deep[key] = 1 + max((deep[callee] for callee in calls[key]), default=0)
        if deep[key] > MAX_CALLS:
            fault = f"local functions call each other more than {MAX_CALLS} deep, which onnxruntime does not load"
            raise ModelError(f"{fault}; export the model without functions")
        inlined[key] = len(functions[key].node) + sum(inlined[callee] * n for callee, n in calls[key].items())
    if sum(inlined[callee] * n for callee, n in _calls(model.graph.node, functions).items()) > MAX_INLINED:
        fault = f"inlining the local functions of this model yields more than {MAX_INLINED:,} nodes"
        raise ModelError(f"{fault}; export it without functions")


def _calls(nodes: Iterable[onnx.NodeProto], functions: dict[_Key, onnx.FunctionProto]) -> Counter[_Key]:
    keys = (((*key_of(node), node.overload), node) for node in iter_nodes(nodes if functions else ()))
    calls = [(key, functions[key], node) for key, node in keys if key in functions]
    for _, function, node in calls:
        more = len(node.input) > len(function.input) or len(node.output) > len(function.output)
        if more and not overridden(function):
            raise malformed(f"{_title(node)} has more operands or outputs than the local function that it calls")
    return Counter(key for key, _, _ in calls)

"""Load a model without trusting it.

The structure of the model and its external references are checked; external data is not read. `read_tensor` reads the
values of one tensor when they are needed.

The path may be a symbolic link, because the Hugging Face cache consists of links. External data is then resolved beside
the link, in the directory of the path as given, and the data files themselves may not be links, unless the caller
allows those of such a cache (`rewriter.files.links`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx

from rewriter.errors import ModelError
from rewriter.files.external import ExternalRef, open_inside, read_external, resolve
from rewriter.files.links import without_links
from rewriter.files.modelfile import byte_size, parse_model, read_model
from rewriter.files.soundness.order import sort_main_graph
from rewriter.files.soundness.structure import check_structure
from rewriter.files.tensors import check_inline, element_type
from rewriter.files.walk import is_external, iter_tensors
from rewriter.text import quoted


@dataclass(frozen=True)
class LoadedModel:
    """A checked model and where it came from.

    Attributes:
        proto: the model; external data is not loaded, initializers keep their references.
        path: absolute path of the file, as given (a link is not followed); None for a proto in memory.
        base_dir: directory that external data is resolved in, `path.parent` or the cache directory that its links
            stay in; None for a proto in memory.
        external: all references to other files: of initializers, attributes, subgraphs, functions and sparse tensors.
        file_size: size of the model file in bytes; for a proto in memory, the size that it would have.
        mapped: whether the proto refers to data otherwise than the file does: large weights stayed in the file, as
            external data of that file, or links were replaced by the files that they point to.
    """

    proto: onnx.ModelProto
    path: Path | None
    base_dir: Path | None
    external: tuple[ExternalRef, ...]
    file_size: int
    mapped: bool = False

    @property
    def size(self) -> int:
        """Size in bytes of the model file and the external ranges that it refers to, each byte counted once."""
        return self.file_size + external_bytes(self.external)


class IrModel(Protocol):
    """A model of the onnx_ir package."""

    @property
    def graph(self) -> Any:
        """The main graph."""

    @property
    def opset_imports(self) -> Any:
        """Versions of the domains."""


Source = str | os.PathLike[str] | bytes | onnx.ModelProto | IrModel
"""What can be loaded: a path, the bytes of a file, or a model in memory."""


def load_model(source: Source, *, mapped: bool = False, allow_links: bool = False) -> LoadedModel:
    """Load and check a model.

    A proto in memory is used as it is, without a copy, and may not have external data, since there is no directory to
    resolve it in. The main graph of a file is sorted if it is not in topological order; an unsorted proto in memory is
    refused, because it belongs to the caller. With `mapped`, the large weights of a file stay there, unless the rules
    for external data refuse that (a link, a strange name). With `allow_links`, data files may be links inside one
    Hugging Face cache directory.

    Raises:
        ModelError: the file is missing, unreadable, not a regular file, not ONNX, over 2 GiB, unsound, or
            refers to external data against the rules of `rewriter.files.external`.
    """
    if not isinstance(source, (str, os.PathLike)):
        proto = _in_memory(source)
        check_structure(proto)
        external = collect_external(proto, None)
        return LoadedModel(proto, None, None, external, byte_size(proto))
    # Neither resolved nor normalised: either could change the directory in which external data is looked up.
    path = Path(source).absolute()
    mapped = mapped and _may_map(path)
    proto, file_size = read_model(path, mapped=mapped)
    sort_main_graph(proto)
    check_structure(proto)
    base_dir = without_links(proto, path.parent) if allow_links else path.parent
    external = collect_external(proto, base_dir)
    others = tuple(ref for ref in external if ref.path != path) if mapped else external
    elsewhere = len(others) < len(external) or base_dir != path.parent
    return LoadedModel(proto, path, base_dir, others, file_size, mapped=elsewhere)


def _in_memory(source: bytes | onnx.ModelProto | IrModel) -> onnx.ModelProto:
    if isinstance(source, onnx.ModelProto):
        return source
    if isinstance(source, bytes):
        proto = parse_model(source, "the model in memory")
        sort_main_graph(proto)
        return proto
    if type(source).__module__.partition(".")[0] != "onnx_ir":
        raise ModelError(
            f"a model must be a path, bytes, an onnx.ModelProto or an onnx_ir.Model, not {type(source).__name__}"
        )
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


def _may_map(path: Path) -> bool:
    """Whether the rules for external data allow that a model refers to its own file."""
    try:
        os.close(open_inside(path.parent, path.name, ""))
    except ModelError:
        return False
    return True


def collect_external(proto: onnx.ModelProto, base_dir: Path | None) -> tuple[ExternalRef, ...]:
    """Check every external reference of a model against `base_dir`. Raises ModelError."""
    tensors = [tensor for tensor in iter_tensors(proto) if is_external(tensor)]
    if tensors and base_dir is None:
        raise ModelError(
            f"tensor {quoted(tensors[0].name)} has external data and the model was given in memory, "
            "without a directory; pass the path of the model instead"
        )
    return tuple(resolve(tensor, base_dir) for tensor in tensors if base_dir is not None)


def external_bytes(references: tuple[ExternalRef, ...]) -> int:
    """Count the bytes that references cover, each byte of a file once (tied weights share their bytes)."""
    # A sweep over the ranges of each file by start; `end` is where the union of the ranges so far ends.
    total, path, end = 0, None, 0
    for ref in sorted(references, key=lambda ref: (ref.path, ref.offset)):
        if ref.path != path:
            path, end = ref.path, 0
        total += max(ref.offset + ref.length - max(end, ref.offset), 0)
        end = max(end, ref.offset + ref.length)
    return total


def read_tensor(model: LoadedModel, tensor: onnx.TensorProto) -> np.ndarray:
    """Read the values of one tensor of a model, inline or external, after checking it again.

    Returns:
        An array with the tensor's dims and element type (`ml_dtypes` for bfloat16, float8 and 4-bit types).

    Raises:
        ModelError: the data does not match the dims, or the data file was replaced by something that
            `rewriter.files.external` refuses.
    """
    name = quoted(tensor.name)
    if is_external(tensor):
        if model.base_dir is None:
            raise ModelError(f"tensor {name} has external data; pass the path of the model instead of a proto")
        raw = read_external(tensor, model.base_dir)
        # A view of the bytes where the type allows it: `to_array` would hold large weights twice.
        if element_type(tensor).bits % 8 == 0:
            dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
            # ONNX stores little-endian; ml_dtypes types (kind V) have no byte order to set.
            if dtype.kind != "V":
                dtype = dtype.newbyteorder("<")
            return raw.view(dtype).reshape(tuple(tensor.dims))
        tensor = onnx.TensorProto(dims=tensor.dims, data_type=tensor.data_type, raw_data=raw.tobytes())
    check_inline(tensor)
    try:
        return onnx.numpy_helper.to_array(tensor)
    except (
        ValueError,
        TypeError,
        OverflowError,
    ) as error:
        # Such as a string that is not valid UTF-8.
        raise ModelError(f"tensor {name} holds values outside its element type; export the model again") from error

"""The user's inputs, converted to the types of a model: arrays in Python or in an npz file.

In a file a key is the name of an input, or `case/input` if there are several cases. Nothing is unpickled.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.errors import UsageError
from rewriter.graph.types import declared_types
from rewriter.ort.sessions import fits
from rewriter.proof.inputs.cases import Case
from rewriter.proof.inputs.specs import numpy_type
from rewriter.proof.settings import Given, spelled
from rewriter.text import one_line, quoted

_ONLY = "the given inputs"


def load_cases(given: Given, model: onnx.ModelProto) -> tuple[Case, ...]:
    """The user's cases, checked against `model`.

    Names, element types (integers and floats may be widened), ranks and fixed dimensions are checked. Inputs with a
    default may be omitted. Raises UsageError.
    """
    arrays, told = (_read(given) if isinstance(given, Path) else given), spelled(given)
    defaults = {tensor.name for tensor in model.graph.initializer}
    known = {value.name: value for value in model.graph.input}
    cases: dict[str, dict[str, NDArray[Any]]] = {}
    for key, array in arrays.items():
        case, name = _split(key, known)
        if name not in known:
            listed = ", ".join(quoted(each) for each in known if each not in defaults)
            raise UsageError(f"{told}: the model has no input {quoted(name)}; its inputs are {listed}")
        group = cases.setdefault(case, {})
        if name in group:
            raise UsageError(f"{told}: input {quoted(name)} is given twice")
        group[name] = _fitted(f"{told}: input {quoted(name)}", np.asarray(array), known[name])
    if not cases:
        raise UsageError(f"{told}: there are no arrays")
    needed = [name for name in known if name not in defaults]
    for case, feeds in cases.items():
        missing = [quoted(name) for name in needed if name not in feeds]
        if missing:
            where = "" if case == _ONLY else f" of case {quoted(case)}"
            raise UsageError(f"{told}: input{'s' * (len(missing) > 1)} {', '.join(missing)}{where} missing")
    return tuple(Case(one_line(case, 80), feeds) for case, feeds in cases.items())


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise UsageError(f"{path.name}: a single array; name the inputs with numpy.savez")
        with archive:
            return {key: np.asarray(archive[key]) for key in archive.files}
    except FileNotFoundError:
        raise UsageError(f"{path.name}: no such file") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, MemoryError, NotImplementedError) as error:
        raise UsageError(f"{path.name}: not a readable npz file ({one_line(error, 120)})") from error


def _split(key: str, known: Mapping[str, object]) -> tuple[str, str]:
    """The case and the input that a key names. Names of inputs may contain slashes, so whole names take precedence."""
    if key in known:
        return _ONLY, key
    # The shortest case whose rest is an input: `case/a/b` names the input `a/b` before it names `b` in case `case/a`.
    parts = key.split("/")
    for cut in range(1, len(parts)):
        case, name = "/".join(parts[:cut]), "/".join(parts[cut:])
        if name in known:
            return case, name
    return _ONLY, parts[-1] if len(parts) == 2 else key


def _fitted(what: str, array: NDArray[Any], value: onnx.ValueInfoProto) -> NDArray[Any]:
    if not value.type.HasField("tensor_type"):
        raise UsageError(f"{what} is not a tensor in the model, so an npz file cannot hold it")
    tensor = value.type.tensor_type
    wanted = declared_types(onnx.GraphProto(input=[value]))[value.name].shape
    sizes = [None if isinstance(dim, int) and dim <= 0 else dim for dim in wanted or ()]
    if wanted is not None and not fits(array.shape, sizes):
        spelled = ", ".join("?" if dim is None else one_line(dim, 40) for dim in wanted)
        raise UsageError(f"{what} has shape {list(array.shape)}, the model takes [{spelled}]")
    if tensor.elem_type == onnx.TensorProto.STRING:
        if array.dtype.kind != "U":
            raise UsageError(f"{what} is of type {array.dtype}, the model takes strings")
        return array.astype(object)
    dtype = numpy_type(tensor.elem_type)
    if dtype is None:
        raise UsageError(f"{what} has an element type in the model that numpy does not support")
    if dtype.name == "bfloat16" and array.dtype.kind in "Vf":
        # numpy saves bfloat16 as raw pairs of bytes. Other floats are rounded to it.
        return array.view(dtype) if array.dtype == np.dtype("V2") else array.astype(dtype)
    if array.dtype != dtype and not (array.dtype.kind != "b" and np.can_cast(array.dtype, dtype, "safe")):
        raise UsageError(f"{what} is of type {array.dtype}, the model takes {dtype}")
    return np.ascontiguousarray(array.astype(dtype)).reshape(array.shape)

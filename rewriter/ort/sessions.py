"""Inference sessions of onnxruntime, without log output and with one-line errors; and what its optimisers write.

onnxruntime's Python interface does not support bfloat16 arrays, which are passed and read as their bits.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.errors import ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.edit import written_out
from rewriter.ort.providers import load_onnxruntime, quiet_stderr, require_provider
from rewriter.text import one_line, quoted

_BFLOAT16 = "tensor(bfloat16)"
_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
_MAP = re.compile(r"map\(\w+,tensor\((\w+)\)\)")
_NO_KERNEL = re.compile(r"(?:NOT_IMPLEMENTED : Could not find an implementation|Provider type) for (\w+)\b")
_OUT_OF_MEMORY = ("bad_alloc", "bad allocation", "Failed to allocate memory", "out of memory", "pthread_create failed")


@dataclass(frozen=True, eq=False)
class Session:
    """A loaded model."""

    outputs: tuple[str, ...]
    # on another provider, the nodes on the CPU, as `Operator 'name'`; None if this onnxruntime does not report them
    cpu_nodes: tuple[str, ...] | None
    _session: Any
    _types: Mapping[str, str]
    _shrinks: bool
    defined: tuple[str, ...] = ()  # operators without a kernel, as `Swish(25)`, expanded as ONNX defines them

    def run(self, feeds: Mapping[str, NDArray[Any]], over: Mapping[str, NDArray[Any]] | None = None) -> dict[str, Any]:
        """Run the model once. Raises ValidationError, or MemoryError.

        A sequence becomes a list, a map the list of its keys and values, a missing value None. `over` are results of
        another run: outputs go to filled memory of their shapes, so that entries that are never written can be
        detected; onnxruntime refuses that for undeclared shapes.
        """
        wanted, options = list(self.outputs), load_onnxruntime().RunOptions()
        options.log_severity_level = 4
        if self._shrinks:
            # Otherwise a session keeps the memory of its largest run, and the float64 evaluation has a dozen sessions.
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        try:
            kinds = [self._types.get(name, "") for name in (*feeds, *wanted)]
            # An OrtValue cannot be built from a list, and a missing one crashes Python.
            plain = all(kind.startswith("tensor") for kind in kinds[: len(feeds)]) and "optional" not in str(kinds)
            if plain and (over is not None or _BFLOAT16 in kinds):
                results = _run_bound(self._session, feeds, wanted, over or {}, options)
            else:
                results = self._session.run(wanted, dict(feeds), options)
        except Exception as error:  # onnxruntime's exceptions share no base class
            _raise_if_out_of_memory(error)
            plainly = one_line(_PLACE.sub("", _STATUS.sub(r"\1 '\2': ", str(error))))
            told = _index_error(str(error), feeds) or f"onnxruntime could not run the model: {plainly}"
            raise ValidationError(told) from error
        return {name: _plain(result, self._types[name]) for name, result in zip(wanted, results, strict=True)}


def _plain(value: Any, kind: str) -> Any:
    """An output as arrays and lists; `kind` is onnxruntime's name for its type."""
    if isinstance(value, list):
        return [_plain(each, kind) for each in value]
    if isinstance(value, dict):
        stored, keys = _MAP.search(kind), sorted(value)
        dtype = np.float32 if stored is not None and stored[1] == "float" else None  # a Python float is float64
        return [np.array(keys), np.array([value[key] for key in keys], dtype)]
    return None if value is None else np.asarray(value)


_STATUS = re.compile(r"^.*?while running (\w+) node\. Name:'(.*?)' Status Message: ", re.DOTALL)
_PLACE = re.compile(r"/onnxruntime_src/\S+:\d+ .*? was false\. (?=\S)", re.DOTALL)
_BOUNDS = re.compile(r"Name:'(.*?)'.*idx=(-?\d+) must be within the inclusive range \[-(\d+),", re.DOTALL)


def _index_error(text: str, feeds: Mapping[str, NDArray[Any]]) -> str | None:
    """A message about an index outside its table, such as a token of another vocabulary."""
    found = _BOUNDS.search(text)
    if found is None:
        return None
    node, index, size = found[1], int(found[2]), int(found[3])
    given = [name for name, array in feeds.items() if array.dtype.kind in "iu" and (array == index).any()]
    holder = f"input {quoted(given[0])} holds" if given else "an index is"
    reader = f"that Gather {quoted(node)} reads" if node else "it is for"
    return f"{holder} {index}, and the table {reader} has {size} entries: 0 to {size - 1}"


def open_session(
    model: Path | onnx.ModelProto,
    provider: str = "cpu",
    *,
    optimise: bool = True,
    base_dir: Path | None = None,
    prepack: bool = True,
    spin: bool = False,
    threads: int = 0,
) -> Session:
    """Load a model into onnxruntime; operators without a kernel are expanded as ONNX defines them.

    `base_dir` is the directory of the external data of a model in memory. Without `prepack`, external weights stay in
    the page cache. `spin` is onnxruntime's default, for timing only: idle threads spin, and memory is kept between
    runs. `threads` are per operator; 0 is one per core.

    Raises as `require_provider`, ValidationError if it does not load, MemoryError if memory runs out.
    """
    known, ort = require_provider(provider), load_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if not spin:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if base_dir is not None:
        options.add_session_config_entry(_EXTERNAL_FOLDER, str(base_dir.resolve()))
    try:
        source = _source(model, None if known.finds_data else base_dir)
        # Without this onnxruntime silently falls back to the CPU, which would then be proved instead of the provider.
        session = ort.InferenceSession(source, options, providers=known.onnxruntime, enable_fallback=0)
    except Exception as error:  # onnxruntime's exceptions share no base class
        _raise_if_out_of_memory(error)
        missing = _NO_KERNEL.search(str(error))
        plain = None
        if missing is not None:
            proto = onnx.load(model, load_external_data=False) if isinstance(model, Path) else model
            plain = written_out(proto, missing[1])
        if plain is None:
            raise ValidationError(f"onnxruntime could not load the model: {one_line(error)}") from error
        beside = model.parent if isinstance(model, Path) else base_dir
        how = {"optimise": optimise, "prepack": prepack, "spin": spin}
        found = open_session(plain[0], provider, base_dir=beside, threads=threads, **how)
        return replace(found, defined=(*plain[1], *found.defined))
    return Session(
        outputs=tuple(dict.fromkeys(value.name for value in session.get_outputs())),
        cpu_nodes=() if known.name == "cpu" else _nodes_on_cpu(session),
        _session=session,
        _types={value.name: value.type for value in (*session.get_inputs(), *session.get_outputs())},
        _shrinks=not spin,
    )


def _raise_if_out_of_memory(error: Exception) -> None:
    """Distinguish a lack of memory from a rejection, which onnxruntime reports alike."""
    if any(sign in str(error) for sign in _OUT_OF_MEMORY):
        raise MemoryError(one_line(error, 160)) from error


def _source(model: Path | onnx.ModelProto, data: Path | None) -> str | bytes:
    """What onnxruntime loads; a model in memory gets the external data in a directory inside."""
    if isinstance(model, Path):
        return str(model)
    if data is not None:
        model = deepcopy(model)
        onnx.load_external_data_for_model(model, str(data))
    return bytes(model.SerializeToString())


def _nodes_on_cpu(session: Any) -> tuple[str, ...] | None:
    try:
        assignments = session.get_provider_graph_assignment_info()
    except Exception:  # noqa: BLE001 - older versions of onnxruntime do not report it
        return None
    return tuple(
        f"{node.op_type} '{node.name}'"
        for assignment in assignments
        if assignment.ep_name == "CPUExecutionProvider"
        for node in assignment.get_nodes()
    )


def _run_bound(
    session: Any, feeds: Mapping[str, NDArray[Any]], wanted: list[str], over: Mapping[str, Any], options: Any
) -> list[Any]:
    """Run with values of onnxruntime; outputs in `over` are written into filled memory of that shape."""
    binding = session.io_binding()
    # A CPU value borrows the memory of its array, so these keep the arrays alive until the run is over.
    held = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in feeds.items()}  # 0-D stays 0-D
    for name, array in held.items():
        binding.bind_ortvalue_input(name, _value_of(array))
    shapes, places = {value.name: value.shape for value in session.get_outputs()}, list[NDArray[Any]]()
    for name in wanted:
        like, shape = over.get(name), shapes.get(name)
        if isinstance(like, np.ndarray) and like.dtype.kind not in "OUS" and (not shape or fits(like.shape, shape)):
            places.append(_filled(like))
            binding.bind_ortvalue_output(name, _value_of(places[-1]))
        else:
            binding.bind_output(name)
    session.run_with_iobinding(binding, options)
    results = binding.get_outputs()
    if not all(result.is_tensor() for result in results):
        return list(binding.copy_outputs_to_cpu())
    return [np.array(_array_of(result)) for result in results]


def fits(shape: Sequence[int], declared: Sequence[int | str | None]) -> bool:
    """Whether a shape has the rank of a declared one, and its sizes where they are fixed."""
    sizes = zip(shape, declared, strict=False)
    return len(shape) == len(declared) and all(size == dim for size, dim in sizes if isinstance(dim, int))


def _filled(like: NDArray[Any]) -> NDArray[Any]:
    """Memory of that type and shape, filled with NaN or -1, which are improbable in results."""
    fill = 1 if like.dtype.kind == "b" else 0xFF
    return np.full(like.nbytes, fill, np.uint8).view(like.dtype).reshape(like.shape)


def _value_of(array: NDArray[Any]) -> Any:
    kind = load_onnxruntime().OrtValue
    if array.dtype.name != "bfloat16":
        return kind.ortvalue_from_numpy(array)
    return kind.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)


def _array_of(value: Any) -> NDArray[Any]:
    if value.data_type() != _BFLOAT16:
        return np.asarray(value.numpy())
    import ml_dtypes

    bits = ctypes.string_at(value.data_ptr(), 2 * math.prod(value.shape()))
    return np.frombuffer(bits, ml_dtypes.bfloat16).reshape(value.shape())


# -- what onnxruntime makes of a model ---------------------------------------------------------------------------------

LEVELS = ("basic", "extended", "all")
_ACTED = re.compile(rb"GraphTransformer (\w+) modified: 1 ")
RULES = {
    "Level1_RuleBasedTransformer": (
        "EliminateIdentity", "EliminateSlice", "UnsqueezeElimination", "EliminateDropout", "ExpandElimination",
        "CastElimination", "CastChainElimination", "PreShapeNodeElimination", "NoopElimination", "DivMulFusion",
        "FuseReluClip", "GemmSumFusion", "GemmTransposeFusion", "NotWhereFusion", "ConvAddFusion", "ConvMulFusion",
        "ConvBNFusion", "Pad_Fusion", "MatMul_BatchNormalization_Fusion", "LabelEncoderFusion",
    ),
    "Level2_RuleBasedTransformer": ("ClipQuantRewrite", "ReluQuantRewrite", "GemmTransposeFusion"),
}  # fmt: skip
"""The rules of rule-based optimisers, whose names are not logged."""


def write_optimised(
    model: LoadedModel, level: str, folder: Path, disabled: Sequence[str] = (), *, severity: int = 4
) -> Path:
    """Write what onnxruntime makes of a model, its weights beside it. Raises ValidationError if it does not load."""
    path, ort = folder / "optimised.onnx", load_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = severity
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", f"{path.name}.data")
    if model.base_dir is not None:
        options.add_session_config_entry(_EXTERNAL_FOLDER, str(model.base_dir.resolve()))
    how: dict[str, Any] = {"providers": ["CPUExecutionProvider"], "enable_fallback": 0}
    try:
        source = str(model.path) if model.path is not None else model.proto.SerializeToString()
        ort.InferenceSession(source, options, disabled_optimizers=[*disabled], **how)
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ValidationError(f"onnxruntime could not load the model at level {level}: {one_line(error)}") from error
    return path


def optimisers(model: LoadedModel, level: str) -> list[str]:
    """The optimisers that change a model at a level; a rule-based one comes after its rules."""
    with TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with quiet_stderr(log):
            write_optimised(model, level, Path(folder), severity=0)
        names = dict.fromkeys(name.decode() for name in _ACTED.findall(log.read_bytes()))
    return list(dict.fromkeys(part for name in names for part in (*RULES.get(name, ()), name)))

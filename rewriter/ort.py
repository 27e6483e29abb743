"""onnxruntime: execution providers, sessions, and what its optimisers write; without log output, errors in one line.

A provider that onnxruntime was built with may still fail to start (no driver, no cuDNN), and onnxruntime then silently
runs on the CPU. Availability is therefore tested, once, with a model of one node. Its Python interface does not support
bfloat16 arrays, which are passed and read as their bits.
"""

import contextlib
import ctypes
import functools
import io
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from rewriter.errors import ProviderError, UsageError, ValidationError
from rewriter.files.load import LoadedModel
from rewriter.graph.edit import written_out
from rewriter.text import one_line, quoted

# -- execution providers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Provider:
    """One execution provider."""

    name: str
    kernel_set: str
    package: str = "onnxruntime"
    needs: str = ""  # requirements for starting
    float64: bool = True  # whether it computes in float64; one that rounds to float32 is used only if named
    coarse: tuple[str, ...] = ()  # operators whose float64 kernels nevertheless round to float32
    finds_data: bool = True  # whether it finds the external data of a model in memory
    defaults: tuple[tuple[str, str], ...] = ()  # options that differ from onnxruntime's defaults
    options: tuple[str, ...] = ()  # the accepted options with a single word; onnxruntime judges their values
    given: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        return self.name + ":" * bool(self.given) + ",".join(f"{key}={value}" for key, value in self.given)

    @property
    def onnxruntime(self) -> list[tuple[str, dict[str, str]]]:
        return [(self.kernel_set, dict((*self.defaults, *self.given)))]


_CUDA_OPTIONS = (
    "device_id use_tf32 gpu_mem_limit arena_extend_strategy cudnn_conv_algo_search cudnn_conv_use_max_workspace "
    "cudnn_conv1d_pad_to_nc1d do_copy_in_default_stream enable_skip_layer_norm_strict_mode fuse_conv_bias prefer_nhwc "
    "sdpa_kernel"
)
_CUDA = "an NVIDIA driver, CUDA and cuDNN: 'pip install onnxruntime-gpu[cuda,cudnn]'"

PROVIDERS = (
    Provider("cpu", "CPUExecutionProvider"),
    # TF32 keeps 10 bits of mantissa in matrix products, which is too coarse to prove anything.
    Provider(
        *("cuda", "CUDAExecutionProvider", "onnxruntime-gpu", _CUDA),
        coarse=("Softmax",),  # of fewer than 1024 numbers: measured in 1.31.1, docs/performance.md
        defaults=(("use_tf32", "0"),),
        options=tuple(_CUDA_OPTIONS.split()),
    ),
    # On some processors OpenVINO computes in bfloat16 unless told otherwise.
    Provider(
        *("openvino", "OpenVINOExecutionProvider", "onnxruntime-openvino", "a device that OpenVINO supports"),
        float64=False,
        finds_data=False,
        defaults=(("device_type", "CPU"), ("precision", "ACCURACY")),
        options=("device_type", "precision", "num_of_threads", "num_streams", "disable_dynamic_shapes"),
    ),
)


def parse_provider(text: str) -> Provider:
    """Parse `NAME` or `NAME:KEY=VALUE,...`, without a test. Raises ProviderError for the name, else UsageError."""
    name, colon, rest = text.partition(":")
    known = next((provider for provider in PROVIDERS if name in (provider.name, provider.kernel_set)), None)
    if known is None:
        names = ", ".join(provider.name for provider in PROVIDERS)
        raise ProviderError(f"unknown execution provider '{one_line(name)}': choose among {names}")
    given: dict[str, str] = {}
    for pair in rest.split(",") if colon else ():
        key, sign, value = (part.strip() for part in pair.partition("="))
        if not (key and sign and value):
            raise UsageError(f"'{one_line(pair)}' in provider '{one_line(text)}' is not KEY=VALUE")
        if key in given:
            raise UsageError(f"provider '{one_line(text)}' has the option {one_line(key)} twice")
        if key not in known.options:
            listed = f"it has {', '.join(sorted(known.options)) or 'none'}"
            raise UsageError(f"execution provider {known.name} does not have the option '{one_line(key)}'; {listed}")
        if not re.fullmatch(r"\w+", value, re.ASCII):
            raise UsageError(f"option {key} of {known.name} must be a word or a number, not '{one_line(value)}'")
        given[key] = value
    return replace(known, given=tuple(given.items()))


def chosen_providers(texts: Sequence[str]) -> tuple[str, ...]:
    """The distinct providers to use, as text; by default each that starts and has float64. As `require_provider`."""
    chosen = dict.fromkeys(require_provider(text).text for text in texts)
    working = (each.name for each in PROVIDERS if each.float64 and _obstacle(each) is None)
    return tuple(chosen) or tuple(working)


def require_provider(text: str) -> Provider:
    """Parse a provider and check that it works. Raises as `parse_provider`, and ProviderError if no session starts."""
    provider = parse_provider(text)
    if (reason := _obstacle(provider)) is not None:
        raise ProviderError(f"execution provider '{provider.text}' is not available: {reason}")
    return provider


@functools.cache
def load_onnxruntime() -> Any:
    """Import onnxruntime and silence its log. Raises ProviderError, or MemoryError if its libraries do not fit."""
    try:
        with quiet_stderr():  # the import itself may log devices, before the severity can be set
            import onnxruntime
    except ImportError as error:
        _raise_if_out_of_memory(error)
        advice = "pip install --force-reinstall onnxruntime"
        raise ProviderError(f"onnxruntime cannot be imported ({one_line(error, 160)}); {advice}") from error
    onnxruntime.set_default_logger_severity(4)
    return onnxruntime


@functools.cache
def _obstacle(provider: Provider) -> str | None:
    if provider.name == "cpu":
        return None
    ort = load_onnxruntime()
    if provider.kernel_set not in ort.get_available_providers():
        advice = f"install it with 'pip uninstall onnxruntime' and 'pip install {provider.package}'"
        return f"this onnxruntime has no {provider.kernel_set}; {advice}"
    graph = "g (float[2, 2] x) => (float[2, 2] y) { y = MatMul(x, x) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {graph}')
    with contextlib.redirect_stdout(io.StringIO()), quiet_stderr():
        ort.preload_dlls()  # finds the CUDA libraries of pip packages
        try:
            session = _started(model, ort.SessionOptions(), provider)
            if provider.kernel_set in session.get_providers():
                session.run(None, {"x": np.ones((2, 2), np.float32)})
                return None
            reason = "onnxruntime fell back to the CPU"
        except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions share no base class
            reason = one_line(error, 160)
    return f"{provider.package} is installed but does not start ({reason}); it needs {provider.needs}"


_STDERR = RLock()


@contextlib.contextmanager
def quiet_stderr(log: str | os.PathLike[str] = os.devnull) -> Iterator[None]:
    """Write standard error to a new file or nowhere, also that of C++ code, which bypasses `sys.stderr`."""
    sys.stderr.flush()
    with _STDERR, open(log, "wb") as file, contextlib.ExitStack() as restored:  # noqa: PTH123 - devnull is a text
        with contextlib.suppress(OSError):  # standard error is closed: nothing to keep quiet
            saved = os.dup(2)
            restored.callback(os.close, saved)
            restored.callback(os.dup2, saved, 2)
            os.dup2(file.fileno(), 2)
        yield


# -- sessions ----------------------------------------------------------------------------------------------------------

_BFLOAT16 = "tensor(bfloat16)"
_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
_MAP = re.compile(r"map\(\w+,tensor\((\w+)\)\)")
_NO_KERNEL = re.compile(r"(?:NOT_IMPLEMENTED : Could not find an implementation|Provider type) for (\w+)\b")
_OUT_OF_MEMORY = re.compile("bad.alloc|allocate memory|out of memory|pthread_create failed|map segment")


@dataclass(frozen=True, eq=False)
class Session:
    """A loaded model."""

    outputs: tuple[str, ...]
    cpu_nodes: tuple[str, ...] | None  # left to the CPU, as `Operator 'name'`; None if onnxruntime does not say
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
        if self._shrinks:
            # Otherwise a session keeps the memory of its largest run, that of an encoder while its decoder runs.
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        try:
            kinds = [self._types.get(name, "") for name in (*feeds, *wanted)]
            # An OrtValue cannot be built from a list, and a missing one crashes Python.
            plain = all(kind.startswith("tensor") for kind in kinds[: len(feeds)]) and "optional" not in str(kinds)
            if plain and (over is not None or _BFLOAT16 in kinds):
                results = self._run_bound(feeds, over or {}, options)
            else:
                results = self._session.run(wanted, dict(feeds), options)
        except Exception as error:  # onnxruntime's exceptions share no base class
            _raise_if_out_of_memory(error)
            plainly = one_line(_PLACE.sub("", _STATUS.sub(r"\1 '\2': ", str(error))))
            told = _index_error(str(error), feeds) or f"onnxruntime could not run the model: {plainly}"
            raise ValidationError(told) from error
        return {name: _plain(result, self._types[name]) for name, result in zip(wanted, results, strict=True)}

    def _run_bound(self, feeds: Mapping[str, NDArray[Any]], over: Mapping[str, Any], options: Any) -> list[Any]:
        """Run with values of onnxruntime; outputs in `over` are written into filled memory of that shape."""
        binding = self._session.io_binding()
        # A CPU value borrows the memory of its array, so these keep the arrays alive until the run is over.
        held = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in feeds.items()}  # 0-D stays so
        for name, array in held.items():
            binding.bind_ortvalue_input(name, _value_of(array))
        shapes, places = {value.name: value.shape for value in self._session.get_outputs()}, list[NDArray[Any]]()
        for name in self.outputs:
            like, shape = over.get(name), shapes.get(name)
            if isinstance(like, np.ndarray) and like.dtype.kind not in "OUS" and (not shape or fits(like.shape, shape)):
                places.append(_filled(like))
                binding.bind_ortvalue_output(name, _value_of(places[-1]))
            else:
                binding.bind_output(name)
        self._session.run_with_iobinding(binding, options)
        results = binding.get_outputs()
        if not all(result.is_tensor() for result in results):
            return list(binding.copy_outputs_to_cpu())
        return [np.array(_array_of(result)) for result in results]


def _plain(value: Any, kind: str) -> Any:
    """An output as arrays and lists; `kind` is onnxruntime's name for its type."""
    if isinstance(value, list):
        return [_plain(each, kind) for each in value]
    if isinstance(value, dict):
        stored, keys = _MAP.search(kind), sorted(value)
        dtype = np.float32 if stored is not None and stored[1] == "float" else None  # a Python float is float64
        return [np.array(keys), np.array([value[key] for key in keys], dtype)]
    return None if value is None else np.asarray(value)


def tensors_of(values: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Outputs tensor by tensor, a sequence `y` as `y[0]` and so on, a missing one as False. Raises ValidationError."""
    found: dict[str, NDArray[Any]] = {}
    for name, value in values.items():
        if isinstance(value, list) and value:
            parts = tensors_of({f"{name}[{place}]": each for place, each in enumerate(value)})
        else:
            parts = {name: np.asarray(value if value is not None else False)}
        if taken := parts.keys() & values.keys() - {name}:
            raise ValidationError(f"output '{min(taken)}' has the name of an element of another; rename it")
        found |= parts
    return found


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
    options, level = ort.SessionOptions(), ort.GraphOptimizationLevel
    options.intra_op_num_threads = threads
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
    options.add_session_config_entry("session.disable_prepacking", str(int(not prepack)))
    try:
        session = _started(model, options, known, base_dir)
    except Exception as error:  # onnxruntime's exceptions share no base class
        _raise_if_out_of_memory(error)
        plain = None
        if missing := _NO_KERNEL.search(str(error)):
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


def _started(
    model: Path | onnx.ModelProto, options: Any, provider: Provider, base_dir: Path | None = None, **more: Any
) -> Any:
    """onnxruntime's own session, which is on the provider or fails; `base_dir` is that of external data."""
    if base_dir is not None:
        options.add_session_config_entry(_EXTERNAL_FOLDER, str(base_dir.resolve()))
        if isinstance(model, onnx.ModelProto) and not provider.finds_data:
            model = deepcopy(model)
            onnx.load_external_data_for_model(model, str(base_dir))
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    # Without fallback=0 onnxruntime silently uses the CPU, which would then be proved instead of the provider.
    how = {"providers": provider.onnxruntime, "enable_fallback": 0}
    return load_onnxruntime().InferenceSession(source, options, **how, **more)


def _raise_if_out_of_memory(error: Exception) -> None:
    """onnxruntime reports a lack of memory like a rejection."""
    if _OUT_OF_MEMORY.search(str(error)):
        raise MemoryError(one_line(error, 160)) from error


def _nodes_on_cpu(session: Any) -> tuple[str, ...] | None:
    try:
        assignments = session.get_provider_graph_assignment_info()
    except Exception:  # noqa: BLE001 - older versions of onnxruntime do not report it
        return None
    on_cpu = (each for each in assignments if each.ep_name == "CPUExecutionProvider")
    return tuple(f"{node.op_type} '{node.name}'" for each in on_cpu for node in each.get_nodes())


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
    bits = ctypes.string_at(value.data_ptr(), 2 * math.prod(value.shape()))
    return np.frombuffer(bits, ml_dtypes.bfloat16).reshape(value.shape())


# -- what onnxruntime makes of a model ---------------------------------------------------------------------------------

LEVELS = ("basic", "extended", "all")
_ACTED = re.compile(rb"GraphTransformer (\w+) modified: 1 ")
RULES = {  # of rule-based optimisers, whose names are not logged
    "Level1_RuleBasedTransformer": (
        "EliminateIdentity", "EliminateSlice", "UnsqueezeElimination", "EliminateDropout", "ExpandElimination",
        "CastElimination", "CastChainElimination", "PreShapeNodeElimination", "NoopElimination", "DivMulFusion",
        "FuseReluClip", "GemmSumFusion", "GemmTransposeFusion", "NotWhereFusion", "ConvAddFusion", "ConvMulFusion",
        "ConvBNFusion", "Pad_Fusion", "MatMul_BatchNormalization_Fusion", "LabelEncoderFusion",
    ),
    "Level2_RuleBasedTransformer": ("ClipQuantRewrite", "ReluQuantRewrite", "GemmTransposeFusion"),
}  # fmt: skip


def write_optimised(
    model: LoadedModel, level: str, folder: Path, disabled: Sequence[str] = (), *, logs: bool = False
) -> Path:
    """Write what onnxruntime makes of a model, its weights beside it. Raises ValidationError if it does not load."""
    path, ort = folder / "optimised.onnx", load_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 0 if logs else 4
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", f"{path.name}.data")
    try:
        source = model.proto if model.path is None else model.path
        _started(source, options, PROVIDERS[0], model.base_dir, disabled_optimizers=[*disabled])
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ValidationError(f"onnxruntime could not load the model at level {level}: {one_line(error)}") from error
    return path


def optimisers(model: LoadedModel, level: str) -> list[str]:
    """The optimisers that change a model at a level; a rule-based one comes after its rules."""
    with TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with quiet_stderr(log):
            write_optimised(model, level, Path(folder), logs=True)
        names = dict.fromkeys(name.decode() for name in _ACTED.findall(log.read_bytes()))
    return list(dict.fromkeys(part for name in names for part in (*RULES.get(name, ()), name)))

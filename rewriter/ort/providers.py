"""Parse execution providers of onnxruntime, such as `cuda:device_id=1`, and test which ones work.

A provider that onnxruntime was built with may still fail to start (no driver, no cuDNN), and onnxruntime then silently
runs on the CPU. Availability is therefore tested, once, with a model of one node.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from rewriter.errors import ProviderError, UsageError
from rewriter.text import one_line


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
    reason = _obstacle(provider)
    if reason is not None:
        raise ProviderError(f"execution provider '{provider.text}' is not available: {reason}")
    return provider


@functools.cache
def load_onnxruntime() -> Any:
    """Import onnxruntime and silence its log. Raises ProviderError, or MemoryError if its libraries do not fit."""
    try:
        with quiet_stderr():  # the import itself may log devices, before the severity can be set
            import onnxruntime
    except ImportError as error:
        reason = one_line(error, 160)
        if any(sign in reason for sign in ("map segment", "allocate memory", "bad_alloc")):
            raise MemoryError(reason) from error
        raise ProviderError(
            f"onnxruntime cannot be imported ({reason}); pip install --force-reinstall onnxruntime"
        ) from error
    onnxruntime.set_default_logger_severity(4)
    return onnxruntime


@functools.cache
def _obstacle(provider: Provider) -> str | None:
    if provider.name == "cpu":
        return None
    ort = load_onnxruntime()
    if provider.kernel_set not in ort.get_available_providers():
        return (
            f"this onnxruntime has no {provider.kernel_set}; install it with "
            f"'pip uninstall onnxruntime' and 'pip install {provider.package}'"
        )
    options, text = ort.SessionOptions(), '<ir_version: 8, opset_import: ["": 17]> g'
    options.log_severity_level = 4
    model = onnx.parser.parse_model(f"{text} (float[2, 2] x) => (float[2, 2] y) {{ y = MatMul(x, x) }}")
    with contextlib.redirect_stdout(io.StringIO()), quiet_stderr():
        if hasattr(ort, "preload_dlls"):
            ort.preload_dlls()  # finds the CUDA libraries of pip packages
        how: dict[str, Any] = {"providers": provider.onnxruntime, "enable_fallback": 0}
        try:
            session = ort.InferenceSession(model.SerializeToString(), options, **how)
            if provider.kernel_set in session.get_providers():
                session.run(None, {"x": np.ones((2, 2), np.float32)})
                return None
            reason = "onnxruntime fell back to the CPU"
        except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions share no base class
            reason = one_line(error, 160)
    return f"{provider.package} is installed but does not start ({reason}); it needs {provider.needs}"


@contextlib.contextmanager
def quiet_stderr(log: str | os.PathLike[str] = os.devnull) -> Iterator[None]:
    """Write standard error to a new file or nowhere, also that of C++ code, which bypasses `sys.stderr`."""
    sys.stderr.flush()
    with open(log, "wb") as file:  # noqa: PTH123 - devnull is a text
        try:
            saved = os.dup(2)
        except OSError:  # standard error is closed: nothing to keep quiet
            yield
            return
        try:
            os.dup2(file.fileno(), 2)
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)

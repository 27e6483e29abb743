"""Which execution providers of onnxruntime really work here.

Comes in: what a user writes, `cpu`, `cuda` or `cuda:device_id=1`. Goes out: `Provider` with what onnxruntime wants to
be told, or a ProviderError that says what to install. Used by `rewriter.ort.sessions` and the command line. The text
names a provider everywhere else, so that settings and reports stay plain.

A provider that is built in may still not start (no driver, no cuDNN); onnxruntime then runs on the CPU
without a word. So availability is tried out, once, on a model of one node.
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
    """One execution provider.

    Attributes:
        name: what users write.
        kernel_set: onnxruntime's name for it.
        settings: its options.
        package: the package that brings it.
        text: name and options as the user wrote them.
    """

    name: str
    kernel_set: str
    settings: tuple[tuple[str, str], ...] = ()
    package: str = "onnxruntime"
    text: str = ""

    @property
    def onnxruntime(self) -> list[tuple[str, dict[str, str]]]:
        """The `providers` argument of an InferenceSession."""
        return [(self.kernel_set, dict(self.settings))]


PROVIDERS = (
    Provider("cpu", "CPUExecutionProvider", text="cpu"),
    # TF32 keeps 10 bits of mantissa in matrix products: no proof could be carried out with it.
    Provider("cuda", "CUDAExecutionProvider", (("use_tf32", "0"),), "onnxruntime-gpu", "cuda"),
)

_NUMBER, _SWITCH = r"\d+", r"[01]"
_OPTIONS: dict[str, dict[str, str]] = {
    "cpu": {},
    "cuda": {
        "device_id": _NUMBER,
        "use_tf32": _SWITCH,
        "gpu_mem_limit": _NUMBER,
        "arena_extend_strategy": "kNextPowerOfTwo|kSameAsRequested",
        "cudnn_conv_algo_search": "EXHAUSTIVE|HEURISTIC|DEFAULT",
        "cudnn_conv_use_max_workspace": _SWITCH,
        "cudnn_conv1d_pad_to_nc1d": _SWITCH,
        "do_copy_in_default_stream": _SWITCH,
        "enable_skip_layer_norm_strict_mode": _SWITCH,
        "fuse_conv_bias": _SWITCH,
        "prefer_nhwc": _SWITCH,
        "sdpa_kernel": _NUMBER,
    },
}
"""Provider to its options, each with a pattern of its values. Those that need more than a word are left out."""


def parse_provider(text: str) -> Provider:
    """The provider that `NAME` or `NAME:KEY=VALUE,...` describes; whether it works is not asked.

    Raises:
        ProviderError: there is none of that name.
        UsageError: an option that it does not have, or a value that the option does not take.
    """
    name, colon, rest = text.partition(":")
    known = next((provider for provider in PROVIDERS if provider.name == name), None)
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
        given[key] = _checked_option(name, key, value)
    spelled = ",".join(f"{key}={value}" for key, value in given.items())
    settings = {**dict(known.settings), **given}
    return replace(known, settings=tuple(settings.items()), text=f"{name}:{spelled}" if given else name)


def _checked_option(name: str, key: str, value: str) -> str:
    options = _OPTIONS[name]
    if key not in options:
        listed = f"it has {', '.join(sorted(options))}" if options else "it has none"
        raise UsageError(f"execution provider {name} has no option '{one_line(key)}'; {listed}")
    if not re.fullmatch(options[key], value, re.ASCII):
        wanted = {_NUMBER: "a whole number", _SWITCH: "0 or 1"}.get(options[key], options[key].replace("|", " or "))
        raise UsageError(f"option {key} of {name} is {wanted}, not '{one_line(value)}'")
    return value


def chosen_providers(texts: Sequence[str]) -> tuple[str, ...]:
    """The texts of the providers to use, each once; all that work where none is named.

    Raises:
        ProviderError: a provider is unknown or does not start.
        UsageError: an option is wrong.
    """
    chosen = dict.fromkeys(require_provider(text).text for text in texts)
    return tuple(chosen) or available_providers()


def available_providers() -> tuple[str, ...]:
    """Names of the providers that a session really starts on; `cpu` always."""
    return tuple(provider.name for provider in PROVIDERS if _obstacle(provider) is None)


def require_provider(text: str) -> Provider:
    """The provider that `text` describes, known to work.

    Raises:
        ProviderError: there is none, or no session starts on it; the message says what to install.
        UsageError: an option is wrong.
    """
    provider = parse_provider(text)
    obstacle = _obstacle(provider)
    if obstacle is not None:
        raise ProviderError(f"execution provider '{provider.text}' is not available: {obstacle}")
    return provider


@functools.cache
def load_onnxruntime() -> Any:
    """The onnxruntime module, told to be quiet."""
    with _quiet_stderr():  # while it is imported it may report on devices, before it can be told not to
        import onnxruntime
    onnxruntime.set_default_logger_severity(4)
    return onnxruntime


@functools.cache
def _obstacle(provider: Provider) -> str | None:
    """Why no session starts on `provider`, None when one does."""
    if provider.name == "cpu":
        return None
    ort = load_onnxruntime()
    if provider.kernel_set not in ort.get_available_providers():
        return (
            f"this onnxruntime has no {provider.kernel_set}; install it with "
            f"'pip uninstall onnxruntime' and 'pip install {provider.package}'"
        )
    with contextlib.redirect_stdout(io.StringIO()), _quiet_stderr():
        reason = _start(ort, provider)
    if reason is None:
        return None
    return (
        f"{provider.package} is installed but does not start ({reason}); it needs an NVIDIA driver, CUDA and "
        f"cuDNN: 'pip install {provider.package}[cuda,cudnn]'"
    )


def _start(ort: Any, provider: Provider) -> str | None:
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # finds the CUDA libraries of pip packages
    options = ort.SessionOptions()
    options.log_severity_level = 4
    x = np.ones((2, 2), np.float32)
    try:
        session = ort.InferenceSession(_tiny_model(), options, providers=provider.onnxruntime, enable_fallback=0)
        if provider.kernel_set not in session.get_providers():
            return "onnxruntime fell back to the CPU"
        session.run(None, {"x": x})
    except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions share no base class
        return one_line(error, 160)
    return None


def _tiny_model() -> bytes:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 2])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 2])
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["x", "x"], ["y"])], "tiny", [x], [y])
    opset = onnx.helper.make_opsetid("", 17)
    data: bytes = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()
    return data


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Send the process's standard error, C++ code included, to nowhere for a moment."""
    sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # standard error is closed: nothing to keep quiet
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)

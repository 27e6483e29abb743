"""The environment of a result: versions, processor, operating system.

There are no host names, user names or paths in it, because reports are shared.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rewriter.text import clean

_PACKAGES = ("attnonly", "onnx", "onnxruntime", "onnx-graphsurgeon", "numpy")
_VARIANTS = {"onnxruntime": ("onnxruntime-gpu", "onnxruntime-openvino")}
"""Packages that take the place of another."""

_CPUINFO = Path("/proc/cpuinfo")


def environment() -> dict[str, str]:
    """Maps labels to values, such as `onnxruntime` to `1.22.0`, in a fixed order."""
    return {
        **{name: _version(name) for name in _PACKAGES},
        "Python": platform.python_version(),
        "operating system": f"{platform.system()} {platform.machine()}".strip(),
        "processor": _processor(),
        "logical cores": str(os.cpu_count() or "unknown"),
    }


@cache
def _version(name: str) -> str:
    for package in (name, *_VARIANTS.get(name, ())):
        with suppress(PackageNotFoundError):
            return version(package) if package == name else f"{version(package)} ({package})"
    return "unknown"  # such as a checkout on PYTHONPATH that is not installed


@cache
def _processor() -> str:
    """The processor's name, from /proc/cpuinfo on Linux and from `platform.processor` elsewhere."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return clean(next(named, "") or platform.processor() or platform.machine() or "unknown")

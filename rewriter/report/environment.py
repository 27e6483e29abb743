"""What a result was made with: versions, processor, operating system.

Comes in: this machine. Goes out: labels and values for people, in a fixed order. No host names, no user names, no
paths: reports are passed on.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rewriter.text import clean

_PACKAGES = ("attnonly", "onnx", "onnxruntime", "onnx-graphsurgeon", "numpy")
_CPUINFO = Path("/proc/cpuinfo")


def environment() -> dict[str, str]:
    """Label to value, for example `onnxruntime` to `1.22.0`."""
    return {
        **{name: _version(name) for name in _PACKAGES},
        "Python": platform.python_version(),
        "operating system": f"{platform.system()} {platform.machine()}".strip(),
        "processor": _processor(),
        "logical cores": str(os.cpu_count() or "unknown"),
    }


@cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"  # for example a checkout on PYTHONPATH that was not installed


@cache
def _processor() -> str:
    """The processor's name: Linux has it in /proc/cpuinfo, other systems answer `platform.processor`."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return clean(next(named, "") or platform.processor() or platform.machine() or "unknown")

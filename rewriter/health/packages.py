"""Which packages are installed, whether they are new enough, and whether several claim to be onnxruntime."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version

from rewriter.health.findings import Problem

ONNXRUNTIMES = (
    "onnxruntime",
    *(
        f"onnxruntime-{kind}"
        for kind in ("gpu", "openvino", "directml", "webgpu", "qnn", "rocm", "migraphx", "training")
    ),
)
"""Packages that all install the same folder, `onnxruntime`."""

_ALSO = ("onnx", "onnxruntime", "onnx-graphsurgeon", "numpy", "click", "rich")
_REQUIREMENT = re.compile(r"([\w.-]+)\s*>=\s*([\d.]+)$")
_OWN = "attnonly"


def installed(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def packages() -> dict[str, str]:
    """Python, this package and what it requires, with versions; empty where a package is missing."""
    found = {name: installed(name) or "" for name in (_OWN, *_ALSO)}
    found[_OWN] = found[_OWN] or "a checkout, not installed"
    found["onnxruntime"] = found["onnxruntime"] or next(iter(onnxruntimes().values()), "")
    return {"Python": platform.python_version(), **found}


def onnxruntimes() -> dict[str, str]:
    """The installed packages that provide onnxruntime, with versions."""
    return {name: found for name in ONNXRUNTIMES if (found := installed(name)) is not None}


def package_problems(found: Mapping[str, str], runtimes: Mapping[str, str]) -> Iterator[Problem]:
    """Missing and outdated packages, and several onnxruntimes in one environment."""
    for name, least in _least().items():
        have = found.get(name, "")
        if not have:
            yield Problem(f"the package {name} is missing", f"pip install '{name}>={least}'")
        elif _number(have) < _number(least):
            package = next(iter(runtimes), name) if name == "onnxruntime" else name
            yield Problem(f"{package} {have} is older than {least}", f"pip install -U '{package}>={least}'")
    if len(runtimes) > 1:
        keep = next((name for name in runtimes if name != "onnxruntime"), "onnxruntime")
        names = " ".join(runtimes)
        yield Problem(
            f"{' and '.join(runtimes)} are installed at once and overwrite each other's files",
            f"keep one: pip uninstall -y {names} && pip install {keep}",
        )


def _least() -> dict[str, str]:
    """Required packages with their lowest versions; empty for a checkout that is not installed."""
    try:
        lines = requires(_OWN) or []
    except PackageNotFoundError:
        return dict.fromkeys(_ALSO, "0")
    matches = (_REQUIREMENT.match(line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


def _number(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, such as (1, 22, 0); a release candidate counts as its release."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", text, maxsplit=1)[0]))

"""The virtual environments of the tools: one each, since they pin different versions of the same packages."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.common import ROOT

_TORCH = "torch==2.13.0"
_RUNTIME = ("onnx==1.23.2", "onnxruntime==1.32.0")

PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "rewrite": ((str(ROOT),),),
    "polygraphy": (("polygraphy==0.53.6", "onnx-graphsurgeon==0.6.1", *_RUNTIME),),
    "onnxsim": (("onnxsim==0.8.1", *_RUNTIME),),
    "onnxslim": (("onnxslim==0.1.98", *_RUNTIME),),
    "onnxruntime": (("psutil", "coloredlogs", "sympy", *_RUNTIME),),
    "optimum": ((_TORCH,), (_TORCH, "optimum==2.1.0", "optimum-onnx==0.1.0", *_RUNTIME)),
    "olive": ((_TORCH,), (_TORCH, "olive-ai==0.13.0", "transformers==5.23.0", "requests", "onnxscript", *_RUNTIME)),
}
"""Environment to what is installed, one call of pip after the other."""

_RUNTIME_NAMES = ("onnx", "onnxruntime")
_SHOWN = ("polygraphy", "onnxsim", "onnxslim", "onnxruntime", "optimum", "optimum-onnx", "olive-ai", "onnx", "torch")


def make(folder: Path) -> None:
    """Make the environments that `folder` lacks. Raises `subprocess.CalledProcessError` if pip fails."""
    for name, calls in PACKAGES.items():
        place = folder / name
        if place.exists():
            continue
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        for packages in calls:
            subprocess.run([str(place / "bin" / "python"), "-m", "pip", "install", "-q", *packages], check=True)


def found(folder: Path) -> dict[str, Path]:
    """The folder of programs of each environment that is there."""
    return {name: folder / name / "bin" for name in PACKAGES if (folder / name / "bin" / "python").exists()}


def versions(environments: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """The versions of the packages that matter, by environment."""
    code = (
        "import json, sys; from importlib.metadata import distributions; "
        "print(json.dumps({d.name.lower(): d.version for d in distributions() if d.name.lower() in sys.argv[1:]}))"
    )
    made = {}
    for name, programs in environments.items():
        asked = {re.split("[=/]", package)[0] for call in PACKAGES[name] for package in call} & set(_SHOWN)
        command = [str(programs / "python"), "-c", code, *sorted(asked or _RUNTIME_NAMES)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
        listed = json.loads(done.stdout)
        made[name] = {package: listed[package] for package in sorted(listed)}
    return made

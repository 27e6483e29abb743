"""How tools that write a model behave: bad files, a full disk, a file in the way; their time and memory."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from benchmarks.tools.judges import HERE, workflow
from benchmarks.tools.running import Run, run

_SECRET = b"\x00\x00\x80\x3f"
_DISK = 100_000
"""Bytes after which a write fails: less than half of the model."""


@dataclass(frozen=True)
class Tool:
    """A tool that reads one model and writes another.

    Attributes:
        title: name in the table.
        environment: key of its environment.
        command: from the model, the file to write and a folder for anything else to a command.
        out: the file that it writes, from the file that it was asked to write.
    """

    title: str
    environment: str
    command: Callable[[Path, Path, Path], list[str]]
    out: Callable[[Path], Path] = lambda out: out


def _polygraphy(model: Path, out: Path, _: Path) -> list[str]:
    external = ["--save-external-data"] if model.with_name("model.data").exists() else []
    return ["polygraphy", "surgeon", "sanitize", str(model), "--fold-constants", "-o", str(out), *external]


def _onnxslim(model: Path, out: Path, _: Path) -> list[str]:
    external = ["--save-as-external-data"] if model.with_name("model.data").exists() else []
    return ["onnxslim", str(model), str(out), *external]


def _ort_optimizer(model: Path, out: Path, _: Path) -> list[str]:
    files = ["--input", str(model), "--output", str(out)]
    external = ["--use_external_data_format"] if model.with_name("model.data").exists() else []
    return ["python", "-m", "onnxruntime.transformers.optimizer", *files, *external]


def _optimum(model: Path, out: Path, folder: Path) -> list[str]:
    source = folder / "source"
    shutil.copytree(model.parent, source, symlinks=True)
    (source / model.name).rename(source / "model.onnx")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128}
    (source / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}), encoding="utf-8")
    return ["optimum-cli", "onnxruntime", "optimize", "--onnx_model", str(source), "-O2", "-o", str(out.parent)]


def _olive(model: Path, out: Path, folder: Path) -> list[str]:
    path = workflow(folder, model, {"type": "OnnxPeepholeOptimizer"})
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, "output_dir": str(out.parent)}), encoding="utf-8")
    return ["olive", "run", "--config", str(path)]


TOOLS: dict[str, Tool] = {
    "rewrite": Tool("rewrite", "rewrite", lambda model, out, _: ["rewrite", str(model), "-o", str(out)]),
    "polygraphy": Tool(
        "Polygraphy, surgeon sanitize",
        "polygraphy",
        _polygraphy,
    ),
    "onnxsim": Tool("onnxsim", "onnxsim", lambda model, out, _: ["onnxsim", str(model), str(out)]),
    "onnxslim": Tool("onnxslim", "onnxslim", _onnxslim),
    "ort-offline": Tool(
        "onnxruntime, ORT_ENABLE_ALL offline",
        "onnxruntime",
        lambda model, out, _: ["python", str(HERE / "ort_offline.py"), str(model), str(out)],
    ),
    "ort-optimizer": Tool("onnxruntime, transformer optimiser", "onnxruntime", _ort_optimizer),
    "optimum": Tool(
        "optimum-cli onnxruntime optimize", "optimum", _optimum, lambda out: out.with_name("model_optimized.onnx")
    ),
    "olive": Tool("Olive, OnnxPeepholeOptimizer", "olive", _olive, lambda out: out.with_name("model.onnx")),
}


@dataclass(frozen=True)
class Place:
    """A separate folder for one run: the model, the file to write, and a folder for anything else."""

    root: Path
    model: Path

    @property
    def out(self) -> Path:
        """The file that the tool should write."""
        return self.root / "out" / "out.onnx"


def cleanly(place: Place) -> None:
    """The unchanged model."""


def truncated(place: Place) -> None:
    """The first half of the file."""
    content = place.model.read_bytes()
    place.model.write_bytes(content[: len(content) // 2])


def above(place: Place) -> None:
    """External data in `../secret`, outside the model's folder."""
    _external(place.model, "../secret", place.root / "secret")


def linked(place: Place) -> None:
    """External data in a link to a file outside the model's folder."""
    _external(place.model, "weights.bin", place.root / "secret")
    (place.model.parent / "weights.bin").symlink_to(place.root / "secret")


def short(place: Place) -> None:
    """External data in a file that is shorter than the weights."""
    _external(place.model, "weights.bin", place.model.parent / "weights.bin")
    (place.model.parent / "weights.bin").write_bytes(_SECRET * 100)


def taken(place: Place) -> None:
    """The file to write is there, and somebody's."""


def full(place: Place) -> None:
    """The disk is full after 100 kB of any file."""


SITUATIONS: dict[str, Callable[[Place], None]] = {
    each.__name__: each for each in (cleanly, truncated, above, linked, short, taken, full)
}


def _external(path: Path, location: str, data: Path) -> None:
    """Move one weight, the first one of two dimensions, into a data file full of ones."""
    model = onnx.load(path)
    tensor = next(each for each in model.graph.initializer if len(each.dims) == 2)
    size = len(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "0", "length": str(size)}.items():
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    data.write_bytes(_SECRET * (size // len(_SECRET)))


def try_out(tool: Tool, environments: Mapping[str, Path], model: Path, situation: str, root: Path) -> dict[str, Any]:
    """Run a tool in one situation.

    Returns:
        status, traceback, last_line; file: none, whole, broken or, where one was in the way, kept or replaced;
        cpu_seconds and peak_mb.
    """
    place = Place(root, root / "in" / "original.onnx")
    for folder in ("in", "out", "other"):
        (root / folder).mkdir()
    shutil.copy(model, place.model)
    SITUATIONS[situation](place)
    out = tool.out(place.out)
    if situation == "taken":
        out.write_bytes(b"mine")
    program, *arguments = tool.command(place.model, place.out, root / "other")
    limit = _DISK if situation == "full" else None
    done = run([str(environments[tool.environment] / program), *arguments], root, largest_file=limit)
    return {**shown(done), "file": _left(out)}


def shown(done: Run) -> dict[str, Any]:
    """A run as data."""
    return {
        "status": done.status,
        "traceback": done.traceback,
        "lines": len(done.output.splitlines()),
        "last_line": done.last_line[:200],
        "cpu_seconds": round(done.cpu_seconds, 2),
        "peak_mb": round(done.peak_mb),
    }


def _left(out: Path) -> str:
    if not out.exists():
        return "none"
    if out.read_bytes() == b"mine":
        return "kept"
    try:
        onnx.checker.check_model(onnx.load(out, load_external_data=False))
    except Exception:  # noqa: BLE001 - not a model, for any reason
        return "broken"
    return "whole"

"""Shared by the benchmarks: interleaved timing, the environment, results as JSON, tables.

Times on a shared machine drift, so nothing is compared across runs. Models are timed in separate processes
(`benchmarks.timing`); `interleaved` is for other tasks.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import onnx

from benchmarks.timing import Feeds, rounds
from rewriter.errors import ProviderError
from rewriter.inputs.cases import Maker
from rewriter.ort import require_provider

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("attnonly", "onnx", "onnxruntime", "onnxruntime-gpu", "onnx-graphsurgeon", "numpy")


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each candidate in each of `repeats` rounds, one run per candidate and round.

    Not for sessions of onnxruntime whose threads spin: they would disturb each other (docs/decisions/0023).
    """
    for _ in range(warmup):
        for run in candidates.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for order in rounds(tuple(candidates), repeats):
        for name in order:
            start = clock()
            candidates[name]()
            seconds[name].append(clock() - start)
    return seconds


def feeds_of(model: onnx.ModelProto, tokens: int, past: int = 0) -> Feeds:
    """Generated inputs of a number of tokens."""
    return Maker(model).case((1, tokens, past)).feeds


def environment() -> dict[str, Any]:
    """What the numbers depend on: date, CPU model and cores, versions; nothing that identifies the machine."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: found for package in _PACKAGES if (found := _version(package))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def demand(provider: str, benchmark: str) -> None:
    """End with one line and status 2 where onnxruntime does not have the provider."""
    try:
        require_provider(provider)
    except ProviderError as error:
        click.echo(f"{benchmark}: {error}", err=True)
        raise SystemExit(2) from error


def gpu_name(provider: str) -> str:
    """What computes: the GPU's name, from its driver, or `cpu`."""
    if provider == "cpu":
        return "cpu"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def write_json(path: Path, benchmark: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one benchmark's numbers, and create the directory if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": benchmark, "environment": environment(), "settings": settings, "rows": rows}
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in plain text, with the first column aligned left and numbers aligned right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    click.echo(f"\n{title}")
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())

"""Shared by the benchmarks: interleaved timing and its statistics, the environment, results as JSON, tables.

Timings on a shared machine drift, so nothing is compared across runs: every round runs every candidate once, and the
order goes through all permutations, so that no candidate always follows the same other one. Ratios are taken within a
round as well as between medians. One candidate is a second copy of the baseline, whose ratio is the noise.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle, permutations
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("attnonly", "onnx", "onnxruntime", "onnxruntime-gpu", "onnx-graphsurgeon", "numpy")


@dataclass(frozen=True)
class Ratio:
    """One candidate over the baseline.

    Attributes:
        of_medians: median time over the baseline's median time.
        paired: median over the rounds of the ratio within the round.
        low: lower quartile of these ratios.
        high: upper quartile.
        of_fastest: fastest time over the baseline's fastest, which excludes disturbances that only add time.
    """

    of_medians: float
    paired: float
    low: float
    high: float
    of_fastest: float

    def __str__(self) -> str:
        return f"{self.of_medians:.3f} ({self.paired:.3f}, {self.low:.3f} to {self.high:.3f})"


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each candidate in each of `repeats` rounds, one run per candidate and round."""
    for _ in range(warmup):
        for run in candidates.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for order, _ in zip(cycle(_balanced(tuple(candidates))), range(repeats), strict=False):
        for name in order:
            start = time.perf_counter()
            candidates[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _balanced(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """All orders, each followed by its reverse, so that even a few rounds are balanced: ABC CBA ACB BCA ..."""
    forward = [order for order in permutations(names) if order <= order[::-1]]
    return [order for pair in ((one, one[::-1]) for one in forward) for order in pair]


def ratio(candidate: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Statistics of a candidate's times relative to the baseline's, round by round."""
    low, middle, high = np.percentile(np.divide(candidate, baseline), [25, 50, 75])
    return Ratio(
        of_medians=float(np.median(candidate) / np.median(baseline)),
        paired=float(middle),
        low=float(low),
        high=float(high),
        of_fastest=min(candidate) / min(baseline),
    )


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

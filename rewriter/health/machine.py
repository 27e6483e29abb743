"""Memory and disk of this machine, and what a model needs of both."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rewriter.estimate.formula import Estimate
from rewriter.files.load import LoadedModel
from rewriter.health.findings import Machine, ModelNeeds, Problem
from rewriter.proof.settings import LARGE

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def machine_at(folder: Path) -> Machine:
    """Memory, and the disk of a folder."""
    memory, available = _memory()
    try:
        disk: int | None = shutil.disk_usage(folder).free
    except OSError:
        disk = None
    return Machine(memory, available, disk, str(folder), os.access(folder, os.W_OK | os.X_OK))


def _memory() -> tuple[int | None, int | None]:
    """Physical and available memory, both bounded by the container's limit."""
    entries = _numbers(MEMINFO)
    total, free = (entries.get(name) for name in ("MemTotal", "MemAvailable"))
    limit, used = (_number(CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and (total is None or limit < total):
        total = limit
        free = min(each for each in (free, limit - (used or 0)) if each is not None)
    return total, None if free is None else max(free, 0)


def _numbers(path: Path) -> dict[str, int]:
    """The entries of /proc/meminfo in bytes."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    parts = [line.replace(":", "").split() for line in lines]
    return {part[0]: int(part[1]) * 1024 for part in parts if len(part) == 3 and part[1].isdigit()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def needs_of(model: LoadedModel, path: Path, estimate: Estimate | None) -> ModelNeeds:
    """What rewriting a model and proving it needs; `estimate` is None where there is nothing to convert."""
    by_blocks = model.size > LARGE
    memory = None if estimate is None else estimate.memory_bytes
    return ModelNeeds(str(path), model.size, by_blocks, memory, model.file_size, estimate)


def machine_problems(machine: Machine, model: ModelNeeds | None) -> Iterator[Problem]:
    """Where memory or disk will not do."""
    if model is None:
        return
    if machine.available is not None and model.memory is not None and machine.available < model.memory:
        advice = "close other programs or take a larger machine" if model.by_blocks else "use --option proof=blocks"
        yield Problem(
            f"the proof of this model takes about {_gigabytes(model.memory)} of memory, and "
            f"{_gigabytes(machine.available)} are available",
            advice,
        )
    if machine.disk is not None and machine.disk < model.disk:
        yield Problem(
            f"a result beside the model takes {_gigabytes(model.disk)}, and {_gigabytes(machine.disk)} are free",
            "free some space, or give -o a path on another disk",
        )
    if not machine.writable:
        yield Problem("the model's folder is not writable", "give -o a path in another folder")


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB"
